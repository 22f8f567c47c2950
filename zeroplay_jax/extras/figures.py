"""Draws a figure of a paper from one run or several, beside what the paper published.

    zeroplay figures list
    zeroplay figures em runs/quickstart --out curve.svg
    zeroplay figures ssp5a runs/a runs/b

figures.toml beside this file has them: which metrics, over training steps or iterations, and published numbers.
"""

from __future__ import annotations

import collections
import fnmatch
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zeroplay_jax.evaluation import report_builder, statistics
from zeroplay_jax.extras.drawing import STEPS, TEXT_COLOUR, new_axes, save
from zeroplay_jax.retrieval.command import Parser, exit_status
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.workdir import local_run
from zeroplay_jax.types import Json, UserError

# x and y.
Line = tuple[list[float], list[float]]

FIGURES = Path(__file__).with_name('figures.toml')


def figures() -> dict[str, Json]:
    """Returns the named figures: title, metrics (patterns), y; optionally x, of and published."""
    return tomllib.loads(FIGURES.read_text(encoding='utf-8'))


def write_figure(name: str, runs: Sequence[Json], out: str | os.PathLike[str]) -> list[Path]:
    """Draws a figure from runs, beside what its paper published; replaces the files.

    The mean exact match has its 95 % interval as a band, as soon as a run has ended.

    Args:
      name: of the figure.
      runs: results of `report_builder.read_run`.
      out: path of the SVG file; the PNG file stands beside it.

    Returns:
      The paths of both files.

    Raises:
      UserError: there is no such figure, or a run has none of its metrics.
    """
    figure = figures().get(name)
    if figure is None:
        raise UserError(f'{name}: no such figure; list shows all')
    drawing, axes = new_axes(figure['title'], figure.get('x', STEPS), figure['y'])
    for run in runs:
        lines = _lines_of_run(figure, run)
        if not lines:
            raise UserError(
                f'{run["name"]}: has none of {", ".join(figure["metrics"])}, which figure {name} draws; give a run '
                'that trains these roles and logs by role, or measures this by config.eval'
            )
        prefix = f'{run["name"]}: ' if len(runs) > 1 else ''
        for metric, (x, y) in lines.items():
            label = f'{prefix}{metric}{_averaged(run) if metric == "em/mean" else ""}'
            (line,) = axes.plot(x, y, 'o-', markersize=3, label=label)
            if metric == 'em/mean' and 'x' not in figure:
                _draw_band(axes, x, run['summary'], line.get_color())
    # Points [x, y], or the height of a horizontal line.
    for marker, (label, values) in zip('x+14', figure.get('published', {}).items()):
        style = {'color': TEXT_COLOUR, 'linestyle': ':', 'label': f'paper: {label}'}
        if isinstance(values, list):
            axes.plot(*np.transpose(values), marker=marker, **style)
        else:
            style['label'] += f' {values:g}'
            axes.axhline(values, **style)
    return save(drawing, axes, out)


def _averaged(run: Json) -> str:
    """Returns which hop counts the mean exact match of a run is over, as ' (hops 1, 2, 3)'; '' without hop counts."""
    names = {name for record in run['metrics'] for name in record if name.startswith('em/hop')}
    hops = statistics.averaged(int(name.removeprefix('em/hop')) for name in names)
    return f' (hops {", ".join(map(str, hops))})' if hops else ''


def _draw_band(axes: Any, x: Sequence[float], summary: Json, colour: str) -> None:
    """Draws the 95 % interval of the mean exact match of the evaluations in summary.json, which stand at x."""
    results = summary.get('results') or {}
    evaluations = results.get('evaluations') or {}
    documents = {int(hops): names for hops, names in (results.get('documents') or {}).items()}
    # Of a damaged log nobody knows which is which.
    if len(evaluations) != len(x):
        return
    band = []
    for at, of_step in zip(x, evaluations.values()):
        flags = statistics.flags_of(of_step)
        if flags:
            band.append((at, *statistics.mean_interval(statistics.headline(flags), documents)))
    if band:
        steps, _, low, high = np.transpose(band)
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0, gid='band')


def _lines_of_run(figure: Json, run: Json) -> dict[str, Line]:
    """Returns metric → x and y of the figure's metrics that a run logged."""
    values: dict[str, dict[int, list[float]]] = {}
    # Training steps by role; '' is the role trained last, which an evaluation follows.
    counts: collections.Counter[str] = collections.Counter()
    for record in run['metrics']:
        # Logs of earlier versions leave the role to the phase.
        trained = [
            name.rpartition('/')[0] or record['phase']
            for name in record
            if name.endswith('reward_mean')
        ]
        for role in trained:
            counts[role] += 1
            counts[''] = counts[role]
        is_evaluation = record['phase'] == 'evaluation'
        # The start, which is evaluated before anything is trained, is iteration 0.
        iteration = record.get('iteration', 0) + bool(record['step'] or not is_evaluation)
        for metric, value in record.items():
            role = '' if is_evaluation else metric.partition('/')[0]
            x = iteration if 'x' in figure else counts[role]
            is_drawn = any(fnmatch.fnmatch(metric, pattern) for pattern in figure['metrics'])
            # Not what a role does while it is not trained, such as generating tasks.
            if is_drawn and value is not None and (is_evaluation or role in trained):
                values.setdefault(metric, {}).setdefault(x, []).append(value)
    lines: dict[str, Line] = {}
    for metric, by_x in sorted(values.items()):
        is_last = figure.get('of') == 'last'
        y = [of_x[-1] if is_last else float(np.mean(of_x)) for of_x in by_x.values()]
        lines[metric] = (list(by_x), y)
    return lines


def main(argv: list[str] | None = None) -> int:
    """Writes the files and prints their paths; returns the exit status (`exit_status`)."""
    signals.raise_again()
    return exit_status('zeroplay figures', lambda: _run(argv), 'choose another file')


def _run(argv: list[str] | None) -> None:
    parser = Parser(prog='zeroplay figures', description=__doc__)
    parser.add_argument('name', metavar='NAME', help='of the figure; list: names all')
    parser.add_argument('workdirs', nargs='*', metavar='WORKDIR', help='or gs://bucket/path')
    parser.add_argument('--out', metavar='FILE.svg', help='default: NAME.svg in the first WORKDIR')
    arguments = parser.parse_args(argv)
    if arguments.name == 'list':
        for name, figure in figures().items():
            print(f'{name:18} {figure["title"]}')
        return
    if not arguments.workdirs:
        parser.error('the following arguments are required: WORKDIR')
    out = report_builder.output_path(arguments.out, '.svg')
    workdirs = [local_run(workdir) for workdir in arguments.workdirs]
    runs = report_builder.read_runs(workdirs, has_trajectories=False)
    for path in write_figure(arguments.name, runs, out or workdirs[0] / f'{arguments.name}.svg'):
        print(path)


if __name__ == '__main__':
    sys.exit(main())
