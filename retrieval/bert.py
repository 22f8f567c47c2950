"""BERT as a pure function of its parameters: token ids to one unit vector per text.

The architecture is that of Devlin et al. 2019 (arXiv:1810.04805). It covers the checkpoints in use for dense
retrieval: E5 (Wang et al. 2022, arXiv:2212.03533), all-MiniLM, BGE and others of architecture BertModel with absolute
positions and the exact GELU, read from the safetensors in their folder.

Letters: B texts, L tokens of the longest text, D hidden size, H heads.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32
from safetensors import SafetensorError, safe_open

from . import json_text
from .types import RetrievalError

Params = dict[str, Any]

_LARGEST_SIZE = 1 << 20
# A finite stand-in for −∞ as the logit of padding: the softmax of a row of −∞ would be NaN.
_MASKED_LOGIT = -1e30

# Fields of config.json with the values that are computed here: their defaults, which an absent field has.
_EXPECTED: dict[str, tuple] = {
    'model_type': ('bert',),
    'hidden_act': ('gelu', 'gelu_python'),
    'position_embedding_type': ('absolute', None),
    'is_decoder': (False,),
    'add_cross_attention': (False,),
    'quantization_config': (None,),
}
_DTYPES = ('F32', 'BF16', 'F16', 'F64')


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of a checkpoint.

    Attributes:
      hidden_size: D.
      layers: number of transformer layers.
      heads: number of attention heads, H.
      positions: longest sequence in tokens.
      eps: epsilon of the layer norms.
      pooling: 'mean' (over all tokens except padding) or 'cls' (the first token).
    """

    hidden_size: int
    layers: int
    heads: int
    positions: int
    eps: float
    pooling: str = 'mean'


def read_config(folder: pathlib.Path, pooling: str) -> BertConfig:
    """Returns the sizes of a checkpoint folder.

    Args:
      folder: with a file config.json.
      pooling: as `BertConfig.pooling`.

    Raises:
      RetrievalError: no readable `config.json`, or an architecture that this module does not compute.
    """
    settings = json_text.load_object(
        folder / 'config.json', 'give the folder of a BERT checkpoint', float
    )
    # Other architectures would load but give meaningless vectors.
    differences = []
    for key, values in _EXPECTED.items():
        value = settings.get(key, values[0])
        if value not in values:
            differences.append(f'{key} is {value!r}, not {values[0]!r}')
    if differences:
        raise RetrievalError(
            f'{folder}/config.json: {"; ".join(differences)}; give a BERT text encoder'
        )
    config = BertConfig(
        hidden_size=_positive(folder, settings, 'hidden_size'),
        layers=_positive(folder, settings, 'num_hidden_layers'),
        heads=_positive(folder, settings, 'num_attention_heads'),
        positions=_positive(folder, settings, 'max_position_embeddings'),
        eps=_positive(folder, settings, 'layer_norm_eps', (int, float)),
        pooling=pooling,
    )
    if config.hidden_size % config.heads:
        raise RetrievalError(
            f'{folder}/config.json: hidden_size={config.hidden_size} is not a multiple of '
            f'num_attention_heads={config.heads}; give a whole checkpoint'
        )
    return config


def _positive(
    folder: pathlib.Path, settings: dict[str, Any], name: str, kinds: tuple = (int,)
) -> Any:
    """Returns a positive number in config.json; RetrievalError if it is missing or none."""
    value = settings.get(name)
    if value is None:
        raise RetrievalError(f'{folder}/config.json: {name} is missing; give a whole checkpoint')
    if type(value) not in kinds or not 0 < value < _LARGEST_SIZE:
        raise RetrievalError(
            f'{folder}/config.json: {name}={value!r} is not a size; give a whole checkpoint'
        )
    return value


# Parameters of a layer → the modules of the checkpoint that they are of: dense layers with the same input become one
# large product instead of three.
_LAYER = {
    'qkv': ('attention.self.query', 'attention.self.key', 'attention.self.value'),
    'out': ('attention.output.dense',),
    'attention_norm': ('attention.output.LayerNorm',),
    'up': ('intermediate.dense',),
    'down': ('output.dense',),
    'norm': ('output.LayerNorm',),
}


def load_params(folder: pathlib.Path, config: BertConfig, dtype: str = 'float32') -> Params:
    """Returns the parameters in `model.safetensors`, converted to `dtype`.

    Raises:
      RetrievalError: no such file, or a tensor that is missing, of another shape or not finite.
    """
    path = folder / 'model.safetensors'
    try:
        with safe_open(path, framework='flax') as file:
            read = _reader(file, path, dtype)
            positions = read('embeddings.position_embeddings.weight')
            shape = (config.positions, config.hidden_size)
            if positions.shape != shape:
                raise RetrievalError(
                    f'{path}: its positions are {positions.shape}, config.json says {shape}; give files of one '
                    'checkpoint'
                )
            layers = []
            for number in range(config.layers):
                layer = {}
                for part, modules in _LAYER.items():
                    names = [f'encoder.layer.{number}.{module}' for module in modules]
                    layer[part] = _module(read, *names)
                layers.append(layer)
            # Every text has token type 0, so that type's embedding is added to the positions here, once.
            token_types = read('embeddings.token_type_embeddings.weight')
            return {
                'words': read('embeddings.word_embeddings.weight'),
                'positions': positions + token_types[0],
                'norm': _module(read, 'embeddings.LayerNorm'),
                'layers': layers,
            }
    except OSError as error:
        raise RetrievalError(
            f'{path}: cannot be read ({error}); give a folder with safetensors'
        ) from error
    except SafetensorError as error:
        raise RetrievalError(
            f'{path}: damaged or not safetensors ({error}); download it again'
        ) from error


