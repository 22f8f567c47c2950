"""Tensors of a checkpoint folder: names and shapes for a model, the headers of its files, and whether both agree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from zeroplay_jax.policy.decoder import DELTA, ModelConfig
from zeroplay_jax.policy.families import CheckpointError, is_wrapped
from zeroplay_jax.retrieval import json_text

# ---- tensor names ----------------------------------------------------------------------------------
#
# Names, shapes and axis order of the tensors in a Hugging Face checkpoint, for every parameter of the decoder.


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


_QUERY_SIZE = 'num_attention_heads·head_dim'
_KV_SIZE = 'num_key_value_heads·head_dim'
_GATED_QUERY_SIZE = f'{_QUERY_SIZE}·2'
_CHANNELS = (
    'linear_num_key_heads·linear_key_head_dim·2+linear_num_value_heads·linear_value_head_dim'
)
_VALUES = 'linear_num_value_heads·linear_value_head_dim'

# Parameter path -> (tensor name, names of its sizes in our axis order).
_MODEL_TENSORS = {
    'embedding': ('model.embed_tokens.weight', ('vocab_size', 'hidden_size')),
    'final_norm/scale': ('model.norm.weight', ('hidden_size',)),
    'head': ('lm_head.weight', ('hidden_size', 'vocab_size')),
}
# The same for one layer: parameter paths below layer_<i>, tensor names below model.layers.<i>.
_LAYER_TENSORS = {
    'input_norm/scale': ('input_layernorm.weight', ('hidden_size',)),
    'q/kernel': ('self_attn.q_proj.weight', ('hidden_size', _QUERY_SIZE)),
    'k/kernel': ('self_attn.k_proj.weight', ('hidden_size', _KV_SIZE)),
    'v/kernel': ('self_attn.v_proj.weight', ('hidden_size', _KV_SIZE)),
    'q/bias': ('self_attn.q_proj.bias', (_QUERY_SIZE,)),
    'k/bias': ('self_attn.k_proj.bias', (_KV_SIZE,)),
    'v/bias': ('self_attn.v_proj.bias', (_KV_SIZE,)),
    'q_norm/scale': ('self_attn.q_norm.weight', ('head_dim',)),
    'k_norm/scale': ('self_attn.k_norm.weight', ('head_dim',)),
    'o/kernel': ('self_attn.o_proj.weight', (_QUERY_SIZE, 'hidden_size')),
    'post_norm/scale': ('post_attention_layernorm.weight', ('hidden_size',)),
    'pre_mlp_norm/scale': ('pre_feedforward_layernorm.weight', ('hidden_size',)),
    'gate/kernel': ('mlp.gate_proj.weight', ('hidden_size', 'intermediate_size')),
    'up/kernel': ('mlp.up_proj.weight', ('hidden_size', 'intermediate_size')),
    'down/kernel': ('mlp.down_proj.weight', ('intermediate_size', 'hidden_size')),
    'post_mlp_norm/scale': ('post_feedforward_layernorm.weight', ('hidden_size',)),
}
# The same for a mixture of experts (policy/experts.py), in place of the feed-forward.
_FEED_FORWARD = ('gate/kernel', 'up/kernel', 'down/kernel')
_EXPERTS, _EXPERT_SIZE = 'num_experts', 'moe_intermediate_size'
_MIXTURE_TENSORS = {
    'moe/router': ('mlp.gate.weight', ('hidden_size', _EXPERTS)),
    'moe/gate': ('mlp.experts.*.gate_proj.weight', (_EXPERTS, 'hidden_size', _EXPERT_SIZE)),
    'moe/up': ('mlp.experts.*.up_proj.weight', (_EXPERTS, 'hidden_size', _EXPERT_SIZE)),
    'moe/down': ('mlp.experts.*.down_proj.weight', (_EXPERTS, _EXPERT_SIZE, 'hidden_size')),
}
# The same for what a gated delta net has in place of attention.
_DELTA_TENSORS = {
    'in_proj_qkv/kernel': ('linear_attn.in_proj_qkv.weight', ('hidden_size', _CHANNELS)),
    'in_proj_z/kernel': ('linear_attn.in_proj_z.weight', ('hidden_size', _VALUES)),
    'rate/kernel': ('linear_attn.in_proj_b.weight', ('hidden_size', 'linear_num_value_heads')),
    'decay/kernel': ('linear_attn.in_proj_a.weight', ('hidden_size', 'linear_num_value_heads')),
    'filters': ('linear_attn.conv1d.weight', (_CHANNELS, '1', 'linear_conv_kernel_dim')),
    'decay_log': ('linear_attn.A_log', ('linear_num_value_heads',)),
    'decay_bias': ('linear_attn.dt_bias', ('linear_num_value_heads',)),
    'delta_norm/scale': ('linear_attn.norm.weight', ('linear_value_head_dim',)),
    'out/kernel': ('linear_attn.out_proj.weight', (_VALUES, 'hidden_size')),
}
# Placement of the norms -> those that a layer does not have.
_ABSENT_NORMS = {
    'before': ('pre_mlp_norm', 'post_mlp_norm'),
    'after': ('input_norm', 'pre_mlp_norm'),
    'both': (),
}
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


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Returns {parameter path: its tensor} for every parameter of the model."""
    rows = dict(_MODEL_TENSORS)
    if config.tied:
        del rows['head']
    attention_rows = _layer_tensors(config)
    delta_rows = _DELTA_TENSORS | {
        path: row for path, row in attention_rows.items() if not row[0].startswith('self_attn.')
    }
    for i in range(config.layers):
        is_delta = bool(config.windows) and config.windows[i] == DELTA
        layer_rows = delta_rows if is_delta else attention_rows
        for path, (name, dims) in layer_rows.items():
            rows[f'layer_{i}/{path}'] = (f'model.layers.{i}.{name}', dims)
    sizes = {
        'vocab_size': config.vocab_size,
        'hidden_size': config.hidden_size,
        'intermediate_size': config.intermediate_size,
        'head_dim': config.head_dim,
        _QUERY_SIZE: config.heads * config.head_dim,
        _KV_SIZE: config.kv_heads * config.head_dim,
        _GATED_QUERY_SIZE: 2 * config.heads * config.head_dim,
    }
    if config.experts:
        sizes |= {_EXPERTS: config.experts.count, _EXPERT_SIZE: config.experts.size}
    if config.delta is not None:
        sizes |= {
            _CHANNELS: config.delta.channels,
            _VALUES: config.delta.values,
            'linear_num_value_heads': config.delta.value_heads,
            'linear_value_head_dim': config.delta.value_dim,
            'linear_conv_kernel_dim': config.delta.taps,
            '1': 1,
        }
    result = {}
    for path, (name, dims) in rows.items():
        shape = tuple(sizes[dim] for dim in dims)
        # The embedding is a table [vocabulary, hidden] in both formats, not a kernel.
        transposed = path.endswith('/kernel') or '/moe/' in path or path == 'head'
        result[path] = Tensor(name, shape, transposed, '*' in name)
    return result


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Returns the rows of _LAYER_TENSORS for the parameters that the model has."""
    layer_tensors = dict(_LAYER_TENSORS)
    if not config.qkv_bias:
        for projection in ('q', 'k', 'v'):
            del layer_tensors[f'{projection}/bias']
    if config.qk_norm == 'none':
        del layer_tensors['q_norm/scale']
        del layer_tensors['k_norm/scale']
    if config.qk_norm == 'projection':
        # The norm covers all heads, as the bias does, so its scale has the size of the bias.
        for projection in ('q', 'k'):
            name, _ = _LAYER_TENSORS[f'{projection}_norm/scale']
            _, dims = _LAYER_TENSORS[f'{projection}/bias']
            layer_tensors[f'{projection}_norm/scale'] = (name, dims)
    if config.experts:
        for path in _FEED_FORWARD:
            del layer_tensors[path]
        layer_tensors |= _MIXTURE_TENSORS
    if config.output_gate:
        name, (inputs, _) = layer_tensors['q/kernel']
        layer_tensors['q/kernel'] = (name, (inputs, _GATED_QUERY_SIZE))
    for name in _ABSENT_NORMS[config.norms]:
        del layer_tensors[f'{name}/scale']
    return layer_tensors


# ---- stored tensors --------------------------------------------------------------------------------


_DTYPES = ('F32', 'BF16', 'F16', 'F64')
_EMBEDDING, _HEAD = 'model.embed_tokens.weight', 'lm_head.weight'
# Weights of models are far smaller; a larger number is a damaged one, and products with it overflow.
LARGEST_NUMBER = 2.0**20
# The same as the bits of a bfloat16 without its sign.
_LARGEST_BFLOAT16 = np.array(LARGEST_NUMBER, ml_dtypes.bfloat16).view(np.uint16)
_BFLOAT16_MAGNITUDE = np.uint16(0x7FFF)
# Bytes of a tensor that are compared at a time.
_PIECE_BYTES = 16 << 20
_INDEX = 'model.safetensors.index.json'


class StoredTensor(NamedTuple):
    """A tensor as the header of a safetensors file describes it, under the name that it has there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


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
    """Returns what is wrong with the numbers of a tensor, such as 'numbers that are not finite'; '' if nothing is."""
    if array.dtype == ml_dtypes.bfloat16:
        # Several times faster than a conversion to float32. Magnitudes are ordered as their bits are.
        magnitudes = array.view(np.uint16) & _BFLOAT16_MAGNITUDE
        are_usable = (magnitudes <= _LARGEST_BFLOAT16).all()
    else:
        are_usable = (np.abs(array) <= LARGEST_NUMBER).all()
    if are_usable:
        return ''
    largest = np.abs(array).astype(np.float64).max()
    if np.isfinite(largest):
        return f'a number of {largest:.0e}'
    return 'numbers that are not finite'


