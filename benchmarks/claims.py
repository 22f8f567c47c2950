"""Tests the papers' main comparisons on the miniature encyclopedia, with effect sizes and intervals.

    python -m benchmarks.claims                        # everything; stored runs are not executed again
    python -m benchmarks.claims --only dspo --seeds 3
    python -m benchmarks.claims --list

An arm is a config: a row of configs/ablations.py or the settings below. It is run once per seed. A claim compares two
arms, paired by seed and evaluation question, at the point where both have sampled the same number of rollouts of any
kind (interpolated between two evaluations). HRPO is also compared with GRPO at equal prompts and steps.

The setting is harder than the quickstart's and the same for all arms: evaluation with up to four hops, more near-miss
documents, smaller learning rates, several updates per batch. The measure is exact match on held-out questions. For
SCOPE, which trains on open tasks, a second measure is the share of rubrics that answers to held-out tasks meet.

Every finished run is stored in benchmarks/results/runs, named by its config: delete the file when a change of the code
changes its result. The table is written to benchmarks/results/claims.json and printed as one JSON object in the last
line.

A claim holds if its 95 % interval is above 0, does not hold if it is below 0, and is undecided otherwise; see `judge`.
For intervals wider than ± .05 the table has the number of seeds that would be needed.
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
# Half-width of an interval that counts as narrow.
NARROW = 0.05
# Upper limit of the search for the number of seeds.
MAX_SEEDS = 1000
# Columns of a curve: solver steps, rollouts, correct by question, and for SCOPE rubrics met by open task.
CORRECT, RUBRICS = 2, 3


class Claim(NamedTuple):
    """The claim that arm `better` beats arm `worse`.

    Attributes:
      system: the system of both arms.
      text: the claim in words.
      better, worse: names of arms.
      by: what is compared: 'final' (exact match at the end), 'rubrics' (share of rubrics met by answers to open tasks
        at the end), 'stability' (largest fall from the peak) or 'steps' (until a level is reached).
      budget: whether both are measured at the same number of rollouts; without effect on 'steps'.
    """

    system: str
    text: str
    better: str
    worse: str
    by: str = 'final'
    budget: bool = True


# Arm → system, row of configs/ablations.py ('' for the system itself) and further settings.
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
    # The KL coefficient of the other DSPO arms.
    'dspo token level': ('dspo', 'dapo', {'solver.kl_coef': 1e-3}),
    'dspo grpo': ('dspo', 'search_r1_grpo', {'reward.answer': 'subem'}),
    'scope': ('scope', '', {}),
    'scope frozen challenger': ('scope', 'frozen_challenger', {}),
    'scope no gates': ('scope', 'no_gates', {}),
    'scope no length factor': ('scope', 'no_length_factor', {}),
}


def _scope_claims() -> list[Claim]:
    """Returns SCOPE's three claims, by each of its two measures."""
    arms = {
        'co-evolution beats a challenger frozen after the first iteration': 'scope frozen challenger',
        'the gates help': 'scope no gates',
        'the length factor helps': 'scope no length factor',
    }
    claims = []
    for by, measure in (('rubrics', 'rubrics met'), ('final', 'exact match')):
        for text, arm in arms.items():
            claims.append(Claim('scope', f'{text}, by {measure}', 'scope', arm, by))
    return claims


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
    *_scope_claims(),
)


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
    text = json.dumps(changes, sort_keys=True)
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


def _until(run: dict, budget: float, column: int = CORRECT) -> np.ndarray:
    """Returns the scores of the evaluations up to a budget and at the budget, float64 [evaluations, N].

    Args:
      run: result of `run_arm`.
      budget: number of rollouts. The last row of the result is interpolated to it from the evaluations before and
        after; a budget beyond the end of the run gives the last evaluation.
      column: column of the curve: CORRECT (N questions) or RUBRICS (N open tasks).
    """
    rollouts = np.array([point[1] for point in run['curve']], float)
    values = np.array([point[column] for point in run['curve']], float)
    budget = min(budget, rollouts[-1])
    values_before = values[rollouts < budget]
    values_at_budget = np.array([np.interp(budget, rollouts, item) for item in values.T])
    return np.vstack([values_before, values_at_budget])


def value(run: dict, other: dict, by: str, budget: bool) -> np.ndarray:
    """Returns the score of a run, higher is better: per question [N] for 'final', per task [N] for 'rubrics', else [1].

    For 'stability' it is minus the largest fall of exact match from an earlier maximum; for 'steps' minus the share of
    its steps that the run takes to the level.

    Args:
      run: the run.
      other: the run that it is compared with. It limits the budget and, for 'steps', gives the level to reach.
      by: see Claim.
      budget: whether the score is taken at the smaller number of rollouts of the two; without effect on 'steps'.
    """
    max_rollouts = np.inf
    if budget:
        max_rollouts = min(run['curve'][-1][1], other['curve'][-1][1])
    if by == 'final':
        return _until(run, max_rollouts, CORRECT)[-1]
    if by == 'rubrics':
        return _until(run, max_rollouts, RUBRICS)[-1]
    if by == 'stability':
        exact_match = _until(run, max_rollouts).mean(1)
        falls = np.maximum.accumulate(exact_match) - exact_match
        return np.array([-np.max(falls)])
    level = np.mean(other['curve'][-1][CORRECT])
    last_step = run['curve'][-1][0]
    # A run that never reaches the level counts as if it reached it one step after its end.
    reached_at = last_step + 1
    for steps, _, correct, *_ in run['curve']:
        if np.mean(correct) >= level:
            reached_at = steps
            break
    return np.array([-reached_at / last_step])


