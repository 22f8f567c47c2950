"""Long texts of marks without an end, of others: a search from every mark to the end would take hours."""

import pytest

from zeroplay_jax.data import answer_fields, files
from zeroplay_jax.extras.inputs import builders
from zeroplay_jax.selfplay import verdicts

CHARACTERS = 300_000
READERS = {
    'names with apostrophes': (builders.mentions, "A'", []),
    'marks in a question': (lambda text: len(files.question_key(text)), ',', CHARACTERS + 1),
    'quotes in a question': (lambda text: len(files.question_key(text)), '."a', CHARACTERS + 1),
    'quotes in a list': (lambda text: answer_fields.is_missing(f'[{text}]'), '\\"', False),
    'marks before a score': (verdicts._LAST_SCORE.search, '`', None),
}


@pytest.mark.parametrize(
    'kind', [pytest.param(name, marks=pytest.mark.fault('nov29-C8', name)) for name in READERS]
)
def test_marks_without_end_are_read_once(kind):
    read, mark, expected = READERS[kind]
    assert read(mark * (CHARACTERS // len(mark)) + 'b') == expected
