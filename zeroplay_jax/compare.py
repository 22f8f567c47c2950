"""Tables of results that `python -m zeroplay_jax.evaluate --out=FILE` wrote, with differences from the first.

    python -m zeroplay_jax.compare base.json trained.json
    python -m zeroplay_jax.compare base.json iteration1.json iteration2.json iteration3.json --format=latex
    python -m zeroplay_jax.compare base.json seed0.json,seed1.json,seed2.json
    python -m zeroplay_jax.compare a0.json,a1.json,a2.json b0.json,b1.json,b2.json
    python -m zeroplay_jax.compare runs/a runs/b runs/c --format=markdown

Question sets and their average are columns. A result, or a side of several runs, has a row of mean scores, and one of
the difference from the first, with 95 % intervals. Of single results the interval is Newcombe's for pairs, as in the
table of a run: it covers the choice of questions only, and two seeds of one config can differ by more. Of several runs
it covers the runs, such as seeds, on these questions: Welch's t interval; Student's over the runs of the other side if
one side is a single file, such as the policy before training; ± is the standard deviation over runs. Results of several
samples per question have a row each for their mean, with the standard deviation over samples, for the best one (pass@k)
and for the majority's.
Results are refused if the retriever, the corpus, the number of passages per query, the metric, the judge, the date, the
temperature or the numbers of samples or questions differ: their difference would not measure the policy. Other prompts,
tools or numbers of turns or tokens, which papers compare, are named in a line. Refused are also two results of one run
on a side.
Workdirs of runs are rows of another table: the fields of their configs that differ, and the means of the last
evaluation, of exact match with its interval and its difference from the one before training.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Mapping

import numpy as np

from zeroplay_jax.evaluation import protocols, report_builder, statistics, tables
from zeroplay_jax.evaluation.results import Results, compare, heading, shared_sets
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.retrieval.command import Parser, exit_status
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.workdir import local_run
from zeroplay_jax.types import Json, UserError

# Heading of a side → its results.
Sides = Mapping[str, list[Results]]


def _parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        prog='python -m zeroplay_jax.compare',
        description=__doc__,
    )
    parser.add_argument(
        'sides',
        nargs='+',
        metavar='FILE[,FILE]|WORKDIR',
        help='results, also gs://bucket/path: the first, and those whose gain over it is printed; runs of one side '
        'with commas between; or workdirs of runs',
    )
    parser.add_argument(
        '--protocol',
        choices=protocols.PROTOCOLS,
        default='',
        help="columns as in this paper's tables: average or total, shares or percent",
    )
    parser.add_argument('--format', choices=tables.FORMATS, default='text', help='of the table')
    return parser


def _sides(args: argparse.Namespace) -> list[list[str]]:
    """Returns the files of each side; raises UserError for sides of different numbers, but a first one of its own."""
    sides = [side.split(',') for side in args.sides]
    # One interval covers what all differences have in common. The first side may be one file.
    numbers = [len(side) for side in sides[1:]]
    if len(set(numbers)) > 1:
        raise UserError(
            f'sides of {", ".join(map(str, numbers))} files; give as many of each side but the first'
        )
    return sides


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
      UserError: as `_read_side`, or results that cannot be compared.
    """
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
    if others and max(first, *others) > 1:
        return f'the runs on these questions ({statistics.statistic(first, others[0])})'
    of_pairs = ' (Newcombe, paired)' if others else ''
    return (
        f'the choice of questions{of_pairs}, not the seed: for that give several runs of each side'
    )


# ---- runs ------------------------------------------------------------------------------------------


def _is_workdir(side: str) -> bool:
    """Returns whether an argument names the workdir of a run: a folder, or an address without the suffix of results."""
    is_address = downloads.is_address(side) and not side.endswith('.json')
    return is_address or pathlib.Path(side).is_dir()


def _run_table(args: argparse.Namespace) -> list[list[tables.Cell]]:
    """Returns the headings and a row per run; what a run has not is empty, and named on stderr.

    Raises:
      UserError: an argument is no workdir, or a flag is for results.
    """
    if args.protocol:
        raise UserError('--protocol: is for results of evaluations, not for workdirs')
    for side in args.sides:
        if not _is_workdir(side):
            raise UserError(f'{side}: is no workdir; give workdirs alone, or results alone')
    runs = report_builder.read_runs(list(map(local_run, args.sides)), has_trajectories=False)
    configs = [run_record.flat_config(run['config']) for run in runs]
    fields = sorted(set().union(*configs))
    differing = [name for name in fields if len({str(one.get(name)) for one in configs}) > 1]
    figures = [_figures(run) for run in runs]
    measured = list(dict.fromkeys(name for one in figures for name in one))
    rows: list[list[tables.Cell]] = [['', *differing, *measured]]
    for run, config, cells in zip(runs, configs, figures, strict=True):
        values = [str(config.get(name, '')) for name in differing]
        rows.append([run['name'], *values, *(cells.get(name, '') for name in measured)])
        if run['notes']:
            print(f'note: {run["name"]}: {" ".join(run["notes"])}', file=sys.stderr)
    return rows


def _figures(run: Json) -> dict[str, tables.Cell]:
    """Returns heading → the means of a run's last evaluation, and the number of its step."""
    evaluations = [record for record in run['metrics'] if 'em/mean' in record]
    if not evaluations:
        return {}
    last, summary = evaluations[-1], run['summary']
    cells: dict[str, tables.Cell] = {'step': str(last['step'])}
    for name, value in last.items():
        if name.endswith('/mean'):
            cells[name] = tables.Figure(value)
    # A run that goes on after its summary has an evaluation of which that does not speak.
    if 'ci95' in summary and summary['em_after'] == last['em/mean']:
        cells['em/mean'] = tables.Figure(summary['em_after'], tuple(summary['ci95']['after']))
        cells['difference'] = tables.Figure.of(summary['difference'], sign='+')
    return cells


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns the exit status (`exit_status`)."""
    signals.raise_again()
    return exit_status('zeroplay_jax.compare', lambda: _run(_parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> None:
    if any(map(_is_workdir, args.sides)):
        print(tables.write(_run_table(args), args.format))
        return
    sides = _read_sides(_sides(args))
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
