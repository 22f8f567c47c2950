"""Roles that depend on the config, and role names that would collide with something else."""

import textwrap

import pytest
from config_checks import ROOT

from zeroplay_jax.configs import common, drzero
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.settings.kinds import ConfigError

RECIPE = """
    from zeroplay_jax.selfplay.recipe import RoleSpec
    from zeroplay_jax.recipes import dspo
    from zeroplay_jax.settings.kinds import PositiveInt, Section

    class Settings(Section):
        '''Settings of the test.'''
        critics: PositiveInt = 1
        '''How many.'''

    class Recipe(dspo.Recipe):
        settings = {'many': Settings}

        @classmethod
        def roles(cls, config):
            names = [NAMES for i in range(config.many.critics)]
            return (*super().roles(config), *(RoleSpec(name, 'solver') for name in names))
"""


def write_recipe(folder, module, names):
    (folder / f'{module}.py').write_text(textwrap.dedent(RECIPE).replace('NAMES', names))
    return module


@pytest.mark.parametrize('count', [1, 3])
def test_the_number_of_roles_is_a_setting(tmp_path, monkeypatch, count):
    monkeypatch.syspath_prepend(tmp_path)
    config = fields.default_config(write_recipe(tmp_path, f'many{count}', "f'critic{i}'"))
    config.many.critics = count
    fields.fit_to_recipe(config)
    for role in ('solver', *(f'critic{number}' for number in range(count))):
        config[role].samples = 2
    rules.check(config)
    config[f'critic{count - 1}'].learning_rate = -1.0
    with pytest.raises(ConfigError, match=rf'config.critic{count - 1}.learning_rate=-1.0'):
        rules.check(config)


@pytest.mark.parametrize('name', 'pool judge initial many _hidden copy'.split())
def test_a_role_cannot_be_called_like_something_else(tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(tmp_path)
    module = write_recipe(tmp_path, f'role_called_{name}', f"'{name}'")
    with pytest.raises(ConfigError, match=f"a role cannot be called '{name}'"):
        fields.default_config(module)


def test_an_added_role_has_the_batch_of_the_evaluated_one(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'tests/outside_package')
    config = drzero.get_config('mini')
    config.recipe = 'zp_outside.critic'
    common.add_sections(config)
    config.lock()
    config.solver.batch = 4
    assert config.critic.batch == config.to_dict()['critic']['batch'] == 4
