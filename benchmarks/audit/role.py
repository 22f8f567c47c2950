"""The updates of a role, from its rollouts and rewards."""

import math

import numpy as np
import torch

from benchmarks.audit import objectives
from benchmarks.audit.files import Rollout
from benchmarks.audit.optimizer import AdamW
from benchmarks.audit.policy import Policy, copied
from benchmarks.audit.values import ValueNetwork


class Role:
    """A role, and what its updates change.

    Args:
      policy: its weights, which other roles may share.
      settings: of the role, with the mistake if there is one.
      value_network: settings of value networks.
    """

    def __init__(self, policy: Policy, settings: dict, value_network: dict):
        self._policy = policy
        self._settings = settings
        self._teacher = copied(policy.reference)
        # Adapters do not decay.
        decay = {'weight_decay': 0.0} if policy.is_adapter else {}
        self._optimizer = AdamW([*policy.trained.values()], settings | decay)
        self._network = None
        if settings['baseline'] == 'value':
            self._network = ValueNetwork(policy, settings, value_network)

    def repeat(self, minibatches: list[list[Rollout]]) -> dict[str, float]:
        """Repeats the updates of a step; returns the largest error of an advantage, mean loss and mean gradient norm.

        Norms are those before clipping; NaN without an update. `without_advantage` counts updates in which all
        advantages are 0, so that gradients may be rounding alone.
        """
        error = self._prepare(sum(minibatches, []))
        done, without_advantage = [], 0
        for minibatch in minibatches:
            update = self._update(minibatch)
            if update is not None:
                done.append(update)
                without_advantage += not any(rollout.advantage.any() for rollout in minibatch)
        # Once per step, whatever the number of updates.
        with torch.no_grad():
            student = self._policy.weights()
            for name, tensor in self._teacher.items():
                tensor.lerp_(student[name], self._settings['distill_ema_rate'])
        loss, norm = np.mean(done or [(math.nan, math.nan)], 0)
        return {
            'updates': len(done),
            'without_advantage': without_advantage,
            'advantages': error,
            'loss': loss,
            'norm': norm,
        }

    def _scores(self, weights, rollout):
        return self._scores_of(weights, rollout, rollout.tokens, rollout.written)

    def _scores_of(self, weights, rollout, tokens, written):
        # With a mistake those of all ids.
        kept = rollout.kept[: self._settings.get('most_kept')]
        temperature = self._settings['temperature']
        return self._policy.scores(weights, tokens, written, kept, temperature)

    @torch.no_grad()
    def _prepare(self, rollouts):
        """Sets advantages and old log-probs; returns the largest difference of an advantage from the run's."""
        difference = 0.0
        advantages = objectives.of_groups(rollouts, self._settings)
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            logged = rollout.record['advantage']
            # A value network gives tokens theirs, and the log has none.
            if logged is not None:
                difference = float(np.maximum(difference, abs(advantage - logged)))
            # In float32, as the run's losses read it.
            rollout.advantage = torch.full_like(rollout.old_logp, np.float32(advantage))
            if self._settings['old_logp'] == 'trainer':
                rollout.old_logp = _chosen(self._scores(self._policy.weights(), rollout), rollout)
        if self._network is not None:
            self._network.set_advantages([each for each in rollouts if each.is_counted])
        return difference

    def _update(self, minibatch):
        """Takes an optimiser step; returns loss and norm of the gradient, None if there is nothing to train."""
        settings, distill_coef = self._settings, minibatch[0].record['distill_coef']
        trains_all = distill_coef or settings['kl_coef'] or self._network
        counted = [rollout for rollout in minibatch if rollout.is_counted]
        trained = [rollout for rollout in counted if trains_all or rollout.advantage.any()]
        taught = [rollout for rollout in counted if rollout.record['teacher_prompt']]
        taught_tokens = sum(len(rollout.written) for rollout in taught)
        total = 0.0
        for rollout in trained:
            scores = self._scores(self._policy.weights(), rollout)
            weight = objectives.token_weight(rollout, counted, settings['aggregation'])
            loss = weight * self._per_token(_chosen(scores, rollout), rollout).sum()
            if distill_coef and rollout in taught:
                loss = loss + distill_coef * self._divergence(scores, rollout) / taught_tokens
            loss.backward()
            total += float(loss.detach())
        if not trained:
            return None
        norm = self._optimizer.step()
        if self._network is not None:
            self._network.update(trained)
        return total, norm

    def _per_token(self, logp, rollout):
        """Returns the loss [N] without distillation."""
        settings = self._settings
        per_token = objectives.policy_loss(logp, rollout, settings)
        if settings['tis_cap']:
            importance = (rollout.old_logp - rollout.sampler_logp).exp()
            per_token = per_token * importance.clamp(max=settings['tis_cap'])
        if settings['kl_coef']:
            with torch.no_grad():
                reference = _chosen(self._scores(self._policy.reference, rollout), rollout)
            penalty = objectives.kl(logp, reference, settings['kl_kind'])
            per_token = per_token + settings['kl_coef'] * penalty
        return per_token

    def _divergence(self, scores, rollout):
        """Returns the divergence from the teacher, which reads its own prompt before what the student wrote."""
        settings = self._settings
        tokens, written = rollout.behind_teacher_prompt()
        # With a mistake what the teacher says about the token before.
        written = written - settings.get('teacher_lag', 0)
        with torch.no_grad():
            teacher = self._scores_of(self._teacher, rollout, tokens, written)
        count, has_tail = settings['distill_top_k'], settings['distill_tail']
        return objectives.divergence(scores, teacher, count, has_tail).sum()


def _chosen(scores, rollout):
    """Returns the log-probs [N] of the tokens that the policy wrote."""
    return scores.gather(1, rollout.tokens[rollout.written, None])[:, 0]
