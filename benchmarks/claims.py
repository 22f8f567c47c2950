"""Tests the papers' main comparisons on the miniature encyclopedia, with effect sizes and intervals.

    python -m benchmarks.claims                        # everything; stored runs are not executed again
    python -m benchmarks.claims --only dspo --minutes 60
    python -m benchmarks.claims --list                 # claims, measures and how the arms differ; runs nothing

Arms, claims, the measure of each claim and its reason are data: benchmarks/claims.toml, written before the runs of a
play; what was changed later is named there. An arm is a config: a row of configs/ablations.py and further settings. It
is run once per seed. A claim compares two arms, paired by seed and evaluation question. Their configs differ in nothing
but the fields that the claim names (`arm_differences`). The value after the last common step, the area over rollouts
and the rollouts of both arms are reported beside the measure.

The setting is harder than the quickstart's and nearly the same for all systems (`claims_runs.config_of`): evaluation
with up to four hops, more near-miss documents, several updates per batch. It is short, 12 solver steps at larger
learning rates, 18 for SSP. Exact match is measured on held-out questions; for SCOPE, which trains on open tasks, also
the share of rubrics that answers to held-out tasks meet.

Every finished run is stored in benchmarks/results/runs, named by its config and by CODE, with the hash of the code that
it ran. The table is written to benchmarks/results/claims.json and claims.md, the picture to claims.svg; the last line
printed is one JSON object.

Seeds are added in looks, whose seeds and shares claims.toml fixes: after each look, claims that are decided and those
whose difference is known to be within ± .05 of 0 are closed, and the arms of the others get the seeds of the next one.
A claim holds if p < .05 and the interval is above 0, does not hold if it is below 0, and is undecided otherwise; p and
interval are valid although several looks are taken (`claims_statistics.sequential_p`). Because many claims are tested
at once, the table has a second verdict beside this one, with p-values corrected by Holm's method for all registered
claims; it closes claims. With `--only` the table also has the claims of the other systems whose runs are stored.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import claims_statistics as statistics
from benchmarks import command
from benchmarks.claims_runs import (
    ARMS,
    CLAIMS,
    LOOKS,
    MEASURES,
    Arm,
    Claim,
    Look,
    Run,
    Runner,
    arm_differences,
    run_arm,
    stored_path,
)
from benchmarks.command import RESULTS
from zeroplay_jax.evaluation.report_builder import MEAN_COLOUR, SETTINGS, TEXT_COLOUR
from zeroplay_jax.runtime.disk import write_text

_COLUMNS = (
    'system',
    'claim',
    'measure',
    'verdict',
    'Holm',
    'difference',
    'interval',
    'seeds',
    'at the end',
    'rollouts of both arms',
    'seeds for ± .05',
)


# Verdict → colour; each has a shape, too, for readers who do not tell the colours apart.
COLOURS = {'holds': MEAN_COLOUR, 'does not hold': '#d1633c', 'undecided': TEXT_COLOUR}
MARKERS = {'holds': 'o', 'does not hold': 's', 'undecided': 'D'}
# Differences beyond ± LIMIT are cut, with an arrow head.
LIMIT = 0.8
_ROW_INCHES = 0.26


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = command.parser('claims', __doc__)
    systems = sorted({claim.system for claim in CLAIMS})
    cores = len(os.sched_getaffinity(0))
    parser.add_argument('--only', choices=systems, help='execute the runs of one system')
    parser.add_argument(
        '--minutes',
        type=float,
        default=float('inf'),
        help='after which no run is begun; 0: the table of the stored runs',
    )
    parser.add_argument(
        '--processes', type=int, default=cores, help=f'runs at the same time ({cores})'
    )
    parser.add_argument('--list', action='store_true', help='print the claims and run nothing')
    parser.add_argument(
        '--out',
        type=pathlib.Path,
        default=RESULTS,
        help='folder of the results, and of the stored runs in its folder runs/ (benchmarks/results)',
    )
    args = parser.parse_args(argv)
    if args.processes < 1:
        parser.error(f'--processes={args.processes} must be at least 1')
    if not args.minutes >= 0:
        parser.error(f'--minutes={args.minutes} must be at least 0')
    if not args.list:
        problem = _unwritable(args.out)
        if problem:
            parser.error(f'--out={args.out}: {problem}; give a folder that can be written')
    return args


def _unwritable(folder: pathlib.Path) -> str:
    """Returns why files cannot be written to a folder, which is created if it is missing; '' if they can."""
    # Found out before any run: a result that cannot be stored is lost.
    try:
        (folder / 'runs').mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder / 'runs'):
            return ''
    except OSError as error:
        return str(error)


def runs_of(claims: Sequence[Claim], seeds: int) -> list[Run]:
    """Returns the runs of the arms of some claims; seeds are the outer loop, so that pairs are complete early."""
    arms: dict[str, None] = {}
    for claim in claims:
        for arm in filter(None, (claim.better, claim.worse)):
            arms[arm] = None
    return [(arm, seed) for seed in range(seeds) for arm in arms]


def play(
    claims: Sequence[Claim],
    runner: Runner,
    looks: Sequence[Look],
    stored_claims: Sequence[Claim] = (),
) -> list[dict[str, Any]]:
    """Returns a row of the table per claim, after all looks or until the runner's deadline.

    The runs of a look that the deadline interrupts are stored, and the look counts as not taken.

    Args:
      claims: the claims whose runs are executed.
      runner: executes runs.
      looks: the looks to take.
      stored_claims: further claims, of which stored runs are used and none is executed; one without a first look has
        no row.

    Returns:
      Rows in the order of the registration, with the fields of the claim, of `statistics.judge` at its last look, and
      of `statistics.correct_verdicts`, which corrects for all registered claims.
    """
    results: dict[Run, dict] = {}
    all_claims = [claim for claim in CLAIMS if claim in claims or claim in stored_claims]
    p_values: dict[Claim, list[float]] = {claim: [] for claim in all_claims}
    intervals: dict[Claim, list[list[float]]] = {claim: [] for claim in all_claims}
    rows: dict[Claim, dict[str, Any]] = {}
    is_open = dict.fromkeys(all_claims, True)
    for number, look in enumerate(looks):
        tested = [claim for claim in all_claims if is_open[claim]]
        executed = [claim for claim in tested if claim in claims]
        print(f'look {number + 1}: {len(executed)} claims, {look.seeds} seeds', file=sys.stderr)
        results |= runner.stored(runs_of(tested, look.seeds))
        results |= runner.run(runs_of(executed, look.seeds))
        for claim in tested:
            if not set(runs_of([claim], look.seeds)) <= set(results):
                continue
            row = _judge(claim, results, look)
            p_values[claim].append(row['p'])
            intervals[claim].append(row['interval'])
            _combine_looks(row, p_values[claim], intervals[claim], claim.plays)
            rows[claim] = row
        statistics.correct_verdicts(list(rows.values()), family=len(CLAIMS))
        for claim, row in rows.items():
            is_open[claim] = row['verdict_holm'] == 'undecided' and not row['negligible']
    return [rows[claim] for claim in all_claims if claim in rows]


def _combine_looks(
    row: dict[str, Any], p_values: Sequence[float], intervals: Sequence[list[float]], plays: int
) -> None:
    """Replaces p, interval and verdict of the last look in a row by those of all looks together.

    'negligible': whether the interval is within ± .05 of 0. The verdict has the sign of the interval, because that of
    the last look's mean may be another one. Looks that contradict each other decide nothing.

    Args:
      row: see `_judge`.
      p_values, intervals: of the looks that were taken, in order.
      plays: see `Claim`.
    """
    shares = [look.share / plays for look in LOOKS]
    row['p'] = statistics.sequential_p(p_values, shares)
    common = statistics.common_interval(intervals)
    if common is None:
        row['p'] = 1.0
        common = [min(low for low, _ in intervals), max(high for _, high in intervals)]
    row['interval'] = low, high = common
    row['negligible'] = -statistics.NARROW <= low and high <= statistics.NARROW
    row['verdict'] = statistics.verdict(low + high, row['p'])


def _judge(claim: Claim, results: Mapping[Run, dict], look: Look) -> dict[str, Any]:
    """Returns the row of a claim at a look, with the p-value of this look alone.

    'beside': the mean difference by the measures that do not decide; 'rollouts': the mean number of rollouts of both
    arms; 'codes': the hashes of the code that the runs ran.
    """
    better = [results[claim.better, seed] for seed in range(look.seeds)]
    worse = better
    if claim.worse:
        worse = [results[claim.worse, seed] for seed in range(look.seeds)]
    by_seed_and_item = statistics.differences(better, worse, claim.measure, claim.of)
    result = statistics.judge(by_seed_and_item, statistics.LEVEL * look.share / claim.plays)
    beside = {}
    for measure in ('final', 'area_of_rollouts'):
        if measure != claim.measure and claim.worse:
            values = statistics.differences(better, worse, measure, claim.of)
            beside[measure] = round(float(values.mean()), 4)
    registered = ('measure', 'of', 'selected', 'afterwards', 'added', 'plays')
    row: dict[str, Any] = dict(
        system=claim.system,
        claim=claim.text,
        **{name: getattr(claim, name) for name in registered},
        seeds=look.seeds,
        beside=beside,
        rollouts=[_mean_rollouts(better), _mean_rollouts(worse)],
        codes=sorted({run.get('code', '') for run in better + worse}),
    )
    return row | result


def _mean_rollouts(runs: list[dict]) -> int:
    return round(sum(run['curve'][-1][statistics.ROLLOUTS] for run in runs) / len(runs))


def _print_registration(claims: list[Claim]) -> None:
    """Prints looks, and the claims with their measures, reasons, marks and the differences of their arms."""
    for number, look in enumerate(LOOKS, 1):
        print(f'look {number}: {look.seeds} seeds per arm, {look.share} of the error probability')
    for name, measure in MEASURES.items():
        print(f'{name}: {measure["text"]}; {measure["reason"]}')
    print('\narms, beside the setting that all have in common:')
    for arm in dict(runs_of(claims, seeds=1)):
        print(f'  {arm}: {_arm_text(ARMS[arm])}')
    for claim in claims:
        print(f'\n{claim.system}: {claim.text}')
        print(f'  {claim.better} against {claim.worse or "itself before training"}')
        print(f'  by {claim.measure} of {claim.of}: {claim.reason}')
        if claim.selected:
            print('  its setting was selected in trials that showed this effect')
        if claim.afterwards:
            print('  registered when its runs had been made for other claims')
        if claim.added:
            known = 'the results of other claims and the runs of its first arm'
            print(f'  added when {known} were known;')
            print('  of its second arm no run with a seed of the claims was made before')
        if claim.plays > 1:
            print(f'  play {claim.plays} of this claim')
        for field, (better, worse) in arm_differences(claim.better, claim.worse).items():
            print(f'  {field}: {better} against {worse}')


def _arm_text(arm: Arm) -> str:
    """Returns an arm's config: the system or a row of configs/ablations.py, further fields, and the start."""
    parts = [f'{arm.system}/{arm.row}' if arm.row else arm.system]
    parts += [f'{name}={value}' for name, value in arm.settings.items()]
    if arm.start:
        parts.append(f'start mini/{arm.start}')
    return ', '.join(parts)


