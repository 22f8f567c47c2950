"""Command lines: flags and config files are checked before slow libraries are loaded.

Only absl, ml_collections, pydantic and NumPy are imported, so that a mistake is reported within a second and not after
JAX, TensorFlow and transformers are loaded.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import pathlib
import re
import resource
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.retrieval import objects
from zeroplay_jax.retrieval.command import MessageFormatter, similar_path
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.workdir import check_is_folder
from zeroplay_jax.selfplay.recipe import recipe_class
from zeroplay_jax.settings.kinds import CONFIGS, ConfigError, fail, is_server
from zeroplay_jax.types import Preempted, TrainingStopped, UserError

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
    expanded = []
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
            expanded.append(f'--config.policy.path={policy_of_iteration(value)}')
        else:
            expanded += index_fields(value)
    return expanded


def policy_of_iteration(path: str) -> str:
    """Returns folder or address of the policy that WORKDIR@iteration1 names; another path as it is.

    It is the evaluated role's in a run with `checkpoint.iterations`.

    Raises:
      UserError: no such run; or no such iteration, of which a bucket is asked later.
    """
    match = re.fullmatch(r'(.+?)/?@(iteration\d+)', path)
    if not match:
        return path
    # Only such a path loads this code.
    from zeroplay_jax.runtime.remote_workdir import local_run

    workdir = local_run(match[1])
    config = fields.read_stored_config(workdir)
    if config is None:
        raise ConfigError(f'{path}: {workdir} is not the workdir of a run; name one')
    name = 'policy'
    if config.weights == 'separate':
        name = recipe_class(config.recipe).evaluated_role
    if objects.is_address(match[1]):
        return f'{match[1]}/{match[2]}/{name}'
    folder = workdir / match[2] / name
    if not folder.is_dir():
        kept = sorted(other.name for other in workdir.glob('iteration*'))
        fix = (
            f'there is {", ".join(kept) or "none, train with --config.checkpoint.iterations=True"}'
        )
        raise ConfigError(f'{path}: the run keeps no {match[2]}; {fix}')
    return str(folder)


def index_fields(index: str) -> list[str]:
    """Returns the fields, as flags, that choose an index folder, or a search server by its http(s) address."""
    if is_server(index):
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
        """Returns the loaded config with `config.recipe` set and the fields of that recipe."""
        config = self._parser.parse(argument)
        # A file that could not be loaded gives another object, which raises when it is used.
        if isinstance(config, ConfigDict) and 'recipe' in config:
            of_file = config.recipe
            config.recipe = self._recipe
            fields.fit_to_recipe(config, is_switched=of_file != self._recipe)
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
            schema = schema or fields.fields_of_all(chosen_recipe)
            name = flag.split('.', 1)[1]
            # A field of an unknown section may belong to an external recipe, whose fields are known only when the
            # config file is loaded; `_check_recipe_fields` checks it then.
            if name.split('.')[0] in schema or '.' not in name:
                fields.check_name(name, schema)


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
            return flags.FLAGS(argv)
    except flags.IllegalFlagValueError as error:
        # The exception has only a text, so field and value are read from the text.
        field = re.match(r'flag --config\.([\w.]+)=(.*?): ', str(error), re.DOTALL)
        defaults = fields.leaves(fields.fields_of_all(chosen_recipe))
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
        if config_file and 'get_config() takes 0 positional arguments' in message:
            message = (
                'this config takes nothing after its name; leave out the colon and what follows it'
            )
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


def changed_fields() -> dict[str, Any]:
    """Returns dotted name → value of the fields that flags set."""
    return config_flags.get_override_values(flags.FLAGS['config'])


def note_of_questions() -> str:
    """Returns a line if the flags name another corpus than the config, and not other questions; '' otherwise."""
    config_flag = flags.FLAGS['config']
    config = config_flag.value
    changed = changed_fields()
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
        f'{config.eval.file}; python -m zeroplay_jax.extras.inputs cloze makes questions of a corpus, and '
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


# ---- start and end of a command --------------------------------------------------------------------
#
# User errors become one line, and the output of libraries is hidden.


# A full disk, a used-up quota, a read-only file system; limits of the shell (ulimit -f, ulimit -n) and of the machine.
_DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EFBIG,
    errno.EMFILE,
    errno.ENFILE,
)
_LIMITS = {errno.EFBIG: ' (ulimit -f)', errno.EMFILE: ' (ulimit -n)'}
_DISK_FIX = 'correct this and run the same command again, which resumes from the last checkpoint'


def run_command(name: str, main: Callable[[list[str]], None]) -> None:
    """Runs `main` with the flags of the command line, and ends the process.

    Exit status: 0; 2 after a `UserError` or a full or read-only disk, 3 or 4 after `TrainingStopped` (a run that trains
    nothing, an alarm) and 75 after `Preempted` (SIGTERM), each with its one line; 130 after Ctrl-C; 1 after a crash.
    """
    signals.open_closed()
    asks_for_help = bool({'--help', '-help', '--helpshort', '-h'} & set(sys.argv))
    if not asks_for_help:
        signals.outlive_readers()
    # Imports and traces make millions of objects that stay; looking at them every 700 takes an eighth of a small run.
    gc.set_threshold(20_000, 20, 20)
    sys.excepthook = _print_unless_late
    logging.get_absl_handler().setFormatter(MessageFormatter())
    try:
        app.run(main, flags_parser=parse_flags)
    # A normal exit of one failing process would wait for the other processes, which wait for this one in a collective.
    except UserError as error:
        print(f'{name}: {error}', file=sys.stderr)
        _leave_other_processes(2)
        sys.exit(2)
    except TrainingStopped as error:
        print(f'{name}: {error}', file=sys.stderr)
        # A normal exit is possible: all processes stop at the same step.
        sys.exit(error.status)
    except Preempted as error:
        print(f'{name}: {error}; the same command resumes the run', file=sys.stderr)
        # As above.
        sys.exit(signals.PREEMPTED_STATUS)
    except KeyboardInterrupt:
        message = (
            'stopped; the same command resumes the run, from its last checkpoint if there is one'
        )
        print(f'\n{name}: {message}', file=sys.stderr)
        _leave_other_processes(130)
        sys.exit(130)
    except SystemExit:
        # absl exits with status 1 after --help.
        if asks_for_help:
            sys.exit(0)
        raise
    except Exception as error:
        line = _disk_problem(error)
        status = 2 if line else 1
        if line:
            print(f'{name}: {line}', file=sys.stderr)
        else:
            traceback.print_exc()
        _leave_other_processes(status)
        sys.exit(status)


def _print_unless_late(kind: Any, error: BaseException, place: Any) -> None:
    """Prints an exception that nothing caught, unless a library's thread was late for an event loop that has ended.

    After the first file of a checkpoint that cannot be written, there is one for each of the others.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread or str(error) != 'Event loop is closed':
        sys.__excepthook__(kind, error, place)


