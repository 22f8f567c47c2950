"""Collects the rollouts of steps: draws tasks, runs their episodes in rounds, and begins the next step early.

With `rollout.ahead=1` the first episodes of step s + 1 begin together with step s, where both train the same roles of
one phase. They use the slots that step s leaves free, rest while it updates the weights, and end with step s + 1. What
is drawn, and the version of the weights that plays it, is a function of counts and outcomes, never of the clock: tasks
are drawn in the order round 0 of s, round 0 of s + 1, further rounds of s; and all rollouts of step s + 1, those of
further rounds included, are played by the weights that are current when step s begins.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zeroplay_jax.objectives import rewards
from zeroplay_jax.rollout.requests import EpisodeBatch
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.metrics import invalid_reason
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.selfplay.schedule import BatchCursor, Step, TaskPool
from zeroplay_jax.selfplay.update import GroupFilter
from zeroplay_jax.types import Json, Outcome, Row, Task, TaskDropped, UserError


@dataclasses.dataclass
class StepRollouts:
    """The tasks of a step and their outcomes.

    Attributes:
      step: the step.
      cursor: position at which its first round was drawn.
      pool_size, pool_drops: `TaskPool.questions` (their number) and `drops` when its first round was drawn.
      batch: its episodes.
      tasks: its tasks, of all rounds so far.
      outcomes: outcomes of the rounds that have ended.
    """

    step: Step
    cursor: BatchCursor
    pool_size: int
    pool_drops: dict[str, int]
    batch: EpisodeBatch
    tasks: list[Task]
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """The rows of all outcomes."""
        rows: list[Row] = []
        for outcome in self.outcomes:
            rows += outcome.rows
        return rows

    def state(self) -> Json:
        """Returns what a restored `Collector` needs to draw the first round again, played by the same weights."""
        return {
            'step': self.step.number,
            'cursor': dataclasses.asdict(self.cursor),
            'pool_size': self.pool_size,
            'pool_drops': self.pool_drops,
            'versions': self.batch.versions,
        }


def clears_pool(step: Step) -> bool:
    """Returns whether the question pool is emptied before a step."""
    period = step.phase.clear_pool_every
    # Due at the first step and after every period: `index` is the number of steps before this one. SSP's code
    # tests a counter that is already incremented, which makes its first window one step short.
    return bool(period) and (step.index == 0 or rewards.closes_window(step.index, period))


class Collector:
    """Runs the episodes of steps.

    Args:
      config, recipe: config of the run, and its recipe.
      context: roles in training, with their scheduler.
      pool: the question pool.
      group_filter: says how many groups a batch lacks.

    Attributes:
      drawn: tasks drawn in the current phase: a position in the datasets.
      drawn_external: the external ones among them.
      external_items: tasks of all collected steps with a question or answer that was supplied from outside the run.
    """

    def __init__(
        self,
        config,
        recipe: Recipe,
        context: RolloutContext,
        pool: TaskPool,
        group_filter: GroupFilter,
    ):
        self.config = config
        self.recipe = recipe
        self.context = context
        self.pool = pool
        self.filter = group_filter
        self.drawn = 0
        self.drawn_external = 0
        self.external_items = 0
        # The step that was begun early.
        self._next: StepRollouts | None = None
        # `StepRollouts.state` of the step that was in progress when the checkpoint was saved.
        self._saved: Json | None = None

    def begin_phase(self) -> None:
        """Resets the positions in the datasets."""
        self.drawn = 0
        self.drawn_external = 0

    def has_begun(self, step: Step) -> bool:
        """Returns whether episodes of a step are in progress already."""
        return self._next is not None and self._next.step.number == step.number

    def version_in_progress(self, weights: str) -> int | None:
        """Returns the version of some weights that plays the step that was begun early; None without such a step."""
        if self._next is not None:
            return self._next.batch.versions[weights]
        if self._saved is not None:
            return self._saved['versions'][weights]
        return None

    def collect(
        self,
        step: Step,
        next_step: Step | None,
        versions: Mapping[str, int],
        on_episode_end: Callable[[], None],
        discarded_rows: Sequence[Row] = (),
    ) -> StepRollouts:
        """Runs the episodes of a step in rounds until the recipe returns no more tasks; returns tasks and outcomes.

        Sets `row.drop` of rows that cannot be trained on. All processes must call it.

        Args:
          step: the step.
          next_step: the step after it, whose episodes are begun if they may be; None: there is none.
          versions: name of weights → newest version.
          on_episode_end: called after each episode of this process.
          discarded_rows: what the filter discarded for this step, and takes back if the step fails.
        """
        drawn_before = self.drawn, self.drawn_external
        saved = self._saved
        was_begun = self.has_begun(step) or (saved is not None and saved['step'] == step.number)
        current = self._begun(step, versions)
        self._next = None
        try:
            if next_step is not None and self._may_begin(step, next_step):
                # Nothing is carried over with `rollout.ahead`, so a whole batch is missing.
                batches = [self.config[role].batch for role in step.phase.trains]
                self._next = self._begin(next_step, versions, max(batches))
            self._end(current, on_episode_end)
        except BaseException:
            # Where the caller continues, or saves a checkpoint, it begins this step again, with the same draws and
            # weights.
            self._next = None
            self.cancel()
            self.drawn, self.drawn_external = drawn_before
            self._saved = current.state() if was_begun else None
            self.filter.carry_over_again(discarded_rows)
            raise
        self.external_items += sum(task.external for task in current.tasks)
        return current

    def cancel(self) -> None:
        """Ends all episodes in progress; those of a step that was begun early are begun again with their step."""
        if self._next is not None:
            self._saved = self._next.state()
        self._next = None
        self.context.scheduler.cancel()

    def _may_begin(self, step: Step, next_step: Step) -> bool:
        """Returns whether the episodes of the next step may begin together with those of `step`."""
        if not self.config.rollout.ahead or not step.phase.trains:
            return False
        # An evaluation, or a phase that trains other roles or none, begins when everything before it has ended.
        is_same_phase = next_step.phase == step.phase and next_step.index == step.index + 1
        return is_same_phase and not clears_pool(next_step)

    def _begun(self, step: Step, versions: Mapping[str, int]) -> StepRollouts:
        """Returns a step whose episodes have begun: earlier, before the checkpoint was saved, or now."""
        saved = self._saved
        self._saved = None
        if self._next is not None:
            if not self.has_begun(step):
                raise RuntimeError(
                    f'step {self._next.step.number} is in progress; run it before step {step.number}'
                )
            return self._next
        if saved is not None and saved['step'] == step.number:
            cursor = BatchCursor(**saved['cursor'])
            # The position is already behind these tasks.
            pool = self.pool.earlier(saved['pool_size'], saved['pool_drops'])
            return self._start(step, cursor, pool, saved['versions'])
        return self._begin(step, versions, self._missing_groups(step, []))

    def _begin(self, step: Step, versions: Mapping[str, int], missing: int) -> StepRollouts:
        """Draws the first round of a step and starts its episodes."""
        cursor = BatchCursor(self.drawn, missing=missing, external=self.drawn_external)
        rollouts = self._start(step, cursor, self.pool, versions)
        self._advance(rollouts.tasks)
        return rollouts

    def _start(
        self,
        step: Step,
        cursor: BatchCursor,
        pool: TaskPool,
        versions: Mapping[str, int],
    ) -> StepRollouts:
        """Starts the episodes of a first round, drawn at `cursor`; `versions` is as of `EpisodeBatch`."""
        rollouts = StepRollouts(
            step=step,
            cursor=cursor,
            pool_size=len(pool.questions),
            pool_drops=dict(pool.drops),
            batch=EpisodeBatch(versions),
            tasks=self.recipe.tasks(step, pool, cursor),
        )
        # Nothing waits for a batch without episodes.
        if rollouts.tasks:
            self._start_episodes(rollouts, rollouts.tasks)
        return rollouts

    def _start_episodes(self, rollouts: StepRollouts, tasks: Sequence[Task]) -> None:
        episodes = {}
        for task in tasks:
            episodes[task.identity] = functools.partial(self._episode, rollouts.step, task)
        self.context.start_episodes(rollouts.batch, episodes)

    def _advance(self, tasks: Sequence[Task]) -> None:
        """Moves the positions in the datasets behind these tasks."""
        self.drawn += len(tasks)
        self.drawn_external += sum(task.external for task in tasks)

    def _end(self, rollouts: StepRollouts, on_episode_end: Callable[[], None]) -> None:
        """Waits for the episodes of a step and runs its further rounds."""
        rollouts.batch.report_ends(on_episode_end)
        tasks = rollouts.tasks
        round_number = 0
        # The recipe chooses tasks between rounds and not while episodes of the step run, so that its choice depends on
        # completed outcomes only, never on the order in which rollouts finish.
        while tasks:
            identities = [task.identity for task in tasks]
            has_next = self._next is not None
            outcomes = self.context.await_episodes(rollouts.batch, identities, has_next)
            for outcome in outcomes:
                for row in outcome.rows:
                    self._check_row(row)
                    # Dropped before `_missing_groups` counts: unusable rows must not fill the batch.
                    row.drop = row.drop or invalid_reason(row, self.config.rollout.truncated)
            rollouts.outcomes += outcomes
            round_number += 1
            cursor = BatchCursor(
                phase=self.drawn,
                step=len(rollouts.tasks),
                round=round_number,
                missing=self._missing_groups(rollouts.step, rollouts.rows),
                external=self.drawn_external,
            )
            tasks = self.recipe.tasks(rollouts.step, self.pool, cursor)
            if tasks:
                rollouts.tasks = rollouts.tasks + tasks
                self._advance(tasks)
                self._start_episodes(rollouts, tasks)

    def _check_row(self, row: Row) -> None:
        """Raises UserError if the group key of a row is not an integer, which is a bug in its recipe."""
        # NumPy's integers are valid keys too.
        if not isinstance(row.group, int | np.integer):
            raise UserError(
                f'recipe {self.config.recipe}: a row of role {row.role} has the group {row.group!r}; '
                'give an integer, such as answers.group_of(task.identity)'
            )

    async def _episode(self, step: Step, task: Task) -> Outcome:
        """Returns the outcome of one task; a `TaskDropped` becomes an outcome with its reason."""
        try:
            return await self.recipe.episode(self.context, step, task)
        except TaskDropped as drop:
            return Outcome(drop=drop.reason)

    def _missing_groups(self, step: Step, rows: Sequence[Row]) -> int:
        """Returns how many groups the batch lacks: the largest number over the trained roles; 0 without one."""
        # The maximum and not the sum is taken, because one task can yield a group of each role (SSP).
        missing = [self.filter.missing_groups(role, rows) for role in step.phase.trains]
        return max(missing, default=0)

    # ---- checkpoints -------------------------------------------------------------------------------

    def state(self) -> Json:
        """Returns the JSON part of a checkpoint: positions, and the step in progress."""
        state = {
            'external_items': self.external_items,
            'drawn': [self.drawn, self.drawn_external],
        }
        ahead = self._saved if self._next is None else self._next.state()
        if ahead is not None:
            state['ahead'] = ahead
        return state

    def restore(self, state: Json) -> None:
        """Inverse of `state`; the episodes of the step that was in progress begin again with the step."""
        self.external_items = state['external_items']
        self.drawn, self.drawn_external = state['drawn']
        self._saved = state.get('ahead')


def judge_counts(batch: EpisodeBatch) -> collections.Counter[str]:
    """Returns the counts of the judgements that episodes asked for, as in `Judge.stats`; without those of 0."""
    counts: collections.Counter[str] = collections.Counter()
    for name, number in batch.counts.items():
        if name.startswith('judge/') and number:
            counts[name.removeprefix('judge/')] = number
    return counts
