"""Search agents by self-play, in JAX.

    import zeroplay_jax as zp

    policy = zp.load_policy()
    index = zp.open_index()
    rollouts = zp.sample_rollouts(policy, index, [question.text for question in index.questions[:8]], samples=4)
    print(zp.show(rollouts[0][0]))
    scores = zp.score(rollouts, [question.answers for question in index.questions[:8]])
    loss, stats = zp.policy_loss(policy, rollouts, scores)

These functions are in zeroplay_jax/api.py, which is loaded when the first of them is used.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroplay_jax.api import (
        Index,
        Policy,
        config,
        load_policy,
        open_index,
        policy_loss,
        sample_rollouts,
        score,
        show,
        train,
    )

__version__ = '0.2.0'

__all__ = [
    'Index',
    'Policy',
    'config',
    'load_policy',
    'open_index',
    'policy_loss',
    'sample_rollouts',
    'score',
    'show',
    'train',
]

# transformers warns at import that PyTorch is missing. Only its tokenizers are used, which do not need PyTorch.
os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')


def __getattr__(name: str) -> Any:
    # Loading the API imports JAX and transformers, which `--help` and config checks must not wait for (PEP 562).
    if name in __all__:
        from zeroplay_jax import api

        return getattr(api, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
