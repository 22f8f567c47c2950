"""Start and end of a command: user errors become one line, and libraries stay off the terminal."""

from __future__ import annotations

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


def run_command(name: str, main: Callable[[list[str]], None]) -> None:
    """Runs `main` with the flags of the command line.

    Exit status: 2 after a `UserError` and 3 after `TrainingStopped` (a run that trains nothing), each
    with its one line; 130 after Ctrl-C; 1 after a crash.
    """
    try:
        app.run(main, flags_parser=command_line.parse_flags)
    # Every failing branch tells the other processes: they would wait in a collective for ever.
    except UserError as error:
        print(f'{name}: {error}', file=sys.stderr)
        _leave_other_processes(2)
        sys.exit(2)
    except TrainingStopped as error:
        print(f'{name}: {error}', file=sys.stderr)
        # No process waits for another one: all of them stop at the same step.
        sys.exit(3)
    except KeyboardInterrupt:
        message = 'stopped. What was saved is complete; the same command resumes the run'
        print(f'\n{name}: {message}', file=sys.stderr)
        _leave_other_processes(130)
        sys.exit(130)
    except SystemExit:
        # absl ends --help with status 1.
        if {'--help', '-help', '--helpshort'} & set(sys.argv):
            sys.exit(0)
        raise
    except Exception:
        traceback.print_exc()
        _leave_other_processes(1)
        sys.exit(1)


def _leave_other_processes(status: int) -> None:
    # Not imported: then JAX is not loaded, and there is no other process.
    processes = sys.modules.get('zeroplay_jax.runtime.connect')
    if processes is not None:
        processes.leave(status)


def load_libraries() -> None:
    """Loads the slow and talkative libraries, after the config was checked.

    TensorFlow only logs and searches here, so it is kept off the accelerators. What its C++ parts
    and those of ScaNN print while loading is dropped, unless loading fails.
    """
    # Before the import: TensorFlow reads it while loading.
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    logging.set_verbosity(logging.WARNING)
    with quiet():
        tf = import_tensorflow()
        for kind in ('GPU', 'TPU'):
            tf.config.set_visible_devices([], kind)


def connect(config) -> None:
    """Joins the other processes of the run (`config.distributed`), before JAX looks for devices."""
    # Loads JAX: only after the config was checked.
    from zeroplay_jax.runtime.connect import connect as join_processes

    settings = config.distributed
    # Other processes have to be told of an interrupt from now on (`run_command`).
    if settings.mode != 'off':
        interrupts.raise_again()
    join_processes(
        settings.mode,
        settings.coordinator,
        settings.processes,
        settings.process,
        settings.heartbeat,
    )
