"""Trains the roles of a self-play recipe, and goes on where it was stopped.

    python -m zeroplay_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
    python -m zeroplay_jax.main --config=configs/drzero.py:mini --workdir=runs/mini --config.solver.batch=16

--config names a Python file with get_config(); what stands after a colon is handed to it.
--config.FIELD=VALUE sets any field of configs/common.py, where each has its meaning beside it.
--workdir gets checkpoints, metrics and the report; the same command with the same workdir continues the run.
"""

import os
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from zeroplay_jax import config as configuration
from zeroplay_jax.types import UserError

_CONFIG = config_flags.DEFINE_config_file('config', None, 'The run: a Python file.', lock_config=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run, made if it is not there.')


def _quieten() -> None:
    """Keeps TensorFlow, which only logs and searches, off the accelerators, and libraries off the bar's line."""
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
    logging.set_verbosity(logging.WARNING)
    import tensorflow as tf

    for kind in ('GPU', 'TPU'):
        tf.config.set_visible_devices([], kind)


def main(argv: list[str]) -> None:
    """Checks the command, then trains."""
    configuration.check_command(argv, _CONFIG.value, _WORKDIR.value)
    _quieten()
    from zeroplay_jax import train  # loads JAX and TensorFlow: only once the config is sound

    train.run(_CONFIG.value, _WORKDIR.value)


if __name__ == '__main__':
    try:
        app.run(main, flags_parser=configuration.parse_flags)
    except UserError as error:  # a mistake of the user: one line and no traceback
        print(f'zeroplay_jax: {error}', file=sys.stderr)
        sys.exit(2)
