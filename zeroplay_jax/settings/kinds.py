"""Kinds of config values: pydantic types whose errors say how to mend a value, and paths of the package."""

from __future__ import annotations

import filecmp
import hashlib
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import pydantic
from pydantic import AfterValidator, Field

from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.retrieval.command import similar_path
from zeroplay_jax.retrieval.masking import hide
from zeroplay_jax.types import UserError


class Section(pydantic.BaseModel, Mapping):
    """A group of fields. The text below a field is its documentation.

    A mapping, because it reads as a ConfigDict does, which recipes and tools get where a policy is asked and in checks.
    """

    # Strict: 1 for a bool, or '3' for a number, is more likely a mistake than an intention. Numbers are finite, also
    # those in lists.
    model_config = pydantic.ConfigDict(
        strict=True,
        extra='forbid',
        use_attribute_docstrings=True,
        frozen=True,
        allow_inf_nan=False,
    )

    def __getitem__(self, name: str) -> Any:
        if name not in type(self).model_fields:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return iter(type(self).model_fields)

    def __len__(self) -> int:
        return len(type(self).model_fields)

    def to_dict(self) -> dict[str, Any]:
        """Returns the values as nested dicts."""
        return self.model_dump()

    def conflicts(self) -> Iterator[Problem]:
        """Yields what is wrong between the fields of the section; a problem names a field of it."""
        yield from ()