def shown_verdict(row: Mapping[str, Any]) -> str:
    """Returns the verdict of a row, 'less than .05' where it is undecided and its interval is within ± .05 of 0."""
    if row['verdict'] == 'undecided' and row['negligible']:
        return 'less than .05'
    return row['verdict']


def marks(row: Mapping[str, Any]) -> str:
    """Returns the marks of a claim that say where its correction guarantees less; '' for none."""
    names = [f'`{name}`' for name in ('selected', 'added', 'afterwards') if row[name]]
    if row['plays'] > 1:
        names.append(f'play {row["plays"]}')
    return f' ({", ".join(names)})' if names else ''


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table in Markdown; `rows` are those of `play`."""
    return command.table(_COLUMNS, map(_cells, rows)) + '\n'


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a row, one for each of `_COLUMNS`."""
    low, high = row['interval']
    at_the_end = ''
    rollouts = f'{row["rollouts"][0]:,}'
    # A policy that is compared with itself before training has one arm.
    if row['measure'] != 'gain':
        rollouts += f', {row["rollouts"][1]:,}'
    if 'final' in row['beside']:
        at_the_end = f'{row["beside"]["final"]:+.3f}'
    needed = row['seeds_needed']
    return (
        row['system'],
        row['claim'] + marks(row),
        row['measure'].replace('_', ' '),
        shown_verdict(row),
        row['verdict_holm'],
        f'{row["difference"]:+.3f}',
        f'{low:+.3f} … {high:+.3f}',
        str(row['seeds']),
        at_the_end,
        rollouts,
        '—' if needed is None else str(needed),
    )


