"""Configs: the fields that a recipe reads, values by name and by flag, one check, and the configs of runs and pages.

Imports no JAX.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import re
import runpy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pydantic
from absl import flags
from ml_collections import ConfigDict, config_flags

from zeroplay_jax.extras import load_extra
from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.retrieval.command import similar_path, warn_once
from zeroplay_jax.rollout.prompts import select
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.selfplay import recipe as recipes
from zeroplay_jax.selfplay.judge import PROMPTS
from zeroplay_jax.settings.kinds import (
    CONFIGS,
    IS_INPUT,
    ConfigError,
    Problem,
    Section,
    built_in_path,
    leaves,
    refuse,
)
from zeroplay_jax.settings.schema import (
    DISTILL_FIELDS,
    FILTER_FIELDS,
    Config,
    Inputs,
    Pool,
    Privileged,
    Run,
    Schedule,
    TrainedRole,
)
from zeroplay_jax.types import UserError, first_line


def default_config(recipe: str = 'drzero') -> ConfigDict:
    """Returns the fields that a recipe reads, with their defaults.

    Args:
      recipe: a built-in name, or the import path of a module.

    Raises:
      ConfigError: there is no such recipe.
    """
    config = ConfigDict({'recipe': recipe})
    fit_to_recipe(config)
    return config


def fields_of_all(recipe: str | None = None) -> ConfigDict:
    """Returns the fields of all built-in recipes, and of `recipe`, with their defaults."""
    config = default_config()
    with config.unlocked():
        for name in (*recipes.BUILT_IN, recipe or config.recipe):
            config.update(default_config(name))
    return config


def fit_to_recipe(config: ConfigDict, is_switched: bool = False) -> None:
    """Gives a config the fields that `config.recipe` reads, in place.

    Missing ones get their defaults. Sections of other built-in recipes are removed. In the other sections, fields that
    the recipe does not read are removed if they have their defaults; `problems` names them otherwise.

    Args:
      config: is changed.
      is_switched: whether the recipe was chosen for a config that a file made for another one. Fields that the recipe
        does not read are then removed whatever their values, so that a config file works with any recipe; a warning
        names those that the file had set.

    Raises:
      ConfigError: there is no such recipe.
    """
    before = leaves(config) if is_switched else {}
    with config.unlocked():
        _fill(config, Run().model_dump(exclude={'inputs', *_OF_SOME_RECIPES}))
        recipe = recipes.recipe_class(config.recipe)
        # Roles may depend on the recipe's settings.
        _fill(config, {name: section().model_dump() for name, section in recipe.settings.items()})
        sections = _sections(recipe, config)
        added = sections.keys() - set(config)
        for name, section in sections.items():
            defaults = section().model_dump()
            unread = {field for field in defaults if not _reads(recipe, name, section, field)}
            _fill(config, {name: {each: defaults[each] for each in defaults.keys() - unread}})
            for field in unread & set(config[name]):
                if is_switched or config[name][field] == defaults[field]:
                    del config[name][field]
        others = {*config} - sections.keys() - (Run.model_fields.keys() - {*_OF_SOME_RECIPES})
        # Most configs have none, and the other recipes are not loaded.
        for name in others and others & {*_OF_SOME_RECIPES, *_sections_of_built_in()}:
            del config[name]
        # A step draws as many tasks as the largest batch of its roles, so that a default would enlarge a small run. The
        # reference follows fields that are set later, until the batch of the role itself is set.
        is_built_in = recipe.__module__.startswith(recipes.BUILT_IN_PACKAGE)
        for name in added:
            is_role = sections[name] is TrainedRole
            if is_role and not is_built_in and name != recipe.evaluated_role in config:
                config[name].batch = config[recipe.evaluated_role].get_oneway_ref('batch')
    if is_switched:
        defaults, left = leaves(fields_of_all()), leaves(config)
        dropped = [name for name in before.keys() - left if before[name] != defaults.get(name)]
        if dropped:
            names = ', '.join(sorted(dropped))
            warn_once(
                f'recipe {config.recipe} does not read these fields that the config sets: {names}'
            )


def _fill(config: ConfigDict, defaults: Mapping[str, Any]) -> None:
    """Gives a config the values that it lacks, in place."""
    for name, value in defaults.items():
        if name not in config:
            config[name] = ConfigDict(value) if isinstance(value, dict) else value
        elif isinstance(value, dict) and isinstance(config[name], ConfigDict):
            _fill(config[name], value)


# Sections of `Run` that only some recipes read.
_OF_SOME_RECIPES = ('pool', 'privileged')
# What goes with the file of another field of `inputs`.
_FILE_OF_INPUT = {'types': 'documents', 'world_questions': 'questions'}
# Fields of `schedule` about the documents on which questions are asked.
_DOCUMENT_FIELDS = ('repeat_documents', 'initial_document')


def _reads(recipe: type[recipes.Recipe], name: str, section: type[Section], field: str) -> bool:
    """Returns whether a recipe reads a field of one of its `_sections`."""
    if section is Inputs:
        return _FILE_OF_INPUT.get(field, field) in recipe.input_files
    if section is Schedule and field in _DOCUMENT_FIELDS:
        return 'documents' in recipe.input_files
    if section is TrainedRole and field in FILTER_FIELDS:
        return name in recipe.filterable_roles
    if section is TrainedRole and field in DISTILL_FIELDS:
        return name in recipe.distillable_roles
    return True


def _sections(
    recipe: type[recipes.Recipe], config: ConfigDict | Config
) -> dict[str, type[Section]]:
    """Returns the sections that depend on the recipe: its settings, shared ones, and the roles that it trains.

    Raises:
      ConfigError: the name of a role is that of another section, for which it would be mistaken; a role cannot judge.
    """
    sections: dict[str, type[Section]] = {
        **recipe.settings,
        'inputs': Inputs,
        'schedule': Schedule,
    }
    if recipes.reads_pool(recipe):
        sections['pool'] = Pool
    if recipe.distillable_roles:
        sections['privileged'] = Privileged
    reserved = (*Run.model_fields, *recipe.settings, *recipes.RESERVED_ROLES, *dir(Config))
    roles = recipes.roles_of(recipe, config)
    for specification in roles:
        name = specification.name
        if name in reserved or name.startswith('_'):
            raise ConfigError(
                f'{recipe.__module__}: a role cannot be called {name!r}, which the config has already; rename it'
            )
        if specification.is_trained:
            sections[name] = TrainedRole
    judges = []
    for one in roles:
        # A judge is asked with the prompts of its judgements alone.
        if one.tools == one.terminal_tags == () and recipe.judge_roles.get(one.prompt) == one.name:
            judges.append(one.name)
    for prompt, name in recipe.judge_roles.items():
        if prompt not in PROMPTS or name not in judges:
            raise ConfigError(
                f'{recipe.__module__}: judge_roles has {prompt!r}: {name!r}; give one of {", ".join(PROMPTS)} and a '
                'role of the recipe with that prompt, tools=() and terminal_tags=()'
            )
    return sections


@functools.cache
def _sections_of_built_in() -> frozenset[str]:
    """Returns the names of the sections that only some of the built-in recipes read."""
    names: set[str] = set()
    for name in recipes.BUILT_IN:
        recipe = recipes.recipe_class(name)
        settings = {name: section().model_dump() for name, section in recipe.settings.items()}
        names |= _sections(recipe, ConfigDict(Run().model_dump() | settings)).keys()
    return frozenset(names)


def _model_of(config: ConfigDict | Config) -> type[Config]:
    """Returns the schema of a config: `Config` with the sections of its recipe and of the roles that it trains."""
    return _model_with(*_sections(recipes.recipe_class(config.recipe), config).items())


@functools.lru_cache(64)
def _model_with(*sections: tuple[str, type[Section]]) -> type[Config]:
    """Returns `Config` with these sections (name, schema). To make a model takes half the time of a check."""
    fields: dict[str, Any] = {name: (section, section()) for name, section in sections}
    return pydantic.create_model('Config', __base__=Config, **fields)


def input_paths(config: ConfigDict | Config) -> Iterator[tuple[str, str]]:
    """Yields (dotted name, value) of all fields of the type `kinds.InputPath` that are not empty."""
    values = leaves(config)
    for name in _input_fields(_model_of(config), ''):
        if values.get(name):
            yield name, values[name]


def _input_fields(section: type[Section], prefix: str) -> Iterator[str]:
    """Yields the dotted names of the fields of a section, and of those in it, that have the type `kinds.InputPath`."""
    for name, field in section.model_fields.items():
        if isinstance(field.default, Section):
            yield from _input_fields(type(field.default), f'{prefix}{name}.')
        elif isinstance(field.json_schema_extra, dict) and IS_INPUT in field.json_schema_extra:
            yield f'{prefix}{name}'


# Whole numbers beyond it do not fit in the integers of accelerators.
MAX_INT = 2**31 - 1


def check_name(name: str, config: ConfigDict) -> None:
    """Refuses a dotted name that a config does not have.

    Raises:
      ConfigError: one line, which says who reads the field, or suggests one of similar spelling.
    """
    if not _has(config, name):
        raise ConfigError(f'config.{name}: {_unknown(name, config)}')


def _has(config: ConfigDict, path: str) -> bool:
    """Returns whether a config has the field or section with a dotted name."""
    level: Any = config
    for name in path.split('.'):
        if not isinstance(level, ConfigDict) or name not in level:
            return False
        level = level[name]
    return True


def _unknown(name: str, config: ConfigDict) -> str:
    """Returns what is wrong with the name of a field that a config does not have."""
    readers = [recipe for recipe in recipes.BUILT_IN if _has(default_config(recipe), name)]
    if readers or _has(config, name):
        others = f', or set recipe to {" or ".join(readers)}' if readers else ''
        return f'recipe {config.get("recipe")} does not read it; take it away{others}'
    similar = did_you_mean(name, leaves(config))
    return f'no such field{similar or "; docs/configuration.md lists them"}'


def problems(config: ConfigDict) -> Iterator[Problem]:
    """Yields unknown fields, wrong types and values out of bounds, of a config with the fields of its recipe."""
    yield from _refused(_model_of(config), config)
    recipe = recipes.recipe_class(config.recipe)
    for section, schema in _sections(recipe, config).items():
        for field in config[section].keys() & schema.model_fields.keys():
            if not _reads(recipe, section, schema, field):
                name = f'{section}.{field}'
                yield Problem(name, _unknown(name, config))
    for name, value in leaves(config).items():
        # In a list, too.
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and abs(number) > MAX_INT:
                yield Problem(name, f'give at most {MAX_INT}')


def _refused(model: type[Section], values: ConfigDict) -> Iterator[Problem]:
    """Yields what pydantic says about values of a schema."""
    try:
        model.model_validate(values.to_dict())
    except pydantic.ValidationError as error:
        for each in error.errors():
            # Integers in the location are positions in a list; the field is the list as a whole.
            name = '.'.join(part for part in each['loc'] if isinstance(part, str))
            text = each['msg'].removeprefix('Value error, ')
            if each['type'] == 'extra_forbidden':
                text = _unknown(name, ConfigDict(model().model_dump()))
            yield Problem(name, text)


def check_values(config: ConfigDict) -> None:
    """Raises ConfigError with the first of the `problems` of a config."""
    refuse(config, problems(config))


def check_asked(config: ConfigDict) -> None:
    """Checks as `check_values` a config with which a policy is asked.

    Raises:
      ConfigError: the first problem.
    """
    checked = config.copy_and_resolve_references()
    # The documents that the run of a policy trained on need not be there any more.
    if 'documents' in checked.get('inputs', ()):
        checked.inputs.documents = ''
    # Its recipe may have been changed.
    fit_to_recipe(checked)
    check_values(checked)
    select(checked.prompts, recipes.recipe_class(checked.recipe).prompts)


def checked_section(section: type[Section], name: str, values: Mapping[str, Any]) -> ConfigDict:
    """Returns a section with these values, and defaults for its other fields.

    Args:
      section: schema of the section.
      name: name of the section, for errors.
      values: field → value.

    Raises:
      ConfigError: an unknown field, a wrong type, or a value out of bounds.
    """
    fields: dict[str, Any] = {name: (section, section())}
    model = pydantic.create_model('One', __base__=Section, **fields)
    config = ConfigDict({name: dict(values)})
    refuse(config, _refused(model, config))
    # The values are read back from the schema, which converts a whole number to a float where it has a float.
    return ConfigDict(section.model_validate(dict(values)).model_dump())


def frozen(config: ConfigDict | Config) -> Config:
    """Returns a checked config as an object with typed fields that nothing changes any more; a Config as it is.

    Raises:
      ConfigError: as `check_values`.
    """
    if isinstance(config, Config):
        return config
    check_values(config)
    return _model_of(config).model_validate(config.to_dict())


PREFIX = '--config.'
_FLAG = re.compile(r'--?(?:no)?config\.([\w.]+)(=.*)?', re.DOTALL)


def with_values(words: Sequence[str]) -> list[list[str]]:
    """Returns the flags of a command line, each with the next word if that is its value."""
    groups: list[list[str]] = []
    for word in words:
        flag = groups[-1] if groups else ['']
        takes_value = len(flag) == 1 and flag[0].startswith('-') and '=' not in flag[0]
        if takes_value and not word.startswith('--'):
            flag.append(word)
        else:
            groups.append([word])
    return groups


def flags_by_field(words: Sequence[str]) -> dict[str, list[str]]:
    """Returns dotted name → the last flag that sets it: of two lists ml_collections would make one.

    Raises:
      ConfigError: a word that is no such flag.
    """
    last: dict[str, list[str]] = {}
    for group in with_values(words):
        match = _FLAG.fullmatch(group[0])
        if not match:
            raise ConfigError(
                f'{group[0]!r} is not a flag; settings are given as --config.FIELD=VALUE'
            )
        last[match[1]] = group
    return last


def put(config: ConfigDict, flags_of: Mapping[str, list[str]]) -> None:
    """Sets fields in place by `flags_by_field`; checks names and types, and no bounds. A recipe brings its fields.

    Raises:
      ConfigError: one line; an unknown field, or a value of another type.
    """
    if 'recipe' in flags_of:
        before = config.recipe
        _parse(config, flags_of['recipe'])
        chosen = config.recipe
        fit_to_recipe(config, is_switched=chosen != before)
    others = {name: flag for name, flag in flags_of.items() if name != 'recipe'}
    for name in others:
        check_name(name, config)
    _parse(config, itertools.chain.from_iterable(others.values()))


def _parse(config: ConfigDict, flags_of: Iterator[str] | list[str]) -> None:
    """Sets the fields of ml_collections' flags."""
    words, values = ['', *flags_of], flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict(
            'config', config, flag_values=values, lock_config=False, sys_argv=words
        )
        loose = values(words)[1:]
    except flags.Error as error:
        raise ConfigError(first_line(error)) from None
    if loose:
        raise ConfigError(f'{loose[0]!r} is not a flag; settings are given as --config.FIELD=VALUE')


