"""Tensors of a checkpoint folder: names and shapes for a model, the headers of its files, and whether both agree."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors import SafetensorError, safe_open

from zeroplay_jax.policy import transformer
from zeroplay_jax.policy.decoder import DELTA, ModelConfig
from zeroplay_jax.policy.families import CheckpointError, is_wrapped
from zeroplay_jax.retrieval import json_text


class Tensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
      name: name in the safetensors file.
      shape: shape of our parameter.
      transposed: whether the file holds the transpose: PyTorch stores kernels as [out, in], ours are [in, out].
      is_stacked: whether the file holds the parts of the first axis apart, named by their number in place of '*'.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    is_stacked: bool = False

    @property
    def parts(self) -> list[Tensor]:
        """The tensors as the file holds them."""
        if not self.is_stacked:
            return [self]
        names = [self.name.replace('*', str(number)) for number in range(self.shape[0])]
        return [Tensor(name, self.shape[1:], self.transposed) for name in names]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return self.shape[::-1] if self.transposed else self.shape


# In models with other parts beside the decoder: prefixes of its tensors, and of those of the other parts. Old and new
# versions of transformers order the names differently.
_DECODER_PREFIXES = {
    'language_model.model.': 'model.',
    'model.language_model.': 'model.',
    'language_model.lm_head.': 'lm_head.',
}
_OTHER_PARTS = ('vision_tower.', 'multi_modal_projector.', 'visual.', 'mtp.')


def decoder_name(name: str) -> str | None:
    """Returns the name that a tensor of a model with other parts has in the decoder alone; None for other parts."""
    for prefix, replacement in _DECODER_PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    if name.removeprefix('model.').startswith(_OTHER_PARTS):
        return None
    return name


# Parameters of ours → their tensors, without '.weight'; those of a layer stand below model.layers.<i>.
_NAMES = {
    'embedding': 'model.embed_tokens',
    'final_norm/scale': 'model.norm',
    'head': 'lm_head',
    'input_norm/scale': 'input_layernorm',
    'post_norm/scale': 'post_attention_layernorm',
    'pre_mlp_norm/scale': 'pre_feedforward_layernorm',
    'post_mlp_norm/scale': 'post_feedforward_layernorm',
    'q/kernel': 'self_attn.q_proj',
    'k/kernel': 'self_attn.k_proj',
    'v/kernel': 'self_attn.v_proj',
    'o/kernel': 'self_attn.o_proj',
    'q/bias': 'self_attn.q_proj.bias',
    'k/bias': 'self_attn.k_proj.bias',
    'v/bias': 'self_attn.v_proj.bias',
    'q_norm/scale': 'self_attn.q_norm',
    'k_norm/scale': 'self_attn.k_norm',
    'gate/kernel': 'mlp.gate_proj',
    'up/kernel': 'mlp.up_proj',
    'down/kernel': 'mlp.down_proj',
    # A mixture of experts (policy/experts.py).
    'moe/router': 'mlp.gate',
    'moe/gate': 'mlp.experts.*.gate_proj',
    'moe/up': 'mlp.experts.*.up_proj',
    'moe/down': 'mlp.experts.*.down_proj',
    'shared_router/kernel': 'mlp.shared_expert_gate',
    'shared_gate/kernel': 'mlp.shared_expert.gate_proj',
    'shared_up/kernel': 'mlp.shared_expert.up_proj',
    'shared_down/kernel': 'mlp.shared_expert.down_proj',
    # A gated delta net (policy/delta.py).
    'in_proj_qkv/kernel': 'linear_attn.in_proj_qkv',
    'in_proj_z/kernel': 'linear_attn.in_proj_z',
    'rate/kernel': 'linear_attn.in_proj_b',
    'decay/kernel': 'linear_attn.in_proj_a',
    'filters': 'linear_attn.conv1d',
    'decay_log': 'linear_attn.A_log',
    'decay_bias': 'linear_attn.dt_bias',
    'delta_norm/scale': 'linear_attn.norm',
    'out/kernel': 'linear_attn.out_proj',
}


@functools.lru_cache
def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Returns {parameter path: its tensor} for every parameter of the model."""
    windows = [window if window == DELTA else 0 for window in config.windows or [0] * config.layers]
    # A layer of each kind has the parameters of all; `init` is traced and not run.
    kinds = sorted({*windows})
    sample = dataclasses.replace(config, layers=len(kinds), windows=tuple(kinds), mesh=None)
    parameters = jax.eval_shape(lambda: transformer.init(sample, jax.random.key(0)))
    layers = [flatten_dict(parameters.pop(f'layer_{kind}'), sep='/') for kind in range(len(kinds))]
    result = {}
    for path, array in flatten_dict(parameters, sep='/').items():
        result[path] = _tensor(path, _NAMES[path], array.shape)
    for number, window in enumerate(windows):
        for path, array in layers[kinds.index(window)].items():
            name = f'model.layers.{number}.{_NAMES[path]}'
            result[f'layer_{number}/{path}'] = _tensor(path, name, array.shape)
    return result


