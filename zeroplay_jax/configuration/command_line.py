"""Command lines: flags and config files are checked before slow libraries are loaded.

Only absl, ml_collections, pydantic and NumPy are imported, so that a mistake is reported within a second and not after
JAX, TensorFlow and transformers are loaded.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re
import runpy
import sys
from collections.abc import Iterator, Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.retrieval.suggestions import similar_path
from zeroplay_jax.runtime.workdir import check_is_folder
from zeroplay_jax.selfplay import recipe as recipes
from zeroplay_jax.settings.errors import ConfigError, fail
from zeroplay_jax.settings.paths import CONFIGS
from zeroplay_jax.settings.renamed import OLD_FIELDS

NO_WORKDIR = 'no folder for the run; give --workdir=FOLDER, such as --workdir=runs/first'


def no_config() -> str:
    """Returns the line about a command without --config."""
    return f'no config; give one of {available_configs()}, or a file of your own'


def available_configs() -> str:
    """Returns the config files of the project, as flags in one text."""
    config_flags = []
    # Sorted, because the order of `glob` depends on the file system.
    for path in sorted(CONFIGS.glob('[a-z]*.py')):
        # common.py has the defaults that the others start from; it is not a run.
        if path.stem != 'common':
            config_flags.append(f'--config=configs/{path.name}')
    return ', '.join(config_flags)


def with_packaged_configs(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with --config=configs/NAME.py replaced by the packaged file, unless the file exists."""
    replaced: list[str] = []
    for argument in argv:
        match = re.fullmatch(r'(--?config=)?configs/(\w+\.py)(:.*)?', argument)
        # absl also accepts the value as the next argument.
        is_config = match and (match[1] or replaced[-1:] in (['--config'], ['-config']))
        # A file in the current folder takes precedence: in a checkout the user edits that one.
        if match and is_config and not (pathlib.Path('configs') / match[2]).is_file():
            packaged = CONFIGS / match[2]
            if packaged.is_file():
                argument = f'{match[1] or ""}{packaged}{match[3] or ""}'
        replaced.append(argument)
    return replaced


