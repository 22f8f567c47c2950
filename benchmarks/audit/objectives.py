"""Advantages, and the loss of the tokens of a rollout, from their formulas. N: tokens that the policy wrote."""

import numpy as np
import torch
from torch import Tensor

from benchmarks.audit.files import Rollout

# Bounds of log-ratios.
_OF_TOKENS, _OF_ROLLOUTS = 20.0, 10.0


def of_groups(rollouts: list[Rollout], settings: dict) -> np.ndarray:
    """Returns an advantage per rollout, in float64 and with sums in the order of the rows, as the run has them."""
    keys = np.array([rollout.record['group'] for rollout in rollouts])
    # A mistake: the whole batch is one group.
    keys *= 'is_one_group' not in settings
    rewards = np.array([rollout.record['reward'] for rollout in rollouts])
    is_dropped = np.array([rollout.record['drop'] is not None for rollout in rollouts])
    advantages = np.zeros(len(rollouts))
    for key in keys[~is_dropped]:
        members = (keys == key) & ~is_dropped
        advantages[members] = _of_group(rewards[members], settings)
    return advantages


def _of_group(rewards, settings):
    # Those that differ by the rounding of sums are equal.
    is_equal = np.ptp(rewards) <= 1e-12 * np.abs(rewards).max()
    if settings['baseline'] in ('none', 'value'):
        return rewards
    above = rewards - _sum(rewards) / len(rewards)
    if settings['scale'] == 'none' or is_equal:
        return above * (not is_equal)
    deviation = np.sqrt(_sum(above**2) / (len(rewards) - 1))
    return above / (deviation + 1e-6)


def _sum(values):
    # In the order of the values.
    return np.cumsum(values)[-1]


def of_tokens(reward: float, values: Tensor, discount: float, decay: float) -> Tensor:
    """Returns generalised advantage estimates [N] of a rollout whose reward comes with its last token."""
    advantages = torch.zeros_like(values)
    next_value, advantage = reward / discount, 0.0
    for position in reversed(range(len(values))):
        error = discount * next_value - values[position]
        advantage = error + discount * decay * advantage
        advantages[position] = advantage
        next_value = values[position]
    return advantages


def policy_loss(logp: Tensor, rollout: Rollout, settings: dict) -> Tensor:
    """Returns the loss [N] of a policy gradient; `logp`: [N], with a gradient."""
    kind, advantage = settings['loss'], rollout.advantage
    if kind == 'reinforce':
        return -advantage * logp
    log_ratio = logp - rollout.old_logp
    if kind == 'sequence_pg':
        # Of every token the gradient through its own log-prob.
        log_ratio = logp - logp.detach() + log_ratio.detach().mean()
    ratio = log_ratio.clamp(-_OF_TOKENS, _OF_TOKENS if kind == 'token_pg' else _OF_ROLLOUTS).exp()
    clipped = ratio.clamp(1 - settings['clip_low'], 1 + settings['clip_high'])
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if kind == 'token_pg' and settings['dual_clip']:
        bounded = torch.minimum(loss, -advantage * settings['dual_clip'])
        loss = torch.where(advantage < 0, bounded, loss)
    return loss


def kl(logp: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Returns an estimate [N] of the KL to the reference."""
    difference = logp - reference
    if kind == 'k1':
        return difference
    return (torch.expm1(-difference) + difference).clamp(max=10.0)


def divergence(student: Tensor, teacher: Tensor, count: int, has_tail: bool) -> Tensor:
    """Returns KL(student ‖ teacher) [N] over the student's likeliest tokens and one outcome for all others.

    Args:
      student, teacher: log-probs [N, V].
      count: of the likeliest tokens.
      has_tail: without it they are a distribution of their own.
    """
    top = student.detach().topk(count, 1).indices

    def outcomes(logp):
        likeliest = logp.gather(1, top)
        if not has_tail:
            return likeliest.log_softmax(1)
        tail = logp.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
        return torch.cat([likeliest, tail], 1)

    student, teacher = outcomes(student), outcomes(teacher)
    return (student.exp() * (student - teacher)).sum(1)


def token_weight(rollout: Rollout, counted: list[Rollout], mode: str) -> float:
    """Returns the weight of a token of a rollout; `counted`: the rollouts of the optimiser step."""
    if mode == 'token':
        return 1 / sum(len(each.written) for each in counted)
    length = len(rollout.written) if mode == 'seq_mean_token_mean' else 1
    return 1 / (length * len(counted))
