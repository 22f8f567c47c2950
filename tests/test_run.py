"""Whole runs on the built-in world and checkpoint: killed and continued they end bit for bit as if nothing had
happened, and every line of the log stands once."""

import json
import pathlib
import random
import signal
import time

import numpy as np
import pytest
from python_process import start_python
from run_files import lines, summary_of, without_clock
from test_metrics import board_steps

from zeroplay_jax import export
from zeroplay_jax.learner.checkpoint import saved_steps

SMALL = [
    '--config=configs/quickstart.py',
    '--config.world.train=(0,4)',
    '--config.world.evaluation=(0,2)',
    '--config.sampler.slots=16',
    '--config.micro.rows=2',
    '--config.proposer.batch=16',
    '--config.solver.batch=4',
    '--config.pool.batch=16',
    '--config.pool.batches=1',
    '--config.proposer.steps=2',
    '--config.solver.steps=5',
    '--config.solver.samples=3',
    '--config.reward.solves=2',
    '--config.schedule.iterations=2',
    '--config.eval.questions=4',
    '--config.eval.every=0',
    '--config.checkpoint.every=2',
    # Four questions by three rollouts: some steps have no reward variance.
    '--config.stop_after_empty_steps=0',
]


def start(workdir, *extra):
    return start_python('-m', 'zeroplay_jax.main', *SMALL, f'--workdir={workdir}', *extra)


def finish(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-2000:]
    return out


def final_states(workdir):
    import jax
    import orbax.checkpoint as ocp

    step = max(saved_steps(workdir / 'checkpoints'))
    folder = (workdir / 'checkpoints' / str(step)).resolve()
    tree = ocp.StandardCheckpointer().restore(folder / 'states')
    loop = json.loads((folder / 'loop' / 'metadata').read_text())
    loop.pop('seconds')
    return jax.tree.map(np.asarray, tree), loop


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('run') / 'whole'
    return workdir, finish(start(workdir))


def test_a_run_leaves_what_the_readme_says(uninterrupted):
    workdir, printed = uninterrupted
    summary = summary_of(workdir)
    want = {
        'em_before',
        'em_after',
        'em_by_hop',
        'ci95',
        'questions',
        'seconds',
        'seed',
        'steps',
        'outside_questions',
    }
    assert want <= summary.keys() and summary['outside_questions'] == 0
    assert (
        set(summary['em_by_hop']['after']) == {'1', '2', '3', '4'} and 'mean of 1, 2, 3' in printed
    )
    assert {p.name for p in workdir.iterdir()} >= {
        'report.html',
        'run.json',
        'trajectories.jsonl',
        'checkpoints',
    }
    assert any(p.name.startswith('events.out.tfevents') for p in workdir.iterdir())
    for role in ('proposer', 'solver'):
        assert {'config.json', 'tokenizer.json', 'model.safetensors'} <= {
            p.name for p in (workdir / 'policy' / role).iterdir()
        }
    records = lines(workdir)
    assert [r['step'] for r in records] == list(range(summary['steps']))
    phases = [r['phase'] for r in records]
    round_ = ['proposer'] * 2 + ['generate'] + ['solver'] * 5
    assert phases == ['evaluation', *round_, *round_, 'evaluation']


def test_every_step_logs_what_one_needs_to_see_why(uninterrupted):
    records = lines(uninterrupted[0])
    proposer = next(r for r in records if r['phase'] == 'proposer')
    solver = next(r for r in records if r['phase'] == 'solver' and not r.get('skipped_updates'))
    both = {
        'reward_mean',
        'informative_groups',
        'singleton_groups',
        'group_size',
        'turns',
        'tool_calls',
    }
    both |= {'tool_error_rate', 'truncated_rate', 'tool_seconds/search/p50'}
    both |= {'tool_seconds/search/p95', 'tool_calls/search'}
    both |= {'same_ids_when_rendered_again', 'skipped_updates', 'tokens_per_second'}
    learnt = {
        'answer_words',
        'entropy',
        'clip_share',
        'prob_gap',
        'gradient_norm',
        'reward/exact_match',
        'pool_size',
    }
    assert both | {'valid_rate', 'reward/format', 'reward/difficulty'} <= proposer.keys()
    assert both | learnt <= solver.keys()
    assert any(k.startswith('k_histogram/') for r in records for k in r)
    # the sampler's log-probs are the trainer's
    assert all(r['prob_gap'] < 1e-4 for r in records if r.get('prob_gap') is not None)


def test_every_item_is_told_with_where_it_comes_from(uninterrupted):
    records, told = lines(uninterrupted[0]), lines(uninterrupted[0], 'tasks.jsonl')
    assert all(line['system'] == 'drzero' for line in told)
    made = [line for line in told if line['drop'] is None]
    assert made and all(
        line['question'] and line['answers'] and line['document_id'] for line in made
    )
    assert {line['phase'] for line in made} == {'generate'} and {
        line['version'] for line in made
    } == {2, 4}
    assert sum(r['pool_size'] for r in records if r['phase'] == 'generate') == len(made)
    rejected = [line for line in told if line['phase'] == 'proposer']
    share = sum(
        v
        for r in records
        if r['phase'] == 'proposer'
        for k, v in r.items()
        if k.startswith('rejected/')
    )
    assert rejected and all(line['drop'] and line['rollout'] for line in rejected)
    assert len(rejected) == pytest.approx(16 * share), 'one line for each that the metrics count'
    proposals = {tuple(line['task']): line['question'] for line in made}
    solved = [t for t in lines(uninterrupted[0], 'trajectories.jsonl') if t['phase'] == 'solver']
    assert solved and all(proposals[tuple(t['parent'])] == t['info']['question'] for t in solved)
    assert all(t['system'] == 'drzero' and t['weights'] == 'solver' for t in solved)
    assert {t['version'] for t in solved} == set(range(10)), 'five updates in each of two rounds'


