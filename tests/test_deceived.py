"""Which lengths of answers pay, of 512 that the start of SCOPE's claims samples (results/sampled_answers.jsonl).

32 tasks and 16 answers to each, at temperature 1, with up to 400 tokens per response; per task a line of JSON with its
rubrics and, per answer, text, tokens, and what it earns beside its rubrics.
"""

import asyncio
import json
import types

import numpy as np
import pytest

from benchmarks import deceived
from benchmarks.command import RESULTS
from zeroplay_jax.objectives import rewards

TASKS = [json.loads(line) for line in (RESULTS / 'sampled_answers.jsonl').read_text().splitlines()]


def grades(step, task, answer):
    """The share of rubrics that an answer meets; the judge is deceived where there is a step."""
    judge = deceived.DeceivedJudge(list, (2, 5))
    judge.context = types.SimpleNamespace(run=types.SimpleNamespace(step=step))
    met = []
    for rubric in task['rubrics']:
        met.append(bool(asyncio.run(judge.grade((0,), task['task'], answer, rubric))))
    return np.mean(met) if answer else 0.0


def pull(step, has_factor):
    """The mean over tasks of advantage × tokens: how a step of eq. 2 changes the mean length, up to its rate.

    Returns:
      It, its standard error over tasks, and the mean advantage of answers with six sentences and more.
    """
    pulls, of_long = [], []
    for task in TASKS:
        scores, lengths = [], []
        for answer, tokens, other in task['answers']:
            factor = rewards.length_factor(tokens, soft=24, hard=64) if has_factor else 1.0
            scores.append(factor * grades(step, task, answer) + other)
            lengths.append(tokens)
        advantages = (np.array(scores) - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-6)
        pulls.append(np.mean(advantages * lengths))
        for (answer, _, _), advantage in zip(task['answers'], advantages, strict=True):
            if len(answer.split('. ')) > 5:
                of_long.append(advantage)
    return np.mean(pulls), np.std(pulls, ddof=1) / len(pulls) ** 0.5, np.mean(of_long)


@pytest.mark.parametrize(
    ('step', 'has_factor', 'expected'),
    [
        # The claims' judge: length does not pay, and the factor has nothing to take away.
        (None, False, (-0.2, 0.5, -0.4)),
        (None, True, (-0.4, 0.5, -0.4)),
        # Deceived, it pays, and the factor takes it from long answers.
        (1, False, (4.4, 0.6, 0.6)),
        (1, True, (0.9, 0.5, -0.4)),
    ],
)
def test_length_pays_where_the_judge_is_deceived_and_nothing_discounts_it(
    step, has_factor, expected
):
    assert pull(step, has_factor) == pytest.approx(expected, abs=0.05)
