"""Trains the checkpoints that read English: `python -m tools.checkpoints.base_english --corpus passages.jsonl`.

Training is supervised, on the demonstrations of `english_demos.py`, in four stages: copying; filling blanks of
one passage; all roles with questions of one hop, which gives `one_hop/`; and the same with questions of two hops, which
gives `base/`, the start of self-play. Each folder also contains its training log and the hashes of its files.

The corpus is JSON lines of passages. Passages are split into training, development and held-out ones by a hash of
their titles; only the training ones are read here.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from tools.checkpoints import base_model, english_demos, supervised, tokenizer
from tools.checkpoints.english_texts import Texts
from tools.checkpoints.stages import Stage
from zeroplay_jax.extras.inputs.sentences import split_text
from zeroplay_jax.retrieval.types import split as split_contents
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.types import UserError

VOCABULARY = 4096
ARCHITECTURE = base_model.ARCHITECTURE | {
    'hidden_size': 192,
    'intermediate_size': 512,
    'num_hidden_layers': 5,
    'num_attention_heads': 6,
}
# Three passages of 75 words.
OBSERVATION_TOKENS = 480
# Passages are cut to at most so many words, a quarter of them to each size (see `texts_by_size`).
PASSAGE_WORDS = (30, 50, 65, 80)
Passage = tuple[str, str]  # title and text
# Fewer passages give too few words for the tokenizer and the distractors.
MIN_PASSAGES = 10
# Shares of the roles where questions have one or two hops. Two hops get more, because they are new in their stage.
_TWO_HOP_SHARES = {
    'fill': 0.08,
    'solver': 0.17,
    'solver_two_hops': 0.27,
    'solver_with_path': 0.03,
    'solver_with_path_two_hops': 0.03,
    'proposer': 0.12,
    'proposer_two_hops': 0.2,
    'proposer_from_answer': 0.03,
    'answer_from_documents': 0.03,
    'challenger': 0.015,
    'task_solver': 0.025,
}
# Two searches of three passages of 50 words.
_TWO_HOP_TOKENS = 960

STAGES = (
    # Without copying first, the roles take several times as many steps to learn.
    Stage(
        'copying',
        steps=1000,
        rows=16,
        tokens=64,
        adam_rate=5e-3,
        decay_share=0.0,
        shares={'copy_few_words': 1.0},
    ),
    # Short episodes: one passage, its questions, and proposals about it.
    Stage(
        'filling',
        steps=600,
        rows=8,
        tokens=320,
        adam_rate=4e-3,
        decay_share=0.0,
        observation_tokens=OBSERVATION_TOKENS,
        shares={'copy': 0.1, 'query': 0.1, 'fill_one': 0.5, 'proposer': 0.3},
    ),
    # All roles of one hop, with the shares of `english_demos.ROLES`.
    Stage(
        'clean',
        steps=1200,
        rows=5,
        tokens=640,
        adam_rate=3e-3,
        decay_share=0.35,
        folder='one_hop',
        observation_tokens=OBSERVATION_TOKENS,
    ),
    # Learns a second search without forgetting what one search is for.
    Stage(
        'two_hops',
        steps=500,
        rows=4,
        tokens=_TWO_HOP_TOKENS,
        muon_rate=0.015,
        adam_rate=2e-3,
        decay_share=0.5,
        folder='base',
        observation_tokens=OBSERVATION_TOKENS,
        shares=_TWO_HOP_SHARES,
    ),
)


def split_of(title: str) -> str:
    """Returns 'train', 'development' or 'held_out' for the title of a passage: 70, 5 and 25 % of all titles.

    A title determines its split by a hash, so all passages of one title are in the same split of every corpus.
    """
    digest = hashlib.blake2b(title.encode(), digest_size=8).digest()
    percentile = int.from_bytes(digest, 'little') % 100
    if percentile < 70:
        return 'train'
    return 'development' if percentile < 75 else 'held_out'


def _lines_of(corpus: pathlib.Path, split: str) -> Iterator[tuple[str, Passage]]:
    """Yields the lines of one split (see `split_of`) of a corpus, which is JSON lines, and the passage in each."""
    with corpus.open(encoding='utf-8') as lines:
        for line in lines:
            title, text = split_contents(json.loads(line)['contents'])
            if split_of(title) == split:
                yield line, (title, text)


def cut(passages: Sequence[Passage], max_words: int) -> list[Passage]:
    """Returns the passages cut to at most `max_words` words, in the same way as a corpus of a user."""
    short_passages = []
    for title, text in passages:
        short_passages += [(title, short_text) for short_text in split_text(text, max_words)]
    return short_passages


def texts_by_size(passages: Sequence[Passage]) -> list[Texts]:
    """Returns searchable texts, one object per size in PASSAGE_WORDS: every fourth passage, cut to this size."""
    shares = [passages[number :: len(PASSAGE_WORDS)] for number in range(len(PASSAGE_WORDS))]
    return [Texts(cut(share, words)) for share, words in zip(shares, PASSAGE_WORDS, strict=True)]


def write_config_and_tokenizer(folder: pathlib.Path, passages: Sequence[Passage]) -> None:
    """Writes a checkpoint folder without weights: config.json and the files of a tokenizer trained on the passages."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f'(Title: {title}) {text}' for title, text in passages]
    # The marks of questions and thoughts occur in no text; repeated, they become single tokens.
    marks = [' ____,', ' [ ', ' ]'] * 100
    trained_tokenizer = tokenizer.train_on([*texts, *marks], VOCABULARY)
    tokenizer.write(folder, trained_tokenizer)
    tokenizer.write_config(folder, trained_tokenizer, ARCHITECTURE | {'vocab_size': VOCABULARY})


