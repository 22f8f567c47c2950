"""Alarms: which figures of a step are watched, and when one of them warns or stops the run.

Pure: metrics in, alarms out. The levels are `config.alarms`; the metrics are those of the engine. A step without a
figure, such as one with too few calls, changes nothing about it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from zeroplay_jax.selfplay.records import step_name
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.types import Json

WARN = 'warn'
STOP = 'stop'
# Steps of a phase whose mean length is the reference of `alarms.length`.
REFERENCE_STEPS = 3
# A warning is repeated after so many further steps in which its level is reached.
_REPEAT_STEPS = 10
# Name of the figure that is computed here, from `policy_tokens` of earlier steps.
_LENGTH_METRIC = 'length_growth'


@dataclasses.dataclass(frozen=True)
class _Figure:
    """A watched figure.

    Attributes:
      metrics: names of the metrics, of which the worst counts; steps that train several roles prefix them with 'role/'.
      text: what they are, in a line of the terminal.
      remedy: what to look at.
      falls: whether low values are bad.
    """

    metrics: tuple[str, ...]
    text: str
    remedy: str
    falls: bool = False

    def reaches(self, value: float, level: float) -> bool:
        """Returns whether a value is as bad as a level, or worse; a level of 0 is switched off."""
        if not level:
            return False
        if self.falls:
            return value <= level
        return value >= level


# Name of the field in config.alarms → its figure.
FIGURES: Mapping[str, _Figure] = {
    'sampler_gap': _Figure(
        ('sampler_gap',),
        'sampler and trainer differ in the probability of a token by',
        'set config.policy.dtype=float32 to see whether rounding is the cause, and config.<role>.tis_cap=2 to '
        'correct it',
    ),
    'entropy': _Figure(
        ('entropy',),
        'the entropy of the next token is',
        'lower config.<role>.learning_rate, or raise entropy_coef or temperature',
        falls=True,
    ),
    'length': _Figure(
        (_LENGTH_METRIC,),
        'rollouts have grown, relative to the first steps, by the factor',
        'read the rollouts in report.html; config.reward.overlong_buffer and config.rollout.truncated=drop limit it',
    ),
    'tool_errors': _Figure(
        ('call_error_share',),
        'the share of failed calls is',
        'read the calls in report.html: whether the policy writes them as config.tools.syntax asks, and whether '
        'the tools answer',
    ),
    'empty_searches': _Figure(
        ('empty_search_share',),
        'the share of searches that find no passage is',
        'ask the search by hand (python -m zeroplay_jax.retrieval.query, or curl to a server): whether its index has '
        'passages, and whether it is of the language and corpus of the questions',
    ),
    'no_call': _Figure(
        ('no_call_share',),
        'the share of answers without any call is',
        'the policy answers from memory: take questions that it cannot know, or check the prompt',
    ),
    'no_evidence': _Figure(
        ('no_evidence_share',),
        'the share of correct answers that no result contains is',
        'the reward does not come from the search: read such rollouts in report.html',
    ),
    'duplicates': _Figure(
        ('duplicate_share',),
        'the share of questions that several tasks propose is',
        "the proposer writes the same question about different documents: lower the proposing role's learning_rate",
    ),
    'judge_agreement': _Figure(
        ('judge_agreement',),
        "the share of the judge's verdicts that agree with the accepted answers is",
        'read the verdicts in report.html; take another judge (config.judge.model) or config.reward.answer=em',
        falls=True,
    ),
    'judge_lost': _Figure(
        ('judge_lost_share',),
        'the share of judgements without a verdict is',
        'check the judge (config.judge): the terminal names the reasons',
    ),
    'staleness': _Figure(
        ('staleness', 'filter/age'),
        'the age of the trained rollouts in training steps is',
        'set config.<role>.surplus=drop, or a smaller config.<role>.batch',
    ),
    'nonfinite': _Figure(
        # Weights that are not finite stop the run whatever the levels are (`outcome.raise_if_weights_are_lost`).
        (
            # The longer name first: the shorter one is its end.
            'value_network/nonfinite_updates',
            'nonfinite_updates',
            'row_drop/nonfinite_reward',
        ),
        'the share of updates or rewards that are not finite is',
        'lower config.<role>.learning_rate (with baseline=value also config.value_network.learning_rate), '
        'set config.policy.dtype=float32, or correct the reward',
    ),
}

# All fields of config.alarms; a resumed run may have other levels.
ALARM_FIELDS = tuple(
    f'alarms.{name}.{field}' for name in FIGURES for field in (WARN, STOP, 'steps')
)


@dataclasses.dataclass(frozen=True)
class Alarm:
    """A level that was reached.

    Attributes:
      name: field of config.alarms.
      level: WARN or STOP.
      metric: the metric that reached it.
      value: its value in the last step.
      text: one line: step, figure, value, level, and what to look at.
    """

    name: str
    level: str
    metric: str
    value: float
    text: str


class Alarms:
    """Watches the metrics of a run, step by step.

    Args:
      levels: `config.alarms`: name → 'warn', 'stop' and 'steps'.
    """

    def __init__(self, levels: Mapping[str, Any]):
        self._levels = levels
        # '<name> <level> <phase> <metric>' → steps in a row that reached the level.
        self._in_a_row: collections.Counter[str] = collections.Counter()
        # Phase → mean lengths of its first steps.
        self._first_lengths: dict[str, list[float]] = {}

    def check(self, step: Step, metrics: Mapping[str, float]) -> list[Alarm]:
        """Returns the alarms of a step, stops before warnings; call it once after every step but evaluations.

        Args:
          step: the step.
          metrics: its metrics.
        """
        watched = dict(metrics) | self._length_growth(step, metrics)
        alarms: list[Alarm] = []
        for name, figure in FIGURES.items():
            for metric, value in _values(watched, figure.metrics):
                alarm = self._check_value(step, name, metric, value)
                if alarm is not None:
                    alarms.append(alarm)
        return sorted(alarms, key=_stops_first)

    def _length_growth(self, step: Step, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the growth of rollouts, as a metric, once the first steps of the phase are known; else {}."""
        # Phases of one name recur in every iteration, and those of different names write different things.
        first_lengths = self._first_lengths.setdefault(step.phase.name, [])
        length = metrics.get('policy_tokens')
        if not length:
            return {}
        if len(first_lengths) < REFERENCE_STEPS:
            first_lengths.append(length)
            return {}
        return {_LENGTH_METRIC: length * len(first_lengths) / sum(first_lengths)}

    def _check_value(self, step: Step, name: str, metric: str, value: float) -> Alarm | None:
        """Counts the levels that a value reaches; returns the alarm that follows, the stop rather than the warning."""
        levels = self._levels[name]
        alarm = None
        for level in (WARN, STOP):
            key = f'{name} {level} {step.phase.name} {metric}'
            if not FIGURES[name].reaches(value, levels[level]):
                self._in_a_row.pop(key, None)
                continue
            self._in_a_row[key] += 1
            steps = self._in_a_row[key]
            excess = steps - levels['steps']
            # A run that was stopped and resumed stops again; a warning is repeated from time to time only.
            is_repetition = level == WARN and excess % _REPEAT_STEPS > 0
            if excess >= 0 and not is_repetition:
                text = self._text(step, name, level, metric, value, steps)
                alarm = Alarm(name, level, metric, value, text)
        return alarm

    def _text(
        self, step: Step, name: str, level: str, metric: str, value: float, steps: int
    ) -> str:
        figure = FIGURES[name]
        prefix = metric.removesuffix(_base_name(metric, figure.metrics)).rstrip('/')
        of_role = f' ({prefix})' if prefix else ''
        # Steps that train a single role do not prefix its metrics.
        role = prefix or '<role>'
        if not prefix and len(step.phase.trains) == 1:
            role = step.phase.trains[0]
        in_a_row = f', {steps} steps in a row' if steps > 1 else ''
        limit = f'config.alarms.{name}.{level}={self._levels[name][level]:g}'
        remedy = figure.remedy.replace('<role>', role)
        return f'{step_name(step)}: {figure.text} {value:.3g}{of_role}{in_a_row}, {limit}; {remedy}'

    def state(self) -> Json:
        """Returns the counts and the reference lengths as JSON, for a checkpoint."""
        return {'in_a_row': dict(self._in_a_row), 'first_lengths': self._first_lengths}

    def restore(self, state: Json) -> None:
        """Inverse of `state`; {} of an earlier version begins to count at this step."""
        self._in_a_row = collections.Counter(state.get('in_a_row', {}))
        self._first_lengths = {
            phase: list(lengths) for phase, lengths in state.get('first_lengths', {}).items()
        }


def _values(metrics: Mapping[str, float], names: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Yields the metrics of these names, with and without the prefix of a role."""
    for metric, value in metrics.items():
        if _base_name(metric, names):
            yield metric, value


def _base_name(metric: str, names: tuple[str, ...]) -> str:
    """Returns the name of a metric without the prefix of a role; '' if it is none of `names`."""
    for name in names:
        if metric == name or metric.endswith(f'/{name}'):
            return name
    return ''


def _stops_first(alarm: Alarm) -> bool:
    return alarm.level != STOP