def _tensor(path: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the tensor of a parameter; `name`: without '.weight'."""
    # The embedding is a table [vocabulary, hidden] in both formats, not a kernel.
    transposed = path.endswith('/kernel') or path.startswith('moe/') or path == 'head'
    ending = '' if name.endswith(('.A_log', '.dt_bias', '.bias')) else '.weight'
    return Tensor(name + ending, shape, transposed, '*' in name)


_DTYPES = ('F32', 'BF16', 'F16', 'F64')
_EMBEDDING, _HEAD = 'model.embed_tokens.weight', 'lm_head.weight'
# Weights of models are far smaller; a larger number is a damaged one, and products with it overflow.
LARGEST_NUMBER = 2.0**20
# The same as the bits of a bfloat16 without its sign.
_LARGEST_BFLOAT16 = np.array(LARGEST_NUMBER, ml_dtypes.bfloat16).view(np.uint16)
_BFLOAT16_MAGNITUDE = np.uint16(0x7FFF)
# Bytes of a tensor that are compared at a time.
_PIECE_BYTES = 16 << 20
# Tensors that hold a layer's experts in one, as published with Qwen3.5 → what each expert has in it, below each other.
_FUSED = {'gate_up_proj': ('gate_proj', 'up_proj'), 'down_proj': ('down_proj',)}
_INDEX = 'model.safetensors.index.json'


class StoredTensor(NamedTuple):
    """A tensor as the header of a safetensors file describes it, under the name that it has there.

    One of an expert may be rows of a tensor that holds all experts: those of expert `expert` from `first_row` on.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    expert: int | None = None
    first_row: int = 0

    @property
    def experts(self) -> StoredTensors:
        """The tensors of every expert by name, if this one holds all; else itself."""
        layer, _, kind = self.name.partition('.mlp.experts.')
        names = _FUSED.get(kind)
        if not names or len(self.shape) != 3:
            return {self.name: self}
        count, rows, columns = self.shape
        size = rows // len(names)
        stored = {}
        for number, (part, name) in itertools.product(range(count), enumerate(names)):
            stored[f'{layer}.mlp.experts.{number}.{name}.weight'] = self._replace(
                shape=(size, columns), expert=number, first_row=part * size
            )
        return stored


# Tensor name → header.
StoredTensors: TypeAlias = dict[str, StoredTensor]


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """Opens a safetensors file and turns the library's errors into CheckpointError."""
    try:
        with safe_open(path, 'np') as file:
            yield file
    # The library compares the header with the size of the file, so a truncated file fails already when it is opened.
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f'{path}: is not a whole safetensors file ({error}); copy it again'
        ) from None


def number_fault(array: np.ndarray) -> str:
    """Returns what is wrong with the numbers of a tensor, in words; '' if nothing is."""
    if array.dtype == ml_dtypes.bfloat16:
        # Several times faster than a conversion to float32. Magnitudes are ordered as their bits are.
        are_usable = (array.view(np.uint16) & _BFLOAT16_MAGNITUDE <= _LARGEST_BFLOAT16).all()
    else:
        are_usable = (np.abs(array) <= LARGEST_NUMBER).all()
    return '' if are_usable else f'numbers that are not finite, or beyond {LARGEST_NUMBER:.0e}'


