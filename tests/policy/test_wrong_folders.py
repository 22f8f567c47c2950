"""Broken folders of policies and adapters are refused in one line, and named, before their numbers are read."""

import dataclasses
import json
import pathlib
import re
import shutil
import struct

import numpy as np
import pytest
from refused_calls import check_table
from safetensors.numpy import load_file, save_file
from small_policies import (
    KERNEL,
    adapter_of,
    change_json,
    change_tensors,
    config_of,
    copy_of,
    split,
)

from zeroplay_jax.policy import adapter_config, hf, shape
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig
from zeroplay_jax.retrieval.downloads import check_name
from zeroplay_jax.rollout.tokens import open_codec

LINEARS = ('down', 'q', 'v')
WEIGHTS = 'model.safetensors'


def torn(folder):
    weights = folder / 'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:-100])


def second_part(folder):
    return sorted(split(folder, 3).glob('*.safetensors'))[1]


def torn_part(folder):
    part = second_part(folder)
    part.write_bytes(part.read_bytes()[:-1])


def without_part(folder):
    second_part(folder).unlink()


def twice(folder):
    kernel = {KERNEL: load_file(folder / 'model.safetensors')[KERNEL]}
    split(folder, 2, kernel)


def without_prefixes(tensors):
    for name in list(tensors):
        tensors[name.removeprefix('model.')] = tensors.pop(name)


def raw_tensor(path, dtype):
    """Gives the first tensor of a file a dtype that NumPy may lack."""
    tensors = load_file(path)
    first, *_ = sorted(tensors)
    header, data = {}, b''
    for name, array in tensors.items():
        content, kind = array.tobytes(), 'F32'
        if name == first:
            content, kind = bytes(int(BYTES[dtype] * array.size)), dtype
        offsets = [len(data), len(data) + len(content)]
        header[name] = dict(dtype=kind, shape=list(array.shape), data_offsets=offsets)
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack('<Q', len(text)) + text + data)


# dtypes of no weights → bytes of a number.
BYTES = dict(I32=4, BOOL=1, C64=8, F8_E4M3=1, F8_E5M2=1, F8_E8M0=1, F4=0.5, U8=1)


def fill(number):
    """Fills both factors of every layer."""
    return lambda tensors, first: [array.fill(number) for array in tensors.values()]


class Folders:
    """The calls of the table: each reads a new folder, with something wrong in it."""

    def __init__(self, published, path):
        self.published, self.path = published, path / 'policy'
        self.base = copy_of(published, path / 'base')
        self.model = hf.read_config(self.base)
        self.factors = adapter_of(hf.load(self.base), LINEARS, 1)

    def files(self, change):
        shutil.rmtree(self.path, ignore_errors=True)
        change(copy_of(self.published, self.path))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hf, '_read_slice', lambda *_: pytest.fail('read before all is checked'))
            return hf.load(self.path)

    def config(self, family, **values):
        return self.config_text(json.dumps(config_of(family) | values))

    def config_text(self, text):
        return self.files(lambda folder: (folder / 'config.json').write_text(text))

    def published_config(self, **values):
        return self.files(lambda folder: change_json(folder / 'config.json', **values))

    def renamed(self, name):
        return self.files(lambda folder: (folder / WEIGHTS).rename(folder / name))

    def index_text(self, text):
        def replace(folder):
            (folder / WEIGHTS).unlink()
            (folder / 'model.safetensors.index.json').write_text(text)

        return self.files(replace)

    def outside(self, place):
        """An index that names a file beside the folder or below it."""
        (self.path.parent / 'other.safetensors').touch()
        return self.index_text(json.dumps({'weight_map': {KERNEL: place}}))

    def dtype(self, dtype):
        return self.files(lambda folder: raw_tensor(folder / WEIGHTS, dtype))

    def weights(self, change):
        return self.files(lambda folder: change_tensors(folder / WEIGHTS, change))

    def number(self, dtype, number):
        shutil.rmtree(self.path, ignore_errors=True)
        copy_of(self.published, self.path)

        def spoil(tensors):
            tensors[KERNEL] = tensors[KERNEL].astype(dtype)
            tensors[KERNEL][-1, -1] = number

        change_tensors(self.path / WEIGHTS, spoil)
        return hf.load(self.path)

    def _save_adapter(self):
        shutil.rmtree(self.path, ignore_errors=True)
        config = AdapterConfig(3, 6.0, LINEARS, self.base)
        hf.save_adapter(self.path, self.model, config, self.factors)

    def adapter(self, **values):
        self._save_adapter()
        change_json(self.path / CONFIG_FILE, **values)
        return hf.load(self.path)

    def adapter_text(self, read, text):
        self._save_adapter()
        (self.path / CONFIG_FILE).write_text(text)
        return read(self.path)

    def adapter_file(self, change):
        self._save_adapter()
        change(self.path / WEIGHTS_FILE)
        return hf.load(self.path)

    def adapter_dtype(self, dtype):
        return self.adapter_file(lambda path: raw_tensor(path, dtype))

    def adapter_weights(self, change, **values):
        self._save_adapter()
        change_json(self.path / CONFIG_FILE, **values)
        path = self.path / WEIGHTS_FILE
        tensors = load_file(path)
        change(tensors, sorted(tensors)[0])
        save_file(tensors, path)
        return hf.load(self.path)

    def stacked(self):
        """An adapter whose base is an adapter."""
        self._save_adapter()
        first = shutil.move(self.path, self.path.with_name('first'))
        self._save_adapter()
        return self.adapter(base_model_name_or_path=str(first))

    def context(self, tokens, **values):
        """A context beyond the positions of the model, which a rotary scaling may extend."""
        shutil.rmtree(self.path, ignore_errors=True)
        copy_of(self.published, self.path)
        change_json(self.path / 'config.json', **values)
        return shape.check_context(self.path, tokens, 'sampler.context')


TABLE = pathlib.Path(__file__).with_name('wrong_folders.txt')


def test_broken_folders_are_refused_as_the_table_says(published, tmp_path):
    folders = Folders(published, tmp_path)
    calls = [name for name in vars(Folders) if not name.startswith('_')]
    names = {name: getattr(folders, name) for name in calls}
    names |= dict(ones=np.ones, nan=np.nan, inf=np.inf, check_name=check_name)
    names |= globals() | dict(open_codec=open_codec)
    check_table(TABLE, names, tmp_path)


def test_every_field_of_peft_is_refused_or_without_effect():
    """Fails where a version of PEFT adds a field: say here or in adapter_config.py what it means."""
    import peft

    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    refused = set(re.findall(r'adapter\((\w+)=', TABLE.read_text()))
    assert not fields - refused - adapter_config.WITHOUT_EFFECT
