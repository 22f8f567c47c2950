"""A workdir belongs to one config, and a checkpoint gives back what went in, under any mesh."""

import json
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from python_process import run_python
from run_records import begin

from zeroplay_jax.learner.checkpoint import Checkpointer, saved_steps
from zeroplay_jax.policy import sharding
from zeroplay_jax.runtime.workdir import WorkdirError, claim
from zeroplay_jax.types import UserError

CONFIG = {'seed': 0, 'solver': {'batch': 32, 'hops': (1, 2)}, 'progress': True}


def save(folder, step, state, loop, keep=1):
    checkpoints = Checkpointer(folder, keep=keep)
    checkpoints.save(step, state, loop)
    checkpoints.wait()
    return checkpoints


def test_state_comes_back_bit_for_bit_under_another_mesh(tmp_path):
    state = {'a': {'w': jax.random.normal(jax.random.key(0), (8, 4)), 'step': jnp.int32(7)}}
    for step in (1, 2, 3):
        checkpoints = save(tmp_path, step, state, {'cursor': step, 'pool': [{'q': 'é'}]}, keep=2)
        assert checkpoints.latest() == step
        checkpoints.close()
    place = NamedSharding(sharding.make_mesh(1, 4, 1), P('fsdp'))
    like = {'a': {'w': jax.device_put(jnp.zeros((8, 4)), place), 'step': jnp.int32(0)}}
    restored, loop = Checkpointer(tmp_path, keep=2).restore(like)
    np.testing.assert_array_equal(restored['a']['w'], state['a']['w'])
    assert restored['a']['w'].sharding == place and int(restored['a']['step']) == 7
    assert loop == {'cursor': 3, 'pool': [{'q': 'é'}]}
    assert saved_steps(tmp_path / 'checkpoints') == [2, 3]


@pytest.mark.parametrize(
    ('method', 'call'),
    [
        ('save', lambda checkpoints: checkpoints.save(1, {'w': jnp.zeros(2)}, {})),
        ('wait_until_finished', Checkpointer.wait),
        ('close', Checkpointer.close),
    ],
)
def test_an_interrupt_waits_for_the_end_of_a_save(tmp_path, monkeypatch, method, call):
    checkpoints = Checkpointer(tmp_path, keep=1)
    library_call = getattr(checkpoints._manager, method)
    done = []

    def interrupted(*args, **keys):
        signal.raise_signal(signal.SIGINT)
        result = library_call(*args, **keys)
        done.append(method)
        return result

    monkeypatch.setattr(checkpoints._manager, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(checkpoints)
    assert done == [method]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    checkpoints.close()
    assert saved_steps(tmp_path / 'checkpoints') == [1] * (method == 'save')


def test_a_second_interrupt_ends_the_process_at_once():
    code = """import signal
from zeroplay_jax.runtime import signals
with signals.interrupt_held():
    signal.raise_signal(signal.SIGINT)
    print('held', flush=True)
    signal.raise_signal(signal.SIGINT)
    print('not reached')
"""
    done = run_python('-c', code)
    assert (done.returncode, done.stdout) == (130, 'held\n')
    assert len(done.stderr.strip().splitlines()) == 1 and 'stopped' in done.stderr


def test_what_was_saved_is_not_touched_by_a_later_donation(tmp_path):
    """Saving goes on in the background while the next update donates, and overwrites, the very same buffers."""
    state = {'w': jnp.arange(1 << 20, dtype=jnp.float32)}
    bump = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    checkpoints = Checkpointer(tmp_path, keep=1)
    checkpoints.save(1, {'r': state}, {})
    for _ in range(20):
        state = bump(state)
    checkpoints.wait()
    restored, _ = checkpoints.restore({'r': state})
    np.testing.assert_array_equal(restored['r']['w'], np.arange(1 << 20, dtype=np.float32))


@pytest.mark.parametrize('error', [KeyboardInterrupt, UserError])
def test_ctrl_c_and_errors_wait_for_what_is_being_saved(tmp_path, error):
    state = {'r': {'w': jnp.arange(1 << 22, dtype=jnp.float32)}}
    checkpoints = Checkpointer(tmp_path, keep=1)
    with pytest.raises(error), checkpoints.saved_on_error():
        checkpoints.save(1, state, {'cursor': 1})
        raise error
    restored, loop = Checkpointer(tmp_path, keep=1).restore(state)
    assert loop == {'cursor': 1}
    np.testing.assert_array_equal(restored['r']['w'], state['r']['w'])


def test_a_folder_half_written_is_not_a_checkpoint(tmp_path):
    save(tmp_path, 1, {'r': {'w': jnp.ones(3)}}, {}).close()
    (tmp_path / 'checkpoints' / '2.orbax-checkpoint-tmp-9').mkdir()
    assert Checkpointer(tmp_path, keep=3).latest() == 1


def test_a_workdir_in_use_is_refused(tmp_path):
    with (
        claim(tmp_path / 'run', CONFIG),
        pytest.raises(WorkdirError, match='in use by another process'),
    ):
        begin(tmp_path / 'run', CONFIG)
    begin(tmp_path / 'run', CONFIG)


def test_what_happens_after_saving_is_not_in_the_checkpoint(tmp_path, monkeypatch):
    """The writer's thread may be late; what it writes is what there was."""
    changed, was_late = threading.Event(), []
    real = json.dumps

    def late_in_threads(value):
        if threading.current_thread() is not threading.main_thread():
            was_late.append(changed.wait(20))
        return real(value)

    monkeypatch.setattr(json, 'dumps', late_in_threads)
    questions = [{'question': 'first'}]
    checkpoints = Checkpointer(tmp_path, keep=1)
    checkpoints.save(1, {'a': jnp.zeros(3)}, {'pool': questions})
    questions.append({'question': 'later'})
    changed.set()
    checkpoints.wait()
    monkeypatch.undo()
    assert was_late and all(was_late)
    _, loop = checkpoints.restore({'a': jnp.zeros(3)})
    checkpoints.close()
    assert loop['pool'] == [{'question': 'first'}]


@pytest.mark.parametrize(
    ('like', 'difference'),
    [
        ({'a': {'w': jnp.ones((8, 4))}}, r'it has a/w of shape \(4, 4\), not \(8, 4\)'),
        ({'a': {'w': jnp.ones((4, 4)), 'v': jnp.ones(2)}}, 'it lacks a/v'),
        ({'a': {}}, 'it has a/w'),
    ],
)
def test_arrays_of_another_run_are_refused_in_one_line(tmp_path, like, difference):
    checkpoints = save(tmp_path, 1, {'a': {'w': jnp.ones((4, 4))}}, {})
    line = f'checkpoints/1: is of another run: {difference};'
    with pytest.raises(UserError, match=line) as error:
        checkpoints.restore(like)
    assert '\n' not in str(error.value)