def set_fields(config: ConfigDict, assignments: Sequence[str]) -> None:
    """Sets fields in place and checks names, types and bounds of all of them.

    Args:
      config: a whole config.
      assignments: flags such as '--config.rollout.max_turns=3'.

    Raises:
      ConfigError: one line; an unknown field, or a value of a wrong type or out of bounds.
    """
    if assignments:
        put(config, flags_by_field(assignments))
        check_asked(config)


def read_stored_config(workdir: pathlib.Path) -> ConfigDict | None:
    """Returns the config of the run in a workdir; None if there is no run.

    Fields that are missing in the file get their defaults; those of another version are left out, and a warning names
    them. Built-in checkpoints have their paths in this clone; names on the Hub and addresses in a bucket stay as they
    are.

    Raises:
      WorkdirError, ConfigError: one line; the record cannot be read, its recipe cannot be imported, or it has a value
        of another type.
    """
    record = run_record.read(workdir)
    if record is None:
        return None
    path = workdir / run_record.FILE_NAME
    try:
        config = default_config(record.config['recipe'])
        # A record may have fields that its recipe does not read.
        known = leaves(_model_of(config)()) | leaves(fields_of_all(config.recipe))
        stored = leaves(record.config)
        unknown = sorted(stored.keys() - known.keys())
        for name, value in stored.items():
            # Built-in checkpoints are stored by name.
            if isinstance(value, str):
                value = built_in_path(value)
            if _has(config, name):
                config.update_from_flattened_dict({name: value})
        if unknown:
            raise ConfigError(f'it has no field {unknown[0]}')
    except recipes.NoSuchRecipe:
        raise ConfigError(
            f'{path}: its recipe {record.config["recipe"]} cannot be imported from here; run the command in the folder '
            'that has it, or name that folder in PYTHONPATH'
        ) from None
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{path}: not a config of this version: {first_line(error)}; correct it, or copy the policy elsewhere'
        ) from None
    return config


