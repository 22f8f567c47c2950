"""Hugging Face checkpoint folders in and out: config.json and safetensors ⇄ ModelConfig and parameters."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.families import SUPPORTED, CheckpointError, Tensor, read_config, tensors
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.retrieval import progress

__all__ = ['CheckpointError', 'load', 'read_config', 'save', 'to_tensors']

_DTYPES = ('F32', 'BF16', 'F16', 'F64')
# A file is read, and written, in pieces of about this size.
_READ_BYTES = 16 << 20
_FILE_BYTES = 5 << 30


class _Stored(NamedTuple):
    """Where a tensor lies, and what the file's header says of it."""

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[Any]:
    try:
        with safe_open(file, 'np') as f:
            yield f
    except (
        SafetensorError,
        OSError,
    ) as error:  # the header must account for every byte of the file
        raise CheckpointError(
            f'{file}: is not a whole safetensors file ({error}); copy it again'
        ) from None


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a folder: one, or those that an index lists."""
    single, index = folder / 'model.safetensors', folder / 'model.safetensors.index.json'
    if not index.exists():
        if not single.exists():
            raise CheckpointError(
                f'{folder}: holds neither model.safetensors nor model.safetensors.index.json'
            )
        return [single]
    try:
        files = [
            folder / file
            for file in sorted(set(json.loads(index.read_text())['weight_map'].values()))
        ]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f'{index}: cannot be read as an index of tensors ({error!r})'
        ) from None
    if single.exists() and single not in files:
        raise CheckpointError(
            f'{folder}: holds model.safetensors and an index of other files; remove one of them'
        )
    return files


def _stored(folder: pathlib.Path) -> dict[str, _Stored]:
    """Every tensor of a folder by name, from the headers alone."""
    found: dict[str, _Stored] = {}
    for file in _files(folder):
        with _opened(file) as f:
            for name in f.keys():
                if name in found:
                    raise CheckpointError(
                        f'{folder}: tensor {name} is in both {found[name].file.name} and {file.name}'
                    )
                view = f.get_slice(name)
                found[name] = _Stored(file, tuple(view.get_shape()), view.get_dtype())
    return found


def _check(folder: pathlib.Path, config: ModelConfig, stored: dict[str, _Stored]) -> None:
    """Refuses a folder whose tensors are not those of its config.json."""
    wanted = tensors(config)
    for tensor in wanted.values():
        if tensor.name not in stored:
            raise CheckpointError(f'{folder}: tensor {tensor.name} is missing')
        found = stored[tensor.name]
        shape, dims = (
            (tensor.shape[::-1], tensor.dims[::-1])
            if tensor.transposed
            else (tensor.shape, tensor.dims)
        )
        if found.shape != shape:
            raise CheckpointError(
                f'{folder}: tensor {tensor.name} has shape {found.shape}, config.json asks for {shape} '
                f'({", ".join(dims)}); {SUPPORTED}'
            )
        if found.dtype not in _DTYPES:
            raise CheckpointError(
                f'{folder}: tensor {tensor.name} has dtype {found.dtype}; supported: {", ".join(_DTYPES)}'
            )
    # A tied head may be written out, and old folders hold the rotary frequencies; both say nothing new.
    spare = set(stored) - {t.name for t in wanted.values()} - {'lm_head.weight'}
    spare = {name for name in spare if not name.endswith('rotary_emb.inv_freq')}
    if spare:
        model = f'{config.family} model of {config.layers} layers'
        raise CheckpointError(
            f'{folder}: tensor {min(spare)} has no place in a {model}; {SUPPORTED}'
        )


def _read(found: _Stored, tensor: Tensor, index: tuple[slice, ...], dtype) -> np.ndarray:
    """One slice of a tensor in our order of axes and in `dtype`.

    Every piece is read through its own mapping of the file: closing it takes the pages out of this process's memory,
    where otherwise the whole tensor would stay beside its copy.
    """
    spans = [range(size)[part] for part, size in zip(index, tensor.shape, strict=True)]
    out = np.empty([len(span) for span in spans], dtype)
    target = out
    if tensor.transposed:
        spans, target = spans[::-1], out.T
    rows, *others = spans
    columns = tuple(slice(span.start, span.stop) for span in others)
    step = max(
        1, _READ_BYTES // (np.dtype(np.float32).itemsize * math.prod(len(span) for span in others))
    )
    for at in range(0, len(rows), step):
        piece = rows[at : at + step]
        with _opened(found.file) as f:
            target[at : at + step] = f.get_slice(tensor.name)[
                (slice(piece.start, piece.stop), *columns)
            ]
    return out


def _place(found: _Stored, tensor: Tensor, place, dtype) -> jax.Array:
    """A tensor as a sharded array; of this process's slices, each is read once."""
    owners: dict[str, tuple[tuple[slice, ...], list]] = {}
    for device, index in place.addressable_devices_indices_map(tensor.shape).items():
        owners.setdefault(str(index), (index, []))[1].append(device)
    parts = []
    for index, devices in owners.values():
        part = _read(found, tensor, index, dtype)
        parts += [jax.device_put(part, device) for device in devices]
        jax.block_until_ready(parts)  # the host's copy goes before the next one comes
    return jax.make_array_from_single_device_arrays(tensor.shape, place, parts)