def _weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder: a single one, or those of the index."""
    single = folder / 'model.safetensors'
    index = folder / _INDEX
    if not index.exists():
        if not single.exists():
            others = ', '.join(sorted(path.name for path in folder.iterdir()))
            raise CheckpointError(
                f'{folder}: holds neither model.safetensors nor {_INDEX} (only {others}); copy the folder again, or '
                'write it with save_pretrained of transformers'
            )
        return [single]
    try:
        names = set(json_text.read_object(index)['weight_map'].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f'{index}: cannot be read as an index of tensors ({error!r})'
        ) from None
    # A path could read any file of the machine.
    absent = names - {path.name for path in folder.iterdir()}
    if absent:
        raise CheckpointError(
            f'{index}: names {absent.pop()!r}, which is no file of the folder; copy the folder again'
        )
    # If both exist, it is unclear which weights are meant.
    if single.exists() and single.name not in names:
        raise CheckpointError(
            f'{folder}: holds model.safetensors and an index of other files; remove one of them'
        )
    return [folder / name for name in sorted(names)]


def file_headers(path: Path) -> StoredTensors:
    """Returns every tensor of a safetensors file by name. Reads the header only."""
    stored: StoredTensors = {}
    with open_file(path) as file:
        for name in file.keys():
            # Opens the tensor without reading its values.
            header = file.get_slice(name)
            stored[name] = StoredTensor(path, name, tuple(header.get_shape()), header.get_dtype())
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
        for first in range(0, rows, step):
            part = slice(first, min(first + step, rows))
            if not np.array_equal(embedding_rows[part], head_rows[part]):
                return True
    return False


def decoder_headers(folder: Path) -> StoredTensors:
    """Returns the tensors of the decoder of a folder, named as in a model that has no other parts.

    Reads the headers only.
    """
    has_other_parts = is_wrapped(folder)
    stored: StoredTensors = {}
    for path in _weight_files(folder):
        for tensor in file_headers(path).values():
            name = decoder_name(tensor.name) if has_other_parts else tensor.name
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
    expected: dict[str, tuple[int, ...]] = {}
    for parameter in tensors(config).values():
        for part in parameter.parts:
            expected[part.name] = part.stored_shape
    for name in sorted(expected.keys() ^ stored.keys()):
        if name in stored and _says_nothing_new(name, config):
            continue
        problem = 'is missing'
        if name in stored:
            problem = f'has no place in a {config.family} model of {config.layers} layers'
        fix = 'take the config.json that belongs to the weights'
        if f'{name.partition(".experts.")[0]}.experts.gate_up_proj' in stored:
            fix = (
                'the experts are there as one tensor; write the folder with '
                'save_pretrained(save_original_format=True)'
            )
        raise CheckpointError(f'{folder}: tensor {name} {problem}; {fix}')
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise CheckpointError(
                f'{stored[name].file}: tensor {name} has shape {stored[name].shape}, config.json asks for {shape}; '
                'take the config.json that belongs to the weights'
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
