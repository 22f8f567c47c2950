"""What tests of configs share: the line of a refused config, and the command in a process of its own."""

import os
import pathlib
import subprocess
import sys

import pytest

from zeroplay_jax.configuration import rules
from zeroplay_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
FILES = ('config.json', 'tokenizer.json', 'model.safetensors')


def message(config):
    with pytest.raises(UserError) as caught:
        rules.check(config)
    text = str(caught.value)
    assert '\n' not in text
    return text


def run(*arguments, path=''):
    command = [sys.executable, '-X', 'importtime', '-m', 'zeroplay_jax.main', *arguments]
    environment = {**os.environ, 'PYTHONPATH': f'{ROOT}:{path}'}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
