"""Replies of judges: `verdicts.txt` says what each is read as."""

import pathlib

import pytest
from refused_calls import check_values

from zeroplay_jax.selfplay.verdicts import grade, rubrics, verdict, yes_no


def listed(*items):
    return '<rubrics>' + '\n '.join(items) + '</rubrics>'


def item(text='Names the city.', priority='"critical"'):
    return f'<rubric priority={priority}>{text}</rubric>'


GOOD = [item(), item('Gives the year.', "'important'"), item('Compares\n both  sides.', 'bonus')]
WANTED = [
    {'text': 'Names the city.', 'priority': 'critical'},
    {'text': 'Gives the year.', 'priority': 'important'},
    {'text': 'Compares both sides.', 'priority': 'bonus'},
]


def beside_good(written):
    """(text, priority, repairs) of an item behind good ones."""
    (*good, taken), repairs = rubrics(listed(*GOOD, written))
    assert good == WANTED
    return *taken.values(), repairs


def test_replies_are_read_as_the_table_says():
    check_values(pathlib.Path(__file__).with_name('verdicts.txt'), globals())


HOSTILE = [
    '<rubric priority=' * 20_000,
    '<rubrics>' + '<rubric priority="critical">' * 20_000 + '</rubrics>',
    '<rubrics><rubric' + ' ' * 200_000 + '</rubrics>',
    '<score>' * 50_000 + '</score>' * 50_000,
    'answer' * 50_000 + ':',
    'answer ' + ' ' * 200_000,
    'correct ' * 50_000 + 'x',
    '-'.join(['a'] * 100_000),
    '\x00\ud800\u202e</think>' * 1000,
]


@pytest.mark.parametrize('text', HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_nothing_to_any_reader(text):
    """Long and crooked replies come back at once and say nothing."""
    assert [reader(text) for reader in (verdict, yes_no, grade, rubrics)] == [None] * 4