def write_forest_plot(table: Sequence[Mapping[str, Any]], out: pathlib.Path) -> None:
    """Plots the rows of `play` into an SVG file, by system; verdicts are those corrected by Holm's method."""
    # Imported here: only this command needs matplotlib, and its import takes a second.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        height = _ROW_INCHES * len(table) + 1.2
        figure = Figure(figsize=(9.5, height))
        axes = figure.add_axes((0.58, 0.85 / height, 0.40, 1 - 1.15 / height))
        axes.axvline(0, color=TEXT_COLOUR, linewidth=0.8)
        for position, row in enumerate(table):
            _plot_row(axes, -position, row)
        axes.set_yticks([-position for position in range(len(table))])
        axes.set_yticklabels([f'{row["system"]}: {row["claim"]}{_signs(row)}' for row in table])
        axes.set_xlim(-LIMIT, LIMIT)
        axes.set_ylim(-len(table) + 0.4, 0.6)
        axes.set_xlabel(
            'difference with its interval; right of 0: as the paper says\n'
            'colours: verdict after correction\n'
            '§ chosen for this effect   † registered after its runs   ‡ after those of one arm'
        )
        axes.grid(axis='x', color=TEXT_COLOUR, alpha=0.3)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        _add_legend(axes)
        svg = io.StringIO()
        # The default metadata contain the time of writing and the version of matplotlib.
        figure.savefig(
            svg, format='svg', transparent=True, metadata={'Date': None, 'Creator': None}
        )
    write_text(out, svg.getvalue())


