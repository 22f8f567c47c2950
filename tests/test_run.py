"""Whole runs on the built-in world and checkpoint: killed and continued they end bit for bit as if nothing had
happened, and every line of the log stands once."""

import json
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
from safetensors.numpy import load_file
from test_metrics import board_steps

from zeroplay_jax import export
from zeroplay_jax.configuration.command_line import policy_of_iteration
from zeroplay_jax.learner.checkpoint import saved_steps
from zeroplay_jax.run import branch, loop
from zeroplay_jax.run.policy_settings import settings

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
    summary = summary_of(workdir)
    names = 'em_before em_after em_by_hop ci95 questions seconds seed steps outside_questions'
    assert set(names.split()) <= summary.keys() and summary['outside_questions'] == 0
    assert set(summary['em_by_hop']['after']) == set('1234') and 'mean of 1, 2, 3' in printed
    assert summary['demonstrated_hops'] == 2 and '\n3 (not demonstrated)  ' in printed
    files = 'report.html run.json trajectories.jsonl checkpoints events.out.tfevents*'.split()
    for name in ('config.json', 'tokenizer.json', 'model.safetensors', 'demonstrations.json'):
        files += [f'policy/proposer/{name}', f'policy/solver/{name}']
    assert all(any(workdir.glob(name)) for name in files)
    records = lines(workdir)
    assert [r['step'] for r in records] == list(range(summary['steps']))
    round_ = ['proposer'] * 2 + ['generate'] + ['solver'] * 3
    phases = [r['phase'] for r in records]
    assert phases == ['evaluation', *round_, *round_, 'evaluation']


def test_the_end_of_every_iteration_is_a_policy(uninterrupted):
    workdir = uninterrupted[0]
    first, last = (
        pathlib.Path(policy_of_iteration(f'{workdir}@iteration{number}')) for number in (1, 2)
    )
    assert first == workdir / 'iteration1' / 'solver' and (workdir / 'iteration2/proposer').is_dir()
    weights = {folder: load_file(folder / 'model.safetensors') for folder in (first, last)}
    end = load_file(workdir / 'policy' / 'solver' / 'model.safetensors')
    dtype = next(iter(weights[last].values())).dtype
    assert str(dtype) == settings(last).policy.dtype
    equal = [
        all((of[name] == end[name].astype(dtype)).all() for name in end) for of in weights.values()
    ]
    assert equal == [False, True] and weights[first].keys() == end.keys()
    assert policy_of_iteration('hf://owner/model@main') == 'hf://owner/model@main'


LOGGED = """
    reward_mean informative_groups singleton_groups group_size turns tool_calls tool_error_rate truncated_rate
    tool_calls/search skipped_updates prompt_tokens policy_tokens response_tokens hops_asked hops_read calls/hop1
"""


def test_every_step_logs_what_one_needs_to_see_why(uninterrupted):
    records = lines(uninterrupted[0])
    proposed = 'valid_rate reward/format reward/difficulty solve_count/hop1'
    learnt = 'answer_words entropy clip_share prob_gap gradient_norm reward/exact_match score/hop1'
    for role, names in (('proposer', proposed), ('solver', learnt)):
        logged = set()
        for record in records:
            if record['phase'] == role:
                logged |= record.keys()
        assert {f'{role}/{name}' for name in f'{LOGGED} {names}'.split()} <= logged
        assert {'tool_seconds/search/p95', 'same_ids_when_rendered_again'} <= logged
    # The sampler's log-probs are the trainer's.
    gaps = [record.get('solver/prob_gap') for record in records]
    assert all(gap is None or gap < 1e-4 for gap in gaps)


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
    phases = [record['phase'] for record in lines(whole)]
    assert phases == ['evaluation', *['solver'] * 4, 'evaluation']
    check_same_run(whole, workdir)
    recorded = json.loads((workdir / 'run.json').read_text())
    assert recorded['config']['schedule']['iterations'] == 2


@pytest.mark.long
def test_ten_kills_at_random_moments(uninterrupted, tmp_path):
    _kill_and_compare(uninterrupted[0], tmp_path / 'killed', 10, random.Random(1))


def _kill_and_compare(whole, workdir, kills, rng, *extra):
    for i in range(kills):
        process, before = start(workdir, *extra), count_steps(workdir)
        if i % 3 == 2:  # anywhere: while it starts, restores, cuts its log, or plays
            time.sleep(rng.uniform(1, 8))
        else:  # soon after a step that is new
            wait_for(lambda before=before: count_steps(workdir) > before, process)
            time.sleep(rng.uniform(0, 0.3))
        if i % 3 == 1:
            _preempt(process, workdir)
        else:
            kill(process)
    finish(start(workdir, *extra))
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
    config.checkpoint.update(best='em/mean', keep=10)
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
    best = summary['best']
    assert (workdir / 'best' / str(best['checkpoint'])).is_dir() and best['metric'] == 'em/mean'
    means = [record['em/mean'] for record in lines(workdir) if record['phase'] == 'evaluation']
    assert best['value'] == max(means)
    # The newest checkpoint is what the run exported; and it needs the other run no more.
    exported = tmp_path / 'exported'
    assert export.main([str(workdir), '--out', str(exported)]) == 0
    for name in ('model.safetensors', 'generation_config.json'):
        exported_bytes = (exported / 'solver' / name).read_bytes()
        assert exported_bytes == (workdir / 'policy' / 'solver' / name).read_bytes()
    assert '# solver' in (exported / 'solver' / 'README.md').read_text()


AHEAD = config_flags("""
    rollout.ahead=1 checkpoint.every=1 proposer.old_logp=trainer proposer.tis_cap=2.0 solver.old_logp=trainer
    solver.tis_cap=2.0
""")


@pytest.mark.long
def test_kills_change_nothing_where_steps_begin_early(tmp_path):
    finish(start(tmp_path / 'whole', *AHEAD))
    # Two steps of the proposer and three of the solver, twice.
    ages = [line['staleness'] for line in lines(tmp_path / 'whole') if 'staleness' in line]
    assert ages == 2 * [0, 1, 0, 1, 1]
    _kill_and_compare(tmp_path / 'whole', tmp_path / 'killed', 4, random.Random(0), *AHEAD)
