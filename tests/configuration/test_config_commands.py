"""Every mistake in a command line is one line that names it, before anything heavy is loaded."""

import pytest
from config_checks import run
from python_process import run_python

from zeroplay_jax.configuration import fields
from zeroplay_jax.types import UserError

HEAVY = ('jax', 'jaxlib', 'tensorflow', 'transformers', 'tokenizers', 'flax', 'scann')
LIGHT = """
import sys
from zeroplay_jax.configuration import rules
from zeroplay_jax.configs import ablations, cross, drzero, dspo, piplay, quickstart, scope, ssp
from zeroplay_jax.selfplay import recipe
for name in recipe.BUILT_IN:
    recipe.recipe_class(name)
pages = [quickstart.get_config(), *(page.get_config('mini') for page in (cross, drzero, dspo, piplay, scope, ssp))]
for config in pages:
    config.policy.path = sys.argv[1]
    rules.check(config)
print(sorted(name for name in {heavy} if name in sys.modules))
""".replace('{heavy}', repr(HEAVY))


def test_recipes_and_checks_of_configs_load_nothing_heavy(checkpoint):
    result = run_python('-c', LIGHT, checkpoint)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == '[]'


@pytest.mark.parametrize(
    ('arguments', 'contains'),
    [
        ('--config.solvr.batch=1', 'did you mean solver.batch?'),
        ('--config.policy.path=FOLDER/none', 'no such folder'),
        ('--workdir=/proc/x', '--workdir=/proc/x: cannot be created'),
    ],
)
def test_a_wrong_command_ends_with_one_line_and_nothing_heavy_loaded(tmp_path, arguments, contains):
    """The lines of more commands are in tests/refusals.txt."""
    words = f'--workdir=FOLDER/run {arguments}'.replace('FOLDER', str(tmp_path)).split()
    result = run('--config=configs/quickstart.py', *words)
    trace, said = [], []
    for line in result.stderr.splitlines():
        (trace if line.startswith('import time:') else said).append(line)
    assert result.returncode == 2
    assert len(said) == 1 and contains in said[0]
    modules = {line.rpartition('|')[2].strip().partition('.')[0] for line in trace}
    # The trace is one of imports.
    assert 'ml_collections' in modules and not modules & {*HEAVY}
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('recipe', 'field', 'readers'),
    [
        ('ssp', 'scope.gates', 'scope'),
        ('piplay', 'ssp.noise', 'ssp'),
        ('dspo', 'pool.batch', 'drzero or piplay or scope'),
        ('ssp', 'solver.filter_groups', 'drzero or piplay or dspo or scope'),
        ('drzero', 'proposer.distill_top_k', ''),
        ('drzero', 'inputs.questions', 'dspo'),
    ],
)
def test_a_field_that_another_recipe_reads_is_refused_with_its_name(recipe, field, readers):
    with pytest.raises(UserError) as refusal:
        fields.check_name(field, fields.default_config(recipe))
    line = f'config.{field}: recipe {recipe} does not read it; take it away, or set recipe to {readers}'
    assert str(refusal.value) == line if readers else 'no such field' in str(refusal.value)
    assert ('ssp' in fields.config('ssp')) and not ({'drzero', 'pool'} & set(fields.config('ssp')))


def test_a_config_that_a_flag_gives_to_another_recipe_has_the_fields_of_that(capsys):
    config = fields.config('drzero', 'mini')
    config.recipe = 'ssp'
    fields.fit_to_recipe(config)
    assert fields.leaves(config).keys() == fields.leaves(fields.default_config('ssp')).keys()
    # Of the file's own fields those of its own recipe go; one that the user sets is not dropped in silence.
    config = fields.config('dspo', 'mini', {'recipe': 'ssp'})
    fields.check_values(config)
    assert 'filter_groups' not in config.solver and 'pool' not in config
    with pytest.raises(UserError, match='inputs.world_questions: recipe ssp does not read it'):
        fields.config('dspo', 'mini', {'recipe': 'ssp', 'inputs.world_questions': 300})
    config = fields.config('dspo', 'mini')
    config.inputs.world_questions = 7
    config.solver.batch = 99
    capsys.readouterr()
    fields.set_fields(config, ['--config.recipe=drzero'])
    assert 'drzero' in config and 'world_questions' not in config.inputs
    # What the file sets and the recipe does not read is named, once.
    line = 'recipe drzero does not read these fields that the config sets: inputs.world_questions'
    assert capsys.readouterr().err == f'warning: {line}\n'
