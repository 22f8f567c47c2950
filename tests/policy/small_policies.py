"""Folders, adapters, rows and a sampler's loop that several tests of policies share."""

import json
import shutil

import jax
import numpy as np
import tiny
import transformers
from safetensors.numpy import load_file, save_file

from zeroplay_jax.policy import adapters, rope, sharding, transformer
from zeroplay_jax.policy.families import FAMILIES
from zeroplay_jax.rollout.sampler import FILL, Sampler, SamplerConfig
from zeroplay_jax.settings.schema import LINEARS


def equal(ours, theirs):
    """Checks that two trees have the same numbers."""
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# Every switch on at once, so that every rule has a parameter; no published family has them all.
EVERY_SWITCH = transformer.ModelConfig(
    'test',
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rope_scaling=rope.Yarn(4.0, 16, 1.1),
    scale_sliding=False,
    windows=(8, 0),
    tied=False,
    qkv_bias=True,
    qk_norm='projection',
    norms='after',
    logit_chunk=16,
)
KERNEL = 'model.layers.1.mlp.up_proj.weight'


def copy_of(folder, copy):
    """A copy of a folder."""
    return shutil.copytree(folder, copy)


def split(folder, count, extra=()):
    """Writes the tensors of a folder as so many files with an index, and `extra` into each; returns the folder."""
    tensors = load_file(folder / 'model.safetensors')
    (folder / 'model.safetensors').unlink()
    names, weight_map = sorted(tensors), {}
    for i in range(count):
        file = f'model-{i + 1:05d}-of-{count:05d}.safetensors'
        part = {name: tensors[name] for name in names[i::count]}
        save_file(part | dict(extra), folder / file, metadata={'format': 'pt'})
        weight_map |= dict.fromkeys(part, file)
    index = folder / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': weight_map}))
    return folder


def change_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(path, change):
    """Rewrites a file of tensors after `change` of {name: array}."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={'format': 'pt'})


def config_of(family, **fields):
    """config.json of a family as transformers 5 spells it."""
    config = tiny.make_torch_model(family, **fields).config.to_dict()
    name = family.replace('llama3', 'llama')
    name = name if name in FAMILIES else name.split('_')[0]
    return config | {'architectures': [FAMILIES[name].architecture]}


def adapter_of(base, linears=LINEARS, seed=0, name='role'):
    """An adapter of rank 3 whose product is not zero."""
    adapter = adapters.init(base, linears, 3, seed, name)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype('f'), adapter)


def packed(model, rows=4, length=20, segments=1):
    """tokens, positions, segment int32 [rows, length], with so many segments of one length in a row."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab_size, (rows, length)).astype(np.int32)
    positions = np.tile(np.arange(length // segments, dtype=np.int32), (rows, segments))
    segment = np.repeat(np.arange(1, segments + 1, dtype=np.int32), length // segments)
    return tokens, positions, np.tile(segment, (rows, 1))


def logits(model, params, tokens, positions=None, segment=None):
    """Logits of rows [B, T]. Not compiled as a whole: its operations are those of other models, compiled once."""
    tokens = np.asarray(tokens, np.int32)
    if positions is None:
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        segment = np.ones_like(tokens)
    states = transformer.hidden(model, params, tokens, positions, segment)
    values = transformer.logits(model, params, states.reshape(-1, states.shape[-1]))
    return np.asarray(values).reshape(*tokens.shape, -1)


def torch_logits(model, tokens, **options):
    """Logits of rows [B, T] in PyTorch, of a model or of one that a folder holds."""
    import torch

    if not isinstance(model, torch.nn.Module):
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(str(model), attn_implementation='eager', **options)
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens, np.int64))).logits.float().numpy()


def sampler_of(model, **shape):
    return Sampler(model, SamplerConfig(**shape), sharding.make_mesh())


def fill_and_decode(sampler, params, goal):
    """Runs the programs until slot s holds goal[s] tokens; returns what was sampled, in order, with log-probs."""
    tokens, logp = ([[] for _ in goal] for _ in range(2))
    while True:
        status, length = np.asarray(sampler.state.status), np.asarray(sampler.state.length)
        fill = np.flatnonzero(status == FILL).tolist()
        if fill:
            sampler.extend(params, fill)
        elif (length < goal).any():
            burst = sampler.decode(params)
            for s, n in enumerate(np.asarray(burst.count)):
                tokens[s] += np.asarray(burst.tokens)[s, :n].tolist()
                logp[s] += np.asarray(burst.logp)[s, :n].tolist()
        else:
            return tokens, logp
