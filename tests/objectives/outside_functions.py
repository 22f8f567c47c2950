"""Losses, difficulties and answer metrics as users write them in modules of their own, some of them wrong."""

import functools

import jax.numpy as jnp

from zeroplay_jax.objectives import masking
from zeroplay_jax.objectives.losses import PolicyLoss


def squared(logp, old_logp, advantage, mask, segment, *, clip_low, clip_high, dual_clip):
    mask, logp, advantage = masking.masked('squared', mask, logp, advantage)
    return advantage * logp**2, {'square': masking.total(logp**2, mask)}


declared = PolicyLoss(squared, statistics=('square',), uses_ratio=False, per_token=True)
misdeclared = PolicyLoss(squared, statistics=('cube',))


def summed(logp, *arrays, **options):
    return jnp.sum(logp), {}


def alone(logp, old_logp, advantage, mask, segment, *, clip_low, clip_high, dual_clip):
    return logp


def averaged(logp, old_logp, advantage, mask, segment, *, clip_low, clip_high, dual_clip):
    return logp, {'x': logp.mean()}


number = 3


def cubic(solved, n, target):
    return (1 - solved / n) ** 3 + target


def same_length(prediction, golds):
    return any(len(prediction or '') == len(gold) for gold in golds)


def adapted(function):
    @functools.wraps(function)
    def call(prediction, golds):
        return function(prediction)

    return call


@adapted
def length(prediction):
    return float(len(prediction) == 4)


def text(prediction, golds):
    return 'one'


def seven(prediction, golds):
    return 7


def not_a_number(prediction, golds):
    return float('nan')


def nothing(prediction, golds):
    return None