def available_configs() -> str:
    """Returns the config files of the project, as flags in one text."""
    config_flags = []
    # Sorted, because the order of `glob` depends on the file system.
    for path in sorted(CONFIGS.glob('[a-z]*.py')):
        # common.py has the defaults that the others start from; it is not a run.
        if path.stem != 'common':
            config_flags.append(f'--config=configs/{path.name}')
    return ', '.join(config_flags)


def config_of_file(config_file: str | None) -> ConfigDict:
    """Returns the config of a file, 'configs/drzero.py:mini', as no flag has changed it. Executes the file.

    A file in the current folder takes precedence over that of the package: in a checkout the user edits that one.

    Raises:
      ConfigError: one line; there is no such file, or it fails.
    """
    if not config_file:
        raise ConfigError(f'no config; give one of {available_configs()}, or a file of your own')
    name, _, variant = config_file.partition(':')
    path = pathlib.Path(name)
    if not path.is_file() and path.parts[:-1] == ('configs',):
        path = CONFIGS / path.name
    if not path.is_file():
        raise ConfigError(
            f'--config={config_file}: no such file; there are {available_configs()}{similar_path(name)}'
        )
    try:
        config = runpy.run_path(str(path))['get_config'](*filter(None, [variant]))
        fit_to_recipe(config)
        return config
    except UserError:
        raise
    except Exception as error:
        # A config is a Python file, so any exception is possible.
        kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
        raise ConfigError(f'--config={config_file}: {kind}{first_line(error)}') from error


