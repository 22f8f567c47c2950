"""Pictures of runs as files: named figures, most of them of the papers, from one run or several.

They stand in configs/figures.toml: which metrics, over training steps or iterations, and what the paper published.
"""

from __future__ import annotations

import collections
import fnmatch
import io
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.runtime.disk import write_bytes
from zeroplay_jax.types import Json, UserError

TEXT_COLOUR = '#6b7785'  # contrast of at least 4.5 : 1 on white and on black backgrounds

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

# What papers count: neither evaluations nor steps that train another role.
STEPS = 'training steps of the role, over all iterations'

# x and y.
Line = tuple[list[float], list[float]]

FIGURES = Path(__file__).parents[1] / 'configs' / 'figures.toml'


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
        raise UserError(f'--figure={name}: no such figure; --figure=list shows all')
    drawing, axes = new_axes(figure['title'], figure.get('x', STEPS), figure['y'])
    for run in runs:
        lines = _lines_of_run(figure, run)
        if not lines:
            raise UserError(
                f'{run["name"]}: has none of {", ".join(figure["metrics"])}, which --figure={name} draws; give a run '
                'that trains these roles and logs by role, or measures this by config.eval'
            )
        prefix = f'{run["name"]}: ' if len(runs) > 1 else ''
        for metric, (x, y) in lines.items():
            (line,) = axes.plot(x, y, 'o-', markersize=3, label=prefix + metric)
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


def _draw_band(axes: Any, x: Sequence[float], summary: Json, colour: str) -> None:
    """Draws the 95 % interval of the mean exact match of the evaluations in summary.json, which stand at x."""
    evaluations = (summary.get('results') or {}).get('evaluations') or {}
    # Of a damaged log nobody knows which is which.
    if len(evaluations) != len(x):
        return
    band = []
    for at, of_step in zip(x, evaluations.values()):
        flags = statistics.flags_of(of_step)
        if flags:
            band.append((at, *statistics.mean_interval(statistics.headline(flags))))
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
        if x in ('iteration', STEPS):
            axes.locator_params(axis='x', integer=True)
    return drawing, axes


def save(drawing: Any, axes: Any, out: str | os.PathLike[str]) -> list[Path]:
    """Writes a figure with a legend beside its axes as SVG, and as PNG beside it; returns the paths.

    Equal figures give equal files.
    """
    import matplotlib

    target = Path(out)
    with matplotlib.rc_context(SETTINGS):
        axes.legend(loc='upper left', bbox_to_anchor=(1.01, 1), frameon=False)
        svg, png = io.BytesIO(), io.BytesIO()
        drawing.savefig(svg, format='svg', transparent=True, metadata=METADATA)
        drawing.savefig(png, format='png', dpi=150, facecolor='white')
    # Both are drawn before one is written.
    files = {target: svg, target.with_suffix('.png'): png}
    for path, content in files.items():
        write_bytes(path, [content.getvalue()])
    return list(files)
