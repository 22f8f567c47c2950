"""What a run learnt: counts of its training steps, and why steps trained nothing.

A policy is one set of trained weights. A step is empty for it if none of its updates had a gradient that comes
from rewards, from a teacher or from an entropy bonus. A checkpoint holds the counts, so that a resumed run
continues them.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.types import Json, Outcome, Row

# Reason codes in addition to those of recipes and rows.
EQUAL_REWARDS = 'equal_rewards'
NONFINITE_GRADIENT = 'nonfinite_gradient'
NO_ROLLOUT = 'no_rollout'
# What a checkpoint holds of a `LearningRecord`: counts, and counts by policy.
_COUNTS = ('trained_steps', 'empty_steps', 'consecutive_empty', '_pool_reasons')
_REASONS = ('last_reasons', '_phase_reasons')
# Largest number of reasons that one line lists.
_MAX_REASONS = 4


def teaches(rows: Sequence[Row], settings: Any, distill_coef: float) -> bool:
    """Returns whether an update on these rows has a gradient from rewards, a teacher or an entropy bonus.

    A KL term or weight decay alone does not count: they only pull the weights towards their start, or towards 0.

    Args:
      rows: rows of one update, with advantages.
      settings: `config.<role>`.
      distill_coef: weight of the distillation term.
    """
    valid_rows = [row for row in rows if row.drop is None]
    if any(row.is_informative for row in valid_rows):
        return True
    if settings.entropy_coef and valid_rows:
        return True
    has_teacher = any(row.teacher_tokens for row in valid_rows)
    return bool(distill_coef) and has_teacher


def empty_step_reasons(
    outcomes: Sequence[Outcome], roles: Collection[str], is_nonfinite: bool
) -> collections.Counter[str]:
    """Returns reason code → number of tasks, with one reason per task, of a step that did not train `roles`.

    Args:
      outcomes: outcomes of all tasks of the step.
      roles: roles whose weights learnt nothing in the step.
      is_nonfinite: whether an update was skipped because its gradient was not finite.
    """
    reasons: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        role_rows = [row for row in outcome.rows if row.role in roles]
        reasons[_task_reason(outcome, role_rows, is_nonfinite)] += 1
    return reasons


def _task_reason(outcome: Outcome, rows: Sequence[Row], is_nonfinite: bool) -> str:
    """Returns the reason code why a task did not contribute to an update.

    Args:
      rows: the task's rows of the roles that learnt nothing.
      is_nonfinite: as in `empty_step_reasons`.
    """
    if not rows:
        return outcome.drop or NO_ROLLOUT
    dropped = [row.drop for row in rows if row.drop]
    if len(dropped) == len(rows):
        return _commonest(dropped)
    if is_nonfinite:
        return NONFINITE_GRADIENT
    # If all proposals were rejected, the rejection is the cause of the equal rewards, so it is reported.
    rejected = [row.info.rejected for row in rows if row.info.rejected]
    if len(rejected) == len(rows):
        return _commonest(rejected)
    return EQUAL_REWARDS


def _commonest(reasons: Sequence[str]) -> str:
    ((reason, _),) = collections.Counter(reasons).most_common(1)
    return reason


def shares_text(reasons: Mapping[str, int]) -> str:
    """Returns reasons with their shares, largest first: 'prompt_too_long 97 %, equal_rewards 3 % of 32 tasks'.

    Args:
      reasons: reason code → tasks; without any the text is 'there was none of its tasks'.
    """
    total = sum(reasons.values())
    if not total:
        return 'there was none of its tasks'
    largest_first = collections.Counter(reasons).most_common()
    shares = []
    for reason, count in largest_first[:_MAX_REASONS]:
        shares.append(f'{reason} {count / total:.0%}'.replace('%', ' %'))
    if len(largest_first) > _MAX_REASONS:
        shares.append('…')
    return f'{", ".join(shares)} of {total} tasks'


def step_name(step: Step) -> str:
    """Returns a step for messages, 'step 12 (solver 1.3)': number, phase, iteration and index; the last two from 1."""
    return f'step {step.number} ({step.phase.name} {step.phase.iteration + 1}.{step.index + 1})'


def policies_text(reasons: Mapping[str, Mapping[str, int]], policies: Sequence[str]) -> str:
    """Returns `shares_text` of each policy's reasons, with its name in front if there are several policies."""
    if len(policies) == 1:
        return shares_text(reasons.get(policies[0], {}))
    texts = [f'{policy}: {shares_text(reasons.get(policy, {}))}' for policy in policies]
    return '; '.join(texts)