def _disk_problem(error: BaseException) -> str:
    """Returns a line about a file that cannot be written, if that is why an exception was raised, else ''."""
    cause: BaseException | None = error
    # Libraries raise exceptions of their own from that of the operating system.
    while cause is not None:
        # Sockets lack permissions, too, but have no file name.
        is_refused_file = isinstance(cause, PermissionError) and cause.filename is not None
        if isinstance(cause, OSError) and (cause.errno in _DISK_ERRORS or is_refused_file):
            place = cause.filename or 'a file of the run'
            return f'{place}: {cause.strerror}{_LIMITS.get(cause.errno or 0, "")}; {_DISK_FIX}'
        # Libraries in C++ raise other types, whose texts contain that of the operating system.
        for number in _DISK_ERRORS:
            if os.strerror(number) in str(cause):
                problem = f'{os.strerror(number)}{_LIMITS.get(number, "")}'
                return f'{problem} while a checkpoint was written; {_DISK_FIX}'
        cause = cause.__cause__ or cause.__context__
    return ''


def _leave_other_processes(status: int) -> None:
    """Exits at once if the run has other processes, which then stop by themselves; otherwise returns."""
    # If the module was never imported, this process has not joined any others.
    processes = sys.modules.get('zeroplay_jax.runtime.devices')
    if processes is not None:
        processes.leave(status)


def prepare_process() -> None:
    """Checks the limits of the shell, and hides what the C++ code of JAX and TensorFlow logs.

    Call it before they are imported, when they read it.

    Raises:
      UserError: limits of the shell under which no run ends.
    """
    check_limits()
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    logging.set_verbosity(logging.WARNING)


def connect(config) -> None:
    """Divides the CPU (`config.cpu_devices`) and joins the other processes of the run (`config.distributed`).

    Call it before JAX looks for devices.
    """
    prepare_process()
    # A plan (extras/plan) counts on nearly all memory of a GPU.
    os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '.97')
    # This import loads JAX, so the config must have been checked before.
    from zeroplay_jax.runtime.devices import connect as join_processes
    from zeroplay_jax.runtime.devices import divide_cpu

    divide_cpu(config.cpu_devices)
    settings = config.distributed
    join_processes(
        settings.mode,
        settings.coordinator,
        settings.processes,
        settings.process,
        settings.heartbeat,
    )


def check_devices(config) -> None:
    """Refuses a mesh that the devices do not allow, or that cannot divide rows and slots.

    Call it after `connect`. Needs JAX alone.

    Raises:
      UserError: one line.
    """
    import jax

    from zeroplay_jax.policy import sharding

    mesh = sharding.make_mesh(**dict(config.mesh))
    resolved = config.copy_and_resolve_references()
    resolved.mesh.update(mesh.shape)
    shards, processes = sharding.data_shards(mesh), jax.process_count()
    rules.check_replicas(resolved, processes)
    rules.check_shards(resolved, shards, shards // processes)


# ---- limits of the shell ---------------------------------------------------------------------------


# Files that a small run has open at once, with a margin; larger ones have connections and index files besides.
_OPEN_FILES = 128
# Checkpoints have files of this size and more.
_FILE_BYTES = 1 << 28


def check_limits() -> None:
    """Refuses limits of the shell under which no run ends; raises the limit of open files where that is allowed.

    Raises:
      UserError: one line.
    """
    most_files, most_possible = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most_files < _OPEN_FILES:
        if 0 <= most_possible < _OPEN_FILES:
            raise UserError(
                f'the shell allows {most_files} open files (ulimit -n), a run needs {_OPEN_FILES} or more; raise the '
                f'limit, such as ulimit -n 4096 (its hard limit is {most_possible})'
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, most_possible))
    most_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= most_bytes < _FILE_BYTES:
        raise UserError(
            f'the shell allows files of {most_bytes} bytes (ulimit -f), checkpoints and compiled programs are larger; '
            'raise the limit: ulimit -f unlimited'
        )
