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

    After its `train_iterations` a role has no phase of its own; questions are generated all the same.
    """
    questions_needed = config.solver.steps * config.solver.batch
    # A document gives at most one question. Rounded up, so that no question is trained on twice if none is rejected
    # or filtered.
    steps_needed = math.ceil(questions_needed / config.pool.batch)
    generation_steps = config.pool.batches or steps_needed
    phases: list[Phase] = []
    for iteration in range(config.schedule.iterations):
        iteration_phases = (
            Phase('proposer', config.proposer.steps, ('proposer',)),
            # clear_pool_every is a period in steps: with the length of the phase, the pool is cleared once, at its
            # first step, so that the solver trains on questions of the latest proposer.
            Phase('generate', generation_steps, clear_pool_every=generation_steps),
            Phase('solver', config.solver.steps, ('solver',)),
        )
        for phase in iteration_phases:
            # 'generate' trains no role, so it is in every iteration.
            if all(is_trained(config, role, iteration) for role in phase.trains):
                phases.append(dataclasses.replace(phase, iteration=iteration))
    return phases


def simultaneous(
    config, steps: int, roles: tuple[str, ...], clear_pool_every: int = 0
) -> list[Phase]:
    """Returns one phase per iteration, in which every step trains all of `roles`, in this order.

    A phase leaves out a role whose `train_iterations` are over.

    Args:
      steps: steps per phase.
      clear_pool_every: see `Phase`.
    """
    phases: list[Phase] = []
    for iteration in range(config.schedule.iterations):
        # A role that is no longer trained still makes rollouts (SSP's ablations with a fixed proposer or solver).
        trained = tuple(role for role in roles if is_trained(config, role, iteration))
        phases.append(Phase('selfplay', steps, trained, iteration, clear_pool_every))
    return phases
