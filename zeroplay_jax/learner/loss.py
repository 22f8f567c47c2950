"""The loss of one micro-batch, composed from the pure functions in objectives/ according to a role's config."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zeroplay_jax.learner.batch import Batch, TeacherBatch
from zeroplay_jax.objectives import aggregation, corrections, distillation, masking
from zeroplay_jax.objectives.losses import LossError, PolicyLoss, resolve_loss
from zeroplay_jax.objectives.types import AnyArray, DevicePerToken, DeviceStats, PerToken, TokenMask
from zeroplay_jax.policy import adapters, head, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.settings.rollouts import most_kept
from zeroplay_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Static part of the loss: the fields of `config.<role>` that it reads.

    Attributes:
      policy_loss: the function that `config.<role>.loss` names.
    """

    policy_loss: PolicyLoss
    clip_low: float
    clip_high: float
    dual_clip: float
    kl_coef: float
    kl_kind: str
    entropy_coef: float
    tis_cap: float
    tis_level: str
    temperature: float
    top_p: float
    top_k: int
    distill_top_k: int
    distill_kind: str
    distill_tail: bool

    @classmethod
    def of(cls, role: Any) -> LossConfig:
        """Reads a role's config.

        Raises:
          ValueError: there is no loss of that name.
        """
        # The name is resolved once here, not at every trace of the loss.
        _, *fields = dataclasses.fields(cls)
        values: dict[str, Any] = {field.name: role[field.name] for field in fields}
        return cls(resolve_loss(role.loss), **values)

    @property
    def elementwise(self) -> bool:
        """Whether the loss of a token reads the values of this token alone: then the logits are computed once."""
        weights_by_sequence = bool(self.tis_cap) and self.tis_level == 'sequence'
        return self.policy_loss.elementwise and not weights_by_sequence

    @property
    def clips(self) -> dict[str, float]:
        """The bounds of the ratio, by the names of a loss's arguments."""
        return {'clip_low': self.clip_low, 'clip_high': self.clip_high}

    @property
    def kept(self) -> int:
        """The most ids that tokens are drawn from; 0: the whole vocabulary."""
        return most_kept(self.top_p, self.top_k)

    @property
    def distills(self) -> bool:
        """Whether the role learns from a teacher."""
        return self.distill_top_k > 0


def loss(
    model: ModelConfig,
    config: LossConfig,
    params: Params,
    batch: Batch,
    ref_logp: PerToken,
    teacher_params: Params | None,
    distill_coef: Float[AnyArray, ''] | float,
    base: Params | None = None,
) -> tuple[Float[Array, ''], DeviceStats]:
    """Computes Σ weight · per-token loss + α · Σ teacher weight · divergence of one micro-batch.

    The loss of a token is truncated importance weight · policy loss + kl_coef · KL − entropy_coef · entropy
    (objectives/policy_gradient.py, objectives/corrections.py).

    Args:
      model: static shape of the decoder.
      config: static part of the loss.
      params: the weights being trained.
      batch: arrays [B, L].
      ref_logp: float32 [B, L], log-probs under the reference where the KL term is on; otherwise not used.
      teacher_params: the teacher's weights where the role distils (`batch.teacher` is set then), else None.
      distill_coef: float32 scalar α, the weight of the distillation term (π-Play eq. 7).
      base: frozen weights of which `params` and `teacher_params` are adapters (policy/adapters.py); None: both are
        whole weights.

    Returns:
      The loss, float32; and its statistics as (sum, count).
    """
    params = adapters.join(base, params)
    states = transformer.hidden(
        model, params, batch.tokens, batch.positions, batch.segment, batch.experts
    )
    of_tokens = {'tokens': batch.tokens, 'kept': batch.kept}
    predicted = jax.tree.map(lambda x: x[:, 1:], of_tokens)
    teacher_matrices: Params = {}
    teacher_weight = None
    if config.distills and batch.teacher is not None:
        assert teacher_params is not None
        teacher_params = jax.lax.stop_gradient(adapters.join(base, teacher_params))
        teacher_states = _teacher_states(model, teacher_params, batch.teacher)
        predicted['teacher_states'] = teacher_states[:, :-1]
        teacher_matrices = head.frozen_matrices(model, teacher_params, states.dtype)
        teacher_weight = batch.teacher.weight
    labels = (
        dataclasses.replace(batch, teacher=None, experts=None, kept=None),
        ref_logp,
        teacher_weight,
    )
    total_loss, stats = head.reduced_scores(
        functools.partial(_scores, model, config),
        functools.partial(_terms, config),
        head.head_of(model, params, states.dtype),
        states,
        (teacher_matrices, distill_coef),
        predicted,
        labels,
        wanted_tokens(model, batch),
        config.elementwise,
    )
    # The denominator is in the weights already, so the sum over micro-batches is the loss of the step. Its count is set
    # to 1 when the update is complete.
    stats['loss'] = (jax.lax.stop_gradient(total_loss), jnp.float32(0))
    return total_loss, stats


