"""What steps that begin early (`rollout.ahead`) cost and save, on the miniature.

    python -m benchmarks.ahead
    python -m benchmarks.ahead --train runs/ahead

The first command prints seconds of rollouts per training step with `rollout.ahead` 0 and 1, where some searches are
slow. A search takes 0.1 s at least and 2 s at most; one of ten takes 0.5 s or more. How long is a function of its
queries. Both settings play the same questions, a step of one and a step of the other in turn. The first two steps
compile programs and the last one begins no other; they are left out.

The second command trains the quickstart with steps that begin early and every `rollout.switch`, and prints a table:
exact match on held-out questions, and the means of metrics over the trained steps. A run that has ended in this folder
is not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import pathlib
import subprocess
import sys
import time

import numpy as np

from zeroplay_jax.configs import dspo
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.schedule import all_steps
from zeroplay_jax.tools.base import Tool
from zeroplay_jax.training import build

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 10
WARM_UP = 2
# Fields of the config in all runs of --train: steps that begin early, and what they need.
AHEAD: dict[str, object] = {
    'rollout.ahead': 1,
    'proposer.old_logp': 'trainer',
    'proposer.tis_cap': 2.0,
    'solver.old_logp': 'trainer',
    'solver.tis_cap': 2.0,
}
SWITCHES = ('never', 'keep', 'recompute')


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


def train(workdir: pathlib.Path, fields: dict[str, object]) -> None:
    """Runs the quickstart with these fields of the config, unless it has ended in this folder."""
    if (workdir / 'summary.json').exists():
        return
    command = [sys.executable, '-m', 'zeroplay_jax.main', '--config=configs/quickstart.py']
    command += [f'--workdir={workdir}']
    command += [f'--config.{name}={value}' for name, value in fields.items()]
    # The last line of stdout has to be the table's.
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)


def table_row(name: str, workdir: pathlib.Path) -> str:
    """Returns the figures of a run that has ended, as a row of a Markdown table; metrics are means over steps."""
    summary = json.loads((workdir / 'summary.json').read_text())
    records = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    trained = [record for record in records if 'sampler_gap' in record]
    cells = [name]
    for moment in ('before', 'after'):
        low, high = summary['ci95'][moment]
        cells.append(f'{summary[f"em_{moment}"]:.3f} ({low:.3f} to {high:.3f})')
    for figure in ('staleness', 'sampler_gap', 'importance_capped'):
        values = [record.get(figure, 0.0) for record in trained]
        cells.append(f'{np.mean(values):.2g}')
    return '| ' + ' | '.join(cells) + ' |'


def compare_training(folder: pathlib.Path) -> None:
    """Trains with every setting and prints the table."""
    head = 'rollout.switch | before | after | staleness | sampler_gap | importance_capped'
    lines = [f'| {head} |', '|' + '---|' * 6]
    for switch in SWITCHES:
        workdir = folder / switch
        train(workdir.absolute(), AHEAD | {'rollout.switch': switch})
        lines.append(table_row(switch, workdir))
    print('\n'.join(lines))


def main() -> None:
    """Prints seconds of rollouts per step, or with --train what was learnt."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.ahead',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--train', type=pathlib.Path, help='folder of the runs')
    args = parser.parse_args()
    if args.train:
        compare_training(args.train)
    else:
        compare_seconds()


def compare_seconds() -> None:
    """Prints seconds of rollouts per step with and without early steps."""
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
