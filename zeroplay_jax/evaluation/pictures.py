"""Pictures of runs as files: exact match over the steps of one, and named figures of the papers from one or several.

The figures stand in configs/figures.toml: which metrics, over steps or iterations, and what the paper published.
"""

from __future__ import annotations

import fnmatch
import io
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.types import Json, UserError

TEXT_COLOUR = '#6b7785'  # contrast of at least 4.5 : 1 on white and on black backgrounds
MEAN_COLOUR = '#2f81f7'
MAX_TICKS = 12  # with more evaluations, matplotlib chooses the ticks of the step axis

SETTINGS: Any = {
    'svg.fonttype': 'none',  # text stays text: searchable, and in the font of the reader
    'svg.hashsalt': 'zeroplay_jax',  # element ids are random without it
    'text.parse_math': False,  # a '$' in the name of a run starts no formula
    'font.family': 'sans-serif',
    'font.size': 9,
    'text.color': TEXT_COLOUR,
    'axes.labelcolor': TEXT_COLOUR,
    'axes.edgecolor': TEXT_COLOUR,
    'xtick.color': TEXT_COLOUR,
    'ytick.color': TEXT_COLOUR,
}

# The default ones contain the time of writing and the version of matplotlib.
METADATA = {'Date': None, 'Creator': None}

Evaluations = dict[int, dict[int, np.ndarray]]  # step -> hop count -> bool [questions]


def write_curve_plot(run: dict[str, Any], out: str | os.PathLike[str]) -> Path:
    """Plots the mean over the headline's hop counts with its 95 % band, and exact match of each hop count.

    Args:
      run: result of `report_builder.read_run`, with at least two evaluations in its summary.
      out: path of the SVG file, which is replaced atomically.

    Returns:
      The path of the SVG file.

    Raises:
      UserError: the run has not finished, or summary.json is damaged.
    """
    try:
        if any(note.startswith('"results"') for note in run['notes']):
            raise ValueError('no object')
        evaluations = _evaluations(run['summary'])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f'{run["name"]}: "results" of summary.json is damaged; repeat the command of the run to rewrite it'
        ) from None
    if len(evaluations) < 2:
        raise UserError(
            f'{run["name"]}: fewer than two evaluations in summary.json; wait until the run has finished'
        )
    over_hops = ', mean over 1 to 3 hops' if any(next(iter(evaluations.values()))) else ''
    title = f'{run["name"]}: held-out exact match{over_hops} with its 95 % interval'
    drawing, axes = new_axes(title, 'step', '')
    _add_curves(axes, evaluations)
    return save(drawing, axes, out, has_png=False)[0]


def _evaluations(summary: dict[str, Any]) -> Evaluations:
    """Returns the evaluations of a summary in order of steps.

    Raises:
      AttributeError, KeyError, TypeError or ValueError: an entry is damaged.
    """
    results = summary.get('results') or {}
    flags_by_step = results.get('evaluations') or {}
    evaluations: Evaluations = {}
    for step in sorted(flags_by_step, key=int):
        by_hop = {}
        for hop, flags in flags_by_step[step].items():
            by_hop[int(hop)] = np.asarray(flags, bool)
        statistics.mean_interval(by_hop)  # raises ValueError for empty or nested lists
        evaluations[int(step)] = by_hop
    # A hop count is plotted as one line through all evaluations, so all need the same hop counts.
    hop_counts = {tuple(by_hop) for by_hop in evaluations.values()}
    if len(hop_counts) > 1:
        raise ValueError('hop counts differ between evaluations')
    return evaluations


def _add_curves(axes: Any, evaluations: Evaluations) -> None:
    """Draws the mean with its band, and the hop counts, the largest last value first in the legend."""
    steps = list(evaluations)
    means = []
    for by_hop in evaluations.values():
        means.append(statistics.mean_interval(statistics.headline(by_hop)))
    mean, low, high = np.transpose(means)
    lines = [(mean[-1], 'mean', 'mean', mean)]
    for hop in evaluations[steps[0]]:
        # Not questions without a hop count.
        if hop:
            em = [float(by_hop[hop].mean()) for by_hop in evaluations.values()]
            lines.append((em[-1], f'hop{hop}', f'{hop} hop' if hop == 1 else f'{hop} hops', em))
    for last, gid, name, values in sorted(lines, key=lambda line: -line[0]):
        style: dict[str, Any] = dict(linestyle='--', linewidth=1)
        if name == 'mean':
            style = dict(color=MEAN_COLOUR, linewidth=2)
        # clip_on: lines at 0 and 1 would be cut to half their width.
        axes.plot(steps, values, label=f'{name} {last:.2f}', gid=gid, clip_on=False, **style)
    axes.fill_between(steps, low, high, color=MEAN_COLOUR, alpha=0.2, linewidth=0, gid='band')
    axes.set_ylim(0, 1)
    axes.margins(x=0)
    if len(steps) <= MAX_TICKS:
        axes.set_xticks(steps)


