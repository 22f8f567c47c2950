"""Progress bars of one style for work that takes longer than a few seconds, on stderr.

On an output that is no terminal, such as the log of a job, a line every 30 seconds takes their place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import tqdm

_COMPILE_EVENT = '/jax/core/compile/backend_compile_duration'
_STDERR = 2
# Where no terminal is attached: seconds between two lines, and between two looks at the clock.
_LINE_SECONDS = 30.0
_LOOK_SECONDS = 1.0


def bar(
    total: int | None,
    unit: str,
    what: str = '',
    *,
    initial: int = 0,
    shown: bool = True,
    leave: bool = False,
    time_left: Callable[[], str] | None = None,
) -> _Bar:
    """Returns a progress bar; use it as a context manager and call its `update(n)`.

    A daemon thread redraws the bar every second. While XLA compiles, which can take minutes, the bar shows 'compiling'.

    Args:
      total: number of units; None if it is unknown.
      unit: noun of a unit in the plural.
      what: name of the work, at the beginning of the line.
      initial: units that are done already.
      shown: False draws and prints nothing.
      leave: whether the line remains when the work is done.
      time_left: returns the text shown instead of elapsed and remaining time, for units that take different times;
        called whenever the bar is drawn.
    """
    options: dict[str, Any] = {
        'disable': not _is_drawn(shown),
        'has_lines': shown,
        'dynamic_ncols': True,
        'leave': leave,
        # Batches finish in bursts: the mean rate predicts the remaining time better than the latest one.
        'smoothing': 0.0,
    }
    if total is not None:
        # The rate is left out, because the numbers after the bar need the space.
        options['bar_format'] = (
            '{l_bar}{bar}| {n_fmt}/{total_fmt}{unit}, {elapsed}<{remaining}{postfix}'
        )
    if time_left is not None:
        # A shorter format, because the numbers of a run need the space.
        options['bar_format'] = '{n_fmt}/{total_fmt} |{bar}| {time_left}{postfix}'
        options['time_left'] = time_left
    return _Bar(total=total, initial=initial, unit=f' {unit}', desc=what, **options)


@contextlib.contextmanager
def clock(what: str, shown: bool = True) -> Iterator[None]:
    """Shows the name `what` and the elapsed seconds while the block runs, for work whose progress is unknown."""
    if not _is_drawn(shown):
        with _Bar(desc=what, unit='', disable=True, has_lines=shown):
            yield
        return
    # The bar writes to a copy of the file descriptor, because `quiet` may redirect the original meanwhile.
    with (
        os.fdopen(os.dup(sys.stderr.fileno()), 'w') as file,
        _Bar(desc=what, bar_format='{desc}: {elapsed}{postfix}', leave=False, file=file),
    ):
        yield


def _is_drawn(shown: bool) -> bool:
    """Returns whether a bar is drawn: only if wanted and on a terminal."""
    return shown and sys.stderr.isatty()


class _Bar(tqdm.tqdm):
    """A bar with a background thread that redraws it every second.

    Args:
      time_left: see `bar`.
      has_lines: whether a bar that is not drawn (`disable`) prints lines (`_print_lines`).
    """

    def __init__(
        self,
        time_left: Callable[[], str] | None = None,
        has_lines: bool = False,
        **options,
    ):
        # Set before tqdm's constructor, which draws the line and reads these attributes.
        self._time_left = time_left
        # JAX is not imported for the sake of a bar.
        self._compilations = compilations() if 'jax' in sys.modules else Compilations()
        super().__init__(**options)
        self._closed = threading.Event()
        if self.disable:
            # tqdm keeps nothing of a bar that it does not draw.
            self.desc = options['desc']
            self.unit = options['unit']
            self.postfix = ''
            self._begin = time.monotonic()
            if has_lines:
                _open_bars[id(self)] = self
                _start_lines()
            return
        threading.Thread(target=self._redraw, daemon=True).start()

    def _redraw(self) -> None:
        while not self._closed.wait(1.0):
            self.refresh()

    def update(self, n=1):
        """Adds finished units."""
        if self.disable:
            self.n += n
        return super().update(n)

    def text(self) -> str:
        """Returns the state of a bar that is not drawn, such as 'encode: 12/40 passages, 01:30'."""
        parts = []
        if self.unit:
            total = '' if self.total is None else f'/{self.total}'
            parts.append(f'{self.n}{total}{self.unit}')
        parts.append(self.format_interval(round(time.monotonic() - self._begin)))
        if self._time_left is not None:
            parts.append(self._time_left())
        if self.postfix:
            parts.append(self.postfix)
        name = f'{self.desc}: ' if self.desc else ''
        return name + ', '.join(parts)

    def close(self):
        """Ends the line."""
        # tqdm also calls `close` when its own constructor failed, and a second time when the object is removed.
        if hasattr(self, '_closed'):
            self._closed.set()
        _open_bars.pop(id(self), None)
        super().close()

    @property
    def format_dict(self):
        """Returns the values that tqdm fills into its line; calls `time_left`."""
        values = super().format_dict
        if self._time_left is not None:
            values['time_left'] = self._time_left()
        if self._compilations.running:
            parts = [part for part in (values['postfix'], 'compiling') if part]
            values['postfix'] = ', '.join(parts)
        return values


# Bars and clocks that are not drawn, the newest last, by their `id`: tqdm's bars are equal where their positions are.
_open_bars: dict[int, _Bar] = {}


# Cached: one thread is enough.
@functools.cache
def _start_lines() -> None:
    """Starts the thread that prints lines."""
    # A copy of the file descriptor, because `quiet` may redirect the original for minutes.
    log = os.fdopen(os.dup(_STDERR), 'w')
    threading.Thread(target=_print_lines, args=(log,), daemon=True).start()


def _print_lines(log: TextIO) -> None:
    """Prints the newest of the bars that are not drawn, every 30 seconds.

    The time is that since the last line of any bar, so that a sequence of shorter works is no long silence.

    Args:
      log: a copy of the process's stderr; not used where `sys.stderr` is something else, as in a notebook.
    """
    printed_at = time.monotonic()
    while True:
        time.sleep(_LOOK_SECONDS)
        newest = list(_open_bars.values())[-1:]
        if newest and time.monotonic() - printed_at >= _LINE_SECONDS:
            file = log if _is_standard(sys.stderr) else sys.stderr
            print(newest[0].text(), file=file, flush=True)
            printed_at = time.monotonic()


def _is_standard(stream: TextIO) -> bool:
    """Returns whether a stream writes to the file descriptor that `quiet` redirects."""
    try:
        return stream.fileno() == _STDERR
    # UnsupportedOperation, a ValueError as well: a stream in memory, or closed.
    except (OSError, ValueError):
        return False


class Compilations:
    """Compilations of XLA in this process.

    Attributes:
      seconds: total duration of those that have ended.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        # A list, whose changes are atomic: several threads compile.
        self._running: list[str] = []

    @property
    def running(self) -> int:
        """Number of programs that are compiled at the moment."""
        return len(self._running)

    def on_begin(self, event: str, _value: float, **_details) -> None:
        """Counts a compilation that begins; JAX calls it for all scalars that it records."""
        # Only XLA's compilations: events of tracing are nested, so their sum would exceed the time they took.
        if event == _COMPILE_EVENT:
            self._running.append(event)

    def on_end(self, event: str, seconds: float, **_details) -> None:
        """Counts a compilation that ends; JAX calls it for all of its duration events."""
        if event == _COMPILE_EVENT:
            self.seconds += seconds
            # One that began before the listener was registered was not counted.
            with contextlib.suppress(IndexError):
                self._running.pop()


# Cached, because JAX keeps every listener for the lifetime of the process.
@functools.cache
def compilations() -> Compilations:
    """Returns the compilations of this process since the first call."""
    import jax.monitoring

    counted = Compilations()
    # JAX records the start time of a compilation as a scalar of the same name as the later duration.
    jax.monitoring.register_scalar_listener(counted.on_begin)
    jax.monitoring.register_event_duration_secs_listener(counted.on_end)
    return counted
