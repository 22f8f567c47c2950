"""The progress bar of a run, and the lines that are printed above it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

from zeroplay_jax.retrieval import progress
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.training.rollout_text import COLUMNS, wrapped
from zeroplay_jax.training.time_left import TimeLeft, compile_clock

# Episodes between two updates of their count: a terminal is slow, and episodes end in bursts.
_EPISODES_PER_UPDATE = 8
# Names of the shown values, most important first: the last ones are left out where space is short.
_ORDER = ('speed', 'drop', 'reward', 'em', 'episodes')
# Columns of the bar itself, of the blanks around it, and of the longest time.
_BAR_COLUMNS = 3
_TIME_COLUMNS = len(' || 00:00:00 left')


class ProgressBar:
    """A bar of one line over all steps, drawn only if a terminal is attached; a context manager.

    Args:
      shown: whether to draw the bar at all.
      steps: all steps of the run.
      cursor: number of the first step to play.
      rollouts: planned rollouts per step of a phase, for the time left.
    """

    def __init__(
        self,
        shown: bool,
        steps: Sequence[Step],
        cursor: int,
        rollouts: Callable[[Phase], int],
    ):
        self._time_left = TimeLeft(steps, rollouts)
        self._compile_clock = compile_clock()
        self._total = len(steps)
        self._next_step = cursor
        self._begin = time.monotonic()
        self._compiled_before = self._compile_clock.seconds
        # Texts by name, see `_ORDER`.
        self._values: dict[str, str] = {}
        self._episodes = 0
        self._description = ''
        self._bar = progress.bar(
            self._total,
            'steps',
            initial=cursor,
            shown=shown,
            leave=True,
            time_left=self._time_left_text,
        )

    def begin_step(self, step: Step) -> None:
        """Shows phase, iteration and step."""
        position = ''
        if step.phase.name != 'evaluation':
            position = f' {step.phase.iteration + 1}.{step.index + 1}'
        self._description = step.phase.name + position
        self._next_step = step.number
        self._begin = time.monotonic()
        self._compiled_before = self._compile_clock.seconds
        self._episodes = 0
        # `_show` draws the line, with the values.
        self._bar.set_description_str(self._description, refresh=False)
        self._show()

    def end_episode(self) -> None:
        """Counts an episode of the step; redraws the bar from time to time."""
        self._episodes += 1
        if self._episodes % _EPISODES_PER_UPDATE == 0:
            self._show()

    def end_step(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Advances the bar, shows the main metrics and records the duration for the time left."""
        self._time_left.add(step, self._step_seconds())
        self._next_step = step.number + 1
        self._begin = time.monotonic()
        self._compiled_before = self._compile_clock.seconds
        self._bar.update()
        self._values |= _shown_metrics(metrics)
        self._show()

    def write(self, text: str) -> None:
        """Prints lines above the bar, to standard error; works without a bar as well."""
        self._bar.write(text, file=sys.stderr)

    def write_wrapped(self, text: str) -> None:
        """Prints a text above the bar in lines of 80 columns; further lines are indented."""
        # Two columns are kept free for the indentation.
        lines = wrapped(text, COLUMNS - 2)
        self.write('\n  '.join(lines))

    def _step_seconds(self) -> float:
        """Returns the seconds of the current step so far, without compilations."""
        # Every program compiles once, so this time is not needed to predict further steps.
        compiled = self._compile_clock.seconds - self._compiled_before
        return max(time.monotonic() - self._begin - compiled, 0.0)

    def _time_left_text(self) -> str:
        seconds = self._time_left.seconds_left(self._next_step, self._step_seconds())
        if seconds is None:
            return '--:-- left'
        return f'{self._bar.format_interval(round(seconds))} left'

    def _show(self) -> None:
        """Draws the line, with as many values as fit (`_ORDER`)."""
        # Values of earlier steps remain, so that the result of an evaluation is shown until the next one.
        values = dict(self._values)
        if self._episodes:
            values['episodes'] = f'{self._episodes} episodes'
        # The counts get the width that they have at the end, so that no value disappears as the numbers grow.
        counts = f' {self._total}/{self._total}'
        fixed_columns = len(self._description) + len(counts) + _BAR_COLUMNS + _TIME_COLUMNS
        free_columns = COLUMNS - fixed_columns
        shown = []
        for name in _ORDER:
            if name not in values:
                continue
            # A comma and a blank precede the value.
            free_columns -= len(values[name]) + 2
            if free_columns >= 0:
                shown.append(values[name])
        self._bar.set_postfix_str(', '.join(shown))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()


def _shown_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns the texts of the main metrics; an evaluation has no reward, a training step no exact match."""
    values = {}
    # Evaluations have no 'tokens_per_second', because their rollouts are not counted.
    if 'tokens_per_second' in metrics:
        values['speed'] = f'{_short(metrics["tokens_per_second"])} tok/s'
        values['drop'] = f'drop {round(100 * dropped_share(metrics))}%'
    if 'reward_mean' in metrics:
        values['reward'] = f'reward {metrics["reward_mean"]:.2f}'
    if 'em/mean' in metrics:
        values['em'] = f'EM {metrics["em/mean"]:.2f}'
    return values


def dropped_share(metrics: Mapping[str, float]) -> float:
    """Returns the share of a step's items that are not used: dropped tasks, and dropped rollouts of other tasks."""
    dropped_tasks = metrics.get('dropped_episodes', 0.0)
    dropped_rows = 0.0
    for name, value in metrics.items():
        if name.startswith('row_drop/'):
            dropped_rows += value
    # `row_drop` is a share of the existing rollouts, and dropped tasks have none.
    return dropped_tasks + (1 - dropped_tasks) * dropped_rows


def _short(number: float) -> str:
    """Returns a number in at most four characters, such as 812, 1.2k or 15k, if it is below a million."""
    if number < 1_000:
        return f'{number:.0f}'
    if number < 10_000:
        return f'{number / 1_000:.1f}k'
    return f'{number / 1_000:.0f}k'
