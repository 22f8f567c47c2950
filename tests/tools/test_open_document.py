"""`open`: pages by id or title, one after another within a rollout."""

import pytest

from zeroplay_jax.tools.base import InvalidArguments, Invocation
from zeroplay_jax.tools.search import OpenTool

PAGES = {'7': 3, 'Long title': 2}


def library(references, pages):
    documents = []
    for reference, page in zip(references, pages, strict=True):
        is_there = reference in PAGES and page <= PAGES[reference]
        fields = dict(id='7', title='T', text=f'{reference}/{page}', page=page)
        documents.append(fields | {'pages': PAGES[reference]} if is_there else None)
    return documents


def call(tool, state, document, **page):
    (result,) = tool.run([Invocation({'document': document, **page}, state)])
    return result


def test_without_a_page_the_next_one_comes():
    tool, state = OpenTool(library), {}
    pages = [call(tool, state, '7') for _ in range(3)]
    texts = [f'T (page {page} of 3)\n7/{page}' for page in (1, 2, 3)]
    assert [page.text for page in pages] == texts
    assert pages[0].documents == (({'id': '7', 'title': 'T', 'text': '7/1', 'score': 0.0},),)
    last = call(tool, state, '7')
    assert (last.text, last.error, last.documents) == (None, 'no_such_page', ())
    assert call(tool, {}, '7').text == texts[0], 'another rollout begins at page 1'


def test_another_document_begins_at_page_one_and_so_does_the_first_again():
    tool, state = OpenTool(library), {}
    shown = ['7', '7', 'Long title', '7']
    assert [call(tool, state, name).text[-2:] for name in shown] == ['/1', '/2', '/1', '/1']


def test_a_page_by_number_and_on_from_there():
    tool, state = OpenTool(library), {}
    assert call(tool, state, '7', page=2).text.endswith('7/2')
    assert call(tool, state, '7').text.endswith('7/3')
    assert call(tool, state, '7', page=4).error == 'no_such_page'
    assert call(tool, state, '7', page=1).text.endswith('7/1')


def test_an_unknown_document_moves_nothing():
    tool, state = OpenTool(library), {}
    call(tool, state, '7')
    before = dict(state)
    assert call(tool, state, 'gone').error == 'not_found'
    assert state == before and call(tool, state, '7').text.endswith('7/2')


def test_calls_of_a_batch_are_read_together_and_apart():
    asked = []

    def counted(references, pages):
        asked.append((list(references), list(pages)))
        return library(references, pages)

    one, other = {}, {'document': '7', 'page': 2}
    calls = (('7', one), ('7', other), ('gone', {}))
    invocations = [Invocation({'document': name}, state) for name, state in calls]
    results = OpenTool(counted).run(invocations)
    assert asked == [(['7', '7', 'gone'], [1, 3, 1])]
    assert [result.error for result in results] == [None, None, 'not_found']
    assert (one['page'], other['page']) == (1, 3)


@pytest.mark.parametrize(
    ('arguments', 'code'),
    [
        ({'document': ' '}, 'not_found'),
        ({'document': ''}, 'not_found'),
        ({'document': 7}, 'invalid_arguments'),
        ({'document': '7', 'page': 0}, 'invalid_arguments'),
        ({'document': '7', 'page': True}, 'invalid_arguments'),
        ({'document': '7', 'page': 1.5}, 'invalid_arguments'),
        ({'document': '7', 'other': 1}, 'invalid_arguments'),
        ({'page': 1}, 'invalid_arguments'),
        ([], 'invalid_arguments'),
    ],
)
def test_arguments_that_do_not_fit(arguments, code):
    tool = OpenTool(library)
    assert tool.validated({'document': ' 7 '}) == {'document': '7'}
    with pytest.raises(InvalidArguments) as caught:
        tool.validated(arguments)
    assert caught.value.code == code


def test_error_texts():
    tool = OpenTool(library)
    assert tool.error_text('not_found').startswith('There is no such document.')
    assert tool.error_text('no_such_page') == 'The document has no further page.'
