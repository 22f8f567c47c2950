"""Tables of results that `zeroplay evaluate --out=FILE` wrote, with differences from the first.

    zeroplay compare base.json trained.json
    zeroplay compare base.json iteration1.json iteration2.json iteration3.json --format=latex
    zeroplay compare base.json seed0.json,seed1.json,seed2.json
    zeroplay compare a0.json,a1.json,a2.json b0.json,b1.json,b2.json

Question sets and their average are columns. A result, or a side of several runs, has a row of mean scores, and one of
the difference from the first, with 95 % intervals. Of single results the interval is Newcombe's for pairs, as in the
table of a run: it covers the choice of questions or of their documents, and two seeds of one config can differ by more.
Of several runs it covers the runs, such as seeds, on these questions: Welch's t interval; Student's over the runs of
the other side if one side is a single file, such as the policy before training; ± is the standard deviation over runs.
Results of several samples per question have a row each for their mean, with the standard deviation over samples, for
the best one (pass@k) and for the majority's.
Results are refused if the number of passages per query, the metric, the judge, the date, the temperature or the numbers
of samples or questions differ: their difference would not measure the policy. Another index, other prompts, tools or
numbers of turns or tokens are named in a line. Refused are also two results of one run
on a side.
Runs by their workdirs are compared by `zeroplay report`.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Mapping

import numpy as np

from zeroplay_jax.evaluation import protocols, statistics, tables
from zeroplay_jax.evaluation.results import Results, compare, heading, shared_sets
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.retrieval.command import Parser, exit_status
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime import signals
from zeroplay_jax.types import UserError

# Heading of a side → its results.
Sides = Mapping[str, list[Results]]


def _parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog='zeroplay compare',
        description=__doc__,
    )
    parser.add_argument(
        'sides',
        nargs='+',
        metavar='FILE[,FILE]',
        help='results, also gs://bucket/path: the first, and those whose gain over it is printed; runs of one side '
        'with commas between',
    )
    parser.add_argument(
        '--protocol',
        choices=protocols.PROTOCOLS,
        default='',
        help="columns as in this paper's tables: average or total, shares or percent",
    )
    parser.add_argument('--format', choices=tables.FORMATS, default='text', help='of the table')
    return parser


def _read_side(files: list[str]) -> tuple[str, list[Results]]:
    """Returns the heading of a side and its results.

    The heading is the name of its file, or how many there are.

    Raises:
      UserError: a file is no result, or two are of one run: they would count as two.
    """
    paths = [pathlib.Path(downloads.fetch(file, is_file=True)) for file in files]
    results = list(map(Results.read, paths))
    file_of_run: dict[str, str] = {}
    for file, result in zip(files, results, strict=True):
        # Policies that no run exported name none.
        run = result.settings.get(run_record.HASH_FIELD) or str(pathlib.Path(file).resolve())
        if run in file_of_run:
            raise UserError(
                f'{file_of_run[run]} and {file} are of the same run; give one result of each run'
            )
        file_of_run[run] = file
    return paths[0].stem if len(paths) == 1 else f'{len(paths)} runs', results


def _read_sides(files_of_sides: list[list[str]]) -> Sides:
    """Returns all sides, cut to the sets that all results have.

    Raises:
      UserError: as `_read_side`, results that cannot be compared, or sides of different numbers, but for the first one.
    """
    # One interval covers what all differences have in common. The first side may be one file.
    numbers = [len(files) for files in files_of_sides[1:]]
    if len(set(numbers)) > 1:
        raise UserError(
            f'sides of {", ".join(map(str, numbers))} files; give as many of each side but the first'
        )
    sides: dict[str, list[Results]] = {}
    for files in files_of_sides:
        name, results = _read_side(files)
        # Two folders may have files of one name.
        if name in sides and not files[1:]:
            name = f'{pathlib.Path(files[0]).absolute().parent.name}, {name}'
        while name in sides:
            name += "'"
        sides[name] = results
    everything = [result for side in sides.values() for result in side]
    for name, of_side in sides.items():
        notes = [everything[0].differences(result) for result in of_side]
        if any(notes):
            print(f'note: {name}: not the policy alone differs, but {max(notes)}', file=sys.stderr)
    names = shared_sets(everything)
    return {
        name: [
            Results(one.settings, {shared: one.sets[shared] for shared in names}) for one in of_side
        ]
        for name, of_side in sides.items()
    }


def _run_means(results: list[Results], kind: str) -> dict[str, list[float]]:
    """Returns {set or AVERAGE: score of each run}."""
    figures_of_runs = [result.figures(kind) for result in results]
    return {name: [of_run[name].mean for of_run in figures_of_runs] for name in figures_of_runs[0]}


def _scores(results: list[Results], kind: str) -> dict[str, tables.Figure]:
    """Returns {set or AVERAGE: mean score} of a side."""
    if len(results) == 1:
        return results[0].figures(kind)
    return {
        name: tables.Figure(float(np.mean(means)), deviation=float(np.std(means, ddof=1)))
        for name, means in _run_means(results, kind).items()
    }


def _differences(
    baselines: list[Results], candidates: list[Results], kind: str
) -> dict[str, tables.Figure]:
    """Returns {set or AVERAGE: difference} of a side from the first."""
    if len(baselines) == len(candidates) == 1:
        intervals = compare(baselines[0], candidates[0], kind)
    else:
        before, after = _run_means(baselines, kind), _run_means(candidates, kind)
        intervals = {name: statistics.difference(before[name], after[name]) for name in before}
    return {name: tables.Figure.of(interval, sign='+') for name, interval in intervals.items()}


def _rows(sides: Sides) -> dict[str, dict[str, tables.Figure]]:
    """Returns heading → row: scores of all sides, then differences from the first one."""
    (first, baselines), *others = sides.items()
    kinds = baselines[0].kinds()
    rows = {}
    for name, results in sides.items():
        for kind in kinds:
            rows[heading(name, kind)] = _scores(results, kind)
    for other, candidates in others:
        name = 'difference' if len(others) == 1 else f'{other} - {first}'
        for kind in kinds:
            rows[heading(name, kind)] = _differences(baselines, candidates, kind)
    return rows


def _covered(sides: Sides) -> str:
    """Returns in words what the intervals cover."""
    first, *others = (len(results) for results in sides.values())
    runs = max(first, *others, 1)
    if others and runs > 1:
        statistic = f"Welch's t interval over {first} and {others[0]} runs"
        if 1 in (first, others[0]):
            exact = 'the single result of the other side counts as exact'
            statistic = f"Student's t interval over {runs} runs; {exact}"
        return f'the runs on these questions ({statistic})'
    choice, statistic = 'questions', 'Newcombe, paired'
    if all(result.has_documents() for results in sides.values() for result in results):
        choice, statistic = 'documents', 'bootstrap, paired'
    of_pairs = f' ({statistic})' if others else ''
    return (
        f'the choice of {choice}{of_pairs}, not the seed: for that give several runs of each side'
    )


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns the exit status (`exit_status`)."""
    signals.raise_again()
    return exit_status('zeroplay compare', lambda: _run(_parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> None:
    sides = _read_sides([side.split(',') for side in args.sides])
    rows = _rows(sides)
    table: list[list[tables.Cell]] = []
    for name, figures in rows.items():
        row = protocols.in_form(args.protocol, figures)
        table.append([name, *row.values()])
    print(tables.write([['', *row], *table], args.format))
    # Beside the table, which may go into a file.
    output = sys.stdout if args.format == 'text' else sys.stderr
    print(f'The intervals of 95 % cover {_covered(sides)}.', file=output)


if __name__ == '__main__':
    sys.exit(main())
