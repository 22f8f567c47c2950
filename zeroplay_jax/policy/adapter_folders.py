"""Reads and writes the weights of adapters as PEFT folders: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig, read
from zeroplay_jax.policy.adapters import A, B
from zeroplay_jax.policy.decoder import ModelConfig, Params
from zeroplay_jax.policy.stored_tensors import (
    LARGEST_NUMBER,
    check_dtype,
    file_headers,
    number_fault,
    tensors,
)
from zeroplay_jax.settings.schema import LINEARS
from zeroplay_jax.types import UserError

_FACTORS = {A: 'lora_A', B: 'lora_B'}
# The decoder in `transformers`, and in a model with an encoder of images, which older versions name otherwise.
_DECODER = 'model.layers.'
_WRAPPED_DECODER = 'model.language_model.layers.'
_OLDER_WRAPPED_DECODER = 'language_model.model.layers.'
_ADAPTED = 'base_model.model.'


def wrapped_modules(model: ModelConfig, linears: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the adapted modules in a model with an encoder of images.

    The last part of a name would not do: the encoder has modules with the same one.
    """
    names = _tensor_names(model, linears, _WRAPPED_DECODER).values()
    modules = {name.removeprefix(_ADAPTED).rpartition('.lora_')[0] for name in names}
    return tuple(sorted(modules))


def _tensor_names(
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
            kernel = whole[f'{layer}/{linear}/kernel'].name
            module_in_decoder = kernel.removesuffix('.weight').removeprefix(_DECODER)
            module = f'{_ADAPTED}{decoder}{module_in_decoder}'
            for factor, peft_name in _FACTORS.items():
                names[layer, linear, factor] = f'{module}.{peft_name}.weight'
    return names


def _decoder_of(names: Iterable[str]) -> str:
    """Returns with which name of the decoder's layers the tensors of an adapter begin."""
    for name in names:
        for decoder in (_WRAPPED_DECODER, _OLDER_WRAPPED_DECODER):
            if name.startswith(_ADAPTED + decoder):
                return decoder
    return _DECODER


def load(folder, model: ModelConfig) -> Params:
    """Returns the adapter of a PEFT folder, float32 NumPy arrays {layer: {linear: {A, B}}}.

    Raises:
      UserError: the folder does not fit the model, or its numbers are not finite.
    """
    folder = pathlib.Path(folder)
    config = read(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(f'{folder}: has no {WEIGHTS_FILE}; {_advice(folder)}')
    stored = file_headers(path)
    unknown = sorted(set(config.linears) - set(LINEARS))
    if unknown:
        raise UserError(
            f'{folder / CONFIG_FILE}: target_modules has {unknown[0]!r}; only the linear layers '
            f'{", ".join(LINEARS)} can have adapters'
        )
    names = _tensor_names(model, config.linears, _decoder_of(stored))
    different = sorted(set(names.values()) ^ set(stored))
    if different:
        is_missing = different[0] in names.values()
        state = 'is missing' if is_missing else 'has no place'
        fix = 'take the adapter of this model'
        if is_missing:
            fix += ', or merge one of some layers alone into its base with merge_and_unload of PEFT'
        if 'embed_tokens' in different[0] or 'lm_head' in different[0]:
            fix = 'save the adapter with save_embedding_layers=False, or merge it with merge_and_unload of PEFT'
        raise UserError(
            f'{path}: tensor {different[0]} {state} in a model of {model.layers} layers; {fix}'
        )
    shapes = tensors(model)
    for (layer, linear, factor), name in names.items():
        fan_in, fan_out = shapes[f'{layer}/{linear}/kernel'].shape
        # PyTorch stores both factors as [out, in].
        expected = (config.rank, fan_in) if factor == A else (fan_out, config.rank)
        if stored[name].shape != expected:
            raise UserError(
                f'{path}: tensor {name} must have shape {expected}, it has {stored[name].shape}; take the adapter of '
                'this model'
            )
        check_dtype(stored[name])
    arrays = load_file(path)
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
            bound = config.alpha * float(np.abs(factors[A]).max() * np.abs(factors[B]).max())
            if bound > LARGEST_NUMBER:
                raise UserError(
                    f'{path}: {names[layer, linear, A]} and its lora_B change weights by up to {bound:.0e}; train the '
                    'adapter again'
                )
    return result


def _advice(folder: pathlib.Path) -> str:
    """Returns what to do about a folder without safetensors."""
    if (folder / 'adapter_model.bin').exists():
        return 'load adapter_model.bin with peft and write it with save_pretrained'
    return 'copy the folder again'


def save(
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
    folder = pathlib.Path(folder)
    if folder.exists():
        raise FileExistsError(f'{folder}: exists already; choose another place or remove it')
    gathered = {}
    decoder = _WRAPPED_DECODER if config.modules else _DECODER
    for (layer, linear, factor), name in _tensor_names(model, config.linears, decoder).items():
        array = sharding.to_numpy(adapter[layer][linear][factor])
        gathered[name] = np.ascontiguousarray(array.T)
    if jax.process_index() != 0:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The folder is written next to its destination, on the same file system, where a rename is atomic.
    with tempfile.TemporaryDirectory(prefix=f'.{folder.name}.', dir=folder.parent) as staging:
        staged = pathlib.Path(staging) / folder.name
        staged.mkdir()
        save_file(gathered, staged / WEIGHTS_FILE, metadata={'format': 'pt'})
        (staged / WEIGHTS_FILE).chmod(0o644)  # the library permits only the owner to read
        text = json.dumps(config.fields(), indent=2) + '\n'
        files = {CONFIG_FILE: text} | dict(texts or {})
        for name, content in files.items():
            (staged / name).write_text(content, encoding='utf-8')
        os.rename(staged, folder)


def add_to(params: Params, folder, model: ModelConfig) -> Params:
    """Returns whole weights with the adapter of a PEFT folder added to their kernels; errors as of `load`."""
    config = read(folder)
    result = dict(params)
    for layer, linears in load(folder, model).items():
        result[layer] = dict(params[layer])
        for linear, factors in linears.items():
            modules = params[layer][linear]
            kernel = modules['kernel']
            difference = (config.alpha / config.rank) * (factors[A] @ factors[B])
            placed = jax.device_put(jnp.asarray(difference), kernel.sharding)
            changed = (kernel + placed).astype(kernel.dtype)
            result[layer][linear] = modules | {'kernel': changed}
    return result
