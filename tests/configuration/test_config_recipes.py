"""What only a recipe knows of its settings, whether it is built in or from another package."""

import importlib
import sys

import pytest
from config_checks import message
from ml_collections import ConfigDict
from refused_calls import refused

from zeroplay_jax.configs import (
    common,
    drzero,
)
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.selfplay import recipe as recipes
from zeroplay_jax.settings import schema

RECIPE = """
from typing import Annotated, Literal

from pydantic import Field

from zeroplay_jax.selfplay.recipe import Recipe as Base
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.settings.kinds import PositiveInt, Problem, Section


class Settings(Section):
    uncertainty: Annotated[float, Field(ge=0)] = 0.5
    votes: PositiveInt = 3
    kind: Literal['majority', 'mean'] = 'majority'


class Recipe(Base):
    settings = {'rzero': Settings}
    prompts = {'challenger': 'Challenge: {document}'}
    evaluated_role = 'answerer'

    @classmethod
    def roles(cls, config):
        return RoleSpec('challenger', 'challenger'), RoleSpec('answerer', 'solver')

    @classmethod
    def check(cls, config):
        if config.rzero.votes > config.answerer.samples:
            yield Problem('rzero.votes', 'more than there are answers; give less')
"""


@pytest.fixture(scope='module')
def elsewhere(tmp_path_factory):
    package = tmp_path_factory.mktemp('elsewhere') / 'their_package'
    package.mkdir()
    (package / 'rzero.py').write_text(RECIPE)
    (package / 'empty.py').write_text('from zeroplay_jax.selfplay.recipe import Recipe\n')
    (package / 'broken.py').write_text('import a_package_that_is_not_there\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(package.parent)
        yield


def test_a_recipe_from_elsewhere_has_a_section_roles_and_checks_of_its_own(elsewhere, checkpoint):
    config = common.get_config('their_package.rzero')
    assert config.rzero.to_dict() == {'uncertainty': 0.5, 'votes': 3, 'kind': 'majority'}
    assert recipes.trained_roles(config) == ('challenger', 'answerer')
    unread = {*schema.FILTER_FIELDS, *schema.DISTILL_FIELDS}
    assert set(config.challenger) == set(schema.TrainedRole.model_fields) - unread
    config.policy.path = str(checkpoint)
    config.challenger.update(baseline='none', scale='none')
    config.answerer.samples = 5
    config = config.lock()
    rules.check(config)
    for change, line in (
        ({'rzero.votes': 6}, 'config.rzero.votes=6: more than there are answers; give less'),
        (
            {'answerer.filter_groups': True},
            'config.answerer.filter_groups=True: recipe their_package.rzero does',
        ),
    ):
        wrong = ConfigDict(config.to_dict())
        wrong.update_from_flattened_dict(change)
        assert message(wrong).startswith(line)
    with config.unlocked():
        config.rzero.vots = 3
    assert 'did you mean rzero.votes?' in message(config)


@pytest.mark.parametrize(
    ('name', 'contains'),
    [
        ('their_package.gone', 'no such recipe; give one of drzero, piplay, ssp, dspo, scope, or'),
        ('their_package.empty', 'has no class Recipe of its own'),
        ('their_package.broken', 'it imports a_package_that_is_not_there, which is not installed'),
    ],
)
def test_a_recipe_that_cannot_be_used_is_one_line(elsewhere, name, contains):
    line = refused(recipes.recipe_class, name)
    assert line.startswith(f'config.recipe={name}: ') and contains in line


DERIVED = """
from zeroplay_jax.recipes import drzero
from zeroplay_jax.selfplay.recipe import Recipe as Base
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.schedule import Phase


class Recipe({base}):
    {declarations}
"""


@pytest.fixture
def derived(tmp_path, monkeypatch):
    """A function: the small config of Dr. Zero for a recipe with such a base and such declarations."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(declarations, base='drzero.Recipe'):
        (tmp_path / 'derived.py').write_text(DERIVED.format(base=base, declarations=declarations))
        monkeypatch.delitem(sys.modules, 'derived', raising=False)
        importlib.invalidate_caches()
        config = drzero.get_config('mini')
        config.recipe = 'derived'
        config.pool.batch = 8
        return config

    yield make
    sys.modules.pop('derived', None)


GAME = "    def phases(self): return [Phase('game', 2, ('proposer', 'solver'))]"
FREE = '    check = classmethod(lambda cls, config: None)'


def test_inherited_methods_read_the_sections_that_their_class_declares(derived):
    config = derived(f'has_pool = False\n{FREE}\n{GAME}')
    rules.check(config)
    assert config.pool.batch == fields.frozen(config).pool.batch == 8
    stored = fields.frozen(config).to_dict()
    assert stored['pool']['batch'] == 8


@pytest.mark.parametrize(
    ('section', 'declarations', 'base'),
    [
        ('drzero', 'settings = {}', 'drzero.Recipe'),
        ('proposer', "roles = lambda config: [RoleSpec('solver', 'solver')]", 'drzero.Recipe'),
        (
            'pool',
            """has_pool = False
    roles = lambda config: [RoleSpec('solver', 'solver')]
    check = lambda config: config.pool.batch""",
            'Base',
        ),
    ],
)
def test_a_section_that_is_not_declared_is_one_line(derived, section, declarations, base):
    line = refused(rules.check, derived(declarations, base))
    assert line.startswith(f'config.{section}: code of recipe derived reads it')