def with_short_flags(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with --policy and --index, which all commands have, written as fields of the config.

    --policy=PATH is --config.policy.path=PATH; --index=PATH is the index folder PATH, or the search server at an
    http(s) address.

    Raises:
      ConfigError: such a flag without a value.
    """
    expanded: list[str] = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        match = re.fullmatch(r'--?(policy|index)(=(.*))?', argument, re.DOTALL)
        if not match:
            expanded.append(argument)
            continue
        value = match[3]
        # absl also accepts the value as the next argument.
        if match[2] is None:
            value = remaining.pop(0) if remaining else ''
        if not value:
            raise ConfigError(f'--{match[1]}: names nothing; give --{match[1]}=PATH')
        if match[1] == 'policy':
            expanded.append(f'--config.policy.path={value}')
        else:
            expanded += index_fields(value)
    return expanded


def index_fields(index: str) -> list[str]:
    """Returns the fields, as flags, that choose an index folder, or a search server by its http(s) address."""
    if index.startswith(('http://', 'https://')):
        return ['--config.retrieval.kind=http', f'--config.retrieval.url={index}']
    # Without the encoder of another index: an index names its own.
    return [
        '--config.retrieval.kind=folder',
        f'--config.retrieval.path={index}',
        '--config.retrieval.encoder=',
    ]


def without_repeated_fields(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with the last one of each field of the config.

    The flag library would join the values of a list that is given twice.
    """
    kept: list[str] = []
    names = set()
    following = ''
    for argument in reversed(argv):
        match = re.fullmatch(r'--?config\.([\w.]+)(=.*)?', argument, re.DOTALL)
        if match and match[1] in names:
            # The value may be the next argument.
            if match[2] is None and not following.startswith('-'):
                kept.pop()
        else:
            kept.append(argument)
        if match:
            names.add(match[1])
        following = argument
    return kept[::-1]


def recipe_flag(argv: Sequence[str]) -> str | None:
    """Returns the value of --config.recipe; None without this flag."""
    recipe = None
    for argument, following in itertools.zip_longest(argv[1:], argv[2:]):
        flag, equals, value = argument.lstrip('-').partition('=')
        if not argument.startswith('-') or flag != 'config.recipe':
            continue
        # absl also accepts the value as the next argument. The last flag takes effect.
        recipe = value if equals else following
    return recipe


class _ConfigWithSections(flags.ArgumentParser):
    """Parses --config, and adds the sections of the recipe that --config.recipe chooses.

    ml_collections applies flags to the fields that the config file defines. An external recipe has additional
    sections, which must exist before their fields are set.

    Args:
      parser: parses --config.
      recipe: the value of --config.recipe.
    """

    def __init__(self, parser: flags.ArgumentParser, recipe: str):
        self._parser = parser
        self._recipe = recipe

    def parse(self, argument: str) -> ConfigDict:
        """Returns the loaded config with `config.recipe` set and the sections of that recipe added."""
        config = self._parser.parse(argument)
        # A file that could not be loaded gives another object, which raises when it is used.
        if isinstance(config, ConfigDict) and 'recipe' in config:
            config.recipe = self._recipe
            fields.add_missing_sections(config)
        return config

    def flag_type(self) -> str:
        return self._parser.flag_type()


@contextlib.contextmanager
def _sections_of(chosen_recipe: str | None) -> Iterator[None]:
    """A context in which a config loaded by --config gets the sections of this recipe; None: nothing changes."""
    if chosen_recipe is None:
        yield
        return
    config_flag = flags.FLAGS['config']
    parser = config_flag.parser
    config_flag.parser = _ConfigWithSections(parser, chosen_recipe)
    try:
        yield
    finally:
        config_flag.parser = parser


def check_arguments(argv: Sequence[str], chosen_recipe: str | None) -> None:
    """Checks names of files and fields, for which the flag library would print a traceback or many lines.

    Args:
      argv: the command line, the program's name first.
      chosen_recipe: the value of --config.recipe, or None.

    Raises:
      ConfigError: no such config file or field.
    """
    # The schema is built only if a field is set, because it imports all recipes.
    schema = None
    for argument in argv[1:]:
        flag, _, value = argument.lstrip('-').partition('=')
        if not argument.startswith('-'):
            continue
        config_file = value.split(':')[0]
        if flag == 'config' and value and not pathlib.Path(config_file).is_file():
            raise ConfigError(
                f'--config={value}: no such file; there are {available_configs()}{similar_path(config_file)}'
            )
        if re.match(r'(no)?config\.', flag):
            schema = schema or _schema(chosen_recipe)
            name = flag.split('.', 1)[1]
            # A field of an unknown section may belong to an external recipe, whose fields are known only when the
            # config file is loaded; `_check_recipe_fields` checks it then.
            if name.split('.')[0] in schema or '.' not in name or name in OLD_FIELDS:
                fields.check_name(name, schema)


def _schema(chosen_recipe: str | None) -> ConfigDict:
    """Returns all fields with their defaults, with the sections of the chosen recipe."""
    if chosen_recipe is None:
        return fields.default_config()
    return fields.default_config(chosen_recipe)


def config_of_file(config_file: str) -> ConfigDict:
    """Returns the config of a file, 'configs/drzero.py:mini', as no flag has changed it. Executes the file."""
    path, _, variant = config_file.partition(':')
    return runpy.run_path(path)['get_config'](*filter(None, [variant]))


def _check_recipe_fields(argv: Sequence[str], chosen_recipe: str | None) -> None:
    """Called after flags failed; raises ConfigError if a flag sets a field that the config file does not have.

    Executes the config file, because the sections of an external recipe are known only then.
    """
    assignments = [argument.lstrip('-').partition('=') for argument in argv[1:]]
    config_files = [value for flag, _, value in assignments if flag == 'config']
    if len(config_files) != 1:
        return
    try:
        config_recipe = config_of_file(config_files[0]).recipe
        schema = fields.default_config(chosen_recipe or config_recipe)
    except Exception:
        # The config file itself fails, which the caller reports.
        return
    for flag, _, _ in assignments:
        section, _, name = flag.partition('.')
        if section in ('config', 'noconfig') and name:
            fields.check_name(name, schema)


def check_sections(argv: Sequence[str], config: ConfigDict | None) -> None:
    """Refuses flags that set a field of another recipe: of its section, or of a role that the recipe does not train.

    A config file may have them, because it works with any recipe; somebody who gives a flag expects an effect.
    """
    # A recipe of another package may read the sections of any other. Incomplete configs are refused by `rules.check`.
    if config is None:
        return
    chosen = config.get('recipe')
    if chosen not in recipes.BUILT_IN:
        return
    for argument in argv[1:]:
        match = re.match(r'--?(?:no)?config\.(\w+)\.([\w.]+)', argument)
        if not match:
            continue
        section, field = match.groups()
        readers = [name for name in recipes.BUILT_IN if _has_section(name, section)]
        if readers and chosen not in readers:
            problem = f'recipe {chosen} does not read this section'
            fix = f'take it away, or set recipe to {" or ".join(readers)}'
            fail(f'{section}.{field}', config[section][field], problem, fix)


def _has_section(name: str, section: str) -> bool:
    """Returns whether a section belongs to a built-in recipe: its settings, or a role that it trains."""
    recipe = recipes.recipe_class(name)
    defaults = fields.default_config(name)
    roles = [role.name for role in recipe.roles(defaults) if role.is_trained]
    return section in (*recipe.settings, *roles)


def expanded(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with packaged configs, short flags and repeated fields resolved; see these functions.

    -h is --help, which the flag library does not know.

    Raises:
      ConfigError: a short flag without a value.
    """
    argv = ['--help' if argument == '-h' else argument for argument in argv]
    return without_repeated_fields(with_short_flags(with_packaged_configs(argv)))


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Reads the command line into absl's flags (`flags.FLAGS`).

    Args:
      argv: the command line, the program's name first.

    Returns:
      The positional arguments, the program's name first (absl's convention).

    Raises:
      ConfigError: one line; an unknown flag or field, a value of the wrong type, a config that does
        not load.
    """
    argv = expanded(argv)
    # ml_collections defines the flags of the fields that it finds here, whatever arguments are parsed.
    sys.argv = list(argv)
    chosen_recipe = recipe_flag(argv)
    check_arguments(argv, chosen_recipe)
    try:
        with _sections_of(chosen_recipe):
            arguments = flags.FLAGS(argv)
        check_sections(argv, flags.FLAGS['config'].value)
        return arguments
    except flags.IllegalFlagValueError as error:
        # The exception has only a text, so field and value are read from the text.
        field = re.match(r'flag --config\.([\w.]+)=(.*?): ', str(error), re.DOTALL)
        defaults = dict(fields.leaves(_schema(chosen_recipe)))
        if field and field[1] in defaults:
            default = defaults[field[1]]
            problem = f'must be {fields.type_name(default)}'
            fail(field[1], field[2], problem, f'give one such as {default!r}')
        inner = [name for name in defaults if field and name.startswith(f'{field[1]}.')]
        if field and inner:
            fail(
                field[1],
                field[2],
                'is a section',
                f'give a field of it, such as --config.{inner[0]}=…',
            )
        # The flag is not a field, so it is --config: the function of the config file raised this error.
        message = _last_line(error)
        config_file = re.match(r'flag (--config=.*?): ', str(error))
        if config_file:
            message = f'{config_file[1]}: {message}'
        raise ConfigError(message) from error
    except flags.Error as error:
        raise ConfigError(f'{_last_line(error)}; --help shows how to call it') from error
    except ConfigError:
        raise
    except Exception as error:
        _check_recipe_fields(argv, chosen_recipe)
        # A config is a Python file, so any exception is possible.
        reason = f'{type(error).__name__}: {_last_line(error)}'
        raise ConfigError(f'the config could not be loaded: {reason}') from error


def note_of_questions() -> str:
    """Returns a line if the flags name another corpus than the config, and not other questions; '' otherwise."""
    config_flag = flags.FLAGS['config']
    config = config_flag.value
    changed = config_flags.get_override_values(config_flag)
    corpus = {'retrieval.path', 'retrieval.url'} & changed.keys()
    if not corpus or not config.eval.file or 'eval.file' in changed:
        return ''
    file_config = config_of_file(config_flag.config_filename)
    # The same index in another place.
    is_same = (
        pathlib.Path(config.retrieval.path).name == pathlib.Path(file_config.retrieval.path).name
    )
    if is_same and 'retrieval.url' not in changed:
        return ''
    return (
        f'note: the corpus is another one than that of the config, and it is still evaluated on eval.file='
        f'{config.eval.file}; python -m zeroplay_jax.inputs cloze makes questions of a corpus, and '
        '--config.eval.file=FILE names them'
    )


def check_command(
    argv: Sequence[str],
    config: ConfigDict | None,
    workdir: str | None,
    has_evaluation: bool = True,
    is_training: bool = True,
) -> None:
    """Refuses a command line without a config or workdir, and a config that cannot run.

    Args:
      argv: positional arguments left over by the flags, the program's name first.
      config: the value of --config; sections that its recipe needs are added.
      workdir: the value of --workdir, a path or gs://bucket/path.
      has_evaluation, is_training: see `rules.check`.

    Raises:
      ConfigError, WorkdirError: one line; the first problem.
    """
    if len(argv) > 1:
        raise ConfigError(f'{argv[1]!r} is not a flag; settings are given as --config.FIELD=VALUE')
    if config is None:
        raise ConfigError(no_config())
    if not workdir:
        raise ConfigError(NO_WORKDIR)
    check_is_folder(workdir, allows_bucket=True)
    rules.check(config, has_evaluation, is_training)


def _last_line(error: Exception) -> str:
    """Returns the last line of an error's text."""
    # Errors of config files quote their traceback first.
    return str(error).strip().splitlines()[-1].strip()
