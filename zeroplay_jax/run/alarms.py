"""Alarms: which figures of a step are watched, and when one of them warns or stops the run.

Pure: metrics in, alarms out. A step without a figure, such as one with too few calls, changes nothing about it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from zeroplay_jax.selfplay.records import step_name
from zeroplay_jax.selfplay.schedule import Step

WARN = 'warn'
STOP = 'stop'
# Name of the alarm about searches that find nothing.
EMPTY_SEARCHES = 'empty_searches'
# A warning is repeated after so many further steps in which its level is reached.
_REPEAT_STEPS = 10


class Levels(NamedTuple):
    """From which value a figure warns and stops the run (None: never), the steps in a row that must reach it, and
    whether low values are the bad ones."""

    warn: float
    stop: float | None
    steps: int
    at_most: bool = False


class Figure(NamedTuple):
    """A watched figure.

    Attributes:
      levels: when it warns or stops.
      metrics: names of the metrics, those of roles without their prefix 'role/'.
      text: what they are, in a line of the terminal.
      remedy: what to look at.
    """

    levels: Levels
    metrics: tuple[str, ...]
    text: str
    remedy: str


FIGURES: dict[str, Figure] = {
    # The mean difference in float32 is below 1e-6, in bfloat16 of the order of 0.01; a few updates between sampling and
    # training add as much again.
    'sampler_gap': Figure(
        Levels(0.03, 0.2, 3),
        ('sampler_gap',),
        'sampler and trainer differ in the probability of a token by',
        'set config.policy.dtype=float32 to see whether rounding is the cause, and config.<role>.tis_cap=2 to '
        'correct it',
    ),
    # Small policies that have nearly solved their task are healthy at 0.03.
    'entropy': Figure(
        Levels(0.01, None, 3, at_most=True),
        ('entropy',),
        'the entropy of the next token is',
        'lower config.<role>.learning_rate, or raise config.<role>.entropy_coef or config.<role>.temperature',
    ),
    # A policy may need some steps to learn how calls are written.
    'tool_errors': Figure(
        Levels(0.5, 0.9, 5),
        ('call_error_share',),
        'the share of failed calls is',
        'read the calls in report.html: whether the policy writes them as config.tools.syntax asks, and whether '
        'the tools answer',
    ),
    # A search that finds nothing at all is an empty index: no healthy policy writes only such queries.
    'empty_searches': Figure(
        Levels(0.5, 1.0, 2),
        ('empty_search_share',),
        'the share of searches that find no passage is',
        'ask the search by hand (python -m zeroplay_jax.retrieval.query, or curl to a server): whether its index has '
        'passages, and whether it is of the language and corpus of the questions',
    ),
    'no_call': Figure(
        Levels(0.8, None, 3),
        ('no_call_share',),
        'the share of answers without any call is',
        'the policy answers from memory: take questions that it cannot know, or check the prompt',
    ),
    'no_evidence': Figure(
        Levels(0.9, None, 3),
        ('no_evidence_share',),
        'the share of correct answers that no result contains is',
        'the reward does not come from the search: read such rollouts in report.html',
    ),
    'duplicates': Figure(
        Levels(0.5, None, 3),
        ('duplicate_share',),
        'the share of questions that several tasks propose is',
        "the proposer writes the same question about different documents: lower the proposing role's learning_rate",
    ),
    'judge_agreement': Figure(
        Levels(0.5, None, 3, at_most=True),
        ('judge_agreement',),
        "the share of the judge's verdicts that agree with the accepted answers is",
        'read the verdicts in report.html; take another judge (config.judge.model) or config.reward.answer=em',
    ),
    # `judge.max_failure_rate` stops a run whose judge is gone.
    'judge_lost': Figure(
        Levels(0.3, None, 3),
        ('judge_lost_share',),
        'the share of judgements without a verdict is',
        'check the judge (config.judge): the terminal names the reasons',
    ),
    # A single update that is skipped does no harm: half of them, twice in a row, is no accident. Weights that are not
    # finite stop the run in any case (`outcome.raise_if_weights_are_lost`).
    'nonfinite': Figure(
        Levels(0.001, 0.5, 2),
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


@dataclasses.dataclass(frozen=True)
class Alarm:
    """A level that was reached.

    Attributes:
      name: of the figure.
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
      stops: whether some of them stop the run (`config.stop_at_alarms`).
      in_a_row: the attribute of this name, from a checkpoint: '<name> <level> <phase> <metric>' → steps in a row that
        reached the level.
    """

    def __init__(self, stops: bool = True, in_a_row: Mapping[str, int] | None = None):
        self._stops = stops
        self.in_a_row = collections.Counter(in_a_row)

    def check(self, step: Step, metrics: Mapping[str, float]) -> list[Alarm]:
        """Returns the alarms of a step, stops before warnings; call it once after every step. Evaluations have none."""
        alarms: list[Alarm] = []
        if step.phase.name == 'evaluation':
            return alarms
        for name, figure in FIGURES.items():
            for metric, value in metrics.items():
                role = _role_of(metric, figure)
                if role is not None:
                    alarms += self._reached(step, name, role, metric, value)
        return sorted(alarms, key=lambda alarm: alarm.level != STOP)

    def _reached(self, step: Step, name: str, role: str, metric: str, value: float) -> list[Alarm]:
        """Counts the levels that a value reaches; returns the alarm that follows, the stop rather than the warning."""
        levels = FIGURES[name].levels
        alarms = []
        for level, limit in ((WARN, levels.warn), (STOP, levels.stop if self._stops else None)):
            key = f'{name} {level} {step.phase.name} {metric}'
            if limit is None or not (value <= limit if levels.at_most else value >= limit):
                self.in_a_row.pop(key, None)
                continue
            self.in_a_row[key] += 1
            steps = self.in_a_row[key]
            excess = steps - levels.steps
            # A run that was stopped and resumed stops again; a warning is repeated from time to time only.
            is_repetition = level == WARN and excess % _REPEAT_STEPS > 0
            if excess >= 0 and not is_repetition:
                side = 'at or below' if levels.at_most else 'at or above'
                text = _line(step, name, role, value, steps)
                line = f'{text}, {side} {limit:g} ({level}); {_remedy(step, name, role)}'
                alarms = [Alarm(name, level, metric, value, line)]
        return alarms


def _role_of(metric: str, figure: Figure) -> str | None:
    """Returns the role of a metric, '' without one, or None if it is not of this figure."""
    for name in figure.metrics:
        if metric == name or metric.endswith(f'/{name}'):
            return metric.removesuffix(name).rstrip('/')
    return None


def _line(step: Step, name: str, role: str, value: float, steps: int) -> str:
    of_role = f' ({role})' if role else ''
    in_a_row = f', {steps} steps in a row' if steps > 1 else ''
    return f'{step_name(step)}: {FIGURES[name].text} {value:.3g}{of_role}{in_a_row}'


def _remedy(step: Step, name: str, role: str) -> str:
    """Returns what to look at, with the role that is meant."""
    # Figures of the whole step have no role.
    if not role and len(step.phase.trains) == 1:
        role = step.phase.trains[0]
    return FIGURES[name].remedy.replace('<role>', role or '<role>')
