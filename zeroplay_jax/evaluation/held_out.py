"""Held-out evaluation: one greedy rollout per question, through the same sampler and tools as training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from zeroplay_jax.selfplay.answers import final_answer, prompt_fields, score
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.types import Outcome, Question, Row, RowInfo, TaskDropped, UserError


def _nothing() -> None:
    """Default of `on_answer`: does nothing."""


def evaluate(
    context: RolloutContext,
    questions: Sequence[Question],
    number: int,
    role: str = 'solver',
    on_answer: Callable[[], None] = _nothing,
    metric: str = 'none',
) -> tuple[dict[int, Bool[np.ndarray, ' questions']], list[Row]]:
    """Returns the exact match of a greedy answer per question, and the rollouts; open tasks are graded by a judge.

    With several processes all must call this.

    Args:
      context: roles, scheduler, prompts and, for open tasks, the judge.
      questions: questions and open tasks.
      number: number of this evaluation in the run; (number, index of the question) is the identity of a rollout.
      role: the evaluated role, with or without tools.
      on_answer: called after every answer, for a progress bar.
      metric: `config.eval.metric`, a further score of the answers to questions; 'none': no other.

    Returns:
      correct: hop count (0: unknown) → bool [N], in the order of the questions; without the open tasks.
      rows: one rollout per entry of `questions`, in their order. The reward is 1 or 0; of an open task the share
        of its rubrics that are met (SCOPE eq. 1), or 0 with drop 'ungraded' where the judge graded too few. `parts`
        has the score by `metric` under the name of the metric.

    Raises:
      UserError: a question is longer than `rollout.prompt_tokens`.
    """
    episodes: dict[tuple[int, ...], Callable[[], Coroutine[Any, Any, Outcome]]] = {}
    for index, question in enumerate(questions):
        identity = (number, index)
        episodes[identity] = functools.partial(_answer, context, role, identity, question, metric)
    outcomes = context.run_episodes(episodes, on_answer)
    # Each question has one rollout, so each outcome has one row; all processes have them in the order of the questions.
    rows = [outcome.rows[0] for outcome in outcomes]
    results_of_hops: dict[int, list[bool]] = {}
    for question, row in zip(questions, rows, strict=True):
        # Open tasks have grades between 0 and 1, which must not enter the exact match.
        if not question.is_open_task:
            results_of_hops.setdefault(question.hops, []).append(row.reward > 0)
    # Sorted, because metrics and tables list the hop counts in this order, whatever the order of a file.
    correct: dict[int, np.ndarray] = {}
    for hops in sorted(results_of_hops):
        correct[hops] = np.array(results_of_hops[hops])
    return correct, rows


async def _answer(
    context: RolloutContext,
    role: str,
    identity: tuple[int, int],
    question: Question,
    further_metric: str,
) -> Outcome:
    """Returns the outcome of one question or open task, with one row; the randomness derives from `identity`."""
    # Exact match is used whatever `reward.answer` is, so that results of all recipes are compared by one metric.
    metric, part_name = ('em', 'exact_match')
    if question.is_open_task:
        metric, part_name = ('rubrics', 'rubrics')
    fields = prompt_fields(context, role, question)
    try:
        (trajectory,) = await context.ask(role, identity, samples=1, temperature=0.0, **fields)
    except TaskDropped as drop:
        # Raised instead of dropped: without this question the mean would be taken over another set.
        raise UserError(
            f'in the evaluation, {question.text[:60]!r} cannot be asked: {drop.reason}; raise '
            'config.rollout.prompt_tokens'
        ) from drop
    answer = final_answer(trajectory)
    value = await score(context, metric, identity, question, answer)
    reward = value or 0.0
    parts = {part_name: reward}
    if further_metric != 'none' and not question.is_open_task:
        # An answer without a verdict of the judge scores 0.
        parts[further_metric] = (
            await score(context, further_metric, identity, question, answer) or 0.0
        )
    # Evaluation rows are never trained on; the reason is recorded so that ungraded answers can be counted.
    drop_reason = 'ungraded' if value is None else None
    row = Row(
        role=role,
        trajectory=trajectory,
        reward=reward,
        group=question.hops,
        parts=parts,
        drop=drop_reason,
        info=RowInfo(question=question, answer=answer),
    )
    return Outcome([row])
