"""Who trains when."""

from __future__ import annotations

import dataclasses

from zeroplay_jax.selfplay.engine import Phase


def trains(config, role: str, iteration: int) -> bool:
    """Whether a role still learns in this iteration (`config.<role>.train_iterations`; -1: always)."""
    limit = config[role].train_iterations
    return limit < 0 or iteration < limit


def alternate(config) -> list[Phase]:
    """iterations × (proposer learns, proposer writes the questions, solver learns on them).

    A role that no longer learns has no phase of its own; the questions are written anew all the same.
    """
    c, phases = config, []
    batches = c.pool.batches or -(-c.solver.steps * c.solver.batch // c.pool.batch)
    for i in range(c.schedule.iterations):
        round_ = [
            Phase('proposer', c.proposer.steps, ('proposer',)),
            Phase('generate', batches, clears_pool=batches),
            Phase('solver', c.solver.steps, ('solver',)),
        ]
        due = [p for p in round_ if all(trains(c, role, i) for role in p.trains)]
        phases += [dataclasses.replace(p, iteration=i) for p in due]
    return phases


def together(config, steps: int, order: tuple[str, ...]) -> list[Phase]:
    """One phase per iteration in which every step trains the roles in `order`, as far as they still learn."""
    period = config.fill.period if config.fill.kind == 'replay_reset' else 0
    return [
        Phase(
            'selfplay',
            steps,
            tuple(role for role in order if trains(config, role, i)),
            i,
            clears_pool=period,
        )
        for i in range(config.schedule.iterations)
    ]
