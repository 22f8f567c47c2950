"""Difficulties and answer metrics by name: the built-in ones, and functions of modules outside this project."""

import asyncio

import pytest

from zeroplay_jax.objectives import rewards
from zeroplay_jax.selfplay import answers
from zeroplay_jax.types import Question, UserError

OUTSIDE = """
import functools


def cubic(solved, n, target):
    return (1 - solved / n) ** 3 + target


def same_length(prediction, golds):
    return any(len(prediction or '') == len(gold) for gold in golds)


def adapted(function):
    @functools.wraps(function)
    def call(prediction, golds):
        return function(prediction)

    return call


@adapted
def length(prediction):
    return float(len(prediction) == 4)


def text(prediction, golds):
    return 'one'


def seven(prediction, golds):
    return 7


def not_a_number(prediction, golds):
    return float('nan')


def nothing(prediction, golds):
    return None
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    (tmp_path / 'outside_rewards.py').write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize('kind', rewards.DIFFICULTIES)
def test_difficulty_is_the_function_of_that_name(kind):
    function = rewards.resolve_difficulty(kind)
    for solved in range(6):
        assert rewards.difficulty(solved, 5, kind, 0.3) == function(solved, 5, 0.3)


def test_a_function_outside_the_project_is_a_difficulty(outside):
    assert rewards.difficulty(1, 2, 'outside_rewards:cubic', 0.5) == 0.625
    # The range of `solved` is checked for any function.
    with pytest.raises(ValueError, match='3 of 2 solved'):
        rewards.difficulty(3, 2, 'outside_rewards:cubic')


def test_a_function_outside_the_project_is_an_answer_metric(outside):
    metric = rewards.resolve_answer_metric('outside_rewards:same_length')
    assert metric('Rome', ['Bern']) and not metric(None, ['Bern'])
    # A decorator may change the arguments.
    assert rewards.resolve_answer_metric('outside_rewards:length')('Rome', ['Bern']) == 1.0


@pytest.mark.parametrize(
    'resolve, name, message',
    [
        (rewards.resolve_difficulty, 'cubic', 'not built in; .* linear,'),
        (rewards.resolve_difficulty, 'no_such:f', "cannot import module 'no_such'"),
        (rewards.resolve_answer_metric, 'judge', "metric 'judge' is not built in; .* em,"),
        (rewards.resolve_answer_metric, 'outside_rewards:absent', "'outside_rewards' has no"),
        (
            rewards.resolve_answer_metric,
            'outside_rewards:cubic',
            r"missing a required argument: 'target'; it is called with \(prediction, golds\)",
        ),
        (
            rewards.resolve_difficulty,
            'outside_rewards:same_length',
            r'too many positional arguments; it is called with \(solved, n, target\)',
        ),
    ],
)
def test_bad_names_are_one_clear_line(outside, resolve, name, message):
    with pytest.raises(ValueError, match=message) as error:
        resolve(name)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', ['text', 'seven', 'not_a_number', 'nothing'])
def test_an_answer_metric_that_returns_no_share_is_one_clear_line(outside, name):
    question = Question('Where?', ('Bern',), hops=1)
    metric = f'outside_rewards:{name}'
    with pytest.raises(UserError, match=f'{metric}: returned .* a number from 0'):
        asyncio.run(answers.score(None, metric, (0,), question, 'Rome'))