def load(
    folder,
    config: ModelConfig | None = None,
    mesh=None,
    dtype=np.float32,
    owned: bool = False,
    shown: bool = True,
) -> Params:
    """Parameters of a folder as a nested dict of jax arrays.

    All headers are checked before the first tensor is read. Tensors pass through host memory one slice at a time.

    Args:
      folder: config.json and model.safetensors, or several files with their index.
      config: `read_config(folder)` when None.
      mesh: where given, every array is made directly in its shards, and only this process's slices are read.
      dtype: of the parameters, whatever that of the files.
      owned: of `mesh`, the layout of what an update keeps, see `sharding.parameter_sharding`.
      shown: whether a bar is drawn on a terminal.

    Raises:
      CheckpointError: a file that is torn or a tensor that is missing, duplicated, of a wrong shape or type, by name.
      UserError: the shapes do not divide by the mesh.
    """
    folder = pathlib.Path(folder)
    config = config or read_config(folder)
    wanted, stored = tensors(config), _stored(folder)
    _check(folder, config, stored)
    if mesh is not None:
        sharding.check_heads(config.heads, config.kv_heads, mesh)
    everywhere = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = {
        name: everywhere
        if mesh is None
        else sharding.parameter_sharding(name, tensor.shape, mesh, owned)
        for name, tensor in wanted.items()
    }
    params: Params = {}
    with progress.bar(len(wanted), 'tensors', 'load', shown=shown) as bar:
        for name, tensor in wanted.items():
            node = params
            *parents, leaf = name.split('/')
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = _place(stored[tensor.name], tensor, places[name], dtype)
            bar.update()
    return params


def _to_host(x) -> np.ndarray:
    """A whole array in host memory; one that lies on several hosts is gathered, on all of them."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _to_tensors(params: Params, names: dict[str, Tensor]) -> dict[str, np.ndarray]:
    flat = {sharding.path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    out = {}
    for name, tensor in names.items():
        value = _to_host(flat[name])
        out[tensor.name] = np.ascontiguousarray(value.T if tensor.transposed else value)
    return out


def to_tensors(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Flat tensors by their Hugging Face names, in host memory."""
    return _to_tensors(params, tensors(config))


def _write_weights(folder: pathlib.Path, config: ModelConfig, params: Params, writes: bool) -> None:
    """One safetensors file, or several and their index; one file's tensors are in host memory at a time."""
    flat = {sharding.path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    groups: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in tensors(config).items():
        if groups[-1] and size + flat[name].nbytes > _FILE_BYTES:
            groups, size = [*groups, {}], 0
        groups[-1][name] = tensor
        size, total = size + flat[name].nbytes, total + flat[name].nbytes
    count, where = len(groups), {}
    for i, group in enumerate(groups, 1):
        file = 'model.safetensors' if count == 1 else f'model-{i:05d}-of-{count:05d}.safetensors'
        values = _to_tensors(params, group)
        where |= dict.fromkeys(values, file)
        if writes:
            save_file(values, folder / file, metadata={'format': 'pt'})
            (folder / file).chmod(0o644)  # the library writes for the owner only
    if writes and count > 1:
        index = {'metadata': {'total_size': total}, 'weight_map': where}
        (folder / 'model.safetensors.index.json').write_text(json.dumps(index, indent=2) + '\n')


def _write_dtype(path: pathlib.Path, dtype: str) -> None:
    """Sets the dtype that config.json names, in its own spelling, to that of the tensors: loaders obey it."""
    raw = json.loads(path.read_text(encoding='utf-8'))
    stale = [key for key in ('dtype', 'torch_dtype') if raw.get(key) not in (None, dtype)]
    if stale:
        path.write_text(
            json.dumps(raw | dict.fromkeys(stale, dtype), indent=2) + '\n', encoding='utf-8'
        )


def save(folder, config: ModelConfig, params: Params, like) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads.

    Every small file of `like` (config, tokenizer, chat template) is copied. The folder appears whole or not at all.
    With several hosts all must call it; the first one writes.

    Raises:
      FileExistsError: the folder exists already.
    """
    folder, like = pathlib.Path(folder), pathlib.Path(like)
    if folder.exists():
        raise FileExistsError(f'{folder}: exists already; choose another place or remove it')
    if jax.process_index():
        _write_weights(folder, config, params, writes=False)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f'.{folder.name}.', dir=folder.parent) as staging:
        staged = pathlib.Path(staging) / folder.name
        staged.mkdir()
        _write_weights(staged, config, params, writes=True)
        for file in like.iterdir():
            if file.suffix in ('.json', '.jinja', '.txt', '.model') and 'index' not in file.name:
                shutil.copy(file, staged / file.name)
        _write_dtype(staged / 'config.json', str(jax.tree.leaves(params)[0].dtype))
        os.rename(staged, folder)
