"""Axes and files of pictures, for the extras that draw."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from zeroplay_jax.runtime.disk import write_bytes

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
