"""A loss that replaces the clip of the ratio by a quadratic penalty (SPO, Xie et al. 2024, arXiv:2401.16025)."""

import jax.numpy as jnp

from zeroplay_jax.objectives import masking
from zeroplay_jax.objectives.losses import PolicyLoss


def _quadratic(logp, old_logp, advantage, mask, segment, *, clip_high, **options):
    """L = −A·r + |A|/(2·clip_high)·(r − 1)²; the penalty pulls the ratio back where a clip would stop it."""
    mask, logp, old_logp, advantage = masking.masked('quadratic', mask, logp, old_logp, advantage)
    # The ratio is clipped only where exp would overflow.
    ratio = jnp.exp(masking.log_ratio(logp, old_logp))
    penalty = jnp.abs(advantage) / (2 * clip_high) * jnp.square(ratio - 1)
    stats = {'ratio': masking.total(ratio, mask), 'ratio_penalty': masking.total(penalty, mask)}
    return -advantage * ratio + penalty, stats


quadratic = PolicyLoss(_quadratic, elementwise=True)
