"""Replies of search servers: the forms of Search-R1's servers and of others are read right, or the field is named."""

import json

import pytest
from refusals import faults

from zeroplay_jax.retrieval import json_text
from zeroplay_jax.retrieval.client import Client, Http

WIRE = '"Lomi"\nLomi is a city.'


def client_of(fake, row):
    """Returns a client of a server that answers one query with this row, as often as it is asked."""
    body = row if isinstance(row, bytes) else json.dumps({'result': [row]}).encode()
    fake.script = [(200, body)] * 4
    return Client(Http(fake.url, pause=0.001, timeout=10.0, retries=0))


READ = {
    'Search-R1, local': {'document': {'id': '7', 'contents': WIRE}, 'score': 0.5},
    'Search-R1, local, without scores': {'id': '7', 'contents': WIRE},
    'Search-R1, online: no id, no score': {'document': {'contents': WIRE}},
    'a score that is null': {'document': {'id': '7', 'contents': WIRE}, 'score': None},
    'a title beside contents': {'document': {'title': 'Lomi', 'contents': 'Lomi is a city.'}},
    'a title beside contents that have it, too': {'document': {'title': 'Lomi', 'contents': WIRE}},
    'a title repeated without quotes': {'title': 'Lomi', 'contents': 'Lomi\nLomi is a city.'},
    'an empty title beside contents': {'document': {'title': '', 'contents': WIRE}},
    'title and text, id a number': {'document': {'id': 7, 'title': 'Lomi', 'text': WIRE[7:]}},
    'content, as RAGFlow': {'docid': '7', 'title': 'Lomi', 'content': WIRE[7:], 'score': '0.5'},
    'body': {'id': '7', 'title': 'Lomi', 'body': WIRE[7:]},
    'a document that is a text': {'document': WIRE, 'score': 0.5},
    'a text alone': WIRE,
    'a document that is a JSON text': {'document': json.dumps({'id': '7', 'body': WIRE})},
    'a reference beside a text': {'document': 'D7', 'title': 'Lomi', 'text': WIRE[7:]},
    'an empty field before the one in use': {'contents': '', 'title': 'Lomi', 'text': WIRE[7:]},
    'LangChain': {'page_content': WIRE[7:], 'metadata': {'id': '7', 'title': 'Lomi'}},
    'id and title beside the document': {
        'id': '7',
        'title': 'Lomi',
        'document': {'contents': 'Lomi is a city.'},
    },
}
# Forms of READ without an id.
WITHOUT_ID = (
    'Search-R1, online: no id, no score',
    'a title beside contents',
    'a title beside contents that have it, too',
    'a title repeated without quotes',
    'an empty title beside contents',
    'a document that is a text',
    'a text alone',
    'a reference beside a text',
    'an empty field before the one in use',
)


@pytest.mark.parametrize('name', faults('third-8', READ))
def test_a_passage_of_a_search_server_is_read(fake, name, user_reads):
    (passage,) = client_of(fake, [READ[name]]).retrieve(['q'], 3)[0]
    assert (passage['title'], passage['text']) == ('Lomi', 'Lomi is a city.')
    assert (passage['id'] == '7') != (name in WITHOUT_ID)
    assert passage['id'] and isinstance(passage['score'], float)
    user_reads(f'right: title {passage["title"]!r}, text {passage["text"]!r}')


REFUSED = {
    'no text': ({'document': {'id': '7', 'url': 'x'}}, '"document" has no "contents".*id.*url'),
    'a title alone': ({'document': {'title': 'Lomi'}}, 'has no "contents"'),
    'contents null': ({'document': {'id': '7', 'contents': None}}, 'has no "contents"'),
    'contents a list': ({'document': {'contents': ['x']}}, '"contents" is a JSON list'),
    'a document that is null': ({'document': None, 'score': 1}, 'is a JSON null'),
    'an id that is an object': (
        {'document': {'id': {}, 'contents': WIRE}},
        '"id" is a JSON object',
    ),
    'a score that is no number': ({'contents': WIRE, 'score': 'high'}, '"score" is a JSON text'),
    'a score NaN as a text': ({'contents': WIRE, 'score': 'NaN'}, '"score" is nan'),
}


@pytest.mark.parametrize('name', faults('F4', REFUSED))
def test_the_field_that_cannot_be_used_is_named(fake, name, user_meets):
    item, reason = REFUSED[name]
    client = client_of(fake, [item])
    assert client.retrieve(['q'], 1) == [None]
    with user_meets(f'not of the protocol .*passage 1.*{reason}'):
        client.check_failure_rate()


ROWS = {
    'an empty object': (b'{"result": [{}]}', 'the result of a query is a JSON object, not a list'),
    'null': (b'{"result": [null]}', 'result of a query is a JSON null'),
    'a flat list': (b'{"result": [{"contents": "x"}]}', 'is a JSON object, not a list'),
    'an error with status 200': (b'{"error": "index is loading"}', 'index is loading'),
    'another envelope': (b'{"results": [[]]}', 'no list "result"'),
    'fewer rows': (b'{"result": []}', '0 results for 1 queries'),
    'a page of HTML': (b'<html>502 Bad Gateway</html>', 'HTML.*502 Bad Gateway'),
    'a bare list': (b'[[]]', 'a JSON list, not an object'),
}


@pytest.mark.parametrize('name', faults('G', ROWS))
def test_a_row_of_another_form_is_not_an_empty_one(fake, name, user_meets):
    body, reason = ROWS[name]
    client = client_of(fake, body)
    assert client.retrieve(['q'], 1) == [None]
    with user_meets(reason):
        client.check_failure_rate()


@pytest.mark.fault('G', '50 passages for topk=3')
def test_no_more_passages_than_asked_for_are_passed_on(fake, user_reads):
    items = [{'document': {'id': str(n), 'contents': f'"T"\n{n}'}} for n in range(50)]
    passages = client_of(fake, items).retrieve(['q'], 3)[0]
    assert [passage['id'] for passage in passages] == ['0', '1', '2']
    user_reads('right: the first 3 passages')


@pytest.mark.fault('kin-ids', 'two passages without id')
def test_passages_without_ids_are_told_apart(fake, user_reads):
    items = [{'document': {'contents': text}} for text in ('one', 'two', 'one')]
    first, second, third = client_of(fake, items).retrieve(['q'], 3)[0]
    assert first['id'] == third['id'] != second['id']
    user_reads('right: ids made from the texts')


@pytest.mark.fault('kin-blank', 'passages without any text')
def test_a_passage_without_any_text_is_none(fake, user_reads):
    assert client_of(fake, [{'document': {'id': '7', 'contents': ' '}}]).retrieve(['q'], 3) == [[]]
    user_reads('right: no passage')


def test_a_mistake_at_the_end_of_a_line_is_at_its_end():
    with pytest.raises(json_text.Unusable, match="',' delimiter at character 9$"):
        json_text.parse_object('{"a": 12\n')
