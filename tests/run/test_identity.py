"""Config, inputs, checkpoints, logs and exports of a run belong together, and what is of another run is refused."""

import shutil

import jax.numpy as jnp
import pytest
from refused_calls import refused
from run_records import begin_run

from zeroplay_jax.configs import drzero
from zeroplay_jax.configuration import fields
from zeroplay_jax.evaluation import report_builder
from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.run import branch, run_folder
from zeroplay_jax.runtime import record
from zeroplay_jax.runtime.log import MetricsWriter
from zeroplay_jax.types import UserError

INPUTS = {'policy.path': {'model.safetensors': {'bytes': 1, 'sha256': 'a'}}}
OTHER_INPUTS = {'policy.path': {'model.safetensors': {'bytes': 1, 'sha256': 'b'}}}


def config_of(**changes):
    config = drzero.get_config()
    config.recipe = changes.get('recipe', config.recipe)
    config.update_from_flattened_dict(changes)
    return config


def begin(workdir, config, inputs=INPUTS):
    """What a run of a config leaves in its workdir."""
    run_identity = begin_run(workdir, config, inputs, is_resumed=False)
    checkpoints = Checkpointer(workdir, keep=1)
    state = {'identity': run_identity, 'evaluations': {}, 'cursor': 4}
    checkpoints.save(4, {'solver': {'params': {'w': jnp.ones(3)}}}, state)
    checkpoints.close()
    writer = MetricsWriter(workdir, 0, (), run=record.hash_of(run_identity))
    writer.write_scalars(0, 1, 'solver', {'loss': 1.0})
    writer.write('trajectories', [{'step': 0, 'phase': 'solver', 'role': 'solver', 'segments': []}])
    writer.close()
    return workdir


def exchange(one, other, name):
    """Puts a file or folder of the run `other` in place of that of the run `one`."""
    path = one / name
    if path.is_dir():
        shutil.rmtree(path)
        shutil.copytree(other / name, path)
    else:
        shutil.copyfile(other / name, path)


@pytest.fixture
def run(tmp_path):
    return begin(tmp_path / 'run', config_of())


@pytest.fixture
def other(tmp_path):
    return begin(tmp_path / 'other', config_of(seed=5))


@pytest.mark.parametrize(
    ('changes', 'inputs', 'difference'),
    [
        ({'seed': 5}, INPUTS, 'seed=5, not 0'),
        ({'policy.adapters.rank': 8}, INPUTS, 'policy.adapters.rank=8, not 0'),
        ({'solver.baseline': 'value'}, INPUTS, 'solver.baseline=value, not mean'),
        ({'recipe': 'dspo'}, INPUTS, 'recipe=dspo, not drzero'),
        ({}, OTHER_INPUTS, 'another content of policy.path'),
    ],
)
def test_a_checkpoint_of_another_run_is_not_resumed(run, tmp_path, changes, inputs, difference):
    other = begin(tmp_path / 'other', config_of(**changes), inputs)
    run_folder.check_checkpoints(run)
    assert branch.newest_checkpoint(run).step == 4
    exchange(run, other, 'checkpoints')
    assert difference in refused(run_folder.check_checkpoints, run)
    for folder in (run, shutil.copytree(run / 'checkpoints', run / 'best')):
        assert '4: is of another run' in refused(branch.newest_checkpoint, folder)


LOGS = ('metrics.jsonl', 'trajectories.jsonl')


@pytest.mark.parametrize('name', (*LOGS, 'run.json'))
def test_a_report_of_files_of_two_runs_is_refused(run, other, name):
    assert report_builder.read_run(run)['metrics'][0]['loss'] == 1.0
    exchange(run, other, name)
    assert 'is of another run' in refused(report_builder.read_run, run)


@pytest.mark.parametrize('name', LOGS)
def test_a_log_of_another_run_is_not_continued(run, other, name):
    exchange(run, other, name)
    before = (run / name).read_bytes()
    own = record.hash_of(begin_run(run, config_of(), INPUTS))
    with pytest.raises(UserError, match=f'{name}: is of another run'):
        MetricsWriter(run, 4, (), run=own)
    assert (run / name).read_bytes() == before


def test_fields_that_may_change_and_the_place_do_not_change_the_identity(run, tmp_path):
    run_identity = begin_run(run, config_of(), INPUTS)
    changed = config_of()
    defaults = fields.leaves(changed)
    for name in fields.changeable_fields(changed):
        if type(defaults[name]) in (int, float):
            changed.update_from_flattened_dict({name: defaults[name] + 1})
    # The same content at another place.
    changed.policy.path = 'elsewhere'
    moved = shutil.move(run, tmp_path / 'moved')
    run_folder.check_checkpoints(moved)
    assert begin_run(moved, changed, INPUTS) == run_identity
