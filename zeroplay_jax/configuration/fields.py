"""Configs: defaults from the schema, checks of names, types and bounds, flags, configs of runs and of the package.

Imports no JAX.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import inspect
import operator
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pydantic
from ml_collections import ConfigDict

from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.retrieval import objects
from zeroplay_jax.rollout.prompts import select
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.selfplay import recipe as recipes
from zeroplay_jax.selfplay.judge import PROMPTS
from zeroplay_jax.settings.kinds import (
    CONFIGS,
    IS_INPUT,
    ConfigError,
    Section,
    built_in_path,
    fail,
    leaves,
    warn_once,
)
from zeroplay_jax.settings.schema import (
    DISTILL_FIELDS,
    FILTER_FIELDS,
    Config,
    Inputs,
    Pool,
    Privileged,
    Run,
    TrainedRole,
)


def default_config(recipe: str = 'drzero', like: ConfigDict | None = None) -> ConfigDict:
    """Returns the fields that a recipe reads, with their defaults.

    Args:
      recipe: a built-in name, or the import path of a module.
      like: a config whose settings decide which roles there are; None: the defaults.

    Raises:
      ConfigError: there is no such recipe.
    """
    config = ConfigDict(Run().model_dump())
    config.recipe = recipe
    fit_to_recipe(config, like)
    return config


def fields_of_all(recipe: str | None = None) -> ConfigDict:
    """Returns the fields of all built-in recipes, and of `recipe`, with their defaults, for a config not yet read."""
    config = default_config()
    with config.unlocked():
        for name in (*recipes.BUILT_IN, recipe or config.recipe):
            config.update(default_config(name))
    return config


def fit_to_recipe(
    config: ConfigDict, like: ConfigDict | None = None, is_switched: bool = False
) -> None:
    """Gives a config the fields that `config.recipe` reads, in place.

    Missing ones get their defaults. Sections of other built-in recipes are removed. In the other sections, fields that
    the recipe does not read are removed if they have their defaults; `check_values` refuses them otherwise.

    Args:
      config: is changed.
      like: see `default_config`.
      is_switched: whether the recipe was chosen for a config that a file made for another one. Fields that the recipe
        does not read are then removed whatever their values, so that a config file works with any recipe; a warning
        names those that the file had set.

    Raises:
      ConfigError: there is no such recipe, or the config lacks a field that all recipes have.
    """
    _check_complete(config)
    recipe = recipes.recipe_class(config.recipe)
    before = leaves(config) if is_switched else {}
    with config.unlocked():
        # Roles may depend on the recipe's settings.
        for name, section in recipe.settings.items():
            if name not in config:
                config[name] = ConfigDict(section().model_dump())
        has_settings = like is not None and recipe.settings.keys() <= set(like)
        sections = _sections(recipe, like if like is not None and has_settings else config)
        added = [name for name in sections if name not in config]
        for name, section in sections.items():
            if name in added:
                config[name] = ConfigDict()
            values = config[name]
            for field, default in section().model_dump().items():
                if _reads(recipe, name, section, field):
                    if field not in values:
                        values[field] = default
                elif field in values and (is_switched or values[field] == default):
                    del values[field]
        for name in _sections_of_built_in() - sections.keys():
            if name in config:
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


# What goes with the file of another field of `inputs`.
_FILE_OF_INPUT = {'types': 'documents', 'world_questions': 'questions'}


def _reads(recipe: type[recipes.Recipe], name: str, section: type[Section], field: str) -> bool:
    """Returns whether a recipe reads a field of one of its `_sections`."""
    if section is Inputs:
        return _FILE_OF_INPUT.get(field, field) in recipe.input_files
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
    sections: dict[str, type[Section]] = {**recipe.settings, 'inputs': Inputs}
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


# ---- names -------------------------------------------------------------------------------------------


def check_name(path: str, schema: ConfigDict) -> None:
    """Refuses a dotted name that is not in the schema.

    Raises:
      ConfigError: one line, which suggests a field of similar spelling.
    """
    if not _has(schema, path):
        _refuse_field_of_another(path, schema)
    level: Any = schema
    closest_path = ['config']
    # A misspelt section is replaced by the closest one, so that the suggestion is a complete field.
    for name in path.split('.'):
        section = '.'.join(closest_path)
        if not isinstance(level, ConfigDict):
            raise ConfigError(
                f'config.{path}: {section} is a value and has no fields; set {section} itself'
            )
        candidate: str | None = name
        if name not in level:
            candidate = _similar(name, list(level))
        if candidate is None:
            fields = ', '.join(level)
            raise ConfigError(f'config.{path}: no such field; {section} has {fields}')
        level = level[candidate]
        closest_path.append(candidate)
    if closest_path[1:] != path.split('.'):
        suggestion = '.'.join(closest_path)
        raise ConfigError(f'config.{path}: no such field; did you mean {suggestion}?')


def _has(config: ConfigDict, path: str) -> bool:
    """Returns whether a config has the field or section with a dotted name."""
    level: Any = config
    for name in path.split('.'):
        if not isinstance(level, ConfigDict) or name not in level:
            return False
        level = level[name]
    return True


def _refuse_field_of_another(path: str, schema: ConfigDict) -> None:
    """Raises ConfigError if built-in recipes other than that of the schema read a field."""
    readers = [name for name in recipes.BUILT_IN if _has(default_config(name), path)]
    chosen = schema.get('recipe')
    if not readers or not chosen:
        return
    fix = f'set recipe to {" or ".join(readers)}'
    if chosen not in recipes.BUILT_IN:
        fix = 'declare in its class that it does (docs/recipes.md)'
    raise ConfigError(f'config.{path}: recipe {chosen} does not read it; take it away, or {fix}')


def _similar(name: str, fields: Sequence[str]) -> str | None:
    """Returns the field of the most similar spelling, or with these initials (lr for learning_rate); else None."""
    close = difflib.get_close_matches(name, fields, n=1)
    if close:
        return close[0]
    for field in fields:
        initials = ''.join(word[0] for word in field.split('_'))
        if initials == name:
            return field
    return None


# ---- values ------------------------------------------------------------------------------------------

# pydantic's error types for values of a wrong type, in contrast to values out of bounds.
_TYPE_ERRORS = (
    'bool_type',
    'int_type',
    'float_type',
    'string_type',
    'tuple_type',
)
# Whole numbers beyond it do not fit in the integers of accelerators.
MAX_INT = 2**31 - 1


def type_name(value: Any) -> str:
    """Returns the kind of value that a field takes, for an error line; `value` is its default."""
    if isinstance(value, tuple):
        # Lists have elements of one type; those that are empty by default are of whole numbers.
        return f'a list, each {type_name(value[0] if value else 0)}'
    names = {bool: 'true or false', int: 'a whole number', float: 'a number', str: 'a text'}
    return names[type(value)]


def of_type(name: str, value: Any, default: Any) -> Any:
    """Returns the value of a field with the type of its default: whole numbers as floats, lists as tuples.

    Raises:
      ConfigError: a value of another type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if isinstance(default, tuple) and isinstance(value, list):
        value = tuple(value)
    # In Python a bool is an int.
    is_number = not isinstance(value, bool) or isinstance(default, bool)
    if not isinstance(value, type(default)) or not is_number:
        fail(name, value, f'must be {type_name(default)}', f'give one such as {default!r}')
    return value


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


