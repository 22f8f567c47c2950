"""Checkpoint folders: what PyTorch computes from one is what we compute, both ways; a bad one is one clear line."""

import json

import jax
import numpy as np
import pytest
import tiny
import torch
import transformers

from zeroplay_jax.policy import hf, sharding, transformer


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tiny.make_folder(tmp_path_factory.mktemp('hf') / 'policy')


def our_logits(model, params, tokens, positions=None, segment=None):
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    segment = np.ones_like(tokens) if segment is None else segment
    x = transformer.hidden(model, params, tokens, positions, segment)
    return np.asarray(transformer.logits(model, params, x.reshape(-1, x.shape[-1]))).reshape(*tokens.shape, -1)


def their_logits(folder, tokens):
    torch_model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.no_grad():
        return torch_model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


QWEN2 = dict(architectures=['Qwen2ForCausalLM'], model_type='qwen2')


@pytest.mark.parametrize(
    'fields', [{}, dict(tie_word_embeddings=False), QWEN2, QWEN2 | dict(tie_word_embeddings=False)]
)
def test_logits_are_those_of_transformers(tmp_path, fields):
    path = tiny.make_folder(tmp_path / 'policy', seed=3, **fields)
    model = hf.read_config(path)
    assert model.tied == fields.get('tie_word_embeddings', True) and model.qkv_bias == ('architectures' in fields)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (3, 40)).astype(np.int32)
    theirs = their_logits(path, tokens)
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(our_logits(model, hf.load(path, model), tokens), theirs, atol=2e-4)


def test_a_norm_left_out_would_show(folder):
    model, params = hf.read_config(folder), hf.load(folder)
    tokens = np.arange(30, dtype=np.int32)[None]
    broken = jax.tree.map(lambda x: x, params)
    broken['layer_1']['q_norm'] = {'scale': np.ones_like(params['layer_1']['q_norm']['scale'])}
    gap = np.abs(our_logits(model, params, tokens) - our_logits(model, broken, tokens)).max()
    assert gap > 100 * 2e-4


def test_packed_rows_are_separate_sequences(folder):
    model, params = hf.read_config(folder), hf.load(folder)
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, model.vocab_size, n).astype(np.int32) for n in (11, 17))
    tokens = np.concatenate([a, b, np.zeros(4, np.int32)])[None]
    positions = np.concatenate([np.arange(11), np.arange(17), np.zeros(4, int)])[None]
    segment = np.repeat([1, 2, 0], [11, 17, 4])[None]
    packed = our_logits(model, params, tokens, positions, segment)
    np.testing.assert_allclose(packed[:, :11], our_logits(model, params, a[None]), atol=1e-5)
    np.testing.assert_allclose(packed[:, 11:28], our_logits(model, params, b[None]), atol=1e-5)
    assert np.isfinite(packed).all()


def test_export_loads_in_transformers_with_the_same_logits(folder, tmp_path):
    model = hf.read_config(folder)
    params = jax.tree.map(lambda x: x * 1.01, hf.load(folder, model))
    hf.save(tmp_path / 'out', model, params, like=folder)
    tokens = np.arange(30, dtype=np.int32)[None]
    np.testing.assert_allclose(their_logits(tmp_path / 'out', tokens), our_logits(model, params, tokens), atol=2e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'out'))
    assert tokenizer.chat_template and tokenizer('abc').input_ids
    with pytest.raises(FileExistsError, match='exists already'):
        hf.save(tmp_path / 'out', model, params, like=folder)


def _full_disk(*_, **__):
    raise OSError('disk full')


def test_a_failed_export_leaves_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, 'save_file', _full_disk)
    with pytest.raises(OSError, match='disk full'):
        hf.save(tmp_path / 'out', hf.read_config(folder), hf.load(folder), like=folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('mesh', [(1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_sharded_load_holds_the_same_numbers(folder, mesh):
    whole, parts = hf.load(folder), hf.load(folder, mesh=sharding.make_mesh(*mesh))
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    kernel = parts['layer_0']['q']['kernel']
    assert kernel.addressable_shards[0].data.size == kernel.size // (mesh[1] * mesh[2])


@pytest.mark.parametrize(
    'change,message',
    [
        (dict(architectures=['GPT2LMHeadModel']), 'supported: Qwen2ForCausalLM, Qwen3ForCausalLM'),
        (dict(rope_scaling={'rope_type': 'longrope'}), "rope type 'longrope'"),
        (dict(use_sliding_window=True), 'use_sliding_window'),
        (dict(hidden_act='gelu'), "hidden_act='gelu'"),
        (dict(intermediate_size=63), r'gate_proj.weight has shape \(64, 32\), config.json asks for \(63, 32\)'),
        (dict(num_hidden_layers=3), 'model.layers.2.input_layernorm.weight is missing'),
    ],
)
def test_a_folder_that_does_not_fit_says_which_field(tmp_path, change, message):
    path = tiny.make_folder(tmp_path / 'policy')
    raw = json.loads((path / 'config.json').read_text())
    (path / 'config.json').write_text(json.dumps(raw | change))
    with pytest.raises(hf.CheckpointError, match=message):
        hf.load(path)


def test_a_torn_file_is_named(tmp_path):
    path = tiny.make_folder(tmp_path / 'policy')
    weights = path / 'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(hf.CheckpointError, match='model.safetensors'):
        hf.load(path)


def test_newer_spelling_of_the_rope_fields(tmp_path):
    path = tiny.make_folder(tmp_path / 'policy')
    raw = json.loads((path / 'config.json').read_text())
    theta = raw.pop('rope_theta') * 3
    raw['rope_parameters'] = {'rope_type': 'default', 'rope_theta': theta}
    (path / 'config.json').write_text(json.dumps(raw))
    assert hf.read_config(path).rope_theta == theta


def test_every_parameter_has_exactly_one_rule(folder):
    params = hf.load(folder)
    sharding.parameter_shardings(params, sharding.make_mesh(1, 2, 2))
    with pytest.raises(ValueError, match="'layer_0/q/extra' is matched by 0"):
        sharding.parameter_spec('layer_0/q/extra')


def test_a_mesh_that_does_not_divide_names_the_axis(folder):
    with pytest.raises(ValueError, match="axis 'fsdp' of 3"):
        sharding.parameter_shardings(hf.load(folder), sharding.make_mesh(1, 3, 1))
    with pytest.raises(ValueError, match='needs 16 devices'):
        sharding.make_mesh(1, 16, 1)
    assert dict(sharding.make_mesh(1, -1, 2).shape) == {'replica': 1, 'fsdp': 4, 'model': 2}


def test_causality_and_segments_by_gradient(folder):
    """A hidden state depends on its own segment's past and on nothing else."""
    model, params = hf.read_config(folder), hf.load(folder)
    segment = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0]])
    tokens = np.arange(10)[None]

    def state(shift, at):
        moved = params | {'embedding': params['embedding'].at[tokens[0]].add(shift)}
        return transformer.hidden(model, moved, tokens, positions, segment)[0, at].sum()

    for at in (2, 6):
        gradient = jax.grad(state)(np.zeros((10, model.hidden_size), np.float32), at)
        touched = np.flatnonzero(np.abs(np.asarray(gradient)).sum(1))
        assert touched.tolist() == [i for i in range(at + 1) if segment[0, i] == segment[0, at]]
