"""Start and end of a command: user errors become one line, and the output of libraries is hidden."""

from __future__ import annotations

import errno
import os
import pathlib
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from absl import app, logging

from zeroplay_jax.configuration import command_line, shell_limits
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.retrieval.quiet import quiet
from zeroplay_jax.retrieval.tensorflow_import import import_tensorflow
from zeroplay_jax.runtime import signals, streams
from zeroplay_jax.settings.paths import BUILT_IN_CHECKPOINT
from zeroplay_jax.types import Preempted, TrainingStopped, UserError

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
    streams.open_closed()
    streams.outlive_readers()
    sys.excepthook = _print_unless_late
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
    except Preempted as error:
        print(f'{name}: {error}; the same command resumes the run', file=sys.stderr)
        # As above.
        sys.exit(signals.PREEMPTED_STATUS)
    except KeyboardInterrupt:
        message = 'stopped. What was saved is complete; the same command resumes the run'
        print(f'\n{name}: {message}', file=sys.stderr)
        _leave_other_processes(130)
        sys.exit(130)
    except SystemExit:
        # absl exits with status 1 after --help.
        if {'--help', '-help', '--helpshort', '-h'} & set(sys.argv):
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


def load_libraries() -> None:
    """Imports TensorFlow, which is slow: call it after the config was checked.

    TensorFlow only logs and searches here, so GPUs and TPUs are hidden from it. The output of its C++ code is hidden,
    unless the import fails. Sets TF_CPP_MIN_LOG_LEVEL and absl's log level.

    Raises:
      UserError: limits of the shell under which no run ends.
    """
    shell_limits.check_limits()
    _silence()
    with quiet():
        tf = import_tensorflow()
        for kind in ('GPU', 'TPU'):
            tf.config.set_visible_devices([], kind)


def _silence() -> None:
    """Hides what the C++ code of JAX and TensorFlow logs; set before they are imported, when they read it."""
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    logging.set_verbosity(logging.WARNING)


def connect(config) -> None:
    """Divides the CPU (`config.cpu_devices`) and joins the other processes of the run (`config.distributed`).

    Call it before JAX looks for devices.
    """
    _silence()
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
    """Refuses a mesh that the devices or the model do not allow; call it after `connect`. Needs JAX alone.

    Raises:
      UserError: one line.
    """
    from zeroplay_jax.policy import sharding

    heads = _heads(config)
    # Checked first: more devices would not help such a mesh. -1 is known when the devices are counted.
    check_heads(config)
    mesh = sharding.make_mesh(**config.mesh)
    sharding.local_mesh(mesh)
    data_shards = sharding.data_shards(mesh)
    if config.micro.rows % data_shards:
        raise UserError(
            f'config.micro.rows={config.micro.rows}: must be divisible by replica × fsdp of the mesh, which is '
            f'{data_shards}; change one of them'
        )
    if heads:
        sharding.check_heads(*heads, mesh.shape['model'])


def check_heads(config) -> None:
    """Refuses a known size of the model axis of the mesh that would split a head of the policy; imports JAX."""
    heads = _heads(config)
    if heads and config.mesh.model != -1:
        from zeroplay_jax.policy import sharding

        sharding.check_heads(*heads, config.mesh.model)


def _heads(config) -> tuple[int, int] | None:
    """Returns the policy's numbers of attention heads and of key/value heads; None if they cannot be read."""
    folder = pathlib.Path(config.policy.path or BUILT_IN_CHECKPOINT)
    try:
        model = json_text.read_object(folder / 'config.json', float)
        return int(model['num_attention_heads']), int(model['num_key_value_heads'])
    except (OSError, ValueError, KeyError, TypeError):
        # Reported when the policy is opened.
        return None
