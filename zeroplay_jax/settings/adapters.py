"""Config fields of adapters; `schema.Policy` has them as a section."""

from __future__ import annotations

from typing import Annotated, Literal

from zeroplay_jax.settings.bounds import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Section,
    requires,
)

# The linear layers of a decoder layer, all of which can have adapters.
LINEARS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')


class Adapters(Section):
    """Low-rank adapters of all roles over one frozen base (docs/adapters.md)."""

    rank: NonNegativeInt = 0
    """Rank of the trained update of every adapted linear layer; 0: full fine-tuning."""
    alpha: PositiveFloat = 32.0
    """The product of an adapter is multiplied with alpha / rank."""
    linears: Annotated[
        tuple[str, ...],
        requires(
            lambda x: x and set(x) <= set(LINEARS) and len(set(x)) == len(x),
            f'give some of {", ".join(LINEARS)}, each once',
        ),
    ] = LINEARS
    """Adapted linear layers."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay of adapters, in place of <role>.weight_decay: it pulls the policy to the base."""
    quantize: Literal['none', 'int8'] = 'none'
    """Linear layers of the base: in policy.dtype, or int8 with a scale per output channel, which takes half the
    memory and changes the base a little."""
    merge: bool = False
    """Also export every trained policy as a whole folder, policy/<weights>-merged."""
