"""Metrics of a step that are not sums over its rows: time by cause, throughput, memory, age, agreement of log-probs."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zeroplay_jax.learner.batch import Batch
from zeroplay_jax.objectives.types import Stats
from zeroplay_jax.policy import transformer
from zeroplay_jax.policy.transformer import ModelConfig
from zeroplay_jax.runtime import devices
from zeroplay_jax.runtime.hosts import Hosts, sums
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.types import Row, Trajectory


class StepClock:
    """Divides the wall time of this process in a step by cause; begins to count when it is made.

    The causes exclude each other: the time of a part, 'rollout' or 'update', is without the waits in it. 'tools' is the
    time in which no rollout decoded, because all of them waited for tools or judges. 'exchange' is that of exchanges
    between processes, in which a process also waits for slower ones.

    Attributes:
      seconds: cause → seconds of the parts that have ended.
      rollout_seconds: wall time of the part 'rollout' with the waits in it; 0 before it has ended.
    """

    def __init__(self, context: RolloutContext):
        self._context = context
        self.seconds: dict[str, float] = {}
        self._part_started = time.perf_counter()
        self._waits_before = self._waits()
        self.rollout_seconds = 0.0

    def _waits(self) -> dict[str, float]:
        """Returns the seconds of waits by cause, since the start of the process."""
        stats = self._context.scheduler.stats
        waits = {'tools': float(stats['tool_wait_seconds'])}
        if self._context.hosts.count > 1:
            waits['exchange'] = self._context.hosts.seconds + float(stats['peer_wait_seconds'])
        return waits

    def end_part(self, name: str) -> None:
        """Ends a part of the step, which is what follows the last call."""
        now = time.perf_counter()
        waits = self._waits()
        part_seconds = now - self._part_started
        if name == 'rollout':
            self.rollout_seconds = part_seconds
        for cause, seconds in waits.items():
            waited = seconds - self._waits_before[cause]
            self.seconds[cause] = self.seconds.get(cause, 0.0) + waited
            part_seconds -= waited
        self.seconds[name] = max(part_seconds, 0.0)
        self._part_started = now
        self._waits_before = waits

    def metrics(self) -> dict[str, float]:
        """Returns 'seconds/<cause>' for all causes."""
        return {f'seconds/{cause}': seconds for cause, seconds in self.seconds.items()}


def staleness(
    step: Step, rows: Sequence[Row], weights_of: Mapping[str, str], versions: Mapping[str, int]
) -> tuple[float, float]:
    """Returns sum and count of the training steps between the weights that sampled a row and those it updates.

    Args:
      step: the step, which trains roles.
      rows: its rows.
      weights_of: trained role → name of its weights.
      versions: name of weights → newest version, before the updates of the step.
    """
    total = 0.0
    count = 0
    for role in step.phase.trains:
        weights = weights_of[role]
        # Roles of the same weights update them one after the other in every step (SSP).
        updates = [weights_of[other] for other in step.phase.trains].count(weights)
        for row in rows:
            if row.role == role:
                total += (versions[weights] - row.trajectory.version) / updates
                count += 1
    return total, count


def throughput(
    context: RolloutContext, before: collections.Counter[str], rollouts: int, seconds: float
) -> dict[str, float]:
    """Returns the throughput of all processes since `before`, and the time of this process's tool calls.

    All processes must call it.

    Args:
      before: a copy of `Scheduler.stats`.
      rollouts: rollouts of the step, whenever they began.
      seconds: wall time since `before`.
    """
    scheduler = context.scheduler
    counters = ('generated_tokens', 'evictions', 'refilled_tokens')
    local = {
        'rollouts': rollouts,
        'scored_texts': context.episodes.scored_texts,
        'scored_tokens': context.episodes.scored_tokens,
        'replays': context.episodes.replays,
    }
    for name in counters:
        local[name] = scheduler.stats[name] - before[name]
    total = sums(context.hosts.gather(local))
    metrics = {
        # Counts proposals, attempts, checks and judgements alike: all of them are a cost of the step.
        'rollouts': float(total['rollouts']),
        'tokens_per_second': total['generated_tokens'] / max(seconds, 1e-9),
    }
    if total['scored_tokens']:
        metrics |= {name: float(total[name]) for name in ('scored_texts', 'scored_tokens')}
    if total['replays']:
        metrics['replayed_rollouts'] = float(total['replays'])
    # Wherever there are fewer pages than the slots can fill, whether a rollout was evicted or not.
    configs = [pool.sampler.config for pool in scheduler.pools.values()]
    if any(config.page_count < config.slots * config.pages_per_slot for config in configs):
        metrics |= {name: float(total[name]) for name in counters[1:]}
    # These are of this process only: percentiles of several processes cannot be merged.
    # A copy: tools of a step that was begun early are still running.
    for tool, tool_seconds in list(scheduler.workers.seconds.items()):
        metrics[f'tool_seconds/{tool}/p50'] = float(np.percentile(tool_seconds, 50))
        metrics[f'tool_seconds/{tool}/p95'] = float(np.percentile(tool_seconds, 95))
    return metrics | devices.memory()


def sampler_gap(batches: Sequence[Batch], hosts: Hosts) -> Stats:
    """Returns 'sampler_gap' of batches with recomputed log-probs; all processes must call it.

    Args:
      batches: micro-batches of one minibatch, from `Learner.recompute_old_logp`.

    Returns:
      Sum and count of |π_trainer − π_sampler| over the trained tokens; {} without any.
    """
    local = {'gap': 0.0, 'tokens': 0.0}
    for batch in batches:
        mask = np.asarray(batch.mask)
        gap = np.exp(batch.old_logp) - np.exp(batch.sampler_logp)
        local['gap'] += float(np.abs(gap[mask]).sum())
        local['tokens'] += float(mask.sum())
    total = sums(hosts.gather(local))
    if not total['tokens']:
        return {}
    return {'sampler_gap': (total['gap'], total['tokens'])}


def operations(model: ModelConfig, rows: Sequence[Row], is_frozen: bool) -> float:
    """Returns the model's operations of an update on these rows, of all processes: forward and backward.

    Neither recomputation (`policy.remat`) nor teacher or reference are counted.

    Args:
      is_frozen: whether the update trains adapters of a frozen base.
    """
    return _over_contexts(
        rows,
        lambda row, context: transformer.update_operations(
            model, len(context.tokens), context.policy_tokens, is_frozen
        ),
    )


def teacher_operations(model: ModelConfig, rows: Sequence[Row]) -> float:
    """Returns the operations of the teacher's forward pass over the distilled rows of an update (π-Play, table 10)."""

    def of_context(row, context):
        tokens = len(context.tokens) + row.teacher_tokens - row.trajectory.prompt_tokens
        return transformer.forward_operations(model, tokens, context.policy_tokens)

    return _over_contexts([row for row in rows if row.teacher_prompt is not None], of_context)


def value_operations(model: ModelConfig, rows: Sequence[Row]) -> float:
    """Returns the operations of a value network of this shape on these rows: values, and one update."""
    # An update has three passes, the values a fourth; there are no logits.
    return _over_contexts(
        rows,
        lambda row, context: (
            4 / 3 * transformer.update_operations(model, len(context.tokens), logits=0)
        ),
    )


def _over_contexts(rows: Sequence[Row], operations_of: Callable[[Row, Trajectory], float]) -> float:
    """Returns the sum over the contexts of all rollouts."""
    total = 0.0
    for row in rows:
        for context in row.trajectory.contexts:
            total += operations_of(row, context)
    return total


def utilisation(update_operations: float, seconds: float) -> dict[str, float]:
    """Returns the metric 'mfu': operations of updates over those of all devices at their peak in bfloat16.

    {} if the peak of the devices is unknown.

    Args:
      update_operations: `operations` of all updates.
      seconds: wall time of the updates.
    """
    peak = devices.peak_operations()
    if peak is None or seconds <= 0:
        return {}
    return {'mfu': update_operations / (peak * seconds)}
