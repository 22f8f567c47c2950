"""Progress on what takes longer than a few seconds: one style, on stderr, silent where nobody watches."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import tqdm

_COMPILES = '/jax/core/compile/backend_compile_duration'


def bar(
    total: int | None,
    unit: str,
    what: str = '',
    *,
    initial: int = 0,
    shown: bool = True,
    leave: bool = False,
):
    """A bar of `total` units (None: not known) as a context manager: `update(n)` moves it, `leave` keeps its line.

    Its clock goes on where nothing else moves, and while XLA compiles, which can take minutes, it says so.
    """
    # Batches end in bursts: the mean rate (smoothing 0) says more about the time left than the last one.
    look: dict[str, Any] = dict(
        disable=not _seen(shown), dynamic_ncols=True, leave=leave, smoothing=0.0
    )
    if total is not None:  # without the rate, whose room the numbers behind it need
        look['bar_format'] = (
            '{l_bar}{bar}| {n_fmt}/{total_fmt}{unit}, {elapsed}<{remaining}{postfix}'
        )
    return _Bar(total=total, initial=initial, unit=f' {unit}', desc=what, **look)


@contextlib.contextmanager
def clock(what: str, shown: bool = True) -> Iterator[None]:
    """Names work that cannot say how far it is, and counts its seconds."""
    if not _seen(shown):
        yield
        return
    # Its own door to the terminal: `quiet` may close the usual one meanwhile.
    with (
        os.fdopen(os.dup(sys.stderr.fileno()), 'w') as file,
        _Bar(desc=what, bar_format='{desc}: {elapsed}{postfix}', leave=False, file=file),
    ):
        yield


def _seen(shown: bool) -> bool:
    return shown and sys.stderr.isatty()


class _Bar(tqdm.tqdm):
    """A bar whose clock is drawn every second by a thread of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self._closed = threading.Event()
        if not self.disable:
            if 'jax' in sys.modules:
                _listen()
            threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while not self._closed.wait(1.0):
            self.refresh()

    def close(self):
        """Ends the line."""
        if hasattr(self, '_closed'):
            self._closed.set()
        super().close()

    @property
    def format_dict(self):
        """What a line is made of."""
        values = super().format_dict
        if _compiling:
            values['postfix'] = ', '.join(part for part in (values['postfix'], 'compiling') if part)
        return values


_compiling: list[str] = []  # one entry per program that XLA works on now


@functools.cache  # JAX keeps every listener for good
def _listen() -> None:
    import jax.monitoring

    def begins(event: str, _value: float, **_about) -> None:
        if event == _COMPILES:
            _compiling.append(event)

    def ends(event: str, _seconds: float, **_about) -> None:
        if event == _COMPILES and _compiling:
            _compiling.pop()

    jax.monitoring.register_scalar_listener(
        begins
    )  # JAX tells the time at which such an event begins
    jax.monitoring.register_event_duration_secs_listener(ends)