def _check_complete(config: ConfigDict) -> None:
    """Raises ConfigError (one line) if a config lacks a field that all recipes have."""
    # Those of the other sections depend on the recipe, and get their defaults.
    common = Run().model_dump(exclude=set(_sections_of_built_in()))
    missing = [name for name in leaves(common) if not _has(config, name)]
    if not missing:
        return
    # A misspelt field is not reported as a missing one.
    schema = fields_of_all(config.get('recipe'))
    for name in leaves(config):
        check_name(name, schema)
    fix = 'start the config from zeroplay_jax.configs.common.get_config()'
    raise ConfigError(f'config.{missing[0]}: missing; {fix}')


def check_values(config: ConfigDict) -> None:
    """Refuses unknown fields, wrong types, and values out of bounds, of a config with the fields of its recipe.

    Raises:
      ConfigError: the first problem.
    """
    schema = default_config(config.recipe, config)
    for name in leaves(config):
        check_name(name, schema)
    for name, value in leaves(config).items():
        # In a list, too.
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and abs(number) > MAX_INT:
                fail(name, value, 'not possible', f'give at most {MAX_INT}')
    frozen(config)


def checked_section(section: type[Section], name: str, values: Mapping[str, Any]) -> ConfigDict:
    """Returns a section with these values, and defaults for its other fields.

    Args:
      section: schema of the section.
      name: name of the section, for errors.
      values: field → value.

    Raises:
      ConfigError: an unknown field, a wrong type, or a value out of bounds.
    """
    defaults = ConfigDict({name: section().model_dump()})
    for field in values:
        check_name(f'{name}.{field}', defaults)
    merged = ConfigDict(section().model_dump() | dict(values))
    # The values are read back from the schema, which converts a whole number to a float where it has a float.
    return ConfigDict(_validated(section, merged, f'{name}.').model_dump())