# ---- figures of the papers -------------------------------------------------------------------------


FIGURES = Path(__file__).parents[1] / 'configs' / 'figures.toml'


def figures() -> dict[str, Json]:
    """Returns the named figures: title, metrics (patterns), y; optionally x, of and published."""
    return tomllib.loads(FIGURES.read_text(encoding='utf-8'))


def write_figure(name: str, runs: Sequence[Json], out: str | os.PathLike[str]) -> list[Path]:
    """Draws a figure of a paper from runs, beside what the paper published; replaces the files.

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
        raise UserError(f'--figure={name}: no such figure; --figure=list shows all')
    drawing, axes = new_axes(figure['title'], figure.get('x', 'step'), figure['y'])
    for run in runs:
        lines = _lines_of_run(figure, run)
        if not lines:
            raise UserError(
                f'{run["name"]}: has none of {", ".join(figure["metrics"])}, which --figure={name} draws; give a run '
                'that trains these roles and logs by role'
            )
        prefix = f'{run["name"]}: ' if len(runs) > 1 else ''
        for metric, (x, y) in lines.items():
            axes.plot(x, y, 'o-', markersize=3, label=prefix + metric)
    # Points [x, y], or the height of a horizontal line.
    for marker, (label, values) in zip('x+14', figure.get('published', {}).items()):
        if isinstance(values, list):
            axes.plot(
                *np.transpose(values), f'{marker}:', color=TEXT_COLOUR, label=f'paper: {label}'
            )
        else:
            axes.axhline(
                values, color=TEXT_COLOUR, linestyle=':', label=f'paper: {label} {values:g}'
            )
    return save(drawing, axes, out)


def _lines_of_run(figure: Json, run: Json) -> dict[str, tuple[list[float], list[float]]]:
    """Returns metric → x and y of the figure's metrics that a run logged."""
    values: dict[str, dict[int, list[float]]] = {}
    for record in run['metrics']:
        x = record['step']
        # The start, which is evaluated before anything is trained, is iteration 0.
        if figure.get('x') == 'iteration' and x:
            x = record.get('iteration', 0) + 1
        for metric, value in _of_roles(record).items():
            is_drawn = any(fnmatch.fnmatch(metric, pattern) for pattern in figure['metrics'])
            if is_drawn and isinstance(value, int | float):
                values.setdefault(metric, {}).setdefault(x, []).append(value)
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for metric, by_x in sorted(values.items()):
        is_last = figure.get('of') == 'last'
        y = [of_x[-1] if is_last else float(np.mean(of_x)) for of_x in by_x.values()]
        lines[metric] = (list(by_x), y)
    return lines


def _of_roles(record: Json) -> Json:
    """Returns a record of metrics.jsonl with those that older runs logged without the name of their role.

    There the role had the name of the phase.
    """
    phase = record['phase']
    if phase == 'evaluation' or any(name.startswith(f'{phase}/') for name in record):
        return record
    return {**record, **{f'{phase}/{name}': value for name, value in record.items()}}


def new_axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    """Returns a new figure and its axes, with these titles."""
    # Imported here: only this command needs matplotlib, and its import takes a second.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        # Figure instead of pyplot: no window backend is loaded and no global state remains.
        drawing = Figure(figsize=(7.5, 3.4), layout='constrained')
        axes = drawing.add_subplot()
        axes.set_title(title, loc='left', fontsize=9, fontweight='bold')
        axes.set(xlabel=x, ylabel=y)
        axes.grid(axis='y', color=TEXT_COLOUR, alpha=0.3)
        axes.spines[:].set_visible(False)
        if x == 'iteration':
            axes.locator_params(axis='x', integer=True)
    return drawing, axes


def save(drawing: Any, axes: Any, out: str | os.PathLike[str], has_png: bool = True) -> list[Path]:
    """Writes a figure with a legend beside its axes as SVG, and as PNG beside it; returns the paths.

    Equal figures give equal files.
    """
    import matplotlib

    target = Path(out)
    with matplotlib.rc_context(SETTINGS):
        axes.legend(loc='upper left', bbox_to_anchor=(1.01, 1), frameon=False)
        svg = io.StringIO()
        drawing.savefig(svg, format='svg', transparent=True, metadata=METADATA)
        write_text(target, svg.getvalue())
        if not has_png:
            return [target]
        png = target.with_suffix('.png')
        drawing.savefig(png, format='png', dpi=150, facecolor='white')
    return [target, png]
