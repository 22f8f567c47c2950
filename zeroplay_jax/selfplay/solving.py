"""What a solver's rollouts are worth: its answer read, compared or judged, and made into rows to learn from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from zeroplay_jax.objectives import rewards
from zeroplay_jax.selfplay import privileged
from zeroplay_jax.selfplay.roles import Table
from zeroplay_jax.types import Json, Row, Task, Trajectory

# Names of groups have to differ between steps: a group may wait for the next one (engine, surplus).
_ITEMS_PER_STEP = 1 << 20
METRICS = {'em': rewards.exact_match, 'subem': rewards.sub_exact_match, 'f1': rewards.f1}
_NAMES = {'em': 'exact_match', 'subem': 'contains_answer', 'judge': 'judged_correct'}


def group_of(identity: tuple[int, ...]) -> int:
    """The group key of an item (step number, index): all rollouts of one prompt share it, and nothing else does."""
    step, index = identity[:2]
    return step * _ITEMS_PER_STEP + index


def answer(trajectory: Trajectory) -> str | None:
    """The answer a rollout ended with; None without one, or where the last call was never closed."""
    if trajectory.finish != 'answer':
        return None
    return rewards.extract_last(trajectory.turns[-1].text, 'answer')


async def score(table: Table, metric: str, identity, item: Json, given: str | None) -> float | None:
    """What an answer earns, in [0, 1], by `config.reward.answer`: em, subem, f1, or the judge's word; by 'rubrics' the
    share of an open task's that it meets.

    None where the judge gave none: that is neither right nor wrong.
    """
    if metric == 'rubrics':
        return await grade(table, identity, item['question'], item['rubrics'], given)
    if metric != 'judge':
        return float(METRICS[metric](given, item['answers']))
    if not given:
        return 0.0
    assert table.judge is not None
    said = await table.judge.correct(identity, item['question'], item['answers'], given)
    return None if said is None else float(said)


def asked(item: Json) -> dict[str, str]:
    """Prompt and field with which a question, or an open task (it has 'rubrics'), is put to a solver."""
    if 'rubrics' in item:
        return dict(prompt='task_solver', task=item['question'])
    return dict(prompt='solver', question=item['question'])


async def grade(
    table: Table, identity, task: str, rubrics: Sequence[Json], given: str | None
) -> float | None:
    """Share of the rubrics that an answer meets (SCOPE eq. 1); 0 without an answer, None if not to be graded."""
    if not given:
        return 0.0
    assert table.judge is not None
    verdicts = await asyncio.gather(
        *(table.judge.grade((*identity, j), task, given, r['text']) for j, r in enumerate(rubrics))
    )
    return rewards.rubric_score(verdicts)


async def attempts(
    table: Table, metric: str, identity, item: Json, samples: int
) -> list[tuple[Trajectory, float | None]]:
    """Rollouts of the solver on a question, each with what it earns."""
    tries = await table.ask('solver', identity, samples, question=item['question'])
    return [
        (t, await score(table, metric, (*identity, i), item, answer(t)))
        for i, t in enumerate(tries)
    ]


async def solve_rate(table: Table, metric: str, identity, item: Json, samples: int) -> int:
    """How many of `samples` rollouts reach the answer (a score of one half or more; without one they do not)."""
    return sum(
        s is not None and s >= 0.5
        for _, s in await attempts(table, metric, identity, item, samples)
    )


async def rows(table: Table, config, task: Task, item: Json) -> list[Row]:
    """The solver's rollouts on an item, as rows; behind each the teacher's prompt where one distils."""
    metric, group = config.reward.answer, group_of(task.identity)
    teacher, info = None, dict(item)
    if config.solver.distill_top_k and (path := item.get('path')):
        teacher, cut = privileged.prompt(table, config, task.identity, item, path)
        info['privileged_cut'] = cut
    out = []
    for t, hit in await attempts(table, metric, task.identity, item, config.solver.samples):
        parts = {_NAMES.get(metric, metric): hit or 0.0}
        if config.reward.overlong_buffer:
            parts['overlong'] = overlong(config, t)
        drop = 'ungraded' if hit is None else None
        details = info | {'answer_given': answer(t), 'score': hit}
        out.append(
            Row(
                'solver',
                t,
                sum(parts.values()),
                group,
                parts,
                drop,
                details,
                teacher_prompt=teacher,
            )
        )
    return out


def overlong(config, trajectory: Trajectory) -> float:
    """Penalty for rollouts near the end of their slot (DAPO's soft overlong shaping); 0 where it is off."""
    buffer = config.reward.overlong_buffer
    return (
        rewards.overlong_penalty(len(trajectory.tokens), config.sampler.context, buffer)
        if buffer
        else 0.0
    )


def shown(trajectory: Trajectory) -> list[Json]:
    """Passages that a rollout was shown, each once, in the order seen; the best of its last search comes last."""
    found = [d for turn in trajectory.turns for query in turn.documents for d in query]
    last = next(
        (query[0] for turn in trajectory.turns[::-1] for query in turn.documents[::-1] if query),
        None,
    )
    passages = {d['id']: d for d in found}  # one article may be many passages of one title
    if last is not None:
        passages[last['id']] = passages.pop(last['id'])
    return list(passages.values())


def mean(values: Sequence[float]) -> float:
    """Mean of what there is; 0 of nothing."""
    return float(np.mean(values)) if len(values) else 0.0
