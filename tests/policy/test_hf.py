"""Checkpoint folders: read once and in slices, refused in one line when torn, and written whole or not at all."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import transformers
from python_process import run_python
from safetensors.numpy import load_file, save_file
from small_policies import (
    KERNEL,
    change_json,
    copy_of,
    equal,
    logits,
    split,
    torch_logits,
)

from zeroplay_jax.policy import hf, sharding


@pytest.fixture
def copy(published, tmp_path):
    return copy_of(published, tmp_path / 'policy')


# In


def test_sharded_load_holds_the_same_numbers_and_reads_every_slice_once(published, monkeypatch):
    reads, read = [], hf._read_slice
    monkeypatch.setattr(hf, '_read_slice', lambda *args: reads.append(args[1:3]) or read(*args))
    parts = hf.load(published, mesh=sharding.make_mesh(2, 2, 2))
    count = {tensor.name: np.zeros(tensor.shape, int) for tensor, _ in reads}
    for tensor, index in reads:
        count[tensor.name][index] += 1
    assert all((places == 1).all() for places in count.values())
    equal(hf.load(published), parts)
    kernel = parts['layer_0']['q']['kernel']
    assert kernel.addressable_shards[0].data.size == kernel.size // 4


def test_tensors_may_lie_in_several_files_and_in_pieces(copy, published, monkeypatch):
    monkeypatch.setattr(hf, '_READ_BYTES', 100)
    split(copy, 3)
    equal(hf.load(copy), hf.load(published))
    equal(hf.load(copy, mesh=sharding.make_mesh(1, 2, 2)), hf.load(published))


def dtypes(tree):
    return {str(array.dtype) for array in jax.tree.leaves(tree)}


@pytest.mark.parametrize('dtype', [np.float16, np.float64])
def test_other_types_of_numbers_are_read(copy, dtype):
    path = copy / 'model.safetensors'
    low = {name: array.astype(dtype) for name, array in load_file(path).items()}
    save_file(low, path)
    params = hf.load(copy)
    assert dtypes(params) == {'float32'}
    kernel = params['layer_1']['up']['kernel']
    np.testing.assert_array_equal(kernel, low[KERNEL].T.astype(np.float32))
    assert dtypes(hf.load(copy, dtype=jnp.bfloat16)) == {'bfloat16'}


def test_a_folder_of_transformers_in_bfloat16_is_read_bit_by_bit(tmp_path):
    import torch

    model = tiny.make_torch_model('llama3').to(torch.bfloat16)
    model.save_pretrained(str(tmp_path / 'low'), max_shard_size='40KB')
    assert len(list((tmp_path / 'low').glob('*.safetensors'))) > 1
    params = hf.load(tmp_path / 'low')
    for name, theirs in model.named_parameters():
        ours = tiny.to_tensors(hf.read_config(tmp_path / 'low'), params)[name]
        np.testing.assert_array_equal(ours, theirs.detach().float().numpy())


# Out


def test_an_export_in_several_files_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, '_FILE_BYTES', 40_000)
    tiny.make_torch_model('olmo3').save_pretrained(str(tmp_path / 'in'))
    model = hf.read_config(tmp_path / 'in')
    params = jax.tree.map(lambda x: x * 1.01, hf.load(tmp_path / 'in', model))
    hf.save(tmp_path / 'out', model, params, like=tmp_path / 'in')
    assert len(list((tmp_path / 'out').glob('*.safetensors'))) > 1
    tokens = np.arange(60, dtype=np.int32)[None]
    theirs = torch_logits(tmp_path / 'out', tokens)
    np.testing.assert_allclose(theirs, logits(model, params, tokens), atol=2e-4)
    equal(hf.load(tmp_path / 'out'), params)


def test_export_carries_tokenizer_and_template_and_never_overwrites(published, tmp_path):
    model, params = hf.read_config(published), hf.load(published)
    hf.save(tmp_path / 'out', model, params, like=published)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / 'out'))
    assert tokenizer.chat_template and tokenizer('abc').input_ids
    assert [path.name for path in tmp_path.iterdir()] == ['out']
    with pytest.raises(FileExistsError, match='exists already'):
        hf.save(tmp_path / 'out', model, params, like=published)


@pytest.mark.parametrize('key', ['dtype', 'torch_dtype'])
def test_export_names_the_type_of_its_numbers_in_the_folders_spelling(copy, tmp_path, key):
    """Loaded as config.json says, nothing is rounded."""
    change_json(copy / 'config.json', **{key: 'bfloat16'})
    raw = json.loads((copy / 'config.json').read_text())
    model, params = hf.read_config(copy), hf.load(copy)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    for name, exported in (('float32', params), ('bfloat16', low)):
        out = tmp_path / name
        hf.save(out, model, exported, like=copy)
        assert json.loads((out / 'config.json').read_text()) == raw | {key: name}
        assert dtypes(load_file(out / 'model.safetensors')) == {name}
    tokens = np.arange(20, dtype=np.int32)[None]
    theirs = torch_logits(tmp_path / 'float32', tokens, dtype='auto')
    np.testing.assert_allclose(theirs, logits(model, params, tokens), atol=2e-4)


def _full_disk(*_, **__):
    raise OSError('disk full')


def test_a_failed_export_leaves_nothing(published, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, 'save_file', _full_disk)
    with pytest.raises(OSError, match='disk full'):
        hf.save(tmp_path / 'out', hf.read_config(published), hf.load(published), like=published)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, sys
from zeroplay_jax.policy import hf
real = os.rename
os.rename = lambda *_: os.kill(os.getpid(), 9)
folder, out = sys.argv[1:]
hf.save(out, hf.read_config(folder), hf.load(folder), like=folder)
"""


def test_a_killed_export_leaves_no_folder_of_its_name(published, tmp_path):
    out = tmp_path / 'out'
    assert run_python('-c', KILLED, published, out).returncode == -9
    assert not out.exists() and all(path.name.startswith('.out.') for path in tmp_path.iterdir())
