"""What only a recipe knows of its settings, whether it is built in or from another package."""

import importlib
import sys

import pytest
from config_checks import message, run
from ml_collections import ConfigDict

from zeroplay_jax.configs import (
    ablations,
    common,
    drzero,
    dspo,
    piplay,
    scope,
    ssp,
)
from zeroplay_jax.configuration import rules
from zeroplay_jax.selfplay import recipe as recipes
from zeroplay_jax.settings import schema
from zeroplay_jax.settings.kinds import ConfigError


@pytest.mark.parametrize(
    ('page', 'change', 'begins', 'contains'),
    [
        (drzero, {'pool.window': (0.2, 0.8)}, 'pool.window=', 'give pool.measure'),
        (drzero, {'proposer.batch': 8}, 'proposer.batch=8', 'give 16 or more'),
        (piplay, {'proposer.batch': 8}, 'proposer.batch=8', 'give 16 or more'),
        (ssp, {'ssp.fill': 'more'}, 'ssp.fill=more', 'pad, resample, replay_full, replay_reset'),
        (ssp, {'ssp.invalid_reward': float('inf')}, 'ssp.invalid_reward=inf', 'a finite number'),
        (ssp, {'ssp.checker': 'judge'}, 'ssp.checker=judge', 'set judge.kind to endpoint'),
        (ssp, {'ssp.noise': -1}, 'ssp.noise=-1', 'give 0 or more'),
        (scope, {'proposer.prompt_tokens': 97}, 'proposer.prompt_tokens=97', 'prompt_tokens=96'),
        (scope, {'pool.target': 65}, 'pool.target=65', 'raise pool.batches'),
        (scope, {'scope.soft_length': 4096}, 'scope.soft_length=4096', 'give less'),
        (scope, {'scope.searches_below_hops': 2}, 'scope.searches_below_hops=2', 'give 0 or 1'),
    ],
)
def test_the_checks_of_a_recipe(checkpoint, page, change, begins, contains):
    config = page.get_config('mini')
    config.policy.path = str(checkpoint)
    rules.check(config)
    config.update_from_flattened_dict(change)
    text = message(config)
    assert text.startswith(f'config.{begins}') and contains in text


def test_a_check_that_is_off_needs_no_judge_that_answers(checkpoint):
    config = ssp.get_config('mini')
    config.policy.path = str(checkpoint)
    config.ssp.update(checker='judge', answerability_check=False)
    rules.check(config)


@pytest.mark.parametrize(('page', 'field'), [(ssp, 'inputs.answers'), (dspo, 'inputs.questions')])
def test_a_recipe_that_is_given_data_needs_some_with_a_corpus_of_ones_own(
    checkpoint, tmp_path, page, field
):
    (tmp_path / 'manifest.json').write_text('{}')
    config = page.get_config('mini')
    config.policy.path = str(checkpoint)
    config.retrieval.update(kind='folder', path=str(tmp_path))
    config.judge.update(kind='policy', tokens=64)
    questions = tmp_path / 'questions.jsonl'
    questions.write_text('{"question": "who?", "answers": ["one"]}\n')
    config.eval.file = str(questions)
    assert message(config).startswith(f"config.{field}=''")
    config.update_from_flattened_dict({field: str(questions)})
    rules.check(config)


