"""Schedules that several recipes share."""

from __future__ import annotations

import dataclasses

from zeroplay_jax.selfplay.schedule import Phase


def is_trained(config, role: str, iteration: int) -> bool:
    """Whether a role is trained in this iteration (`config.<role>.train_iterations`; -1: always)."""
    limit = config[role].train_iterations
    return limit < 0 or iteration < limit


def alternate(config) -> list[Phase]:
    """iterations × (proposer is trained, proposer generates questions, solver is trained on them).

    A role that is no longer trained has no phase of its own; questions are generated all the same.
    """
    questions_needed = config.solver.steps * config.solver.batch
    batches = config.pool.batches or -(-questions_needed // config.pool.batch)
    phases: list[Phase] = []
    for iteration in range(config.schedule.iterations):
        round_phases = (
            Phase('proposer', config.proposer.steps, ('proposer',)),
            Phase('generate', batches, clears_pool=batches),
            Phase('solver', config.solver.steps, ('solver',)),
        )
        for phase in round_phases:
            if all(is_trained(config, role, iteration) for role in phase.trains):
                phases.append(dataclasses.replace(phase, iteration=iteration))
    return phases


def simultaneous(config, steps: int, roles: tuple[str, ...], clears_pool: int = 0) -> list[Phase]:
    """One phase per iteration in which every step trains all of `roles`, in this order."""
    phases: list[Phase] = []
    for iteration in range(config.schedule.iterations):
        trained = tuple(role for role in roles if is_trained(config, role, iteration))
        phases.append(Phase('selfplay', steps, trained, iteration, clears_pool=clears_pool))
    return phases
