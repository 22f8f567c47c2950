"""Collects the rollouts of steps: draws tasks, runs their episodes in rounds, and begins the next step early.

With `rollout.ahead=1` the first episodes of step s + 1 begin together with step s, where both train the same roles of
one phase. They use the slots that step s leaves free, rest while it updates the weights, and end with step s + 1. What
is drawn, and with which version of the weights, is a function of counts and outcomes, never of the clock: tasks
are drawn in the order round 0 of s, round 0 of s + 1, further rounds of s; and all rollouts of step s + 1, those of
further rounds included, are sampled by the weights, and with the state of the recipe, that are current when step s
begins.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zeroplay_jax.objectives import rewards
from zeroplay_jax.objectives.advantages import LARGEST_REWARD
from zeroplay_jax.selfplay.context import Episodes, RolloutContext
from zeroplay_jax.selfplay.groups import GroupFilter
from zeroplay_jax.selfplay.judge import judgements_of_episode
from zeroplay_jax.selfplay.metrics import invalid_reason
from zeroplay_jax.selfplay.recipe import Recipe, state_of, with_state
from zeroplay_jax.selfplay.records import NO_ROLLOUT
from zeroplay_jax.selfplay.schedule import BatchCursor, QuestionPool, Step
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import (
    Json,
    Outcome,
    Row,
    RowInfo,
    Task,
    TaskDropped,
    UserError,
    first_line,
    identity_key,
)


def clears_pool(step: Step) -> bool:
    """Returns whether the question pool is emptied before a step."""
    period = step.phase.clear_pool_every
    # Due at the first step and after every period: `index` is the number of steps before this one. SSP's code
    # tests a counter that is already incremented, which makes its first window one step short.
    return bool(period) and (step.index == 0 or rewards.closes_window(step.index, period))


@dataclasses.dataclass(eq=False)
class Collector:
    """Runs the episodes of steps.

    Attributes:
      config, recipe: config of the run, and its recipe.
      context: roles in training, with their scheduler.
      pool: the question pool.
      filter: says how many groups a batch lacks.
      drawn: tasks drawn in the current phase: a position in the datasets.
      drawn_external: the external ones among them.
      external_items: tasks of all collected steps with a question or answer that was supplied from outside the run.
      ahead: context of the step whose first round is drawn already; None where there is none. Its episodes are in
        progress, or have to begin (again) where `Episodes.step` is None: after a restore, a `cancel` or an error.
    """

    config: Config
    recipe: Recipe
    context: RolloutContext
    pool: QuestionPool
    filter: GroupFilter
    drawn: int = 0
    drawn_external: int = 0
    external_items: int = 0
    ahead: RolloutContext | None = None

    def __post_init__(self) -> None:
        self.weights = self.context.scheduler.weights

    def begin_phase(self) -> None:
        """Resets the positions in the datasets."""
        self.drawn = 0
        self.drawn_external = 0

    def has_begun(self, step: Step) -> bool:
        """Returns whether episodes of a step are in progress already."""
        return self.ahead is not None and self.ahead.episodes.step == step

    @property
    def versions_ahead(self) -> Mapping[str, int]:
        """Name of weights → version that samples for the step that is drawn already; empty without such a step."""
        return {} if self.ahead is None else self.ahead.episodes.versions

    def collect(
        self,
        step: Step,
        next_step: Step | None,
        on_episode_end: Callable[[], None],
        discarded_rows: Sequence[Row] = (),
    ) -> RolloutContext:
        """Runs the episodes of a step in rounds until the recipe returns no more tasks; returns their context.

        Its `episodes` have tasks and outcomes. Sets `row.drop` of rows that cannot be trained on. All processes call
        it.

        Args:
          step: the step.
          next_step: the step after it, whose episodes are begun if they may be; None: there is none.
          on_episode_end: called after each episode of this process.
          discarded_rows: what the filter discarded for this step, and takes back if the step fails.
        """
        drawn_before = self.drawn, self.drawn_external
        context = self.ahead
        was_drawn = context is not None
        if context is None:
            context = self._begin(step, self._missing_groups(step, []))
        elif context.episodes.number != step.number:
            number = context.episodes.number
            raise RuntimeError(f'step {number} is in progress; run it before step {step.number}')
        elif context.episodes.step is None:
            self._draw_and_start(context, step)
        self.ahead = None
        try:
            if next_step is not None and self._may_begin(step, next_step):
                # Nothing is carried over with `rollout.ahead`, so a whole batch is missing.
                roles = self.recipe.roles_with_tasks(step.phase)
                batches = [self.config[role].batch for role in roles]
                self.ahead = self._begin(next_step, max(batches))
            self._end(context, on_episode_end)
        except BaseException:
            # Where the caller continues, or saves a checkpoint, it begins this step again, with the same draws and
            # weights.
            self.context.scheduler.cancel()
            if self.ahead is not None:
                self.weights.release(self.ahead.episodes.versions)
            self.ahead = None
            if was_drawn:
                self.ahead = self._again(context)
            else:
                self.weights.release(context.episodes.versions)
            self.drawn, self.drawn_external = drawn_before
            self.filter.carry_over_again(discarded_rows)
            raise
        self.weights.release(context.episodes.versions)
        self.external_items += sum(task.external for task in context.episodes.tasks)
        return context

    def cancel(self) -> None:
        """Ends all episodes in progress; those of a step that was begun early begin again with their step."""
        if self.ahead is not None:
            self.ahead = self._again(self.ahead)
        self.context.scheduler.cancel()

    def _again(self, context: RolloutContext) -> RolloutContext:
        """Returns the context of a step with the same draw, whose episodes have not begun."""
        return self.context.bound(Episodes.of_state(context.episodes.state()))

    def _may_begin(self, step: Step, next_step: Step) -> bool:
        """Returns whether the episodes of the next step may begin together with those of `step`."""
        if not self.config.rollout.ahead or not step.phase.trains:
            return False
        # An evaluation, or a phase that trains other roles or none, begins when everything before it has ended.
        is_same_phase = next_step.phase == step.phase and next_step.index == step.index + 1
        return is_same_phase and not clears_pool(next_step)

    def _begin(self, step: Step, missing: int) -> RolloutContext:
        """Begins a step at the present positions, with the newest weights: draws its first round and starts it."""
        episodes = Episodes(
            versions=dict(self.weights.newest),
            number=step.number,
            cursor=BatchCursor(self.drawn, missing=missing, external=self.drawn_external),
            pool_size=len(self.pool.questions),
            pool_drops=dict(self.pool.drops),
            recipe_state=state_of(self.recipe),
        )
        context = self.context.bound(episodes)
        self._draw_and_start(context, step)
        self._advance(episodes.tasks)
        self.weights.pin(episodes.versions)
        return context

    def _draw_and_start(self, context: RolloutContext, step: Step) -> None:
        """Draws the first round of a step at the positions that its context holds, and starts its episodes.

        Called by `_begin`, and again for a step that was begun before a restore, a `cancel` or an error.
        """
        episodes = context.episodes
        # After a restore the pool may have more questions than when the round was drawn.
        pool = self.pool.earlier(episodes.pool_size, episodes.pool_drops)
        episodes.recipe = with_state(self.recipe, episodes.recipe_state)
        episodes.tasks = episodes.recipe.tasks(step, pool, episodes.cursor)
        # Last, so that a step whose tasks cannot be drawn has not begun.
        episodes.step = step
        # Nothing waits for a step without episodes.
        if episodes.tasks:
            self._start_episodes(context, step, episodes.tasks)

    def _start_episodes(self, context: RolloutContext, step: Step, tasks: Sequence[Task]) -> None:
        episodes = {}
        for task in tasks:
            episodes[task.identity] = functools.partial(self._episode, context, step, task)
        context.start_episodes(episodes)

    def _advance(self, tasks: Sequence[Task]) -> None:
        """Moves the positions in the datasets behind these tasks."""
        self.drawn += len(tasks)
        self.drawn_external += sum(task.external for task in tasks)

    def _end(self, context: RolloutContext, on_episode_end: Callable[[], None]) -> None:
        """Waits for the episodes of a step and runs its further rounds."""
        episodes = context.episodes
        step = episodes.step
        assert step is not None
        tasks = episodes.tasks
        round_number = 0
        # The recipe chooses tasks between rounds and not while episodes of the step run: what the cursor says about
        # outcomes never depends on the order in which rollouts finish.
        while tasks:
            identities = [task.identity for task in tasks]
            has_next = self.ahead is not None
            outcomes = context.await_episodes(identities, on_episode_end, has_next)
            for outcome in outcomes:
                for row in outcome.rows:
                    # Dropped before `_missing_groups` counts: unusable rows must not fill the batch.
                    row.drop = row.drop or invalid_reason(row, self.config.rollout)
            episodes.outcomes += outcomes
            round_number += 1
            cursor = BatchCursor(
                drawn_in_phase=self.drawn,
                drawn_in_step=len(episodes.tasks),
                round=round_number,
                missing=self._missing_groups(step, episodes.rows),
                external=self.drawn_external,
            )
            tasks = episodes.recipe.tasks(step, self.pool, cursor)
            if tasks:
                episodes.tasks = episodes.tasks + tasks
                self._advance(tasks)
                self._start_episodes(context, step, tasks)

    def _check_row(self, episodes: Episodes, step: Step, row: Row) -> None:
        """Raises UserError for a row that would be trained wrong without a word, a bug in its recipe."""
        trajectory = row.trajectory
        problem = ''
        # NumPy's integers are valid keys too.
        if not isinstance(row.group, int | np.integer):
            problem = f'has the group {row.group!r}; give an integer, such as answers.group_of(task.identity)'
        # Rewards that are not finite are missing ones: advantages leave their rows out.
        is_number = isinstance(row.reward, numbers.Real | np.bool_)
        if not is_number or LARGEST_REWARD < abs(row.reward) < math.inf:
            problem = f'has the reward {row.reward!r}; give a number of at most {LARGEST_REWARD}'
        if row.turn_rewards is not None:
            # None among the numbers becomes NaN, no reward, like NaN itself.
            try:
                row.turn_rewards = np.asarray(row.turn_rewards, np.float64)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f'config.recipe={self.config.recipe}: turn_rewards of the rollout {trajectory.identity}: '
                    f'{first_line(error)}; give one number per turn'
                ) from None
            is_complete = row.turn_rewards.shape == (len(trajectory.turns),)
            if not is_complete or np.nanmax(np.abs(row.turn_rewards), initial=0.0) > LARGEST_REWARD:
                problem = (
                    f'has the turn_rewards {row.turn_rewards} for {len(trajectory.turns)} turns; give one number of at '
                    f'most {LARGEST_REWARD} per turn, NaN where there is none'
                )
        if trajectory.identity in episodes.continued and row.drop is None:
            problem = (
                'is a row and goes on in another one, so that its tokens would be trained twice; return the row of the '
                'continuation alone, or fork it'
            )
        if row.role in step.phase.trains and row.drop is None:
            trained = self.config[row.role].temperature
            others = {turn.temperature for turn in trajectory.turns} - {trained}
            if others:
                problem = (
                    f'was sampled at temperature {max(others)}, and is trained at config.{row.role}.temperature='
                    f'{trained}; give none for a row that is trained'
                )
        if problem:
            where = f'rollout {trajectory.identity} of role {row.role}'
            raise UserError(f'recipe {self.config.recipe}: {where} {problem}')

    async def _episode(self, context: RolloutContext, step: Step, task: Task) -> Outcome:
        """Returns the outcome of one task, with the rows of judges; a `TaskDropped` becomes an outcome with its reason.

        Raises:
          UserError: one of its rows cannot be trained (`_check_row`).
        """
        judgements_of_episode.set([])
        try:
            outcome = await context.episodes.recipe.episode(context, step, task)
        except TaskDropped as drop:
            # Which judgements had ended, where others were still asked for, depends on the clock.
            judgements_of_episode.set([])
            outcome = Outcome(drop=drop.reason)
        if not isinstance(outcome, Outcome):
            raise UserError(
                f'recipe {self.config.recipe}: episode returned a {type(outcome).__name__}; return an Outcome'
            )
        outcome.rows = [*outcome.rows, *self._judge_rows(context, task)]
        if not outcome.rows and not outcome.questions:
            # Counted and logged, or a recipe that reads nothing in its rollouts would lose them without a trace.
            outcome.drop = outcome.drop or NO_ROLLOUT
        for row in outcome.rows:
            self._check_row(context.episodes, step, row)
        return outcome

    def _judge_rows(self, context: RolloutContext, task: Task) -> list[Row]:
        """Returns the replies of roles that judged in the episode of a task as rows, with `Recipe.judge_reward`."""
        rows = []
        # In the order of their identities; that in which they ended depends on the clock.
        judgements = judgements_of_episode.get()
        for judgement in sorted(judgements, key=lambda each: (each.identity, each.role)):
            # Several judgements of a task are several groups.
            group = int(identity_key(0, judgement.identity).view(np.int64)[0])
            for number, rollout in enumerate(judgement.rollouts):
                reward = context.episodes.recipe.judge_reward(task, judgement, number)
                info = RowInfo(details={'verdict': judgement.verdicts[number]})
                rows.append(Row(judgement.role, rollout, reward, group, info=info))
        return rows

    def _missing_groups(self, step: Step, rows: Sequence[Row]) -> int:
        """Returns how many groups the batch lacks: the largest number over the roles with tasks; 0 without one."""
        # The maximum and not the sum is taken, because one task can yield a group of each role (SSP).
        roles = self.recipe.roles_with_tasks(step.phase)
        missing = [self.filter.missing_groups(role, rows) for role in roles]
        return max(missing, default=0)

    def state(self) -> Json:
        """Returns the JSON part of a checkpoint: positions, and the step in progress."""
        state = {
            'external_items': self.external_items,
            'drawn': [self.drawn, self.drawn_external],
        }
        if self.ahead is not None:
            state['ahead'] = self.ahead.episodes.state()
        return state

    def restore(self, state: Json) -> None:
        """Inverse of `state`; the episodes of the step that was in progress begin again with the step."""
        self.external_items = state['external_items']
        self.drawn, self.drawn_external = state['drawn']
        if self.ahead is not None:
            self.weights.release(self.ahead.episodes.versions)
        self.ahead = None
        if 'ahead' in state:
            episodes = Episodes.of_state(state['ahead'])
            self.weights.pin(episodes.versions)
            self.ahead = self.context.bound(episodes)
