"""The loss of one micro-batch, put together from the pure functions in objectives/ as a role's config says."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from zeroplay_jax.objectives import aggregation, corrections, distillation, masking, policy_gradient
from zeroplay_jax.policy import transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Static part of the loss; fields as in `config.<role>`."""

    loss: str
    clip_low: float
    clip_high: float
    dual_clip: float
    kl_coef: float
    kl_kind: str
    entropy_coef: float
    tis_cap: float
    tis_level: str
    temperature: float
    distill_top_k: int
    distill_kind: str
    distill_tail: bool

    @classmethod
    def of(cls, role) -> LossConfig:
        """From a role's config."""
        return cls(**{f.name: role[f.name] for f in dataclasses.fields(cls)})

    @property
    def distills(self) -> bool:
        """Whether a teacher takes part."""
        return self.distill_top_k > 0


def loss(
    model: ModelConfig,
    config: LossConfig,
    params: Params,
    batch: Batch,
    ref_logp,
    teacher,
    distill_coef,
):
    """Σ weight · per-token loss of one micro-batch (arrays [B, L]) and its statistics as (sum, count).

    Args:
      ref_logp: float32 [B, L] where the KL term is on, else anything of that shape.
      teacher: the teacher's parameters where the role distils (then `batch.teacher` is there too), else None.
      distill_coef: float32 scalar α, the weight of the distillation term (π-Play eq. 7).
    """
    mask, stats, distilled = batch.mask, {}, jnp.float32(0)
    if config.distills and batch.teacher is not None:
        logp, entropy, divergence, extra = _distil(model, config, params, teacher, batch)
        distilled = aggregation.aggregate(divergence, batch.teacher.weight)
        taught = batch.teacher.weight != 0
        for name, value in {
            'distill_divergence': divergence,
            **{f'distill_{k}': v for k, v in extra.items()},
        }.items():
            stats[name] = masking.total(value, taught)
    else:
        places = (batch.tokens, batch.positions, batch.segment)
        logp, entropy = transformer.score(
            model, params, *places, config.temperature, config.entropy_coef > 0
        )
    per_token, more = _policy_loss(config, logp, batch)
    stats |= more
    if config.tis_cap:
        weights, more = corrections.truncated_importance(
            batch.old_logp,
            batch.sampler_logp,
            mask,
            config.tis_cap,
            config.tis_level,
            batch.segment,
        )
        per_token, stats = per_token * weights, stats | more
    if config.kl_coef:
        penalty, more = corrections.kl(logp, ref_logp, mask, config.kl_kind)
        per_token, stats = per_token + config.kl_coef * penalty, stats | more
    bonus, more = corrections.entropy_bonus(entropy, mask)
    stats |= more
    if config.entropy_coef:
        per_token = per_token + config.entropy_coef * bonus
    value = aggregation.aggregate(per_token, batch.weight) + distill_coef * distilled
    stats['loss'] = (jax.lax.stop_gradient(value), jnp.float32(0))
    return value, stats


def _policy_loss(config, logp, batch):
    if config.loss == 'reinforce':
        per_token, stats = policy_gradient.reinforce(logp, batch.advantage, batch.mask)
        return per_token, stats | corrections.agreement(logp, batch.old_logp, batch.mask)
    arguments = (logp, batch.old_logp, batch.advantage, batch.mask)
    clips = dict(clip_low=config.clip_low, clip_high=config.clip_high)
    if config.loss == 'token_pg':
        return policy_gradient.token_pg(*arguments, **clips, dual_clip=config.dual_clip)
    kind = {
        'sequence_pg': policy_gradient.sequence_pg,
        'geometric_pg': policy_gradient.geometric_pg,
    }[config.loss]
    return kind(*arguments, batch.segment, **clips)


def _distil(model, config, params, teacher, batch):
    """Scores of the student, and how far it is at every token from a teacher that has read another prompt."""
    view = batch.teacher
    x = transformer.hidden(model, teacher, view.tokens, view.positions, view.segment)
    x = jnp.take_along_axis(x, view.place[..., None], 1)
    divergence = functools.partial(
        distillation.topk_tail_divergence,
        k=config.distill_top_k,
        kind=config.distill_kind,
        tail=config.distill_tail,
    )
    places = (batch.tokens, batch.positions, batch.segment)
    last = (config.temperature, config.entropy_coef > 0)
    return transformer.distil(model, params, teacher, *places, x, divergence, *last)
