"""What the tests of the losses share: batches, their layouts, all losses under one signature, finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from zeroplay_jax.objectives import aggregation, corrections
from zeroplay_jax.objectives import policy_gradient as pg
from zeroplay_jax.objectives.losses import POLICY_LOSSES

SEQUENCE_MODES = ('token', 'seq_mean_token_mean', 'seq_mean_token_sum')
MODES = (*SEQUENCE_MODES, 'constant')
CLIPS = dict(clip_low=0.2, clip_high=0.28)
ARRAYS = ('logp', 'old_logp', 'advantage')


def _kl(kind):
    return lambda logp, old, advantage, mask, segment: corrections.kl(logp, old, mask, kind)


def _importance(level):
    def loss(logp, old, advantage, mask, segment):
        weight, stats = corrections.truncated_importance(old, logp, mask, 1.2, level, segment)
        per_token, more = pg.reinforce(logp, old, advantage, mask)
        return per_token * weight, stats | more

    return loss


# Every per-token loss as f(logp, old_logp, advantage, mask, segment) -> (per_token, stats).
LOSSES = {
    **{
        name: functools.partial(getattr(pg, name), dual_clip=3.0, **CLIPS) for name in POLICY_LOSSES
    },
    'entropy_bonus': lambda p, o, a, m, s: corrections.entropy_bonus(p, m),
    'importance_token': _importance('token'),
    'importance_sequence': _importance('sequence'),
    'k3': _kl('k3'),
    'k1+': _kl('k1+'),
}


def close(given, wanted, **tolerance):
    np.testing.assert_allclose(
        np.asarray(given), wanted, **(dict(rtol=2e-5, atol=1e-6) | tolerance)
    )


def spread(advantage, like):
    return np.broadcast_to(np.asarray(advantage, np.float32)[:, None], np.shape(like))


def mean(stat):
    return float(stat[0] / stat[1])


def make():
    """Six rollouts of unlike lengths, one per row, with gaps in the mask (tool text); one has nothing to learn from."""
    rng = np.random.default_rng(0)
    lengths = (7, 4, 9, 1, 5, 6)
    shape = len(lengths), max(lengths)
    mask = np.arange(shape[1]) < np.array(lengths)[:, None]
    mask &= rng.random(shape) < 0.8
    mask[3], mask[4] = mask[3] | (np.arange(shape[1]) == 0), False
    old = -rng.exponential(1.5, shape)
    return dict(
        logp=(old + rng.normal(0, 0.4, shape)).astype(np.float32),
        old_logp=old.astype(np.float32),
        advantage=spread(rng.normal(size=shape[0]), mask).copy(),
        mask=mask,
        segment=np.ones(shape, np.int32),
    )


def packed(batch, rows, length, order):
    """The batch's rollouts laid one behind another into rows, in a given order; the rest is rubbish."""
    result = {name: np.full((rows, length), np.nan, np.float32) for name in ARRAYS}
    result['mask'] = np.zeros((rows, length), bool)
    result['segment'] = np.zeros((rows, length), np.int32)
    sequence = np.full((rows, length), -1, np.int32)
    places = {}
    fill, count = np.zeros(rows, int), np.zeros(rows, int)
    for index in order:
        size = 1 + np.flatnonzero(batch['mask'][index]).max(initial=1)
        row = int(np.flatnonzero(fill + size <= length)[0])
        span = slice(fill[row], fill[row] + size)
        for name in (*ARRAYS, 'mask'):
            result[name][row, span] = batch[name][index, :size]
        count[row] += 1
        result['segment'][row, span], sequence[row, span] = count[row], index
        places[index] = (row, span, size)
        fill[row] += size
    return result, sequence, places


def weights(batch, mode, sequence=None, total=None):
    total = 5.0 if mode == 'constant' else total
    return aggregation.token_weights(batch['mask'], sequence, mode, total)


@functools.partial(jax.jit, static_argnames='name')
def run(name, batch, weight):
    """(loss, gradient with respect to logp, statistics) of a named loss."""

    def total(logp):
        rest = (batch[key] for key in ('old_logp', 'advantage', 'mask', 'segment'))
        per_token, stats = LOSSES[name](logp, *rest)
        return aggregation.aggregate(per_token, weight), stats

    (value, stats), gradient = jax.value_and_grad(total, has_aux=True)(
        jnp.asarray(batch['logp'], jnp.float32)
    )
    return value, gradient, stats


def differences(function, x, step=1e-6):
    """Central differences of a float64 function of an array."""
    x = np.asarray(x, np.float64)
    result = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        shift = np.zeros(x.shape)
        shift[place] = step
        result[place] = (function(x + shift) - function(x - shift)) / (2 * step)
    return result


def average(losses, lengths, mode):
    """Per-rollout sums of token losses, averaged as the mode says; rollouts of length 0 are out."""
    pairs = [(s, n) for s, n in zip(losses, lengths, strict=True) if n]
    if mode == 'constant':
        return sum(s for s, _ in pairs) / 5.0
    if mode == 'token':
        return sum(s for s, _ in pairs) / sum(n for _, n in pairs)
    if mode == 'seq_mean_token_sum':
        return sum(s for s, _ in pairs) / len(pairs)
    return sum(s / n for s, n in pairs) / len(pairs)
