"""A loss of the user reads nothing that depends on micro.rows, packing or devices."""

import jax
import jax.numpy as jnp
import pytest

from zeroplay_jax.objectives import masking
from zeroplay_jax.objectives.checks import check_loss
from zeroplay_jax.objectives.losses import POLICY_LOSSES, LossError, PolicyLoss


def loss_of(of_tokens):
    """A loss of a user: `of_tokens` gets (logp, ratio, advantage, mask, segment), 0 where masked."""

    def users_loss(logp, old_logp, advantage, mask, segment, *, clip_low, clip_high, dual_clip):
        mask, logp, old, advantage = masking.masked('users', mask, logp, old_logp, advantage)
        ratio = jnp.exp(masking.log_ratio(logp, jax.lax.stop_gradient(old)))
        return jnp.where(mask, of_tokens(logp, ratio, advantage, mask, segment), 0.0), {}

    return users_loss


def mean(values, mask):
    return jnp.sum(values * mask) / jnp.sum(mask)


def same_value_other_gradient(logp, ratio, advantage, mask, segment):
    average = mean(logp, mask)
    return -advantage * ratio + average - jax.lax.stop_gradient(average)


def labels_of_all_rows(logp, ratio, advantage, mask, segment):
    """Rollouts of different rows have the same labels."""
    sums = jax.ops.segment_sum(logp.ravel(), segment.ravel(), num_segments=logp.size)
    return -advantage * sums[segment]


def previous_position(logp, ratio, advantage, mask, segment):
    """The first rollout of a row gets the last value of the row."""
    return -advantage * jnp.cumsum(logp, 1)


COUPLED = {
    'mean over [B, T]': lambda p, r, a, m, s: -(a - mean(a, m)) * r,
    'length of a row': lambda p, r, a, m, s: -a * r / p.shape[1],
    'a ratio of a thousand': lambda p, r, a, m, s: jnp.where((r > 1e3).any(), -a, -a * r),
    'a gradient through a mean whose value cancels': same_value_other_gradient,
    'labels of rollouts added over rows': labels_of_all_rows,
    'cumulative sum over a row': previous_position,
    'label of the rollout': lambda p, r, a, m, s: -a * r * s,
}


@pytest.mark.parametrize('name', COUPLED)
def test_a_loss_that_reads_other_rollouts_is_refused(name):
    with pytest.raises(LossError, match='^loss users_loss: .* shares its micro-batch'):
        check_loss(PolicyLoss(loss_of(COUPLED[name])))


def test_a_loss_that_reads_masked_values_is_refused():
    def unmasked(logp, old_logp, advantage, mask, segment, **options):
        return -advantage * masking.spread(masking.segment_sum(logp, segment), segment), {}

    with pytest.raises(LossError, match='values where mask is False'):
        check_loss(PolicyLoss(unmasked))


def test_a_statistic_that_is_no_sum_over_rollouts_is_refused():
    def measured(logp, old_logp, advantage, mask, segment, **options):
        return -advantage * logp, {'figure': (jnp.max(logp), jnp.float32(1))}

    with pytest.raises(LossError, match='loss measured: statistics figure'):
        check_loss(PolicyLoss(measured))


@pytest.mark.parametrize('name', POLICY_LOSSES)
def test_built_in_losses_pass_and_a_false_declaration_is_refused(name):
    loss = POLICY_LOSSES[name]
    check_loss(loss)
    if not loss.elementwise:
        with pytest.raises(LossError, match=f'loss {name}: .*declared elementwise'):
            check_loss(PolicyLoss(loss.function, elementwise=True))


def test_a_count_of_rollouts_is_not_elementwise():
    def counted(logp, old_logp, advantage, mask, segment, **options):
        rollouts = jnp.sum(masking.segment_sum(mask, segment) > 0, dtype=jnp.float32)
        return -advantage * logp, {'rollouts': (rollouts, rollouts)}

    check_loss(PolicyLoss(counted))
    with pytest.raises(LossError, match='loss counted: .*declared elementwise'):
        check_loss(PolicyLoss(counted, elementwise=True))
