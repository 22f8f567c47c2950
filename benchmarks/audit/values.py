"""A value network: a copy of the decoder with one output, trained beside the policy."""

import torch

from benchmarks.audit.files import Rollout
from benchmarks.audit.objectives import of_tokens
from benchmarks.audit.optimizer import AdamW
from benchmarks.audit.policy import Policy, copied


class ValueNetwork:
    """The value network of a role.

    Args:
      policy: as it starts.
      role: settings of the role.
      settings: those of value networks.
    """

    def __init__(self, policy: Policy, role: dict, settings: dict):
        self._policy = policy
        self._whitens = role['scale'] == 'batch'
        self._settings = settings
        self._weights = copied(policy.reference)
        size = self._weights['model.norm.weight'].shape[0]
        self._weights['kernel'] = torch.zeros(size, 1, dtype=torch.float64)
        self._weights['bias'] = torch.zeros(1, dtype=torch.float64)
        # An output layer that nothing reads would have no gradient.
        self._weights.pop('lm_head.weight', None)
        trained = [tensor.requires_grad_() for tensor in self._weights.values()]
        rate = settings['learning_rate'] or 10 * role['learning_rate']
        self._optimizer = AdamW(trained, role | {'learning_rate': rate})

    def _values(self, rollout):
        states = self._policy.states(self._weights, rollout.tokens, rollout.written)
        return (states @ self._weights['kernel'] + self._weights['bias'])[:, 0]

    @torch.no_grad()
    def set_advantages(self, rollouts: list[Rollout]) -> None:
        """Sets values and advantages of the rollouts that count in a step, before its first update."""
        discount, decay = self._settings['discount'], self._settings['gae_lambda']
        for rollout in rollouts:
            values = rollout.old_values = self._values(rollout)
            rollout.advantage = of_tokens(rollout.record['reward'], values, discount, decay)
            rollout.returns = values + rollout.advantage
        tokens = torch.cat([rollout.advantage for rollout in rollouts])
        for rollout in rollouts if self._whitens else ():
            deviation = (tokens.var() + 1e-8).sqrt()
            rollout.advantage = (rollout.advantage - tokens.mean()) / deviation

    def update(self, rollouts: list[Rollout]) -> None:
        """Takes an optimiser step on the rollouts that count in a minibatch."""
        tokens = sum(len(rollout.written) for rollout in rollouts)
        clip = self._settings['value_clip'] or torch.inf
        for rollout in rollouts:
            values, returns = self._values(rollout), rollout.returns
            clipped = rollout.old_values + (values - rollout.old_values).clamp(-clip, clip)
            error = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
            (error.sum() / 2 / tokens).backward()
        self._optimizer.step()
