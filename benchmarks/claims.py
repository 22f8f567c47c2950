"""Tests the papers' main comparisons on the miniature encyclopedia, with effect sizes and intervals.

    python -m benchmarks.claims                        # everything; stored runs are not executed again
    python -m benchmarks.claims --only dspo --minutes 60 --out runs/claims

Arms, claims, the measure of each claim and its reason are data: benchmarks/claims.toml, written before the runs of a
play; what was changed later is named there. An arm is a config: a row of configs/ablations.py and further settings. It
is run once per seed. A claim compares two arms, paired by seed and evaluation question. Their configs differ in nothing
but the fields that the claim names. The measure that leads is the paper's; value at the end, area
and value at equal rollouts stand beside it, each with its verdict.

The setting is harder than the quickstart's and nearly the same for all systems (`claims_runs.config_of`): evaluation
with up to four hops, more near-miss documents, several updates per batch. It is short, 12 solver steps at larger
learning rates, 18 for SSP. Exact match is measured on held-out questions; for SCOPE, which trains on open tasks, also
the share of rubrics that answers to held-out tasks meet.

Every finished run is stored in benchmarks/results/runs with the hash of the code that it ran. These are from commit
21656cfd and before, and began from starts that were trained on deliberate errors: they can be played again from commit
b4077a4a, those from `answers/base` from 21656cfd. With today's code, and from its starts, runs are played into another
folder (--out), but for arms whose start has left the package. The table is written to benchmarks/results/claims.json
and claims.md, the picture to claims.svg; the last line printed is one JSON object.

Seeds are added in looks, whose seeds and shares claims.toml fixes: after each look, claims that are decided and those
whose difference is known to be less than their margin are closed, and the arms of the others get the seeds of the next
one. A claim holds if p < .05 after Holm's correction for all registered claims and the interval is above 0, does not
hold if it is below 0; `less than` if the one-sided upper 95 % limit is below its margin, the paper's effect or .05 if
that is smaller; and is open otherwise. p, interval and limit are valid although several looks are taken
(`claims_statistics.combine_looks`). With `--only` the table also has the claims of the other systems whose runs are
stored.

Rows of the papers' tables about which claims.toml claims nothing (`ablations`) are played with four seeds, after the
claims, and compared without a verdict.
"""

from __future__ import annotations

import argparse
import collections
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
    ABLATION_LOOK,
    ABLATIONS,
    CLAIMS,
    LOOKS,
    MEASURES,
    Claim,
    Look,
    Run,
    Runner,
    run_arm,
)
from benchmarks.command import RESULTS
from zeroplay_jax.extras.drawing import SETTINGS, TEXT_COLOUR
from zeroplay_jax.runtime.disk import write_text

_COLUMNS = (
    'system',
    'claim',
    'verdict',
    'measure that leads',
    'at the end',
    'area',
    'equal rollouts',
    "paper's effect",
    'seeds',
    'rollouts of both arms',
)
# The columns of measures that stand beside the one that leads.
_BESIDE = ('final', 'area', 'at_rollouts')
# Equal rollouts are shown where one arm has more than so many times those of the other.
_UNEQUAL = 1.2

