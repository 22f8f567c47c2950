"""The tool interface: schemas, error texts, what a tag's text fills; `open` and its pages."""

import pathlib

from refused_calls import check_table

from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.tools.base import (
    ERROR_TEXTS,
    InvalidArguments,
    Invocation,
    Tool,
)
from zeroplay_jax.tools.search import OpenTool, SearchTool


class Weather(Tool):
    name = 'weather'
    description = 'the weather of a place'
    parameters = {
        'type': 'object',
        'properties': {
            'place': {'type': 'string', 'minLength': 1},
            'days': {'type': 'integer', 'minimum': 1},
            'units': {'enum': ['C', 'F']},
        },
        'required': ['place', 'days'],
        'additionalProperties': False,
    }
    errors = {'timeout': 'Too late, {tool}.', 'storm': 'A storm: {detail}.'}

    def run(self, calls):
        return []


def validated(tool, arguments):
    """The arguments as a tool takes them, or the code and the reason of their refusal."""
    try:
        return tool.validated(arguments)
    except InvalidArguments as error:
        return f'{error.code}: {error.detail}'.rstrip(': ')


PAGES = {'7': 3, 'Long title': 2}


def library(references, pages):
    documents = []
    for reference, page in zip(references, pages, strict=True):
        is_there = reference in PAGES and page <= PAGES[reference]
        fields = dict(id='7', title='T', text=f'{reference}/{page}', page=page)
        documents.append(fields | {'pages': PAGES[reference]} if is_there else None)
    return documents


def opened(*calls):
    """What calls of one rollout show: names of documents, or such and pages."""
    tool, state, shown = OpenTool(library), {}, []
    for call in calls:
        document, *page = (call,) if isinstance(call, str) else call
        arguments = {'document': document} | dict(zip(['page'], page))
        (result,) = tool.run([Invocation(arguments, state)])
        assert bool(result.documents) == (result.error is None)
        shown.append(result.error or result.text)
    return shown


def parse(text):
    """(arguments, error, whether the text is that of the error) under the tag syntax."""
    call = syntax_of('search_r1').parse(text, {'weather': Weather()})
    return call.arguments, call.error, call.text == ERROR_TEXTS[call.error]


def test_the_table():
    tools = {'searching': SearchTool(None), 'opening': OpenTool(library), 'weather': Weather()}
    check_table(pathlib.Path(__file__).parent / 'tools.txt', globals() | tools)


def test_pages_of_a_batch_are_read_together_and_apart():
    asked = []

    def counted(references, pages):
        asked.append((list(references), list(pages)))
        return library(references, pages)

    states = [{}, {'document': '7', 'page': 2}]
    results = OpenTool(counted).run([Invocation({'document': '7'}, state) for state in states])
    assert asked == [(['7', '7'], [1, 3])]
    assert [state['page'] for state in states] == [1, 3]
    assert results[0].documents == (({'id': '7', 'title': 'T', 'text': '7/1', 'score': 0.0},),)
