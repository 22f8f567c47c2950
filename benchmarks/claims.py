"""The papers' headline comparisons on the miniature world: which of them show, by how much, and how sure that is.

    python -m benchmarks.claims                        # everything; runs that are already kept are not run again
    python -m benchmarks.claims --only dspo --seeds 3
    python -m benchmarks.claims --list

An arm is a config (a row of configs/ablations.py, or settings below) played with a seed; a claim sets two arms against
each other, seeds and evaluation questions paired, where both have played equally many rollouts of any kind (between
two evaluations in proportion); HRPO against GRPO is told at equal prompts and steps too. The setting is harder than the
quickstart's and the same for all arms: evaluation with up to four hops, more near-miss documents, smaller rates,
several updates per batch. What is measured is exact match on held-out questions; for SCOPE, which trains on open tasks,
also the share of rubrics that answers to held-out tasks meet. Every finished run is kept under benchmarks/results/runs
by its config: remove it where the code it ran computes something else now. The table goes to
benchmarks/results/claims.json and, as one JSON object, to the last line.

A claim holds if its 95 % interval lies above 0, does not hold if below, and is undecided otherwise; see `judge`. An
interval wider than ± .05 says how many seeds it would take.
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
from typing import NamedTuple

import numpy as np
from scipy import stats

from zeroplay_jax.configs import ablations, common
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.runtime.atomic import write_text

RESULTS = pathlib.Path(__file__).parent / 'results'
SEEDS = 3
WIDE = 0.05


class Claim(NamedTuple):
    """`better` is said to beat `worse` in final EM, rubrics (met by answers to open tasks, at the end), stability
    (worst fall from the peak) or steps (to a level)."""

    system: str
    text: str
    better: str
    worse: str
    by: str = 'final'
    budget: bool = True  # measured where both have played equally many rollouts


# Arm → row of configs/ablations.py ('' is the system as it is) and further settings.
ARMS: dict[str, tuple[str, str, dict]] = {
    'drzero': ('drzero', '', {}),
    'drzero untrained': ('drzero', '', {'schedule.iterations': 1, 'solver.learning_rate': 1e-12}),
    'drzero grpo 4×4': ('drzero', 'grpo', {}),
    'drzero no format': ('drzero', 'no_format', {}),
    'drzero no document': ('drzero', 'no_document', {}),
    'ssp': ('ssp', '', {}),
    'ssp solver only': ('ssp', 'solver_only', {}),
    'ssp proposer only': ('ssp', 'proposer_only', {}),
    'ssp no check': ('ssp', 'no_check', {}),
    'ssp no noise': ('ssp', 'noise_0', {}),
    'ssp padding': ('ssp', 'dummy_padding', {}),
    'piplay': ('piplay', '', {}),
    'piplay answer only': ('piplay', 'privileged_answer', {}),
    'piplay nothing': ('piplay', 'privileged_none', {}),
    'dspo': ('dspo', '', {}),
    'dspo no filter': ('dspo', 'gspo', {}),
    'dspo token level': ('dspo', 'dapo', {'solver.kl_coef': 1e-3}),  # as the others have it
    'dspo grpo': ('dspo', 'search_r1_grpo', {'reward.answer': 'subem'}),
    'scope': ('scope', '', {}),
    'scope frozen challenger': ('scope', 'frozen_challenger', {}),
    'scope no gates': ('scope', 'no_gates', {}),
    'scope no length factor': ('scope', 'no_length_factor', {}),
}
CLAIMS = (
    Claim(
        'drzero',
        'three iterations improve held-out EM without an outside question',
        'drzero',
        'drzero untrained',
        budget=False,
    ),
    Claim(
        'drzero',
        'HRPO (1 × 5) beats GRPO (4 × 4) at equal prompts',
        'drzero',
        'drzero grpo 4×4',
        budget=False,
    ),
    Claim(
        'drzero', 'HRPO (1 × 5) beats GRPO (4 × 4) at equal rollouts', 'drzero', 'drzero grpo 4×4'
    ),
    Claim('drzero', 'the format reward helps', 'drzero', 'drzero no format'),
    Claim('drzero', 'the initial document helps', 'drzero', 'drzero no document'),
    Claim('ssp', 'co-evolution beats a solver alone', 'ssp', 'ssp solver only'),
    Claim('ssp', 'co-evolution beats a proposer alone', 'ssp', 'ssp proposer only'),
    Claim('ssp', 'the answerability check helps', 'ssp', 'ssp no check'),
    Claim('ssp', 'four noise documents beat none', 'ssp', 'ssp no noise'),
    Claim('ssp', 'periodic reset beats dummy padding', 'ssp', 'ssp padding'),
    Claim('piplay', 'the full path beats the answer alone', 'piplay', 'piplay answer only'),
    Claim('piplay', 'the full path beats no privilege', 'piplay', 'piplay nothing'),
    Claim('piplay', 'reaches the final EM of Dr. Zero in fewer steps', 'piplay', 'drzero', 'steps'),
    Claim('dspo', 'the filter helps', 'dspo', 'dspo no filter'),
    Claim('dspo', 'the sequence ratio beats the token ratio (DAPO)', 'dspo', 'dspo token level'),
    Claim('dspo', 'beats GRPO', 'dspo', 'dspo grpo'),
    Claim('dspo', 'falls less from its peak than GRPO', 'dspo', 'dspo grpo', 'stability'),
    *(
        Claim('scope', f'{text}, by {measure}', 'scope', arm, by)
        for by, measure in (('rubrics', 'rubrics met'), ('final', 'exact match'))
        for text, arm in (
            (
                'co-evolution beats a challenger frozen after the first iteration',
                'scope frozen challenger',
            ),
            ('the gates help', 'scope no gates'),
            ('the length factor helps', 'scope no length factor'),
        )
    ),
)


def config_of(arm: str, seed: int):
    """The config of an arm: its system's small variant, the common hard setting, the row, and its own settings."""
    system, row, own = ARMS[arm]
    config = importlib.import_module(f'zeroplay_jax.configs.{system}').get_config('mini')
    iterations = 3 if system in ('drzero', 'piplay', 'scope') else 1
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
        # The mean of some 26 log ratios, a rollout's, strays by 1/√26 of what one does: DAPO's range over that.
        config.solver.update(clip_low=0.04, clip_high=0.055)
    config.pool.update(batch=64, batches=2, samples=1 if system != 'scope' else 2)
    config.ssp.noise = 4
    # In tokens; most right answers to a task have up to 24.
    config.scope.update(soft_length=24, hard_length=64)
    config.eval.update(every=4, questions=50, hops=(1, 2, 3, 4))
    config.sampler.slots = 64
    config.checkpoint.every = 1000
    config.update_from_flattened_dict(ablations.ROWS[f'{system}/{row}'] if row else {})
    config.update_from_flattened_dict(own)
    config.seed, config.progress, config.log_trajectories = seed, False, 16
    return config


