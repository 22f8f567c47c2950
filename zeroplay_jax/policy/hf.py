"""Hugging Face checkpoint folders in and out: config.json and safetensors ⇄ ModelConfig and parameters."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import tempfile
from typing import NamedTuple

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.types import UserError


class Family(NamedTuple):
    """What tells a family apart: its name in config.json and its switches of ModelConfig."""

    architecture: str
    qk_norm: bool
    qkv_bias: bool


FAMILIES = {
    'qwen2': Family('Qwen2ForCausalLM', qk_norm=False, qkv_bias=True),
    'qwen3': Family('Qwen3ForCausalLM', qk_norm=True, qkv_bias=False),
}

_LAYER = {
    'input_norm/scale': 'input_layernorm.weight',
    'q/kernel': 'self_attn.q_proj.weight',
    'k/kernel': 'self_attn.k_proj.weight',
    'v/kernel': 'self_attn.v_proj.weight',
    'q/bias': 'self_attn.q_proj.bias',
    'k/bias': 'self_attn.k_proj.bias',
    'v/bias': 'self_attn.v_proj.bias',
    'q_norm/scale': 'self_attn.q_norm.weight',
    'k_norm/scale': 'self_attn.k_norm.weight',
    'o/kernel': 'self_attn.o_proj.weight',
    'post_norm/scale': 'post_attention_layernorm.weight',
    'gate/kernel': 'mlp.gate_proj.weight',
    'up/kernel': 'mlp.up_proj.weight',
    'down/kernel': 'mlp.down_proj.weight',
}
_TOP = {
    'embedding': 'model.embed_tokens.weight',
    'final_norm/scale': 'model.norm.weight',
    'head': 'lm_head.weight',
}


class CheckpointError(UserError):
    """A checkpoint folder that cannot be used; the message names the file or field."""


def read_config(folder, **overrides) -> ModelConfig:
    """ModelConfig of a Hugging Face folder; `overrides` set dtype, remat, logit_chunk.

    Raises:
      CheckpointError: no such file, an unknown architecture, or a field this decoder cannot honour.
    """
    path = pathlib.Path(folder) / 'config.json'
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f'{path}: cannot be read as a model config ({error})') from None
    family = next((f for f, row in FAMILIES.items() if row.architecture in raw.get('architectures', ())), None)
    if family is None:
        known = ', '.join(row.architecture for row in FAMILIES.values())
        raise CheckpointError(f'{path}: architectures={raw.get("architectures")} is not supported; supported: {known}')
    rope = raw.get('rope_parameters') or {}
    scaling = raw.get('rope_scaling') or rope
    if scaling.get('rope_type', 'default') != 'default':
        raise CheckpointError(f'{path}: rope type {scaling["rope_type"]!r} is not supported; supported: default')
    if raw.get('use_sliding_window'):
        raise CheckpointError(f'{path}: use_sliding_window is not supported; set it to false')
    if raw.get('hidden_act', 'silu') != 'silu':
        raise CheckpointError(f'{path}: hidden_act={raw["hidden_act"]!r} is not supported; supported: silu')
    heads = raw['num_attention_heads']
    return ModelConfig(
        family=family,
        vocab_size=raw['vocab_size'],
        hidden_size=raw['hidden_size'],
        intermediate_size=raw['intermediate_size'],
        layers=raw['num_hidden_layers'],
        heads=heads,
        kv_heads=raw.get('num_key_value_heads', heads),
        head_dim=raw.get('head_dim') or raw['hidden_size'] // heads,
        rope_theta=float(raw.get('rope_theta') or rope.get('rope_theta', 10000.0)),
        norm_eps=raw['rms_norm_eps'],
        tied=raw.get('tie_word_embeddings', False),
        qkv_bias=FAMILIES[family].qkv_bias,
        qk_norm=FAMILIES[family].qk_norm,
        **overrides,
    )


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """Our parameter path → tensor name in the folder."""
    names = dict(_TOP)
    if config.tied:
        del names['head']
    absent = {
        *(() if config.qk_norm else ('q_norm/scale', 'k_norm/scale')),
        *(() if config.qkv_bias else ('q/bias', 'k/bias', 'v/bias')),
    }
    layer = {ours: theirs for ours, theirs in _LAYER.items() if ours not in absent}
    for i in range(config.layers):
        names |= {f'layer_{i}/{ours}': f'model.layers.{i}.{theirs}' for ours, theirs in layer.items()}
    return names


def _transposed(name: str) -> bool:
    # torch's Linear keeps [out, in]; ours is [in, out].
    return name.endswith('/kernel') or name == 'head'


def _shape(config: ModelConfig, name: str) -> tuple[int, ...]:
    c, leaf = config, name.split('/', 1)[-1]
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return {
        'embedding': (c.vocab_size, c.hidden_size),
        'head': (c.hidden_size, c.vocab_size),
        'q/kernel': (c.hidden_size, q),
        'k/kernel': (c.hidden_size, kv),
        'v/kernel': (c.hidden_size, kv),
        'o/kernel': (q, c.hidden_size),
        'gate/kernel': (c.hidden_size, c.intermediate_size),
        'up/kernel': (c.hidden_size, c.intermediate_size),
        'down/kernel': (c.intermediate_size, c.hidden_size),
        'q/bias': (q,),
        'k/bias': (kv,),
        'v/bias': (kv,),
        'q_norm/scale': (c.head_dim,),
        'k_norm/scale': (c.head_dim,),
    }.get(leaf, (c.hidden_size,))


def _files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Tensor name → file, for one file or an index of several."""
    index = folder / 'model.safetensors.index.json'
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())['weight_map'].items()}
    single = folder / 'model.safetensors'
    if not single.exists():
        raise CheckpointError(f'{folder}: holds neither model.safetensors nor model.safetensors.index.json')
    try:
        with safe_open(single, 'np') as f:
            return dict.fromkeys(f.keys(), single)
    except Exception as error:  # the library raises its own type for a torn file
        raise CheckpointError(f'{single}: is not a whole safetensors file ({error})') from None