def policy_terms(
    config: LossConfig,
    batch: Batch,
    logp: DevicePerToken,
    entropy: DevicePerToken,
    ref_logp: PerToken,
) -> tuple[DevicePerToken, DeviceStats]:
    """Returns the per-token sum of policy loss, KL penalty and entropy bonus, and their statistics.

    Args:
      config: static part of the loss.
      batch: arrays [B, L]; tokens outside of its mask are not read.
      logp: log-probs of the weights being trained, with a gradient.
      entropy: in nats, of the distributions that predict the tokens; with a gradient if the loss has an entropy bonus.
      ref_logp: log-probs of the reference; not used without a KL term.

    Raises:
      UserError: a loss of the user returns something else than losses and statistics.
    """
    try:
        per_token, stats = config.policy_loss(
            logp,
            batch.old_logp,
            batch.advantage,
            batch.mask,
            batch.segment,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            means=batch.means,
        )
    except LossError as error:
        raise UserError(str(error)) from error

    # The importance weights correct the policy gradient alone: KL and entropy are of the current policy.
    if config.tis_cap:
        importance_weights, importance_stats = corrections.truncated_importance(
            batch.old_logp,
            batch.sampler_logp,
            batch.mask,
            config.tis_cap,
            config.tis_level,
            batch.segment,
        )
        per_token = per_token * importance_weights
        stats |= importance_stats

    if config.kl_coef:
        kl_penalty, kl_stats = corrections.kl(logp, ref_logp, batch.mask, config.kl_kind)
        per_token = per_token + config.kl_coef * kl_penalty
        stats |= kl_stats

    # The entropy is logged always; it is part of the loss, and has a gradient, only with a coefficient.
    negative_entropy, entropy_stats = corrections.entropy_bonus(entropy, batch.mask)
    stats |= entropy_stats
    if config.entropy_coef:
        per_token = per_token + config.entropy_coef * negative_entropy
    return per_token, stats


def _terms(config, scores, labels, shared):
    """Returns (loss, statistics) of tokens: sums, which add up over chunks of tokens as over micro-batches.

    Args:
      config: static part of the loss.
      scores: (logp, entropy, divergences by name), [B, L]; no divergences without a teacher.
      labels: (batch, ref_logp, weights of the distillation loss or None), [B, L].
      shared: as of `_scores`.
    """
    logp, entropy, divergences = scores
    _, distill_coef = shared
    batch, ref_logp, teacher_weight = labels
    per_token, stats = policy_terms(config, batch, logp, entropy, ref_logp)
    # All policy terms share one weighted sum, hence one denominator. Distillation has its own: it averages over the
    # tokens that have a teacher.
    total_loss = aggregation.aggregate(per_token, batch.weight)
    if teacher_weight is not None:
        distillation_loss = aggregation.aggregate(divergences['divergence'], teacher_weight)
        total_loss = total_loss + distill_coef * distillation_loss
        # The statistics of the divergence need a mask of their own: the teacher sees the rollouts of some rows only,
        # and weight 0 marks all other tokens.
        has_teacher = teacher_weight != 0
        for name, values in divergences.items():
            stats[f'distill_{name}'] = masking.total(values, has_teacher)
    return total_loss, stats


def _scores(model, config, matrices, states, shared, predicted):
    """Returns (log-probs, entropies, divergences by name) of a chunk of tokens: the only logits that exist are here.

    Args:
      model: static shape of the decoder.
      config: static part of the loss.
      matrices: of the head.
      states: [tokens, hidden_size], of the tokens before the predicted ones.
      shared: (matrices of the teacher's head, distill_coef), of which the first are read where there is a teacher.
      predicted: {'tokens': ids, 'kept': as of `head.within`, 'teacher_states': where there is a teacher}.
    """
    kept = predicted['kept']
    chunk_logits = head.logits(model, matrices, states) / config.temperature
    chunk_logits = head.within(chunk_logits, kept)
    logp, entropy = head.logp_and_entropy(
        chunk_logits, predicted['tokens'], config.entropy_coef > 0
    )
    if 'teacher_states' not in predicted:
        return logp, entropy, {}
    teacher_logits = head.logits(model, shared[0], predicted['teacher_states'])
    divergence, statistics = distillation.topk_tail_divergence(
        chunk_logits,
        head.within(teacher_logits / config.temperature, kept),
        k=config.distill_top_k,
        kind=config.distill_kind,
        tail=config.distill_tail,
    )
    # Statistics are for logging: a backward pass through them would be computed and multiplied by zero.
    return logp, entropy, {'divergence': divergence, **jax.lax.stop_gradient(statistics)}


def _teacher_states(
    model: ModelConfig, params: Params, rows: TeacherBatch
) -> Float[Array, 'batch length hidden_size']:
    """Returns the teacher's hidden states at the student's tokens, without gradient."""
    states = transformer.hidden(model, params, rows.tokens, rows.positions, rows.segment)
    # The teacher's rows hold the same rollouts behind other prompts.
    aligned = jnp.take_along_axis(states, rows.teacher_index[..., None], 1)
    return jax.lax.stop_gradient(aligned)


def wanted_tokens(model: ModelConfig, batch: Batch) -> TokenMask | None:
    """Returns the tokens of which the loss reads log-probs, or None where all are computed (`ModelConfig.logits`)."""
    return batch.mask if model.logits == 'trained' else None
