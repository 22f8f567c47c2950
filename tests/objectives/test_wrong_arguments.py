"""Wrong arguments of objectives, and names of functions that are not there, are one line each."""

import asyncio
import pathlib

import numpy as np
from refused_calls import check_table
from test_turn_advantages import make_table, settings

from zeroplay_jax.objectives import (
    advantages,
    aggregation,
    corrections,
    distillation,
    losses,
    policy_gradient,
    rewards,
    values,
)
from zeroplay_jax.selfplay import answers
from zeroplay_jax.types import Question

MODULES = (
    advantages,
    aggregation,
    corrections,
    distillation,
    losses,
    policy_gradient,
    rewards,
    values,
)
ARRAYS = dict(
    ONE=np.ones((1, 2), np.float32),
    MASK=np.ones((1, 2), bool),
    SEGMENT=np.ones((1, 2), np.int32),
    REWARD=np.ones(1),
    GROUP=np.zeros(1, int),
    array=np.array,
    nan=np.nan,
    TABLE=make_table([1.0, np.nan], [[None], [1.0, None, 0.5]], [3, 3], [True, False]),
    SETTINGS=settings(),
)


def scored(metric):
    """The score of an answer by a metric, which may return no share."""
    question = Question('Where?', ('Bern',), hops=1)
    return asyncio.run(answers.score(None, metric, (0,), question, 'Rome'))


def test_wrong_arguments_are_refused_as_the_table_says(tmp_path, monkeypatch):
    (tmp_path / 'outside_broken.py').write_text('import no_such_dependency\n')
    monkeypatch.syspath_prepend(tmp_path)
    names = dict(scored=scored) | ARRAYS
    for module in MODULES:
        names = vars(module) | names
    table = pathlib.Path(__file__).with_name('wrong_arguments.txt')
    check_table(table, names, tmp_path, error=ValueError)
