"""How good a role has become: greedy answers to held-out questions, through the same sampler and search."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from zeroplay_jax.selfplay import solving
from zeroplay_jax.selfplay.roles import Table, TaskDropped
from zeroplay_jax.types import Json, Outcome, Row, UserError


def evaluate(
    table: Table,
    questions: Sequence[Json],
    number: int,
    role: str = 'solver',
    done: Callable[[], None] = lambda: None,
) -> tuple[dict[int, np.ndarray], list[Row]]:
    """Exact match of one greedy rollout per question; what a judge gives to one per open task.

    Args:
      questions: [{'question', 'answers', 'hops'}], and open tasks, which have 'rubrics'.
      number: names this evaluation within the run.

    Returns:
      correct: hop count → bool [N], in the order of the questions; without the open tasks.
      rows: the rollouts of all, reward 1 or 0, of a task the share of its rubrics met (SCOPE eq. 1), 0 and
        dropped as 'ungraded' where the judge gave no verdict.
    """

    async def ask(i, item):
        metric, name = ('rubrics', 'rubrics') if 'rubrics' in item else ('em', 'exact_match')
        try:
            (trajectory,) = await table.ask(role, (number, i), 1, 0.0, **solving.asked(item))
        except TaskDropped as drop:
            raise UserError(
                f'in the evaluation, {item["question"][:60]!r} cannot be asked: {drop.reason}; raise '
                'config.rollout.prompt_tokens'
            ) from drop
        given = solving.answer(trajectory)
        worth = await solving.score(table, metric, (number, i), item, given)
        row = Row(
            role, trajectory, worth or 0.0, item['hops'], info={**item, 'answer_given': given}
        )
        row.parts = {name: row.reward}
        row.drop = 'ungraded' if worth is None else None
        return Outcome([row])

    played = table.play(
        {(number, i): functools.partial(ask, i, q) for i, q in enumerate(questions)}, done
    )
    rows = [outcome.rows[0] for outcome in played]
    asked = [row for row in rows if 'rubrics' not in row.info]
    hops = sorted({row.group for row in asked})
    return {h: np.array([row.reward > 0 for row in asked if row.group == h]) for h in hops}, rows
