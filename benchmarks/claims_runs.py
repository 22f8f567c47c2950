"""Executes the runs of the claims benchmark, in several processes, and keeps every finished one."""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import multiprocessing
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.claims_arms import config_of
from zeroplay_jax.configs import common
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT

# Raised when a change of the code changes the result of a run, so that no stored run of the earlier code is reused.
# 2: the rule judge grades facts; minibatches are drawn by prompt.
CODE = 2
_CACHE_BYTES = 2_000_000_000
_PACKAGE = pathlib.Path(__file__).parents[1] / 'zeroplay_jax'

# An arm and a seed.
Run = tuple[str, int]


@functools.cache
def code_hash() -> str:
    """Returns 12 hexadecimal digits that identify the code and the checkpoints of the package."""
    digest = hashlib.sha256()
    for path in _package_files():
        digest.update(str(path.relative_to(_PACKAGE)).encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _package_files() -> list[pathlib.Path]:
    """Returns all files of the package, in a fixed order."""
    paths = []
    # `configs` and `retrieval` are links to folders beside the package, which `Path.rglob` does not enter.
    for folder, _, names in os.walk(_PACKAGE, followlinks=True):
        if '__pycache__' not in folder:
            paths += [pathlib.Path(folder, name) for name in names]
    return sorted(paths)


def keep_programs() -> None:
    """Makes this process read and store compiled programs, for all processes and later calls."""
    import jax

    from zeroplay_jax.runtime.devices import CompilationCache

    # A program for a CPU may depend on the number of cores.
    cores = len(os.sched_getaffinity(0))
    folder = pathlib.Path(__file__).parents[1] / '.cache' / f'programs_of_{cores}_cores'
    jax.config.update('jax_compilation_cache_max_size', _CACHE_BYTES)
    CompilationCache(str(folder))


@functools.cache
def _defaults() -> dict[str, Any]:
    return dict(fields.leaves(common.get_config()))


def config_hash(config: Any) -> str:
    """Returns 16 hexadecimal digits that name the results of a config and of CODE."""
    # Of the changed fields only, so stored results stay valid if configs/common.py gets a new field.
    defaults = _defaults()
    changes = {k: v for k, v in fields.leaves(config) if v != defaults[k]}
    # This field is not a property of an arm, and results of versions without it keep their names.
    changes.pop('stop_after_empty_steps', None)
    # The only form of this gate in versions without the field.
    if changes.get('scope.relevant_to') == 'evidence':
        del changes['scope.relevant_to']
    # Checkpoints of the package have the same name wherever it is installed, and one that was trained again keeps its
    # name. This includes the default one.
    policy = pathlib.Path(config.policy.path or BUILT_IN_CHECKPOINT)
    if policy.is_relative_to(_PACKAGE):
        changes['policy.path'] = str(policy.relative_to(_PACKAGE))
        changes['policy.files'] = _checkpoint_hashes(policy)
    text = json.dumps([CODE, changes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _checkpoint_hashes(folder: pathlib.Path) -> str:
    """Returns the hashes of a checkpoint's files, as its folder lists them."""
    return (folder / 'SHA256SUMS').read_text()


def stored_path(arm: str, seed: int, folder: pathlib.Path) -> pathlib.Path:
    """Returns the file of a finished run in `folder`."""
    return folder / f'{config_hash(config_of(arm, seed))}.json'


def run_arm(arm: str, seed: int, folder: pathlib.Path) -> dict:
    """Returns the result of one run: from `folder` if it is stored there, else it executes the run and stores it.

    Returns:
      {'arm', 'seed', 'curve': one entry per evaluation, see `_curve`, 'seconds', 'external_items': summary.json's
      'outside_questions', 'code': `code_hash`}.
    """
    path = stored_path(arm, seed, folder)
    if path.exists():
        return json.loads(path.read_text())
    from zeroplay_jax.training import loop

    # Before the run, because files may be edited meanwhile.
    code = code_hash()
    config = config_of(arm, seed)
    # 0: a run is never stopped, because an arm that trains nothing is a result, too.
    config.stop_after_empty_steps = 0
    for name, (warn, _, steps) in config.alarms.items():
        config.alarms[name] = (warn, 0.0, steps)
    rules.check(config)
    started = time.perf_counter()
    workdir = pathlib.Path(tempfile.mkdtemp(prefix='claims.'))
    try:
        loop.run(config, workdir / 'run')
        summary = json.loads((workdir / 'run' / 'summary.json').read_text())
        lines = (workdir / 'run' / 'metrics.jsonl').read_text().strip().split('\n')
        curve = _curve(summary, lines)
    finally:
        shutil.rmtree(workdir, ignore_errors=True)
    seconds = round(time.perf_counter() - started, 1)
    result = dict(arm=arm, seed=seed, curve=curve, seconds=seconds)
    result['external_items'] = summary['outside_questions']
    result['code'] = code
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(result))
    return result


def _curve(summary: dict, lines: list[str]) -> list:
    """Returns [solver steps, rollouts, correct by question (, rubrics met by open task)] for every evaluation.

    Args:
      summary: summary.json of the run.
      lines: lines of its metrics.jsonl, in order. Solver steps and rollouts of any kind are counted up to the
        evaluation.
    """
    rubrics = summary['results'].get('rubrics')
    steps = 0
    rollouts = 0
    curve = []
    for line in lines:
        record = json.loads(line)
        if record['phase'] == 'evaluation':
            number = str(record['step'])
            correct: list = []
            for flags in summary['results']['evaluations'][number].values():
                correct += flags
            point = [steps, rollouts, correct]
            if rubrics:
                point.append(rubrics[number])
            curve.append(point)
        steps += record['phase'] in ('solver', 'selfplay')
        rollouts += int(record.get('rollouts', 0))
    return curve


class Runner:
    """Executes runs side by side; use it as a context manager.

    Args:
      folder: of the stored runs.
      processes: runs at the same time; the processor cores are divided among them.
      deadline: `time.monotonic()` after which no run is begun.
    """

    def __init__(self, folder: pathlib.Path, processes: int, deadline: float = float('inf')):
        self.folder = folder
        self.processes = processes
        self.deadline = deadline
        self._seconds: list[float] = []
        # The same runs are looked for once per look and claim; a config takes milliseconds.
        self._stored_path = functools.cache(functools.partial(stored_path, folder=folder))
        # A new interpreter for every process: JAX does not survive a fork.
        context = multiprocessing.get_context('spawn')
        self._pool = concurrent.futures.ProcessPoolExecutor(
            processes, context, _start_process, (context.Value('i', 0), processes)
        )

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(cancel_futures=True)

    def stored(self, runs: Sequence[Run]) -> dict[Run, dict]:
        """Returns the results of those runs that are stored."""
        results: dict[Run, dict] = {}
        for arm, seed in runs:
            path = self._stored_path(arm, seed)
            if path.exists():
                results[arm, seed] = json.loads(path.read_text())
        return results

    def run(self, runs: Sequence[Run]) -> dict[Run, dict]:
        """Returns the results of the runs, without those that the deadline left out; prints a line for each."""
        results = self.stored(runs)
        missing = [run for run in runs if run not in results]
        waiting = iter(missing)
        futures: dict[concurrent.futures.Future, Run] = {}
        done = 0
        while True:
            # No more than the processes can begin at once, so that the deadline holds.
            while len(futures) < self.processes and time.monotonic() < self.deadline:
                run = next(waiting, None)
                if run is None:
                    break
                futures[self._pool.submit(run_arm, *run, self.folder)] = run
            if not futures:
                return results
            finished, _ = concurrent.futures.wait(futures, return_when='FIRST_COMPLETED')
            for future in finished:
                arm, seed = futures.pop(future)
                results[arm, seed] = future.result()
                done += 1
                self._report(arm, seed, results[arm, seed]['seconds'], len(missing) - done)

    def _report(self, arm: str, seed: int, seconds: float, remaining: int) -> None:
        self._seconds.append(seconds)
        mean = sum(self._seconds) / len(self._seconds)
        minutes = remaining * mean / self.processes / 60
        left = f'{remaining} runs left, about {minutes:.0f} min'
        print(f'{arm}, seed {seed}: {seconds:.0f} s; {left}', file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    """Ends this process as soon as its parent has ended, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # The main thread may be within a run, or wait for work that nobody will send.
    os._exit(1)


def _start_process(counter, processes: int) -> None:
    """Gives a process of the pool its share of the cores, before JAX counts them."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with counter.get_lock():
        number = counter.value
        counter.value += 1
    cores = sorted(os.sched_getaffinity(0))
    share = cores[number % processes :: processes]
    # More processes than cores: all of them may use any.
    os.sched_setaffinity(0, share or cores)
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    from zeroplay_jax.configuration import command_line

    command_line.load_libraries()
    # All arms have programs in common, and all seeds of an arm have the same.
    keep_programs()
