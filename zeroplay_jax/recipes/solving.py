"""Gets a solver's rollouts on a question, scores them and makes rows of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from zeroplay_jax.objectives.answers import majority_answer
from zeroplay_jax.objectives.format_scores import ssp_format
from zeroplay_jax.recipes.proposing import teacher_prompt
from zeroplay_jax.selfplay.answers import final_answer, group_of, score
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Question, Row, RowInfo, Task, TaskDropped, Trajectory

if TYPE_CHECKING:
    from zeroplay_jax.selfplay.context import RolloutContext

# Answer metric → name of its reward part; another metric names the part itself.
_PART_NAMES = {'em': 'exact_match', 'subem': 'contains_answer', 'judge': 'judged_correct'}
# Why a rollout says nothing about its question: what it needed failed (`rollout.failed`).
LOST = ('tool_failed', 'judge_failed')


class Attempt(NamedTuple):
    """A rollout on a question.

    Attributes:
      trajectory: the rollout.
      value: its score in [0, 1]; None without one.
      drop: why it is not trained on, one of `LOST` or 'ungraded'; None for others.
    """

    trajectory: Trajectory
    value: float | None
    drop: str | None


async def attempt(
    config: Config, trajectory: Trajectory, scoring: Callable[[], Awaitable[float | None]]
) -> Attempt:
    """Returns a rollout with the score that `scoring` gives it; it is not called for one whose tool failed."""
    if config.rollout.failed != 'keep' and trajectory.has_tool_failure:
        return Attempt(trajectory, None, 'tool_failed')
    try:
        value = await scoring()
    except TaskDropped as failure:
        return Attempt(trajectory, None, failure.reason)
    # Without a verdict it is neither right nor wrong, and any reward would be noise.
    return Attempt(trajectory, value, 'ungraded' if value is None else None)


async def attempts(
    context: RolloutContext,
    config: Config,
    role: str,
    identity: tuple[int, ...],
    question: Question,
    samples: int,
    *,
    by_majority: bool = False,
    temperature: float | None = None,
) -> tuple[Question, list[Attempt]]:
    """Returns a question as it was scored, and rollouts on it with their scores.

    Args:
      config: config of the run; `reward.answer` is the metric.
      role: role that answers, trained or frozen, with its own prompt.
      identity: names the request within the run; all randomness derives from it.
      samples: number of rollouts.
      by_majority: whether the most frequent answer of these rollouts (`majority_answer`) takes the place of the
        accepted ones. If no rollout answers, the question has none, and all scores are 0.
      temperature: None: the role's. That of a frozen role is 0, at which all rollouts are equal: give one.

    Returns:
      The question with the accepted answers that were used; the rollouts. Those whose tool failed have no vote.

    Raises:
      TaskDropped: the prompt is too long.
    """
    trajectories = await context.ask(role, identity, samples, temperature, question=question.text)
    has_label = True
    if by_majority:
        keeps = config.rollout.failed == 'keep'
        votes = [final_answer(one) for one in trajectories if keeps or not one.has_tool_failure]
        majority = majority_answer(votes)
        has_label = majority is not None
        label = () if majority is None else (majority,)
        question = dataclasses.replace(question, answers=label)
    # Nothing is right without a label; the built-in metrics give 0.
    metric = config.reward.answer if has_label else 'em'
    scored = []
    for number, trajectory in enumerate(trajectories):
        # The sample's number is part of the identity, because each judgement needs its own random stream.
        judgement, answer = (*identity, number), final_answer(trajectory)
        scoring = functools.partial(score, context, metric, judgement, question, answer)
        scored.append(await attempt(config, trajectory, scoring))
    return question, scored


def solve_count(scored: Sequence[Attempt]) -> tuple[int, int]:
    """Returns how many of the rollouts of `attempts` are right (score of at least one half), and of how many.

    The lost ones (`LOST`) do not count.

    Raises:
      TaskDropped: all rollouts are lost; its reason is that of the first.
    """
    # The threshold is for graded metrics (F1); exact match is 0 or 1. A verdict that could not be read counts as not
    # solved, so that a judge that fails makes questions look harder, never easier.
    counted = [one.value for one in scored if one.drop not in LOST]
    if not counted:
        raise TaskDropped(str(scored[0].drop))
    return sum(value is not None and value >= 0.5 for value in counted), len(counted)


async def solver_rows(
    context: RolloutContext,
    config: Config,
    role: str,
    task: Task,
    question: Question,
    *,
    by_majority: bool = False,
    strict_format: bool = False,
) -> list[Row]:
    """Returns `config.<role>.samples` rollouts on a question as rows of one group, with their rewards.

    The rows also have the teacher's prompt if the role distils and the question has a construction path.

    Args:
      task: its identity names the request and, with its first two integers, the group.
      question: need not be the payload of `task`.
      by_majority: see `attempts`.
      strict_format: whether the score of a rollout that deviates from the format is 0 (`ssp_format`).

    Raises:
      TaskDropped: the solver's prompt is too long.
    """
    settings = config[role]
    metric = config.reward.answer
    ids_for_teacher = None
    privileged_cut = None
    if settings.get('distill_top_k') and question.path is not None:
        # The whole group shares one prompt, which depends on the question and not on the rollout.
        ids_for_teacher, privileged_cut = teacher_prompt(
            context, config, task.identity, question, role
        )
    question, scored = await attempts(
        context,
        config,
        role,
        task.identity,
        question,
        settings.samples,
        by_majority=by_majority,
    )
    rows = []
    for trajectory, value, drop in scored:
        if strict_format and not ssp_format([turn.text for turn in trajectory.turns]):
            value = 0.0
            # The format decides, whatever the judge said.
            drop = None if drop == 'ungraded' else drop
        parts = {_PART_NAMES.get(metric, metric): value or 0.0}
        info = RowInfo(
            question=question,
            answer=final_answer(trajectory),
            score=value,
            privileged_cut=privileged_cut,
        )
        row = Row(
            role=role,
            trajectory=trajectory,
            reward=sum(parts.values()),
            group=group_of(task.identity),
            parts=parts,
            drop=drop,
            info=info,
            teacher_prompt=ids_for_teacher,
        )
        rows.append(row)
    return rows
