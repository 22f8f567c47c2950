"""Held-out evaluation: one greedy rollout per question, through the same sampler and tools as training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from zeroplay_jax.selfplay.answers import final_answer, prompt_fields, score
from zeroplay_jax.selfplay.roles import RolloutContext
from zeroplay_jax.types import Outcome, Question, Row, RowInfo, TaskDropped, UserError


def _nothing() -> None:
    """Default of `on_answer`."""


def evaluate(
    context: RolloutContext,
    questions: Sequence[Question],
    number: int,
    role: str = 'solver',
    on_answer: Callable[[], None] = _nothing,
) -> tuple[dict[int, np.ndarray], list[Row]]:
    """Exact match of a greedy answer per question; a judge's grade per open task.

    Args:
      questions: questions and open tasks.
      number: names this evaluation within the run.
      role: the evaluated role, with or without tools.

    Returns:
      correct: hop count → bool [N], in the order of the questions; without the open tasks.
      rows: all rollouts. Reward 1 or 0; of an open task the share of its rubrics that are met
        (SCOPE eq. 1), 0 and dropped as 'ungraded' where the judge gave no verdict.

    Raises:
      UserError: a question is longer than `rollout.prompt_tokens`.
    """
    episodes: dict[tuple[int, ...], Callable[[], Coroutine[Any, Any, Outcome]]] = {
        (number, index): functools.partial(_answer, context, role, (number, index), question)
        for index, question in enumerate(questions)
    }
    outcomes = context.run_episodes(episodes, on_answer)
    rows = [outcome.rows[0] for outcome in outcomes]
    results_of_hops: dict[int, list[bool]] = {}
    for question, row in zip(questions, rows, strict=True):
        if not question.is_open_task:
            results_of_hops.setdefault(question.hops, []).append(row.reward > 0)
    correct = {hops: np.array(results_of_hops[hops]) for hops in sorted(results_of_hops)}
    return correct, rows


async def _answer(
    context: RolloutContext, role: str, identity: tuple[int, int], question: Question
) -> Outcome:
    metric, part = ('em', 'exact_match')
    if question.is_open_task:
        metric, part = ('rubrics', 'rubrics')
    try:
        (trajectory,) = await context.ask(role, identity, 1, 0.0, **prompt_fields(question))
    except TaskDropped as drop:
        raise UserError(
            f'in the evaluation, {question.text[:60]!r} cannot be asked: {drop.reason}; raise '
            'config.rollout.prompt_tokens'
        ) from drop
    answer = final_answer(trajectory)
    value = await score(context, metric, identity, question, answer)
    row = Row(
        role=role,
        trajectory=trajectory,
        reward=value or 0.0,
        group=question.hops,
        parts={part: value or 0.0},
        drop='ungraded' if value is None else None,
        info=RowInfo(question=question, answer=answer),
    )
    return Outcome([row])
