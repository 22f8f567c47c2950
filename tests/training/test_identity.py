"""Config, inputs, checkpoints, logs and exports of a run belong together, and what is of another run is refused."""

import shutil

import jax.numpy as jnp
import pytest
from run_records import write_record

from zeroplay_jax.configs import drzero
from zeroplay_jax.configuration import fields
from zeroplay_jax.evaluation import report_builder
from zeroplay_jax.learner.checkpoint import Checkpointer
from zeroplay_jax.runtime import record
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.log import MetricsWriter
from zeroplay_jax.training import branch, policy_settings, run_folder
from zeroplay_jax.types import UserError

ROLLOUT = {'phase': 'solver', 'role': 'solver', 'segments': []}
INPUTS = {'policy.path': {'model.safetensors': {'bytes': 1, 'sha256': 'a'}}}


def config_of(**changes):
    config = drzero.get_config()
    config.recipe = changes.get('recipe', config.recipe)
    config.update_from_flattened_dict(changes)
    return config


def begin_record(workdir, config, inputs, is_resumed):
    start = dict(index='', template={}, roles={}, weights={}, is_resumed=is_resumed)
    return run_folder.begin(Hosts(), workdir, config, inputs, **start)


def begin(workdir, config, inputs=INPUTS, steps=(2, 4)):
    """What a run of a config leaves in its workdir; returns its identity."""
    workdir.mkdir()
    run_identity = begin_record(workdir, config, inputs, is_resumed=False)
    state = {'identity': run_identity}
    checkpoints = Checkpointer(workdir, keep=2)
    for step in steps:
        weights = {'solver': {'params': {'w': jnp.full(3, step)}}}
        checkpoints.save(step, weights, state | {'cursor': step, 'evaluations': {}})
    checkpoints.close()
    writer = MetricsWriter(workdir, 0, (), run=record.hash_of(run_identity))
    for step in range(max(steps)):
        writer.write_scalars(step, 0, 'solver', {'loss': 1.0})
        writer.write('trajectories', [ROLLOUT | {'step': step}])
    writer.close()
    return run_identity


def check(workdir):
    run_folder.check_checkpoints(Hosts(), workdir)


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


@pytest.fixture(params=OTHERS)
def two_runs(request, tmp_path):
    changes, difference = OTHERS[request.param]
    inputs = INPUTS
    if request.param == 'inputs':
        inputs = {'policy.path': {'model.safetensors': {'bytes': 1, 'sha256': 'b'}}}
    begin(tmp_path / 'run', config_of())
    begin(tmp_path / 'other', config_of(**changes), inputs)
    return tmp_path / 'run', tmp_path / 'other', difference


@pytest.mark.fault('A', 'a checkpoint of another run in the workdir, resumed')
def test_a_checkpoint_of_another_run_is_not_resumed(two_runs, user_reads):
    run, other, difference = two_runs
    check(run)
    exchange(run, other, 'checkpoints')
    with pytest.raises(UserError) as refusal:
        check(run)
    assert difference in str(refusal.value) and '\n' not in str(refusal.value)
    user_reads(refusal.value)


@pytest.mark.fault('A', 'run.json of another run beside a checkpoint: export, --from')
def test_a_checkpoint_beside_another_config_is_not_read(two_runs, user_reads):
    run, other, _ = two_runs
    assert branch.newest_checkpoint(run).step == 4
    exchange(run, other, 'run.json')
    with pytest.raises(UserError, match='4: is of another run') as refusal:
        branch.newest_checkpoint(run)
    user_reads(refusal.value)
    with pytest.raises(UserError, match='is of another run'):
        branch.find(Hosts(), run.parent / 'new', str(run), is_resumed=False)


@pytest.mark.fault('A', 'the checkpoint of the best evaluation of another run')
def test_the_best_checkpoint_of_another_run_is_not_read(two_runs, user_reads):
    run, other, _ = two_runs
    for folder in two_runs[:2]:
        shutil.copytree(folder / 'checkpoints', folder / 'best')
    assert branch.newest_checkpoint(run / 'best').step == 4
    exchange(run, other, 'best')
    with pytest.raises(UserError, match='best/4: is of another run') as refusal:
        branch.newest_checkpoint(run / 'best')
    user_reads(refusal.value)


LOGS = ('metrics.jsonl', 'trajectories.jsonl')


