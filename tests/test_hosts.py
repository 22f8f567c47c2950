"""Two processes joined by gloo play what one would, from anybody's checkpoint, and nobody waits for the dead."""

import os
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from host_processes import (
    RUN,
    finish,
    free_port,
    play,
    processes_of_script,
)
from python_process import FLAGS, PIPES, ROOT, config_flags, run_python, wait_for
from run_files import count_steps, lines, summary_of, without_clock
from safetensors.numpy import load_file
from test_run import AHEAD

from zeroplay_jax.learner.checkpoint import saved_steps


@pytest.fixture(scope='module')
def two(tmp_path_factory):
    """Through the script that people use."""
    workdir = tmp_path_factory.mktemp('two') / 'run'
    command = ['launch/local_2proc.sh', '--', *RUN, f'--workdir={workdir}']
    environment = os.environ | {'XLA_FLAGS': FLAGS}
    done = subprocess.run(command, cwd=ROOT, env=environment, **PIPES)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return workdir


@pytest.fixture(scope='module')
def one(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('one') / 'run'
    finish(play(workdir, 1))
    return workdir


def read(workdir, name):
    return (workdir / name).read_text(encoding='utf-8')


def metrics(workdir):
    return without_clock(lines(workdir))


def moments(workdir):
    """Adam's first moments by checkpoint: running means of the gradients."""
    import jax
    import orbax.checkpoint as ocp

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    moments_by_step = {}
    for step in saved_steps(workdir / 'checkpoints'):
        folder = (workdir / 'checkpoints' / str(step) / 'states').resolve()
        reader = ocp.StandardCheckpointer()
        shapes = jax.tree.map(shape, reader.metadata(folder).item_metadata.tree)
        leaves = jax.tree_util.tree_leaves_with_path(reader.restore(folder, shapes))
        named = [(str(path), np.asarray(x)) for path, x in leaves]
        mu = [(name, x) for name, x in named if "'mu'" in name or '.mu' in name]
        assert mu
        moments_by_step[step] = mu
    return moments_by_step


def check_same_moments(workdir, other):
    """Asserts that two runs learnt the same up to rounding."""
    ours, theirs = moments(workdir), moments(other)
    assert ours.keys() == theirs.keys()
    for step in ours:
        for (name, a), (_, b) in zip(ours[step], theirs[step], strict=True):
            # After an update the weights differ by roundings. Tokens of the solver are nearly certain, so that its
            # gradient, of norm 1e-8, differs by more than its own.
            assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) + 1e-9, (step, name)
    assert any(np.any(moment) for step in theirs for _, moment in theirs[step])


def test_two_processes_play_what_one_plays(one, two):
    assert read(two, 'trajectories.jsonl') == read(one, 'trajectories.jsonl')
    reasons = {row['info'].get('rejected') for row in lines(two, 'trajectories.jsonl')}
    assert reasons - {None}  # something was turned away, by both alike
    check_turns(two)
    check_judge(two)
    ours, theirs = metrics(two), metrics(one)
    assert [r['step'] for r in ours] == list(range(len(theirs)))
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            value = b[name]
            if not isinstance(value, str):
                value = pytest.approx(value, rel=2e-5, abs=1e-6)
            assert a[name] == value, (a['step'], name)


def check_turns(workdir):
    """Asserts that searches were paid, and that the turns of a rollout were worth different advantages."""
    rows = [row for row in lines(workdir, 'trajectories.jsonl') if row.get('turn_rewards')]
    assert any((row['turn_rewards'][0] or 0.0) > 0 for row in rows)
    assert any(len(set(row['advantage'])) > 1 for row in rows if row['drop'] is None)


def check_judge(workdir):
    """Asserts that replies of the role that judges earned by agreeing, and trained it."""
    rows = [row for row in lines(workdir, 'trajectories.jsonl') if row['role'] == 'reader']
    assert {row['reward'] for row in rows} == {0.0, 1.0}
    assert all(row['info']['verdict'] for row in rows if row['reward'])
    assert any(record.get('reader/gradient_norm', 0) > 0 for record in lines(workdir))


def test_two_processes_learn_what_one_learns(one, two):
    check_same_moments(two, one)


@pytest.mark.long
def test_a_signal_to_one_process_saves_the_same_step_in_all(two, tmp_path):
    """Whatever `checkpoint.every` is; the same command then ends as if nothing had happened."""
    workdir = tmp_path / 'run'
    running = play(workdir, 2, '--config.checkpoint.every=50')
    wait_for(lambda: count_steps(workdir) >= 2, *running)
    running[1].send_signal(signal.SIGTERM)
    texts = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [75, 75], texts
    assert max(saved_steps(workdir / 'checkpoints')) == len(metrics(workdir))
    finish(play(workdir, 2))
    assert read(workdir, 'trajectories.jsonl') == read(two, 'trajectories.jsonl')
    assert metrics(workdir) == metrics(two)


