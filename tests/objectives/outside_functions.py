"""Losses, advantages, difficulties and metrics as users write them in modules of their own, some of them wrong."""

import jax.numpy as jnp
import numpy as np

from zeroplay_jax.objectives import advantages


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


def seven(prediction, golds):
    return 7


def not_a_number(prediction, golds):
    return float('nan')


async def awaited(prediction, golds):
    return 1.0


def failing(prediction, golds):
    raise KeyError(prediction)


# ---- advantages ------------------------------------------------------------------------------------


def advantage_per_turn(table, settings):
    values, _ = advantages.of_turns(table, settings)
    return np.cumsum(values, 1), {'values': (float(len(values)), 1.0)}


def advantage_per_row(table, settings):
    rewards = np.where(table.valid, table.reward + np.nansum(table.turn_reward, 1), 0.0)
    return advantages.group_advantages(rewards, table.group, valid=table.valid, baseline='loo')


def advantage_with_dropped(table, settings):
    members = table.group[:, None] == table.group
    return members.astype(float) @ table.reward, {}


def advantage_of_tokens(table, settings):
    return np.zeros((len(table.reward), table.turn_mask.shape[1] + 1)), {}


def advantage_bare(table, settings):
    return table.reward


def advantage_mean_statistic(table, settings):
    return table.reward, {'mean': table.reward.mean()}


def advantage_nan_statistic(table, settings):
    return np.where(table.valid, table.reward, 0.0), {'earned': (table.turn_reward.sum(), 1.0)}