def _signs(row: Mapping[str, Any]) -> str:
    """Returns the marks behind the name of a claim."""
    signs = {'selected': '§', 'afterwards': '†', 'added': '‡'}
    return ''.join(f' {sign}' for name, sign in signs.items() if row[name])


def _plot_row(axes: Any, height: int, row: Mapping[str, Any]) -> None:
    low, high = row['interval']
    verdict = row['verdict_holm']
    colour = COLOURS[verdict]
    axes.plot([max(low, -LIMIT), min(high, LIMIT)], [height, height], color=colour, linewidth=1.5)
    for end, marker, is_cut in ((-LIMIT, '<', low < -LIMIT), (LIMIT, '>', high > LIMIT)):
        if is_cut:
            axes.plot(end, height, marker=marker, color=colour, markersize=5, clip_on=False)
    if abs(row['difference']) <= LIMIT:
        axes.plot(row['difference'], height, marker=MARKERS[verdict], color=colour, markersize=6)


def _add_legend(axes: Any) -> None:
    for verdict, colour in COLOURS.items():
        axes.plot([], [], marker=MARKERS[verdict], color=colour, linewidth=1.5, label=verdict)
    axes.legend(loc='lower right', bbox_to_anchor=(1, 1), ncols=3, frameon=False)


def main(argv: list[str] | None = None) -> None:
    """Executes the runs that are not stored, and prints the table."""
    args = parse_arguments(argv)
    claims = [claim for claim in CLAIMS if args.only in (None, claim.system)]
    if args.list:
        try:
            _print_registration(claims)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader, such as `head`, has seen enough. The interpreter would report it again at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    started = time.monotonic()
    path_of = functools.partial(stored_path, folder=args.out / 'runs')
    with Runner(path_of, run_arm, args.processes, started + 60 * args.minutes) as runner:
        table = play(claims, runner, LOOKS, stored_claims=CLAIMS)
    print(f'{time.monotonic() - started:.0f} s', file=sys.stderr)
    if len(table) < len(CLAIMS):
        missing = len(CLAIMS) - len(table)
        print(
            f'{missing} of {len(CLAIMS)} claims have too few runs in {args.out / "runs"} for a first look'
        )
    if not table:
        print(json.dumps({'claims': table}))
        if not args.minutes:
            # The table of stored runs was asked for, and there is none.
            sys.exit(1)
        return
    print(markdown(table))
    codes = {code for row in table for code in row['codes']}
    if len(codes) > 1:
        print(f'note: the runs are of {len(codes)} versions of the code', file=sys.stderr)
    write_text(args.out / 'claims.json', json.dumps({'claims': table}, indent=1))
    write_text(args.out / 'claims.md', markdown(table))
    write_forest_plot(table, args.out / 'claims.svg')
    print(json.dumps({'claims': table}))


if __name__ == '__main__':
    main()
