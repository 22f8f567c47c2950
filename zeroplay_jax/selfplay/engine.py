"""Runs a recipe: many episodes at once, then one update per trained role. It knows no paper's method.

tasks → episodes over the slots → rows → groups with reward variance → advantages → packed batches → update → publish
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.objectives import schedules
from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.runtime.hosts import sums
from zeroplay_jax.selfplay.batch_filter import GroupFilter
from zeroplay_jax.selfplay.learning_record import LearningRecord, empty_step_reasons, teaches
from zeroplay_jax.selfplay.proposal_record import ProposalRecord
from zeroplay_jax.selfplay.recipe import Recipe, RoleSpec
from zeroplay_jax.selfplay.roles import RolloutContext
from zeroplay_jax.selfplay.row_metrics import (
    Stats,
    invalid_reason,
    rollout_stats,
)
from zeroplay_jax.selfplay.schedule import BatchCursor, Step
from zeroplay_jax.selfplay.task_log import filtered_groups_log, task_log
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.selfplay.update_batch import pack_rows, set_advantages
from zeroplay_jax.types import Batch, Json, Outcome, Row, Task, TaskDropped, UserError

# Generation phases assign no rewards: these two metrics would show zeros there.
_REWARD_METRICS = ('reward_mean', 'informative_share')


def _no_failures() -> dict[str, float]:
    return {}


class Engine:
    """Rollout context, learners and question pool of a run.

    Args:
      config: the run's.   recipe: what is run.   context: roles and scheduler.
      learners: by the name of the weights.
      weights_of: trained role → name of its weights.
      specs: role → its specification, for trained roles.
      check_failures: called before a batch is trained on; returns numbers for the log, or raises to
        stop the run.
    """

    def __init__(
        self,
        config,
        recipe: Recipe,
        context: RolloutContext,
        learners: dict[str, Learner],
        weights_of: dict[str, str],
        specs: dict[str, RoleSpec],
        check_failures: Callable[[], dict[str, float]] = _no_failures,
    ):
        self.config = config
        self.recipe = recipe
        self.context = context
        self.learners = learners
        self.weights_of = weights_of
        self.specs = specs
        self.check_failures = check_failures
        self.pool = TaskPool()
        # How often the weights of each name were published, which is the age of a rollout.
        self.versions: collections.Counter[str] = collections.Counter()
        # Items with a question or answer that was supplied from outside the run.
        self.external_items = 0
        # Items drawn in this phase, and the external ones among them: where the datasets continue.
        self.drawn = 0
        self.drawn_external = 0
        # Records of the last step for tasks.jsonl.
        self.task_log: list[Json] = []
        self.filter = GroupFilter(config)
        self.learning = LearningRecord()
        self.proposals = ProposalRecord()
        for name in learners:
            self.publish_weights(name)

    @property
    def scheduler(self) -> Scheduler:
        """Where rollouts run."""
        return self.context.scheduler

    def publish_weights(self, weights: str) -> None:
        """Copies a learner's weights to the sampler, in the sampler's layout and dtype."""
        published = self.learners[weights].published()
        self.scheduler.publish_weights(weights, published, self.versions[weights])

    # ---- one step ----------------------------------------------------------------------------------

    def run_step(
        self, step: Step, on_episode_end: Callable[[], None]
    ) -> tuple[dict[str, float], list[Row]]:
        """Collects rollouts and updates the trained roles; returns metrics and rows of the step."""
        started = time.perf_counter()
        # Scheduler and judge count over the whole process, so a step's share is a difference.
        scheduler_before = collections.Counter(self.scheduler.stats)
        judge_before = collections.Counter(self.context.judge_stats)
        self.scheduler.workers.seconds.clear()
        late_rows = self._begin_phase(step)
        self.context.hosts.clear_shared()

        tasks, outcomes = self._collect(step, on_episode_end)
        # Both checks can stop the run. They come before the update, so that a checkpoint never holds
        # weights that were trained on failed searches or missing verdicts.
        failure_metrics = dict(sums(self._on_all_hosts(self.check_failures)))
        judge_stats = self.context.gather_judge_stats(judge_before)
        rows: list[Row] = []
        for outcome in outcomes:
            rows += outcome.rows
        # Over everything that was sampled: the filter selects the trained rows only later.
        stats = rollout_stats(rows, outcomes)
        collected = time.perf_counter()

        self.task_log = task_log(tasks, outcomes, self._fill_pool(outcomes))
        surplus_groups = {row.group for row in late_rows}
        self.task_log += filtered_groups_log(late_rows, surplus_groups)
        self.proposals.add(tasks, outcomes)
        if step.phase.trains:
            stats |= self._update_roles(step, rows, outcomes)
        else:
            for name in _REWARD_METRICS:
                stats.pop(name, None)
            pool_size = len(self.pool.questions)
            self.learning.add_rollout_step(step, outcomes, pool_size, self.pool.drops)
        stats |= self._pool_stats(outcomes)
        for name, count in judge_stats.items():
            stats[f'judge/{name}'] = (count, 1)

        metrics = _ratios(stats)
        metrics |= failure_metrics
        metrics |= self._rollout_metrics(scheduler_before, collected - started)
        metrics['seconds/rollout'] = collected - started
        metrics['seconds/update'] = time.perf_counter() - collected
        return metrics, rows

    def _begin_phase(self, step: Step) -> list[Row]:
        """Resets what belongs to a phase; returns carried-over rows that are too late for it."""
        late_rows: list[Row] = []
        if step.index == 0:
            late_rows = self.filter.discard_carried_over()
            self.drawn = 0
            self.drawn_external = 0
        period = step.phase.clears_pool
        # `index` is the number of steps before this one. SSP's code tests a counter that is already
        # incremented, which makes its first window one step short.
        if period and (step.index == 0 or schedules.closes_window(step.index, period)):
            self.pool.clear()
        return late_rows

    def _on_all_hosts(self, call: Callable[[], Any]) -> list[Any]:
        # An error on one process is raised on all of them: none waits for a dead one.
        return self.context.hosts.run_on_all_and_gather(call)

    def _fill_pool(self, outcomes: Sequence[Outcome]) -> list[list[str | None]]:
        """Adds the questions of a step to the pool; returns why each was refused, or None."""
        refusals = []
        for outcome in outcomes:
            if outcome.drop:
                self.pool.drop(outcome.drop)
            refusals.append(list(map(self.pool.add, outcome.questions)))
        return refusals

    def _pool_stats(self, outcomes: Sequence[Outcome]) -> Stats:
        """Size of the pool; in steps that fill it also the drops since it was last cleared."""
        stats: Stats = {}
        fills_pool = any(outcome.questions or outcome.drop for outcome in outcomes)
        if fills_pool:
            for reason, count in self.pool.drops.items():
                stats[f'drop/{reason}'] = (count, 1)
        stats['pool_size'] = (len(self.pool.questions), 1)
        return stats

    def _update_roles(self, step: Step, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> Stats:
        stats: Stats = {}
        has_learnt: dict[str, bool] = {}
        # Policies with an update that was skipped because its gradient was not finite.
        nonfinite: set[str] = set()
        # The order matters with shared weights (SSP): the second role is updated from weights that
        # the first one has just changed.
        for role in step.phase.trains:
            role_rows = [row for row in rows if row.role == role]
            role_stats, learnt = self._update_role(step, role, role_rows)
            weights = self.weights_of[role]
            has_learnt[weights] = has_learnt.get(weights, False) or learnt
            # The learner reports a norm of count 0 after a gradient that is not finite, and none
            # after an empty batch.
            _, finite_updates = role_stats.get('gradient_norm', (0.0, 1.0))
            if not learnt and not finite_updates:
                nonfinite.add(weights)
            # With one trained role its metrics need no prefix.
            prefix = f'{role}/' if len(step.phase.trains) > 1 else ''
            for name, value in role_stats.items():
                stats[prefix + name] = value
        reasons = {}
        for policy, learnt in has_learnt.items():
            if not learnt:
                roles = [role for role in step.phase.trains if self.weights_of[role] == policy]
                reasons[policy] = empty_step_reasons(outcomes, roles, policy in nonfinite)
        self.learning.add_training_step(step, has_learnt, reasons)
        return stats

    def _rollout_metrics(
        self, before: collections.Counter[str], seconds: float
    ) -> dict[str, float]:
        """Throughput over all processes, and the time of this process's tool calls."""
        counters = ('rollouts', 'generated_tokens')
        local: dict[str, int] = {}
        for name in counters:
            local[name] = self.scheduler.stats[name] - before[name]
        total = sums(self.context.hosts.gather(local))
        metrics = {
            # Proposals, attempts, checks and judgements alike: the cost of the step.
            'rollouts': float(total['rollouts']),
            'tokens_per_second': total['generated_tokens'] / max(seconds, 1e-9),
        }
        # Not gathered: percentiles of several processes cannot be merged from the percentiles of each.
        for tool, tool_seconds in self.scheduler.workers.seconds.items():
            metrics[f'tool_seconds/{tool}/p50'] = float(np.percentile(tool_seconds, 50))
            metrics[f'tool_seconds/{tool}/p95'] = float(np.percentile(tool_seconds, 95))
        return metrics

    # ---- rollouts ----------------------------------------------------------------------------------

    def _collect(
        self, step: Step, on_episode_end: Callable[[], None]
    ) -> tuple[list[Task], list[Outcome]]:
        """Runs items until the batch is full or the recipe has no more; in the order of issue."""
        all_tasks: list[Task] = []
        all_outcomes: list[Outcome] = []
        all_rows: list[Row] = []
        missing = self._missing_groups(step, all_rows)
        cursor = BatchCursor(self.drawn, missing=missing, external=self.drawn_external)
        # The recipe decides between rounds and not while episodes run: which items follow then
        # depends on completed outcomes only, never on the order in which rollouts finish.
        while tasks := self.recipe.tasks(step, self.pool, cursor):
            external = sum(task.external for task in tasks)
            self.external_items += external
            episodes = {}
            for task in tasks:
                episodes[task.identity] = functools.partial(self._episode, step, task)
            outcomes = self.context.run_episodes(episodes, on_episode_end)
            for outcome in outcomes:
                for row in outcome.rows:
                    self._check_row(row)
                    # Before the batch is counted: rows that cannot be trained on do not fill it.
                    row.drop = row.drop or invalid_reason(row, self.config.rollout.truncated)
                    all_rows.append(row)
            all_outcomes += outcomes
            all_tasks += tasks
            cursor = BatchCursor(
                phase=cursor.phase + len(tasks),
                step=cursor.step + len(tasks),
                round=cursor.round + 1,
                missing=self._missing_groups(step, all_rows),
                external=cursor.external + external,
            )
        self.drawn = cursor.phase
        self.drawn_external = cursor.external
        return all_tasks, all_outcomes

    def _check_row(self, row: Row) -> None:
        """Refuses a row that a recipe made wrongly, when its episode ends."""
        # NumPy's integers are integers, too.
        if not isinstance(row.group, int | np.integer):
            raise UserError(
                f'recipe {self.config.recipe}: a row of role {row.role} has the group {row.group!r}; '
                'give an integer, such as answers.group_of(task.identity)'
            )

    async def _episode(self, step: Step, task: Task) -> Outcome:
        try:
            return await self.recipe.episode(self.context, step, task)
        except TaskDropped as drop:
            return Outcome(drop=drop.reason)

    def _missing_groups(self, step: Step, rows: Sequence[Row]) -> int:
        """Groups that the batch of some trained role still lacks."""
        # The largest lack: one item can yield a group of several roles (SSP).
        missing = [self.filter.missing_groups(role, rows) for role in step.phase.trains]
        return max(missing, default=0)

    # ---- updates -----------------------------------------------------------------------------------

    def _update_role(self, step: Step, role: str, rows: list[Row]) -> tuple[Stats, bool]:
        """Advantages, packing and `minibatches` updates of a role; publishes its new weights.

        Returns:
          Statistics; whether an update had a gradient that teaches (`learning_record.teaches`).
        """
        settings = self.config[role]
        learnt = False
        weights = self.weights_of[role]
        learner = self.learners[weights]
        stats: Stats = {}
        if settings.filter_groups:
            rows, stats, excluded = self.filter.select(role, rows, self.versions[weights])
            self.task_log += excluded
        # Groups that span prompts have no fixed size.
        group_size = None if self.specs[role].groups_span_prompts else settings.samples
        try:
            stats |= set_advantages(rows, settings, group_size)
        except ValueError as error:
            raise UserError(
                f'recipe {self.config.recipe}, role {role}: {error}; a group must have '
                f'config.{role}.samples={settings.samples} rows'
            ) from error
        distill_coef = 0.0
        if settings.distill_top_k:
            # One coefficient per iteration: π-Play lowers it as the student approaches its teacher.
            distill_coef = schedules.alpha_at(settings.distill_coef, step.phase.iteration)
        # Advantages were set over the whole batch above: a group may be cut by a minibatch border.
        parts = []
        batches = []
        for indices in np.array_split(range(len(rows)), settings.minibatches):
            part = [rows[index] for index in indices]
            parts.append(part)
            batches.append(self._pack(role, part, distill_coef))
        with self._offloaded_sampler(weights):
            if settings.old_logp == 'trainer':
                # Before the first update, so that all minibatches share the same old policy.
                batches = [learner.recompute_old_logp(role, batch) for batch in batches]
            for part, batch in zip(parts, batches, strict=True):
                update_stats = learner.update(role, batch, distill_coef)
                stats = _added(stats, update_stats)
                # The learner counts finite gradients only. An empty batch reports no norm at all.
                norm, finite_updates = update_stats.get('gradient_norm', (0.0, 1.0))
                if not finite_updates:
                    self._log_skipped_update(role, part)
                learnt = learnt or (norm > 0 and teaches(part, settings, distill_coef))
            # Once per step, not per minibatch (π-Play eq. 10): the rate 0.05 then means a half-life
            # of about 13.5 steps whatever `minibatches` is.
            learner.update_ema_teacher()
        self.versions[weights] += 1
        self.publish_weights(weights)
        return stats, learnt

    def _log_skipped_update(self, role: str, rows: Sequence[Row]) -> None:
        """Names the rollouts of a skipped update, so that its cause can be found."""
        rollouts = [list(row.trajectory.identity) for row in rows]
        record = {'role': role, 'drop': 'nonfinite_gradient', 'rollouts': rollouts}
        self.task_log.append(record)

    @contextlib.contextmanager
    def _offloaded_sampler(self, weights: str) -> Iterator[None]:
        """With `config.offload`: no sampler weights and KV caches on the devices during an update."""
        pools = self.scheduler.pools
        if self.config.offload:
            for name, pool in pools.items():
                pool.sampler.free_cache()
                if name == weights:
                    # Not worth a copy: they are published anew after the update.
                    pool.params = {}
                else:
                    pool.params = sharding.to_host(pool.params)
        yield
        if self.config.offload:
            for pool in pools.values():
                pool.params = sharding.to_device(pool.params)

    def _pack(self, role: str, rows: Sequence[Row], distill_coef: float) -> list[Batch]:
        """Micro-batches of one optimiser step."""
        settings = self.config[role]
        micro_shape = (self.config.micro.rows, self.config.micro.tokens)
        teacher_tokens = self.config.privileged.tokens if settings.distill_top_k else 0
        return pack_rows(rows, settings, micro_shape, distill_coef, teacher_tokens)

    # ---- what a checkpoint holds -------------------------------------------------------------------

    def device_state(self) -> dict[str, Any]:
        """By weights: parameters, optimiser moments, step count and EMA teacher."""
        state = {}
        for name, learner in self.learners.items():
            state[name] = learner.state
        return state

    def host_state(self) -> Json:
        """JSON: question pool, versions, dataset cursors and carried-over groups."""
        # Random generators are absent on purpose: every draw derives from seed and identity, so a
        # resumed run repeats it from these counters alone.
        return {
            'pool': self.pool.state(),
            'versions': dict(self.versions),
            'external_items': self.external_items,
            'drawn': [self.drawn, self.drawn_external],
            'carried_over': self.filter.state(),
            'learning': self.learning.state(),
            'proposals': self.proposals.state(),
        }

    def restore(self, device_state: dict[str, Any], host_state: Json) -> None:
        """Inverse of `device_state` and `host_state`."""
        for name, learner in self.learners.items():
            learner.restore(device_state[name])
        self.pool.restore(host_state['pool'])
        self.versions.update(host_state['versions'])
        self.external_items = host_state['external_items']
        self.drawn, self.drawn_external = host_state['drawn']
        self.filter.restore(host_state['carried_over'])
        # A checkpoint of an earlier version has no records: their counts then begin at this step.
        self.learning.restore(host_state.get('learning', {}))
        self.proposals.restore(host_state.get('proposals', {}))
        # The constructor published the initial weights; versions must be restored before this.
        for name in self.learners:
            self.publish_weights(name)


def _ratios(stats: Stats) -> dict[str, float]:
    """Sums divided by their counts."""
    ratios = {}
    for name, (total, count) in stats.items():
        # A count of 0 (no search, no valid proposal) gives no metric rather than a misleading 0.
        if count:
            ratios[name] = total / count
    return ratios


def _added(left: Stats, right: Stats) -> Stats:
    """Sums of two sets of statistics."""
    result = dict(left)
    for name, (total, count) in right.items():
        previous_total, previous_count = result.get(name, (0.0, 0.0))
        result[name] = (previous_total + total, previous_count + count)
    return result
