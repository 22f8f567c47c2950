"""Kills runs whose workdir is in a bucket at random moments, and compares them with a run in a folder.

    STORAGE_EMULATOR_HOST=http://localhost:9023 python -m benchmarks.kills_bucket --bucket gs://bucket/kills

Like `benchmarks.kills`, but after every other event the local folder of the run is removed, as if another machine
resumed it: that run begins with what the bucket has. In the end weights, moments, state of the loop and logs are
brought down from the bucket and must be those of the run in a folder, bit for bit. The bucket may be an emulated one.
Prints one line per event and one JSON object per recipe; exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
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

from benchmarks.kills import FLAGS, PREEMPTED_STATUS, TIMEOUT_SECONDS, Run, differences
from zeroplay_jax.runtime.remote_workdir import RemoteWorkdir, local_run


def start(recipe: str, workdir: str, folder: pathlib.Path) -> subprocess.Popen:
    """Starts a run of the variant `mini`.

    Args:
      recipe: name of its config.
      workdir: folder or address.
      folder: gets the output, the caches and the local folders of runs in a bucket.
    """
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
    command = [sys.executable, '-m', 'zeroplay_jax.main', f'--config=configs/{recipe}.py:mini']
    command += [f'--workdir={workdir}', f'--config.bucket.spool={folder / "spool"}', *FLAGS]
    command.append(f'--config.compilation.cache={folder / "programs"}')
    with (folder / f'{recipe}.log').open('a') as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _logged_steps(spool: pathlib.Path) -> int:
    """Returns the number of steps in the log of the only run in a folder of local folders."""
    for path in spool.glob('*/*/metrics.jsonl'):
        return len(path.read_text(encoding='utf-8').splitlines())
    return 0


def end_once(
    recipe: str, address: str, folder: pathlib.Path, kind: int, rng: random.Random, delay: float
) -> tuple[int, str]:
    """Starts the run and sends it a signal after a random time; returns its exit status and a line about it.

    Args:
      kind: SIGKILL or SIGTERM.
      delay: most seconds between a new step and the signal.

    Raises:
      AssertionError: SIGTERM lost a step, or the exit status is another one.
    """
    process = start(recipe, address, folder)
    before = _logged_steps(folder / 'spool')
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and _logged_steps(folder / 'spool') <= before:
        assert time.monotonic() < deadline, 'no step'
        time.sleep(0.02)
    time.sleep(rng.uniform(0, delay))
    process.send_signal(kind)
    status = process.wait(TIMEOUT_SECONDS)
    uploaded = max(RemoteWorkdir.open(address).manifests(), default=0)
    logged = _logged_steps(folder / 'spool')
    if kind == signal.SIGTERM and status:
        assert status == PREEMPTED_STATUS, status
        assert uploaded == logged, f'{logged} steps, {uploaded} in the bucket'
    name = signal.Signals(kind).name
    return status, f'{name}: status {status}, {logged} steps logged, {uploaded} in the bucket'


def campaign(recipe: str, folder: pathlib.Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a recipe whole in a folder, and with events in the bucket; returns what was done and what differs."""
    rng = random.Random(f'{recipe} {arguments.seed}')
    whole = Run(recipe, folder / f'{recipe}-whole', 1)
    address = f'{arguments.bucket}/{recipe}-{time.time_ns()}'
    assert start(recipe, str(whole.workdir), folder).wait(TIMEOUT_SECONDS) == 0, 'the whole run'
    events = [signal.SIGKILL] * arguments.kills + [signal.SIGTERM] * arguments.sigterms
    rng.shuffle(events)
    num_ended = 0
    for number, event in enumerate(events):
        status, line = end_once(recipe, address, folder, event, rng, arguments.delay)
        # The signal may have come when the run had ended by itself.
        num_ended += status != 0
        if number % 2 == 0:
            shutil.rmtree(folder / 'spool')
            line += '; resumed by another machine'
        print(f'{recipe}: {line}', flush=True)
    status = start(recipe, address, folder).wait(TIMEOUT_SECONDS)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder / 'copies')):
        ended = Run(recipe, local_run(address, 'checkpoints'), 1)
    shutil.rmtree(folder / 'spool')
    problems = [f'the last start ended with {status}'] if status else []
    arrays, _ = whole.state()
    return {
        'recipe': recipe,
        'events': num_ended,
        'arrays': len(arrays),
        'differences': problems + differences(whole, ended),
    }


def main() -> None:
    """Runs the campaign over all recipes of the command line."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.kills_bucket',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--bucket', required=True, help='address under which the runs are')
    parser.add_argument('--recipes', default='ssp', help='names with commas between')
    parser.add_argument('--kills', type=int, default=3, help='kill -9, per recipe')
    parser.add_argument('--sigterms', type=int, default=2, help='SIGTERMs, per recipe')
    parser.add_argument('--delay', type=float, default=1.0, help='most seconds after a step')
    parser.add_argument('--seed', type=int, default=0, help='of the moments')
    parser.add_argument('--folder', help='of the local files; a temporary one by default')
    arguments = parser.parse_args()
    folder = pathlib.Path(arguments.folder or tempfile.mkdtemp(prefix='kills.'))
    folder.mkdir(parents=True, exist_ok=True)
    print(f'local files: {folder}', flush=True)
    results = []
    for recipe in arguments.recipes.split(','):
        results.append(campaign(recipe, folder, arguments))
        print(json.dumps(results[-1]), flush=True)
    sys.exit(any(result['differences'] for result in results))


if __name__ == '__main__':
    main()
