"""Ends runs at random moments, resumes them, and compares them with runs that were left alone.

    python -m benchmarks.kills --recipes drzero,ssp --kills 3 --sigterms 2 --flips 1
    python -m benchmarks.kills --processes 2 --recipes ssp --kills 2 --sigterms 1
    python -m benchmarks.kills --processes 2 --recipes piplay --kills 2 --rank 4     # with adapters
    STORAGE_EMULATOR_HOST=http://localhost:9023 python -m benchmarks.kills --recipes ssp --bucket gs://bucket/kills

Each recipe runs once whole (the variant `mini`, shortened), and once with events at random moments. Every event ends
one process of the run with kill -9 or SIGTERM; the same command then resumes it. Before the start that leads to some of
the kills, a bit of the newest checkpoint is flipped. In the end weights, moments, state of the loop and logs must be
equal, bit for bit. A run that ends before all events have happened is compared and begun anew. Prints one JSON object
per event and one per recipe; exit status 1 if anything differs.

With --bucket the workdir of the interrupted run is in a bucket, which may be an emulated one. kill -9 then ends all its
processes, and after every other event its local folders are removed, as if other machines resumed it. No bit is
flipped, and all events follow a step.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.command import cpu_environment, free_port, parser, read_lines
from zeroplay_jax.learner.checkpoint import saved_steps, stored_tree
from zeroplay_jax.runtime.workdir import local_run

RECIPES = ('drzero', 'piplay', 'ssp', 'dspo', 'scope')
FLAGS = (
    '--config.progress=False',
    '--config.world.train=(0,3)',
    '--config.world.evaluation=(0,1)',
    '--config.eval.questions=3',
    '--config.checkpoint.every=2',
    '--config.stop_after_empty_steps=0',
    '--config.micro.rows=2',
    '--config.sampler.slots=16',
)
# These have one phase of three steps per iteration, the others have three phases.
_ONE_PHASE = ('ssp', 'dspo')
# Metrics and states that depend on the clock, or on what the cache of compiled programs holds.
_CLOCKS = ('seconds', 'tokens_per_second', 'mfu', 'memory', 'programs')
_LOGS = ('metrics.jsonl', 'trajectories.jsonl', 'tasks.jsonl', 'alarms.jsonl')
PREEMPTED_STATUS = 75
TIMEOUT_SECONDS = 600
_JOIN_SECONDS = 30
# Share of the events that come at any moment of the first seconds of a process, in which libraries load, a checkpoint
# is read and programs are compiled. All others follow a step.
_EARLY_SHARE = 0.2
_EARLY_SECONDS = 20.0
# Most seconds between a step and the event that follows it.
_LATE_SECONDS = 3.0


@dataclasses.dataclass
class Run:
    """A run of a recipe in one or two processes.

    Attributes:
      recipe: name of its config.
      workdir: folder of the run.
      processes: their number.
      address: of its workdir in a bucket; '' for a folder.
      flags: further ones of the command line.
    """

    recipe: str
    workdir: pathlib.Path
    processes: int
    address: str = ''
    flags: tuple[str, ...] = ()

    def start(self) -> list[subprocess.Popen]:
        """Starts all processes; the output of each goes to WORKDIR.PROCESS.log."""
        command = [sys.executable, '-m', 'zeroplay_jax.main']
        command += [f'--config=configs/{self.recipe}.py:mini', *FLAGS, *self.flags]
        command += [f'--workdir={self.address or self.workdir}']
        # Most of a start would be compilations, which all runs of a recipe share.
        command += [f'--config.compilation.cache={self.workdir.parent / "cache"}']
        command += [f'--config.schedule.iterations={3 if self.recipe in _ONE_PHASE else 1}']
        if self.processes > 1:
            command += ['--config.distributed.mode=coordinator', '--config.mesh.replica=2']
            command += [f'--config.distributed.coordinator=localhost:{free_port()}']
            command += ['--config.distributed.processes=2', '--config.distributed.heartbeat=10']
        started = []
        for process in range(self.processes):
            number = [f'--config.distributed.process={process}'] if self.processes > 1 else []
            with self.log_path(process).open('a') as log:
                arguments = [*command, *number]
                started.append(
                    subprocess.Popen(arguments, env=cpu_environment(), stdout=log, stderr=log)
                )
        return started

    def log_path(self, process: int) -> pathlib.Path:
        """Returns the file that gets the output of a process."""
        return self.workdir.with_name(f'{self.workdir.name}.{process}.log')

    def logged_steps(self) -> int:
        """Returns the number of steps in the log."""
        return _line_count(self.workdir / 'metrics.jsonl')

    def checkpoint(self) -> int:
        """Returns the number of the newest checkpoint; 0 without one."""
        return max(saved_steps(self.workdir / 'checkpoints'), default=0)

    def records(self, name: str) -> list[dict[str, Any]]:
        """Returns the lines of a log without what depends on the clock."""
        return log_records(self.workdir / name)

    def state(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Returns the arrays and the JSON of the newest checkpoint."""
        folder = self.workdir.resolve() / 'checkpoints' / str(self.checkpoint())
        shapes = stored_tree(folder)
        # As NumPy arrays: this process has not the devices of a run of two.
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        request = ocp.args.PyTreeRestore(item=shapes, restore_args=kinds)
        tree = ocp.PyTreeCheckpointHandler().restore(folder / 'states', args=request)
        loop = json.loads((folder / 'loop' / 'metadata').read_text())
        loop.pop('seconds')
        return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)], loop


