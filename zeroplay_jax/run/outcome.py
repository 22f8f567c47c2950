"""How a run ends: alarms, whether it trained its policies, fields of summary.json, exit status 3 or 4."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.runtime.record import Identity
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.records import (
    EQUAL_REWARDS,
    NO_ROLLOUT,
    NONFINITE_GRADIENT,
    policies_text,
    shares_text,
    step_name,
)
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Json, Row, TrainingStopped

_UNFINISHED = (
    'the policy does not write what its prompt asks for: take an instruction-tuned model '
    '(config.policy.path, config.prompts=full) or give it more tokens (config.rollout.turn_tokens)'
)
_INFORMATION = 'read why in tasks.jsonl, and the rollouts in report.html'
# Reason code → advice on what to change. Recipes have further codes, which get `_INFORMATION`.
_REMEDIES = {
    'prompt_too_long': 'raise config.rollout.prompt_tokens, and with it config.sampler.context',
    'context_full': 'raise config.sampler.context, or write shorter notes and keep fewer turns',
    'judge_failed': 'repair the judge (config.judge), or set config.rollout.failed=keep',
    NO_ROLLOUT: (
        'the recipe returned neither rows nor questions: give rollouts that it cannot read as rows with reward 0, and '
        'check RoleSpec.terminal_tags'
    ),
    EQUAL_REWARDS: (
        'all rollouts of a group earned the same (with baseline=value: what was expected of them): '
        'take easier or harder inputs, more rollouts per prompt '
        '(config.<role>.samples) or a larger config.<role>.batch; if none gives an answer, more tokens '
        '(config.rollout.turn_tokens)'
    ),
    NONFINITE_GRADIENT: 'lower config.<role>.learning_rate, or set config.policy.dtype=float32',
    'nonfinite_reward': 'correct the reward, which is infinite or no number (NaN)',
    'truncated': 'raise config.rollout.turn_tokens or max_turns, or set config.rollout.truncated=keep',
    'tool_failed': 'repair the tool, or set config.rollout.failed=keep',
    'ungraded': 'check the judge (config.judge): it gave no verdicts',
    'no_rubrics': 'check the judge (config.judge): it wrote no rubrics',
    'outside_window': 'widen config.pool.window',
    'no_majority': 'no rollout of the solver answered (drzero.labels=majority): raise config.rollout.max_turns',
    'unfinished': _UNFINISHED,
    'no_question': _UNFINISHED,
    'no_answer': _UNFINISHED,
    'no_task': _UNFINISHED,
}


# `Stop.cause` of a run that learns nothing; the other causes are names of alarms.
EMPTY_STEPS = 'empty_steps'
_WITHOUT_ALARMS = '--config.stop_at_alarms=false'
_EMPTY_STEPS_STATUS = 3
_ALARM_STATUS = 4


@dataclasses.dataclass(frozen=True)
class Stop:
    """Why a run stops early.

    Attributes:
      cause: EMPTY_STEPS, or the name of an alarm.
      line: one line for the user.
    """

    cause: str
    line: str


class EndedStep(NamedTuple):
    """A step that has ended; equal on all processes.

    Attributes:
      step: the step.
      metrics: its metrics by name.
      rows: its rollouts.
    """

    step: Step
    metrics: dict[str, float]
    rows: list[Row]

    @property
    def is_evaluation(self) -> bool:
        """Whether it is no step of the engine, which has notices and tasks of the step before then."""
        return self.step.phase.name == 'evaluation'


@dataclasses.dataclass
class RunState:
    """What a checkpoint holds as JSON, beside `Engine.host_state()` and the arrays of `Engine.device_state()`.

    The keys of results are numbers of evaluations, as texts.

    Attributes:
      identity: of the run (`runtime.record`).
      cursor: number of the next step.
      evaluations: results → hop count (a text; 0: unknown) → 0 or 1 per question.
      rubrics: results → the score of each open task; empty without such tasks.
      scores: results → the score of each question by `eval.metric`; empty if that is exact match.
      seconds: total time of the run's processes up to the checkpoint.
      stopped: why the run stopped after its last step; None if it did not.
      alarms: `Alarms.in_a_row`.
      best: 'metric', 'value' and 'checkpoint' of the best evaluation so far; None without one.
    """

    identity: Identity
    cursor: int = 0
    evaluations: dict[str, dict[str, list[int]]] = dataclasses.field(default_factory=dict)
    rubrics: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    scores: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    stopped: Stop | None = None
    alarms: Mapping[str, int] = dataclasses.field(default_factory=dict)
    best: Json | None = None

    @classmethod
    def from_json(cls, stored: Json) -> RunState:
        """Returns the state in a checkpoint; that of the engine is left out."""
        stopped = stored['stopped'] and Stop(**stored['stopped'])
        names = stored.keys() - {'engine'}
        return cls(**{name: stored[name] for name in names} | {'stopped': stopped})

    def to_json(self, engine: Engine) -> Json:
        """Returns the state with that of the engine."""
        stopped = self.stopped and dataclasses.asdict(self.stopped)
        return vars(self) | {'stopped': stopped, 'engine': engine.host_state()}


def stop_after(config: Config, engine: Engine, step: Step, alarms: Sequence[Alarm]) -> Stop | None:
    """Returns why the run stops after a step, or None; equal on all processes.

    Args:
      engine: the engine after step `step`.
      alarms: alarms of the step.
    """
    # Without a passage nothing can be learnt, whatever else is the matter with the inputs.
    for alarm in alarms:
        if alarm.level == STOP and alarm.name == EMPTY_SEARCHES:
            return Stop(alarm.name, f'stopped: {alarm.text} ({_corpus_name(config)})')
    # All processes get the same policies, because the counts come from gathered outcomes.
    stuck_policies = []
    if step.phase.trains:
        stuck_policies = engine.learning.stuck_policies(config.stop_after_empty_steps)
    # The reasons of empty steps say more than an alarm about the same step.
    if stuck_policies:
        return Stop(EMPTY_STEPS, stop_line(engine, stuck_policies, step))
    for alarm in alarms:
        if alarm.level == STOP:
            return Stop(alarm.name, f'stopped: {alarm.text}')
    return None


def raise_if_weights_are_lost(
    step: Step, metrics: Mapping[str, float], checkpoints: Checkpointer, saved_step: int
) -> None:
    """Raises TrainingStopped with exit status 4 if the weights are not finite after a step, which is not saved.

    A checkpoint of such weights would be of no use, and take the place of a good one.

    Args:
      metrics: of the step.
      checkpoints: saves in progress are completed before.
      saved_step: step at which the last checkpoint resumes the run; 0 without one.
    """
    values = [metrics[name] for name in metrics if name.split('/')[-1] == 'nonfinite_weights']
    if not any(value > 0 for value in values):
        return
    checkpoints.wait()
    raise TrainingStopped(
        f'stopped: {step_name(step)}: weights are not finite after its update. The step is not saved: the same command '
        f'resumes at step {saved_step}. If it stops again, lower config.<role>.learning_rate or set '
        'config.policy.dtype=float32 in a new run (--from takes weights of this one)',
        _ALARM_STATUS,
    )


def raise_if_nothing_found(config: Config, counts: Mapping[str, float]) -> None:
    """Raises TrainingStopped with exit status 3 if no search of an evaluation found a passage.

    Its figures would measure the policy without a search. Not with `config.stop_at_alarms=false`.

    Args:
      counts: `library_builder.SEARCH_COUNTS` of the evaluation, summed over processes.
    """
    if config.stop_at_alarms and counts['answered'] and counts['empty'] == counts['answered']:
        raise TrainingStopped(
            f'stopped: no search of the evaluation found a passage in {_corpus_name(config)} '
            f'(0 of {counts["answered"]:.0f}); {FIGURES[EMPTY_SEARCHES].remedy}. '
            f'{_WITHOUT_ALARMS} evaluates nevertheless',
            _EMPTY_STEPS_STATUS,
        )


def _corpus_name(config: Config) -> str:
    """Returns what searches read, as its field and value."""
    field = {'http': 'url', 'folder': 'path', 'world': 'kind'}[config.retrieval.kind]
    return f'config.retrieval.{field}={config.retrieval[field]}'


def current_stop(config: Config, stopped: Stop | None) -> Stop | None:
    """Returns the stop of a checkpoint; None without one, or if its limit is switched off now."""
    if stopped is None:
        return None
    is_watched = config.stop_at_alarms
    if stopped.cause == EMPTY_STEPS:
        is_watched = config.stop_after_empty_steps > 0
    return stopped if is_watched else None


def stop_line(engine: Engine, policies: Sequence[str], step: Step) -> str:
    """Returns one line: why the run stops after this step, and what to change (for the first policy).

    Args:
      engine: the engine after its step `step`.
      policies: names of weights from `LearningRecord.stuck_policies`; at least one.
    """
    learning = engine.learning
    names = ', '.join(policies)
    if learning.lacks_tasks:
        problem = f'{step_name(step)} has nothing to train {names} on'
        # A step without tasks has no reasons of its own. Normally these are of the phase that left the pool empty, the
        # same for all policies.
        reasons = learning.last_reasons.get(policies[0])
        if reasons:
            problem += f': {shares_text(reasons)}'
    else:
        # The line names all policies, so it counts the steps that were empty for each of them.
        count = min(learning.consecutive_empty[name] for name in policies)
        steps = 'step' if count == 1 else f'{count} steps in a row'
        text = policies_text(learning.last_reasons, policies)
        problem = f'{steps} trained nothing in {names}, the last of them {step_name(step)}: {text}'
    return f'stopped: {problem}; {remedy(engine, policies[0])}'


def remedy(engine: Engine, policy: str) -> str:
    """Returns advice on what to change so that a policy learns, for the commonest reason of its last empty step."""
    reasons = engine.learning.last_reasons.get(policy, collections.Counter())
    for reason, _ in reasons.most_common(1):
        text = _REMEDIES.get(reason, _INFORMATION)
        roles = [role for role, weights in engine.weights_of.items() if weights == policy]
        return text.replace('<role>', roles[0])
    return _INFORMATION


def learning_summary(
    engine: Engine, steps: Sequence[Step], unchanged: Sequence[str], stopped: Stop | None
) -> dict[str, Any]:
    """Returns the fields of summary.json about what was trained.

    Args:
      steps: all steps of the run.
      unchanged: policies whose weights equal those of the start.
      stopped: why the run stopped early, or None.

    Returns:
      'trained': whether all policies that the schedule trains were trained; 'policies': per policy whether
      it was, and its steps with and without an update; 'stopped', 'stopped_by': line and cause of the stop, or None;
      'warning': sentences for the head of the report, or None.
    """
    learning = engine.learning
    policies = {}
    untrained = []
    # A dict keeps the order of insertion; the order of a set differs between processes.
    due = dict.fromkeys(engine.weights_of[role] for step in steps for role in step.phase.trains)
    for name in due:
        # Both conditions are needed: weight decay alone changes weights, and an update may be too small to
        # change them.
        is_trained = learning.trained_steps[name] > 0 and name not in unchanged
        if not is_trained:
            untrained.append(name)
        policies[name] = {
            'trained': is_trained,
            'steps': learning.trained_steps[name],
            'empty_steps': learning.empty_steps[name],
        }
    sentences = []
    if untrained:
        sentences.append(f'Nothing was trained in {", ".join(untrained)}.')
        for name in untrained:
            reasons = learning.last_reasons.get(name)
            # If the run was stopped, the sentence about it below has the reasons.
            if reasons and not stopped:
                text = shares_text(reasons)
                sentences.append(f'The last empty step of {name}: {text}; {remedy(engine, name)}.')
    if stopped:
        sentences.append(f'The run {stopped.line}.')
        sentences.append('The figures after training are those of the last evaluation before that.')
    return {
        'trained': not untrained,
        'policies': policies,
        'stopped': stopped.line if stopped else None,
        'stopped_by': stopped.cause if stopped else None,
        'warning': ' '.join(sentences) or None,
    }


def raise_if_stopped_or_untrained(config: Config, summary: Json) -> None:
    """Raises TrainingStopped if the run stopped early, or if no policy of its schedule was trained.

    Exit status 3 without training (never with `config.stop_after_empty_steps=0`) or if searches find nothing, 4 after
    another alarm.

    Args:
      summary: summary.json with the fields of `learning_summary`.
    """
    cause = summary['stopped_by']
    if cause is not None:
        change = '--config.stop_after_empty_steps=0'
        if cause != EMPTY_STEPS:
            change = _WITHOUT_ALARMS
        raise TrainingStopped(
            f'{summary["stopped"]}. Everything is saved: the same command resumes the run, and '
            f'{change} keeps it from stopping',
            _EMPTY_STEPS_STATUS if cause in (EMPTY_STEPS, EMPTY_SEARCHES) else _ALARM_STATUS,
        )
    if not config.stop_after_empty_steps:
        return
    policies = summary['policies'].values()
    # `policies` is empty for a schedule that trains nothing, such as a plain evaluation.
    if policies and not any(policy['trained'] for policy in policies):
        raise TrainingStopped(summary['warning'])


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
        'ask the search by hand (zeroplay search, or curl to a server): whether its index has '
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
