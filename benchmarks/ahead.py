"""What steps that begin early (`rollout.ahead`) cost and save, on the miniature.

    python -m benchmarks.ahead

It prints seconds of rollouts per training step with `rollout.ahead` 0 and 1, where some searches are
slow. A search takes 0.1 s at least and 2 s at most; one of ten takes 0.5 s or more. How long is a function of its
queries. Both settings play the same questions, a step of one and a step of the other in turn. The first two steps
compile programs and the last one begins no other; they are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import time

import numpy as np

from zeroplay_jax.configs import dspo
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.schedule import all_steps
from zeroplay_jax.tools.base import Tool
from zeroplay_jax.training import build

STEPS = 10
WARM_UP = 2


def make_engine(ahead: int) -> Engine:
    """Returns an engine whose searches take as long as their queries say."""
    config = dspo.get_config('mini')
    config.solver.update(steps=STEPS, batch=8, samples=4, minibatches=1, filter_groups=False)
    config.solver.update(old_logp='trainer', tis_cap=2.0)
    config.rollout.ahead = ahead
    config.progress = False
    engine = build.build_engine(config, build.build(config, for_training=True))
    for role in engine.context.roles.values():
        for tool in role.env.tools.values():
            slow_down(tool)
    return engine


def slow_down(tool: Tool) -> None:
    """Makes every call of a tool wait; calls wait side by side, each in a batch of its own."""
    run = tool.run

    def slow_run(calls):
        time.sleep(max(seconds(str(dict(call.arguments))) for call in calls))
        return run(calls)

    tool.run = slow_run  # type: ignore[method-assign]
    tool.workers = 64
    tool.max_batch = 1


def seconds(queries: str) -> float:
    """Returns how long a search takes: a Pareto distribution from 0.1 s, cut at 2 s."""
    digest = hashlib.sha1(queries.encode()).digest()
    share = (int.from_bytes(digest[:4], 'big') + 1) / 2**32
    return min(0.1 * share**-0.7, 2.0)


def main() -> None:
    """Prints seconds of rollouts per step with and without early steps."""
    argparse.ArgumentParser(
        prog='python -m benchmarks.ahead',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    engines = {ahead: make_engine(ahead) for ahead in (0, 1)}
    rollout_seconds: dict[int, list[float]] = {0: [], 1: []}
    steps = all_steps(engines[0].recipe.phases())
    for step, next_step in itertools.zip_longest(steps, steps[1:]):
        for ahead, engine in engines.items():
            metrics, _ = engine.run_step(step, lambda: None, next_step)
            rollout_seconds[ahead].append(metrics['seconds/rollout'] + metrics['seconds/tools'])
    for ahead, per_step in rollout_seconds.items():
        counted = per_step[WARM_UP:-1]
        low, high = min(counted), max(counted)
        print(
            f'ahead={ahead}: {np.mean(counted):.2f} s of rollouts per step ({low:.2f} to {high:.2f})'
        )


if __name__ == '__main__':
    main()
