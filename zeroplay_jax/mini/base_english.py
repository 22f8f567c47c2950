"""Trains the checkpoints that read English: `python -m zeroplay_jax.mini.base_english --corpus passages.jsonl`.

Training is supervised, on the demonstrations of `mini/english_demos.py`, in four stages: copying; filling blanks of
one passage; all roles, which gives `clean/`, the upper bound; and demonstrations with deliberate errors, which gives
`base/`, the start of self-play. Each folder also contains its training log and the hashes of its files.

The corpus is JSON lines of passages. Passages are split into training, development and held-out ones by a hash of
their titles; only the training ones are read here. A killed run continues from its last hundred steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from zeroplay_jax.mini import english_demos, supervised, tokenizer
from zeroplay_jax.mini.english_demos import EnglishSetting
from zeroplay_jax.mini.english_texts import Texts
from zeroplay_jax.mini.stages import Stage
from zeroplay_jax.policy import hf, transformer
from zeroplay_jax.retrieval.records import split as split_contents
from zeroplay_jax.rollout.tokens import Codec

HERE = pathlib.Path(__file__).parent
VOCABULARY = 4096
ARCHITECTURE = {
    'architectures': ['Qwen3ForCausalLM'],
    'model_type': 'qwen3',
    'hidden_size': 192,
    'intermediate_size': 512,
    'num_hidden_layers': 5,
    'num_attention_heads': 6,
    'num_key_value_heads': 2,
    'head_dim': 32,
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-6,
    'rope_theta': 10000.0,
    'max_position_embeddings': 4096,
    'attention_bias': False,
    'attention_dropout': 0.0,
    'use_sliding_window': False,
    'tie_word_embeddings': True,
    'initializer_range': 0.1,
    'torch_dtype': 'float32',
}
# Three passages of 100 words.
OBSERVATION_TOKENS = 560
# Passages are cut into pieces of at most so many words, one stock for each.
PIECE_WORDS = (40, 60, 80, 100)

STAGES = (
    Stage(
        'copying',
        steps=1000,
        rows=16,
        tokens=64,
        adam_rate=5e-3,
        decay_share=0.0,
        context_weight=0.1,
        errors=EnglishSetting(copied_words=(4, 14)),
        shares={'copy': 1.0},
    ),
    Stage(
        'filling',
        steps=500,
        rows=8,
        tokens=320,
        adam_rate=4e-3,
        decay_share=0.0,
        saved=True,
        errors=EnglishSetting(copied_words=(8, 40)),
        observation_tokens=OBSERVATION_TOKENS,
        shares={'copy': 0.1, 'query': 0.1, 'fill_one': 0.5, 'proposer': 0.3},
    ),
    Stage(
        'clean',
        steps=700,
        rows=5,
        tokens=768,
        adam_rate=3e-3,
        decay_share=0.35,
        saved=True,
        errors=EnglishSetting(),
        observation_tokens=OBSERVATION_TOKENS,
    ),
    Stage(
        'base',
        steps=150,
        rows=5,
        tokens=768,
        muon_rate=0.005,
        adam_rate=5e-4,
        decay_share=0.4,
        saved=True,
        errors=EnglishSetting(short_query=0.65, wrong_span=0.6, malformed=0.1),
        observation_tokens=OBSERVATION_TOKENS,
    ),
)


def split_of(title: str) -> str:
    """Returns 'train', 'development' or 'held_out' for a title: 70, 5 and 25 % of them."""
    digest = hashlib.blake2b(title.encode(), digest_size=8).digest()
    percentile = int.from_bytes(digest, 'little') % 100
    if percentile < 70:
        return 'train'
    return 'development' if percentile < 75 else 'held_out'


def passages_of(corpus: pathlib.Path, split: str) -> Iterator[tuple[str, str]]:
    """Yields (title, text) of a split's passages."""
    with corpus.open(encoding='utf-8') as lines:
        for line in lines:
            title, text = split_contents(json.loads(line)['contents'])
            if split_of(title) == split:
                yield title, text


def pieces(text: str, words: int) -> list[str]:
    from zeroplay_jax.mini import cloze

    out = []
    current: list[str] = []
    for sentence in cloze._split(' '.join(text.split())):
        if current and len(' '.join([*current, sentence]).split()) > words:
            out.append(' '.join(current))
            current = []
        current.append(' '.join(sentence.split()[:words]))
    out.append(' '.join(current))
    return out


def stocks(passages: Sequence[tuple[str, str]]) -> list[Texts]:
    """Returns one stock of texts per size in PIECE_WORDS; each takes its part of the passages."""
    result = []
    for number, words in enumerate(PIECE_WORDS):
        cut = []
        for title, text in passages[number :: len(PIECE_WORDS)]:
            for piece in pieces(text, words):
                cut.append((title, piece))
        result.append(Texts(cut))
    return result


def write_config_and_tokenizer(folder: pathlib.Path, passages: Sequence[tuple[str, str]]) -> None:
    """Writes a checkpoint folder without weights: config.json and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f'(Title: {title}) {text}' for title, text in passages]
    trained_tokenizer = tokenizer.train_on(texts + [' ____,', ' [ ', ' ]'] * 100, VOCABULARY)
    tokenizer.write(folder, trained_tokenizer)
    config = {
        **ARCHITECTURE,
        'vocab_size': VOCABULARY,
        'eos_token_id': trained_tokenizer.token_to_id(tokenizer.END),
        'pad_token_id': trained_tokenizer.token_to_id(tokenizer.PAD),
    }
    (folder / 'config.json').write_text(json.dumps(config, indent=2) + '\n')


def build(
    corpus: pathlib.Path, out: pathlib.Path, work: pathlib.Path, seed: int, stages=STAGES
) -> None:
    """Trains all stages and writes `out`/<name> for each saved one, replacing existing folders."""
    passages = list(passages_of(corpus, 'train'))
    template = work / 'template'
    if not (template / 'config.json').exists():
        write_config_and_tokenizer(template, passages)
    codec = Codec(template)
    config = hf.read_config(template)
    initial_params = transformer.init(config, jax.random.key(seed))
    params = supervised.zero_output_projections(initial_params)
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    stock = stocks(passages)
    log: list[dict[str, Any]] = [{'seed': seed, 'parameters': sum(sizes)}]
    print(log, [len(texts.documents) for texts in stock], flush=True)
    checkpoints = supervised.StageCheckpoints(work, stages)
    for stage in stages:
        if checkpoints.is_finished(stage):
            continue
        params = supervised.train(
            stage, config, params, codec, english_demos.ROLES, stock, seed, log, checkpoints
        )
        if stage.saved:
            supervised.save(out / stage.name, config, params, template, log)
    checkpoints.close()


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(
        prog='python -m zeroplay_jax.mini.base_english',
        description=__doc__.split('\n')[0],
        epilog='example:\n  python -m zeroplay_jax.mini.base_english --corpus passages.jsonl --out again',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--corpus', type=pathlib.Path, required=True)
    parser.add_argument('--out', type=pathlib.Path, default=HERE / 'english')
    parser.add_argument('--work', type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    build(args.corpus, args.out, args.work, args.seed)


if __name__ == '__main__':
    main()