def leaves(config: Any, prefix: str = '') -> dict[str, Any]:
    """Returns dotted name → value of all fields of a config, or of nested dicts, in their order."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if hasattr(value, 'items'):
            flat |= leaves(value, f'{prefix}{name}.')
        else:
            flat[f'{prefix}{name}'] = value
    return flat


def requires(is_allowed: Callable[[Any], Any], fix: str) -> AfterValidator:
    """Returns a pydantic validator that refuses values for which `is_allowed` is false.

    The user reads 'config.FIELD=VALUE: {fix}'.
    """

    def validate(value: Any) -> Any:
        # pydantic keeps the text of a ValueError, which `configuration.fields` shows.
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
# The papers ask for up to four hops; the miniature worlds contain chains of this length.
MAX_HOPS = 6
HopRatio = Annotated[
    tuple[float, ...],
    requires(
        lambda x: 1 <= len(x) <= MAX_HOPS and min(x) >= 0 and 0 < sum(x) < math.inf,
        'give up to six shares, 0 or more and not all 0, such as (4, 3, 2, 1)',
    ),
]
Hops = Annotated[
    tuple[int, ...],
    requires(
        lambda x: x and set(x) <= set(range(1, MAX_HOPS + 1)) and len(set(x)) == len(x),
        'give some of 1 to 6, each once',
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


class ConfigError(UserError):
    """A config that cannot run."""


class AbsentSection(ConfigError, AttributeError):
    """Code of a recipe reads a section of the config that the recipe does not declare."""

    def __init__(self, recipe: str, section: str):
        super().__init__(
            f'config.{section}: code of recipe {recipe} reads it, and the recipe declares no such section; declare it '
            'in its class (roles, settings, has_pool: docs/recipes.md), or override what reads it'
        )


class Problem(NamedTuple):
    """What is wrong with a setting.

    Attributes:
      field: dotted name of the field.
      text: the problem and, behind '; ', what to give.
    """

    field: str
    text: str


def changes(section: Section, defaults: Section, text: str) -> Iterator[Problem]:
    """Yields the fields of a section that nothing reads now and that differ from the defaults."""
    for name, default in defaults.items():
        if section[name] != default:
            yield Problem(name, text)


def line_about(config: Any, problem: Problem) -> str:
    """Returns the line 'config.FIELD=VALUE: PROBLEM; FIX'."""
    name = f'config.{problem.field}'
    values = leaves(config)
    if problem.field in values:
        value = values[problem.field]
        # Texts are written without quotes, as on a command line; an empty one would be invisible and keeps them.
        is_text = isinstance(value, str) and value
        name += f'={value if is_text else repr(value)}'
    return hide(f'{name}: {problem.text}')


def refuse(config: Any, problems: Iterable[Problem] | None) -> None:
    """Raises ConfigError with the line about the first problem, if there is one."""
    for problem in problems or ():
        raise ConfigError(line_about(config, problem))


def warn(line: str) -> None:
    """Prints a warning on standard error."""
    print(f'warning: {line}', file=sys.stderr)


# Values of config.prompts that name a file of zeroplay_jax/prompts.
PROMPT_SETS = ('mini', 'numbered', 'full')


def prompts_text(source: str) -> str:
    """Returns a name of PROMPT_SETS, or the text of a file of prompts, as it is; the text in a file by its path.

    A text has several lines, by which it differs from a path.

    Raises:
      ValueError: what is wrong with the path, and the fix.
    """
    if source in PROMPT_SETS or '\n' in source:
        return source
    try:
        text = pathlib.Path(source).read_text(encoding='utf-8-sig')
    except (OSError, ValueError) as error:
        near = did_you_mean(source, PROMPT_SETS) or similar_path(source)
        raise ValueError(
            f'cannot be read as a text in UTF-8 ({error}); give one of {", ".join(PROMPT_SETS)}, or a TOML file of '
            f'prompts{near}'
        ) from None
    return text if '\n' in text else f'{text}\n'


def prompts_name(source: str) -> str:
    """Returns how messages, records and cards name prompts: those of a text by its hash, others as they are."""
    if '\n' not in source:
        return source
    return f'own, sha256 {hashlib.sha256(source.encode()).hexdigest()[:16]}'


PACKAGE = pathlib.Path(__file__).parents[1]
# The checkpoint behind policy.path=''.
BUILT_IN_CHECKPOINT = PACKAGE / 'mini' / 'base'
# Was shown chains of at most two hops (configs/quickstart.py); its prompts are 'numbered'.
PARTS_CHECKPOINT = PACKAGE / 'mini' / 'parts' / 'base'
# A small policy that also sets and does open tasks (configs/scope.py:mini).
OPEN_CHECKPOINT = PACKAGE / 'mini' / 'open' / 'base'
CONFIGS = PACKAGE / 'configs'
# A small policy that reads English, for texts of the user (configs/english.py).
ENGLISH_CHECKPOINT = PACKAGE / 'mini' / 'english' / 'base'
# Fifteen short texts, an example of a user's corpus.
EXAMPLE_TEXTS = PACKAGE / 'mini' / 'texts'
# Open tasks of the training worlds, with rubrics (configs/ablations.py:scope/given_tasks:mini).
EXAMPLE_TASKS = PACKAGE / 'mini' / 'open' / 'tasks.jsonl'
# Files of a policy folder that a run reads; a README may change.
POLICY_SUFFIXES = ('.json', '.safetensors', '.jinja', '.txt')
# {"hops": most hops of a demonstration}, by the maker of a policy: the summary of a run says so, training is the same.
DEMONSTRATIONS = 'demonstrations.json'
# Path of a checkpoint or text that some clone or installation of the project brings.
_IN_A_CLONE = re.compile(r'/(?:.*/)?(zeroplay_jax/mini/.+)')


def built_in_name(path: str) -> str:
    """Returns the name of a file or folder that comes with the package, such as 'zeroplay_jax/mini/base'.

    The name is the same in all clones of the project. A path in a clone that was moved or removed has it, too. Any
    other text is returned as it is.
    """
    match = _IN_A_CLONE.fullmatch(os.path.normpath(path))
    if match is None:
        return path
    local_path = PACKAGE.parent / match[1]
    if not os.path.exists(local_path):
        return path
    # A clone that still exists may have changed its files.
    if os.path.exists(path) and not _has_same_content(path, local_path):
        return path
    return match[1]


def _has_same_content(path: str, local_path: pathlib.Path) -> bool:
    """Returns whether two files, or two folders in the files that a run reads, have the same bytes."""
    if os.path.samefile(path, local_path):
        return True
    if os.path.isfile(path) and local_path.is_file():
        return filecmp.cmp(path, local_path, shallow=False)
    if not (os.path.isdir(path) and local_path.is_dir()):
        return False
    names, local_names = (
        sorted(filter(is_policy_file, os.listdir(folder))) for folder in (path, local_path)
    )
    if names != local_names:
        return False
    equal_names, _, _ = filecmp.cmpfiles(path, local_path, names, shallow=False)
    return sorted(equal_names) == names


def is_server(address: str) -> bool:
    """Returns whether a text is the address of a server over HTTP."""
    return address.startswith(('http://', 'https://'))


def is_policy_file(name: str) -> bool:
    """Returns whether training depends on a file of this name in a folder of a policy."""
    return name.endswith(POLICY_SUFFIXES) and name != DEMONSTRATIONS


def built_in_path(text: str) -> str:
    """Returns the path, in this clone, of what `built_in_name` names; any other text as it is."""
    name = os.path.normpath(built_in_name(text))
    path = PACKAGE.parent / name
    if name.startswith('zeroplay_jax/mini/') and os.path.exists(path):
        return str(path)
    return text
