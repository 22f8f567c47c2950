"""Reads and writes Hugging Face checkpoint folders: config.json and safetensors ⇄ ModelConfig and parameters.

So are adapters as PEFT folders: adapter_config.json and adapter_model.safetensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from zeroplay_jax.policy import adapters, sharding
from zeroplay_jax.policy.adapter_config import (
    ADAPTED,
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    base_folder,
    refuse_feed_forward,
)
from zeroplay_jax.policy.adapter_config import read as read_adapter
from zeroplay_jax.policy.adapters import A, B
from zeroplay_jax.policy.decoder import ModelConfig, Params
from zeroplay_jax.policy.families import FAMILIES, CheckpointError, decoder_config
from zeroplay_jax.policy.shape import read_config as read_config
from zeroplay_jax.policy.stored_tensors import (
    LARGEST_NUMBER,
    StoredTensor,
    StoredTensors,
    Tensor,
    check_dtype,
    checked_headers,
    file_headers,
    number_fault,
    open_file,
    tensors,
)
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.retrieval.progress import Bar
from zeroplay_jax.settings.schema import ALL_LINEARS
from zeroplay_jax.types import UserError

# Bytes of float32 that are read from a file at a time.
_READ_BYTES = 16 << 20
# Largest size of a written file; a model that exceeds it is split over several.
_FILE_BYTES = 5 << 30
# Files of a checkpoint folder that `save` copies: config, tokenizer, chat template.
_COPIED_SUFFIXES = ('.json', '.jinja', '.txt', '.model')


def _read_slice(
    stored: StoredTensor, tensor: Tensor, index: tuple[slice, ...], dtype
) -> np.ndarray:
    """Returns one slice of a tensor, in the axis order of our parameter.

    Args:
      stored: file and dtype of the tensor.
      tensor: name and shape of the tensor.
      index: the slice, in the axis order of our parameter.
      dtype: dtype of the result.

    Raises:
      CheckpointError: the slice has NaN, infinity or a number beyond those of weights.
    """
    # Converted to ranges, because start and stop of a slice may be None.
    spans = [range(size)[part] for part, size in zip(index, tensor.shape, strict=True)]
    shape = [len(span) for span in spans]
    result = np.empty(shape, dtype)
    # `target` is a view of the result in the axis order of the file.
    target = result
    if tensor.transposed:
        target = result.T
        spans.reverse()
    row_span, *column_spans = spans
    columns = [slice(span.start, span.stop) for span in column_spans]
    row_size = math.prod(target.shape[1:])
    row_bytes = row_size * np.dtype(np.float32).itemsize
    step = max(1, _READ_BYTES // row_bytes)
    for first in range(0, len(row_span), step):
        piece = row_span[first : first + step]
        rows = slice(stored.first_row + piece.start, stored.first_row + piece.stop)
        whole = () if stored.expert is None else (stored.expert,)
        # The file is opened for every piece: it is memory-mapped, and only closing it returns the memory of the bytes
        # read so far. Otherwise the whole tensor would remain resident beside its copy.
        with open_file(stored.file) as file:
            stored_tensor = file.get_slice(stored.name)
            # What becomes infinite in a narrower dtype is refused below.
            with np.errstate(over='ignore'):
                target[first : first + step] = stored_tensor[(*whole, rows, *columns)]
        # One such number makes every loss NaN, and every update would be skipped until the end of the run.
        fault = number_fault(target[first : first + step])
        if fault:
            raise CheckpointError(
                f'{stored.file}: tensor {tensor.name} has {fault}; copy it again, or take another checkpoint'
            )
    return result


def _read_parts(
    stored: StoredTensors, tensor: Tensor, index: tuple[slice, ...], dtype
) -> np.ndarray:
    """Returns one slice of a parameter, which the file may hold in parts; arguments and errors as of `_read_slice`."""
    if not tensor.is_stacked:
        return _read_slice(stored[tensor.name], tensor, index, dtype)
    parts = tensor.parts[index[0]]
    return np.stack([_read_slice(stored[part.name], part, index[1:], dtype) for part in parts])


def _load_tensor(stored: StoredTensors, tensor: Tensor, target: Sharding, dtype) -> jax.Array:
    """Returns a tensor as an array with the sharding `target`. Reads each slice of this process once."""
    # Devices by slice: several devices may hold the same one. Slices cannot be hashed before Python 3.12.
    slices: dict[str, tuple[slice, ...]] = {}
    devices: dict[str, list] = {}
    indices = target.addressable_devices_indices_map(tensor.shape)
    for device, index in indices.items():
        key = str(index)
        slices[key] = index
        devices.setdefault(key, []).append(device)
    shards = []
    for key, index in slices.items():
        host_slice = _read_parts(stored, tensor, index, dtype)
        for device in devices[key]:
            shards.append(jax.device_put(host_slice, device))
        # Wait for the transfers, so that at most one slice is in host memory.
        jax.block_until_ready(shards)
    return jax.make_array_from_single_device_arrays(tensor.shape, target, shards)


def load(
    folder,
    config: ModelConfig | None = None,
    mesh: Mesh | None = None,
    dtype=np.float32,
    training_layout: bool = False,
    progress: bool = True,
    matrix_dtype=None,
    quantized: bool = False,
) -> Params:
    """Returns the parameters of a checkpoint folder as a nested dict of arrays.

    All headers are checked before the first tensor is read. Tensors pass through host memory one slice at a time.

    Args:
      folder: contains config.json and model.safetensors, or several files with their index; or an adapter, which is
        added to the weights of its base.
      config: of the model; None reads it from the folder.
      mesh: mesh over which the arrays are created in shards, so that a process reads its own slices only. None: all
        arrays on the first device.
      dtype: of the parameters, whatever the dtype of the files.
      training_layout: whether the arrays are laid out as the training state is, see `sharding.parameter_sharding`.
      progress: whether a progress bar is shown.
      matrix_dtype: dtype of matrices, if it is not that of the other parameters.
      quantized: whether the kernels of linear layers become int8 (policy/adapters.py). Not for adapters.

    Raises:
      CheckpointError: a file is truncated, or a tensor is missing, repeated, not finite, or of a wrong shape or dtype.
      UserError: the mesh does not divide the shapes.
    """
    given_folder = Path(folder)
    folder = base_folder(given_folder)
    config = config or read_config(folder)
    tensor_of_path = tensors(config)
    stored = checked_headers(folder, config)
    # Computed before the first tensor is read, so that a mesh that does not divide the shapes raises early.
    shardings = _tensor_shardings(config, tensor_of_path, mesh, training_layout)
    flat: dict[str, jax.Array] = {}
    with Bar(len(tensor_of_path), 'tensors', 'load', shown=progress) as bar:
        for path, tensor in tensor_of_path.items():
            is_quantized = quantized and adapters.is_quantized(path)
            leaf_dtype = matrix_dtype if matrix_dtype and len(tensor.shape) > 1 else dtype
            if is_quantized:
                # Scales and integers are those of the numbers in the file.
                leaf_dtype = np.float32
            array = _load_tensor(stored, tensor, shardings[path], leaf_dtype)
            if is_quantized:
                # One kernel at a time, so that the whole model never exists in another dtype.
                array, scale = _quantize(path, array, mesh)
                flat[adapters.scale_path(path)] = scale
            flat[path] = array
            bar.update()
    params = unflatten_dict(flat, sep='/')
    if folder != given_folder:
        return add_adapter(params, given_folder, config)
    return params


def _quantize(path: str, kernel: jax.Array, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    """Returns the integers and scales of the kernel at a path, laid out as it is."""
    scale_sharding = kernel.sharding
    if mesh is not None:
        scale_path = adapters.scale_path(path)
        scale_shape = (*kernel.shape[:-2], kernel.shape[-1])
        scale_sharding = sharding.parameter_sharding(scale_path, scale_shape, mesh)
    return adapters.quantize_program(kernel.sharding, scale_sharding)(kernel)


def _tensor_shardings(
    config: ModelConfig, tensor_of_path: dict[str, Tensor], mesh: Mesh | None, training_layout: bool
) -> dict[str, Sharding]:
    """Returns {parameter path: sharding of its array}.

    Args:
      config: of the model, for its numbers of heads.
      tensor_of_path: {parameter path: its tensor}, all parameters of the model.
      mesh: None puts every array whole on one device.
      training_layout: see `sharding.parameter_sharding` (the training state is also split over 'replica').

    Raises:
      UserError: the mesh does not divide the heads or a shape.
    """
    if mesh is None:
        # A local device is taken: with several processes `jax.devices()[0]` belongs to one of them only.
        first_device = jax.local_devices()[0]
        return dict.fromkeys(tensor_of_path, SingleDeviceSharding(first_device))
    sharding.check_heads(config.heads, config.kv_heads, mesh.shape['model'])
    return {
        path: sharding.parameter_sharding(path, tensor.shape, mesh, training_layout)
        for path, tensor in tensor_of_path.items()
    }


def _gather_tensors(flat: dict[str, Any], selected: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Returns the selected parameters in host memory, by tensor name and in the axis order of the files."""
    gathered = {}
    for path, tensor in selected.items():
        value = sharding.to_numpy(flat[path])
        for part, array in zip(tensor.parts, value if tensor.is_stacked else [value]):
            # The file format has no strides.
            gathered[part.name] = np.ascontiguousarray(array.T if part.transposed else array)
    return gathered


