"""Broken folders of policies and adapters are refused in one line, and named, before their numbers are read."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from refused_calls import check_table
from safetensors.numpy import load_file, save_file
from small_policies import KERNEL, adapter_of, change_json, config_of, copy_of, split

from zeroplay_jax.policy import hf
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig

LINEARS = ('down', 'q', 'v')


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

    def index_text(self, text):
        def replace(folder):
            (folder / 'model.safetensors').unlink()
            (folder / 'model.safetensors.index.json').write_text(text)

        return self.files(replace)

    def weights(self, change):
        def rewrite(folder):
            tensors = load_file(folder / 'model.safetensors')
            change(tensors)
            save_file(tensors, folder / 'model.safetensors')

        return self.files(rewrite)

    def _save_adapter(self):
        shutil.rmtree(self.path, ignore_errors=True)
        config = AdapterConfig(3, 6.0, LINEARS, self.base)
        hf.save_adapter(self.path, self.model, config, self.factors)

    def adapter(self, **values):
        self._save_adapter()
        change_json(self.path / CONFIG_FILE, **values)
        return hf.load(self.path)

    def adapter_file(self, change):
        self._save_adapter()
        change(self.path / WEIGHTS_FILE)
        return hf.load(self.path)

    def adapter_weights(self, change):
        def rewrite(path):
            tensors = load_file(path)
            change(tensors, sorted(tensors)[0])
            save_file(tensors, path)

        return self.adapter_file(rewrite)


def test_broken_folders_are_refused_as_the_table_says(published, tmp_path):
    folders = Folders(published, tmp_path)
    calls = ('files', 'config', 'config_text', 'index_text', 'weights')
    calls += ('adapter', 'adapter_file', 'adapter_weights')
    names = {name: getattr(folders, name) for name in calls}
    names = globals() | names | dict(ones=np.ones, nan=np.nan)
    check_table(pathlib.Path(__file__).with_name('wrong_folders.txt'), names, tmp_path)
