"""Long texts of marks without an end, of others: a search from every mark to the end would take hours."""

from zeroplay_jax.data import answer_fields, files
from zeroplay_jax.extras.inputs import builders
from zeroplay_jax.selfplay import verdicts


def test_marks_without_end_are_read_once():
    endless = lambda mark: mark * (300_000 // len(mark)) + 'b'
    assert builders.mentions(endless("A'")) == []
    for mark in (',', '."a'):
        assert len(files.question_key(endless(mark))) == 300_001
    assert not answer_fields.is_missing('[' + endless('\\"') + ']')
    assert verdicts._LAST_SCORE.search(endless('`')) is None
