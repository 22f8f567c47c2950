"""Checks a run's config before anything heavy is loaded: one line says what is wrong and how to mend it.

Reads command lines and configs with absl, ml_collections and NumPy only, so that a mistake shows in a second
and not after JAX, TensorFlow and transformers have come up. `configs/common.py` lists all fields and their
types.
"""

from __future__ import annotations

import difflib
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from zeroplay_jax import rules
from zeroplay_jax.configs import common
from zeroplay_jax.rules import RULES, ConfigError, fail, fields

__all__ = ['RULES', 'ConfigError', 'check', 'check_command', 'fields', 'parse_flags']

# ------------------------------------------------------------------------------------------------------------
# Fields: names and types
# ------------------------------------------------------------------------------------------------------------


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """The field that was probably meant: a near spelling, or initials (lr for learning_rate)."""
    near = difflib.get_close_matches(name, known, n=1)
    initials = [field for field in known if ''.join(word[0] for word in field.split('_')) == name]
    return next(iter(near + initials), None)


def _check_name(path: str, schema: ConfigDict) -> None:
    """Raises ConfigError, with the field that was probably meant, unless the dotted name is in the schema."""
    level, meant = schema, ['config']
    for name in path.split('.'):
        here = '.'.join(meant)
        if not isinstance(level, ConfigDict):
            raise ConfigError(
                f'config.{path}: {here} is a value and has no fields; set {here} itself'
            )
        found = name if name in level else _nearest(name, list(level))
        if found is None:
            raise ConfigError(f'config.{path}: no such field; {here} has {", ".join(level)}')
        level = level[found]
        meant.append(found)
    if meant[1:] != path.split('.'):
        raise ConfigError(f'config.{path}: no such field; did you mean {".".join(meant)}?')


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f'a list, each {_kind(value[0])}'
    return {bool: 'true or false', int: 'a whole number', float: 'a number', str: 'a text'}[
        type(value)
    ]


def _same_type(value: Any, default: Any) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, tuple) and all(_same_type(item, default[0]) for item in value)
    if isinstance(default, float):
        return type(value) in (int, float)
    return type(value) is type(default)


def _check_fields(config: ConfigDict) -> None:
    schema = common.get_config()
    for name, _ in fields(config):
        _check_name(name, schema)
    given = dict(fields(config))
    for name, default in fields(schema):
        if name not in given:
            raise ConfigError(
                f'config.{name}: missing; start the config from zeroplay_jax.configs/common.py'
            )
        if not _same_type(given[name], default):
            fail(name, given[name], f'must be {_kind(default)}', f'give one such as {default!r}')


def check(config: ConfigDict, measured: bool = True) -> None:
    """Refuses a config that cannot run: unknown fields, wrong types, impossible values and combinations.

    Reads the disk for the recipe and the checkpoint folder, and loads neither.

    Args:
      config: all fields of configs/common.py.
      measured: whether its own questions are asked, which a corpus of the user's has in `eval.file`.

    Raises:
      ConfigError: one line; the first mistake found.
    """
    _check_fields(config)
    for rule in rules.CHECKS:
        rule(config)
    if measured and config.retrieval.kind != 'world' and not config.eval.file:
        mend = 'name JSON lines of questions with answers to evaluate on'
        fail('eval.file', '', 'a corpus of your own has no questions yet', mend)


# ------------------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------------------


def _ready_configs() -> str:
    pages = (rules.PACKAGE.parent / 'configs').glob('[a-z]*.py')
    return ', '.join(
        sorted(f'--config=configs/{page.name}' for page in pages if page.stem != 'common')
    )


def _check_arguments(argv: Sequence[str]) -> None:
    """What the flag library would answer with a traceback or a page: names of files and of fields."""
    schema = common.get_config()
    for argument in argv[1:]:
        flag, _, value = argument.lstrip('-').partition('=')
        if not argument.startswith('-'):
            continue
        if flag == 'config' and value and not pathlib.Path(value.split(':')[0]).is_file():
            raise ConfigError(f'--config={value}: no such file; there are {_ready_configs()}')
        if re.match(r'(no)?config\.', flag):
            _check_name(flag.split('.', 1)[1], schema)


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Reads the command line into absl's flags.

    Args:
      argv: the command line, the program's name first.

    Returns:
      The positional arguments, the program's name first (absl's convention).

    Raises:
      ConfigError: one line; an unknown flag or field, a value of the wrong type, a config that does not load.
    """
    _check_arguments(argv)
    try:
        return flags.FLAGS(argv)
    except flags.IllegalFlagValueError as error:
        field = re.match(r'flag --config\.([\w.]+)=(.*?): ', str(error), re.DOTALL)
        default = dict(fields(common.get_config())).get(field[1]) if field else None
        if field and default is not None:
            fail(field[1], field[2], f'must be {_kind(default)}', f'give one such as {default!r}')
        page = re.match(r'flag (--config=.*?): ', str(error))
        raise ConfigError(
            f'{page[1]}: {_last_line(error)}' if page else _last_line(error)
        ) from error
    except flags.Error as error:
        raise ConfigError(f'{_last_line(error)}; --help shows how to call it') from error
    except Exception as error:  # the config is a Python file: whatever is wrong in it arrives here
        reason = f'{type(error).__name__}: {_last_line(error)}'
        raise ConfigError(f'the config could not be loaded: {reason}') from error


def check_command(
    argv: Sequence[str], config: ConfigDict | None, workdir: str | None, measured: bool = True
) -> None:
    """Refuses a command line that names no config or no workdir, and a config that cannot run (see `check`).

    Args:
      argv: positional arguments left over by the flags, the program's name first.
      config: the value of --config; workdir: the value of --workdir, a path.   measured: see `check`.

    Raises:
      ConfigError: one line; the first mistake found.
    """
    if len(argv) > 1:
        raise ConfigError(f'{argv[1]!r} is not a flag; settings are given as --config.FIELD=VALUE')
    if config is None:
        raise ConfigError(f'which run? give one of {_ready_configs()}, or a file of your own')
    if not workdir:
        raise ConfigError('where to? give --workdir=FOLDER, such as --workdir=runs/first')
    if any(path.is_file() for path in (pathlib.Path(workdir), *pathlib.Path(workdir).parents)):
        raise ConfigError(f'--workdir={workdir}: there is a file in this place; name a folder')
    check(config, measured)


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()
