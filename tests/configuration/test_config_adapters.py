"""Settings of adapters that cannot work are refused in one line, before anything is loaded."""

import shutil

import pytest
from config_checks import message, write_adapter

from zeroplay_jax.configs import drzero
from zeroplay_jax.configuration import rules
from zeroplay_jax.run import build
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT, ConfigError


@pytest.fixture
def config():
    config = drzero.get_config('mini')
    config.policy.adapters.rank = 4
    return config


def test_an_adapter_belongs_to_one_base(config, tmp_path, capsys):
    config.solver.adapter = write_adapter(tmp_path)
    config.policy.path = str(shutil.copytree(BUILT_IN_CHECKPOINT, tmp_path / 'copy'))
    rules.check(config)
    weights = tmp_path / 'copy' / 'model.safetensors'
    content = weights.read_bytes()
    half = len(content) // 2
    weights.write_bytes(content[:half] + bytes(len(content) - half))
    text = message(config)
    assert text.startswith('config.solver.adapter=') and str(BUILT_IN_CHECKPOINT) in text
    assert 'set policy.path to that folder' in text and not capsys.readouterr().err
    write_adapter(tmp_path, base_model_name_or_path='/gone/base')
    rules.check(config)
    assert 'was trained over /gone/base, which is not here' in capsys.readouterr().err


def test_an_adapter_is_a_policy_but_no_base(config, tmp_path):
    """An evaluation takes the config of the run; a new run needs a base."""
    config.policy.path = write_adapter(tmp_path)
    rules.check(config)
    with pytest.raises(ConfigError, match='name the folder of its base'):
        build.build(config, for_training=True)
