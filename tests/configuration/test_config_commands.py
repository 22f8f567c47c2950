"""Every mistake in a command line is one line that names it, before anything heavy is loaded."""

import pytest
from config_checks import run

from zeroplay_jax.configuration import fields

HEAVY = ('jax', 'jaxlib', 'tensorflow', 'transformers', 'tokenizers', 'flax', 'scann')


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


def test_a_config_that_a_flag_gives_to_another_recipe_has_the_fields_of_that(capsys):
    config = fields.config('drzero', 'mini')
    config.recipe = 'ssp'
    fields.fit_to_recipe(config)
    assert fields.leaves(config).keys() == fields.leaves(fields.default_config('ssp')).keys()
    config = fields.config('dspo', 'mini')
    config.inputs.world_questions = 7
    config.solver.batch = 99
    fields.set_fields(config, ['--config.recipe=drzero'])
    assert 'drzero' in config and 'world_questions' not in config.inputs
    # What the file sets and the recipe does not read is named, once.
    line = 'recipe drzero does not read these fields that the config sets: inputs.world_questions'
    assert capsys.readouterr().err == f'warning: {line}\n'
