"""The table of the claims benchmark in markdown: results/claims.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = (
    'system',
    'claim',
    'measure',
    'verdict',
    'Holm',
    'difference',
    'interval',
    'seed by seed',
    'at the end',
    'rollouts of both arms',
    'seeds for ± .05',
)


def shown_verdict(row: Mapping[str, Any]) -> str:
    """Returns the verdict of a row, 'less than .05' where it is undecided and its interval is within ± .05 of 0."""
    if row['verdict'] == 'undecided' and row['negligible']:
        return 'less than .05'
    return row['verdict']


def marks(row: Mapping[str, Any]) -> str:
    """Returns the marks of a claim that say where its correction guarantees less; '' for none."""
    names = [f'`{name}`' for name in ('selected', 'added', 'afterwards') if row[name]]
    if row['plays'] > 1:
        names.append(f'play {row["plays"]}')
    return f' ({", ".join(names)})' if names else ''


def markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table in markdown; `table` has the rows of `claims.play`."""
    lines = [_line(_COLUMNS), '|---' * len(_COLUMNS) + '|']
    lines += [_line(_cells(row)) for row in table]
    return '\n'.join(lines) + '\n'


def _line(cells: Sequence[str]) -> str:
    return f'| {" | ".join(cells)} |'


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a row, one for each of `_COLUMNS`."""
    low, high = row['interval']
    at_the_end = ''
    rollouts = f'{row["rollouts"][0]:,}'
    # A policy that is compared with itself before training has one arm.
    if row['measure'] != 'gain':
        rollouts += f', {row["rollouts"][1]:,}'
    if 'final' in row['beside']:
        at_the_end = f'{row["beside"]["final"]:+.3f}'
    needed = row['seeds_needed']
    return (
        row['system'],
        row['claim'] + marks(row),
        row['measure'].replace('_', ' '),
        shown_verdict(row),
        row['verdict_holm'],
        f'{row["difference"]:+.3f}',
        f'{low:+.3f} … {high:+.3f}',
        ', '.join(f'{value:+.2f}' for value in row['by_seed']),
        at_the_end,
        rollouts,
        '—' if needed is None else str(needed),
    )