RECIPE = """
from typing import Annotated, Literal

from pydantic import Field

from zeroplay_jax.selfplay.recipe import Recipe as Base
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.settings.kinds import PositiveInt, Section
from zeroplay_jax.settings.kinds import fail


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
            fail('rzero.votes', config.rzero.votes, 'more than there are answers', 'give less')
"""
RECIPE_CONFIG = """
from zeroplay_jax.configs import common


def get_config():
    config = common.get_config('their_package.rzero')
    config.rzero.votes = 4
    config.challenger.update(baseline='none', scale='none')
    config.answerer.samples = 5
    return config
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    package = tmp_path / 'their_package'
    package.mkdir()
    (package / '__init__.py').touch()
    (package / 'rzero.py').write_text(RECIPE)
    (package / 'empty.py').write_text('from zeroplay_jax.selfplay.recipe import Recipe\n')
    (package / 'broken.py').write_text('import a_package_that_is_not_there\n')
    (tmp_path / 'rzero_config.py').write_text(RECIPE_CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition('.')[0] == 'their_package']:
        del sys.modules[name]


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
        ({'rzero.votes': 0}, 'config.rzero.votes=0: not possible; give 1 or more'),
        ({'rzero.uncertainty': -1.0}, 'config.rzero.uncertainty=-1.0: not possible; give 0'),
        ({'rzero.kind': 'max'}, 'config.rzero.kind=max: not possible; give one of majority, mean'),
        ({'answerer.learning_rate': 0.0}, 'config.answerer.learning_rate=0.0: not possible'),
        ({'answerer.filter_groups': True}, 'config.answerer.filter_groups: '),
    ):
        wrong = ConfigDict(config.to_dict())
        wrong.update_from_flattened_dict(change)
        assert message(wrong).startswith(line)
    with config.unlocked():
        config.rzero.vots = 3
    assert 'did you mean config.rzero.votes?' in message(config)


@pytest.mark.parametrize(
    ('name', 'contains'),
    [
        ('their_package.gone', 'no such recipe; give one of drzero, piplay, ssp, dspo, scope, or'),
        ('their_package.empty', 'has no class Recipe of its own'),
        ('their_package.broken', 'it imports a_package_that_is_not_there, which is not installed'),
        ('drzreo', 'no such recipe'),
    ],
)
def test_a_recipe_that_cannot_be_used_is_one_line(elsewhere, name, contains):
    with pytest.raises(ConfigError) as caught:
        recipes.recipe_class(name)
    assert str(caught.value).startswith(f'config.recipe={name}: ') and contains in str(caught.value)
    assert '\n' not in str(caught.value)


@pytest.mark.long
def test_flags_reach_the_section_of_a_recipe_from_elsewhere(elsewhere, checkpoint):
    arguments = [f'--config={elsewhere}/rzero_config.py', f'--config.policy.path={checkpoint}']
    for flag, contains in (
        ('--config.rzero.votes=6', 'config.rzero.votes=6: more than there are answers'),
        ('--config.rzero.vots=4', 'did you mean config.rzero.votes?'),
        ('--config.rzero.votes=many', 'config.rzero.votes=many'),
        ('--config.answerer.steps=-1', 'config.answerer.steps=-1: not possible; give 0 or more'),
    ):
        result = run(*arguments, f'--workdir={elsewhere}/run', flag, path=elsewhere)
        said = [line for line in result.stderr.splitlines() if not line.startswith('import time:')]
        assert result.returncode == 2 and len(said) == 1 and contains in said[0], said
    # Everything is in order but the folder of the run: the flags themselves were accepted.
    result = run(*arguments, '--config.rzero.votes=5', path=elsewhere)
    assert 'give --workdir=FOLDER' in result.stderr


def test_the_flag_of_a_recipe_from_elsewhere_brings_its_sections(elsewhere, checkpoint):
    """Over a config file of another recipe, wherever the flag stands."""
    recipe = ['--config.recipe=their_package.rzero', f'--config.policy.path={checkpoint}']
    recipe += ['--config.challenger.baseline=none', '--config.challenger.scale=none']
    page = ['--config=configs/drzero.py:mini', '--config.answerer.samples=5']
    for flag, contains in (
        ('--config.rzero.votes=6', 'config.rzero.votes=6: more than there are answers'),
        ('--config.rzero.vots=4', 'did you mean config.rzero.votes?'),
        ('--config.rzero.votes=many', 'config.rzero.votes=many: must be a whole number'),
        ('--config.answerer.steps=-1', 'config.answerer.steps=-1: not possible; give 0 or more'),
        ('--config.recipe=their_package.gone', 'config.recipe=their_package.gone: no such recipe'),
    ):
        result = run(*page, *recipe, flag, f'--workdir={elsewhere}/run', path=elsewhere)
        said = [line for line in result.stderr.splitlines() if not line.startswith('import time:')]
        assert result.returncode == 2 and len(said) == 1 and contains in said[0], said
    result = run(*page, '--config.rzero.votes=5', *recipe, path=elsewhere)
    assert 'give --workdir=FOLDER' in result.stderr


def test_the_judges_sizes_differ_in_the_judge_alone_and_small_runs_keep_their_policy():
    reference = ablations.get_config('scope/qwen3_8b')
    for row in ('grader_4b', 'grader_32b', 'rubric_writer_4b', 'rubric_writer_32b'):
        config = ablations.get_config(f'scope/{row}')
        part, size = row.rsplit('_', 1)
        name = {'grader': 'grade_model', 'rubric_writer': 'rubric_model'}[part]
        assert config.judge[name] == f'Qwen3-{size.upper()}' and config.judge.model == 'Qwen3-8B'
        config.judge = reference.judge
        assert config.to_json_best_effort() == reference.to_json_best_effort()
        small = ablations.get_config(f'scope/{row}:mini')
        usual = scope.get_config('mini')
        small.judge = usual.judge
        assert small.to_json_best_effort() == usual.to_json_best_effort()
    assert reference.policy.path == 'checkpoints/Qwen3-8B' and reference.judge.kind == 'policy'


@pytest.mark.parametrize('row', ablations.ROWS)
def test_the_small_run_of_a_row_is_as_short_and_knows_its_policys_syntax(row):
    small = ablations.get_config(f'{row}:mini')
    usual = importlib.import_module(f'zeroplay_jax.configs.{row.split("/")[0]}').get_config('mini')
    assert small.policy.path == usual.policy.path and small.tools.syntax == usual.tools.syntax
    for role in recipes.trained_roles(usual):
        assert (small[role].steps, small[role].batch) == (usual[role].steps, usual[role].batch)


@pytest.mark.parametrize(
    'name,problem',
    [
        (
            'drzero/rzero',
            "no ablation 'drzero/rzero'; did you mean drzero/r_zero?; there are drzero/",
        ),
        ('nothing/rzero', "no ablation 'nothing/rzero'; there are ssp/solver_only, "),
    ],
)
def test_an_unknown_row_is_named_with_its_neighbours(name, problem):
    with pytest.raises(ValueError) as error:
        ablations.get_config(name)
    assert str(error.value).startswith(problem)
