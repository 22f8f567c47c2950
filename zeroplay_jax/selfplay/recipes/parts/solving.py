"""A solver's rollouts on a question: answered, scored and made into rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroplay_jax.objectives import rewards
from zeroplay_jax.selfplay.answers import final_answer, group_of, score
from zeroplay_jax.selfplay.recipes.parts.construction_path import teacher_prompt
from zeroplay_jax.types import Question, Row, RowInfo, Task, Trajectory

if TYPE_CHECKING:
    from zeroplay_jax.selfplay.roles import RolloutContext

# Names of the reward part per answer metric.
_PART_NAMES = {'em': 'exact_match', 'subem': 'contains_answer', 'judge': 'judged_correct'}


async def attempts(
    context: RolloutContext,
    role: str,
    metric: str,
    identity: tuple[int, ...],
    question: Question,
    samples: int,
) -> list[tuple[Trajectory, float | None]]:
    """Rollouts on a question, each with its score; None where the judge gave no verdict."""
    trajectories = await context.ask(role, identity, samples, question=question.text)
    scored = []
    for number, trajectory in enumerate(trajectories):
        answer = final_answer(trajectory)
        # The sample's number is part of the identity: a judge's sampled verdicts must differ.
        value = await score(context, metric, (*identity, number), question, answer)
        scored.append((trajectory, value))
    return scored


async def solve_count(
    context: RolloutContext,
    role: str,
    metric: str,
    identity: tuple[int, ...],
    question: Question,
    samples: int,
) -> int:
    """How many of `samples` rollouts answer the question (score of at least one half)."""
    scored = await attempts(context, role, metric, identity, question, samples)
    # A threshold for graded metrics (F1); exact match is 0 or 1. An answer without a verdict counts
    # as not solved, so a failing judge makes questions look harder, never easier.
    solved = 0
    for _, value in scored:
        solved += value is not None and value >= 0.5
    return solved


async def solver_rows(
    context: RolloutContext, config, role: str, task: Task, question: Question
) -> list[Row]:
    """Rollouts on a question as rows, with the teacher's prompt where the role distils."""
    settings = config[role]
    metric = config.reward.answer
    ids_for_teacher = None
    privileged_cut = None
    if settings.distill_top_k and question.path is not None:
        # One prompt for the whole group: it depends on the question, not on the rollout.
        ids_for_teacher, privileged_cut = teacher_prompt(
            context, config, task.identity, question, role
        )
    scored = await attempts(context, role, metric, task.identity, question, settings.samples)
    rows = []
    for trajectory, value in scored:
        parts = {_PART_NAMES.get(metric, metric): value or 0.0}
        if config.reward.overlong_buffer:
            parts['overlong'] = overlong_penalty(config, trajectory)
        # Without a verdict the rollout is neither right nor wrong: any reward would be noise.
        drop = 'ungraded' if value is None else None
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


def overlong_penalty(config, trajectory: Trajectory) -> float:
    """Penalty for rollouts near the end of their slot (DAPO's soft overlong shaping); 0 if it is off."""
    buffer = config.reward.overlong_buffer
    if not buffer:
        return 0.0
    # All tokens, not the policy's alone: the slot fills up with observations as well.
    length = len(trajectory.tokens)
    return rewards.overlong_penalty(length, config.sampler.context, buffer)