def _validated(section: type[Section], values: ConfigDict, prefix: str = '') -> Any:
    """Returns the values as an object of the schema `section`, or refuses the wrong ones.

    Args:
      section: schema of a section, or of a whole config.
      values: the values; fields that are not there get their defaults.
      prefix: of the names of its fields in a config, such as 'solver.'.
    """
    try:
        return section.model_validate(values.to_dict())
    except pydantic.ValidationError as error:
        given, defaults = leaves(values), leaves(section())
        for problem in error.errors():
            # Integers in the location are positions in a list; the field is the list as a whole.
            name = '.'.join(part for part in problem['loc'] if isinstance(part, str))
            reason, fix = 'not possible', _fix(problem, given[name])
            if problem['type'] in _TYPE_ERRORS:
                reason = f'must be {type_name(defaults[name])}'
                fix = f'give one such as {defaults[name]!r}'
            fail(prefix + name, given[name], reason, fix)


def _fix(problem: Any, value: Any) -> str:
    """Returns how to correct a value, from pydantic's description of the problem."""
    kind = problem['type']
    context = problem.get('ctx', {})
    if kind == 'finite_number':
        return 'give finite numbers' if isinstance(value, tuple) else 'give a finite number'
    if kind == 'greater_than_equal':
        return f'give {context["ge"]} or more'
    if kind == 'greater_than':
        return f'give more than {context["gt"]}'
    if kind == 'literal_error':
        # pydantic writes "'a', 'b' or 'c'".
        choices = context['expected'].replace("'", '').replace(' or ', ', ')
        return f'give one of {choices}{did_you_mean(str(value), choices.split(", "))}'
    if kind == 'value_error':
        return str(context['error'])
    return problem['msg']


def frozen(config: ConfigDict | Config) -> Config:
    """Returns a checked config as an object with typed fields that nothing changes any more; a Config as it is.

    Sections that the recipe does not read, of other recipes and of roles that it does not train, are left out.

    Raises:
      ConfigError: as `check_values`.
    """
    if isinstance(config, Config):
        return config
    return _validated(_model_of(config), config)


# ---- flags of commands -----------------------------------------------------------------------------
#
# Fields set by --config.FIELD=VALUE, for commands that take their config from the run of a policy.


PREFIX = '--config.'


def set_fields(config: ConfigDict, assignments: Sequence[str]) -> None:
    """Sets fields in place and checks names, types and bounds of all of them.

    Args:
      config: a whole config.
      assignments: flags such as '--config.rollout.max_turns=3'.

    Raises:
      ConfigError: one line; an unknown field, or a value of a wrong type or out of bounds.
    """
    if not assignments:
        return
    for assignment in assignments:
        assign(config, assignment)
    check_asked(config)


def assign(config: ConfigDict, assignment: str) -> None:
    """Sets one field by a flag; errors as of `set_field`, or the flag has no value."""
    name, equals, text = assignment.removeprefix(PREFIX).partition('=')
    if not equals:
        raise ConfigError(f'{assignment}: has no value; give {PREFIX}{name}=VALUE')
    value: Any = text
    if not isinstance(_present(config, name), str):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = {'true': True, 'false': False}.get(text.lower(), text)
    set_field(config, name, value)


def set_field(config: ConfigDict, name: str, value: Any) -> None:
    """Sets one field in place; checks its name and type, and no bounds. Another recipe brings its fields.

    Raises:
      ConfigError: one line; an unknown field, a section, or a value of another type.
    """
    present = _present(config, name)
    if isinstance(present, ConfigDict):
        fix = f'set one of its fields, such as {name}.{next(iter(present))}'
        fail(name, value, 'a section and not a field', fix)
    config.update_from_flattened_dict({name: of_type(name, value, present)})
    if name == 'recipe' and value != present:
        fit_to_recipe(config, is_switched=True)


def _present(config: ConfigDict, name: str) -> Any:
    """Returns the value of a field, or the section of this name; ConfigError if there is none."""
    check_name(name, config)
    return functools.reduce(operator.getitem, name.split('.'), config)


