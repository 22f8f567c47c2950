"""BERT as a function of its parameters: token ids in, one unit vector per text out.

The architecture is that of Devlin et al. 2019 (arXiv:1810.04805). Covers the checkpoints that dense retrieval uses:
E5 (Wang et al. 2022, arXiv:2212.03533), all-MiniLM, BGE and others of architecture BertModel with absolute positions
and the exact GELU, read from the safetensors of their folder.

Letters: B texts, L tokens of the longest one, D hidden size, H heads.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from safetensors import safe_open

from .types import RetrievalError

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of a checkpoint; `pooling` is 'mean' (over all tokens that are no padding) or 'cls' (the first one)."""

    hidden_size: int
    layers: int
    heads: int
    positions: int
    eps: float
    pooling: str = 'mean'


def read_config(folder: pathlib.Path) -> BertConfig:
    """Sizes and pooling of a checkpoint folder.

    Raises:
      RetrievalError: no readable `config.json`, or an architecture that is computed otherwise.
    """
    raw = _json(folder / 'config.json')
    expected = dict(model_type='bert', hidden_act='gelu', position_embedding_type='absolute')
    wrong = [
        f'{key} is {raw[key]!r}, not {value!r}'
        for key, value in expected.items()
        if raw.get(key, value) != value
    ]
    if wrong:
        raise RetrievalError(f'{folder}/config.json: {"; ".join(wrong)}; give a BERT text encoder')
    path, pooling = folder / '1_Pooling' / 'config.json', 'mean'
    if path.exists():
        modes = [
            key
            for key, value in _json(path).items()
            if key.startswith('pooling_mode_') and value is True
        ]
        known = {'pooling_mode_mean_tokens': 'mean', 'pooling_mode_cls_token': 'cls'}
        if len(modes) != 1 or modes[0] not in known:
            raise RetrievalError(f'{path}: pooling {modes} is not supported; mean and cls are')
        pooling = known[modes[0]]
    try:
        return BertConfig(
            hidden_size=raw['hidden_size'],
            layers=raw['num_hidden_layers'],
            heads=raw['num_attention_heads'],
            positions=raw['max_position_embeddings'],
            eps=raw['layer_norm_eps'],
            pooling=pooling,
        )
    except KeyError as error:
        raise RetrievalError(
            f'{folder}/config.json: {error} is missing; give a whole checkpoint'
        ) from error


def load(folder: pathlib.Path, config: BertConfig, dtype: str = 'float32') -> Params:
    """Parameters from `model.safetensors`; the three projections of attention are one matrix.

    Raises:
      RetrievalError: no such file, or a tensor that is missing or of another shape (names it).
    """
    path, d = folder / 'model.safetensors', config.hidden_size
    try:
        with safe_open(path, framework='flax') as file:
            names = {name.removeprefix('bert.'): name for name in file.keys()}  # noqa: SIM118 – not a mapping

            def take(name, *shape):
                if name not in names:
                    raise RetrievalError(f'{path}: no tensor {name}; give a whole BERT checkpoint')
                value = file.get_tensor(names[name]).astype(dtype)
                if shape and value.shape != shape:
                    raise RetrievalError(
                        f'{path}: {name} is {value.shape}, config.json says {shape}'
                    )
                return value

            def norm(name):
                return dict(scale=take(f'{name}.weight', d), bias=take(f'{name}.bias', d))

            def dense(*path):
                kernels = [take(f'{p}.weight').T for p in path]
                return dict(
                    kernel=jnp.concatenate(kernels, 1),
                    bias=jnp.concatenate([take(f'{p}.bias') for p in path]),
                )

            def layer(i):
                base = f'encoder.layer.{i}'
                return dict(
                    qkv=dense(
                        *(f'{base}.attention.self.{part}' for part in ('query', 'key', 'value'))
                    ),
                    out=dense(f'{base}.attention.output.dense'),
                    attention_norm=norm(f'{base}.attention.output.LayerNorm'),
                    up=dense(f'{base}.intermediate.dense'),
                    down=dense(f'{base}.output.dense'),
                    norm=norm(f'{base}.output.LayerNorm'),
                )

            return dict(
                words=take('embeddings.word_embeddings.weight'),
                # Every text is of the first kind, so its vector is added to the positions once.
                positions=take('embeddings.position_embeddings.weight', config.positions, d)
                + take('embeddings.token_type_embeddings.weight')[0],
                norm=norm('embeddings.LayerNorm'),
                layers=[layer(i) for i in range(config.layers)],
            )
    except OSError as error:
        raise RetrievalError(
            f'{path}: cannot be read ({error}); give a folder with safetensors'
        ) from error
    except Exception as error:
        if type(error).__name__ == 'SafetensorError':
            raise RetrievalError(
                f'{path}: damaged or not safetensors ({error}); download it again'
            ) from error
        raise


@functools.partial(jax.jit, static_argnums=0)
def encode(config: BertConfig, params: Params, ids: jax.Array, length: jax.Array) -> jax.Array:
    """Unit vectors of texts, float32 [B, D].

    Args:
      ids: int32 [B, L], padded at the end.   length: int32 [B], tokens that are no padding, at least 1.
    """
    batch, tokens = ids.shape
    heads, size = config.heads, config.hidden_size // config.heads
    seen = jnp.arange(tokens) < length[:, None]  # [B, L]
    x = _norm(params['words'][ids] + params['positions'][:tokens], params['norm'], config.eps)
    for layer in params['layers']:
        # Plain matrix products per head: XLA's CPU backend takes six times as long for the transposed forms.
        q, k, v = (
            _dense(x, layer['qkv']).reshape(batch, tokens, 3, heads, size).transpose(2, 0, 3, 1, 4)
        )
        scores = (q @ k.swapaxes(2, 3)).astype(jnp.float32) * size**-0.5  # [B, H, L, L]
        weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, -1e30), axis=-1).astype(
            x.dtype
        )
        mixed = (weights @ v).swapaxes(1, 2).reshape(batch, tokens, config.hidden_size)
        x = _norm(x + _dense(mixed, layer['out']), layer['attention_norm'], config.eps)
        hidden = jax.nn.gelu(_dense(x, layer['up']), approximate=False)
        x = _norm(x + _dense(hidden, layer['down']), layer['norm'], config.eps)
    x = x.astype(jnp.float32)
    if config.pooling == 'cls':
        pooled = x[:, 0]
    else:
        pooled = jnp.sum(x * seen[:, :, None], axis=1) / length[:, None]
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def _dense(x, p):
    return x @ p['kernel'] + p['bias']


def _norm(x, p, eps):
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + eps)
    return y.astype(x.dtype) * p['scale'] + p['bias']


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise RetrievalError(
            f'{path}: cannot be read ({error}); give the folder of a BERT checkpoint'
        ) from error
