"""Command lines: flags and config files are checked before slow libraries are loaded.

Only absl, ml_collections, pydantic and NumPy are imported, so that a mistake is reported within a second and not after
JAX, TensorFlow and transformers are loaded.
"""

from __future__ import annotations

import errno
import gc
import os
import pathlib
import re
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Sequence, Set
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.retrieval.command import MessageFormatter
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.workdir import check_is_folder
from zeroplay_jax.selfplay.recipe import recipe_class
from zeroplay_jax.settings.kinds import ConfigError, is_server
from zeroplay_jax.types import Preempted, TrainingStopped, UserError, first_line

NO_WORKDIR = 'no folder for the run; give --workdir=FOLDER, such as --workdir=runs/first'


def load(config_file: str | None, words: Sequence[str]) -> ConfigDict:
    """Returns the config of --config, with the fields of its recipe and the values that flags set.

    Args:
      config_file: the value of --config.
      words: what absl left over of the command line: --config.FIELD=VALUE, --policy and --index.

    Raises:
      UserError: one line; no such file, field or flag, or a value of another type.
    """
    # A misspelt --config is one of the words.
    flags_of = fields.flags_by_field(with_short_flags(words))
    config = fields.config_of_file(config_file)
    fields.put(config, flags_of)
    return config.lock()


def with_short_flags(words: Sequence[str]) -> list[str]:
    """Returns the flags with --policy and --index, which all commands have, written as fields of the config.

    --policy=PATH is --config.policy.path=PATH; --index=PATH is the index folder PATH, or the search server at an
    http(s) address.

    Raises:
      ConfigError: such a flag without a value.
    """
    expanded: list[str] = []
    for group in fields.with_values(words):
        flag, _, value = '='.join(group).partition('=')
        short = flag.lstrip('-')
        if short == flag or short not in ('policy', 'index'):
            expanded += group
        elif not value:
            raise ConfigError(f'--{short}: names nothing; give --{short}=PATH')
        elif short == 'policy':
            expanded.append(f'--config.policy.path={policy_of_iteration(value)}')
        else:
            expanded += index_fields(value)
    return expanded


def changed_fields(words: Sequence[str]) -> Set[str]:
    """Returns the dotted names of the fields that flags set; `words` as of `load`."""
    return fields.flags_by_field(with_short_flags(words)).keys()


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
    from zeroplay_jax.runtime.workdir import local_run

    workdir = local_run(match[1])
    config = fields.read_stored_config(workdir)
    if config is None:
        raise ConfigError(f'{path}: {workdir} is not the workdir of a run; name one')
    name = 'policy'
    if config.weights == 'separate':
        name = recipe_class(config.recipe).evaluated_role
    if downloads.is_address(match[1]):
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


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Reads the flags of a command into absl's `flags.FLAGS`.

    Args:
      argv: the command line, the program's name first.

    Returns:
      The program's name, and the words that are no flags of the command: `load` reads those of the config.

    Raises:
      ConfigError: one line; a flag without a value, or with one of another type.
    """
    # -h is one that the flag library does not know.
    words = ['--help' if word == '-h' else word for word in argv]
    flags.FLAGS.set_gnu_getopt(True)
    try:
        return flags.FLAGS(words, known_only=True)
    except flags.Error as error:
        raise ConfigError(f'{first_line(error)}; --help shows how to call it') from error


def note_of_questions(config_file: str, config: ConfigDict, words: Sequence[str]) -> str:
    """Returns a line if the flags name another corpus than the config, and not other questions; '' otherwise."""
    changed = changed_fields(words)
    corpus = {'retrieval.path', 'retrieval.url'} & changed
    if not corpus or not config.eval.file or 'eval.file' in changed:
        return ''
    # The same index in another place.
    path = fields.config_of_file(config_file).retrieval.path
    is_same = pathlib.Path(config.retrieval.path).name == pathlib.Path(path).name
    if is_same and 'retrieval.url' not in changed:
        return ''
    return (
        f'note: the corpus is another one than that of the config, and it is still evaluated on eval.file='
        f'{config.eval.file}; zeroplay inputs cloze makes questions of a corpus, and '
        '--config.eval.file=FILE names them'
    )


def check_command(
    config: ConfigDict,
    workdir: str | None,
    has_evaluation: bool = True,
    is_training: bool = True,
) -> None:
    """Refuses a command line without a workdir, and a config that cannot run.

    Args:
      config: gets the fields of its recipe.
      workdir: the value of --workdir, a path or gs://bucket/path.
      has_evaluation, is_training: see `rules.check`.

    Raises:
      ConfigError, WorkdirError: one line; the first problem.
    """
    if not workdir:
        raise ConfigError(NO_WORKDIR)
    check_is_folder(workdir, allows_bucket=True)
    rules.check(config, has_evaluation, is_training)


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
