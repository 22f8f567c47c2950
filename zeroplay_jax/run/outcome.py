"""How a run ends: whether it trained its policies, fields of summary.json, exit status 3 or 4."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.run.alarms import EMPTY_SEARCHES, FIGURES, STOP, Alarm
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
from zeroplay_jax.types import Json, TrainingStopped

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
            f'stopped: none of the {counts["answered"]:.0f} searches of the evaluation found a passage in '
            f'{_corpus_name(config)}; {FIGURES[EMPTY_SEARCHES].remedy}. '
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


def policies_due(engine: Engine, steps: Sequence[Step]) -> list[str]:
    """Returns the names of the weights that the schedule trains."""
    # A dict keeps the order of insertion; the order of a set differs between processes.
    due: dict[str, None] = {}
    for step in steps:
        for role in step.phase.trains:
            due[engine.weights_of[role]] = None
    return list(due)


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
    for name in policies_due(engine, steps):
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
