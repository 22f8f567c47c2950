"""Whole runs that train nothing: they stop with status 3, say so everywhere, and lose nothing."""

import shutil

import pytest
from python_process import config_flags, run_python
from run_files import count_steps, summary_of
from run_records import change_record

# Every rollout ends after its first token, and those that end at a limit are not trained on.
FIELDS = """
    world.train=(0,4) world.evaluation=(0,1) eval.questions=1 sampler.slots=16 micro.rows=2 proposer.batch=8
    schedule.hop_ratio=(2,1,1) proposer.steps=4 pool.batch=4 pool.batches=1 rollout.turn_tokens=1
    rollout.truncated=drop checkpoint.every=100 stop_after_empty_steps=2 log.writers=()
"""


def train(workdir, *extra):
    words = ['--config=configs/drzero.py:mini', *config_flags(FIELDS), f'--workdir={workdir}']
    result = run_python('-m', 'zeroplay_jax.main', *words, *extra)
    assert 'Traceback' not in result.stderr, result.stderr[-2000:]
    return result


@pytest.fixture(scope='module')
def stopped(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('untrained') / 'run'
    return workdir, train(workdir)


def test_it_stops_with_status_3_and_a_line_that_says_what_to_change(stopped):
    workdir, result = stopped
    assert result.returncode == 3 and count_steps(workdir) == 3
    *notices, last_line = result.stderr.strip().split('\n')
    assert last_line.startswith(
        'zeroplay_jax: stopped: 2 steps in a row trained nothing in proposer'
    )
    assert 'truncated 100 % of 8 tasks' in last_line and 'config.rollout.turn_tokens' in last_line
    # At once, not only at the end.
    assert 'step 1 (proposer 1.1) trained nothing: truncated' in ' '.join(' '.join(notices).split())


def test_nothing_is_lost_and_nothing_is_called_trained(stopped):
    workdir, result = stopped
    summary = summary_of(workdir)
    assert summary['trained'] is False and summary['em_before'] == summary['em_after']
    assert summary['policies'] == {
        'proposer': {'trained': False, 'steps': 0, 'empty_steps': 2},
        'solver': {'trained': False, 'steps': 0, 'empty_steps': 0},
    }
    assert not (workdir / 'policy').exists() and 'is not exported' in result.stdout
    assert (workdir / 'checkpoints' / '3').is_dir()
    assert 'Nothing was trained in proposer, solver.' in (workdir / 'report.html').read_text()


def test_a_kill_between_the_last_checkpoint_and_the_report_changes_nothing(stopped, tmp_path):
    workdir, _ = stopped
    killed = shutil.copytree(workdir, tmp_path / 'killed')
    for name in ('summary.json', 'report.html'):
        (killed / name).unlink()
    change_record(killed, reported=None)
    assert train(killed).returncode == 3 and count_steps(killed) == 3
    assert summary_of(killed) == summary_of(workdir)
    assert (killed / 'report.html').is_file()
