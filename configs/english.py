"""Dr. Zero self-play on English texts of your own, with a small policy that reads English.

    make quickstart CORPUS=folder WORKDIR=runs/own SEED=0

builds an index, held-out questions and training documents in runs/own, and then runs

    python -m zeroplay_jax.main --config=configs/english.py:runs/own --workdir=runs/own/run --config.seed=0

The text after the colon is that folder. Questions are sentences with a blank (`python -m zeroplay_jax.inputs cloze`) of
one hop: a proposer reads a passage and leaves words out of a sentence; a solver searches for the passage and fills them
in. No proposer starts from a document that questions are about; with one hop it needs no search to find another one.
Made for two CPU cores without a GPU.
"""

import pathlib

from zeroplay_jax.configs import common
from zeroplay_jax.settings.paths import ENGLISH_CHECKPOINT


def get_config(folder=''):
    """Returns the config; `folder`: the workdir with index, questions and documents; '' leaves their paths unset."""
    config = common.get_config('drzero')
    config.policy.path = str(ENGLISH_CHECKPOINT)
    config.schedule.update(iterations=2, hop_ratio=(1.0,))

    # One device per core; on a GPU or TPU, those that it has.
    config.cpu_devices = 2
    config.mesh.replica = -1

    # Lengths of English words in the tokens of this checkpoint: three passages of up to 75 words fit.
    config.tools.top_k = 3
    config.rollout.update(prompt_tokens=256, turn_tokens=224, observation_tokens=400, max_turns=2)
    config.sampler.update(context=704, chunk=64)
    config.micro.update(rows=8, tokens=704)

    config.proposer.learning_rate = 1e-4
    config.proposer.steps = 2
    config.proposer.batch = 32

    config.pool.update(batch=64, batches=4, samples=1)

    config.solver.learning_rate = 3e-4
    config.solver.steps = 8
    config.solver.batch = 32
    config.solver.samples = 5

    config.eval.update(every=4, questions=240)
    config.checkpoint.every = 5

    config.retrieval.kind = 'folder'
    if folder:
        inputs = pathlib.Path(folder)
        config.retrieval.path = str(inputs / 'index')
        config.eval.file = str(inputs / 'questions.jsonl')
        config.inputs.documents = str(inputs / 'documents.jsonl')
    return config
