"""Plots the table of the claims as a forest plot: one line per claim with its difference and interval."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from zeroplay_jax.evaluation.curve_plot import MEAN_COLOUR, SETTINGS, TEXT_COLOUR
from zeroplay_jax.runtime.disk import write_text

# Verdict → colour; each has a shape, too, for readers who do not tell the colours apart.
COLOURS = {'holds': MEAN_COLOUR, 'does not hold': '#d1633c', 'undecided': TEXT_COLOUR}
MARKERS = {'holds': 'o', 'does not hold': 's', 'undecided': 'D'}
# Differences beyond ± LIMIT are cut, with an arrow head.
LIMIT = 0.8
_ROW_INCHES = 0.26


def write_forest_plot(table: Sequence[Mapping[str, Any]], out: pathlib.Path) -> None:
    """Plots the rows of `claims.play` into an SVG file, by system; verdicts are those corrected by Holm's method."""
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
        axes.set_yticklabels([f'{row["system"]}: {row["claim"]}{_marks(row)}' for row in table])
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


def _marks(row: Mapping[str, Any]) -> str:
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
