"""Protocols of the papers (protocols.toml): which values they set, and the form of their tables."""

from __future__ import annotations

import pathlib
import tomllib
from collections.abc import Callable, Mapping

from zeroplay_jax.evaluation.tables import AVERAGE, Figure

# Ways of answering (evaluation/answering.py), of which all but search are baselines without training.
WAYS = ('search', 'direct', 'retrieve', 'interleave')
# Field or flag → (value, place in the paper), by paper.
PROTOCOLS: Mapping[str, Mapping[str, tuple[object, str]]] = tomllib.loads(
    pathlib.Path(__file__).with_suffix('.toml').read_text(encoding='utf-8')
)
# Of the table, not of flags or the config.
_OF_TABLE = ('last_column', 'percent', 'checkpoint')


def apply(name: str, put: Callable[[str, object], str]) -> str:
    """Sets all values of a protocol; returns a line that says which, and where the paper has them.

    Args:
      name: a key of PROTOCOLS.
      put: sets a flag or a field, such as 'limit' or 'tools.top_k'; returns '', or why it stays as it is.
    """
    applied, left = [], []
    for field, (value, source) in PROTOCOLS[name].items():
        reason = '' if field in _OF_TABLE else put(field, value)
        if reason:
            left.append(f'{field} ({reason})')
        else:
            applied.append(f'{field}={value} ({source})')
    line = f'protocol {name}: {", ".join(applied)}'
    return f'{line}; not set: {", ".join(left)}' if left else line


def in_form(name: str, figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """Returns a row of a table {set or AVERAGE: figure} as the paper has it; '' leaves it as it is."""
    if not name:
        return dict(figures)
    last, is_percent = PROTOCOLS[name]['last_column'][0], PROTOCOLS[name]['percent'][0]
    row = {}
    for heading, figure in figures.items():
        factor = 1.0
        if heading == AVERAGE and last == 'total':
            heading, factor = 'total', len(figures) - 1.0
        row[heading] = figure.times(100 * factor, 1) if is_percent else figure.times(factor)
    return row
