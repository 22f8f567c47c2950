"""Two processes joined by gloo play what one would, from anybody's checkpoint, and nobody waits for the dead."""

import os
import shutil
import signal
import subprocess
import time

import jax
import numpy as np
import pytest
from host_processes import RUN, finish, play, processes_of_script
from python_process import FLAGS, PIPES, ROOT, config_flags
from run_files import final_states, lines, summary_of, without_clock

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


def test_two_processes_play_what_one_plays(one, two):
    rows = lines(two, 'trajectories.jsonl')
    assert rows == lines(one, 'trajectories.jsonl')
    # Something was turned away, by both alike.
    assert {row['info'].get('rejected') for row in rows} - {None}
    # Searches were paid, and the turns of a rollout were worth different advantages.
    by_turn = [row for row in rows if row.get('turn_rewards')]
    assert any((row['turn_rewards'][0] or 0.0) > 0 for row in by_turn)
    assert any(len(set(row['advantage'])) > 1 for row in by_turn if row['drop'] is None)
    # Replies of the role that judges earned by agreeing, and trained it.
    assert {row['reward'] for row in rows if row['role'] == 'reader'} == {0.0, 1.0}
    ours, theirs = without_clock(lines(two)), without_clock(lines(one))
    assert any(record.get('reader/gradient_norm', 0) > 0 for record in ours)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            value = b[name]
            if not isinstance(value, str):
                value = pytest.approx(value, rel=2e-5, abs=1e-6)
            assert a[name] == value, (a['step'], name)


def moments(workdir):
    """Adam's first moments at the end: running means of the gradients."""
    arrays = jax.tree_util.tree_leaves_with_path(final_states(workdir)[0])
    return {str(path): x for path, x in arrays if "'mu'" in str(path)}


def test_two_processes_learn_what_one_learns(one, two):
    ours, theirs = moments(two), moments(one)
    assert ours.keys() == theirs.keys() and any(map(np.any, theirs.values()))
    for name, moment in theirs.items():
        # After an update the weights differ by roundings. Tokens of the solver are nearly certain, so that its
        # gradient, of norm 1e-8, differs by more than its own.
        distance = np.linalg.norm(ours[name] - moment)
        assert distance <= 1e-4 * np.linalg.norm(moment) + 1e-9, name


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
    assert lines(workdir, 'trajectories.jsonl') == lines(whole, 'trajectories.jsonl')
    assert (workdir / 'policy' / 'policy' / 'model.safetensors').exists()


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


def test_two_processes_that_train_nothing_both_stop_with_status_3(tmp_path):
    # Every rollout ends after its first token, and those that end at a limit are not trained on.
    flags = 'rollout.turn_tokens=1 rollout.truncated=drop stop_after_empty_steps=2'
    running = play(tmp_path / 'run', 2, *config_flags(flags))
    out = [process.communicate(timeout=600)[0] for process in running]
    assert [process.returncode for process in running] == [3, 3], out
    assert '2 steps in a row' in summary_of(tmp_path / 'run')['stopped']