def _split_files(
    flat: dict[str, Any], tensor_of_path: dict[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Returns the tensors of each file to write: consecutive ones, up to _FILE_BYTES per file."""
    files: list[dict[str, Tensor]] = [{}]
    file_bytes = 0
    for path, tensor in tensor_of_path.items():
        tensor_bytes = flat[path].nbytes
        if files[-1] and file_bytes + tensor_bytes > _FILE_BYTES:
            files.append({})
            file_bytes = 0
        files[-1][path] = tensor
        file_bytes += tensor_bytes
    return files


@contextlib.contextmanager
def _staged(folder: Path, texts: Mapping[str, str] | None) -> Iterator[Path]:
    """Gives a folder to write to that becomes `folder`, with the files `texts` (name → text), if the block succeeds."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Next to its destination, on the same file system, where a rename is atomic.
    with tempfile.TemporaryDirectory(prefix=f'.{folder.name}.', dir=folder.parent) as staging:
        staged = Path(staging) / folder.name
        staged.mkdir()
        yield staged
        for name, text in (texts or {}).items():
            (staged / name).write_text(text, encoding='utf-8')
        os.rename(staged, folder)


def _write_tensors(path: Path, tensors_of_name: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file."""
    save_file(tensors_of_name, path, metadata={'format': 'pt'})
    path.chmod(0o644)  # the library permits only the owner to read


def _write_weights(
    folder: Path, config: ModelConfig, params: Params, dtype: str, writes: bool
) -> None:
    """Writes one safetensors file, or several and their index. One file's tensors are in host memory at a time.

    Args:
      folder: to write to.
      config: of the model.
      params: weights.
      dtype: of the written tensors; '': that of the weights.
      writes: whether this process writes. The others only take part in gathering the arrays.
    """
    flat = flatten_dict(params, sep='/')
    files = _split_files(flat, tensors(config))
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, selected in enumerate(files, 1):
        if len(files) == 1:
            name = 'model.safetensors'
        else:
            name = f'model-{number:05d}-of-{len(files):05d}.safetensors'
        gathered = _gather_tensors(flat, selected)
        weight_map |= dict.fromkeys(gathered, name)
        if writes:
            if dtype:
                gathered = {tensor: value.astype(dtype) for tensor, value in gathered.items()}
            _write_tensors(folder / name, gathered)
            total_bytes += sum(value.nbytes for value in gathered.values())
    if writes and len(files) > 1:
        index = {'metadata': {'total_size': total_bytes}, 'weight_map': weight_map}
        index_path = folder / 'model.safetensors.index.json'
        index_path.write_text(json.dumps(index, indent=2) + '\n')


def _write_config(path: Path, like: Path, config: ModelConfig, dtype: str) -> None:
    """Writes the config.json of a folder for the decoder alone.

    Args:
      path: copy of `like`, which is changed where necessary.
      like: config.json of the folder that the model was loaded from.
      config: of the model that is written.
      dtype: of the tensors: some loaders convert to the dtype named in the file.
    """
    from transformers import AutoConfig

    original = json_text.read_object(like, float)
    fields = decoder_config(like)
    # `torch_dtype` is the older spelling; only a field that is present is changed.
    for key in ('dtype', 'torch_dtype'):
        if fields.get(key) is not None:
            fields[key] = dtype
    stated = fields.get('tie_word_embeddings')
    if stated is None:
        model_type = FAMILIES[config.family].model_type
        stated = AutoConfig.for_model(model_type).tie_word_embeddings
    # Where the flag was stale, a loader could discard the head that is in the files.
    if stated != config.tied:
        fields['tie_word_embeddings'] = config.tied
    if fields != original:
        path.write_text(json.dumps(fields, indent=2) + '\n', encoding='utf-8')


def _copy(source: Path, target: Path) -> None:
    """Copies a small file.

    Raises:
      UserError: one line; it cannot be read.
      OSError: the copy cannot be written.
    """
    try:
        content = source.read_bytes()
    # Without the name of the file if the disk fails.
    except OSError as error:
        raise UserError(
            f'{source}: {error.strerror}; correct this and run the same command again'
        ) from None
    target.write_bytes(content)


def _absent(folder) -> Path:
    """Returns a path; FileExistsError if there is something."""
    path = Path(folder)
    if path.exists():
        raise FileExistsError(f'{path}: exists already; choose another place or remove it')
    return path


def save(
    folder,
    config: ModelConfig,
    params: Params,
    like,
    texts: Mapping[str, str] | None = None,
    dtype: str = '',
) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads.

    The folder appears complete or not at all. With several processes all must call this; the first one writes.

    Args:
      folder: to create.
      config: of the model.
      params: weights.
      like: folder from which the small files are copied: config, tokenizer, chat template.
      texts: name → text of further files, or of files in place of those of `like`.
      dtype: of the tensors in the files; '': that of the weights.

    Raises:
      FileExistsError: the folder exists already.
      UserError: one line; a small file cannot be read.
    """
    folder = _absent(folder)
    if jax.process_index() != 0:
        _write_weights(folder, config, params, dtype, writes=False)
        return
    with _staged(folder, texts) as staged:
        _write_weights(staged, config, params, dtype, writes=True)
        for file in base_folder(like).iterdir():
            # The index of the other folder describes other files.
            if file.suffix in _COPIED_SUFFIXES and 'index' not in file.name:
                _copy(file, staged / file.name)
        like_config = base_folder(like) / 'config.json'
        written_dtype = dtype or str(jax.tree.leaves(params)[0].dtype)
        _write_config(staged / 'config.json', like_config, config, written_dtype)


_FACTORS = {A: 'lora_A', B: 'lora_B'}
# The decoder in `transformers`, and in a model with an encoder of images, which older versions name otherwise.
_DECODER = 'model.layers.'
_WRAPPED_DECODER = 'model.language_model.layers.'
_OLDER_WRAPPED_DECODER = 'language_model.model.layers.'


def check_linears(model: ModelConfig, linears: Sequence[str], name: str) -> None:
    """Raises UserError for adapters of layers that the model does not have; `name`: of what lists the layers."""
    if model.experts:
        refuse_feed_forward(linears, name)
    kernels = [path.split('/')[-2] for path in tensors(model) if path.endswith('/kernel')]
    for linear in linears:
        if linear not in kernels or linear not in ALL_LINEARS:
            raise UserError(f'{name}: no layer of this model has {linear!r} to adapt; take it away')


def wrapped_modules(model: ModelConfig, linears: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the adapted modules in a model with an encoder of images.

    The last part of a name would not do: the encoder has modules with the same one.
    """
    names = _adapter_names(model, linears, _WRAPPED_DECODER).values()
    modules = {name.removeprefix(ADAPTED).rpartition('.lora_')[0] for name in names}
    return tuple(sorted(modules))


def _adapter_names(
    model: ModelConfig, linears: Sequence[str], decoder: str = _DECODER
) -> dict[tuple[str, str, str], str]:
    """Returns (layer, linear, factor) → name of its tensor in a PEFT folder.

    Args:
      model: of the base.
      linears: adapted linear layers.
      decoder: beginning of the names of the decoder's modules.
    """
    whole = tensors(model)
    names = {}
    for number in range(model.layers):
        for linear in linears:
            layer = f'layer_{number}'
            # Gated delta nets have no queries, keys and values of their own.
            if f'{layer}/{linear}/kernel' not in whole:
                continue
            kernel = whole[f'{layer}/{linear}/kernel'].name
            module_in_decoder = kernel.removesuffix('.weight').removeprefix(_DECODER)
            module = f'{ADAPTED}{decoder}{module_in_decoder}'
            for factor, peft_name in _FACTORS.items():
                names[layer, linear, factor] = f'{module}.{peft_name}.weight'
    return names


def _decoder_of(names: Iterable[str]) -> str:
    """Returns with which name of the decoder's layers the tensors of an adapter begin."""
    for name in names:
        for decoder in (_WRAPPED_DECODER, _OLDER_WRAPPED_DECODER):
            if name.startswith(ADAPTED + decoder):
                return decoder
    return _DECODER


def check_adapter(folder, model: ModelConfig) -> dict[tuple[str, str, str], str]:
    """Returns (layer, linear, factor) → tensor name of a PEFT folder. Reads the header of its weights only.

    Raises:
      UserError: the folder does not fit the model.
    """
    folder = Path(folder)
    config = read_adapter(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(
            f'{folder}: has no {WEIGHTS_FILE}; load the adapter with peft and write it with save_pretrained'
        )
    stored = file_headers(path)
    check_linears(model, config.linears, f'{folder / CONFIG_FILE}: target_modules')
    names = _adapter_names(model, config.linears, _decoder_of(stored))
    whole = tensors(model)
    expected = {}
    for (layer, linear, factor), name in names.items():
        fan_in, fan_out = whole[f'{layer}/{linear}/kernel'].shape
        # PyTorch stores both factors as [out, in].
        expected[name] = (config.rank, fan_in) if factor == A else (fan_out, config.rank)
    for name in sorted(expected.keys() | stored):
        shape = stored[name].shape if name in stored else 'not there'
        if shape != expected.get(name):
            raise UserError(
                f'{path}: tensor {name} is {shape}, and {expected.get(name, "not there")} for this model and '
                f'{CONFIG_FILE}; take the adapter of this model, or merge it with merge_and_unload of PEFT'
            )
        check_dtype(stored[name])
    return names


def load_adapter(folder, model: ModelConfig) -> Params:
    """Returns the adapter of a PEFT folder, float32 NumPy arrays {layer: {linear: {A, B}}}.

    Raises:
      UserError: the folder does not fit the model, or its numbers are not finite.
    """
    names = check_adapter(folder, model)
    path = Path(folder) / WEIGHTS_FILE
    arrays = load_file(path)
    alpha = read_adapter(folder).alpha
    result: Params = {}
    for (layer, linear, factor), name in names.items():
        fault = number_fault(arrays[name])
        if fault:
            raise UserError(f'{path}: tensor {name} has {fault}; copy it again or train it again')
        array = arrays[name].T.astype(np.float32)
        result.setdefault(layer, {}).setdefault(linear, {})[factor] = array
    for layer, linears in result.items():
        for linear, factors in linears.items():
            # A bound of every entry of the product, because one is enough to make a policy's numbers infinite.
            bound = alpha * float(np.abs(factors[A]).max() * np.abs(factors[B]).max())
            if bound > LARGEST_NUMBER:
                raise UserError(
                    f'{path}: {names[layer, linear, A]} and its lora_B change weights by up to {bound:.0e}; train the '
                    'adapter again'
                )
    return result


def save_adapter(
    folder,
    model: ModelConfig,
    config: AdapterConfig,
    adapter: Params,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` loads over the base.

    The folder appears complete or not at all. With several processes all must call this; the first one writes.

    Args:
      folder: to create.
      model: of the base.
      config: of the adapter.
      adapter: {layer: {linear: {A, B}}}.
      texts: further files, name → content.

    Raises:
      FileExistsError: the folder exists already.
    """
    folder = _absent(folder)
    gathered = {}
    decoder = _WRAPPED_DECODER if config.modules else _DECODER
    for (layer, linear, factor), name in _adapter_names(model, config.linears, decoder).items():
        array = sharding.to_numpy(adapter[layer][linear][factor])
        gathered[name] = np.ascontiguousarray(array.T)
    if jax.process_index() != 0:
        return
    with _staged(folder, texts) as staged:
        _write_tensors(staged / WEIGHTS_FILE, gathered)
        text = json.dumps(config.fields(), indent=2) + '\n'
        (staged / CONFIG_FILE).write_text(text, encoding='utf-8')


def add_adapter(params: Params, folder, model: ModelConfig) -> Params:
    """Returns whole weights with the adapter of a PEFT folder added to their kernels; errors as of `load_adapter`."""
    config = read_adapter(folder)
    result = dict(params)
    for layer, linears in load_adapter(folder, model).items():
        result[layer] = dict(params[layer])
        for linear, factors in linears.items():
            modules = params[layer][linear]
            kernel = modules['kernel']
            difference = (config.alpha / config.rank) * (factors[A] @ factors[B])
            placed = jax.device_put(jnp.asarray(difference), kernel.sharding)
            changed = (kernel + placed).astype(kernel.dtype)
            result[layer][linear] = modules | {'kernel': changed}
    return result
