"""Bounds of config values: pydantic types whose errors say how to fix the value."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, Field

from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.retrieval.objects import is_address
from zeroplay_jax.retrieval.suggestions import similar_path


class Section(pydantic.BaseModel):
    """A group of fields. The text below a field is its documentation."""

    # Strict: 1 for a bool, or '3' for a number, is more likely a mistake than an intention. Numbers are finite, also
    # those in lists.
    model_config = pydantic.ConfigDict(
        strict=True,
        extra='forbid',
        use_attribute_docstrings=True,
        frozen=True,
        allow_inf_nan=False,
    )


def requires(is_allowed: Callable[[Any], Any], fix: str) -> AfterValidator:
    """Returns a pydantic validator that refuses values for which `is_allowed` is false.

    The user reads 'config.FIELD=VALUE: not possible; {fix}'.
    """

    def validate(value: Any) -> Any:
        # pydantic keeps the text of a ValueError, and `configuration.fields` shows it as the fix.
        if not is_allowed(value):
            raise ValueError(fix)
        return value

    return AfterValidator(validate)


def one_of_or_function(*choices: str) -> AfterValidator:
    """Returns a pydantic validator that accepts the built-in names `choices` and 'package.module:function'."""

    def validate(value: str) -> str:
        module, colon, function = value.partition(':')
        is_path = colon and module and function
        if value not in choices and not is_path:
            fix = f'give one of {", ".join(choices)}, or package.module:function'
            raise ValueError(fix + did_you_mean(value, choices))
        return value

    return AfterValidator(validate)


PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, requires(lambda x: 0 <= x <= 1, 'give 0 to 1')]
OpenFraction = Annotated[float, requires(lambda x: 0 < x < 1, 'give more than 0, less than 1')]
BelowOne = Annotated[float, requires(lambda x: 0 <= x < 1, 'give 0 or more and less than 1')]
MeshAxis = Annotated[
    int, requires(lambda x: x == -1 or x >= 1, 'give 1 or more, or -1 for all devices that remain')
]
WorldSeeds = Annotated[
    tuple[int, ...],
    requires(
        lambda x: len(x) == 2 and x[0] >= 0 and x[1] >= 1,
        'give (first seed, how many), such as (0, 8)',
    ),
]
# The papers ask for up to four hops, and the miniature worlds contain chains of that length.
MAX_HOPS = 4
HopRatio = Annotated[
    tuple[float, ...],
    requires(
        lambda x: 1 <= len(x) <= MAX_HOPS and min(x) >= 0 and 0 < sum(x) < math.inf,
        'give up to four shares, 0 or more and not all 0, such as (4, 3, 2, 1)',
    ),
]
Hops = Annotated[
    tuple[int, ...],
    requires(
        lambda x: x and set(x) <= set(range(1, MAX_HOPS + 1)) and len(set(x)) == len(x),
        'give some of 1, 2, 3, 4, each once',
    ),
]
Window = Annotated[
    tuple[float, ...],
    requires(
        lambda x: len(x) == 2 and 0 <= x[0] <= x[1] <= 1, 'give (low, high) with 0 ≤ low ≤ high ≤ 1'
    ),
]
Sizes = Annotated[
    tuple[int, ...],
    requires(lambda x: all(size >= 1 for size in x), 'give numbers of 1 or more, such as (64,)'),
]
RubricCount = Annotated[
    tuple[int, ...],
    requires(lambda x: len(x) == 2 and 1 <= x[0] <= x[1], 'give (fewest, most), such as (3, 5)'),
]
Prices = Annotated[
    tuple[float, ...],
    requires(
        lambda x: len(x) == 2 and min(x) >= 0,
        'give two prices, 0 or more, such as (0.5, 1.5)',
    ),
]


def _check_request(text: str) -> str:
    """Raises ValueError with the fix for a text that is neither '' nor a JSON object of fields that a judge may set."""
    if not text:
        return text
    try:
        request = json_text.parse_object(text)
    except json_text.Unusable as error:
        raise ValueError(
            f'give a JSON object such as \'{{"reasoning_effort": "low"}}\' ({error})'
        ) from None
    for name in ('model', 'messages', 'stream', 'n'):
        if name in request:
            raise ValueError(f'take {name!r} away, which is set by other means')
    return text


RequestFields = Annotated[str, AfterValidator(_check_request)]
DistillCoefficients = Annotated[
    tuple[float, ...],
    requires(lambda x: x and min(x) >= 0, 'give a list of weights, 0 or more, such as (0.1, 0.03)'),
]


# The file or folder of such a field is an input of the run: a resume on another content of it is refused.
IS_INPUT = 'is_input'
InputPath = Annotated[str, Field(json_schema_extra={IS_INPUT: True})]


def _check_documents_file(path: str) -> str:
    """Raises ValueError with the fix for a path that is neither '' nor a file."""
    # A file in a bucket is looked up when it is fetched.
    if path and not is_address(path) and not pathlib.Path(path).is_file():
        fix = 'name an existing file; python -m zeroplay_jax.inputs documents writes one'
        raise ValueError(fix + similar_path(path))
    return path


DocumentsFile = Annotated[InputPath, AfterValidator(_check_documents_file)]
