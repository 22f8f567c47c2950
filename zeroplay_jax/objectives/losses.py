"""The policy losses by name, and how to add one.

A config names a loss: `config.solver.loss = 'token_pg'`, or 'package.module:function' for a function outside this
project. A new loss is one pure function with the signature of `LossFunction`:

    # my_project/losses.py, selected by config.solver.loss='my_project.losses:unclipped'
    def unclipped(logp, old_logp, advantage, mask, segment, *, clip_low, clip_high, dual_clip):
        mask, logp, old_logp, advantage = masking.masked('unclipped', mask, logp, old_logp, advantage)
        ratio = jnp.exp(masking.log_ratio(logp, jax.lax.stop_gradient(old_logp)))
        return -advantage * ratio, {'ratio': masking.total(ratio, mask)}

The name may also refer to a `PolicyLoss`, which states properties of the loss that the config is checked against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import jax.numpy as jnp

from zeroplay_jax.objectives import masking, policy_gradient
from zeroplay_jax.objectives.registry import (
    BUILT_IN_LOSSES,
    LossProperties,
    resolve,
)
from zeroplay_jax.objectives.types import (
    DevicePerToken,
    DeviceStats,
    PerToken,
    Segments,
    TokenMask,
)


class LossError(ValueError):
    """A loss function returns something else than losses of the tokens and statistics."""


@runtime_checkable
class LossFunction(Protocol):
    """The signature of a policy loss; see the module's docstring for an example."""

    def __call__(
        self,
        logp: PerToken,
        old_logp: PerToken,
        advantage: PerToken,
        mask: TokenMask,
        segment: Segments,
        *,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None,
    ) -> tuple[DevicePerToken, DeviceStats]:
        """Computes the per-token loss of one micro-batch of packed rows; pure and traceable by jax.jit.

        Args:
          logp: float32 [B, T], log-probs of the tokens under the weights being trained; it carries the gradient.
          old_logp: float32 [B, T], log-probs before the first update of a batch, reported by the sampler or computed
            again by the trainer.
          advantage: float32 [B, T].
          mask: bool [B, T], True on tokens to learn from. Values elsewhere are arbitrary and may be NaN.
          segment: int32 [B, T], the rollout of its row that a position belongs to: 1, 2, …; 0 where empty.
          clip_low, clip_high, dual_clip: fields of `config.<role>`; a loss may ignore them.

        Returns:
          token losses: float32 [B, T], to be minimised, not averaged, finite and 0 where masked.
          statistics: name to (sum, count), float32 scalars without gradient (`masking.total`).
        """


