"""The built-in policy losses by name, with the properties that a config is checked against. Imports no JAX.

A loss of this table is the function of its name in objectives/policy_gradient.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossProperties:
    """What a policy loss states about itself.

    Attributes:
      statistics: names of the statistics that it returns, checked when it is traced; None: any names.
      uses_ratio: whether the loss corrects for the difference between `logp` and `old_logp`. Without it a batch serves
        one update only (`config.<role>.minibatches` = 1).
      per_token: whether the ratio is per token, not per sequence. A ratio per sequence needs whole rollouts.
      elementwise: whether losses and statistics are those of each token alone, added up. The function is then called
        with chunks of tokens instead of whole rows, and the gradient computed in the same pass: the update computes
        the logits once. Must be False for a loss that couples the tokens of a rollout, and for a statistic that is
        not a sum over tokens, such as a count of rollouts (loss_checks.py).
    """

    statistics: tuple[str, ...] | None = None
    uses_ratio: bool = True
    per_token: bool = True
    elementwise: bool = False

    def __post_init__(self):
        if self.elementwise and not self.per_token:
            raise ValueError(
                'a loss with a ratio per sequence is not elementwise; set one of the two to False'
            )


# Statistics of `corrections.agreement`, which every built-in loss reports.
_AGREEMENT = ('ratio', 'approx_kl', 'prob_gap')

BUILT_IN_LOSSES: Mapping[str, LossProperties] = {
    'reinforce': LossProperties(
        statistics=(*_AGREEMENT, 'logp'), uses_ratio=False, elementwise=True
    ),
    'token_pg': LossProperties(
        statistics=(*_AGREEMENT, 'clip_share', 'dual_clip_share'), elementwise=True
    ),
    'sequence_pg': LossProperties(
        statistics=(*_AGREEMENT, 'clip_share', 'sequence_ratio'), per_token=False
    ),
    'geometric_pg': LossProperties(
        statistics=(*_AGREEMENT, 'clip_share', 'sequence_ratio'), per_token=False
    ),
    'cispo': LossProperties(statistics=(*_AGREEMENT, 'clip_share'), elementwise=True),
}
