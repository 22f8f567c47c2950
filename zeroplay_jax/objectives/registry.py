"""Looks up a function by its built-in name or by 'package.module:attribute'."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Returns '; did you mean CHOICE?' for the choice of the most similar spelling; '' if none is similar."""
    close_names = difflib.get_close_matches(name, list(choices), n=1)
    return f'; did you mean {close_names[0]}?' if close_names else ''


def resolve(
    kind: str,
    name: str | Callable,
    built_in: Mapping[str, Any],
    positional: Sequence[str] = (),
    keywords: Sequence[str] = (),
) -> Any:
    """Returns the built-in of that name, or imports 'package.module:attribute'; a function itself is returned.

    Args:
      kind: what is looked up, for error texts ('loss', 'difficulty').
      name: a key of `built_in`, 'package.module:attribute' of any module that Python can import, or a function.
      built_in: the built-in objects by name.
      positional: names of the arguments that the function will be called with by position.
      keywords: names of those that it will be called with by keyword.

    Raises:
      ValueError: the name is neither, the module or the attribute does not exist, or the object cannot be called with
        these arguments. The message is one line.
    """
    if callable(name):
        check_signature(f'{kind} {name!r}', name, positional, keywords)
        return name
    # Anything else is refused as a name.
    name = str(name)
    if name in built_in:
        return built_in[name]

    module_name, _, attribute = name.partition(':')
    # importlib reads a leading dot as relative to a package, and there is none here.
    if not module_name or not attribute or module_name.startswith('.'):
        choices = ', '.join(built_in)
        raise ValueError(
            f"{kind} {name!r} is not built in; choose one of {choices}, or give 'package.module:function'"
            f'{did_you_mean(name, built_in)}'
        )

    # Only ImportError is converted: any other exception is a bug in that module, and its traceback shows the line.
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f'{kind} {name!r}: cannot import module {module_name!r} ({error}); check its name and PYTHONPATH'
        ) from error

    if not hasattr(module, attribute):
        raise ValueError(
            f'{kind} {name!r}: module {module_name!r} has no {attribute!r}; define it there or correct the name'
            f'{did_you_mean(attribute, dir(module))}'
        )
    function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(
            f'{kind} {name!r}: {attribute!r} is a {type(function).__name__}; name a function instead'
        )
    check_signature(f'{kind} {name!r}', function, positional, keywords)
    return function


def check_signature(
    name: str, function: Callable, positional: Sequence[str], keywords: Sequence[str]
) -> None:
    """Raises ValueError, whose line begins with `name`, for an async function or one that takes other arguments."""
    # A function, or an object that is called.
    called = (function, type(function).__call__)
    if any(map(inspect.iscoroutinefunction, called)) or inspect.isasyncgenfunction(function):
        raise ValueError(f'{name}: nothing awaits its result; define it with def, not async def')
    try:
        # A decorator with functools.wraps may take other arguments than the function that it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        # Some functions written in C have no signature.
        return
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ', '.join([*positional, *(f'{keyword}=…' for keyword in keywords)])
        raise ValueError(f'{name}: {error}; it is called with ({call})') from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossProperties:
    """What a policy loss states about itself.

    Attributes:
      uses_ratio: whether the loss corrects for the difference between `logp` and `old_logp`. Without it a batch serves
        one update only (`config.<role>.minibatches` = 1).
      ratio_per_token: whether the ratio is per token, not per sequence. A ratio per sequence needs whole rollouts.
      elementwise: whether losses and statistics are those of each token alone, added up. The function is then called
        with chunks of tokens instead of whole rows, and the gradient computed in the same pass: the update computes
        the logits once. Must be False for a loss that couples the tokens of a rollout, and for a statistic that is
        not a sum over tokens, such as a count of rollouts (checks.py).
    """

    uses_ratio: bool = True
    ratio_per_token: bool = True
    elementwise: bool = False

    def __post_init__(self):
        if self.elementwise and not self.ratio_per_token:
            raise ValueError(
                'a loss with a ratio per sequence is not elementwise; set one of the two to False'
            )


# Each is the function of its name in objectives/policy_gradient.py.
BUILT_IN_LOSSES: Mapping[str, LossProperties] = {
    'reinforce': LossProperties(uses_ratio=False, elementwise=True),
    'token_pg': LossProperties(elementwise=True),
    'sequence_pg': LossProperties(ratio_per_token=False),
    'geometric_pg': LossProperties(ratio_per_token=False),
    'cispo': LossProperties(elementwise=True),
}