class BucketRun(Run):
    """A run whose workdir is in a bucket; `workdir` is the folder of its local folders."""

    def logged_steps(self) -> int:
        """Returns the number of steps in the log of the only run in the folder of local folders."""
        for path in self.workdir.glob('*/*/metrics.jsonl'):
            return _line_count(path)
        return 0

    def checkpoint(self) -> int:
        """Returns the number of the newest step in the bucket; 0 without one."""
        # Here: the other runs need no extra.
        from zeroplay_jax.extras.buckets.workdir import RemoteWorkdir

        return max(RemoteWorkdir.open(self.address).manifests(), default=0)


def _line_count(path: pathlib.Path) -> int:
    # The last line of a log may be half written.
    return path.read_bytes().count(b'\n') if path.is_file() else 0


def log_records(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of a log without what depends on the clock; [] without the file."""
    if not path.is_file():
        return []
    records = []
    for record in read_lines(path):
        records.append({k: v for k, v in record.items() if not any(word in k for word in _CLOCKS)})
    return records


def wait(started: list[subprocess.Popen], seconds: float = TIMEOUT_SECONDS) -> list[int]:
    """Waits for all processes; returns their exit statuses.

    Raises:
      subprocess.TimeoutExpired: a process does not end within `seconds` of the one before.
    """
    return [process.wait(timeout=seconds) for process in started]


def _wait_or_kill(started: list[subprocess.Popen]) -> list[int]:
    """Waits for processes of which one was ended; ends the others after a while, as launch scripts do."""
    try:
        return wait(started, _JOIN_SECONDS)
    except subprocess.TimeoutExpired:
        # A process waits minutes for one that ended before they joined.
        for process in started:
            process.kill()
        return wait(started)


def _end(run: Run, kind: str, is_early: bool, delay: float, rng: random.Random) -> dict[str, Any]:
    """Starts a run and ends one of its processes, or all; returns what happened.

    Args:
      kind: 'kill', 'flip' (a kill, too) or 'sigterm'.
      is_early: whether the event comes `delay` seconds after the start, and not after the first step of this start.
      delay: seconds.

    Returns:
      'statuses' of the processes (all 0: the run ended before the event), 'logged' and 'saved' steps, and 'problem', a
      text, '' if there is none.
    """
    # Another machine begins with the log up to the newest step in the bucket.
    before = max(run.logged_steps(), run.checkpoint())
    started_at = time.monotonic()
    started = run.start()
    while not is_early and run.logged_steps() <= before:
        if any(process.poll() is not None for process in started):
            break
        if time.monotonic() > started_at + TIMEOUT_SECONDS:
            raise TimeoutError(f'{run.workdir}: no step')
        time.sleep(0.02)
    time.sleep(delay)
    victims = [rng.choice(started)]
    if run.address and kind != 'sigterm':
        victims = started
    for process in victims:
        process.send_signal(signal.SIGTERM if kind == 'sigterm' else signal.SIGKILL)
    event_at = time.monotonic()
    statuses = _wait_or_kill(started) if is_early else wait(started)
    problem = ''
    # While a run loads, SIGTERM ends its process at once, and what an earlier kill has left behind stays as it is.
    if kind == 'sigterm' and not is_early and any(statuses):
        if set(statuses) != {PREEMPTED_STATUS}:
            problem = f'exit statuses {statuses} after SIGTERM'
        elif run.checkpoint() != run.logged_steps():
            problem = f'SIGTERM lost steps {run.checkpoint()} to {run.logged_steps() - 1}'
    return {
        'statuses': statuses,
        'seconds': round(event_at - started_at, 1),
        'end_seconds': round(time.monotonic() - event_at, 1),
        'logged': run.logged_steps(),
        'saved': run.checkpoint(),
        'problem': problem,
    }


def differences(whole: Run, ended: Run) -> list[str]:
    """Returns the names of all parts in which two finished runs differ."""
    differing = [name for name in _LOGS if whole.records(name) != ended.records(name)]
    arrays, loop = whole.state()
    other_arrays, other_loop = ended.state()
    if loop != other_loop:
        differing.append('state of the loop')
    if len(arrays) != len(other_arrays) or not all(map(np.array_equal, arrays, other_arrays)):
        differing.append('weights or moments')
    return differing


class Campaign:
    """One recipe with events at random moments.

    Args:
      recipe: its name.
      folder: of the runs.
      arguments: of the command line.
    """

    def __init__(self, recipe: str, folder: pathlib.Path, arguments: argparse.Namespace):
        self._arguments = arguments
        self._rng = random.Random(f'{recipe} {arguments.processes} {arguments.seed}')
        self._folder = folder
        self._name = f'{recipe}{arguments.processes}'
        flags: tuple[str, ...] = ()
        if arguments.rank:
            self._name += f'-rank{arguments.rank}'
            flags = (f'--config.policy.adapters.rank={arguments.rank}',)
        workdir = folder / f'{self._name}-whole'
        self._whole = Run(recipe, workdir, arguments.processes, '', flags)
        self._runs = 0
        self._ended = self._new_run()
        self._happened: collections.Counter[str] = collections.Counter()
        self._problems: list[str] = []
        self._compared = 0
        self._lost_steps: list[int] = []

    def _new_run(self) -> Run:
        """Returns a run that events will end, without anything of an earlier one."""
        whole = self._whole
        folder = self._folder / f'{self._name}-ended'
        shutil.rmtree(folder, ignore_errors=True)
        if not self._arguments.bucket:
            return dataclasses.replace(whole, workdir=folder)
        self._runs += 1
        address = f'{self._arguments.bucket}/{self._name}-{time.time_ns()}.run{self._runs}'
        # A checkpoint after each step, so that more events meet an upload. The last flag takes effect.
        flags = (*whole.flags, f'--config.bucket.spool={folder}', '--config.checkpoint.every=1')
        return BucketRun(whole.recipe, folder, whole.processes, address, flags)

    def run(self) -> dict[str, Any]:
        """Runs everything; returns the counts and 'problems'."""
        arguments = self._arguments
        # A whole run of an earlier call is used again.
        if not (self._whole.workdir / 'summary.json').is_file():
            assert not any(wait(self._whole.start())), f'{self._whole.workdir}: failed'
        kinds = ['kill'] * (arguments.kills - arguments.flips) + ['flip'] * arguments.flips
        kinds += ['sigterm'] * arguments.sigterms
        self._rng.shuffle(kinds)
        while kinds and not self._problems:
            kind = kinds.pop(0)
            # Of a single checkpoint nothing is left to fall back to.
            if kind == 'flip' and len(saved_steps(self._ended.workdir / 'checkpoints')) < 2:
                kinds.append(kind)
                # The run makes progress, whatever is left of the events.
                kind = kinds.pop(0) if len(set(kinds)) > 1 else 'kill'
            if not self._happens(kind):
                kinds.append(kind)
        self._finish()
        arrays, _ = self._whole.state()
        return {
            'recipe': self._whole.recipe,
            'processes': arguments.processes,
            **self._happened,
            'compared': self._compared,
            'most_lost': max(self._lost_steps, default=0),
            'arrays': len(arrays),
            'problems': self._problems,
        }

    def _happens(self, kind: str) -> bool:
        """Starts the run and lets an event happen; returns False if the run ended before it."""
        damaged = _flip(self._ended, self._rng) if kind == 'flip' else None
        # After a flip the start is to come as far as the comparison with the checksums.
        can_be_early = damaged is None and not self._ended.address
        is_early = can_be_early and self._rng.random() < _EARLY_SHARE
        delay = self._rng.uniform(0, _EARLY_SECONDS if is_early else _LATE_SECONDS)
        log = self._ended.log_path(0)
        # The log has the lines of all earlier starts, too.
        earlier_bytes = log.stat().st_size if log.exists() else 0
        event = _end(self._ended, kind, is_early, delay, self._rng)
        details = {'event': kind, 'early': is_early, 'flipped': damaged}
        print(json.dumps(details | event), flush=True)
        if event['problem']:
            self._problems.append(event['problem'])
        if damaged is not None:
            line = f'checkpoint {damaged[0]} is damaged: '
            if line not in log.read_bytes()[earlier_bytes:].decode(errors='replace'):
                self._problems.append(f'a flip in {damaged[1]} was not found')
            self._happened['flip'] += 1
        if not any(event['statuses']):
            self._finish()
            return False
        self._lost_steps.append(event['logged'] - event['saved'])
        self._happened['sigterm' if kind == 'sigterm' else 'kill'] += 1
        if self._ended.address and len(self._lost_steps) % 2:
            # As if other machines resumed the run.
            shutil.rmtree(self._ended.workdir, ignore_errors=True)
        return True

    def _finish(self) -> None:
        """Lets the run end, compares it with the whole one, and begins another one."""
        statuses = wait(self._ended.start())
        if any(statuses):
            self._problems.append(f'the last start ended with {statuses}')
            return
        ended = self._ended
        if ended.address:
            with mock.patch.dict('os.environ', XDG_CACHE_HOME=f'{self._folder}/copies'):
                copy = local_run(ended.address, 'checkpoints')
            ended = Run(ended.recipe, copy, 1)
        differing = differences(self._whole, ended)
        self._problems += differing
        self._compared += 1
        # Kept for a closer look if it differs.
        if not differing:
            self._ended = self._new_run()


def _flip(run: Run, rng: random.Random) -> tuple[int, str]:
    """Flips one bit of the newest checkpoint of a run; returns its number and the name of the file.

    Half of the bits are drawn from all bytes, half from the bytes of a file that is drawn first: most files are small.
    """
    step = run.checkpoint()
    folder = run.workdir / 'checkpoints' / str(step)
    paths = sorted(path for path in folder.rglob('*') if path.is_file() and path.stat().st_size)
    sizes = [path.stat().st_size for path in paths]
    path = rng.choices(paths, sizes if rng.random() < 0.5 else None)[0]
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return step, path.relative_to(folder).as_posix()


def main() -> None:
    """Runs the campaign over all recipes of the command line."""
    flags = parser('kills', __doc__)
    flags.add_argument('--recipes', default=','.join(RECIPES), help='names with commas between')
    flags.add_argument('--kills', type=int, default=4, help='kill -9, per recipe')
    flags.add_argument('--sigterms', type=int, default=1, help='SIGTERMs, per recipe')
    flags.add_argument('--flips', type=int, default=1, help='kills with a flipped bit before')
    flags.add_argument('--rank', type=int, default=0, help='of adapters; 0: whole weights')
    flags.add_argument('--processes', type=int, choices=(1, 2), default=1, help='of each run')
    flags.add_argument('--seed', type=int, default=0, help='of the moments')
    flags.add_argument('--bucket', default='', help='address under which the runs are')
    flags.add_argument('--folder', help='of the runs; a temporary one, which stays, by default')
    arguments = flags.parse_args()
    if arguments.bucket:
        arguments.flips = 0
    if arguments.flips > arguments.kills:
        flags.error('--flips: each belongs to a kill; give at most --kills')
    folder = pathlib.Path(arguments.folder or tempfile.mkdtemp(prefix='kills.')).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f'runs and their logs: {folder}', flush=True)
    results = []
    for recipe in arguments.recipes.split(','):
        results.append(Campaign(recipe, folder, arguments).run())
        print(json.dumps(results[-1]), flush=True)
    sys.exit(any(result['problems'] for result in results))


if __name__ == '__main__':
    main()