_ABLATION_COLUMNS = (
    'system',
    'ablation',
    'at the end',
    'area',
    'equal rollouts',
    "paper's effect",
    'rollouts of both arms',
)
# Kinds of verdicts that leave a claim open; in brackets: decided without correction.
UNDECIDED = ('open', '(holds)', '(does not hold)')
# Verdict → colour; each has a shape, too, for readers who do not tell the colours apart.
COLOURS = {'holds': '#2f81f7', 'does not hold': '#d1633c', 'less': '#8a6fb0', 'open': TEXT_COLOUR}
MARKERS = {'holds': 'o', 'does not hold': 's', 'less': 'v', 'open': 'D'}
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
      Rows in the order of the registration, with the fields of the claim and 'measures': those of the claim, each with
      the fields of `statistics.judge_looks` and of `statistics.correct_verdicts`, which corrects for all registered
      claims.
    """
    results: dict[Run, dict] = {}
    all_claims = [claim for claim in CLAIMS if claim in claims or claim in stored_claims]
    rows: dict[Claim, dict[str, Any]] = {}
    is_open = dict.fromkeys(all_claims, True)
    for number, look in enumerate(looks, 1):
        executed = [claim for claim in claims if is_open[claim]]
        print(f'look {number}: {len(executed)} claims, {look.seeds} seeds', file=sys.stderr)
        # Runs that other claims needed count, too.
        results |= runner.stored(runs_of(all_claims, look.seeds))
        results |= runner.run(runs_of(executed, look.seeds))
        for claim in all_claims:
            if set(runs_of([claim], look.seeds)) <= set(results):
                rows[claim] = _judge(claim, results, looks[:number])
        _correct(list(rows.values()))
        for claim, row in rows.items():
            is_open[claim] = kind(row['measures'][claim.measure], claim.margin) in UNDECIDED
    return [rows[claim] for claim in all_claims if claim in rows]


def compare_ablations(ablations: Sequence[Claim], runner: Runner) -> list[dict[str, Any]]:
    """Returns a row, as `play` does, for every ablation whose runs exist or are made before the runner's deadline."""
    looks = (ABLATION_LOOK,)
    seeds = ABLATION_LOOK.seeds
    results = runner.run(runs_of(ablations, seeds))
    results |= runner.stored(runs_of(ABLATIONS, seeds))
    complete = [row for row in ABLATIONS if set(runs_of([row], seeds)) <= set(results)]
    return [_judge(row, results, looks) for row in complete]


def _correct(rows: Sequence[Mapping[str, Any]]) -> None:
    """Corrects the results of rows, in place: by each measure, and those by the measures that lead together."""
    for measure in MEASURES:
        for row, result in zip(rows, led_by(rows, measure), strict=True):
            if measure in row['measures']:
                row['measures'][measure] = result
    for row, result in zip(rows, led_by(rows, 'measure'), strict=True):
        row['measures'][row['measure']] = result


def led_by(rows: Sequence[Mapping[str, Any]], measure: str) -> list[dict[str, Any]]:
    """Returns the result of each row by a measure, corrected together.

    Args:
      rows: of `play`.
      measure: by which all claims are judged that have it, the others by the measure that leads; 'measure' for the one
        that leads, 'registered' for the one that was registered.
    """
    results = []
    for row in rows:
        measures = row['measures']
        chosen = row.get(measure, measure)
        results.append(dict(measures[chosen if chosen in measures else row['measure']]))
    statistics.correct_verdicts(results, family=len(CLAIMS))
    return results


def _judge(claim: Claim, results: Mapping[Run, dict], looks: Sequence[Look]) -> dict[str, Any]:
    """Returns the row of a claim after some looks, without correction.

    'rollouts': the mean number of rollouts of both arms; 'codes': the hashes of the code that the runs ran.
    """
    seeds = range(looks[-1].seeds)
    better = [results[claim.better, seed] for seed in seeds]
    worse = [results[claim.worse, seed] for seed in seeds] if claim.worse else better
    rollouts = [_mean_rollouts(better), _mean_rollouts(worse)]
    shares = [(look.seeds, look.share / claim.plays) for look in looks]
    measures = {}
    for measure in claim.measures:
        if measure != 'at_rollouts' or max(rollouts) > _UNEQUAL * min(rollouts):
            values = statistics.differences(better, worse, measure, claim.of)
            measures[measure] = statistics.judge_looks(values, shares)
            if measure != claim.measure:
                del measures[measure]['by_seed']
    registered = ('measure', 'registered', 'of', 'selected', 'afterwards', 'added', 'plays')
    return dict(
        system=claim.system,
        claim=claim.text,
        **{name: getattr(claim, name) for name in registered},
        paper=list(claim.paper),
        margin=claim.margin,
        seeds=len(seeds),
        rollouts=rollouts,
        codes=sorted({run.get('code', '') for run in better + worse}),
        measures=measures,
    )


def _mean_rollouts(runs: list[dict]) -> int:
    return round(sum(run['curve'][-1][statistics.ROLLOUTS] for run in runs) / len(runs))


def kind(result: Mapping[str, Any], margin: float | None) -> str:
    """Returns the verdict of a corrected result: after Holm's correction, or in brackets if only without it.

    One of 'holds', 'does not hold', 'less' than the margin, and those of UNDECIDED.
    """
    if result['verdict_holm'] != 'open':
        return result['verdict_holm']
    if result['verdict'] != 'open':
        return f'({result["verdict"]})'
    return 'less' if margin is not None and result['upper'] < margin else 'open'


