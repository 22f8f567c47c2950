"""Settings of adapters that cannot work are refused in one line, before anything is loaded."""

import json
import pathlib
import shutil

import pytest
from config_checks import message

from zeroplay_jax.configs import ablations, drzero, ssp
from zeroplay_jax.configuration import rules
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, AdapterConfig
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT, ConfigError
from zeroplay_jax.training import build

LINEARS = ('down', 'gate', 'k', 'o', 'q', 'up', 'v')


@pytest.fixture
def adapter(tmp_path):
    stored = AdapterConfig(rank=4, alpha=32.0, linears=LINEARS, base=BUILT_IN_CHECKPOINT)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(stored.fields()))
    return str(tmp_path)


def make_config(rank=4, **fields):
    config = drzero.get_config('mini')
    config.policy.path = ''
    config.policy.adapters.update(rank=rank, **fields)
    return config


def test_an_adapter_to_start_from_needs_its_rank_alpha_and_layers(adapter):
    config = make_config()
    config.solver.adapter = adapter
    rules.check(config)
    for field, value in (('rank', 8), ('alpha', 16.0), ('linears', ('q',))):
        other = make_config(**{'rank': 4, field: value})
        other.solver.adapter = adapter
        text = message(other)
        assert text.startswith(f'config.policy.adapters.{field}=') and adapter in text
    config.policy.adapters.rank = 0
    assert 'config.solver.adapter=' in message(config) and 'set policy.adapters.rank' in message(
        config
    )


def test_an_adapter_belongs_to_one_base(adapter, tmp_path, capsys):
    config = make_config()
    config.solver.adapter = adapter
    config.policy.path = str(shutil.copytree(BUILT_IN_CHECKPOINT, tmp_path / 'copy'))
    rules.check(config)
    weights = tmp_path / 'copy' / 'model.safetensors'
    content = weights.read_bytes()
    half = len(content) // 2
    weights.write_bytes(content[:half] + bytes(len(content) - half))
    text = message(config)
    assert text.startswith('config.solver.adapter=') and str(BUILT_IN_CHECKPOINT) in text
    assert 'set policy.path to that folder' in text and not capsys.readouterr().err
    path = pathlib.Path(adapter) / CONFIG_FILE
    stored = json.loads(path.read_text()) | {'base_model_name_or_path': '/gone/base'}
    path.write_text(json.dumps(stored))
    rules.check(config)
    warning = capsys.readouterr().err
    assert 'was trained over /gone/base, which is not here' in warning


@pytest.mark.parametrize('row', ablations.ROWS)
def test_every_row_of_the_papers_tables_takes_adapters(row):
    config = ablations.get_config(f'{row}:mini')
    # Files of the user are not there.
    config.inputs.update(documents='', tasks='')
    config.policy.adapters.rank = 4
    if row == 'dspo/search_r1_ppo':
        # Its value network has whole weights.
        assert 'a value network has whole weights' in message(config)
        return
    rules.check(config)


@pytest.mark.parametrize(
    'field,value',
    [('alpha', 64.0), ('linears', ('q',)), ('weight_decay', 0.5)],
)
def test_settings_of_adapters_need_a_rank(field, value):
    text = message(make_config(rank=0, **{field: value}))
    assert text.startswith(f'config.policy.adapters.{field}=') and 'has neither adapters' in text
    rules.check(make_config(rank=4, **{field: value}))


def test_an_adapter_of_the_embedding_is_refused(adapter):
    path = pathlib.Path(adapter) / CONFIG_FILE
    stored = json.loads(path.read_text()) | {'target_modules': ['q_proj', 'embed_tokens']}
    path.write_text(json.dumps(stored))
    config = make_config(linears=('q',))
    config.solver.adapter = adapter
    text = message(config)
    assert text.startswith('config.solver.adapter=') and 'it adapts embed_tokens' in text


def test_a_folder_without_an_adapter_is_named(tmp_path):
    config = make_config()
    config.proposer.adapter = str(tmp_path)
    assert message(config).startswith(f'config.proposer.adapter: {tmp_path}: no adapter')


def test_an_adapter_is_a_policy_but_no_base(adapter):
    config = make_config(rank=0)
    config.policy.path = adapter
    rules.check(config)
    # An evaluation takes the config of the run; a new run needs a base.
    config.policy.adapters.rank = 4
    rules.check(config)
    with pytest.raises(ConfigError, match='name the folder of its base'):
        build.build(config, for_training=True)
    path = f'{adapter}/{CONFIG_FILE}'
    fields = json.loads(open(path).read()) | {'base_model_name_or_path': '/nowhere'}
    open(path, 'w').write(json.dumps(fields))
    config.policy.adapters.rank = 0
    assert message(config).startswith('config.policy.path:') and '/nowhere' in message(config)


def test_roles_of_the_same_weights_start_from_the_same_adapter(adapter):
    config = ssp.get_config('mini')
    config.policy.adapters.rank = 4
    config.solver.adapter = adapter
    assert 'give all of them the same folder' in message(config)
    config.proposer.adapter = adapter
    rules.check(config)


@pytest.mark.parametrize(
    'field,value,text',
    [
        ('rank', -1, 'give 0 or more'),
        ('alpha', 0.0, 'give more than 0'),
        ('linears', ('q', 'embedding'), 'give some of q, k, v'),
        ('quantize', 'int4', 'give one of none, int8'),
    ],
)
def test_values_out_of_bounds_are_refused(field, value, text):
    assert text in message(make_config(**{'rank': 4, field: value}))


def test_merged_exports_and_quantised_bases_need_adapters():
    assert 'policy.adapters.merge' in message(make_config(rank=0, merge=True))
    text = message(make_config(rank=0, quantize='int8'))
    assert 'policy.adapters.quantize' in text and 'nor a frozen base' in text
    rules.check(make_config(quantize='int8'))
