"""Checkpoint folders: read once and in slices, refused in one line when torn, and written whole or not at all."""

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
import torch
import transformers
from safetensors.numpy import load_file, save_file
from small_policies import copy_of, equal

from zeroplay_jax.policy import hf, sharding, stored_tensors, transformer

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def copy(published, tmp_path):
    """A folder of one's own, its tensors, and a function that writes them as so many files with an index."""
    path = copy_of(published, tmp_path / 'policy')
    tensors = load_file(path / 'model.safetensors')

    def split(count, **extra):
        (path / 'model.safetensors').unlink()
        names, weight_map = sorted(tensors), {}
        for i in range(count):
            file = f'model-{i + 1:05d}-of-{count:05d}.safetensors'
            part = {name: tensors[name] for name in names[i::count]}
            save_file(part | extra.get(f'file{i}', {}), path / file, metadata={'format': 'pt'})
            weight_map |= dict.fromkeys(part, file)
        (path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
        return path

    return path, tensors, split


@functools.partial(jax.jit, static_argnums=0)
def our_logits(model, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = transformer.hidden(model, params, tokens, positions, jnp.ones_like(tokens))
    return transformer.logits(model, params, x.reshape(-1, x.shape[-1])).reshape(*tokens.shape, -1)


def their_logits(folder, tokens, **options):
    torch_model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), **options)
    with torch.no_grad():
        return torch_model(torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()


# In


@pytest.mark.parametrize('mesh', [(1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_sharded_load_holds_the_same_numbers_and_reads_every_slice_once(
    published, monkeypatch, mesh
):
    reads, read = [], hf._read_slice
    monkeypatch.setattr(hf, '_read_slice', lambda *args: reads.append(args[1:3]) or read(*args))
    parts = hf.load(published, mesh=sharding.make_mesh(*mesh))
    count = {tensor.name: np.zeros(tensor.shape, int) for tensor, _ in reads}
    for tensor, index in reads:
        count[tensor.name][index] += 1
    assert all((places == 1).all() for places in count.values())
    equal(hf.load(published), parts)
    kernel = parts['layer_0']['q']['kernel']
    assert kernel.addressable_shards[0].data.size == kernel.size // (mesh[1] * mesh[2])


def test_tensors_may_lie_in_several_files_and_in_pieces(copy, published, monkeypatch):
    monkeypatch.setattr(hf, '_READ_BYTES', 100)
    equal(hf.load(copy[2](3)), hf.load(published))
    equal(hf.load(copy[0], mesh=sharding.make_mesh(1, 2, 2)), hf.load(published))


KERNEL = 'model.layers.1.mlp.up_proj.weight'


def dtypes(tree):
    return {str(array.dtype) for array in jax.tree.leaves(tree)}


@pytest.mark.parametrize('dtype', [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_types_of_numbers_are_read(copy, dtype):
    path, tensors, _ = copy
    low = {name: array.astype(dtype) for name, array in tensors.items()}
    save_file(low, path / 'model.safetensors')
    params = hf.load(path)
    assert dtypes(params) == {'float32'}
    kernel = params['layer_1']['up']['kernel']
    np.testing.assert_array_equal(kernel, low[KERNEL].T.astype(np.float32))
    assert dtypes(hf.load(path, dtype=jnp.bfloat16)) == {'bfloat16'}


def test_a_folder_of_transformers_in_bfloat16_is_read_bit_by_bit(tmp_path):
    model = tiny.make_torch_model('llama3').to(torch.bfloat16)
    model.save_pretrained(str(tmp_path / 'low'), max_shard_size='40KB')
    assert len(list((tmp_path / 'low').glob('*.safetensors'))) > 1
    params = hf.load(tmp_path / 'low')
    for name, theirs in model.named_parameters():
        ours = hf.to_tensors(hf.read_config(tmp_path / 'low'), params)[name]
        np.testing.assert_array_equal(ours, theirs.detach().float().numpy())


def test_what_says_nothing_new_is_passed_over(copy, published):
    path, tensors, _ = copy
    spare = {
        'lm_head.weight': tensors['model.embed_tokens.weight'],
        'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, 'f'),
    }
    save_file(tensors | spare, path / 'model.safetensors')
    equal(hf.load(path), hf.load(published))


def torn(path, tensors, split):
    weights = path / 'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:-100])


def torn_part(path, tensors, split):
    part = sorted(split(3).glob('*.safetensors'))[1]
    part.write_bytes(part.read_bytes()[:-1])


def without_part(path, tensors, split):
    sorted(split(3).glob('*.safetensors'))[1].unlink()


def twice(path, tensors, split):
    split(2, file0={KERNEL: tensors[KERNEL]}, file1={KERNEL: tensors[KERNEL]})


def both(path, tensors, split):
    weights = (path / 'model.safetensors').read_bytes()
    (split(2) / 'model.safetensors').write_bytes(weights)


def without_a_tensor(tensors):
    del tensors[KERNEL]


def with_another_shape(tensors):
    tensors[KERNEL] = tensors[KERNEL][:-1]


def with_another_layer(tensors):
    tensors['model.layers.2.mlp.up_proj.weight'] = tensors[KERNEL]


def with_a_bias(tensors):
    tensors['model.layers.0.self_attn.q_proj.bias'] = np.ones(32, 'f')


def with_a_classifier(tensors):
    tensors['score.weight'] = np.ones((1, 32), 'f')


def without_prefixes(tensors):
    for name in list(tensors):
        tensors[name.removeprefix('model.')] = tensors.pop(name)


def altered(change):
    def spoil(path, tensors, split):
        change(tensors)
        save_file(tensors, path / 'model.safetensors')

    return spoil


BROKEN = [
    (torn, 'model.safetensors: is not a whole safetensors file'),
    (torn_part, 'model-00002-of-00003.safetensors: is not a whole safetensors file'),
    (without_part, 'model-00002-of-00003.safetensors: is not a whole safetensors file'),
    (
        twice,
        'is in both model-00001-of-00002.safetensors and model-00002-of-00002.safetensors',
    ),
    (both, 'holds model.safetensors and an index of other files'),
    (altered(without_a_tensor), f'tensor {KERNEL} is missing'),
    (
        altered(with_another_shape),
        r'has shape \(63, 32\), config.json asks for \(64, 32\) \(intermediate_size, '
        r'hidden_size\); .*belongs to the weights',
    ),
    (altered(with_another_layer), 'has no place in a qwen3 model of 2 layers'),
    (altered(with_a_bias), 'q_proj.bias has no place'),
    (altered(with_a_classifier), 'score.weight is the head of a classifier, reward or value model'),
    (altered(without_prefixes), 'as AutoModel of transformers writes it'),
]


@pytest.fixture
def unread(monkeypatch):
    """Fails where a slice is read."""

    def fail(*_):
        pytest.fail('read before everything was checked')

    monkeypatch.setattr(hf, '_read_slice', fail)


@pytest.mark.parametrize('spoil,message', BROKEN)
def test_a_broken_folder_is_one_line_before_anything_is_read(copy, unread, spoil, message):
    spoil(*copy)
    with pytest.raises(hf.CheckpointError, match=message) as caught:
        hf.load(copy[0])
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('number', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite_are_refused(copy, number, dtype):
    path, tensors, _ = copy
    tensors[KERNEL] = tensors[KERNEL].astype(dtype)
    tensors[KERNEL][-1, -1] = number
    save_file(tensors, path / 'model.safetensors', metadata={'format': 'pt'})
    with pytest.raises(hf.CheckpointError, match=f'{KERNEL} has numbers that are not finite'):
        hf.load(path)


@pytest.mark.parametrize(
    'mesh,message',
    [
        ((1, 3, 1), "axis 'fsdp' of 3"),
        ((1, 1, 4), "num_key_value_heads=2 is not divisible by mesh axis 'model' of 4"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused_before_anything_is_read(
    published, unread, mesh, message
):
    with pytest.raises(sharding.UserError, match=message):
        hf.load(published, mesh=sharding.make_mesh(*mesh))


# Out


def test_an_export_in_several_files_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, '_FILE_BYTES', 40_000)
    tiny.make_torch_model('olmo3').save_pretrained(str(tmp_path / 'in'))
    model = hf.read_config(tmp_path / 'in')
    params = jax.tree.map(lambda x: x * 1.01, hf.load(tmp_path / 'in', model))
    hf.save(tmp_path / 'out', model, params, like=tmp_path / 'in')
    assert len(list((tmp_path / 'out').glob('*.safetensors'))) > 1
    tokens = np.arange(60, dtype=np.int32)[None]
    theirs = their_logits(tmp_path / 'out', tokens)
    np.testing.assert_allclose(theirs, our_logits(model, params, tokens), atol=2e-4)
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
    path = copy[0]
    raw = json.loads((path / 'config.json').read_text())
    (path / 'config.json').write_text(json.dumps(raw | {key: 'bfloat16'}))
    model, params = hf.read_config(path), hf.load(path)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    for name, exported in (('float32', params), ('bfloat16', low)):
        out = tmp_path / name
        hf.save(out, model, exported, like=path)
        assert json.loads((out / 'config.json').read_text()) == raw | {key: name}
        assert dtypes(load_file(out / 'model.safetensors')) == {name}
    tokens = np.arange(20, dtype=np.int32)[None]
    theirs = their_logits(tmp_path / 'float32', tokens, dtype='auto')
    np.testing.assert_allclose(theirs, our_logits(model, params, tokens), atol=2e-4)


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
    command = [sys.executable, '-c', KILLED, published, out]
    result = subprocess.run(command, cwd=ROOT, timeout=120)
    assert result.returncode == -9
    assert not out.exists() and all(path.name.startswith('.out.') for path in tmp_path.iterdir())


# Memory


LOADER = """
import sys, pathlib
import jax, numpy as np
folder, out, index, count, port = sys.argv[1:]
if int(count) > 1:
    jax.distributed.initialize(f'localhost:{port}', int(count), int(index))
from zeroplay_jax.policy import hf, sharding
field = lambda name: next(int(x.split()[1]) for x in open('/proc/self/status') if x.startswith(name)) << 10
mesh = sharding.make_mesh(1, 4, 1)
jax.block_until_ready([jax.device_put(np.zeros(9), d) for d in jax.local_devices()])
before = field('VmRSS')
params = hf.load(folder, mesh=mesh)
peak = field('VmHWM')
share = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards)
print('MEASURED', peak - before, share, flush=True)
hf.save(out, hf.read_config(folder), params, like=folder)
"""


@pytest.fixture(scope='module')
def large(tmp_path_factory):
    """A bfloat16 folder of 50 million parameters."""
    path = tmp_path_factory.mktemp('large') / 'policy'
    model = tiny.make_torch_model('llama3').config.to_dict() | dict(
        architectures=['LlamaForCausalLM'],
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    path.mkdir()
    (path / 'config.json').write_text(json.dumps(model))
    rng = np.random.default_rng(0)
    noise = rng.normal(size=1 << 20).astype(ml_dtypes.bfloat16)
    tensors = {}
    for tensor in stored_tensors.tensors(hf.read_config(path)).values():
        shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
        tensors[tensor.name] = np.resize(np.roll(noise, rng.integers(1 << 20)), shape)
    save_file(tensors, path / 'model.safetensors')
    return path


@functools.cache
def free_port():
    with socket.socket() as s:
        s.bind(('localhost', 0))
        return s.getsockname()[1]


@pytest.mark.parametrize('processes', [1, 2])
def test_loading_needs_little_more_memory_than_its_share(large, tmp_path, processes):
    """Peak resident set over what the process had before; two processes hold, and read, half the slices each."""
    flags = f'--xla_force_host_platform_device_count={4 // processes}'
    environment = os.environ | dict(XLA_FLAGS=flags, JAX_PLATFORMS='cpu')
    options = dict(cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    running = []
    for index in range(processes):
        numbers = [str(index), str(processes), str(free_port())]
        command = [sys.executable, '-c', LOADER, large, tmp_path / 'out', *numbers]
        running.append(subprocess.Popen(command, **options))
    outputs = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * processes
    stored = load_file(large / 'model.safetensors')
    sizes = [array.nbytes for array in stored.values()]
    share_of_each = 2 * sum(sizes) / processes
    for output in outputs:
        peak, share = map(int, output.split('MEASURED')[1].split()[:2])
        assert share_of_each <= share <= 1.01 * share_of_each
        assert share < peak <= 1.3 * (max(sizes) + share)
    written = load_file(tmp_path / 'out' / 'model.safetensors')
    assert stored.keys() == written.keys()
    for name, array in stored.items():
        np.testing.assert_array_equal(written[name], array.astype(np.float32))