def play(arm: str, seed: int, kept: pathlib.Path) -> dict:
    """The curve of one run: [steps of the solver so far, correct by question]; from its file if it was run before."""
    config = config_of(arm, seed)
    # By what it changes: a field that configs/common.py gains later does not make old runs others.
    defaults = dict(fields.leaves(common.get_config()))
    text = json.dumps({k: v for k, v in fields.leaves(config) if v != defaults[k]}, sort_keys=True)
    path = kept / f'{hashlib.sha256(text.encode()).hexdigest()[:16]}.json'
    if path.exists():
        return json.loads(path.read_text())
    from zeroplay_jax.training import loop

    rules.check(config)
    started = time.perf_counter()
    workdir = pathlib.Path(tempfile.mkdtemp(prefix='claims.'))
    try:
        loop.run(config, workdir / 'run')
        summary = json.loads((workdir / 'run' / 'summary.json').read_text())
        curve = _curve(summary, (workdir / 'run' / 'metrics.jsonl').read_text().strip().split('\n'))
    finally:
        shutil.rmtree(workdir, ignore_errors=True)
    found = dict(arm=arm, seed=seed, curve=curve, seconds=round(time.perf_counter() - started, 1))
    found['external_items'] = summary['external_items']
    kept.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(found))
    return found


def _curve(summary: dict, lines: list[str]) -> list:
    """[solver steps, rollouts, correct by question (, rubrics met by open task)] before every evaluation."""
    steps = rollouts = 0
    curve = []
    for record in map(json.loads, lines):
        if record['phase'] == 'evaluation':
            by_hop = summary['results']['evaluations'][str(record['step'])]
            graded = (
                [grades[str(record['step'])]]
                if (grades := summary['results'].get('rubrics'))
                else []
            )
            curve.append(
                [steps, rollouts, [flag for flags in by_hop.values() for flag in flags], *graded]
            )
        steps += record['phase'] in ('solver', 'selfplay')
        rollouts += int(record.get('rollouts', 0))
    return curve


def _until(run: dict, budget: float, column: int = 2) -> np.ndarray:
    """A column of the curve, float64 [evaluations, N], while no more than `budget` rollouts had been played.

    The last row is the state at the budget itself, in proportion between the evaluations before and after it.
    """
    spent = np.array([point[1] for point in run['curve']], float)
    found = np.array([point[column] for point in run['curve']], float)
    budget = min(budget, spent[-1])
    before = spent < budget
    end = np.array([np.interp(budget, spent, item) for item in found.T])
    return np.vstack([found[before], end])


