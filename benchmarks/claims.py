"""Tests the papers' main comparisons on the miniature encyclopedia, with effect sizes and intervals.

    python -m benchmarks.claims                        # everything; stored runs are not executed again
    python -m benchmarks.claims --only dspo --seeds 3
    python -m benchmarks.claims --list                 # claims, measures and how the arms differ; runs nothing

Arms, claims, the measure of each claim and its reason are data: benchmarks/claims.toml, written before any arm is run.
An arm is a config: a row of configs/ablations.py and further settings. It is run once per seed. A claim compares two
arms, paired by seed and evaluation question. Their configs differ in nothing but the fields that the claim names
(`arm_differences`). The value after the last common step, the area over rollouts and the rollouts of both arms are
reported beside the measure.

The setting is harder than the quickstart's and the same for all arms: evaluation with up to four hops, more near-miss
documents, smaller learning rates, several updates per batch. Exact match is measured on held-out questions; for SCOPE,
which trains on open tasks, also the share of rubrics that answers to held-out tasks meet.

Every finished run is stored in benchmarks/results/runs, named by its config and by CODE. The table is written to
benchmarks/results/claims.json and printed as one JSON object in the last line.

A claim holds if its 95 % interval is above 0, does not hold if it is below 0, and is undecided otherwise. Because many
claims are tested at once, the table has a second verdict beside this one, with p-values corrected by Holm's method. For
intervals wider than ± .05 it has the number of seeds that would be needed (benchmarks/claims_statistics.py).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
import tomllib
from typing import Any, NamedTuple

from benchmarks import claims_statistics as statistics
from zeroplay_jax.configs import ablations, common
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.runtime.atomic import write_text

RESULTS = pathlib.Path(__file__).parent / 'results'
REGISTRATION = pathlib.Path(__file__).with_name('claims.toml')
SEEDS = 3
# Raised when a change of the code changes the result of a run, so that no stored run of the earlier code is reused.
# 2: the rule judge grades facts; minibatches are drawn by prompt.
CODE = 2


class Claim(NamedTuple):
    """The claim that arm `better` beats arm `worse`; an entry of `claims` in benchmarks/claims.toml.

    Attributes:
      system: the system of both arms.
      text: the claim in words.
      better, worse: names of arms; worse is '' where a policy is compared with itself before training.
      measure: what decides, a key of `MEASURES`.
      reason: why that measure.
      differs: config fields in which the arms differ, and no others.
      of: 'exact_match' or 'rubrics'.
    """

    system: str
    text: str
    better: str
    measure: str
    reason: str
    differs: tuple[str, ...]
    worse: str = ''
    of: statistics.Measured = 'exact_match'


class Arm(NamedTuple):
    """An arm: the small config of a system, a row of configs/ablations.py ('' for none), and further settings."""

    system: str
    row: str = ''
    settings: dict[str, Any] = {}


def _registered() -> tuple[dict[str, dict[str, str]], dict[str, Arm], tuple[Claim, ...]]:
    """Returns measures, arms and claims of benchmarks/claims.toml."""
    data = tomllib.loads(REGISTRATION.read_text(encoding='utf-8'))
    arms = {name: Arm(**entry) for name, entry in data['arms'].items()}
    claims = []
    for entry in data['claims']:
        claims.append(Claim(**entry | {'differs': tuple(entry['differs'])}))
    return data['measures'], arms, tuple(claims)


MEASURES, ARMS, CLAIMS = _registered()


def config_of(arm: str, seed: int):
    """Returns the config of an arm: its system's small variant, the common setting, the row, the arm's settings."""
    system, row, settings = ARMS[arm]
    config = importlib.import_module(f'zeroplay_jax.configs.{system}').get_config('mini')
    iterations = 3 if system in ('drzero', 'piplay', 'scope') else 1
    # 24 solver steps in total for every system.
    steps = 8 if iterations == 3 else 24
    config.schedule.iterations = iterations
    config.world.update(train=(0, 20), evaluation=(0, 6), near_misses=0.5)
    for role in (config.proposer, config.solver):
        role.update(learning_rate=1e-4, minibatches=4, temperature=1.0)
        if role.loss == 'reinforce':
            role.minibatches = 1
    config.solver.update(steps=steps, batch=16, samples=4)
    config.proposer.update(steps=4, batch=32 if system != 'ssp' else 16)
    if config.solver.loss == 'sequence_pg':
        # A rollout has about 26 tokens. The mean of 26 log ratios has 1/√26 of the deviation of a single one, so the
        # clip range is DAPO's range divided by √26.
        config.solver.update(clip_low=0.04, clip_high=0.055)
    config.pool.update(batch=64, batches=2, samples=1 if system != 'scope' else 2)
    config.ssp.noise = 4
    # Most correct answers to a task have up to 24 tokens.
    config.scope.update(soft_length=24, hard_length=64)
    config.eval.update(every=4, questions=50, hops=(1, 2, 3, 4))
    config.sampler.slots = 64
    config.checkpoint.every = 1000
    config.update_from_flattened_dict(ablations.ROWS[f'{system}/{row}'] if row else {})
    config.update_from_flattened_dict(settings)
    config.seed = seed
    config.progress = False
    config.log_trajectories = 16
    return config


def arm_differences(better: str, worse: str) -> dict[str, tuple[Any, Any]]:
    """Returns field → (value of `better`, value of `worse`) of all config fields in which two arms differ."""
    if not worse:
        return {}
    better_fields = dict(fields.leaves(config_of(better, seed=0)))
    worse_fields = dict(fields.leaves(config_of(worse, seed=0)))
    different = {}
    for name, value in better_fields.items():
        if value != worse_fields[name]:
            different[name] = (value, worse_fields[name])
    return different


def run_arm(arm: str, seed: int, folder: pathlib.Path) -> dict:
    """Returns the result of one run: from `folder` if it is stored there, else it executes the run and stores it.

    Returns:
      {'arm', 'seed', 'curve': one entry per evaluation, see `_curve`, 'seconds', 'external_items': summary.json's
      'outside_questions'}.
    """
    config = config_of(arm, seed)
    # The name depends on the changed fields only, so stored results stay valid if configs/common.py gets a new field.
    defaults = dict(fields.leaves(common.get_config()))
    changes = {k: v for k, v in fields.leaves(config) if v != defaults[k]}
    # This field is not a property of an arm, and results of versions without it keep their names.
    changes.pop('stop_after_empty_steps', None)
    text = json.dumps([CODE, changes], sort_keys=True)
    path = folder / f'{hashlib.sha256(text.encode()).hexdigest()[:16]}.json'
    if path.exists():
        return json.loads(path.read_text())
    from zeroplay_jax.training import loop

    # 0: a run is never stopped, because an arm that trains nothing is a result, too.
    config.stop_after_empty_steps = 0
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


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.claims',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    systems = sorted({claim.system for claim in CLAIMS})
    parser.add_argument('--only', choices=systems, help='claims of one system')
    parser.add_argument('--seeds', type=int, default=SEEDS, help=f'seeds per arm ({SEEDS})')
    parser.add_argument('--list', action='store_true', help='print the claims and run nothing')
    parser.add_argument('--out', type=pathlib.Path, default=RESULTS, help='folder of the results')
    return parser.parse_args(argv)


def run_all(claims: list[Claim], seeds: int, folder: pathlib.Path) -> dict[str, list[dict]]:
    """Returns arm → its results of `run_arm`, in order of the seeds, for all arms of the claims."""
    runs: dict[str, list[dict]] = {}
    for claim in claims:
        for arm in filter(None, (claim.better, claim.worse)):
            runs.setdefault(arm, [])
    # Seeds are the outer loop, so that an interrupted benchmark has runs of every arm.
    for seed in range(seeds):
        for arm, results in runs.items():
            result = run_arm(arm, seed, folder)
            results.append(result)
            print(f'{arm}, seed {seed}: {result["seconds"]:.0f} s', file=sys.stderr, flush=True)
    return runs


def judge_all(claims: list[Claim], runs: dict[str, list[dict]], seeds: int) -> list[dict]:
    """Returns a row of the table per claim, and prints a line for each.

    A row has the fields of the claim, of `statistics.judge` and of `statistics.correct_verdicts`; 'beside', the mean
    difference by the measures that do not decide; and 'rollouts', the mean number of rollouts of both arms.
    """
    table: list[dict[str, Any]] = []
    for claim in claims:
        better = runs[claim.better]
        worse = runs[claim.worse] if claim.worse else better
        result = statistics.judge(statistics.differences(better, worse, claim.measure, claim.of))
        beside = {}
        for measure in ('final', 'area_of_rollouts'):
            if measure != claim.measure and claim.worse:
                values = statistics.differences(better, worse, measure, claim.of)
                beside[measure] = round(float(values.mean()), 4)
        rollouts = [_mean_rollouts(better), _mean_rollouts(worse)]
        row: dict[str, Any] = dict(
            system=claim.system, claim=claim.text, measure=claim.measure, of=claim.of
        )
        table.append(row | dict(seeds=seeds) | result | dict(beside=beside, rollouts=rollouts))
    # All claims of the call are corrected for together.
    statistics.correct_verdicts(table)
    for row in table:
        low, high = row['ci95']
        line = f'{row["system"]:8} {row["verdict"]:14} (Holm: {row["verdict_holm"]}) '
        line += f'{row["difference"]:+.3f} [{low:+.3f}, {high:+.3f}]  {row["claim"]}, by {row["measure"]}'
        if row['seeds_needed'] > seeds:
            line += f'; ± {statistics.NARROW} would need {row["seeds_needed"]} seeds'
        print(line)
    return table


def _mean_rollouts(runs: list[dict]) -> int:
    return round(sum(run['curve'][-1][statistics.ROLLOUTS] for run in runs) / len(runs))


def _print_registration(claims: list[Claim]) -> None:
    """Prints the claims with their measures, reasons and the differences of their arms."""
    for name, measure in MEASURES.items():
        print(f'{name}: {measure["text"]}; {measure["reason"]}')
    for claim in claims:
        print(f'\n{claim.system}: {claim.text}')
        print(f'  {claim.better} against {claim.worse or "itself before training"}')
        print(f'  by {claim.measure} of {claim.of}: {claim.reason}')
        for field, (better, worse) in arm_differences(claim.better, claim.worse).items():
            print(f'  {field}: {better} against {worse}')


def main(argv: list[str] | None = None) -> None:
    """Executes the runs that are not stored, and prints the table."""
    args = parse_arguments(argv)
    claims = [claim for claim in CLAIMS if args.only in (None, claim.system)]
    if args.list:
        _print_registration(claims)
        return
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    import jax

    from zeroplay_jax.configuration import entry

    entry.load_libraries()
    # All arms have programs in common, so compiled programs are cached for the length of the benchmark.
    cache = tempfile.mkdtemp(prefix='claims_programs.')
    jax.config.update('jax_compilation_cache_dir', cache)
    started = time.perf_counter()
    runs = run_all(claims, args.seeds, args.out / 'runs')
    shutil.rmtree(cache, ignore_errors=True)
    table = judge_all(claims, runs, args.seeds)
    print(f'{time.perf_counter() - started:.0f} s', file=sys.stderr)
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(args.out / 'claims.json', json.dumps({'claims': table}, indent=1))
    print(json.dumps({'claims': table}))


if __name__ == '__main__':
    main()
