"""Plots held-out exact match over the steps of a run as an SVG file, for documents that run no script."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.types import UserError

TEXT_COLOUR = '#6b7785'  # contrast of at least 4.5 : 1 on white and on black backgrounds
MEAN_COLOUR = '#2f81f7'
LABEL_DISTANCE = 13  # points between neighbouring labels
POINTS_PER_INCH = 72
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

Evaluations = dict[int, dict[int, np.ndarray]]  # step -> hop count -> bool [questions]


def write_curve_plot(run: dict[str, Any], out: str | os.PathLike[str]) -> Path:
    """Plots the mean over the headline's hop counts with its 95 % band, and exact match of each hop count.

    Args:
      run: result of `report_builder.read_run`, with at least two evaluations in its summary.
      out: path of the SVG file, which is replaced atomically.

    Returns:
      The path of the SVG file.

    Raises:
      UserError: the run has not finished, summary.json is damaged, or the folder of the file does not exist.
    """
    target = Path(out)
    if not target.absolute().parent.is_dir():
        raise UserError(f'{target}: folder {target.parent} does not exist; create it first')
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
    write_text(target, _plot(run['name'], evaluations))
    return target


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


def _plot(name: str, evaluations: Evaluations) -> str:
    """Returns the SVG text; equal input gives equal text."""
    # Imported here: only this command needs matplotlib, and its import takes a second.
    import matplotlib
    from matplotlib.figure import Figure

    steps = list(evaluations)
    means = []
    for by_hop in evaluations.values():
        means.append(statistics.mean_interval(statistics.headline(by_hop)))
    mean, low, high = np.transpose(means)
    over_hops = ', mean over 1 to 3 hops' if any(evaluations[steps[0]]) else ''

    with matplotlib.rc_context(SETTINGS):
        # Figure instead of pyplot: no window backend is loaded and no global state remains.
        figure = Figure(figsize=(7.5, 3.4))
        axes = figure.add_axes((0.07, 0.14, 0.79, 0.75))
        axes.set_title(
            f'{name}: held-out exact match{over_hops} with its 95 % interval',
            loc='left',
            fontsize=9,
            fontweight='bold',
            pad=10,
        )
        axes.set_xlabel('step')
        if len(steps) <= MAX_TICKS:
            axes.set_xticks(steps)
        axes.set_ylim(0, 1)
        axes.margins(x=0)
        axes.grid(axis='y', color=TEXT_COLOUR, alpha=0.3)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)

        labels = [(mean[-1], f'mean {mean[-1]:.2f}', 'bold')]
        for hop in evaluations[steps[0]]:
            # Questions without a hop count.
            if not hop:
                continue
            em = [float(by_hop[hop].mean()) for by_hop in evaluations.values()]
            # clip_on: lines at 0 and 1 would be cut to half their width.
            axes.plot(
                steps,
                em,
                color=TEXT_COLOUR,
                linewidth=1,
                linestyle='--',
                gid=f'hop{hop}',
                clip_on=False,
            )
            unit = 'hop' if hop == 1 else 'hops'
            labels.append((em[-1], f'{hop} {unit} {em[-1]:.2f}', 'normal'))
        axes.fill_between(steps, low, high, color=MEAN_COLOUR, alpha=0.2, linewidth=0, gid='band')
        axes.plot(steps, mean, color=MEAN_COLOUR, linewidth=2, gid='mean', clip_on=False)
        _add_labels(axes, labels)

        svg = io.StringIO()
        # The default metadata contain the time of writing and the version of matplotlib.
        metadata = {'Date': None, 'Creator': None}
        figure.savefig(svg, format='svg', transparent=True, metadata=metadata)
    return svg.getvalue()


def _add_labels(axes: Any, labels: list[tuple[float, str, str]]) -> None:
    """Writes labels at the right ends of the lines, without overlap.

    Args:
      axes: matplotlib axes whose y axis runs from 0 to 1.
      labels: (value on the y axis, text, font weight) of each label.
    """
    axes_height = axes.get_position().height * axes.figure.get_figheight() * POINTS_PER_INCH
    labels = sorted(labels)
    heights = [value * axes_height for value, _, _ in labels]
    # Heights are in points above the lower end of the axes. Overlapping labels are moved down from the top, then up
    # again if the lowest ones left the axes.
    highest = axes_height
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], highest)
        highest = heights[index] - LABEL_DISTANCE
    lowest = 0.0
    for index in range(len(heights)):
        heights[index] = max(heights[index], lowest)
        lowest = heights[index] + LABEL_DISTANCE
    for height, (_, text, weight) in zip(heights, labels, strict=True):
        axes.annotate(
            text,
            xy=(1, 0),
            xytext=(6, height),
            xycoords='axes fraction',
            textcoords='offset points',
            verticalalignment='center',
            fontweight=weight,
        )