def value(run: dict, other: dict, by: str, budget: bool) -> np.ndarray:
    """What one run scores beside the other: per question [N] for 'final', per task for 'rubrics', else [1].

    `other` gives the budget and, of 'steps', the level that is to be reached.
    """
    most = min(r['curve'][-1][1] for r in (run, other)) if budget else np.inf
    if by in ('final', 'rubrics'):
        return _until(run, most, 2 if by == 'final' else 3)[-1]
    em = _until(run, most).mean(1)
    if by == 'stability':
        return np.array([-np.max(np.maximum.accumulate(em) - em)])
    level = np.mean(other['curve'][-1][2])
    reached = [steps for steps, _, flags, *_ in run['curve'] if np.mean(flags) >= level]
    last = run['curve'][-1][0]
    return np.array([-(reached[0] if reached else last + 1) / last])


def judge(better: list[dict], worse: list[dict], by: str = 'final', budget: bool = True) -> dict:
    """Mean difference over paired seeds, its 95 % interval, the verdict, and how many seeds ± `WIDE` would take.

    The interval is Student's over the seeds' differences, or that over the questions, whose sample all seeds share,
    where this is the wider one.
    """
    gaps = []
    for a, b in zip(better, worse, strict=True):
        # Of 'steps', both are measured by the level at which the other arm ends.
        gaps.append(value(a, b, by, budget) - value(b, b if by == 'steps' else a, by, budget))
    means, questions = np.array([g.mean() for g in gaps]), np.mean(gaps, 0)
    error = lambda x, n: (
        float(stats.t.ppf(0.975, n - 1) * np.std(x, ddof=1) / np.sqrt(n)) if len(x) > 1 else np.inf
    )
    shared = error(questions, len(questions)) if len(questions) > 1 else 0.0
    half, mean = max(error(means, len(means)), shared), float(means.mean())
    verdict = 'holds' if mean > half else 'does not hold' if mean < -half else 'undecided'
    enough = next((n for n in range(len(means), 1000) if error(means, n) <= WIDE), 1000)
    more = dict(ci95=[round(mean - half, 4), round(mean + half, 4)], seeds_needed=enough)
    more['questions_needed'] = max(
        len(questions), int(np.ceil(len(questions) * (shared / WIDE) ** 2))
    )
    return (
        dict(
            verdict=verdict, difference=round(mean, 4), by_seed=[round(float(m), 4) for m in means]
        )
        | more
    )


def main(argv: list[str] | None = None) -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.claims',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--only', choices=sorted({c.system for c in CLAIMS}), help='claims of one system'
    )
    parser.add_argument('--seeds', type=int, default=SEEDS, help=f'runs per row ({SEEDS})')
    parser.add_argument('--list', action='store_true', help='print the claims and run nothing')
    parser.add_argument('--out', type=pathlib.Path, default=RESULTS, help='folder of the results')
    args = parser.parse_args(argv)
    claims = [c for c in CLAIMS if args.only in (None, c.system)]
    if args.list:
        print(
            '\n'.join(
                f'{c.system:8} {c.text}: {c.better} against {c.worse} ({c.by})' for c in claims
            )
        )
        return
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    import jax

    from zeroplay_jax.configuration import entry

    entry.load_libraries()
    cache = tempfile.mkdtemp(prefix='claims_programs.')  # arms share what is compiled
    jax.config.update('jax_compilation_cache_dir', cache)
    arms = list(dict.fromkeys(arm for c in claims for arm in (c.better, c.worse)))
    runs: dict[str, list[dict]] = {arm: [] for arm in arms}
    started = time.perf_counter()
    for seed in range(
        args.seeds
    ):  # seed by seed: an interrupted benchmark has something of every arm
        for arm in arms:
            runs[arm].append(play(arm, seed, args.out / 'runs'))
            print(
                f'{arm}, seed {seed}: {runs[arm][-1]["seconds"]:.0f} s', file=sys.stderr, flush=True
            )
    shutil.rmtree(cache, ignore_errors=True)
    table = []
    for claim in claims:
        sides = runs[claim.better], runs[claim.worse]
        found = judge(*sides, claim.by, claim.budget)
        found['at_equal_steps'] = judge(*sides, claim.by, budget=False)['difference']
        table.append(
            dict(system=claim.system, claim=claim.text, by=claim.by, seeds=args.seeds) | found
        )
        low, high = found['ci95']
        needs = (
            ''
            if found['seeds_needed'] <= args.seeds
            else f'; ± {WIDE} would need {found["seeds_needed"]} seeds'
        )
        figures = f'{found["difference"]:+.3f} [{low:+.3f}, {high:+.3f}]'
        print(f'{claim.system:8} {found["verdict"]:14} {figures}  {claim.text}{needs}')
    print(f'{time.perf_counter() - started:.0f} s', file=sys.stderr)
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(args.out / 'claims.json', json.dumps({'claims': table}, indent=1))
    print(json.dumps({'claims': table}))


if __name__ == '__main__':
    main()