def build(corpus: pathlib.Path, out: pathlib.Path, seed: int) -> None:
    """Trains all stages and writes a folder in `out` for each that names one, replacing existing folders.

    Args:
      corpus: JSON lines of passages.
      out: folder of the checkpoint folders.
      seed: seed of weights and episodes.

    Raises:
      UserError: the corpus has too few passages.
    """
    passages = [passage for _, passage in _lines_of(corpus, 'train')]
    if len(passages) < MIN_PASSAGES:
        raise UserError(
            f'{corpus}: {len(passages)} passages to train on; give at least {MIN_PASSAGES}'
        )
    texts = texts_by_size(passages)
    with tempfile.TemporaryDirectory() as folder:
        # hf.save copies all but the weights from a folder; this one is needed during training only.
        template = pathlib.Path(folder)
        write_config_and_tokenizer(template, passages)
        # bfloat16 is half the size of float32; the loss of accuracy by rounding is far below what a stage changes.
        supervised.train_checkpoints(
            STAGES, template, english_demos.ROLES, texts, seed, out, dtype=jnp.bfloat16
        )


def main() -> None:
    """Parses the command line, and trains or writes what is held out."""
    parser = base_model.parser('base_english --corpus passages.jsonl', __doc__, 'english')
    text = (
        'JSON lines of passages, each with "contents": the title in quotes, a line feed, the text'
    )
    parser.add_argument('--corpus', type=pathlib.Path, required=True, help=text)
    parser.add_argument(
        '--write-held-out',
        type=pathlib.Path,
        metavar='FILE',
        help='write the passages that training never reads to this file, to measure on them, and do not train',
    )
    args = parser.parse_args()
    held_out = args.write_held_out
    if held_out and held_out.resolve() == args.corpus.resolve():
        parser.error('--write-held-out would replace the corpus; name another file')
    try:
        if held_out:
            write_text(held_out, (line for line, _ in _lines_of(args.corpus, 'held_out')))
        else:
            build(args.corpus, args.out, args.seed)
    except (OSError, UserError) as error:
        parser.error(str(error))


if __name__ == '__main__':
    main()
