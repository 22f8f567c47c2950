"""Search agents by self-play, in JAX.

    import zeroplay_jax as zp

    policy = zp.load_policy()
    index = zp.open_index()
    rollouts = zp.sample_rollouts(policy, index, [question.text for question in index.questions[:8]], samples=4)
    print(zp.show(rollouts[0][0]))
    scores = zp.score(rollouts, [question.answers for question in index.questions[:8]])
    loss, stats = zp.policy_loss(policy, rollouts, scores)

These functions are in zeroplay_jax/api.py; the module is loaded when the first of them is used.
"""

import itertools
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroplay_jax.api import (
        Index,
        Policy,
        load_policy,
        open_index,
        policy_loss,
        sample_rollouts,
        score,
        show,
        train,
    )
    from zeroplay_jax.configuration.fields import config
    from zeroplay_jax.types import UserError

__version__ = '0.3.0'

__all__ = [
    'Index',
    'Policy',
    'UserError',
    'config',
    'load_policy',
    'open_index',
    'policy_loss',
    'sample_rollouts',
    'score',
    'show',
    'train',
]

# transformers warns at import that PyTorch is missing. Its tokenizers and configs do not need PyTorch.
os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')

# Commands that load libraries for seconds, during which Ctrl-C should end them at once.
CTRL_C_WHILE_LOADING = ('ask', 'compare', 'evaluate', 'export', 'extras.inputs', 'main', 'report')


def _module_run() -> str:
    """Returns the module of `python -m MODULE` while it is imported, else ''."""
    # Only then sys.argv begins so. Python takes -mMODULE too.
    if sys.argv[:1] == ['-m']:
        for word, following in itertools.pairwise([*sys.orig_argv, '']):
            if word.startswith('-m'):
                return word[2:] or following
    return ''


_module = _module_run()
# Not for a module of a user that imports this package: it may write files, which the end of a reader must not cut off.
if _module.split('.')[0] == 'zeroplay_jax':
    from zeroplay_jax.runtime import signals

    signals.open_closed()
    signals.end_with_reader()
    if _module.partition('.')[2] in CTRL_C_WHILE_LOADING:
        signals.exit_while_loading()


def __getattr__(name: str) -> Any:
    """Loads the module of a public name when it is first used."""
    # Loading the API imports JAX and transformers, which `--help` and config checks must not wait for (PEP 562).
    if name == 'config':
        from zeroplay_jax.configuration import fields

        return fields.config
    if name == 'UserError':
        from zeroplay_jax import types

        return types.UserError
    if name in __all__:
        from zeroplay_jax import api

        return getattr(api, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return sorted(['__version__', *__all__])