def config(
    name: str = 'drzero', variant: str = '', changes: Mapping[str, Any] | None = None
) -> ConfigDict:
    """Returns the settings of a config file that comes with the project, or the defaults of a recipe.

        config = zp.config('drzero', 'mini', {'solver.batch': 16, 'seed': 1})

    Args:
      name: a file of configs/ without '.py' ('drzero', 'quickstart'), or the import path of a recipe.
      variant: what follows the colon in --config=configs/drzero.py:mini.
      changes: dotted field name → value, or section → dict of the fields of it that change.

    Raises:
      ConfigError: there is no such config, recipe, variant or field, or a value of another type.
    """
    if variant or (CONFIGS / f'{name}.py').is_file():
        settings = config_of_file(f'configs/{name}.py:{variant}'.rstrip(':'))
    else:
        settings = default_config(name)
    others = dict(changes or {})
    if 'recipe' in others:
        # Which fields there are depends on it.
        before, chosen = settings.recipe, others.pop('recipe')
        settings.recipe = chosen
        fit_to_recipe(settings, is_switched=chosen != before)
    for field in others:
        # An empty dict has no fields, by which a misspelt section would be noticed.
        check_name(str(field), settings)
    for field, value in leaves(others).items():
        check_name(field, settings)
        if isinstance(value, np.generic):
            value = value.item()
        try:
            settings.update_from_flattened_dict({field: value})
        except TypeError as error:
            raise ConfigError(f'config.{field}={value!r}: {first_line(error)}') from None
    if others:
        check_values(settings)
    return settings


