"""Schedules that several recipes share."""

from __future__ import annotations

import dataclasses
import math

from zeroplay_jax.selfplay.schedule import Phase


def is_trained(config, role: str, iteration: int) -> bool:
    """Returns whether a role is trained in this iteration (`config.<role>.train_iterations`; -1: always)."""
    limit = config[role].train_iterations
    return limit < 0 or iteration < limit


def alternate(config) -> list[Phase]:
    """Returns iterations × (proposer is trained, proposer generates questions, solver is trained on them).

    A role that is no longer trained has no phase of its own; questions are generated all the same.
    """
    questions_needed = config.solver.steps * config.solver.batch
    # Rounded up, so that each question is trained on at most once if no document is dropped.
    batches_needed = math.ceil(questions_needed / config.pool.batch)
    batches = config.pool.batches or batches_needed
    phases: list[Phase] = []
    for iteration in range(config.schedule.iterations):
        round_phases = (
            Phase('proposer', config.proposer.steps, ('proposer',)),
            # The pool is cleared at the first step of the phase only, so that the solver trains on questions of
            # the latest proposer.
            Phase('generate', batches, clears_pool=batches),
            Phase('solver', config.solver.steps, ('solver',)),
        )
        for phase in round_phases:
            # 'generate' trains no role, so it is in every iteration.
            if all(is_trained(config, role, iteration) for role in phase.trains):
                phases.append(dataclasses.replace(phase, iteration=iteration))
    return phases


def simultaneous(config, steps: int, roles: tuple[str, ...], clears_pool: int = 0) -> list[Phase]:
    """Returns one phase per iteration, in which every step trains all of `roles`, in this order."""
    phases: list[Phase] = []
    for iteration in range(config.schedule.iterations):
        # A role that is no longer trained still makes rollouts (SSP's ablations with a fixed proposer or solver).
        trained = tuple(role for role in roles if is_trained(config, role, iteration))
        phases.append(Phase('selfplay', steps, trained, iteration, clears_pool=clears_pool))
    return phases
