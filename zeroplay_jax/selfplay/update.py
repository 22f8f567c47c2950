"""The updates of the trained roles of a step: minibatches of rows, each an optimiser step; weights are published."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from zeroplay_jax.learner.batch import Batch, pack
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.weights_view import weights_are_finite
from zeroplay_jax.objectives import advantages, aggregation, rewards
from zeroplay_jax.objectives.types import Stats
from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout.weights import WeightStore
from zeroplay_jax.selfplay import step_metrics
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.groups import GroupFilter, set_advantages
from zeroplay_jax.selfplay.metrics import added
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.records import teaches
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.selfplay.task_log import skipped_update_log
from zeroplay_jax.types import Json, Row, UserError, identity_rng

if TYPE_CHECKING:
    from zeroplay_jax.learner.value_network import ValueNetwork


@dataclasses.dataclass
class RolePlan:
    """The updates of one role in one step.

    Attributes:
      role: the role.
      settings: `config.<role>`.
      minibatches: rows of every update, with advantages.
      distill_coef: weight of the distillation term.
      stats: statistics of the rows and, after `add`, of the updates.
      has_token_advantages: whether a value network gave a trained token an advantage other than 0.
      learnt: whether an update had a gradient that teaches (`records.teaches`, or `has_token_advantages`).
      skipped: records for tasks.jsonl of the updates that were skipped.
    """

    role: str
    settings: Any
    minibatches: list[list[Row]]
    distill_coef: float
    stats: Stats
    has_token_advantages: bool = False
    learnt: bool = False
    skipped: list[Json] = dataclasses.field(default_factory=list)

    def add(self, number: int, update_stats: Stats) -> None:
        """Adds the statistics of the update on the minibatch of this number."""
        rows = self.minibatches[number]
        # Before the first update the ratio compares trainer and sampler; with recomputed log-probs it does not.
        is_first = self.settings.old_logp == 'sampler' and 'sampler_gap' not in self.stats
        if is_first and 'prob_gap' in update_stats:
            self.stats['sampler_gap'] = update_stats['prob_gap']
        # The learner counts finite gradients only. An empty batch reports no norm at all.
        norm, finite_updates = update_stats.get('gradient_norm', (0.0, 1.0))
        if not finite_updates:
            self.skipped.append(skipped_update_log(self.role, rows))
        skipped = (float(not finite_updates), 1.0)
        self.stats = added(self.stats, update_stats | {'nonfinite_updates': skipped})
        is_taught = self.has_token_advantages or teaches(rows, self.settings, self.distill_coef)
        self.learnt = self.learnt or (norm > 0 and is_taught)


@dataclasses.dataclass(eq=False)
class RoleUpdates:
    """Makes the updates of all roles that a step trains.

    Attributes:
      config, context, learners, weights_of, specs: as of `engine.Engine`.
      filter: the dynamic filter.
      publish: gives the samplers the current weights of a name, and returns their version.
      value_networks: role → its value network, of roles with `baseline=value`.
      operations: of the updates of the last step (`step_metrics.operations`).
      task_log: records for tasks.jsonl of the last step.
    """

    config: Any
    context: RolloutContext
    learners: Mapping[str, Learner]
    weights_of: Mapping[str, str]
    specs: Mapping[str, RoleSpec]
    filter: GroupFilter
    publish: Callable[[str], int]
    value_networks: Mapping[str, ValueNetwork]
    operations: float = 0.0
    task_log: list[Json] = dataclasses.field(default_factory=list)

    def run(self, step: Step, rows: Sequence[Row]) -> dict[str, RolePlan]:
        """Updates the roles of a step, publishes their weights, and returns by role what was done.

        Args:
          step: the step.
          rows: all rows of the step.
        """
        self.operations = 0.0
        self.task_log = []
        plans: dict[str, RolePlan] = {}
        # The order matters with shared weights (SSP): the second role is updated from weights that
        # the first one has just changed.
        for role in step.phase.trains:
            role_rows = [row for row in rows if row.role == role]
            plans[role] = self._update_role(step, role, role_rows)
        return plans

    def _plan(self, step: Step, role: str, rows: list[Row]) -> RolePlan:
        """Computes advantages and divides the rows into `minibatches` updates.

        With `filter_groups` the filter selects the rows; groups that it excludes are added to `task_log`.

        Args:
          rows: all rows of the role in this step; their advantages are set in place.
        """
        settings = self.config[role]
        stats: Stats = {}
        if settings.filter_groups:
            newest = self._store.newest[self.weights_of[role]]
            rows, stats, excluded = self.filter.select(role, rows, newest)
            self.task_log += excluded
        # Groups that span prompts have no fixed size.
        spans_prompts = self.specs[role].groups_span_prompts
        group_size = None if spans_prompts else settings.samples
        groups = np.array([row.group for row in rows], np.int64)
        try:
            advantages.check_group_sizes(groups, group_size)
        except ValueError as error:
            raise UserError(
                f'recipe {self.config.recipe}, role {role}: {error}; a group must have '
                f'config.{role}.samples={settings.samples} rows'
            ) from error
        stats |= set_advantages(rows, settings)
        distill_coef = 0.0
        if settings.distill_top_k:
            # One coefficient per iteration: π-Play lowers it as the student approaches its teacher.
            distill_coef = rewards.alpha_at(settings.distill_coef, step.phase.iteration)
        # Advantages were set over the whole batch above, because HRPO's groups extend over all minibatches.
        rng = identity_rng(self.config.seed, -1, step.number, *role.encode())
        minibatches = split_minibatches(rows, settings.minibatches, rng, spans_prompts)
        return RolePlan(role, settings, minibatches, distill_coef, stats)

    def _count_operations(self, plan: RolePlan, learner: Learner) -> None:
        """Adds the operations of the updates of a role, and the share of its teacher."""
        for part in plan.minibatches:
            rows = trained_rows(part, plan.settings, plan.distill_coef)
            update = step_metrics.operations(learner.model, rows, learner.base is not None)
            self.operations += update
            if plan.distill_coef:
                # The pass is in one program with the update, so that its time cannot be measured apart.
                teacher = step_metrics.teacher_operations(learner.model, rows)
                plan.stats = added(plan.stats, {'teacher_share': (teacher, teacher + update)})
            if plan.role in self.value_networks:
                self.operations += step_metrics.value_operations(learner.model, rows)

    def _update_role(self, step: Step, role: str, rows: list[Row]) -> RolePlan:
        """Makes the updates of a role and publishes its weights; `rows` as of `_plan`."""
        plan = self._plan(step, role, rows)
        settings = plan.settings
        weights = self.weights_of[role]
        learner = self.learners[weights]
        self._count_operations(plan, learner)
        minibatches = [self.batches(role, part, plan.distill_coef) for part in plan.minibatches]
        with self._offloaded_sampler([weights]):
            if settings.old_logp == 'trainer':
                # Computed before the first update, so that all minibatches share the same old policy.
                minibatches = [learner.recompute_old_logp(role, packed) for packed in minibatches]
                plan.stats |= step_metrics.sampler_gap(minibatches[0], self.context.hosts)
            network = self.value_networks.get(role)
            if network is None:
                for number, packed in enumerate(minibatches):
                    plan.add(number, learner.update(role, packed, plan.distill_coef))
            else:
                self._update_with_values(plan, learner, network, minibatches)
            # Updated once per step and not per minibatch (π-Play eq. 10): the rate 0.05 is then a half-life
            # of about 13.5 steps for any `minibatches`.
            learner.update_ema_teacher()
        self._publish_update(plan)
        return plan

    def _update_with_values(
        self,
        plan: RolePlan,
        learner: Learner,
        network: ValueNetwork,
        minibatches: Sequence[Sequence[Batch]],
    ) -> None:
        """Makes the updates of a role and of its value network, which gives every token its advantage."""
        # Before the first update, so that all minibatches are compared with the same values.
        estimate = network.estimate(
            minibatches, self.context.hosts, whitens=plan.settings.scale == 'batch'
        )
        plan.stats |= estimate.stats
        plan.has_token_advantages = estimate.is_informative
        for rows in plan.minibatches:
            for row in rows:
                # Until here the reward, which would be read as the advantage in logs. Dropped rows keep their 0.
                if row.drop is None:
                    row.advantage = None
        parts = zip(estimate.minibatches, estimate.value_minibatches, strict=True)
        for number, (packed, value_batches) in enumerate(parts):
            plan.add(number, learner.update(plan.role, packed, plan.distill_coef))
            plan.stats = added(plan.stats, network.update(value_batches))

    def _publish_update(self, plan: RolePlan) -> None:
        """Publishes the weights of a role after its updates; adds to statistics and `task_log`."""
        self.task_log += plan.skipped
        weights = self.weights_of[plan.role]
        version = self.publish(weights)
        # The sampler's weights are checked: with `offload` the learner's are not on the devices.
        is_finite = weights_are_finite(self._store.params[weights, version])
        plan.stats['nonfinite_weights'] = (float(not is_finite), 1.0)

    @property
    def _store(self) -> WeightStore:
        return self.context.scheduler.weights

    @contextlib.contextmanager
    def _offloaded_sampler(self, updated: Collection[str]) -> Iterator[None]:
        """With `config.offload`, keeps sampler weights and KV caches off the devices inside the context.

        The weights of `updated` are lost: they must be published afterwards.
        """
        if not self.config.offload:
            yield
            return
        for pool in self.context.scheduler.pools.values():
            pool.sampler.free_cache()
        self._store.leave_devices(updated)
        yield
        self._store.return_to_devices()

    def batches(self, role: str, rows: Sequence[Row], distill_coef: float) -> list[Batch]:
        """Returns the `micro_batches` of one optimiser step; of several processes each gets what its devices hold."""
        settings, micro = self.config[role], self.config.micro
        # Rollouts that go on in another context; of rollout.drop_thinking, which makes them too, the rules know.
        if any(row.trajectory.earlier for row in rows):
            network = self.config.value_network
            problem = ''
            if settings.tis_cap and settings.tis_level == 'sequence':
                problem = f'would get its own weight; set {role}.tis_level to token'
            if settings.baseline == 'value' and network.discount * network.gae_lambda < 1:
                problem = (
                    'ends with its reward; give 1 for discount and gae_lambda of value_network'
                )
            if problem:
                raise UserError(
                    f'config.{role}: a rollout has several contexts, each of which {problem}'
                )
        teacher_tokens = self.config.privileged.tokens if settings.distill_top_k else 0
        shape = (micro.rows, micro.tokens)
        batches = micro_batches(rows, settings, shape, distill_coef, teacher_tokens, micro.order)
        split = sharding.rows(self.learners[self.weights_of[role]].mesh)
        return [sharding.held_rows(batch, split) for batch in batches]


def split_minibatches(
    rows: Sequence[Row], count: int, rng: np.random.Generator, groups_span_prompts: bool = False
) -> list[list[Row]]:
    """Divides the rows of a step at random into the minibatches of its optimiser steps.

    All rollouts of a prompt get into the same minibatch, and the numbers of prompts differ by at most one. Rows keep
    their order within a minibatch; a single minibatch holds the rows as they are.

    Args:
      rows: all rows of one role, with advantages.
      count: number of minibatches.
      rng: source of the permutation; not used for a single minibatch.
      groups_span_prompts: whether `Row.group` combines several prompts (`RoleSpec`).
    """
    if count == 1:
        return [list(rows)]
    # Tasks are issued by hop count, so that minibatches in the order of issue would hold one hop count each, and the
    # last update of every step would always be on the longest questions.
    rows_of_prompt: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        prompt: Any = row.group
        if groups_span_prompts:
            # The task: (step, index within the step).
            prompt = row.trajectory.identity[:2]
        rows_of_prompt.setdefault(prompt, []).append(index)
    prompts = list(rows_of_prompt.values())
    minibatches = []
    for part in np.array_split(rng.permutation(len(prompts)), count):
        indices = []
        for number in part:
            indices += prompts[number]
        minibatches.append([rows[index] for index in sorted(indices)])
    return minibatches


def trained_rows(rows: Sequence[Row], settings: Any, distill_coef: float) -> list[Row]:
    """Returns the rows that an update computes: those that are not dropped and have a gradient.

    Args:
      rows: rows with advantages.
      settings: `config.<role>`.
      distill_coef: weight of the distillation term.
    """
    # Rows of advantage 0 have no policy gradient, but they count in the mean, and KL, entropy
    # and distillation act on them.
    keeps_all = settings.kl_coef or settings.entropy_coef or distill_coef
    # A reward of 0 is informative if more was expected.
    keeps_all = keeps_all or settings.baseline == 'value'
    return [row for row in rows if row.drop is None and (keeps_all or row.is_informative)]


def micro_batches(
    rows: Sequence[Row],
    settings: Any,
    micro_shape: tuple[int, int],
    distill_coef: float = 0.0,
    teacher_tokens: int = 0,
    order: str = 'arrival',
) -> list[Batch]:
    """Returns the micro-batches of one optimiser step on rows with advantages, packed.

    Dropped rows are left out, and rows without any gradient too; those still count in the denominator of the loss.

    Args:
      rows: rows of one role with advantages.
      settings: `config.<role>`.
      micro_shape: (B, L) of a micro-batch.
      distill_coef: weight of the distillation term.
      teacher_tokens: length M of a packed teacher row; 0 without a teacher.
      order: in which rollouts are packed, see `batch.pack`.
    """
    valid = [row for row in rows if row.drop is None]
    # Only policy tokens count: tool output has no loss and must not change a mean over a sequence.
    lengths = np.array([row.trajectory.policy_tokens for row in valid], np.int64)
    # All valid rows of the optimiser step share one denominator. With a mean per micro-batch the weight of
    # a token would depend on the rows that are packed with it.
    if settings.aggregation == 'constant':
        denominator = settings.constant_norm * len(valid)
    else:
        denominator = aggregation.denominator(lengths, settings.aggregation)
    # A row without a teacher prompt (its path was too long) is trained but not distilled.
    distilled_tokens = 0
    for row in valid:
        if row.teacher_tokens:
            distilled_tokens += row.trajectory.policy_tokens
    micro_rows, tokens = micro_shape
    return pack(
        trained_rows(valid, settings, distill_coef),
        micro_rows=micro_rows,
        tokens=tokens,
        mode=settings.aggregation,
        total=denominator,
        teacher_tokens=teacher_tokens,
        teacher_total=float(distilled_tokens),
        order=order,
    )