@pytest.mark.fault('A', 'a log or a record of another run: report')
def test_a_report_of_files_of_two_runs_is_refused(tmp_path, user_reads):
    begin(tmp_path / 'other', config_of(seed=5))
    for name in (*LOGS, 'run.json'):
        run = tmp_path / name
        begin(run, config_of())
        assert report_builder.read_run(run)['metrics'][0] == {
            'step': 0,
            'iteration': 0,
            'phase': 'solver',
            'loss': 1.0,
        }
        exchange(run, tmp_path / 'other', name)
        with pytest.raises(UserError, match='is of another run') as refusal:
            report_builder.read_run(run)
        user_reads(refusal.value)


@pytest.mark.fault('A', 'a log of another run in a folder without a record: report')
def test_logs_are_compared_with_each_other_without_a_record(tmp_path, user_reads):
    for seed in (0, 5):
        begin(tmp_path / str(seed), config_of(seed=seed))
        (tmp_path / str(seed) / 'run.json').unlink()
    exchange(tmp_path / '0', tmp_path / '5', 'trajectories.jsonl')
    with pytest.raises(UserError, match='trajectories.jsonl: is of another run') as refusal:
        report_builder.read_run(tmp_path / '0')
    user_reads(refusal.value)


@pytest.mark.fault('A', 'a log of another run in the workdir, resumed')
@pytest.mark.parametrize('name', LOGS)
def test_a_log_of_another_run_is_not_continued(tmp_path, name, user_reads):
    run_identity = begin(tmp_path / 'run', config_of())
    begin(tmp_path / 'other', config_of(seed=5))
    exchange(tmp_path / 'run', tmp_path / 'other', name)
    before = (tmp_path / 'run' / name).read_bytes()
    with pytest.raises(UserError, match=f'{name}: is of another run') as refusal:
        MetricsWriter(tmp_path / 'run', 4, (), run=record.hash_of(run_identity))
    assert (tmp_path / 'run' / name).read_bytes() == before
    user_reads(refusal.value)


@pytest.mark.fault('A', 'an exported policy in the workdir of another run')
def test_an_export_in_the_workdir_of_another_run_is_refused(tmp_path, user_reads):
    run_identity = begin(tmp_path / 'run', config_of())
    begin(tmp_path / 'other', config_of(seed=5))
    for run in ('run', 'other'):
        folder = tmp_path / run / 'policy' / 'solver'
        folder.mkdir(parents=True)
        for name, text in record.export_texts(run_identity).items():
            (folder / name).write_text(text)
    assert policy_settings.settings(tmp_path / 'run' / 'policy' / 'solver').seed == 0
    with pytest.raises(UserError, match='solver: is of another run') as refusal:
        policy_settings.settings(tmp_path / 'other' / 'policy' / 'solver')
    user_reads(refusal.value)


def test_fields_that_may_change_and_the_place_do_not_change_the_identity(tmp_path):
    run_identity = begin(tmp_path / 'run', config_of())
    changed = config_of()
    defaults = dict(fields.leaves(changed))
    for name in fields.changeable_fields(changed):
        value = defaults[name]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            changed.update_from_flattened_dict({name: value + 1})
    changed.log.samples_every = 7
    # The same content at another place.
    changed.policy.path = 'elsewhere'
    moved = tmp_path / 'moved'
    shutil.move(tmp_path / 'run', moved)
    check(moved)
    kept = begin_record(moved, changed, INPUTS, is_resumed=True)
    assert kept == run_identity


def test_a_field_of_another_version_is_no_difference(tmp_path):
    begin(tmp_path / 'run', config_of())
    config = config_of().to_dict()
    config['field_of_tomorrow'] = 1
    del config['solver']['batch']
    write_record(tmp_path / 'run', config, inputs=INPUTS)
    check(tmp_path / 'run')


@pytest.mark.fault('C', 'the newest checkpoint is damaged: export, --from')
def test_an_older_checkpoint_is_taken_with_a_warning(tmp_path, capsys, user_reads):
    begin(tmp_path / 'run', config_of())
    path = tmp_path / 'run' / 'checkpoints' / '4' / 'loop' / 'metadata'
    path.write_bytes(path.read_bytes()[:-1])
    for source in (
        branch.newest_checkpoint(tmp_path / 'run'),
        branch.newest_on_all(Hosts(), tmp_path / 'run'),
    ):
        assert source.step == 2
        source.print_use('begins with')
        warning, line = capsys.readouterr().err.splitlines()
        assert 'checkpoint 4 is damaged: loop/metadata' in warning
        assert warning.endswith('takes checkpoint 2 in its place')
        assert line.startswith('begins with checkpoint 2')
    user_reads(warning)
