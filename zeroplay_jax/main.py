"""Trains the roles of a self-play recipe, and resumes where it was stopped.

    python -m zeroplay_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
    python -m zeroplay_jax.main --config=configs/drzero.py:mini --workdir=runs/mini --config.solver.batch=16

--config names a Python file with get_config(); the text after a colon is its argument.
--config.FIELD=VALUE sets any field; docs/configuration.md lists them all.
--policy=FOLDER and --index=FOLDER or http://… are short for --config.policy.path and --config.retrieval. A policy may
be a model of the Hugging Face Hub (--policy=hf://owner/model), a question file hf://owner/dataset/path/file.jsonl.
--workdir gets checkpoints, metrics and the report; the same command with the same workdir resumes the run.
"""

from absl import flags
from ml_collections import config_flags

from zeroplay_jax.configuration import command_line, entry
from zeroplay_jax.configuration.checkpoint_rules import download
from zeroplay_jax.retrieval import progress
from zeroplay_jax.runtime import interrupts

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'The run: a Python file.', lock_config=True
)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run; created if it is missing.')


def main(argv: list[str]) -> None:
    """Checks the command, then trains."""
    config = _CONFIG.value
    workdir = _WORKDIR.value
    command_line.check_command(argv, config, workdir)
    download(config)
    with progress.clock('loading', config.progress):
        entry.load_libraries()
        entry.connect(config)
        # This import loads JAX and TensorFlow, so it follows the checks of the config.
        from zeroplay_jax.training import loop

    interrupts.raise_again()
    loop.run(config, workdir)


if __name__ == '__main__':
    entry.run_command('zeroplay_jax', main)