def _half_width(values: np.ndarray, count: int) -> float:
    """Returns the half-width of Student's 95 % interval for the mean of `count` values that vary like `values`."""
    if len(values) < 2:
        return np.inf
    quantile = stats.t.ppf(0.975, count - 1)
    return float(quantile * np.std(values, ddof=1) / np.sqrt(count))


def _seeds_needed(seed_means: np.ndarray) -> int:
    """Returns the smallest number of seeds whose interval would have a half-width of NARROW; at most MAX_SEEDS.

    Args:
      seed_means: mean difference of each seed that was run; more seeds are assumed to vary like these.
    """
    for count in range(len(seed_means), MAX_SEEDS):
        if _half_width(seed_means, count) <= NARROW:
            return count
    return MAX_SEEDS


def judge(better: list[dict], worse: list[dict], by: str = 'final', budget: bool = True) -> dict:
    """Returns the mean difference over paired seeds, its 95 % interval and the verdict.

    There are two sources of chance: the seeds, and the sample of questions, which all seeds share. The interval is the
    wider one of Student's intervals over the seeds' mean differences and over the questions' mean differences.

    Args:
      better, worse: runs of the two arms, one per seed.
      by, budget: see Claim.

    Returns:
      {'verdict': 'holds', 'does not hold' or 'undecided'; 'difference', the mean, better minus worse; 'by_seed', the
      difference of each seed; 'ci95': [low, high]; 'seeds_needed' and 'questions_needed', how many of each would give
      a half-width of NARROW}.
    """
    differences = []
    for better_run, worse_run in zip(better, worse, strict=True):
        better_value = value(better_run, worse_run, by, budget)
        # For 'steps', both runs have to reach the same level: the one at which the worse arm ends.
        reference = worse_run if by == 'steps' else better_run
        differences.append(better_value - value(worse_run, reference, by, budget))
    seed_means = np.array([difference.mean() for difference in differences])
    question_means = np.mean(differences, 0)
    questions = len(question_means)
    question_half_width = 0.0
    if questions > 1:
        question_half_width = _half_width(question_means, questions)
    half_width = max(_half_width(seed_means, len(seed_means)), question_half_width)
    mean = float(seed_means.mean())

    verdict = 'undecided'
    if mean > half_width:
        verdict = 'holds'
    elif mean < -half_width:
        verdict = 'does not hold'
    # The width of an interval falls with the square root of the number of questions.
    questions_needed = int(np.ceil(questions * (question_half_width / NARROW) ** 2))
    return dict(
        verdict=verdict,
        difference=round(mean, 4),
        by_seed=[round(float(seed_mean), 4) for seed_mean in seed_means],
        ci95=[round(mean - half_width, 4), round(mean + half_width, 4)],
        seeds_needed=_seeds_needed(seed_means),
        questions_needed=max(questions, questions_needed),
    )


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
        runs.setdefault(claim.better, [])
        runs.setdefault(claim.worse, [])
    # Seeds are the outer loop, so that an interrupted benchmark has runs of every arm.
    for seed in range(seeds):
        for arm, results in runs.items():
            result = run_arm(arm, seed, folder)
            results.append(result)
            print(f'{arm}, seed {seed}: {result["seconds"]:.0f} s', file=sys.stderr, flush=True)
    return runs


def judge_all(claims: list[Claim], runs: dict[str, list[dict]], seeds: int) -> list[dict]:
    """Returns a row of the table per claim (the fields of the claim and of `judge`), and prints a line for each."""
    table = []
    for claim in claims:
        better = runs[claim.better]
        worse = runs[claim.worse]
        result = judge(better, worse, claim.by, claim.budget)
        at_equal_steps = judge(better, worse, claim.by, budget=False)
        result['at_equal_steps'] = at_equal_steps['difference']
        row = dict(system=claim.system, claim=claim.text, by=claim.by, seeds=seeds)
        table.append(row | result)
        low, high = result['ci95']
        line = f'{claim.system:8} {result["verdict"]:14} {result["difference"]:+.3f}'
        line += f' [{low:+.3f}, {high:+.3f}]  {claim.text}'
        if result['seeds_needed'] > seeds:
            line += f'; ± {NARROW} would need {result["seeds_needed"]} seeds'
        print(line)
    return table


def main(argv: list[str] | None = None) -> None:
    """Executes the runs that are not stored, and prints the table."""
    args = parse_arguments(argv)
    claims = [claim for claim in CLAIMS if args.only in (None, claim.system)]
    if args.list:
        for claim in claims:
            arms = f'{claim.better} against {claim.worse}'
            print(f'{claim.system:8} {claim.text}: {arms} ({claim.by})')
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