# ---- configs of runs -------------------------------------------------------------------------------
#
# The config in the record of a run.


def read_stored_config(workdir: pathlib.Path) -> ConfigDict | None:
    """Returns the config of the run in a workdir; None if there is no run.

    Fields that are missing in the file get their defaults. Built-in checkpoints have their paths in this clone; names
    on the Hub and addresses in a bucket stay as they are.

    Raises:
      WorkdirError, ConfigError: one line; the record cannot be read, its recipe cannot be imported, or it has a field
        that this version does not have, or a value of another type.
    """
    record = run_record.read(workdir)
    if record is None:
        return None
    # The values are written into the defaults, so that fields added since then have a value.
    try:
        config = default_config(record.config['recipe'])
        known = leaves(_model_of(config)()) | leaves(fields_of_all(record.config['recipe']))
        for name, value in leaves(record.config).items():
            # A record may have fields that its recipe does not read.
            if name in known and not _has(config, name):
                continue
            check_name(name, config)
            # Built-in checkpoints are stored by name. Lists of a config are tuples, which JSON does not have.
            if isinstance(value, str):
                value = built_in_path(value)
            if isinstance(value, list):
                value = tuple(value)
            config.update_from_flattened_dict({name: value})
    except recipes.NoSuchRecipe:
        raise ConfigError(
            f'{workdir / run_record.FILE_NAME}: its recipe {record.config["recipe"]} cannot be imported from here; run '
            'the command in the folder that has it, or name that folder in PYTHONPATH'
        ) from None
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{workdir / run_record.FILE_NAME}: not a config of this version: {error}; correct it, or copy the policy '
            'elsewhere'
        ) from None
    return config


# ---- configs of the package ------------------------------------------------------------------------
#
# The config files that come with the project, for Python.


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
    if (CONFIGS / f'{name}.py').is_file():
        module = importlib.import_module(f'zeroplay_jax.configs.{name}')
        settings = _of_variant(name, module.get_config, variant)
    elif variant:
        fix = 'leave it out, or name a file of configs/'
        raise ConfigError(
            f'config: {name!r} is not a file of configs/, so it has no variant {variant!r}; {fix}'
        )
    else:
        settings = _defaults_of_recipe(name)
    if changes is not None and not isinstance(changes, Mapping):
        fix = "give a dict, such as {'solver.batch': 16}"
        raise ConfigError(f'config: changes is a {type(changes).__name__}; {fix}')
    others = dict(changes or {})
    if 'recipe' in others:
        # Which fields there are depends on it.
        set_field(settings, 'recipe', others.pop('recipe'))
    for name in others:
        # An empty dict has no fields, by which a misspelt section would be noticed.
        check_name(str(name), settings)
    for field, value in leaves(others).items():
        set_field(settings, field, value)
    return settings


def _defaults_of_recipe(name: str) -> ConfigDict:
    """Returns the defaults of a recipe; ConfigError, which names the argument, if there is none of this name."""
    try:
        return default_config(name)
    except ConfigError as error:
        reason = str(error).removeprefix(f'config.recipe={name}: ')
        raise ConfigError(f'config: name={name!r}: {reason}') from error


def _of_variant(name: str, get_config: Callable[..., ConfigDict], variant: str) -> ConfigDict:
    """Returns the config of a variant ('' for none) of the file `name`; ConfigError if the file does not have it."""
    # `get_config` of a file without variants takes no argument.
    if not variant:
        return get_config()
    if not inspect.signature(get_config).parameters:
        raise ConfigError(
            f'config: {name} has no variants, so not {variant!r} either; leave it out'
        )
    try:
        return get_config(variant)
    except ValueError as error:
        raise ConfigError(f'config: {name}: {error}') from None


# ---- resumption ------------------------------------------------------------------------------------
#
# A run is resumed only with the config that it was started with.


# Fields that may change on resume: the result does not depend on them.
CHANGEABLE_FIELDS = (
    'progress',
    'stop_after_empty_steps',
    'stop_at_alarms',
    'log.writers',
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
    if objects.is_address(workdir):
        # Only a run in a bucket loads this code.
        from zeroplay_jax.runtime import remote_workdir

        remote_workdir.check(str(workdir), config.bucket.spool, *arguments)
    else:
        run_workdir.check(pathlib.Path(workdir), *arguments)
