"""Trains the roles of a self-play recipe, and resumes where it was stopped.

    zeroplay train --config=configs/quickstart.py --workdir=runs/quickstart
    zeroplay train --config=configs/drzero.py:mini --workdir=runs/mini --config.solver.batch=16
    zeroplay train --config=configs/drzero.py:mini --workdir=runs/more --from=runs/mini
    zeroplay train --config=configs/drzero.py:small --workdir=runs/small --policy=hf://Qwen/Qwen2.5-0.5B-Instruct \
        --index=own/index --config.eval.file=own/questions.jsonl

--config names a Python file with get_config(); the text after a colon is its argument: mini, a model of 0.9 million
parameters on a CPU; small, one of half a billion on a device of 16 GB (docs/texts-to-tpu.md).
--config.FIELD=VALUE sets any field; docs/configuration.md lists them all.
--policy=FOLDER and --index=FOLDER or http://… are short for --config.policy.path and --config.retrieval. A policy may
be a model of the Hugging Face Hub (--policy=hf://owner/model), a question file hf://owner/dataset/path/file.jsonl.
--workdir gets checkpoints, metrics and the report; the same command with the same workdir resumes the run.
It may be gs://bucket/path (docs/buckets.md), as may the paths of policies, indexes and question files.
--from=WORKDIR begins a new run with the weights, moments and teachers of another one, finished or not.
--check names all mistakes of the command at once and starts nothing, on any machine; --on=v5litepod-16 says for which
machine, --nofiles that the files are there.
"""

import sys

from absl import flags

from zeroplay_jax.configuration import command_line, fields
from zeroplay_jax.configuration.places import keep_prompts
from zeroplay_jax.retrieval import progress
from zeroplay_jax.runtime import signals

_CONFIG = flags.DEFINE_string('config', None, 'The run: a Python file.')
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder of the run, created if it is missing, or gs://bucket/path.'
)
_FROM = flags.DEFINE_string('from', None, 'Workdir of another run, with whose weights this begins.')

_CHECK = flags.DEFINE_bool('check', False, 'Name all mistakes of the command and start nothing.')
flags.DEFINE_string(
    'on', '', 'With --check: v5litepod-16, 2*v5litepod-16, 8 devices, or 2*8 of two hosts.'
)
flags.DEFINE_bool(
    'files', True, 'With --check; --nofiles: what the config names is on another machine.'
)


def main(argv: list[str]) -> None:
    """Checks the command, then trains."""
    # Until the run trains, both signals end the process at once. The first one is so already, but in the quickstart.
    signals.exit_while_loading()
    signals.exit_on_sigterm()
    words = argv[1:]
    if _CHECK.value:
        # Only such a command loads this code.
        from zeroplay_jax.configuration import check

        sys.exit(check.main(words))
    config = command_line.load(_CONFIG.value, words)
    workdir = _WORKDIR.value
    if workdir:
        keep_prompts(config, workdir)
    command_line.check_command(config, workdir)
    if note := command_line.note_of_questions(_CONFIG.value, config, words):
        print(note, file=sys.stderr)
    fields.check(workdir, config)
    command_line.connect(config)
    command_line.check_devices(config)
    with progress.clock('loading libraries', config.progress):
        # This import loads JAX and Flax, so it follows all checks.
        from zeroplay_jax.run import loop

    # It has loaded JAX. Servers of others use the same word as XLA, whose errors have one type.
    from jax.errors import JaxRuntimeError

    try:
        loop.run(config, workdir, _FROM.value)
    except JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' in str(error):
            fix = 'zeroplay plan --machine=… prints flags with which a run fits'
            print(f'zeroplay_jax: a device has too little memory; {fix}', file=sys.stderr)
        raise


if __name__ == '__main__':
    command_line.run_command('zeroplay_jax', main)
