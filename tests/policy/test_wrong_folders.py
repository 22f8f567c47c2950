"""Broken folders of policies and adapters are refused in one line, and named, before their numbers are read."""

import dataclasses
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from refused_calls import check_table
from safetensors.numpy import load_file
from small_policies import (
    KERNEL,
    adapter_of,
    change_json,
    change_tensors,
    config_of,
    copy_of,
    equal,
    split,
)

from zeroplay_jax.policy import adapter_config, hf, shape
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, AdapterConfig
from zeroplay_jax.retrieval.downloads import check_name
from zeroplay_jax.rollout.tokens import open_codec

WEIGHTS = 'model.safetensors'
# A factor of the adapter.
FACTOR = 'base_model.model.model.layers.0.mlp.down_proj.lora_A.weight'


# What is wrong with a folder: functions of it.


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


def index(text):
    """An index in place of the file of the weights."""

    def change(folder):
        (folder / WEIGHTS).unlink()
        (folder / 'model.safetensors.index.json').write_text(text)

    return change


def only_file(folder):
    (path,) = folder.glob('*.safetensors')
    return path


def torn(folder):
    path = only_file(folder)
    path.write_bytes(path.read_bytes()[:-100])


def second_part(folder):
    return sorted(split(folder, 3).glob('*.safetensors'))[1]


def torn_part(folder):
    part = second_part(folder)
    part.write_bytes(part.read_bytes()[:-1])


def without_part(folder):
    second_part(folder).unlink()


def twice(folder):
    kernel = {KERNEL: load_file(folder / WEIGHTS)[KERNEL]}
    split(folder, 2, kernel)


def weights(change):
    """Changes {name: array} of the only file."""
    return lambda folder: change_tensors(only_file(folder), change)


def without_prefixes(tensors):
    for name in list(tensors):
        tensors[name.removeprefix('model.')] = tensors.pop(name)


def fill(number):
    """Fills both factors of every layer."""
    return lambda tensors: [array.fill(number) for array in tensors.values()]


def spoilt(dtype, number):
    def spoil(tensors):
        tensors[KERNEL] = tensors[KERNEL].astype(dtype)
        tensors[KERNEL][-1, -1] = number

    return weights(spoil)


def eight_bits(folder):
    """Gives the first tensor a dtype that NumPy lacks."""
    import torch
    from safetensors import torch as torch_files

    tensors = torch_files.load_file(only_file(folder))
    first = min(tensors)
    tensors[first] = tensors[first].to(torch.float8_e4m3fn)
    torch_files.save_file(tensors, only_file(folder))


# How a folder is read.


def checked(folder):
    """Loads a folder whose numbers must not be read before all is checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, '_read_slice', lambda *_: pytest.fail('read before all is checked'))
        return hf.load(folder)


def is_tied(folder):
    return hf.read_config(folder).tied


def context(tokens):
    """Checks a context against the positions of the model, which a rotary scaling may extend."""
    return lambda folder: shape.check_context(folder, tokens, 'sampler.context')


TABLE = pathlib.Path(__file__).with_name('wrong_folders.txt')


def test_broken_folders_are_refused_as_the_table_says(published, tmp_path):
    saved, path = tmp_path / 'saved', tmp_path / 'policy'
    # A file that no index may name.
    (tmp_path / 'other.safetensors').touch()
    adapter_fields = AdapterConfig(3, 6.0, ('down', 'q', 'v'), published)
    factors = adapter_of(hf.load(published), adapter_fields.linears, 1)
    model = hf.read_config(published)
    hf.save_adapter(saved, model, adapter_fields, factors)
    with pytest.raises(FileExistsError):
        hf.save_adapter(saved, model, adapter_fields, factors)

    def is_unchanged(folder):
        equal(hf.load_adapter(folder, model), factors)
        return adapter_config.read(folder) == adapter_fields

    def opened(source, config_file, values, changes, read):
        shutil.rmtree(path, ignore_errors=True)
        copy_of(source, path)
        change_json(path / config_file, **values)
        for change in changes:
            change(path)
        return read(path)

    def policy(*changes, read=checked, **values):
        return opened(published, 'config.json', values, changes, read)

    def adapter(*changes, read=hf.load, **values):
        return opened(saved, CONFIG_FILE, values, changes, read)

    def config(family, **values):
        return policy(written('config.json', json.dumps(config_of(family) | values)))

    def with_images(read, text_fields=(), **values):
        """A decoder beside an encoder of images."""
        text_config = config_of('gemma3') | dict(text_fields)
        whole = dict(architectures=['Gemma3ForConditionalGeneration'], text_config=text_config)
        return policy(written('config.json', json.dumps(whole | values)), read=read)

    calls = dict(
        policy=policy,
        adapter=adapter,
        config=config,
        is_unchanged=is_unchanged,
        with_images=with_images,
    )
    numpy_names = dict(ones=np.ones, nan=np.nan, inf=np.inf)
    others = dict(check_name=check_name, open_codec=open_codec, SAVED=str(saved))
    check_table(TABLE, globals() | calls | numpy_names | others, tmp_path)


def test_every_field_of_peft_is_refused_or_without_effect():
    """Fails where a version of PEFT adds a field: say here or in adapter_config.py what it means."""
    import peft

    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    refused = set(re.findall(r'adapter\((\w+)=', TABLE.read_text()))
    assert not fields - refused - adapter_config.WITHOUT_EFFECT
