"""Kills runs whose workdir is in a bucket at random moments, and compares them with a run in a folder.

    STORAGE_EMULATOR_HOST=http://localhost:9023 python -m benchmarks.kills_bucket --bucket gs://bucket/kills

Like `benchmarks.kills`, but after every other event the local folders of the run are removed, as if other machines
resumed it: that run begins with what the bucket has. kill -9 ends all processes of a run, SIGTERM is sent to one of
them. In the end weights, moments, state of the loop and logs are brought down from the bucket and must be those of the
run in a folder, bit for bit; a run that ends before all events have happened is compared and begun anew. The bucket may
be an emulated one. Prints one JSON object per event and one per recipe; exit status 1 if anything differs. The same
call with the same --folder continues after the last comparison.
"""

from __future__ import annotations

import argparse
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

from benchmarks.kills import PREEMPTED_STATUS, TIMEOUT_SECONDS, Run, differences, wait
from zeroplay_jax.runtime.remote_workdir import RemoteWorkdir, local_run


class Campaign:
    """One recipe with events at random moments.

    Args:
      recipe: its name.
      folder: of the local files.
      arguments: of the command line.
    """

    def __init__(self, recipe: str, folder: pathlib.Path, arguments: argparse.Namespace):
        processes = arguments.processes
        name = f'{recipe}{processes}'
        self._arguments = arguments
        self._rng = random.Random(f'{name} {arguments.seed}')
        self._spool = folder / f'{name}-spool'
        self._copies = folder / f'{name}-copies'
        self._whole = Run(recipe, folder / f'{name}-whole', processes)
        # A checkpoint after each step, so that more events meet an upload. The last flag takes effect.
        flags = (f'--config.bucket.spool={self._spool}', '--config.checkpoint.every=1')
        address = f'{arguments.bucket}/{name}-{time.time_ns()}'
        self._ended = Run(recipe, folder / f'{name}-ended', processes, address, flags)
        self._num_runs = 0
        # Events of the run in progress, and what was compared, which an interrupted campaign takes up again.
        self._events: list[dict[str, Any]] = []
        self._record_path = folder / f'{name}.json'
        self._record: dict[str, Any] = {'events': [], 'compared': 0, 'problems': []}
        if self._record_path.is_file():
            self._record = json.loads(self._record_path.read_text(encoding='utf-8'))

    def run(self) -> dict[str, Any]:
        """Runs everything; returns the counts and 'problems'."""
        # A whole run of an earlier call is used again.
        if not (self._whole.workdir / 'summary.json').is_file():
            assert not any(wait(self._whole.start())), f'{self._whole.workdir}: failed'
        self._begin()
        kinds = ['kill'] * self._arguments.kills + ['sigterm'] * self._arguments.sigterms
        self._rng.shuffle(kinds)
        for event in self._record['events']:
            if event['event'] in kinds:
                kinds.remove(event['event'])
        while kinds:
            # The run may have ended by itself before the event.
            if self._happens(kinds[0]):
                kinds.pop(0)
            else:
                self._finish()
        if self._events:
            self._finish()
        events = [event['event'] for event in self._record['events']]
        arrays, _ = self._whole.state()
        return {
            'recipe': self._whole.recipe,
            'processes': self._arguments.processes,
            'kill': events.count('kill'),
            'sigterm': events.count('sigterm'),
            'compared': self._record['compared'],
            'arrays': len(arrays),
            'problems': self._record['problems'],
        }

    def _begin(self) -> None:
        """Gives the run a new address."""
        shutil.rmtree(self._spool, ignore_errors=True)
        self._events = []
        self._num_runs += 1
        base = self._ended.address.partition('.run')[0]
        self._ended.address = f'{base}.run{self._num_runs}'

    def _happens(self, kind: str) -> bool:
        """Starts the run and lets an event happen; returns False if the run ended before it."""
        # Another machine begins with the log up to the newest step in the bucket.
        before = max(self._logged_steps(), self._uploaded_steps())
        started_at = time.monotonic()
        started = self._ended.start()
        while self._logged_steps() <= before and self._are_running(started):
            assert time.monotonic() < started_at + TIMEOUT_SECONDS, 'no step'
            time.sleep(0.02)
        time.sleep(self._rng.uniform(0, self._arguments.delay))
        event_at = time.monotonic()
        if kind == 'sigterm':
            self._rng.choice(started).send_signal(signal.SIGTERM)
        else:
            for process in started:
                process.kill()
        statuses = wait(started)
        end_seconds = time.monotonic() - event_at
        if not any(statuses):
            return False
        logged = self._logged_steps()
        uploaded = self._uploaded_steps()
        if kind == 'sigterm' and set(statuses) != {PREEMPTED_STATUS}:
            self._add_problems([f'exit statuses {statuses} after SIGTERM'])
        elif kind == 'sigterm' and uploaded != logged:
            self._add_problems([f'{logged} steps, {uploaded} in the bucket'])
        is_elsewhere = len(self._events) % 2 == 0
        event = {
            'event': kind,
            'statuses': statuses,
            'logged': logged,
            'uploaded': uploaded,
            'end_seconds': round(end_seconds, 1),
            'resumed_elsewhere': is_elsewhere,
        }
        print(json.dumps(event), flush=True)
        self._events.append(event)
        if is_elsewhere:
            shutil.rmtree(self._spool, ignore_errors=True)
        return True

    def _finish(self) -> None:
        """Lets the run end, compares it with the whole one, and begins another one."""
        statuses = wait(self._ended.start())
        if any(statuses):
            problems = [f'the last start ended with {statuses}']
        else:
            with mock.patch.dict('os.environ', XDG_CACHE_HOME=str(self._copies)):
                folder = local_run(self._ended.address, 'checkpoints')
            problems = differences(self._whole, Run(self._whole.recipe, folder, 1))
        self._record['events'] += self._events
        self._record['compared'] += 1
        self._add_problems(problems)
        self._begin()

    def _add_problems(self, problems: list[str]) -> None:
        """Adds problems to the record and writes it, so that they outlast a campaign that is interrupted."""
        self._record['problems'] += problems
        text = json.dumps(self._record, indent=1)
        self._record_path.write_text(text, encoding='utf-8')

    def _are_running(self, started: list[subprocess.Popen]) -> bool:
        return all(process.poll() is None for process in started)

    def _uploaded_steps(self) -> int:
        """Returns the number of the newest step in the bucket; 0 without one."""
        return max(RemoteWorkdir.open(self._ended.address).manifests(), default=0)

    def _logged_steps(self) -> int:
        """Returns the number of steps in the log of the only run in the folder of local folders."""
        for path in self._spool.glob('*/*/metrics.jsonl'):
            return len(path.read_text(encoding='utf-8').splitlines())
        return 0


def main() -> None:
    """Runs the campaign over all recipes of the command line."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.kills_bucket',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--bucket', required=True, help='address under which the runs are')
    parser.add_argument('--recipes', default='ssp', help='names with commas between')
    parser.add_argument('--kills', type=int, default=10, help='kill -9, per recipe')
    parser.add_argument('--sigterms', type=int, default=4, help='SIGTERMs, per recipe')
    parser.add_argument('--processes', type=int, choices=(1, 2), default=1, help='of each run')
    parser.add_argument('--delay', type=float, default=8.0, help='most seconds after a step')
    parser.add_argument('--seed', type=int, default=0, help='of the moments')
    parser.add_argument('--folder', help='of the local files; a temporary one by default')
    arguments = parser.parse_args()
    folder = pathlib.Path(arguments.folder or tempfile.mkdtemp(prefix='kills.')).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f'local files: {folder}', flush=True)
    results = []
    for recipe in arguments.recipes.split(','):
        results.append(Campaign(recipe, folder, arguments).run())
        print(json.dumps(results[-1]), flush=True)
    sys.exit(any(result['problems'] for result in results))


if __name__ == '__main__':
    main()
