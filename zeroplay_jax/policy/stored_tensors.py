"""The tensors of a checkpoint folder as the headers of its files describe them, and whether a model fits them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from safetensors import SafetensorError, safe_open

from zeroplay_jax.policy.decoder import ModelConfig
from zeroplay_jax.policy.families import SUPPORTED, CheckpointError
from zeroplay_jax.policy.tensor_names import Tensor, decoder_name, tensors

_DTYPES = ('F32', 'BF16', 'F16', 'F64')


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


def _weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder: a single one, or those of the index."""
    single = folder / 'model.safetensors'
    index = folder / 'model.safetensors.index.json'
    if not index.exists():
        if not single.exists():
            raise CheckpointError(
                f'{folder}: holds neither model.safetensors nor model.safetensors.index.json'
            )
        return [single]
    try:
        weight_map = json.loads(index.read_text())['weight_map']
        names = sorted(set(weight_map.values()))
        files = [folder / name for name in names]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f'{index}: cannot be read as an index of tensors ({error!r})'
        ) from None
    # If both exist, it is unclear which weights are meant.
    if single.exists() and single not in files:
        raise CheckpointError(
            f'{folder}: holds model.safetensors and an index of other files; remove one of them'
        )
    return files


def read_headers(folder: Path) -> StoredTensors:
    """Returns every tensor of a folder by name. Reads the headers only."""
    stored: StoredTensors = {}
    for path in _weight_files(folder):
        with open_file(path) as file:
            for name in file.keys():
                if name in stored:
                    first_file = stored[name].file.name
                    raise CheckpointError(
                        f'{folder}: tensor {name} is in both {first_file} and {path.name}'
                    )
                # Opens the tensor without reading its values.
                header = file.get_slice(name)
                shape = tuple(header.get_shape())
                stored[name] = StoredTensor(path, name, shape, header.get_dtype())
    return stored


def decoder_tensors(stored: StoredTensors) -> StoredTensors:
    """Returns the tensors of the decoder of a model with other parts, by the names of a decoder alone."""
    selected = {}
    for name, tensor in stored.items():
        name_in_decoder = decoder_name(name)
        if name_in_decoder is not None:
            selected[name_in_decoder] = tensor
    return selected


def check_tensors(folder: Path, config: ModelConfig, stored: StoredTensors) -> None:
    """Raises CheckpointError unless the tensors of a folder are those that its config.json requires."""
    expected = tensors(config).values()
    for tensor in expected:
        if tensor.name not in stored:
            raise CheckpointError(f'{folder}: tensor {tensor.name} is missing')
        _check_tensor(folder, tensor, stored[tensor.name])
    unexpected = set(stored) - {tensor.name for tensor in expected}
    # Redundant tensors: the head of a tied model, and the rotary frequencies that old folders hold.
    unexpected.discard('lm_head.weight')
    for name in sorted(unexpected):
        if not name.endswith('rotary_emb.inv_freq'):
            model = f'{config.family} model of {config.layers} layers'
            raise CheckpointError(f'{folder}: tensor {name} has no place in a {model}; {SUPPORTED}')


def _check_tensor(folder: Path, tensor: Tensor, stored: StoredTensor) -> None:
    """Raises CheckpointError unless a stored tensor has the expected shape and a supported dtype."""
    shape = tensor.shape
    dims = tensor.dims
    if tensor.transposed:
        shape = shape[::-1]
        dims = dims[::-1]
    if stored.shape != shape:
        raise CheckpointError(
            f'{folder}: tensor {tensor.name} has shape {stored.shape}, config.json asks for {shape} '
            f'({", ".join(dims)}); {SUPPORTED}'
        )
    if stored.dtype not in _DTYPES:
        raise CheckpointError(
            f'{folder}: tensor {tensor.name} has dtype {stored.dtype}; supported: {", ".join(_DTYPES)}'
        )