def load(folder, config: ModelConfig | None = None, mesh=None, dtype=np.float32) -> Params:
    """Parameters of a folder as a nested dict of jax arrays.

    Args:
      config: `read_config(folder)` when None.
      mesh: where given, every array is made directly in its shards, each device's slice read from the file.
      dtype: of the parameters.

    Raises:
      CheckpointError: a missing tensor or a wrong shape, by name.
    """
    folder = pathlib.Path(folder)
    config = config or read_config(folder)
    files, params = _files(folder), {}
    for name, tensor in tensor_names(config).items():
        if tensor not in files:
            raise CheckpointError(f'{folder}: tensor {tensor} is missing')
        shape, flip = _shape(config, name), _transposed(name)
        with safe_open(files[tensor], 'np') as f:
            view = f.get_slice(tensor)
            found = tuple(view.get_shape())
            wanted = shape[::-1] if flip else shape
            if found != wanted:
                raise CheckpointError(f'{folder}: tensor {tensor} has shape {found}, config.json asks for {wanted}')

            def read(index, view=view, flip=flip):
                index = tuple(index)
                part = view[index[::-1] if flip else index]
                return np.ascontiguousarray(part.T if flip else part).astype(dtype)

            if mesh is None:
                value = jax.numpy.asarray(read((slice(None),) * len(shape)))
            else:
                place = sharding._fit(sharding.parameter_spec(name), shape, mesh, name)
                value = jax.make_array_from_callback(shape, place, read)
        node = params
        *parents, leaf = name.split('/')
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return params


def to_tensors(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Flat tensors by their Hugging Face names, in host memory."""
    flat = {sharding.path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    out = {}
    for name, tensor in tensor_names(config).items():
        value = np.asarray(jax.device_get(flat[name]))
        out[tensor] = np.ascontiguousarray(value.T if _transposed(name) else value)
    return out


def save(folder, config: ModelConfig, params: Params, like) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads.

    Every small file of `like` (config, tokenizer, chat template) is copied. The folder appears whole or not at all.

    Raises:
      FileExistsError: the folder exists already.
    """
    folder, like = pathlib.Path(folder), pathlib.Path(like)
    if folder.exists():
        raise FileExistsError(f'{folder}: exists already; choose another place or remove it')
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f'.{folder.name}.', dir=folder.parent) as staging:
        staged = pathlib.Path(staging) / folder.name
        staged.mkdir()
        for file in like.iterdir():
            if file.suffix in ('.json', '.jinja', '.txt', '.model') and 'index' not in file.name:
                shutil.copy(file, staged / file.name)
        weights = staged / 'model.safetensors'
        save_file(to_tensors(config, params), weights, metadata={'format': 'pt'})
        weights.chmod(0o644)  # the library writes for the owner only
        os.rename(staged, folder)
