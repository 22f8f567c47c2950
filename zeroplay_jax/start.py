"""How a command begins and ends: mistakes of the user become one line, and libraries keep off the terminal."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from absl import app, logging

from zeroplay_jax import config as configuration
from zeroplay_jax.retrieval.quiet import quiet
from zeroplay_jax.types import UserError


def command(name: str, main: Callable[[list[str]], None]) -> None:
    """Runs `main` with the flags of the command line; a `UserError` ends the process with its one line and code 2."""
    try:
        app.run(main, flags_parser=configuration.parse_flags)
    except UserError as error:
        print(f'{name}: {error}', file=sys.stderr)
        _leave(2)
        sys.exit(2)
    except KeyboardInterrupt:
        print(
            f'\n{name}: stopped. What was saved is whole; a run goes on with the same command',
            file=sys.stderr,
        )
        _leave(130)
        sys.exit(130)
    except SystemExit:
        if {'--help', '-help', '--helpshort'} & set(sys.argv):  # absl ends it with 1
            sys.exit(0)
        raise
    except Exception:
        traceback.print_exc()
        _leave(1)
        sys.exit(1)


def _leave(code: int) -> None:
    if 'zeroplay_jax.runtime.connect' in sys.modules:  # else there is no other process
        sys.modules['zeroplay_jax.runtime.connect'].leave(code)


def load_libraries() -> None:
    """Loads what is slow and talkative, once the config is known to be sound.

    TensorFlow only logs and searches here, so it is kept off the accelerators. What its C++ parts and ScaNN's print
    while they load is dropped, unless loading fails.
    """
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    logging.set_verbosity(logging.WARNING)
    with quiet():
        import tensorflow as tf

        for kind in ('GPU', 'TPU'):
            tf.config.set_visible_devices([], kind)


def connect(config) -> None:
    """Joins the other processes of the run, as `config.distributed` says; before anything asks JAX for a device."""
    from zeroplay_jax.runtime import connect as runtime  # loads JAX: only once the config is sound

    c = config.distributed
    runtime.connect(c.mode, c.coordinator, c.processes, c.process, c.heartbeat)