def _weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder: a single one, or those of the index."""
    single, index = folder / 'model.safetensors', folder / _INDEX
    # In this order, as `transformers` looks for them.
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(
            f'{folder}: holds neither {single.name} nor {_INDEX}; copy the folder again, or write it with '
            'save_pretrained of transformers'
        )
    try:
        names = {str(name) for name in json_text.read_object(index)['weight_map'].values()}
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f'{index}: cannot be read as an index of tensors ({error!r})'
        ) from None
    # A path could read any file of the machine.
    absent = names - {path.name for path in folder.iterdir()}
    if absent:
        raise CheckpointError(
            f'{index}: names {min(absent)!r}, which is no file of the folder; copy the folder again'
        )
    return [folder / name for name in sorted(names)]


def file_headers(path: Path) -> StoredTensors:
    """Returns every tensor of a safetensors file by name, of every expert apart. Reads the header only."""
    stored: StoredTensors = {}
    with open_file(path) as file:
        for name in file.keys():
            # Opens the tensor without reading its values.
            header = file.get_slice(name)
            shape = tuple(header.get_shape())
            stored |= StoredTensor(path, name, shape, header.get_dtype()).experts
    return stored


def has_other_head(folder: Path) -> bool:
    """Returns whether a folder stores an output head whose numbers differ from those of its embedding.

    Such a head is used by `transformers` whatever `tie_word_embeddings` says: it was trained or merged apart.
    """
    # A folder with a config alone.
    if not any(folder.glob('*.safetensors*')):
        return False
    stored = decoder_headers(folder)
    if _HEAD not in stored or _EMBEDDING not in stored:
        return False
    embedding, head = stored[_EMBEDDING], stored[_HEAD]
    if embedding.shape != head.shape:
        return True
    check_dtype(embedding)
    check_dtype(head)
    rows, columns = head.shape
    step = max(1, _PIECE_BYTES // (columns * np.dtype(np.float32).itemsize))
    with open_file(embedding.file) as embedding_file, open_file(head.file) as head_file:
        embedding_rows = embedding_file.get_slice(embedding.name)
        head_rows = head_file.get_slice(head.name)
        parts = (slice(first, min(first + step, rows)) for first in range(0, rows, step))
        return any(not np.array_equal(embedding_rows[part], head_rows[part]) for part in parts)


def decoder_headers(folder: Path) -> StoredTensors:
    """Returns the tensors of the decoder of a folder, named as in a model that has no other parts.

    Reads the headers only.
    """
    has_other_parts = is_wrapped(folder)
    stored: StoredTensors = {}
    for path in _weight_files(folder):
        for name_there, tensor in file_headers(path).items():
            name = decoder_name(name_there) if has_other_parts else name_there
            if name in stored:
                first_file = stored[name].file.name
                raise CheckpointError(
                    f'{folder}: tensor {name} is in both {first_file} and {path.name}'
                )
            if name is not None:
                stored[name] = tensor
    return stored


def checked_headers(folder: Path, config: ModelConfig) -> StoredTensors:
    """Returns `decoder_headers`; CheckpointError unless they are those that config.json requires."""
    stored = decoder_headers(folder)
    parts = itertools.chain.from_iterable(tensor.parts for tensor in tensors(config).values())
    expected = {part.name: part.stored_shape for part in parts}
    surplus = [name for name in stored.keys() - expected if not _says_nothing_new(name, config)]
    for name in sorted([*expected, *surplus]):
        shape = stored[name].shape if name in stored else 'not there'
        if shape != expected.get(name):
            raise CheckpointError(
                f'{folder}: tensor {name} is {shape}, and {expected.get(name, "not there")} in a {config.family} model '
                f'of {config.layers} layers; take the config.json that belongs to the weights'
            )
        check_dtype(stored[name])
    return stored


def _says_nothing_new(name: str, config: ModelConfig) -> bool:
    """Returns whether a tensor that the decoder does not use can be passed over.

    The head of a tied model, the rotary frequencies that old folders hold, and heads that predict further tokens, for
    speculative decoding, which `transformers` ignores, too.
    """
    is_further_head = config.delta is not None and name.startswith('mtp.')
    return name == _HEAD or is_further_head or name.endswith('rotary_emb.inv_freq')


def check_dtype(stored: StoredTensor) -> None:
    """Raises CheckpointError unless a stored tensor has a dtype of weights."""
    if stored.dtype not in _DTYPES:
        raise CheckpointError(
            f'{stored.file}: tensor {stored.name} has dtype {stored.dtype}; supported: {", ".join(_DTYPES)}'
        )
