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
    return sum(value is not None and value >= 0.5 for _, value in scored)


async def solver_rows(
    context: RolloutContext, config, role: str, task: Task, question: Question
) -> list[Row]:
    """Rollouts on a question as rows, with the teacher's prompt where the role distils."""
    settings = config[role]
    metric = config.reward.answer
    prompt_of_teacher = None
    privileged_cut = None
    if settings.distill_top_k and question.path is not None:
        prompt_of_teacher, privileged_cut = teacher_prompt(
            context, config, task.identity, question, role
        )
    scored = await attempts(context, role, metric, task.identity, question, settings.samples)
    rows = []
    for trajectory, value in scored:
        parts = {_PART_NAMES.get(metric, metric): value or 0.0}
        if config.reward.overlong_buffer:
            parts['overlong'] = overlong_penalty(config, trajectory)
        info = RowInfo(
            question=question,
            answer=final_answer(trajectory),
            score=value,
            privileged_cut=privileged_cut,
        )
        rows.append(
            Row(
                role=role,
                trajectory=trajectory,
                reward=sum(parts.values()),
                group=group_of(task.identity),
                parts=parts,
                drop='ungraded' if value is None else None,
                info=info,
                teacher_prompt=prompt_of_teacher,
            )
        )
    return rows


def overlong_penalty(config, trajectory: Trajectory) -> float:
    """Penalty for rollouts near the end of their slot (DAPO's soft overlong shaping); 0 if it is off."""
    buffer = config.reward.overlong_buffer
    if not buffer:
        return 0.0
    length = len(trajectory.tokens)
    return rewards.overlong_penalty(length, config.sampler.context, buffer)
