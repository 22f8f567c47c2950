"""Progress on what takes longer than a few seconds: one style, on stderr, silent where nobody watches."""

from __future__ import annotations

import sys

import tqdm


def bar(total: int | None, unit: str, what: str = '', *, initial: int = 0, shown: bool = True, leave: bool = False):
    """A bar of `total` units (None: not known) as a context manager: `update(n)` moves it, `leave` keeps its line."""
    hidden = not (shown and sys.stderr.isatty())
    return tqdm.tqdm(
        total=total, initial=initial, unit=f' {unit}', desc=what, disable=hidden, dynamic_ncols=True, leave=leave
    )
