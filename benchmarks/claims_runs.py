"""Arms, claims and looks of the claims benchmark (claims.toml), and the runs of its arms, in several processes.

Every finished run is kept.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import claims_statistics as statistics
from benchmarks.command import read_lines
from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import rules
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.selfplay.recipe import trained_roles
from zeroplay_jax.settings.kinds import PACKAGE

_CACHE_BYTES = 2_000_000_000

# What a run is called: an arm and its seed.
Run = tuple[str, int]

REGISTRATION = pathlib.Path(__file__).with_name('claims.toml')


class Claim(NamedTuple):
    """The claim that arm `better` beats arm `worse`; an entry of `claims` in benchmarks/claims.toml.

    Attributes:
      system: the system of both arms.
      text: the claim in words.
      better, worse: names of arms; worse is '' where a policy is compared with itself before training.
      measure: what leads, a key of `MEASURES`: the paper's.
      reason: why that measure.
      differs: config fields in which the arms differ, and no others.
      of: 'exact_match' or 'rubrics'.
      registered: what decided when the runs were begun, if that was another measure; '' if not.
      paper: the paper's difference, as a share, and its table; () where the paper gives none.
      note: needed where the verdicts by several measures differ.
      selected: whether the setting was chosen in trials that showed this effect. The result then says that the effect
        can be repeated, not how common it is.
      afterwards: whether the claim was registered when its runs had been made for other claims.
      added: whether the claim was registered when the runs of its arm `better`, and the results of other claims, were
        known, but before any run of its arm `worse` with a seed of the claims.
      earlier: results of earlier plays, each in another setting: difference, low and high end of its interval; the
        difference alone of a play that was stopped.
    """

    system: str
    text: str
    better: str
    measure: str
    reason: str
    differs: tuple[str, ...]
    worse: str = ''
    of: statistics.Measured = 'exact_match'
    registered: str = ''
    paper: tuple[Any, ...] = ()
    note: str = ''
    selected: bool = False
    afterwards: bool = False
    added: bool = False
    earlier: tuple[Sequence[float], ...] = ()

    @property
    def plays(self) -> int:
        """How many times the claim was played; a play that was stopped counts.

        Its p-value and its interval are those of the last play, at a level divided by the number of plays. Because it
        could have been decided in any play, the probability of a wrong verdict is at most LEVEL · (1 + 1/2 + … +
        1/plays).
        """
        return len(self.earlier) + 1

    @property
    def margin(self) -> float | None:
        """What an effect must reach to matter: NARROW, or the paper's effect if that is smaller; None if unknown."""
        return min(self.paper[0], statistics.NARROW) if self.paper else None

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures of its row: the one that leads, then the others."""
        if self.measure in ('gain', 'first_iteration'):
            return (self.measure,)
        return tuple(dict.fromkeys((self.measure, 'final', 'area', 'at_rollouts')))


class Look(NamedTuple):
    """A test of the claims that are still open; an entry of `looks` in benchmarks/claims.toml.

    Attributes:
      seeds: seeds per arm, those of earlier looks included.
      share: share of the error probability that this look may spend; those of all looks sum to 1.
    """

    seeds: int
    share: float


class Arm(NamedTuple):
    """An arm: a system with changes.

    Attributes:
      system: its small config is the beginning.
      row: of configs/ablations.py; '' for none.
      settings: further fields.
      start: checkpoint in zeroplay_jax/mini from which it starts; '' for that of the small config.
    """

    system: str
    row: str = ''
    settings: dict[str, Any] = {}
    start: str = ''

    @property
    def is_playable(self) -> bool:
        """Whether a start of this name is in the package; docs/claims.md: where those of the stored runs are."""
        return (PACKAGE / 'mini' / self.start).is_dir()


def _registered() -> tuple[
    dict[str, dict[str, str]],
    dict[str, Arm],
    tuple[Claim, ...],
    tuple[Claim, ...],
    tuple[Look, ...],
]:
    """Returns measures, arms, claims, ablations and looks of benchmarks/claims.toml."""
    data = tomllib.loads(REGISTRATION.read_text(encoding='utf-8'))
    arms = {name: Arm(**entry) for name, entry in data['arms'].items()}
    claims = tuple(map(_comparison, data['claims']))
    compared = tuple(map(_comparison, data['ablations']))
    looks = tuple(Look(**entry) for entry in data['looks'])
    return data['measures'], arms, claims, compared, looks


def _comparison(entry: dict[str, Any]) -> Claim:
    lists = {name: tuple(entry.get(name, ())) for name in ('differs', 'paper')}
    lists['earlier'] = tuple(map(tuple, entry.get('earlier', ())))
    return Claim(**entry | lists)


MEASURES, ARMS, CLAIMS, ABLATIONS, LOOKS = _registered()
# The only look at an ablation.
ABLATION_LOOK = Look(seeds=4, share=1.0)


def config_of(arm: str, seed: int):
    """Returns the config of an arm: its system's small variant, the common setting, the row, the arm's settings."""
    system, row, settings, start = ARMS[arm]
    config = importlib.import_module(f'zeroplay_jax.configs.{system}').get_config('mini')
    iterations = 3 if system in ('drzero', 'piplay', 'scope') else 1
    # 12 solver steps in total. SSP's solver learns a second search late, and with some seeds not in 18 steps either.
    steps = 4 if iterations == 3 else 12
    if system == 'ssp':
        steps = 18
    config.schedule.iterations = iterations
    config.world.update(train=(0, 20), evaluation=(0, 6), near_misses=0.5)
    for name in trained_roles(config):
        role = config[name]
        role.update(learning_rate=5e-4, minibatches=4)
        if role.loss == 'reinforce':
            role.minibatches = 1
    config.solver.update(steps=steps, batch=16, samples=4, temperature=1.0)
    if system != 'dspo':
        config.proposer.update(steps=3, batch=32 if system != 'ssp' else 24)
    else:
        # The filter needs questions whose answers are often all right or all wrong.
        config.schedule.hop_ratio = (0, 0, 1, 1)
    if system == 'scope':
        # At 1.0 a third of the tasks have the rubrics of another entity.
        config.proposer.temperature = 0.6
        # With as many tasks of one step as of two, some seeds forget to search twice.
        config.schedule.hop_ratio = (0, 1, 2)
        # At 5e-4 two of four seeds fell back.
        for role in (config.proposer, config.solver):
            role.learning_rate = 2.5e-4
    if config.solver.loss == 'sequence_pg':
        # A rollout has about 26 tokens. The mean of 26 log ratios has 1/√26 of the deviation of a single one, so the
        # clip range is DAPO's range divided by √26.
        config.solver.update(clip_low=0.04, clip_high=0.055)
    if 'pool' in config:
        config.pool.update(batch=64, batches=2, samples=1 if system != 'scope' else 2)
    if system == 'ssp':
        config.ssp.noise = 4
    if system == 'scope':
        # Most correct answers to a task have up to 24 tokens.
        config.scope.update(soft_length=24, hard_length=64)
    config.eval.update(every=3, questions=40, hops=(1, 2, 3, 4))
    # The fastest on CPUs: a minibatch fills about four rows, and most of a slot is not used.
    config.micro.rows = 4
    config.sampler.update(slots=64, attention='used')
    config.checkpoint.every = 1000
    config.update_from_flattened_dict(ablations.of_small_run(f'{system}/{row}') if row else {})
    config.update_from_flattened_dict(settings)
    if start:
        config.policy.path = str(PACKAGE / 'mini' / start)
    elif system != 'scope':
        # The claims were registered with the default policy, whatever the small configs begin with today.
        config.policy.path = ''
    config.seed = seed
    config.progress = False
    config.log_trajectories = 16
    return config


@functools.cache
def code_hash() -> str:
    """Returns 12 hexadecimal digits that identify the code and the checkpoints of the package."""
    digest = hashlib.sha256()
    for path in _package_files():
        digest.update(str(path.relative_to(PACKAGE)).encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _package_files() -> list[pathlib.Path]:
    """Returns all files of the package, in a fixed order."""
    paths = []
    # `configs` and `retrieval` are links to folders beside the package, which `Path.rglob` does not enter.
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        if '__pycache__' not in folder:
            paths += [pathlib.Path(folder, name) for name in names]
    return sorted(paths)


def _keep_programs() -> None:
    """Makes this process read and store compiled programs, for all processes and later calls."""
    import jax

    from zeroplay_jax.runtime.devices import CompilationCache

    # A program for a CPU may depend on the number of cores.
    cores = len(os.sched_getaffinity(0))
    folder = pathlib.Path(__file__).parents[1] / '.cache' / f'programs_of_{cores}_cores'
    jax.config.update('jax_compilation_cache_max_size', _CACHE_BYTES)
    CompilationCache(str(folder))


def run_arm(arm: str, seed: int) -> dict[str, Any]:
    """Executes a run in this process and returns its result; its files are removed.

    Returns:
      {'arm', 'seed', 'curve': one entry per evaluation, see `_curve`, 'seconds', 'external_items': summary.json's
      'outside_questions', 'code': `code_hash`}.
    """
    from zeroplay_jax.run import loop

    # Before the run, because files may be edited meanwhile.
    code = code_hash()
    config = config_of(arm, seed)
    # An arm that trains nothing is a result, too.
    config.stop_after_empty_steps = 0
    config.stop_at_alarms = False
    rules.check(config)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix='benchmark.', ignore_cleanup_errors=True) as folder:
        workdir = pathlib.Path(folder, 'run')
        loop.run(config, workdir)
        summary = json.loads((workdir / 'summary.json').read_text())
        records = read_lines(workdir / 'metrics.jsonl')
    seconds = round(time.perf_counter() - started, 1)
    result = dict(arm=arm, seed=seed, curve=_curve(summary, records), seconds=seconds)
    return result | dict(external_items=summary['outside_questions'], code=code)


def stored_runs(folder: pathlib.Path) -> dict[Run, dict[str, Any]]:
    """Returns the results of all finished runs in a folder."""
    results = {}
    for path in folder.glob('*.json'):
        result = json.loads(path.read_text())
        results[result['arm'], result['seed']] = result
    return results


def _play_before(
    deadline: float, folder: pathlib.Path, run_one: Callable[..., dict], arm: str, seed: int
) -> dict[str, Any] | None:
    """Executes a run and stores its result; None after the deadline, a `time.monotonic()` of any process."""
    if time.monotonic() >= deadline:
        return None
    result = run_one(arm, seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f'{arm}, seed {seed}.json', json.dumps(result))
    return result


def _curve(summary: dict, records: list[dict]) -> list:
    """Returns [solver steps, rollouts, correct by question (, rubrics met by open task)] for every evaluation.

    Args:
      summary: summary.json of the run.
      records: of its metrics.jsonl, in order. Solver steps and rollouts of any kind are counted up to the
        evaluation.
    """
    rubrics = summary['results'].get('rubrics')
    steps = 0
    rollouts = 0
    curve = []
    for record in records:
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
      folder: of the results; what is there is not executed again.
      run_one: executes a run, in a process of the pool.
      processes: runs at the same time; the processor cores are divided among them.
      deadline: `time.monotonic()` after which no run is begun.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        run_one: Callable[..., dict],
        processes: int,
        deadline: float = float('inf'),
    ):
        self.folder = folder
        self.run_one = run_one
        self.processes = processes
        self.deadline = deadline
        self._results = stored_runs(folder)
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
        return {run: self._results[run] for run in runs if run in self._results}

    def run(self, runs: Sequence[Run]) -> dict[Run, dict]:
        """Returns the results of the runs, without those that cannot be played or that the deadline left out."""
        missing = [run for run in runs if run not in self._results and ARMS[run[0]].is_playable]
        # No process is started for runs that it would not begin.
        if time.monotonic() < self.deadline:
            futures = {}
            for run in missing:
                call = (self.deadline, self.folder, self.run_one, *run)
                futures[self._pool.submit(_play_before, *call)] = run
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                run, result = futures[future], future.result()
                if result:
                    self._results[run] = result
                    left = f'{len(missing) - done} runs left'
                    print(*run, f'{result["seconds"]:.0f} s; {left}', sep=', ', file=sys.stderr)
        return self.stored(runs)


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

    command_line.prepare_process()
    # All arms have programs in common, and all seeds of an arm have the same.
    _keep_programs()