@dataclasses.dataclass(frozen=True)
class PolicyLoss(LossProperties):
    """A loss function with its properties; callable with the signature of `LossFunction`.

    Attributes:
      function: computes the per-token loss.
      batch_means: means over the batch of an optimiser step that the loss reads: a function (logp, old_logp, advantage,
        mask, segment) → {name: (values, weights)}, all [B, T], a mean being Σ values / Σ weights over the trained
        tokens of all micro-batches and processes. They are computed in a pass before, have no gradient, and are
        passed as `means`, name → [B, T], the same number at every token.
      rollout_values: of a loss with a ratio per rollout: a function (logp, old_logp, advantage, *, clip_low, clip_high)
        → [B, T], of which the loss reads the mean over the trained tokens of a whole rollout. A rollout with several
        contexts (`rollout.drop_thinking`, a folded one) has segments in several rows; its mean is computed in a pass
        before, has no gradient, and is passed as `means['rollout']`: NaN at tokens whose rollout is one segment. None:
        such rollouts are refused.
    """

    function: LossFunction
    batch_means: Callable | None = None
    rollout_values: Callable | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.ratio_per_token and self.rollout_values:
            raise ValueError(
                'a loss with a ratio per token reads no mean over a rollout; set ratio_per_token=False, or leave out '
                'rollout_values'
            )

    def __call__(
        self,
        logp: PerToken,
        old_logp: PerToken,
        advantage: PerToken,
        mask: TokenMask,
        segment: Segments,
        *,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None,
        means: Mapping[str, PerToken] | None = None,
    ) -> tuple[DevicePerToken, DeviceStats]:
        """Calls the function and checks its results.

        Raises:
          LossError: the function does not return losses [B, T] and statistics.
        """
        # Every loss takes all options, also those that it ignores, so that callers need not know the loss.
        name = getattr(self.function, '__name__', repr(self.function))
        declared = {'means': means} if self.batch_means or self.rollout_values else {}
        try:
            result = self.function(
                logp,
                old_logp,
                advantage,
                mask,
                segment,
                clip_low=clip_low,
                clip_high=clip_high,
                dual_clip=dual_clip,
                **declared,
            )
        except Exception as error:
            # Added to the error, so that its traceback still ends in the line of the function.
            module = getattr(self.function, '__module__', '')
            error.add_note(
                f'config.<role>.loss={module}:{name}: raised this error; correct it there'
            )
            raise
        # Shapes and names are static under jit: the checks run once, when the update is traced.
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        if not is_pair:
            fix = 'return (losses of the tokens, {name: (sum, count)})'
            raise LossError(f'loss {name}: returned a {type(result).__name__}; {fix}')
        token_losses, stats = result
        for statistic, value in stats.items():
            if not isinstance(value, tuple) or len(value) != 2:
                fix = 'return (sum, count), as masking.total does'
                raise LossError(f'loss {name}: statistic {statistic!r} is a single value; {fix}')
        if token_losses.shape != logp.shape:
            raise LossError(
                f'loss {name}: returned shape {token_losses.shape} for tokens {logp.shape}; return one value per token'
            )
        # A copy: the caller adds statistics of its own.
        return token_losses, dict(stats)

    def batch_sums(
        self,
        logp: PerToken,
        old_logp: PerToken,
        advantage: PerToken,
        mask: TokenMask,
        segment: Segments,
    ) -> DeviceStats:
        """Returns name → (Σ values, Σ weights) of the declared means, over the trained tokens of one micro-batch.

        Raises:
          LossError: `batch_means` returns something else than pairs of arrays [B, T] by name.
        """
        assert self.batch_means is not None
        pairs = self.batch_means(logp, old_logp, advantage, mask, segment)
        sums = {}
        # The name 'rollout' is that of `rollout_values`.
        is_right = isinstance(pairs, Mapping) and 'rollout' not in pairs
        for key, pair in pairs.items() if is_right else ():
            shapes = [jnp.shape(x) for x in pair] if isinstance(pair, tuple) else []
            is_right = is_right and shapes == [logp.shape] * 2
            if is_right:
                values, weights = (masking.total(x, mask)[0] for x in pair)
                sums[key] = (values, weights)
        if not is_right:
            name = getattr(self.function, '__name__', repr(self.function))
            raise LossError(
                f'loss {name}: batch_means gave something else than means; return {{name: (values, weights)}}, both '
                "[B, T], under other names than 'rollout'"
            )
        return sums


def _built_in(name: str) -> PolicyLoss:
    properties = dataclasses.asdict(BUILT_IN_LOSSES[name])
    function = getattr(policy_gradient, name)
    rollout_values = policy_gradient.ROLLOUT_VALUES.get(name)
    return PolicyLoss(function, rollout_values=rollout_values, **properties)


POLICY_LOSSES: Mapping[str, PolicyLoss] = {name: _built_in(name) for name in BUILT_IN_LOSSES}


def resolve_loss(name: str | LossFunction) -> PolicyLoss:
    """Returns the loss of a built-in name, or the one that 'package.module:function' refers to.

    Args:
      name: a key of POLICY_LOSSES, or a function or a `PolicyLoss` or its import path. A plain function counts as a
        loss with a ratio per token and any statistics.

    Raises:
      ValueError: there is no such loss, or it cannot be called as one; the message is one line.
    """
    arrays = ('logp', 'old_logp', 'advantage', 'mask', 'segment')
    settings = ('clip_low', 'clip_high', 'dual_clip')
    loss = resolve('loss', name, POLICY_LOSSES, arrays, settings)
    # A plain function has the properties of the most common case; PolicyLoss states others.
    if isinstance(loss, PolicyLoss):
        return loss
    return PolicyLoss(loss)