class LearningRecord:
    """Counts of training steps by policy (name of the weights). Call one `add_` method after each step.

    Attributes:
      trained_steps: policy → steps with an update that teaches.
      empty_steps: policy → steps without one.
      consecutive_empty: policy → empty steps since the last one that taught.
      last_reasons: policy → reason → tasks (`empty_step_reasons`) of its last empty step; of a step without tasks those
        of the phase that left the pool empty.
      empty_policies: policies that the last step trained and that learnt nothing in it.
      lacks_tasks: whether the last step had no task at all; the further steps of its phase will have none either.
      notices: lines about the last step, for the terminal.

    `empty_policies`, `lacks_tasks` and `notices` describe a single step and are not part of a checkpoint.
    """

    def __init__(self) -> None:
        self.trained_steps: collections.Counter[str] = collections.Counter()
        self.empty_steps: collections.Counter[str] = collections.Counter()
        self.consecutive_empty: collections.Counter[str] = collections.Counter()
        self.last_reasons: dict[str, collections.Counter[str]] = {}
        self.empty_policies: list[str] = []
        self.lacks_tasks = False
        self.notices: list[str] = []
        # Number of steps of the current phase that taught any policy, and per policy the reasons of its empty steps.
        self._phase_trained = 0
        self._phase_reasons: dict[str, collections.Counter[str]] = {}
        # Why the last phase that makes questions left none.
        self._pool_reasons: collections.Counter[str] = collections.Counter()

    def add_training_step(
        self,
        step: Step,
        has_learnt: Mapping[str, bool],
        reasons: Mapping[str, collections.Counter[str]],
    ) -> None:
        """Counts a step that trains policies, and sets the attributes about the last step.

        Args:
          has_learnt: policy → whether an update of the step taught it anything.
          reasons: policy that learnt nothing → its `empty_step_reasons`; empty if the step had no tasks.
        """
        self._begin_step(step)
        for policy, learnt in has_learnt.items():
            if learnt:
                self.trained_steps[policy] += 1
                self.consecutive_empty[policy] = 0
            else:
                self.empty_steps[policy] += 1
                self.consecutive_empty[policy] += 1
        self.empty_policies = [policy for policy, learnt in has_learnt.items() if not learnt]
        self._phase_trained += len(self.empty_policies) < len(has_learnt)
        for policy in self.empty_policies:
            # A step without tasks has no reasons. Those of the phase that should have made the tasks are used.
            policy_reasons = reasons[policy] or self._pool_reasons
            if policy_reasons:
                self.last_reasons[policy] = policy_reasons
            phase_reasons = self._phase_reasons.setdefault(policy, collections.Counter())
            phase_reasons.update(reasons[policy])
            # The empty policy is named only if the step trains several.
            name = f' in {policy}' if len(has_learnt) > 1 else ''
            text = shares_text(reasons[policy])
            self.notices.append(f'{step_name(step)} trained nothing{name}: {text}')
        self.lacks_tasks = bool(self.empty_policies) and not any(reasons.values())
        is_last = step.index == step.phase.steps - 1
        if is_last and not self._phase_trained:
            text = policies_text(self._phase_reasons, list(self._phase_reasons))
            self.notices.append(
                f'phase {step.phase.name} of iteration {step.phase.iteration + 1} made no update: {text}'
            )

    def add_rollout_step(
        self, step: Step, outcomes: Sequence[Outcome], pool_size: int, drops: Mapping[str, int]
    ) -> None:
        """Sets the attributes about the last step after one that trains no policy, but may fill the pool.

        Args:
          outcomes: outcomes of all tasks of the step.
          pool_size: questions in the pool after the step.
          drops: reason → tasks that gave no question since the pool was cleared.
        """
        self._begin_step(step)
        reasons = collections.Counter(outcome.drop for outcome in outcomes if outcome.drop)
        if outcomes and reasons.total() == len(outcomes):
            text = shares_text(reasons)
            self.notices.append(f'{step_name(step)}: all tasks were dropped: {text}')
        is_last = step.index == step.phase.steps - 1
        self._pool_reasons = collections.Counter()
        if is_last and not pool_size and drops:
            self._pool_reasons = collections.Counter(drops)
            text = shares_text(drops)
            self.notices.append(
                f'phase {step.phase.name} of iteration {step.phase.iteration + 1} left the pool of '
                f'questions empty: {text}'
            )

    def _begin_step(self, step: Step) -> None:
        """Resets the attributes about the last step, and at the first step of a phase those about the phase."""
        self.notices = []
        self.empty_policies = []
        self.lacks_tasks = False
        if step.index == 0:
            self._phase_trained = 0
            self._phase_reasons = {}

    def stuck_policies(self, limit: int) -> list[str]:
        """Returns the policies because of which the run has to stop now; [] if it can continue.

        They have had `limit` empty steps in a row. If the most recent step had no task at all, one is enough.

        Args:
          limit: `config.stop_after_empty_steps`; 0: never stop.
        """
        if not limit:
            return []
        # Without tasks the further steps of the phase would be empty as well, so the limit is not awaited.
        if self.lacks_tasks:
            return self.empty_policies
        return [name for name in self.empty_policies if self.consecutive_empty[name] >= limit]

    def state(self) -> Json:
        """Returns the counts as JSON, for a checkpoint."""
        counts = {name: dict(getattr(self, name)) for name in _COUNTS}
        reasons = {}
        for name in _REASONS:
            reasons[name] = {policy: dict(of) for policy, of in getattr(self, name).items()}
        return {**counts, **reasons, '_phase_trained': self._phase_trained}

    def restore(self, state: Json) -> None:
        """Inverse of `state`."""
        self._phase_trained = state['_phase_trained']
        for name in _COUNTS:
            setattr(self, name, collections.Counter(state[name]))
        for name in _REASONS:
            counters = {policy: collections.Counter(of) for policy, of in state[name].items()}
            setattr(self, name, counters)
