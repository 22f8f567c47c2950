"""Progress of work that takes longer than a few seconds: bars on a terminal, on stderr.

On another output, such as the log of a job, a line every 30 seconds takes their place.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
import threading
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_STDERR = 2
# Seconds between two lines where no terminal is attached, and between two looks at the counts.
_LINE_SECONDS = 30.0
_LOOK_SECONDS = 1.0
# The time left follows from the last 1,000 looks within this period: a step may take an hour.
_PERIOD_SECONDS = 86_400.0
# In the order in which they were opened. Those that show nothing are not among them.
_open_bars: list[Bar] = []


class Bar:
    """A progress bar with the time passed and left; a context manager.

    Args:
      total: number of units; None if it is unknown.
      unit: noun of a unit in the plural; '' for work without units.
      what: name of the work.
      initial: units that are done already.
      shown: False draws and prints nothing.
      leave: whether the bar remains on the terminal when the work is done.

    Attributes:
      note: text behind the time; may be set while the bar is open.
    """

    def __init__(
        self,
        total: int | None,
        unit: str,
        what: str = '',
        *,
        initial: int = 0,
        shown: bool = True,
        leave: bool = False,
    ):
        self.note = ''
        self._count = initial
        self._unit = unit
        self._what = what
        self._shown = shown
        bars = [BarColumn(10)] if total else []
        is_terminal = sys.stderr.isatty() and _console().is_interactive
        self._progress = Progress(
            *bars,
            TextColumn('{task.description}', markup=False),
            console=_console(),
            transient=not leave,
            # What is printed to stdout is for other programs.
            redirect_stdout=False,
            refresh_per_second=2,
            speed_estimate_period=_PERIOD_SECONDS,
            # The first one shows the others behind itself: of several lines the terminal would lose what libraries
            # print.
            disable=not shown or bool(_open_bars) or not is_terminal,
        )
        self._task = self._progress.add_task('', total=total, completed=initial)

    def update(self, count: int = 1) -> None:
        """Adds finished units."""
        self._count += count

    def text(self) -> str:
        """Returns the newest state, such as 'encode: 12/40 passages, 0:01:30, 0:03:00 left'."""
        self._progress.update(self._task, completed=self._count)
        (task,) = self._progress.tasks
        parts = []
        if self._unit:
            total = '' if task.total is None else f'/{task.total}'
            parts.append(f'{self._count}{total} {self._unit}')
        parts.append(_clock_text(task.elapsed or 0))
        if task.time_remaining:
            parts.append(f'{_clock_text(task.time_remaining)} left')
        if self.note:
            parts.append(self.note)
        name = f'{self._what}: ' if self._what else ''
        return name + ', '.join(parts)

    def draw(self, text: str) -> bool:
        """Shows a text behind the bar; False where no terminal is attached."""
        self._progress.update(self._task, description=text)
        return not self._progress.disable

    def __enter__(self) -> Bar:
        if self._shown:
            self.draw(self.text())
            self._progress.start()
            _open_bars.append(self)
            _start_looking()
        return self

    def __exit__(self, *_) -> None:
        if self._shown:
            _open_bars.remove(self)
            self.draw(self.text())
            self._progress.stop()


def clock(what: str, shown: bool = True) -> Bar:
    """Returns a context that shows the name `what` and the time passed, for work whose progress is unknown."""
    return Bar(None, '', what, shown=shown)


def _clock_text(seconds: float) -> str:
    """Returns a duration such as '1:02:03'."""
    return str(datetime.timedelta(seconds=int(seconds)))


class _Console(Console):
    """A console that never hides the cursor: a signal may end the process before it would be shown again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


@functools.cache
def _console() -> Console:
    # A copy of the file descriptor, because `command.quiet` redirects the original for minutes.
    stderr = os.fdopen(os.dup(_STDERR), 'w')
    return _Console(file=stderr, markup=False, emoji=False, highlight=False)


# Cached: one thread is enough.
@functools.cache
def _start_looking() -> None:
    threading.Thread(target=_look_at_bars, daemon=True).start()


def _look_at_bars() -> None:
    """Draws the open bars every second; without a terminal prints a line about them every 30 seconds.

    The time is that since the last line of any bar, so that a sequence of shorter works is no long silence.
    """
    printed_at = time.monotonic()
    while True:
        time.sleep(_LOOK_SECONDS)
        bars = list(_open_bars)
        if not bars:
            continue
        line = '; '.join(bar.text() for bar in bars)
        is_drawn = bars[0].draw(line)
        if not is_drawn and time.monotonic() - printed_at >= _LINE_SECONDS:
            # Notebooks and tests replace `sys.stderr`.
            file = _console().file if sys.stderr is sys.__stderr__ else sys.stderr
            print(line, file=file, flush=True)
            printed_at = time.monotonic()
