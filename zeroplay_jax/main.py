"""Trains the roles of a self-play recipe, and goes on where it was stopped.

    python -m zeroplay_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
    python -m zeroplay_jax.main --config=configs/drzero.py:mini --workdir=runs/mini --config.solver.batch=16

--config names a Python file with get_config(); what stands after a colon is handed to it.
--config.FIELD=VALUE sets any field of configs/common.py, where each has its meaning beside it.
--workdir gets checkpoints, metrics and the report; the same command with the same workdir continues the run.
"""

from absl import flags
from ml_collections import config_flags

from zeroplay_jax import config as configuration
from zeroplay_jax import start
from zeroplay_jax.retrieval import progress

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'The run: a Python file.', lock_config=True
)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run, made if it is not there.')


def main(argv: list[str]) -> None:
    """Checks the command, then trains."""
    configuration.check_command(argv, _CONFIG.value, _WORKDIR.value)
    with progress.clock('loading', _CONFIG.value.progress):
        start.load_libraries()
        start.connect(_CONFIG.value)
        from zeroplay_jax import train  # loads JAX and TensorFlow: only once the config is sound

    train.run(_CONFIG.value, _WORKDIR.value)


if __name__ == '__main__':
    start.command('zeroplay_jax', main)
