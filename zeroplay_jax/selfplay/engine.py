"""Runs a recipe: many episodes at once, then updates of the trained roles. Contains no code for a specific paper.

tasks → episodes over the slots → rows → advantages → minibatches → packed micro-batches → update → publish

With `filter_groups` only groups whose rewards differ are trained.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zeroplay_jax.learner.checkpoint import VALUE_NETWORK_PREFIX
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.weights import MOMENT
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.hosts import sums
from zeroplay_jax.selfplay import health, step_metrics
from zeroplay_jax.selfplay.collection import Collector, clears_pool
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.groups import GroupFilter
from zeroplay_jax.selfplay.metrics import Stats, ratios, rollout_stats
from zeroplay_jax.selfplay.proposal_record import ProposalRecord
from zeroplay_jax.selfplay.recipe import Recipe, RoleSpec, check_unchanged, state_of
from zeroplay_jax.selfplay.records import LearningRecord, empty_step_reasons
from zeroplay_jax.selfplay.schedule import QuestionPool, Step
from zeroplay_jax.selfplay.task_log import filtered_groups_log, task_log
from zeroplay_jax.selfplay.update import RolePlan, RoleUpdates
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Json, Outcome, Row

if TYPE_CHECKING:
    from zeroplay_jax.learner.value_network import ValueNetwork


@dataclasses.dataclass(eq=False)
class Engine:
    """Rollout context, learners and question pool of a run.

    The constructor publishes the weights of all learners. All processes make the same calls in the same order.

    Attributes:
      config, recipe: config of the run, and its recipe.
      context: roles in training, with their scheduler.
      learners: learners by the name of their weights.
      weights_of: trained role → name of its weights.
      specs: trained role → its specification.
      check_and_reset_failures: called on every process after the rollouts of every step, before an update. Returns
        metrics to be summed over processes, or raises to stop the run.
      value_networks: role → its value network, of roles with `baseline=value`.
    """

    config: Config
    recipe: Recipe
    context: RolloutContext
    learners: dict[str, Learner]
    weights_of: dict[str, str]
    specs: dict[str, RoleSpec]
    check_and_reset_failures: Callable[[], dict[str, float]] = dict
    value_networks: Mapping[str, ValueNetwork] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = QuestionPool()
        # The newest version of weights minus `trajectory.version` is a rollout's age.
        self.weights = self.context.scheduler.weights
        # Records for tasks.jsonl of the last `run_step`, and its updates where config.log.rows has the step.
        self.task_log: list[Json] = []
        self.plans: dict[str, RolePlan] = {}
        self.filter = GroupFilter(self.config)
        self.collector = Collector(self.config, self.recipe, self.context, self.pool, self.filter)
        self.updates = RoleUpdates(
            self.config,
            self.context,
            self.learners,
            self.weights_of,
            self.specs,
            self.filter,
            self.publish,
            self.value_networks,
        )
        self.learning = LearningRecord()
        self.proposals = ProposalRecord()
        # Names of the snapshots that roles sample with.
        names = {role.weights for role in self.context.roles.values()}
        self.snapshots = sorted(name for name in names if MOMENT in name)
        for name in self.learners:
            self.publish(name, version=0)
        self.take_snapshots()

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that runs the rollouts."""
        return self.context.scheduler

    @property
    def external_items(self) -> int:
        """Tasks of the run so far with a question or answer that was supplied from outside it."""
        return self.collector.external_items

    def publish(self, weights: str, version: int | None = None, view: Params | None = None) -> int:
        """Gives the samplers weights of a learner, in their layout and dtype, and returns the version.

        Args:
          weights: name of the weights, or of a snapshot of them.
          version: None: the one after the newest.
          view: a `Learner.view`; None: of the current weights.
        """
        learner = self.learners[weights.partition(MOMENT)[0]]
        # Only snapshots, and a step that is in progress when the checkpoint is saved, need older weights than the
        # learner's.
        is_kept = bool(self.config.rollout.ahead) or MOMENT in weights
        if view is None:
            view = learner.view(is_kept)
        saved_view = view if is_kept else None
        return self.weights.publish(weights, learner.sampler_weights(view), version, saved_view)

    def take_snapshots(self, moment: str = '') -> None:
        """Publishes the current weights as the snapshots of a moment: the number of an iteration, from 1, or 'best'.

        '' publishes all, at the start. All processes must call it while no step is in progress.
        """
        for name in self.snapshots:
            if moment in ('', name.partition(MOMENT)[2]):
                self.publish(name)

    def close(self) -> None:
        """Ends the episodes of a step that was begun early; a checkpoint repeats them."""
        self.collector.cancel()

    def run_step(
        self, step: Step, on_episode_end: Callable[[], None], next_step: Step | None = None
    ) -> tuple[dict[str, float], list[Row]]:
        """Collects rollouts and updates the trained roles; returns metrics and rows of the step.

        Changes the pool, the records, the recipe's state and, for trained roles, weights and versions. All processes
        must call it.

        Args:
          step: the step.
          on_episode_end: called after each episode of this process.
          next_step: what follows in the schedule; with `rollout.ahead` its episodes may begin with those of this step.

        Raises:
          UserError: too many searches, tool calls or judgements failed, or a recipe made an unusable row, or changed
            its state during the rollouts.
        """
        clock = step_metrics.StepClock(self.context)
        # Never reset, so a step's share is a difference.
        scheduler_before = collections.Counter(self.scheduler.stats)
        self.scheduler.workers.seconds.clear()
        self.plans = {}
        discarded = self._prepare_step(step)
        hosts = self.context.hosts
        hosts.clear_shared(keep=step.number if self.collector.has_begun(step) else None)
        context = self.collector.collect(step, next_step, on_episode_end, discarded)
        episodes = context.episodes
        tasks, outcomes, rows = episodes.tasks, episodes.outcomes, episodes.rows
        # Both checks can stop the run. They precede the update, so that no checkpoint has weights that were trained on
        # failed searches, failed tools or missing verdicts.
        check = functools.partial(self._check_rollouts, context)
        failure_metrics = dict(sums(hosts.run_on_all_and_gather(check)))
        judge_stats = context.gather_judge_stats()
        # Computed over all sampled rows; the filter selects the trained ones in `RoleUpdates`.
        stats = rollout_stats(rows, outcomes, step.phase.trains)
        with_tools = {name for name, role in context.roles.items() if role.env.tools}
        stats |= health.health(rows, with_tools, judge_stats)
        if self.config.rollout.ahead and step.phase.trains:
            stats['staleness'] = step_metrics.staleness(
                step, rows, self.weights_of, self.weights.newest
            )
        clock.end_part('rollout')

        self.task_log = task_log(tasks, outcomes, self._fill_pool(outcomes))
        surplus_groups = {row.group for row in discarded}
        self.task_log += filtered_groups_log(discarded, surplus_groups)
        self.proposals.add(tasks, outcomes)
        if step.phase.trains:
            stats |= self._update_roles(step, rows, outcomes)
            for role in step.phase.trains:
                if not self._compares_groups(role):
                    stats.pop(f'{role}/informative_share', None)
        else:
            pool_size = len(self.pool.questions)
            self.learning.add_rollout_step(step, outcomes, pool_size, self.pool.drops)
        self.recipe.after_step(step, outcomes)
        stats |= self._pool_stats(outcomes)
        for name, count in judge_stats.items():
            stats[f'judge/{name}'] = (count, 1)

        figures = ratios(stats)
        figures |= failure_metrics
        figures |= step_metrics.throughput(
            context, scheduler_before, episodes.rollouts, clock.rollout_seconds
        )
        clock.end_part('update')
        figures |= clock.metrics()
        if step.phase.trains:
            figures |= step_metrics.utilisation(self.updates.operations, clock.seconds['update'])
        return figures, rows

    def _check_rollouts(self, context: RolloutContext) -> dict[str, float]:
        """Returns what `check_and_reset_failures` does, and raises if the recipe changed its state meanwhile."""
        episodes = context.episodes
        check_unchanged(episodes.recipe, episodes.recipe_state)
        return self.check_and_reset_failures()

    def _prepare_step(self, step: Step) -> list[Row]:
        """Resets dataset positions at the first step of a phase, and clears the question pool if that is due.

        Returns the carried-over rows of the filter that the first step of a phase discards; [] in other steps.
        """
        discarded_rows: list[Row] = []
        if step.index == 0:
            discarded_rows = self.filter.discard_carried_over()
            self.collector.begin_phase()
        if clears_pool(step):
            self.pool.clear()
        return discarded_rows

    def _compares_groups(self, role: str) -> bool:
        """Returns whether the rollouts of a group are compared with each other: not by a value network alone."""
        return role not in self.value_networks or self.config[role].filter_groups

    def _fill_pool(self, outcomes: Sequence[Outcome]) -> list[list[str | None]]:
        """Adds the questions of a step to the pool, and counts dropped items there.

        Returns per outcome and question why the pool refused it, or None.
        """
        refusals = []
        for outcome in outcomes:
            if outcome.drop:
                self.pool.drop(outcome.drop)
            refusals.append(list(map(self.pool.add, outcome.questions)))
        return refusals

    def _pool_stats(self, outcomes: Sequence[Outcome]) -> Stats:
        """Returns the size of the pool and, in steps that fill it, the drops since it was last cleared."""
        stats: Stats = {}
        fills_pool = any(outcome.questions or outcome.drop for outcome in outcomes)
        if fills_pool:
            for reason, count in self.pool.drops.items():
                stats[f'drop/{reason}'] = (count, 1)
        stats['pool_size'] = (len(self.pool.questions), 1)
        return stats

    def _update_roles(self, step: Step, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> Stats:
        """Updates all roles that the step trains and records what they learnt; returns statistics."""
        stats: Stats = {}
        has_learnt: dict[str, bool] = {}
        # Names of weights with an update that was skipped because its gradient was not finite.
        nonfinite = set()
        with signals.completing(f'this update of {", ".join(step.phase.trains)}'):
            plans = self.updates.run(step, rows)
        self.task_log += self.updates.task_log
        if step.number in self.config.log.rows:
            self.plans = plans
        for role in step.phase.trains:
            role_stats, learnt = plans[role].stats, plans[role].learnt
            weights = self.weights_of[role]
            has_learnt[weights] = has_learnt.get(weights, False) or learnt
            # The learner reports a norm of count 0 after a gradient that is not finite, and none
            # after an empty batch.
            _, finite_updates = role_stats.get('gradient_norm', (0.0, 1.0))
            if not learnt and not finite_updates:
                nonfinite.add(weights)
            for name, value in role_stats.items():
                stats[f'{role}/{name}'] = value
        reasons = {}
        untrained = [policy for policy, learnt in has_learnt.items() if not learnt]
        for policy in untrained:
            roles = [role for role in step.phase.trains if self.weights_of[role] == policy]
            reasons[policy] = empty_step_reasons(outcomes, roles, policy in nonfinite)
        # A judge whose replies agree learns nothing, and does not stop the run.
        counted = {self.weights_of[role] for role in self.recipe.roles_with_tasks(step.phase)}
        has_learnt = {
            name: learnt for name, learnt in has_learnt.items() if learnt or name in counted
        }
        self.learning.add_training_step(step, has_learnt, reasons)
        return stats

    def device_state(self) -> dict[str, Any]:
        """The arrays of a checkpoint: `Learner.state` by name of the weights, `ValueNetwork.state` by prefix and role.

        With `rollout.ahead` also 'ahead', the weights of the next step's rollouts, whether it has begun or not.
        Snapshots are with the weights that they are of, under their name.
        """
        states = {}
        for name, learner in self.learners.items():
            states[name] = learner.state
            if self.config.rollout.ahead:
                version = self.collector.versions_ahead.get(name, self.weights.newest[name])
                states[name] = learner.state | {'ahead': self.weights.views[name, version]}
        for name in self.snapshots:
            view = self.weights.views[name, self.weights.newest[name]]
            source = name.partition(MOMENT)[0]
            states[source] = states[source] | {name: view}
        for role, network in self.value_networks.items():
            states[VALUE_NETWORK_PREFIX + role] = network.state
        return states

    def host_state(self) -> Json:
        """The JSON part of a checkpoint: pool, versions, positions in the datasets, step in progress, records, external
        items, carried-over groups, state of the recipe. All processes return the same."""
        # No state of random generators is needed: every draw derives from the seed and the identity of what is drawn.
        # A resumed run repeats it from these counters.
        return {
            'pool': self.pool.state(),
            'versions': {
                name: self.weights.newest[name] for name in (*self.learners, *self.snapshots)
            },
            'carried_over': self.filter.state(),
            'learning': self.learning.state(),
            'proposals': self.proposals.state(),
            'recipe': state_of(self.recipe),
            **self.collector.state(),
        }

    def restore(self, device_state: dict[str, Any], host_state: Json) -> None:
        """Sets the state that `device_state` and `host_state` returned, and publishes all weights.

        Episodes in progress are ended.
        """
        self.close()
        views: dict[str, Params] = {}
        for name, learner in self.learners.items():
            learner_state = dict(device_state[name])
            if 'ahead' in learner_state:
                views[name] = learner.place_view(learner_state.pop('ahead'))
            for snapshot in self.snapshots:
                if snapshot in learner_state:
                    views[snapshot] = learner.place_view(learner_state.pop(snapshot))
            learner.restore(learner_state)
        for role, network in self.value_networks.items():
            network.restore(device_state[VALUE_NETWORK_PREFIX + role])
        self.pool.restore(host_state['pool'])
        self.collector.restore(host_state)
        self.filter.restore(host_state['carried_over'])
        self.learning.restore(host_state['learning'])
        self.proposals.restore(host_state['proposals'])
        if host_state['recipe'] is not None:
            self.recipe.restore(host_state['recipe'])
        # The constructor published the initial weights.
        for name in self.learners:
            newest = host_state['versions'].get(name, 0)
            version = self.collector.versions_ahead.get(name, newest)
            if version != newest:
                self.publish(name, version, views[name])
            self.publish(name, newest)
        for name in self.snapshots:
            self.publish(name, host_state['versions'][name], views[name])