def test_a_longer_schedule_killed_and_resumed_equals_an_uninterrupted_run(uninterrupted, tmp_path):
    """A finished run of one iteration is continued to two (`--from`), and killed meanwhile."""
    shorter = tmp_path / 'shorter'
    finish(start(shorter, '--config.schedule.iterations=1'))
    killed = tmp_path / 'killed'
    _kill_and_compare(uninterrupted[0], killed, 3, random.Random(0), f'--from={shorter}')
    # The evaluation at the end of the shorter schedule is no step of the longer one.
    steps = len(lines(shorter)) - 1
    # Its lines name the longer run.
    records = [without_clock(lines(run)[:steps]) for run in (killed, shorter)]
    for record in (*records[0], *records[1]):
        del record['run']
    assert records[0] == records[1]
    assert json.loads((killed / 'run.json').read_text())['origin']['step'] == steps + 1


@pytest.mark.long
def test_ten_kills_at_random_moments(uninterrupted, tmp_path):
    _kill_and_compare(uninterrupted[0], tmp_path / 'killed', 10, random.Random(1))


def _kill_and_compare(whole, workdir, kills, rng, *extra):
    done = 0
    for i in range(kills):
        process, before = start(workdir, *extra), _cursor(workdir)
        deadline = time.monotonic() + 300
        if i % 3 == 1:  # anywhere: while it starts, restores, cuts its log, or plays
            time.sleep(rng.uniform(1, 8))
        else:  # soon after a step that is new
            while (
                _cursor(workdir) <= before
                and process.poll() is None
                and time.monotonic() < deadline
            ):
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 0.3))
        done += process.poll() is None
        if i % 3 == 2:
            _preempt(process, workdir)
        else:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    finish(start(workdir, *extra))
    assert done == kills
    a, loop_a = final_states(whole)
    b, loop_b = final_states(workdir)
    import jax

    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert loop_a == loop_b
    assert without_clock(lines(whole)) == without_clock(lines(workdir))
    for name in ('trajectories.jsonl', 'tasks.jsonl', 'alarms.jsonl'):
        assert lines(whole, name) == lines(workdir, name)
    # The board shows no step twice.
    solver_steps = [record['step'] for record in lines(workdir) if record['phase'] == 'solver']
    assert board_steps(workdir, 'solver/reward_mean') == solver_steps


def _preempt(process, workdir):
    """SIGTERM: the update in progress is completed, and every step in the log is in the checkpoint."""
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75, err[-2000:]
    assert err.strip().endswith('the same command resumes the run')
    assert max(saved_steps(workdir / 'checkpoints')) == _cursor(workdir)


def _cursor(workdir):
    path = workdir / 'metrics.jsonl'
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.long
def test_the_same_seed_gives_the_same_run_and_another_another(uninterrupted, tmp_path):
    finish(start(tmp_path / 'other', '--config.seed=1'))
    assert without_clock(lines(uninterrupted[0])) != without_clock(lines(tmp_path / 'other'))


def test_a_run_begins_with_the_weights_of_another(uninterrupted, tmp_path):
    """Its first evaluation repeats the last one of the other run, which is only read."""
    short = [
        '--config.proposer.steps=1',
        '--config.solver.steps=1',
        '--config.schedule.iterations=1',
    ]
    short += ['--config.solver.learning_rate=1e-3', '--config.checkpoint.best=em/mean']
    whole, workdir = uninterrupted[0], tmp_path / 'more'
    before = sorted((path, path.stat().st_mtime_ns) for path in whole.rglob('*'))
    finish(start(workdir, f'--from={whole}', *short))
    assert before == sorted((path, path.stat().st_mtime_ns) for path in whole.rglob('*'))
    summaries = [summary_of(path) for path in (whole, workdir)]
    assert summaries[1]['results']['before'] == summaries[0]['results']['after']
    last = len(lines(whole))
    assert summaries[1]['from'] == {'workdir': str(whole.resolve()), 'step': last}
    # The moments went along: the count of updates continues.
    states = [final_states(path)[0]['solver']['opt']['solver'] for path in (whole, workdir)]
    counts = [int(state[1][0]['count']) for state in states]
    assert counts[1] >= counts[0] > 0
    best = summaries[1]['best']
    assert (workdir / 'best' / str(best['checkpoint'])).is_dir() and best['metric'] == 'em/mean'
    means = [record['em/mean'] for record in lines(workdir) if record['phase'] == 'evaluation']
    assert best['value'] == max(means)
    # The newest checkpoint is what the run exported; and it needs the other run no more.
    exported = tmp_path / 'exported'
    assert export.main([str(workdir), '--out', str(exported)]) == 0
    for role in ('proposer', 'solver'):
        name = pathlib.Path(role, 'model.safetensors')
        assert (exported / name).read_bytes() == (workdir / 'policy' / name).read_bytes()
        name = pathlib.Path(role, 'generation_config.json')
        assert (exported / name).read_text() == (workdir / 'policy' / name).read_text()
        assert '# ' + role in (exported / role / 'README.md').read_text()
    other = start(workdir, f'--from={tmp_path}', *short)
    _, err = other.communicate(timeout=120)
    assert other.returncode == 2 and f'the run began with --from={whole}' in err
