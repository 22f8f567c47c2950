"""Progress on what takes longer than a few seconds: one style, on stderr, silent where nobody watches."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterator

import tqdm


def bar(total: int | None, unit: str, what: str = '', *, initial: int = 0, shown: bool = True, leave: bool = False):
    """A bar of `total` units (None: not known) as a context manager: `update(n)` moves it, `leave` keeps its line.

    While XLA compiles, which can take minutes in which nothing else moves, the bar says so.
    """
    hidden = not (shown and sys.stderr.isatty())
    if not hidden and 'jax' in sys.modules:
        _listen()
    # Batches end in bursts: the mean rate (smoothing 0) says more about the time left than the last one.
    look = dict(disable=hidden, dynamic_ncols=True, leave=leave, smoothing=0.0)
    return _Bar(total=total, initial=initial, unit=f' {unit}', desc=what, **look)


@contextlib.contextmanager
def clock(what: str) -> Iterator[None]:
    """Names work that cannot say how far it is, and counts its seconds."""
    if not sys.stderr.isatty():
        yield
        return
    # Its own door to the terminal: `quiet` may close the usual one meanwhile.
    with (
        os.fdopen(os.dup(sys.stderr.fileno()), 'w') as file,
        _Bar(desc=what, bar_format='{desc}: {elapsed}', leave=False, file=file) as line,
    ):
        done = threading.Event()

        def tick():
            while not done.wait(1.0):
                line.refresh()

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class _Bar(tqdm.tqdm):
    compiling = False

    def __init__(self, **options):
        super().__init__(**options)
        _bars.add(self)

    @property
    def format_dict(self):
        """What a line is made of."""
        values = super().format_dict
        if self.compiling:
            values['postfix'] = ', '.join(part for part in (values['postfix'], 'compiling') if part)
        return values


_bars: weakref.WeakSet[_Bar] = weakref.WeakSet()


@functools.cache  # JAX keeps every listener for good
def _listen() -> None:
    import jax.monitoring

    # A program is compiled right after it was lowered; both say when they end, and nothing says when it begins.
    states = {
        '/jax/core/compile/jaxpr_to_mlir_module_duration': True,
        '/jax/core/compile/backend_compile_duration': False,
    }

    def heard(event: str, _seconds: float, **_about) -> None:
        if event in states:
            for line in list(_bars):
                line.compiling = states[event]
                if not line.disable:
                    line.refresh()

    jax.monitoring.register_event_duration_secs_listener(heard)
