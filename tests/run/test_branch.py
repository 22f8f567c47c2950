"""Another run's checkpoint: which one is taken while that run goes on, and which adapters are refused."""

from unittest import mock

import jax.numpy as jnp
import pytest
from refused_calls import refused
from run_records import write_record

from zeroplay_jax.configs import drzero
from zeroplay_jax.configuration.fields import frozen
from zeroplay_jax.learner.checkpoint import Checkpointer, find_damage, saved_steps
from zeroplay_jax.run import branch
from zeroplay_jax.run.outcome import RunState
from zeroplay_jax.run.run_folder import Place
from zeroplay_jax.run.saver import Saver
from zeroplay_jax.runtime import record
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.types import UserError


def save(workdir, *steps, keep=2):
    checkpoints = Checkpointer(workdir, keep)
    for step in steps:
        states = {'solver': {'params': {'w': jnp.full(3, step)}}}
        checkpoints.save(step, states, {'cursor': step})
    checkpoints.close()


def find(workdir, source):
    return branch.found(Hosts(), Place(workdir), str(source))


def test_a_checkpoint_that_loses_its_checksums_meanwhile_is_not_taken(tmp_path, monkeypatch):
    """Its run removes it, and what is left of it may be incomplete."""
    save(tmp_path / 'old', 2, 4)
    copytree = branch.shutil.copytree

    def copy_late(*args, **options):
        (tmp_path / 'old' / 'checkpoints' / '4' / 'checksums.sha256').unlink(missing_ok=True)
        return copytree(*args, **options)

    monkeypatch.setattr(branch.shutil, 'copytree', copy_late)
    with find(tmp_path / 'new', tmp_path / 'old') as source:
        assert source.step == 2


def test_a_checkpoint_is_read_though_its_run_removes_it_meanwhile(tmp_path):
    old, new = tmp_path / 'old', tmp_path / 'new'
    save(old, 2)
    with find(new, old) as source:
        # The other run goes on while this one is built.
        save(old, 4, keep=1)
        assert saved_steps(old / 'checkpoints') == [4]
        assert source[:2] == (old, 2) and find_damage(source.folder) == ''
    # Nothing is left of the links.
    assert not list(new.iterdir())


def test_each_host_reads_its_own_links_of_the_step_that_the_first_one_chose(tmp_path):
    """Their folders are not shared: the new run lies in a bucket."""
    old, new = tmp_path / 'old', Place(tmp_path / 'new', is_shared=False)
    # The other run has saved a step since.
    save(old, 6, 8)
    seal = record.digest((old / 'checkpoints' / '6' / 'checksums.sha256').read_text())

    def find_as_second(step, content):
        # What the first process has linked.
        first = [str(old), step, f'/links/{step}', '', content]
        second = mock.Mock(index=1, is_first=False)
        second.run_on_first.return_value = first
        second.run_on_all_and_gather = lambda call: [first, call()]
        return branch.found(second, new, str(old))

    with find_as_second(6, seal) as source:
        assert source[1:3] == (6, tmp_path / 'new' / '.from_1' / '6')
    for step, content, line in (
        (4, seal, 'it has no checkpoint 4; the run goes on meanwhile'),
        (6, '0', 'the processes have different checkpoints'),
    ):
        with pytest.raises(UserError, match=line), find_as_second(step, content):
            pass


@pytest.mark.parametrize(
    ('field', 'value'),
    [('rank', 8), ('rank', 0), ('alpha', 8.0), ('linears', ('q', 'v')), ('quantize', 'int8')],
)
def test_adapters_that_mean_something_else_are_refused(tmp_path, monkeypatch, field, value):
    base, other = (
        {'policy.path': {'model.safetensors': {'bytes': 1, 'sha256': content}}} for content in 'ab'
    )
    config = drzero.get_config('mini')
    config.policy.adapters.rank = 4
    write_record(tmp_path, config, inputs=base)
    monkeypatch.setattr(branch, 'policy_names', lambda _: ['proposer', 'solver'])
    # The folder `best` of a run is not a run itself.
    source = branch.Source(tmp_path / 'best', 1, tmp_path)
    # A base is what is in its files, whatever it is called.
    config.policy.path = 'moved'
    branch.check(source, config, base)
    line = refused(branch.check, source, config, other)
    assert 'another base ' in line and 'model.safetensors has other bytes' in line
    config.policy.adapters.update({field: value})
    assert f'policy.adapters.{field}=' in refused(branch.check, source, config, base)


def make_engine():
    """One whose state is an array."""
    engine = mock.Mock()
    engine.device_state.return_value = {'w': jnp.ones(3)}
    engine.host_state.return_value = {}
    return engine


def test_after_a_step_back_the_best_evaluation_is_saved_again(tmp_path):
    """Its checkpoint had replaced the best one before, and is later than the run."""
    config = drzero.get_config('mini')
    config.checkpoint.update(best='em/mean', every=100)

    def evaluated(number, value, cursor=0, best=None):
        saver = Saver(Hosts(), Place(tmp_path), frozen(config), make_engine())
        saver.begin(RunState({}, cursor, best=best))
        with saver.saved_on_error():
            saver.after(Step(Phase('evaluation', 1), 0, number - 1), {'em/mean': value}, False)
        saver.checkpoints.close()
        return saved_steps(tmp_path / 'best'), saver.state.best

    best = {'metric': 'em/mean', 'value': 0.5, 'checkpoint': 2}
    assert evaluated(2, 0.5) == ([2], best)
    assert evaluated(6, 0.7, 2, best)[0] == [6]
    # The checkpoints of the run end at 4, so step 6 is another one now, and that of 2 is gone.
    assert evaluated(6, 0.4, 4, best) == ([6], best | {'value': 0.4, 'checkpoint': 6})


def test_the_checkpoint_at_the_end_of_a_shorter_schedule_stays(tmp_path):
    """A longer one goes on before the evaluation that ended it; a kill at any moment leaves something to go on from."""
    solver, evaluation = Phase('solver', 1), Phase('evaluation', 1)
    config = drzero.get_config('mini')
    config.checkpoint.update(best='em/mean', keep=1)

    def opened(phases):
        saver = Saver(Hosts(), Place(tmp_path), frozen(config), make_engine())
        restored = saver.restored([Step(phase, 0, i) for i, phase in enumerate(phases)])
        saver.begin(restored or RunState({}, evaluations={'1': {}}))
        return saver

    shorter = opened([solver, evaluation])
    with shorter.saved_on_error():
        shorter.after(Step(evaluation, 0, 1), {'em/mean': 0.5}, is_last=True)
    shorter.checkpoints.close()
    seal = tmp_path / 'checkpoints' / '2' / 'checksums.sha256'
    text = seal.read_text()
    longer = opened([solver, solver, solver, evaluation])
    assert longer.state.cursor == 1 and longer.state.evaluations == {}
    # The step in the evaluation's place is saved with the next one, and what is best stays.
    assert not longer.can_save(2)
    longer.save_now(2)
    assert longer.state.cursor == 1 and seal.read_text() == text
    assert saved_steps(tmp_path / 'best') == [2] and longer.state.best['checkpoint'] == 2
    longer.save_now(3)
    assert longer.state.cursor == 3 and saved_steps(tmp_path / 'checkpoints') == [3]
    longer.checkpoints.close()
