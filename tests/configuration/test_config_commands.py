"""Every mistake in a command line is one line that names it, before anything heavy is loaded."""

import subprocess
import sys

import pytest
from config_checks import ROOT, run

from zeroplay_jax.configuration import fields
from zeroplay_jax.types import UserError

HEAVY = ('jax', 'jaxlib', 'tensorflow', 'transformers', 'tokenizers', 'openai', 'flax', 'scann')
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
    result = subprocess.run(
        [sys.executable, '-c', LIGHT, str(checkpoint)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == '[]'


PAGE = '--config=configs/quickstart.py'


@pytest.mark.parametrize(
    ('arguments', 'contains'),
    [
        ([PAGE, '--config.solvr.lr=1'], 'did you mean config.solver.learning_rate?'),
        ([PAGE, '--config.seed=1.5'], 'config.seed=1.5: must be a whole number'),
        (
            [PAGE, '--config.ssp.noise=1'],
            'recipe drzero does not read it; take it away, or set recipe to ssp',
        ),
        (['--config=configs/dspo.py', '--config.proposer.batch=4'], 'recipe dspo does not read'),
        ([PAGE, '--workdir={tmp}/run', '--config.sampler.context=300'], '= 416'),
        ([PAGE, '--workdir={tmp}/run', '--config.policy.path={tmp}/none'], 'no such folder'),
        (['--config=configs/drzero.py:tiny', '--workdir={tmp}/run'], "no variant 'tiny'"),
        (['--config=configs/quick.py'], 'did you mean configs/quickstart.py?'),
        (['--config={tmp}/broken.py'], 'could not be loaded: SyntaxError'),
        (['--confg=configs/quickstart.py'], 'Did you mean: config'),
        ([PAGE], 'give --workdir=FOLDER'),
        ([PAGE, '--workdir={tmp}/broken.py/run'], 'there is a file in this place'),
        ([PAGE, '--workdir=/proc/x'], '--workdir=/proc/x: cannot be created'),
        ([], 'no config; give one of --config=configs/ablations.py'),
    ],
)
def test_a_wrong_command_ends_with_one_line_and_nothing_heavy_loaded(tmp_path, arguments, contains):
    (tmp_path / 'broken.py').write_text('def get_config(:\n')
    result = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    trace, said = [], []
    for line in result.stderr.splitlines():
        (trace if line.startswith('import time:') else said).append(line)
    assert result.returncode == 2
    assert len(said) == 1 and contains in said[0]
    modules = {line.rpartition('|')[2].strip().partition('.')[0] for line in trace}
    assert 'ml_collections' in modules  # the trace is one of imports
    assert not modules & {'jax', 'tensorflow', 'transformers', 'flax', 'scann', 'clu'}
    assert not (tmp_path / 'run').exists()


def test_help_shows_a_command():
    result = run('--help')
    assert 'python -m zeroplay_jax.main --config=configs/quickstart.py --workdir=' in result.stdout
    assert '--workdir' in result.stdout


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


def test_a_config_that_a_flag_gives_to_another_recipe_has_the_fields_of_that():
    config = fields.config('drzero', 'mini')
    config.recipe = 'ssp'
    fields.fit_to_recipe(config)
    assert (
        dict(fields.leaves(config)).keys()
        == dict(fields.leaves(fields.default_config('ssp'))).keys()
    )
    config = fields.config('dspo', 'mini', {'recipe': 'ssp', 'inputs.world_questions': 300})
    fields.fit_to_recipe(config)
    # A value that was set is not dropped in silence.
    assert config.solver.filter_groups and 'surplus' not in config.solver
    with pytest.raises(UserError, match='solver.filter_groups: recipe ssp does not read it'):
        fields.check_values(config)
