"""Config, inputs, checkpoints, logs and exports of a run belong together, and what is of another run is refused."""

import shutil

import jax.numpy as jnp
import pytest

from zeroplay_jax.configs import drzero
from zeroplay_jax.configuration import fields
from zeroplay_jax.evaluation import report_builder
from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.run import branch, policy_settings, run_folder
from zeroplay_jax.run.run_folder import Place
from zeroplay_jax.runtime import record
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.log import MetricsWriter
from zeroplay_jax.types import UserError

ROLLOUT = {'phase': 'solver', 'role': 'solver', 'segments': []}
INPUTS = {'policy.path': {'model.safetensors': {'bytes': 1, 'sha256': 'a'}}}


def config_of(**changes):
    config = drzero.get_config()
    config.recipe = changes.get('recipe', config.recipe)
    config.update_from_flattened_dict(changes)
    return config


def begin_record(workdir, config, inputs, is_resumed):
    start = dict(index='', template={}, roles={}, weights={}, policies={}, is_resumed=is_resumed)
    return run_folder.begin(workdir, config, inputs, **start)


def begin(workdir, config, inputs=INPUTS):
    """What a run of a config leaves in its workdir."""
    workdir.mkdir()
    run_identity = begin_record(workdir, config, inputs, is_resumed=False)
    state = {'identity': run_identity, 'evaluations': {}}
    checkpoints = Checkpointer(workdir, keep=2)
    for step in (2, 4):
        weights = {'solver': {'params': {'w': jnp.full(3, step)}}}
        checkpoints.save(step, weights, state | {'cursor': step})
    checkpoints.close()
    writer = MetricsWriter(workdir, 0, (), run=record.hash_of(run_identity))
    for step in range(4):
        writer.write_scalars(step, 0, 'solver', {'loss': 1.0})
        writer.write('trajectories', [ROLLOUT | {'step': step}])
    writer.close()


def check(workdir):
    run_folder.check_checkpoints(workdir)


def exchange(one, other, name):
    """Puts a file or folder of the run `other` in place of that of the run `one`."""
    path = one / name
    if path.is_dir():
        shutil.rmtree(path)
        shutil.copytree(other / name, path)
    else:
        shutil.copyfile(other / name, path)


OTHERS = {
    'seed': ({'seed': 5}, 'seed=5, not 0'),
    'alpha': ({'policy.adapters.alpha': 64.0}, 'policy.adapters.alpha=64.0, not 32.0'),
    'rank': ({'policy.adapters.rank': 8}, 'policy.adapters.rank=8, not 0'),
    'baseline': ({'solver.baseline': 'value'}, 'solver.baseline=value, not mean'),
    'recipe': ({'recipe': 'dspo'}, 'recipe=dspo, not drzero'),
    'inputs': ({}, 'another content of policy.path'),
}
OTHER_INPUTS = {'policy.path': {'model.safetensors': {'bytes': 1, 'sha256': 'b'}}}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """A folder with `run` and the others; not to be changed."""
    folder = tmp_path_factory.mktemp('runs')
    begin(folder / 'run', config_of())
    for name, (changes, _) in OTHERS.items():
        begin(folder / name, config_of(**changes), OTHER_INPUTS if name == 'inputs' else INPUTS)
    return folder


@pytest.fixture
def two_runs(runs, tmp_path, request):
    """Copies of `run` and of another one, by default that of another seed."""
    shutil.copytree(runs / 'run', tmp_path / 'run')
    shutil.copytree(runs / getattr(request, 'param', 'seed'), tmp_path / 'other')
    return tmp_path / 'run', tmp_path / 'other'


any_other = pytest.mark.parametrize('two_runs', OTHERS, indirect=True)


