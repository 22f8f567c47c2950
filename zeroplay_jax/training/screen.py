"""The progress bar of a run, and the lines that are printed above it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from absl import logging as absl_logging
from rich.cells import set_cell_size
from rich.console import Console
from rich.text import Text
from tqdm.contrib import DummyTqdmFile

from zeroplay_jax.evaluation.render import one_line
from zeroplay_jax.retrieval import progress
from zeroplay_jax.selfplay.records import step_name
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.types import Row, ToolCall

# Episodes between two updates of their count: a terminal is slow, and episodes end in bursts.
_EPISODES_PER_UPDATE = 8
# Names of the shown values, most important first: the last ones are left out where space is short.
_ORDER = ('speed', 'drop', 'reward', 'em', 'episodes')
# Columns of the bar itself, of the blanks around it, and of the longest time.
_BAR_COLUMNS = 3
_TIME_COLUMNS = len(' || 00:00:00 left')


@dataclasses.dataclass(frozen=True)
class _CurrentStep:
    """Clock of the step that runs.

    Attributes:
      begin: `time.monotonic()` at its begin.
      compiled_before: seconds of compilations before it.
      prediction: predicted time of this step and all further ones; None before the first step has ended.
    """

    begin: float
    compiled_before: float
    prediction: Prediction | None


class ProgressBar:
    """A bar of one line over all steps, drawn only if a terminal is attached; a context manager.

    Args:
      shown: whether to draw the bar at all.
      steps: all steps of the run.
      cursor: number of the first step to run.
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
        self._compilations = progress.compilations()
        self._total = len(steps)
        self._current = self._begin(cursor)
        # Phase of this iteration → name of a value (`_ORDER`) → texts for it, the longest first, such as 'reward 0.31'.
        self._values: dict[str, dict[str, tuple[str, ...]]] = {}
        self._phase = ''
        self._iteration = 0
        # Texts of the newest exact match.
        self._exact_match: tuple[str, ...] = ()
        self._episodes = 0
        self._description = ''
        # While the bar is open, `sys.stderr` prints above it (`__enter__`).
        self._stream = sys.stderr
        self._redirection = contextlib.ExitStack()
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
        self._phase = step.phase.name
        if step.phase.iteration != self._iteration:
            self._iteration = step.phase.iteration
            self._values.clear()
        if step.phase.name == 'evaluation':
            self._exact_match = ()
        self._current = self._begin(step.number)
        self._episodes = 0
        self._show()

    def end_episode(self) -> None:
        """Counts an episode of the step; redraws the bar from time to time."""
        self._episodes += 1
        if self._episodes % _EPISODES_PER_UPDATE == 0:
            self._show()

    def end_step(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Advances the bar, shows the main metrics and records the duration for the time left."""
        self._time_left.add(step, self._step_seconds(self._current))
        self._current = self._begin(step.number + 1)
        self._bar.update()
        values = _shown_metrics(metrics)
        self._exact_match = values.pop('em', self._exact_match)
        self._values.setdefault(self._phase, {}).update(values)
        self._show()

    def write(self, text: str) -> None:
        """Prints lines above the bar, to standard error; works without a bar as well."""
        self._bar.write(text, file=self._stream)

    def write_wrapped(self, text: str) -> None:
        """Prints a text above the bar in lines of 80 columns; further lines are indented."""
        # Two columns are kept free for the indentation.
        lines = wrapped(text, COLUMNS - 2)
        self.write('\n  '.join(lines))

    def _begin(self, next_step: int) -> _CurrentStep:
        """Returns the clock of a step that begins now."""
        prediction = self._time_left.predict(next_step)
        return _CurrentStep(time.monotonic(), self._compilations.seconds, prediction)

    def _step_seconds(self, current: _CurrentStep) -> float:
        """Returns the seconds since a step began, without compilations."""
        # Every program compiles once, so this time is not needed to predict further steps.
        compiled = self._compilations.seconds - current.compiled_before
        return max(time.monotonic() - current.begin - compiled, 0.0)

    def _time_left_text(self) -> str:
        # Called by the thread that redraws the line: it reads this one attribute, which is replaced as a
        # whole, and never `TimeLeft`, which the main thread changes.
        current = self._current
        if current.prediction is None:
            return '--:-- left'
        seconds = current.prediction.seconds_left(self._step_seconds(current))
        return f'{self._bar.format_interval(round(seconds))} left'

    def _show(self) -> None:
        """Draws the line, with as many values as fit (`_ORDER`)."""
        # Values of earlier steps of the same phase: those of another phase would be read as if they were its own.
        values = dict(self._values.get(self._phase, {}))
        # The result of an evaluation is shown until the next one begins.
        values['em'] = self._exact_match
        if self._episodes:
            values['episodes'] = (f'{self._episodes} episodes',)
        # Counts and time are those of the whole run, so the phase stands behind them, before its own values. The counts
        # are measured at their final width, so that no value disappears as the numbers grow.
        counts = f'{self._total}/{self._total}, {self._description}'
        free_columns = COLUMNS - len(counts) - _BAR_COLUMNS - _TIME_COLUMNS
        shown = [self._description]
        for name in _ORDER:
            # A comma and a blank precede the value.
            fitting = [text for text in values.get(name, ()) if len(text) + 2 <= free_columns]
            if fitting:
                shown.append(fitting[0])
                free_columns -= len(fitting[0]) + 2
        self._bar.set_postfix_str(', '.join(shown))

    def __enter__(self):
        if not self._bar.disable:
            self._redirection.enter_context(lines_above(self._stream))
        return self

    def __exit__(self, *_):
        self._bar.close()
        self._redirection.close()


def _shown_metrics(metrics: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
    """Returns the texts of the main metrics by name, such as {'em': ('EM 0.31',)}; what is absent is left out.

    Of several texts for one metric the longest that fits is shown. An evaluation has only the exact match, generation
    no reward. 'drop' is the share of tasks and rows not used.
    """
    values: dict[str, tuple[str, ...]] = {}
    if 'tokens_per_second' in metrics:
        values['speed'] = (f'{_short(metrics["tokens_per_second"])} tok/s',)
    if 'dropped_share' in metrics:
        values['drop'] = (f'drop {round(100 * metrics["dropped_share"])}%',)
    reward_texts = _reward_texts(metrics)
    if reward_texts:
        values['reward'] = reward_texts
    if 'em/mean' in metrics:
        values['em'] = (f'EM {metrics["em/mean"]:.2f}',)
    return values


def _reward_texts(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Returns texts of the mean reward of each trained role, the longest first; without the name of a single one."""
    rewards = {}
    for name, value in metrics.items():
        role, _, metric = name.rpartition('/')
        if metric == 'reward_mean':
            rewards[role] = value
    if len(rewards) < 2:
        return tuple(f'reward {value:.2f}' for value in rewards.values())
    with_names = _joined(rewards, max(map(len, rewards)))
    # In 80 columns there is often space for initials only: as many letters as tell the roles apart.
    length = 1
    while len({role[:length] for role in rewards}) < len(rewards):
        length += 1
    return f'reward {with_names}', with_names, _joined(rewards, length)


def _joined(rewards: Mapping[str, float], length: int) -> str:
    """Returns the rewards behind the names of their roles, of which `length` letters are shown."""
    return ' '.join(f'{role[:length]} {value:.2f}' for role, value in rewards.items())


def _short(number: float) -> str:
    """Returns a number in at most four characters, such as 812, 1.2k or 15k, if it is below a million."""
    if number < 1_000:
        return f'{number:.0f}'
    if number < 10_000:
        return f'{number / 1_000:.1f}k'
    return f'{number / 1_000:.0f}k'


# ---- time left -------------------------------------------------------------------------------------
#
# Estimates the time that the remaining steps of a run take, by kind of phase.
#
# Steps of different phases take different times, and the first ones contain compilations, so the mean over all
# steps so far would be wrong for a long time. Here a phase is predicted from its own recent steps, without the time
# of compilations, and a phase that has not begun from its number of rollouts.


# Recent steps of a phase: enough to average over, few enough to follow rollouts that grow longer.
_RECENT_STEPS = 8
# If only steps without an update have been seen, an update is assumed to take as long as its rollouts.
_UPDATE_FACTOR = 2.0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted durations.

    Attributes:
      total: seconds of all remaining steps, the one that runs included.
      current: seconds of the step that runs.
    """

    total: float
    current: float

    def seconds_left(self, elapsed: float) -> float:
        """Returns the seconds left, `elapsed` seconds after the current step began."""
        # The time left of the current step is never negative, even if it takes longer than predicted.
        return self.total - min(elapsed, self.current)


class TimeLeft:
    """Predicts the seconds of the remaining steps.

    Args:
      steps: all steps of the run.
      rollouts: planned rollouts per step of a phase.
    """

    def __init__(self, steps: Sequence[Step], rollouts: Callable[[Phase], int]):
        self._steps = steps
        self._rollouts = rollouts
        self._seconds: dict[str, collections.deque[float]] = {}
        self._phases: dict[str, Phase] = {}
        # Names of phases of which a second step was added.
        self._repeated: set[str] = set()

    def add(self, step: Step, seconds: float) -> None:
        """Records the duration of a step, without compilations."""
        name = step.phase.name
        recent = self._seconds.setdefault(name, collections.deque(maxlen=_RECENT_STEPS))
        # The first step of a phase also traces its programs, so its duration is dropped when a second one is known.
        if recent and name not in self._repeated:
            recent.clear()
            self._repeated.add(name)
        recent.append(seconds)
        self._phases[name] = step.phase

    def predict(self, next_step: int) -> Prediction | None:
        """Predicts all steps from number `next_step` on; None before the first step has ended."""
        if not self._seconds:
            return None
        remaining_steps = self._steps[next_step:]
        if not remaining_steps:
            return Prediction(0.0, 0.0)
        # Steps are counted per phase, because there are few kinds of phases but thousands of steps.
        count_of_phase: collections.Counter[str] = collections.Counter()
        phases: dict[str, Phase] = {}
        for step in remaining_steps:
            count_of_phase[step.phase.name] += 1
            phases[step.phase.name] = step.phase
        total = 0.0
        for name, count in count_of_phase.items():
            total += count * self._step_seconds(phases[name])
        return Prediction(total, current=self._step_seconds(remaining_steps[0].phase))

    def _step_seconds(self, phase: Phase) -> float:
        """Returns the predicted seconds of a step of a phase; at least one step must have been added."""
        recent = self._seconds.get(phase.name)
        if recent:
            return sum(recent) / len(recent)
        # A phase that was not seen yet is predicted from phases like it: those that train roles, or those that do not.
        trains = bool(phase.trains)
        rate = self._seconds_per_rollout(trains)
        if rate is None:
            factor = _UPDATE_FACTOR if trains else 1 / _UPDATE_FACTOR
            other_rate = self._seconds_per_rollout(not trains)
            # `predict` has made sure that some phase was seen.
            assert other_rate is not None
            rate = factor * other_rate
        return rate * self._rollouts(phase)

    def _seconds_per_rollout(self, trains: bool) -> float | None:
        """Returns the mean of the phases seen so far that train roles (or that do not); None if there is none."""
        seconds = 0.0
        rollouts = 0
        for phase in self._phases.values():
            if bool(phase.trains) == trains:
                seconds += self._step_seconds(phase)
                rollouts += self._rollouts(phase)
        if not rollouts:
            return None
        return seconds / rollouts


# ---- lines of libraries ----------------------------------------------------------------------------
#
# Printed above the progress bar instead of into its line.


@contextlib.contextmanager
def lines_above(stream: TextIO) -> Iterator[None]:
    """A context in which messages of loggers, and other writes to standard error, are printed above the bar, by lines.

    Args:
      stream: standard error, on which a bar is drawn.
    """
    # Prints an incomplete last line when it is deleted.
    lines: Any = DummyTqdmFile(stream)
    # Loggers keep the stream that they were made with, so each of them has to be changed: that of absl, which Orbax
    # uses, and those of the root logger.
    handlers: list[Any] = [absl_logging.get_absl_handler().python_handler]
    handlers += logging.getLogger().handlers
    redirected = []
    for handler in handlers:
        if getattr(handler, 'stream', None) is stream:
            handler.stream = lines
            redirected.append(handler)
    sys.stderr = lines
    try:
        yield
    finally:
        sys.stderr = stream
        for handler in redirected:
            handler.stream = stream


# ---- rollouts -------------------------------------------------------------------------------------
#
# One rollout as a few lines for the terminal; its texts cannot control the terminal.


COLUMNS = 80
_LABEL_COLUMNS = 10
# Largest number of lines of one labelled text (`_labelled`); the rest is cut.
_MAX_LINES = 3
# Largest number of calls that are shown; a policy may make dozens.
_MAX_CALLS = 5
# `Text.wrap` asks for one, and takes nothing from it.
_CONSOLE = Console()


def wrapped(text: str, columns: int, max_lines: int = 0) -> list[str]:
    """Returns the lines of a text, of at most `columns` columns, broken at blanks where there are any.

    Args:
      max_lines: further text is left out, and the last line ends with '…'; 0: no limit.
    """
    words = Text(' '.join(text.split()))
    lines = [line.plain.strip() for line in words.wrap(_CONSOLE, columns) if line.plain]
    if max_lines and len(lines) > max_lines:
        lines = lines[:max_lines]
        lines[-1] = set_cell_size(lines[-1], columns - 1).rstrip() + '…'
    return lines


def evaluation_text(step: Step, metrics: Mapping[str, float]) -> str:
    """Returns one line with an evaluation's exact match, also by hops where there are several, and rubric score."""
    line = f'{step_name(step)}: exact match {metrics["em/mean"]:.3f}'
    by_hops = []
    for name, share in sorted(metrics.items()):
        if name.startswith('em/hop'):
            by_hops.append(f'{name.removeprefix("em/hop")}: {share:.3f}')
    if len(by_hops) > 1:
        line += f' (by hops {", ".join(by_hops)})'
    if 'rubrics/mean' in metrics:
        line += f', rubrics {metrics["rubrics/mean"]:.3f}'
    return line


def rollout_text(step: Step, row: Row) -> str:
    """Returns the text of one rollout of a step: question, calls, answer and reward, in 80 columns."""
    question = row.info.question
    lines = [f'── {step_name(step)}, a rollout of role {row.role} '.ljust(COLUMNS, '─')]
    # A proposal's question is its result, so it follows the searches.
    is_proposal = row.info.is_proposal
    question_lines = []
    if question is not None:
        question_lines = _labelled('task' if question.is_open_task else 'question', question.text)
    if not is_proposal:
        lines += question_lines
    calls = row.trajectory.calls
    for call in calls[:_MAX_CALLS]:
        lines += _call_lines(call)
    if len(calls) > _MAX_CALLS:
        lines += _labelled('', f'… and {len(calls) - _MAX_CALLS} further calls')
    accepted = ' | '.join(question.answers) if question is not None else ''
    if is_proposal:
        lines += question_lines
        lines += _labelled('answer', accepted)
    else:
        expected = f'   (expected: {accepted})' if accepted else ''
        lines += _labelled('answer', (row.info.answer or 'none') + expected)
    reason = row.drop or row.info.rejected
    lines += _labelled('reward', f'{row.reward:.2f}' + (f'   ({reason})' if reason else ''))
    if row.turn_rewards is not None:
        earned = ['–' if math.isnan(x) else f'{x:.2f}' for x in row.turn_rewards]
        lines += _labelled('per turn', ', '.join(earned))
    return '\n'.join(lines)


def _call_lines(call: ToolCall) -> list[str]:
    """Returns the lines of a call: its queries or arguments, then its error, its passages' titles, or its text."""
    titles = []
    for passages in call.documents:
        for passage in passages:
            titles.append(str(passage.get('title') or passage.get('id', '')))
    # Titles are shown and not texts, because passages would fill the screen.
    result = call.error or '; '.join(titles) or call.text
    asked = ' | '.join(call.queries) or ' '.join(map(str, (call.arguments or {}).values()))
    return _labelled(call.tool or 'call', f'{asked} → {result}')


def _labelled(label: str, text: str) -> list[str]:
    """Returns the lines of a text behind a label; further lines are indented."""
    lines = wrapped(one_line(text), COLUMNS - _LABEL_COLUMNS, _MAX_LINES) or ['–']
    # The name of a tool comes from the policy as well.
    first_label = set_cell_size(one_line(label), _LABEL_COLUMNS - 1) + ' '
    labels = [first_label] + [' ' * _LABEL_COLUMNS] * (len(lines) - 1)
    return list(map(str.__add__, labels, lines))