# Fields that may change on resume: the result does not depend on them, or, of the iterations, goes on from there.
CHANGEABLE_FIELDS = (
    'schedule.iterations',
    'progress',
    'stop_after_empty_steps',
    'stop_at_alarms',
    'log.writers',
    'log.rows',
    'profile.steps',
    'checkpoint.every',
    'checkpoint.keep',
    'checkpoint.best',
    'bucket.spool',
    'bucket.seconds',
    'compilation.cache',
    'offload',
    'distributed.mode',
    'distributed.coordinator',
    'distributed.processes',
    'distributed.process',
    'distributed.heartbeat',
)


def changeable_fields(config: ConfigDict | Config) -> tuple[str, ...]:
    """Returns the fields that may change when a run of this config is resumed."""
    changeable = list(CHANGEABLE_FIELDS)
    if config.rollout.deterministic:
        # The limit has no effect in a deterministic run, which has no deadlines.
        changeable.append('rollout.tool_timeout')
    return tuple(changeable)


def check(workdir: str | pathlib.Path, config: ConfigDict | Config) -> None:
    """Refuses a workdir of another config; changes nothing.

    Raises:
      WorkdirError: one line.
    """
    arguments = (frozen(config).to_dict(), changeable_fields(config))
    if downloads.is_address(workdir):
        load_extra('buckets', 'workdir').check(str(workdir), config.bucket.spool, *arguments)
    else:
        run_workdir.check(pathlib.Path(workdir), *arguments)
