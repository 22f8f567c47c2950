"""How good a role has become: greedy answers to held-out questions, through the same sampler and search."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from zeroplay_jax.objectives import rewards
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
    """Exact match of one greedy rollout per question.

    Args:
      questions: [{'question', 'answers', 'hops'}].
      number: names this evaluation within the run.

    Returns:
      correct: hop count → bool [N], in the order of the questions.
      rows: the rollouts, reward 1 or 0.
    """

    async def ask(i, item):
        try:
            (trajectory,) = await table.ask(role, (number, i), 1, 0.0, 'solver', question=item['question'])
        except TaskDropped as drop:
            raise UserError(
                f'evaluation question {i} ({item["question"][:60]!r}) cannot be asked: {drop.reason}; raise '
                'config.rollout.prompt_tokens'
            ) from drop
        given = solving.answer(trajectory)
        hit = rewards.exact_match(given, item['answers'])
        info = {**item, 'answer_given': given}
        return Outcome([Row(role, trajectory, float(hit), item['hops'], parts={'exact_match': float(hit)}, info=info)])

    played = table.play({(number, i): functools.partial(ask, i, q) for i, q in enumerate(questions)}, done)
    rows = [outcome.rows[0] for outcome in played]
    hops = sorted({q['hops'] for q in questions})
    return {h: np.array([r.reward > 0 for r in rows if r.group == h]) for h in hops}, rows
