"""Schedules that several recipes share."""

from __future__ import annotations

import dataclasses
import math

from zeroplay_jax.selfplay.schedule import Phase, TaskPool
from zeroplay_jax.settings.errors import fail


def is_trained(config, role: str, iteration: int) -> bool:
    """Returns whether a role is trained in this iteration (`config.<role>.train_iterations`; -1: always)."""
    limit = config[role].train_iterations
    return limit < 0 or iteration < limit


def generation_steps(config) -> int:
    """Returns the number of generation steps of an iteration: `pool.batches` or, at 0, as many as the solver needs."""
    questions_needed = config.solver.steps * config.solver.batch
    # A document gives at most one question. Rounded up, so that no question is trained on twice if none is rejected
    # or filtered.
    return config.pool.batches or math.ceil(questions_needed / config.pool.batch)


def pool_is_full(config, pool: TaskPool) -> bool:
    """Returns whether generation ends because the pool has `pool.target` questions."""
    return 0 < config.pool.target <= len(pool.questions)


def check_target(config) -> None:
    """Refuses a `pool.target` that the generation steps of an iteration cannot reach.

    Raises:
      ConfigError: there are fewer documents than questions to generate.
    """
    documents = generation_steps(config) * config.pool.batch
    if config.pool.target > documents:
        problem = f'a document gives one question at most, and an iteration reads {documents}'
        fix = 'raise pool.batches (generation steps) or pool.batch (documents per step)'
        fail('pool.target', config.pool.target, problem, fix)


def alternate(config) -> list[Phase]:
    """Returns iterations × (proposer is trained, proposer generates questions, solver is trained on them).

    After its `train_iterations` a role has no phase of its own; questions are generated all the same.
    """
    steps = generation_steps(config)
    phases: list[Phase] = []
    for iteration in range(config.schedule.iterations):
        iteration_phases = (
            Phase('proposer', config.proposer.steps, ('proposer',)),
            # clear_pool_every is a period in steps: with the length of the phase, the pool is cleared once, at its
            # first step, so that the solver trains on questions of the latest proposer.
            Phase('generate', steps, clear_pool_every=steps),
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
