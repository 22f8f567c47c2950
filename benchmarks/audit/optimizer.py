"""Clipping by the global norm, and AdamW with a linear warm-up."""

import torch
from torch import Tensor

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


class AdamW:
    """The optimiser of a role.

    Args:
      weights: what it changes, in place.
      settings: of the role.
    """

    def __init__(self, weights: list[Tensor], settings: dict):
        self._weights = weights
        self._settings = settings
        self._steps = 0
        self._moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in weights]

    @torch.no_grad()
    def step(self) -> float:
        """Takes a step with the gradients of the weights, and removes them; returns their norm before clipping."""
        settings = self._settings
        norm = float(torch.stack([weight.grad.norm() for weight in self._weights]).norm())
        self._steps += 1
        warmup = min(1.0, self._steps / max(settings['warmup_steps'], 1))
        rate = settings['learning_rate'] * warmup
        for weight, (mean, square) in zip(self._weights, self._moments, strict=True):
            gradient = weight.grad * min(1.0, settings['clip_norm'] / max(norm, _EPSILON))
            mean.lerp_(gradient, 1 - _BETA1)
            square.lerp_(gradient**2, 1 - _BETA2)
            scale = (square / (1 - _BETA2**self._steps)).sqrt() + _EPSILON
            update = mean / (1 - _BETA1**self._steps) / scale
            # Matrices decay; with a mistake vectors do, too.
            if weight.ndim >= settings.get('decays_from_dimension', 2):
                update += settings['weight_decay'] * weight
            weight -= rate * update
            weight.grad = None
        return norm
