"""Kills runs at random moments and compares them with runs that were left alone.

    python -m benchmarks.kills --recipes drzero,ssp --kills 3 --sigterms 2 --flips 2
    python -m benchmarks.kills --processes 2 --recipes ssp --kills 2 --sigterms 2

Each recipe runs once whole (the variant `mini`, shortened), and once with kill -9, SIGTERM and flipped bytes of the
newest checkpoint, each followed by the same command. Weights, moments, state of the loop and logs must then be equal,
bit for bit. Prints one line per event and one JSON object per recipe; exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from zeroplay_jax.learner.checkpoint import saved_steps

EXAMPLES = """examples:
  python -m benchmarks.kills --recipes drzero,ssp --kills 3 --sigterms 2 --flips 2
"""
RECIPES = ('drzero', 'piplay', 'ssp', 'dspo', 'scope')
_FLAGS = (
    '--config.progress=False',
    '--config.world.train=(0,3)',
    '--config.world.evaluation=(0,1)',
    '--config.eval.questions=3',
    '--config.checkpoint.every=2',
    '--config.schedule.iterations=1',
    '--config.stop_after_empty_steps=0',
    '--config.micro.rows=2',
)
# Metrics and states that depend on the clock.
_CLOCKS = ('seconds', 'tokens_per_second', 'mfu', 'memory')
_PREEMPTED_STATUS = 75
_TIMEOUT_SECONDS = 600


@dataclasses.dataclass
class Run:
    """A run of a recipe in one or two processes.

    Attributes:
      recipe: name of its config.
      workdir: folder of the run.
      processes: their number.
    """

    recipe: str
    workdir: pathlib.Path
    processes: int

    def start(self) -> list[subprocess.Popen]:
        """Starts all processes; the first one's output goes to WORKDIR.log."""
        with socket.socket() as probe:
            probe.bind(('localhost', 0))
            port = probe.getsockname()[1]
        environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
        command = [sys.executable, '-m', 'zeroplay_jax.main']
        command += [f'--config=configs/{self.recipe}.py:mini', f'--workdir={self.workdir}', *_FLAGS]
        if self.processes > 1:
            command += ['--config.distributed.mode=coordinator', '--config.mesh.replica=2']
            command += [f'--config.distributed.coordinator=localhost:{port}']
            command += ['--config.distributed.processes=2', '--config.distributed.heartbeat=10']
        started = []
        for process in range(self.processes):
            own = [f'--config.distributed.process={process}'] if self.processes > 1 else []
            with self.workdir.with_suffix(f'.{process}.log').open('a') as log:
                started.append(
                    subprocess.Popen([*command, *own], env=environment, stdout=log, stderr=log)
                )
        return started

    def logged_steps(self) -> int:
        """Returns the number of steps in the log."""
        path = self.workdir / 'metrics.jsonl'
        return len(path.read_text().splitlines()) if path.is_file() else 0

    def checkpoint(self) -> int:
        """Returns the number of the newest checkpoint; 0 without one."""
        return max(saved_steps(self.workdir / 'checkpoints'), default=0)

    def records(self, name: str) -> list[dict[str, Any]]:
        """Returns the lines of a log without what depends on the clock."""
        records = []
        for line in (self.workdir / name).read_text(encoding='utf-8').splitlines():
            fields = json.loads(line).items()
            records.append({k: v for k, v in fields if not any(word in k for word in _CLOCKS)})
        return records

    def state(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Returns the arrays and the JSON of the newest checkpoint."""
        folder = self.workdir.resolve() / 'checkpoints' / str(self.checkpoint())
        tree = ocp.StandardCheckpointer().restore(folder / 'states')
        loop = json.loads((folder / 'loop' / 'metadata').read_text())
        loop.pop('seconds')
        return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)], loop


def _wait(started: list[subprocess.Popen]) -> list[int]:
    """Waits for all processes; returns their exit statuses."""
    return [process.wait(timeout=_TIMEOUT_SECONDS) for process in started]


def _end(run: Run, kind: str, delay: float, rng: random.Random) -> str:
    """Starts a run and ends one of its processes `delay` seconds after its next step; returns a line about it.

    Raises:
      AssertionError: SIGTERM lost a step that is in the log, or the status is another one.
    """
    started = run.start()
    before = run.logged_steps()
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    # Some events come while libraries load, all others after a step that is new.
    if rng.random() < 0.8:
        while run.logged_steps() <= before and all(process.poll() is None for process in started):
            assert time.monotonic() < deadline, 'no step'
            time.sleep(0.02)
    time.sleep(delay)
    victim = rng.choice(started)
    victim.send_signal(signal.SIGKILL if kind == 'kill' else signal.SIGTERM)
    statuses = _wait(started)
    if kind == 'sigterm' and any(statuses):
        assert set(statuses) == {_PREEMPTED_STATUS}, statuses
        assert run.checkpoint() == run.logged_steps(), 'a step was lost'
    return f'{kind} after {delay:.1f} s: statuses {statuses}, step {run.logged_steps()}, saved {run.checkpoint()}'


def _flip(run: Run, rng: random.Random) -> str:
    """Flips one bit of the newest checkpoint, unless it is the only one; returns a line about it."""
    steps = saved_steps(run.workdir / 'checkpoints')
    if len(steps) < 2:
        return 'flip: there is one checkpoint only'
    folder = run.workdir / 'checkpoints' / str(steps[-1])
    paths = [path for path in folder.rglob('*') if path.is_file() and path.stat().st_size]
    path = rng.choices(paths, [path.stat().st_size for path in paths])[0]
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f'flip in {path.relative_to(run.workdir)}'


def campaign(recipe: str, folder: pathlib.Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a recipe whole and with events at random moments; returns what was done and what differs."""
    rng = random.Random(f'{recipe} {arguments.seed}')
    whole = Run(recipe, folder / f'{recipe}-whole', arguments.processes)
    ended = Run(recipe, folder / f'{recipe}-ended', arguments.processes)
    assert not any(_wait(whole.start())), f'{recipe}: the whole run failed'
    events = ['kill'] * arguments.kills + ['sigterm'] * arguments.sigterms
    events += ['flip'] * arguments.flips
    rng.shuffle(events)
    for event in events:
        if event == 'flip':
            line = _flip(ended, rng)
        else:
            line = _end(ended, event, rng.uniform(0, arguments.delay), rng)
        print(f'{recipe}: {line}', flush=True)
    statuses = _wait(ended.start())
    differences = []
    if any(statuses):
        differences.append(f'the last start ended with {statuses}')
    for name in ('metrics.jsonl', 'trajectories.jsonl', 'tasks.jsonl'):
        if whole.records(name) != ended.records(name):
            differences.append(name)
    arrays, loop = whole.state()
    other_arrays, other_loop = ended.state()
    if loop != other_loop:
        differences.append('state of the loop')
    if not all(map(np.array_equal, arrays, other_arrays)) or len(arrays) != len(other_arrays):
        differences.append('weights or moments')
    return {'recipe': recipe, 'events': len(events), 'differences': differences}


def main() -> None:
    """Runs the campaign over all recipes of the command line."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.kills',
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--recipes', default=','.join(RECIPES), help='names with commas between')
    parser.add_argument('--kills', type=int, default=3, help='kill -9, per recipe')
    parser.add_argument('--sigterms', type=int, default=2, help='SIGTERMs, per recipe')
    parser.add_argument('--flips', type=int, default=2, help='flipped bits, per recipe')
    parser.add_argument('--processes', type=int, choices=(1, 2), default=1, help='of each run')
    parser.add_argument('--delay', type=float, default=3.0, help='most seconds after a step')
    parser.add_argument('--seed', type=int, default=0, help='of the moments')
    parser.add_argument('--folder', help='of the runs; a temporary one, which stays, by default')
    arguments = parser.parse_args()
    folder = pathlib.Path(arguments.folder or tempfile.mkdtemp(prefix='kills.'))
    folder.mkdir(parents=True, exist_ok=True)
    print(f'runs and their logs: {folder}', flush=True)
    results = []
    for recipe in arguments.recipes.split(','):
        results.append(campaign(recipe, folder, arguments))
        print(json.dumps(results[-1]), flush=True)
    sys.exit(any(result['differences'] for result in results))


if __name__ == '__main__':
    main()
