"""Whole runs on the built-in world and checkpoint: killed and continued they end bit for bit as if nothing had
happened, and every line of the log stands once."""

import pathlib
import random
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import run_library
from python_process import config_flags, finish, kill, start_python, wait_for
from run_files import (
    check_same_run,
    count_steps,
    final_states,
    lines,
    summary_of,
    without_clock,
)
from run_records import stored_config
from safetensors.numpy import load_file
from test_metrics import board_steps

from zeroplay_jax import export
from zeroplay_jax.configuration.command_line import policy_of_iteration
from zeroplay_jax.learner.checkpoint import saved_steps
from zeroplay_jax.run import branch, loop

# Four questions by three rollouts: some steps have no reward variance.
SMALL = config_flags("""
    world.train=(0,4) world.evaluation=(0,2) sampler.slots=16 micro.rows=2 proposer.batch=8 solver.batch=4
    schedule.hop_ratio=(2,1,1)
    pool.batch=16 pool.batches=1 proposer.steps=2 solver.steps=3 solver.samples=3 reward.solves=2
    schedule.iterations=2 eval.questions=2 eval.every=0 checkpoint.every=2 stop_after_empty_steps=0
    checkpoint.iterations=True
""")


def start(workdir, *extra):
    config = '--config=configs/quickstart.py'
    words = ['-m', 'zeroplay_jax.main', config, *SMALL, f'--workdir={workdir}', *extra]
    return start_python(*words)


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('run') / 'whole'
    return workdir, finish(start(workdir))[0]


def test_a_run_leaves_what_the_readme_says(uninterrupted):
    workdir, printed = uninterrupted
    assert 'mean of 1, 2, 3' in printed and '\n3 (not demonstrated)  ' in printed
    for name in ('tokenizer.json', 'model.safetensors', 'demonstrations.json'):
        assert all((workdir / 'policy' / role / name).exists() for role in ('proposer', 'solver'))
    records = lines(workdir)
    assert [r['step'] for r in records] == list(range(summary_of(workdir)['steps']))
    round_ = ['proposer'] * 2 + ['generate'] + ['solver'] * 3
    phases = [r['phase'] for r in records]
    assert phases == ['evaluation', *round_, *round_, 'evaluation']
    # The sampler's log-probs are the trainer's.
    gaps = [record['solver/prob_gap'] for record in records if 'solver/prob_gap' in record]
    assert gaps and max(gaps) < 1e-4


def test_the_end_of_every_iteration_is_a_policy(uninterrupted):
    workdir = uninterrupted[0]
    assert (workdir / 'iteration2' / 'proposer').is_dir()
    first, last = (policy_of_iteration(f'{workdir}@iteration{number}') for number in (1, 2))
    end = load_file(workdir / 'policy' / 'solver' / 'model.safetensors')
    for folder, is_end in ((first, False), (last, True)):
        weights = load_file(pathlib.Path(folder) / 'model.safetensors')
        equal = [(weights[name] == x.astype(weights[name].dtype)).all() for name, x in end.items()]
        assert all(equal) == is_end


def test_a_longer_schedule_equals_one_that_was_that_long_from_the_start(tmp_path):
    """A finished run of one iteration gets a second one; the evaluation that ended it is no step of the longer run."""
    whole, workdir = tmp_path / 'whole', tmp_path / 'longer'
    for folder, iterations in ((whole, 2), (workdir, 1), (workdir, 2)):
        config = run_library.config_of('dspo', folder)
        # The rows of updates are logged or not.
        config.log.rows = (1, 2) if folder == workdir else ()
        config.solver.steps = 2
        config.eval.every = 0
        config.schedule.iterations = iterations
        loop.run(config, folder)
    assert len(lines(whole)) == 6
    check_same_run(whole, workdir)
    assert stored_config(workdir)['schedule']['iterations'] == 2


@pytest.mark.long
def test_ten_kills_at_random_moments(uninterrupted, tmp_path):
    whole, workdir, rng = uninterrupted[0], tmp_path / 'killed', random.Random(1)
    for i in range(10):
        process, before = start(workdir), count_steps(workdir)
        if i % 3 == 2:  # anywhere: while it starts, restores, cuts its log, or plays
            time.sleep(rng.uniform(1, 8))
        else:  # soon after a step that is new
            wait_for(lambda before=before: count_steps(workdir) > before, process)
            time.sleep(rng.uniform(0, 0.3))
        if i % 3 == 1:
            _preempt(process, workdir)
        else:
            kill(process)
    finish(start(workdir))
    check_same_run(whole, workdir)
    # The board shows no step twice.
    solver_steps = [record['step'] for record in lines(workdir) if record['phase'] == 'solver']
    assert board_steps(workdir, 'solver/reward_mean') == solver_steps


def _preempt(process, workdir):
    """SIGTERM: the update in progress is completed, and every step in the log is in the checkpoint."""
    process.send_signal(signal.SIGTERM)
    _, err = finish(process, 75)
    assert err.strip().endswith('the same command resumes the run')
    assert max(saved_steps(workdir / 'checkpoints')) == count_steps(workdir)


@pytest.mark.long
def test_the_same_seed_gives_the_same_run_and_another_another(uninterrupted, tmp_path):
    finish(start(tmp_path / 'other', '--config.seed=1'))
    assert without_clock(lines(uninterrupted[0])) != without_clock(lines(tmp_path / 'other'))


def test_a_run_begins_with_the_state_of_another(tmp_path, tmp_path_factory):
    """Its first evaluation repeats the last one of the other run, which is only read."""
    whole, workdir = run_library.whole('ppo', tmp_path_factory), tmp_path / 'more'
    before = sorted((path, path.stat().st_mtime_ns) for path in whole.rglob('*'))
    config = run_library.config_of('ppo', workdir)
    config.solver.steps = 1
    config.checkpoint.keep = 10
    loop.run(config, workdir, str(whole))
    assert before == sorted((path, path.stat().st_mtime_ns) for path in whole.rglob('*'))
    first, summary = summary_of(whole), summary_of(workdir)
    assert summary['results']['before'] == first['results']['after']
    assert summary['from'] == {'workdir': str(whole.resolve()), 'step': len(lines(whole))}
    # Weights, value network and moments went along.
    end, _ = final_states(whole)
    start = branch.newest_checkpoint(workdir).folder.parent / '0' / 'states'
    restored = ocp.StandardCheckpointer().restore(start.resolve())
    jax.tree.map(np.testing.assert_array_equal, restored, end)
    # The newest checkpoint is what the run exported.
    (exported,) = export.export(workdir, tmp_path / 'exported')
    policies = exported, workdir / 'policy' / 'solver'
    first, second = ((folder / 'model.safetensors').read_bytes() for folder in policies)
    assert first == second
