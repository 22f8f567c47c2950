"""Dr. Zero self-play on English texts of your own, with a small policy that reads English.

    make quickstart CORPUS=folder WORKDIR=runs/own SEED=0

builds an index, held-out questions and training documents in runs/own, and then runs

    zeroplay train --config=configs/english.py:runs/own --workdir=runs/own/run --config.seed=0

The text after the colon is that folder. Questions are sentences with a blank (`zeroplay inputs cloze`).
One hop: a proposer reads a passage and leaves words out of a sentence; a solver searches for the passage and fills them
in. Two hops: the proposer also searches for a name of its passage and leaves words out of a sentence about it in
another one; the solver has to find the name first. Training neither starts from a document that held-out questions are
about nor finds one by a search.
Made for two CPU cores without a GPU.
"""

import itertools
import json
import pathlib

import tokenizers

from zeroplay_jax.configs import common
from zeroplay_jax.data import files
from zeroplay_jax.extras import load_extra
from zeroplay_jax.settings.kinds import ENGLISH_CHECKPOINT

# Passages that are measured, and tokens that a result has around each, such as its number.
_PASSAGES = 5_000
_AROUND = 12


def get_config(folder=''):
    """Returns the config; `folder`: the workdir with index, questions and documents; '' leaves their paths unset."""
    cloze_files = load_extra('inputs', 'cloze_files')
    config = common.get_config('drzero')
    # Dense matrices of scores would need 10 GB for rows of 2,000 tokens, and twice the time.
    config.policy.update(path=str(ENGLISH_CHECKPOINT), attention='blocked')
    config.schedule.update(iterations=2, hop_ratio=cloze_files.hop_ratio())

    # One device per core; on a GPU or TPU, those that it has.
    config.cpu_devices = 2
    config.mesh.replica = -1

    # Lengths of English words in the tokens of this checkpoint: two searches of three passages of 50 words fit.
    config.tools.top_k = 3
    config.rollout.update(prompt_tokens=256, turn_tokens=224, observation_tokens=400, max_turns=3)
    # On a CPU a decode step would otherwise read all places of a slot, most of them unused.
    config.sampler.update(context=1024, chunk=64, attention='used')
    config.micro.update(rows=6, tokens=1024)

    config.proposer.update(learning_rate=2e-4, steps=2, batch=32)
    # So small a policy copies unreliably at 1.0; at lower temperatures it seldom begins a blank.
    config.proposer.temperature = 0.8

    config.pool.update(batch=64, batches=4, samples=1)

    config.solver.update(learning_rate=3e-4, steps=6, batch=32, samples=5)

    config.eval.update(every=6, questions=240)
    config.checkpoint.every = 5

    config.retrieval.kind = 'folder'
    if folder:
        inputs = pathlib.Path(folder)
        config.retrieval.path = str(inputs / 'index')
        config.eval.file = str(inputs / 'questions.jsonl')
        corpus = inputs / 'corpus.jsonl'
        if corpus.exists():
            _fit_lengths(config, _passage_tokens(corpus))
        documents = inputs / 'documents.jsonl'
        config.inputs.documents = str(documents)
        # A corpus in which names connect enough documents also gives documents of two hops.
        if documents.exists():
            config.schedule.hop_ratio = cloze_files.hop_ratio(files.documents(str(documents)))
        # With questions of the user's own nothing is held out, and there may be no such file.
        held_out = inputs / 'held_out.jsonl'
        if held_out.exists():
            config.retrieval.held_out = str(held_out)
    return config


def _fit_lengths(config, passage_tokens):
    """Raises the lengths of results, prompts and slots for passages of more tokens than those of 50 words."""
    result_tokens = config.tools.top_k * passage_tokens
    longer_result = max(0, result_tokens - config.rollout.observation_tokens)
    # The passage of a proposer's prompt is as long as one of a result.
    longer_prompt = -(-longer_result // config.tools.top_k)
    config.rollout.observation_tokens += longer_result
    config.rollout.prompt_tokens += longer_prompt
    # Two searches fit.
    room = 2 * longer_result + longer_prompt
    config.sampler.context += room
    config.micro.tokens += room


def _passage_tokens(corpus):
    """Returns the tokens, with those around them, that no more than one in a hundred of the passages exceeds."""
    tokenizer = tokenizers.Tokenizer.from_file(str(ENGLISH_CHECKPOINT / 'tokenizer.json'))
    with corpus.open(encoding='utf-8') as file:
        count = sum(1 for _ in file)
        file.seek(0)
        # The first passages of a corpus may be of one document.
        stride = -(-count // _PASSAGES)
        passages = [
            json.loads(line)['contents'] for line in itertools.islice(file, 0, None, stride)
        ]
    lengths = sorted(len(encoding) for encoding in tokenizer.encode_batch(passages))
    return lengths[int(0.99 * (len(lengths) - 1))] + _AROUND
