"""Start and end of a command: user errors become one line, and the output of libraries is hidden."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable

from absl import app, logging

from zeroplay_jax.configuration import command_line
from zeroplay_jax.retrieval.quiet import quiet
from zeroplay_jax.retrieval.tensorflow_import import import_tensorflow
from zeroplay_jax.runtime import interrupts
from zeroplay_jax.types import TrainingStopped, UserError

# A full disk, a used-up quota, a read-only file system.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def run_command(name: str, main: Callable[[list[str]], None]) -> None:
    """Runs `main` with the flags of the command line, and ends the process.

    Exit status: 0; 2 after a `UserError` or a full or read-only disk, and 3 or 4 after `TrainingStopped` (a run that
    trains nothing, an alarm), each with its one line; 130 after Ctrl-C; 1 after a crash.
    """
    try:
        app.run(main, flags_parser=command_line.parse_flags)
    # A normal exit of one failing process would wait for the other processes, which wait for this one in a collective.
    except UserError as error:
        print(f'{name}: {error}', file=sys.stderr)
        _leave_other_processes(2)
        sys.exit(2)
    except TrainingStopped as error:
        print(f'{name}: {error}', file=sys.stderr)
        # A normal exit is possible: all processes stop at the same step.
        sys.exit(error.status)
    except KeyboardInterrupt:
        message = 'stopped. What was saved is complete; the same command resumes the run'
        print(f'\n{name}: {message}', file=sys.stderr)
        _leave_other_processes(130)
        sys.exit(130)
    except SystemExit:
        # absl exits with status 1 after --help.
        if {'--help', '-help', '--helpshort'} & set(sys.argv):
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


def _disk_problem(error: BaseException) -> str:
    """Returns a line about a file that cannot be written, if that is why an exception was raised, else ''."""
    cause: BaseException | None = error
    # Libraries raise exceptions of their own from that of the operating system.
    while cause is not None:
        # Sockets lack permissions, too, but have no file name.
        is_refused_file = isinstance(cause, PermissionError) and cause.filename is not None
        if isinstance(cause, OSError) and (cause.errno in _DISK_ERRORS or is_refused_file):
            place = cause.filename or 'a file of the run'
            fix = 'correct this and run the same command again, which resumes from the last checkpoint'
            return f'{place}: {cause.strerror}; {fix}'
        cause = cause.__cause__
    return ''


def _leave_other_processes(status: int) -> None:
    """Exits at once if the run has other processes, which then stop by themselves; otherwise returns."""
    # If the module was never imported, this process has not joined any others.
    processes = sys.modules.get('zeroplay_jax.runtime.connect')
    if processes is not None:
        processes.leave(status)


def load_libraries() -> None:
    """Imports TensorFlow, which is slow: call it after the config was checked.

    TensorFlow only logs and searches here, so GPUs and TPUs are hidden from it. The output of its C++ code is hidden,
    unless the import fails. Sets TF_CPP_MIN_LOG_LEVEL and absl's log level.
    """
    # Set before the import, during which TensorFlow reads it.
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    logging.set_verbosity(logging.WARNING)
    with quiet():
        tf = import_tensorflow()
        for kind in ('GPU', 'TPU'):
            tf.config.set_visible_devices([], kind)


def connect(config) -> None:
    """Divides the CPU (`config.cpu_devices`) and joins the other processes of the run (`config.distributed`).

    Call it before JAX looks for devices.
    """
    # This import loads JAX, so the config must have been checked before.
    from zeroplay_jax.runtime.connect import connect as join_processes
    from zeroplay_jax.runtime.connect import divide_cpu

    divide_cpu(config.cpu_devices)
    settings = config.distributed
    # From now on Ctrl-C must raise KeyboardInterrupt, which `run_command` handles for a run of several processes.
    if settings.mode != 'off':
        interrupts.raise_again()
    join_processes(
        settings.mode,
        settings.coordinator,
        settings.processes,
        settings.process,
        settings.heartbeat,
    )