@pytest.mark.long
@pytest.mark.parametrize('writers', [1, 2])
def test_a_checkpoint_serves_either_number_of_processes(writers, one, two, tmp_path):
    whole = (one, two)[writers - 1]
    workdir = tmp_path / 'run'
    shutil.copytree(whole, workdir)
    steps = saved_steps(workdir / 'checkpoints')
    for step in steps[2:]:
        shutil.rmtree(workdir / 'checkpoints' / str(step))
    shutil.rmtree(workdir / 'policy')
    out = finish(play(workdir, 3 - writers))
    assert f'resumes at step {steps[1]} of' in out[0]
    assert read(workdir, 'trajectories.jsonl') == read(whole, 'trajectories.jsonl')
    assert (workdir / 'policy' / 'policy' / 'model.safetensors').exists()


@pytest.mark.long
def test_two_processes_that_train_nothing_both_stop_with_status_3(tmp_path):
    # Every rollout ends after its first token, and those that end at a limit are not trained on.
    flags = 'rollout.turn_tokens=1 rollout.truncated=drop stop_after_empty_steps=2'
    running = play(tmp_path / 'run', 2, *config_flags(flags))
    out = [process.communicate(timeout=600)[0] for process in running]
    assert [process.returncode for process in running] == [3, 3], out
    assert '2 steps in a row' in summary_of(tmp_path / 'run')['stopped']


BREAKS = """
import os, sys
from zeroplay_jax.runtime import hosts
from zeroplay_jax.learner.checkpoint import saved_steps
from zeroplay_jax.runtime import devices
from zeroplay_jax.configuration import command_line
devices.connect('coordinator', f'localhost:{sys.argv[1]}', 2, int(sys.argv[2]), 10)
def main(_):
    h = hosts.Hosts()
    h.gather(None)
    if not h.is_first:
        exec(sys.argv[3])
    h.gather(None)
command_line.parse_flags = lambda argv: command_line.app.flags.FLAGS(argv[:1])
command_line.run_command('breaks', main)
"""


@pytest.mark.parametrize(
    'end', ["raise ValueError('nobody thought of this')", 'os.kill(os.getpid(), 9)']
)
def test_a_process_that_breaks_or_dies_is_not_waited_for(end):
    started = time.time()
    running = processes_of_script(BREAKS, end)
    out = running[1].communicate(timeout=120)[0]
    assert running[1].returncode == (1 if 'nobody thought of this' in out else -signal.SIGKILL)
    assert 'kill' in end or 'nobody thought of this' in out
    # The runtime notices within the heartbeat, then it unwinds; JAX's own end would wait for five minutes.
    assert running[0].wait(timeout=120) != 0
    assert time.time() - started < 100


def test_processes_that_never_come_are_one_line():
    code = f"""from zeroplay_jax.runtime import devices
devices.JOIN_SECONDS = 3.0
devices.connect('coordinator', 'localhost:{free_port()}', 2, 0, 10)
"""
    alone = run_python('-c', code, timeout=120)
    assert alone.returncode == 2 and alone.stderr.count('\n') == 1, alone.stderr
    assert 'not all processes came together within 3 s' in alone.stderr


# ---- runs with adapters, and runs whose steps begin early --------------------------------------------------


def play_alone_and_together(folder, *flags):
    """The workdirs of one run that one process plays, and two."""
    for count in (1, 2):
        finish(play(folder / str(count), count, *flags))
    one, two = folder / '1', folder / '2'
    assert read(two, 'trajectories.jsonl') == read(one, 'trajectories.jsonl')
    return one, two


@pytest.mark.long
@pytest.mark.parametrize('weights', ['shared', 'separate'])
def test_two_processes_with_adapters_play_and_learn_what_one_does(tmp_path, weights):
    # With fewer proposals no group of solves has different rewards, and the solver learns nothing.
    adapters = f'policy.adapters.rank=4 proposer.steps=2 proposer.batch=12 weights={weights}'
    one, two = play_alone_and_together(tmp_path, *config_flags(adapters))
    files = sorted((one / 'policy').rglob('adapter_model.safetensors'))
    assert len(files) == (1 if weights == 'shared' else 3)
    for path in files:
        ours, theirs = load_file(two / path.relative_to(one)), load_file(path)
        assert any(x.any() for name, x in theirs.items() if 'lora_B' in name)
        for name, x in theirs.items():
            assert np.linalg.norm(ours[name] - x) <= 1e-3 * np.linalg.norm(x), name


@pytest.mark.long
def test_two_processes_whose_steps_begin_early_play_what_one_plays(tmp_path):
    # Proposals of later rounds, and passages that episodes of both steps wait for.
    judge = 'reader.old_logp=trainer reader.tis_cap=2'
    flags = [*AHEAD, *config_flags(f'{judge} ssp.fill=resample sampler.slots=8')]
    one, two = play_alone_and_together(tmp_path, *flags)
    assert lines(one, 'tasks.jsonl') == lines(two, 'tasks.jsonl')
    check_same_moments(two, one)
