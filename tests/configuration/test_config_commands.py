"""Every mistake in a command line is one line that names it, before anything heavy is loaded."""

import subprocess
import sys

import pytest
from config_checks import ROOT, run
from ml_collections import ConfigDict

from zeroplay_jax.configs import piplay, ssp
from zeroplay_jax.configuration import command_line
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
            'does not read this section; take it away, or set recipe to ssp',
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


def flags_are_accepted(config, *arguments):
    try:
        command_line.check_sections(['main', *arguments], config)
    except UserError as error:
        return str(error)
    return True


def test_flags_of_the_recipes_own_sections_are_accepted():
    own = ['--config.ssp.noise=1', '--config.proposer.batch=4', '--noconfig.ssp.code_gate']
    assert flags_are_accepted(ssp.get_config(), *own, '--config.seed=1', '--workdir=x') is True
    # π-Play is Dr. Zero with distillation, and has its section.
    assert flags_are_accepted(piplay.get_config(), '--config.drzero.group=prompt') is True
    # Without a config, or with one that lacks its recipe, the other checks have the better line.
    assert flags_are_accepted(None, *own) is True
    assert flags_are_accepted(ConfigDict({'seed': 1}), *own) is True
    # A recipe of another package may read the sections of any other.
    config = ssp.get_config()
    config.recipe = 'their_package.recipe'
    assert flags_are_accepted(config, '--config.drzero.group=prompt') is True


def test_a_flag_of_another_recipes_section_is_refused_with_its_value():
    refusal = flags_are_accepted(ssp.get_config(), '--noconfig.scope.gates')
    assert refusal.startswith('config.scope.gates=True: recipe ssp does not read this section')
    config = ssp.get_config()
    config.recipe = 'piplay'
    assert 'set recipe to ssp' in flags_are_accepted(config, '--config.ssp.noise', '1')