@any_other
@pytest.mark.fault('A', 'a checkpoint of another run in the workdir, resumed')
def test_a_checkpoint_of_another_run_is_not_resumed(two_runs, request):
    run, other = two_runs
    check(run)
    exchange(run, other, 'checkpoints')
    _, difference = OTHERS[request.node.callspec.params['two_runs']]
    with pytest.raises(UserError, match=difference):
        check(run)


@any_other
@pytest.mark.fault('A', 'run.json of another run beside a checkpoint: export, --from')
def test_a_checkpoint_beside_another_config_is_not_read(two_runs):
    run, other = two_runs
    assert branch.newest_checkpoint(run).step == 4
    exchange(run, other, 'run.json')
    with pytest.raises(UserError, match='4: is of another run'):
        branch.newest_checkpoint(run)
    with pytest.raises(UserError, match='is of another run'):
        with branch.found(Hosts(), Place(run.parent / 'new'), str(run)):
            pass


@any_other
@pytest.mark.fault('A', 'the checkpoint of the best evaluation of another run')
def test_the_best_checkpoint_of_another_run_is_not_read(two_runs):
    run, other = two_runs
    for folder in two_runs:
        shutil.copytree(folder / 'checkpoints', folder / 'best')
    assert branch.newest_checkpoint(run / 'best').step == 4
    exchange(run, other, 'best')
    with pytest.raises(UserError, match='best/4: is of another run'):
        branch.newest_checkpoint(run / 'best')


LOGS = ('metrics.jsonl', 'trajectories.jsonl')
FIRST_LINE = {'step': 0, 'iteration': 0, 'phase': 'solver', 'loss': 1.0}


@pytest.mark.fault('A', 'a log or a record of another run: report')
def test_a_report_of_files_of_two_runs_is_refused(two_runs, tmp_path):
    run, other = two_runs
    for name in (*LOGS, 'run.json'):
        mixed = tmp_path / name
        shutil.copytree(run, mixed)
        assert report_builder.read_run(mixed)['metrics'][0] == FIRST_LINE
        exchange(mixed, other, name)
        with pytest.raises(UserError, match='is of another run'):
            report_builder.read_run(mixed)


def identity_of(workdir):
    return begin_record(workdir, config_of(), INPUTS, is_resumed=True)


@pytest.mark.fault('A', 'a log of another run in the workdir, resumed')
@pytest.mark.parametrize('name', LOGS)
def test_a_log_of_another_run_is_not_continued(two_runs, name):
    run, other = two_runs
    exchange(run, other, name)
    before = (run / name).read_bytes()
    with pytest.raises(UserError, match=f'{name}: is of another run'):
        MetricsWriter(run, 4, (), run=record.hash_of(identity_of(run)))
    assert (run / name).read_bytes() == before


@pytest.mark.fault('A', 'an exported policy in the workdir of another run')
def test_an_export_in_the_workdir_of_another_run_is_refused(two_runs):
    policies = [workdir / 'policy' / 'solver' for workdir in two_runs]
    for policy in policies:
        policy.mkdir(parents=True)
        of_run = record.Record({}, policies={'solver': {'whole': {}}})
        texts = of_run.texts_of_policies(identity_of(two_runs[0]))['solver']['whole']
        for name, text in texts.items():
            (policy / name).write_text(text)
    assert policy_settings.settings(policies[0]).seed == 0
    with pytest.raises(UserError, match='solver: is of another run'):
        policy_settings.settings(policies[1])


def test_fields_that_may_change_and_the_place_do_not_change_the_identity(two_runs, tmp_path):
    run, _ = two_runs
    run_identity = identity_of(run)
    changed = config_of()
    defaults = fields.leaves(changed)
    for name in fields.changeable_fields(changed):
        value = defaults[name]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            changed.update_from_flattened_dict({name: value + 1})
    # The same content at another place.
    changed.policy.path = 'elsewhere'
    moved = shutil.move(run, tmp_path / 'moved')
    check(moved)
    assert begin_record(moved, changed, INPUTS, is_resumed=True) == run_identity