def _shown_verdict(row: Mapping[str, Any], measure: str) -> str:
    """Returns `kind` with the margin."""
    margin = f'{row["margin"] or 0:.3f}'.strip('0')
    text = kind(row['measures'][measure], row['margin'])
    return f'less than {margin}' if text == 'less' else text


def marks(row: Mapping[str, Any]) -> str:
    """Returns the marks of a claim that say where its correction guarantees less; '' for none."""
    names = [f'`{name}`' for name in ('selected', 'added', 'afterwards') if row[name]]
    if row['registered']:
        names.append(f'registered: {row["registered"]}')
    if row['plays'] > 1:
        names.append(f'play {row["plays"]}')
    return f' ({", ".join(names)})' if names else ''


def tally(rows: Sequence[Mapping[str, Any]], measure: str) -> collections.Counter[str]:
    """Returns how many claims have which `kind` if a measure leads, without those registered after their runs.

    Args:
      rows, measure: see `led_by`.
    """
    kinds: collections.Counter[str] = collections.Counter()
    for row, result in zip(rows, led_by(rows, measure), strict=True):
        if not row['afterwards']:
            kinds[kind(result, row['margin'])] += 1
    return kinds


def counts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of `tally` in Markdown."""
    columns = (
        'counted by',
        'holds',
        'does not hold',
        'less than matters',
        'open',
        'the first two without correction',
    )
    titles = {
        'measure': 'the measure that leads',
        'registered': 'the measure that was registered',
        'final': 'the value at the end, where there is one',
        'area': 'the area, where there is one',
        'at_rollouts': 'equal rollouts, where they differ',
    }
    lines = []
    for measure, title in titles.items():
        kinds = tally(rows, measure)
        without = [kinds[name] + kinds[f'({name})'] for name in ('holds', 'does not hold')]
        undecided = sum(kinds[name] for name in UNDECIDED)
        decided = [kinds[name] for name in ('holds', 'does not hold', 'less')]
        lines.append((title, *decided, undecided, f'{without[0]}, {without[1]}'))
    return command.table(columns, lines)


def markdown(rows: Sequence[Mapping[str, Any]], ablations: Sequence[Mapping[str, Any]]) -> str:
    """Returns counts and tables in Markdown; the rows are those of `play` and of `compare_ablations`."""
    title = "# The papers' claims by all measures"
    table = command.table(_COLUMNS, map(_cells, rows))
    about = (
        f"## Rows of the papers' tables without a claim\n\nThe first {ABLATION_LOOK.seeds} seeds, with 95 % intervals "
        'that are not corrected for their number.'
    )
    compared = command.table(_ABLATION_COLUMNS, map(_ablation_cells, ablations))
    return f'{title}\n\n{counts(rows)}\n\n{table}\n\n{about}\n\n{compared}\n'


def _ablation_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of an ablation, one for each of `_ABLATION_COLUMNS`."""
    measures = [_figures(row, name) if name in row['measures'] else '' for name in _BESIDE]
    paper = f'{row["paper"][0]:+.3f}' if row['paper'] else ''
    rollouts = f'{row["rollouts"][0]:,}, {row["rollouts"][1]:,}'
    return row['system'], row['claim'], *measures, paper, rollouts


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a row, one for each of `_COLUMNS`."""
    leads = row['measure']
    rollouts = f'{row["rollouts"][0]:,}'
    # A policy that is compared with itself before training has one arm.
    if leads != 'gain':
        rollouts += f', {row["rollouts"][1]:,}'
    beside = []
    for measure in _BESIDE:
        is_shown = measure in row['measures'] and measure != leads
        beside.append(
            f'{_figures(row, measure)} {_shown_verdict(row, measure)}' if is_shown else ''
        )
    return (
        row['system'],
        row['claim'] + marks(row),
        _shown_verdict(row, leads),
        f'{leads.replace("_", " ")} {_figures(row, leads)}',
        *beside,
        f'{row["paper"][0]:+.3f}' if row['paper'] else '',
        str(row['seeds']),
        rollouts,
    )


def _figures(row: Mapping[str, Any], measure: str) -> str:
    result = row['measures'][measure]
    low, high = result['interval']
    return f'{result["difference"]:+.3f} [{low:+.3f}, {high:+.3f}]'


def write_forest_plot(table: Sequence[Mapping[str, Any]], out: pathlib.Path) -> None:
    """Plots the rows of `play` into an SVG file, by system; verdicts are those corrected by Holm's method."""
    # Imported here: only this command needs matplotlib, and its import takes a second.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        height = _ROW_INCHES * len(table) + 1.2
        figure = Figure(figsize=(10.5, height))
        axes = figure.add_axes((0.61, 0.85 / height, 0.37, 1 - 1.15 / height))
        axes.axvline(0, color=TEXT_COLOUR, linewidth=0.8)
        for position, row in enumerate(table):
            _plot_row(axes, -position, row)
        axes.set_yticks([-position for position in range(len(table))])
        axes.set_yticklabels([f'{row["system"]}: {row["claim"]}{_signs(row)}' for row in table])
        axes.set_xlim(-LIMIT, LIMIT)
        axes.set_ylim(-len(table) + 0.4, 0.6)
        axes.set_xlabel(
            'difference by the measure that leads, with its interval; right of 0: as the paper says\n'
            'colours: verdict after correction   ¶ measure chosen when the results were known\n'
            '§ setting chosen for this effect   † registered after its runs   ‡ after those of one arm',
            loc='right',
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
    signs = {'selected': '§', 'afterwards': '†', 'added': '‡', 'registered': '¶'}
    return ''.join(f' {sign}' for name, sign in signs.items() if row[name])


def _plot_row(axes: Any, height: int, row: Mapping[str, Any]) -> None:
    result = row['measures'][row['measure']]
    low, high = result['interval']
    verdict = kind(result, row['margin'])
    verdict = 'open' if verdict in UNDECIDED else verdict
    colour = COLOURS[verdict]
    axes.plot([max(low, -LIMIT), min(high, LIMIT)], [height, height], color=colour, linewidth=1.5)
    for end, marker, is_cut in ((-LIMIT, '<', low < -LIMIT), (LIMIT, '>', high > LIMIT)):
        if is_cut:
            axes.plot(end, height, marker=marker, color=colour, markersize=5, clip_on=False)
    if abs(result['difference']) <= LIMIT:
        axes.plot(result['difference'], height, marker=MARKERS[verdict], color=colour, markersize=6)


def _add_legend(axes: Any) -> None:
    for verdict, colour in COLOURS.items():
        axes.plot(
            [],
            [],
            marker=MARKERS[verdict],
            color=colour,
            linewidth=1.5,
            label=verdict if verdict != 'less' else 'less than matters',
        )
    axes.legend(loc='lower right', bbox_to_anchor=(1, 1), ncols=4, frameon=False)


def main(argv: list[str] | None = None) -> None:
    """Executes the runs that are not stored, and prints the table."""
    args = parse_arguments(argv)
    claims = [claim for claim in CLAIMS if args.only in (None, claim.system)]
    played = [row for row in ABLATIONS if args.only in (None, row.system)]
    started = time.monotonic()
    with Runner(args.out / 'runs', run_arm, args.processes, started + 60 * args.minutes) as runner:
        table = play(claims, runner, LOOKS, stored_claims=CLAIMS)
        ablations = compare_ablations(played, runner)
    print(f'{time.monotonic() - started:.0f} s', file=sys.stderr)
    if len(table) < len(CLAIMS):
        missing = len(CLAIMS) - len(table)
        print(
            f'{missing} of {len(CLAIMS)} claims have too few runs in {args.out / "runs"} for a first look'
        )
    if len(ablations) < len(ABLATIONS):
        missing = len(ABLATIONS) - len(ablations)
        print(
            f'{missing} of {len(ABLATIONS)} ablations have fewer than {ABLATION_LOOK.seeds} seeds'
        )
    if not table:
        print(json.dumps({'claims': table}))
        if not args.minutes:
            # The table of stored runs was asked for, and there is none.
            sys.exit(1)
        return
    print(markdown(table, ablations))
    codes = {code for row in table + ablations for code in row['codes']}
    if len(codes) > 1:
        print(f'note: the runs are of {len(codes)} versions of the code', file=sys.stderr)
    results = {'claims': table, 'ablations': ablations}
    write_text(args.out / 'claims.json', json.dumps(results, indent=1))
    write_text(args.out / 'claims.md', markdown(table, ablations))
    write_forest_plot(table, args.out / 'claims.svg')
    print(json.dumps(results))


if __name__ == '__main__':
    main()