def _reader(file: Any, path: pathlib.Path, dtype: str) -> Callable[[str], Float[Array, ' ...']]:
    """Returns a function that reads a tensor of an open safetensors file; it raises RetrievalError."""
    # Checkpoints with a task head keep the encoder under the prefix 'bert.'.
    stored = {name.removeprefix('bert.'): name for name in file.keys()}  # noqa: SIM118 – not a mapping

    def read(name: str) -> Float[Array, ' ...']:
        if name not in stored:
            raise RetrievalError(f'{path}: no tensor {name}; give a whole BERT checkpoint')
        kind = file.get_slice(stored[name]).get_dtype()
        if kind not in _DTYPES:
            raise RetrievalError(
                f'{path}: {name} has dtype {kind}; supported: {", ".join(_DTYPES)}'
            )
        value = file.get_tensor(stored[name]).astype(dtype)
        if not jnp.isfinite(value).all():
            raise RetrievalError(
                f'{path}: {name} has numbers that are not finite; download it again'
            )
        return value

    return read


def _module(read: Callable[[str], Float[Array, ' ...']], *names: str) -> Params:
    """Returns scale and bias of a layer norm, or kernel and bias of dense layers, concatenated along their outputs."""
    weights = [read(f'{name}.weight') for name in names]
    biases = [read(f'{name}.bias') for name in names]
    if weights[0].ndim == 1:
        return {'scale': weights[0], 'bias': biases[0]}
    # PyTorch stores a kernel as [output, input].
    kernels = [weight.T for weight in weights]
    return {'kernel': jnp.concatenate(kernels, 1), 'bias': jnp.concatenate(biases)}


@functools.partial(jax.jit, static_argnums=0)
def bert_vectors(
    config: BertConfig,
    params: Params,
    ids: Int32[Array | np.ndarray, 'batch tokens'],
    length: Int32[Array | np.ndarray, ' batch'],
) -> Float32[Array, 'batch hidden']:
    """Returns one unit vector per text, float32 [B, D].

    Args:
      config: sizes of the checkpoint.
      params: from `load_params`.
      ids: token ids [B, L], padded at the end.
      length: tokens of each text without padding, at least 1.
    """
    # Shapes are static under jit, so there is one program per padded length.
    batch, tokens = ids.shape
    is_token = jnp.arange(tokens) < length[:, None]  # [B, L]
    embeddings = params['words'][ids] + params['positions'][:tokens]
    x = _norm(embeddings, params['norm'], config.eps)
    for layer in params['layers']:
        attended = _attention(config, x, layer, is_token)
        x = _norm(x + attended, layer['attention_norm'], config.eps)
        hidden = jax.nn.gelu(_dense(x, layer['up']), approximate=False)
        x = _norm(x + _dense(hidden, layer['down']), layer['norm'], config.eps)
    # Pooled and normalised in float32, also when the layers are computed in bfloat16.
    x = x.astype(jnp.float32)
    if config.pooling == 'cls':
        pooled = x[:, 0]
    else:
        # Padding is left out of the mean.
        pooled = jnp.sum(x * is_token[:, :, None], axis=1) / length[:, None]
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def _attention(config: BertConfig, x: Array, layer: Params, is_token: Array) -> Array:
    """Returns the output of multi-head self-attention, [B, L, D]."""
    batch, tokens, _ = x.shape
    heads = config.heads
    head_size = config.hidden_size // heads
    projected = _dense(x, layer['qkv']).reshape(batch, tokens, 3, heads, head_size)
    # Transposed to [3, B, H, L, D/H] before the products, so that each head is a plain matrix product: with heads in
    # the middle, XLA's CPU backend takes six times as long.
    q, k, v = projected.transpose(2, 0, 3, 1, 4)
    logits = (q @ k.swapaxes(2, 3)).astype(jnp.float32) * head_size**-0.5  # [B, H, L, L]
    masked_logits = jnp.where(is_token[:, None, None, :], logits, _MASKED_LOGIT)
    weights = jax.nn.softmax(masked_logits, axis=-1).astype(x.dtype)
    mixed = (weights @ v).swapaxes(1, 2).reshape(batch, tokens, config.hidden_size)
    return _dense(mixed, layer['out'])


def _dense(x: Array, params: Params) -> Array:
    """Returns a dense layer's output."""
    return x @ params['kernel'] + params['bias']


def _norm(x: Array, params: Params, eps: float) -> Array:
    """Returns the layer norm over the last axis, computed in float32."""
    # bfloat16 has too few bits for a mean and a variance.
    y = x.astype(jnp.float32)
    centred = y - y.mean(-1, keepdims=True)
    normalised = centred * jax.lax.rsqrt(y.var(-1, keepdims=True) + eps)
    return normalised.astype(x.dtype) * params['scale'] + params['bias']
