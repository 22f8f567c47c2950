"""A run's curve of held-out exact match as a picture of its own (SVG), for pages that run no script."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

import numpy as np

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.runtime.atomic import write_text
from zeroplay_jax.types import UserError

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 48, 92, 34, 40
INK, BOLD = '#6b7785', '#2f81f7'  # the ink, of all text, has 4.5 : 1 on white and on black


def write_picture(run: dict[str, Any], out: str | os.PathLike[str]) -> Path:
    """Draws exact match over steps: the mean over 1 to 3 hops with its 95 % band, and every hop count.

    Args:
      run: of `report.read_run`, ended and with at least two evaluations.   out: the file, replaced in one move.

    Raises:
      UserError: the run has not ended, summary.json is damaged, or there is no folder for the file.
    """
    target = Path(out)
    if not target.absolute().parent.is_dir():
        raise UserError(f'{target}: there is no folder {target.parent}; make it first')
    try:
        evaluations = (run['summary'].get('results') or {}).get('evaluations') or {}
        points = [
            (int(step), {int(hop): np.asarray(flags, bool) for hop, flags in by_hop.items()})
            for step, by_hop in sorted(evaluations.items(), key=lambda item: int(item[0]))
        ]
        drawn = _draw(run['name'], points) if len(points) > 1 else ''
    except (AttributeError, KeyError, TypeError, ValueError):
        mend = 'give the command of the run again, which writes it anew'
        raise UserError(f'{run["name"]}: "results" of summary.json is damaged; {mend}') from None
    if not drawn:
        raise UserError(
            f'{run["name"]}: fewer than two evaluations in summary.json; let the run end first'
        )
    write_text(target, drawn)
    return target


def _draw(name: str, points: list[tuple[int, dict[int, np.ndarray]]]) -> str:
    last = max(points[-1][0], 1)
    x = lambda step: round(LEFT + (WIDTH - LEFT - RIGHT) * step / last, 1)
    y = lambda value: round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - value), 1)
    line = lambda pairs: ' '.join(f'{x(step)},{y(value)}' for step, value in pairs)
    text = lambda at, height, words, more='': (
        f'<text x="{at}" y="{height}" fill="{INK}" {more}>{html.escape(words)}</text>'
    )
    steps = [step for step, _ in points]
    means = [statistics.mean_interval(statistics.headline(by_hop)) for _, by_hop in points]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" ',
        'font-family="sans-serif" font-size="12">',
        text(
            LEFT,
            18,
            f'{name}: held-out exact match, mean over 1 to 3 hops with its 95 % interval',
            'font-weight="bold"',
        ),
    ]
    for value in (0, 0.25, 0.5, 0.75, 1):
        parts.append(
            f'<path d="M{LEFT} {y(value)}H{WIDTH - RIGHT}" stroke="{INK}" stroke-opacity=".3"/>'
        )
        parts.append(text(LEFT - 8, y(value) + 4, f'{value:g}', 'text-anchor="end"'))
    parts += [
        text(x(step), HEIGHT - BOTTOM + 18, str(step), 'text-anchor="middle"') for step in steps
    ]
    parts.append(
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, 'step of the run', 'text-anchor="middle"')
    )
    ends: list[tuple[float, str, str]] = []
    for hop in points[0][1]:
        values = [float(by_hop[hop].mean()) for _, by_hop in points]
        drawn = line(zip(steps, values))
        parts.append(
            f'<polyline points="{drawn}" fill="none" stroke="{INK}" stroke-dasharray="4 3"/>'
        )
        ends.append((y(values[-1]), f'{hop} hop{"s" * (hop > 1)} {values[-1]:.2f}', ''))
    band = line(
        [
            *zip(steps, (high for _, _, high in means)),
            *zip(steps[::-1], [low for _, low, _ in means][::-1]),
        ]
    )
    parts.append(f'<polygon points="{band}" fill="{BOLD}" fill-opacity=".2"/>')
    curve = line(zip(steps, (mean for mean, _, _ in means)))
    parts.append(f'<polyline points="{curve}" fill="none" stroke="{BOLD}" stroke-width="2.5"/>')
    ends.append((y(means[-1][0]), f'mean {means[-1][0]:.2f}', 'font-weight="bold"'))
    height = -np.inf
    for wanted, words, more in sorted(ends):  # labels keep a line's distance from each other
        height = max(wanted + 4, height + 14)
        parts.append(text(WIDTH - RIGHT + 8, round(height, 1), words, more))
    return '\n'.join([*parts, '</svg>']) + '\n'
