"""A whole run that an alarm stops: saved, with a status of its own, and in the report; and what it measured."""

import pytest
from python_process import config_flags, run_python
from run_files import lines, summary_of

FIELDS = """
    world.train=(0,4) world.evaluation=(0,1) eval.questions=1 sampler.slots=16 micro.rows=2 proposer.batch=8
    schedule.hop_ratio=(2,1,1) checkpoint.every=100 stop_after_empty_steps=0 profile.steps=(1,)
    log.writers=()
"""
# Rounding alone reaches the level of the alarm.
PROGRAM = """
import runpy
from zeroplay_jax.run import outcome
figure = outcome.FIGURES['sampler_gap']
outcome.FIGURES['sampler_gap'] = figure._replace(levels=outcome.Levels(1e-12, 1e-11, 1))
runpy.run_module('zeroplay_jax.main', run_name='__main__')
"""


@pytest.fixture(scope='module')
def stopped(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('alarm') / 'run'
    words = ['--config=configs/drzero.py:mini', *config_flags(FIELDS), f'--workdir={workdir}']
    result = run_python('-c', PROGRAM, *words)
    assert 'Traceback' not in result.stderr, result.stderr[-2000:]
    return workdir, result


def test_it_saves_reports_and_ends_with_status_4(stopped):
    workdir, result = stopped
    assert result.returncode == 4
    last_line = result.stderr.strip().split('\n')[-1]
    assert last_line.startswith('zeroplay_jax: stopped: step 1 (proposer 1.1): sampler and trainer')
    assert ', at or above 1e-11 (stop); ' in last_line
    assert '--config.stop_at_alarms=false keeps it from stopping' in last_line
    assert 'the run stopped: there was no evaluation after training' in result.stdout
    # At once, not only at the end.
    assert 'alarm: step 1 (proposer 1.1)' in ' '.join(result.stderr.split())
    assert [record['step'] for record in lines(workdir)] == [0, 1]
    assert (workdir / 'checkpoints' / '2').is_dir()
    summary = summary_of(workdir)
    assert summary['stopped_by'] == 'sampler_gap' and summary['stopped'] in result.stderr
    assert 'sampler and trainer differ' in summary['warning']
    (record,) = lines(workdir, 'alarms.jsonl')
    assert (record['step'], record['name'], record['level']) == (1, 'sampler_gap', 'stop')
    assert 'Alarm sampler_gap (stopped the run, step 1)' in (workdir / 'report.html').read_text()


def test_its_metrics_have_the_time_by_cause_and_the_watched_figures(stopped):
    workdir, _ = stopped
    _, first = lines(workdir)
    causes = {'seconds/rollout', 'seconds/tools', 'seconds/update', 'seconds/save'}
    watched = {
        f'proposer/{name}' for name in ('sampler_gap', 'nonfinite_updates', 'nonfinite_weights')
    }
    assert causes | watched <= first.keys()
    # A CPU has no known peak and reports no memory, and a single process exchanges nothing.
    absent = ('mfu', 'memory/', 'seconds/exchange', 'evictions')
    assert not [name for name in first if name.startswith(absent)]
    assert 0 < first['proposer/sampler_gap'] < 1e-5


def test_the_chosen_step_was_traced(stopped):
    workdir, _ = stopped
    assert [path.name for path in (workdir / 'profile').iterdir()] == ['step_1']
    assert list((workdir / 'profile').rglob('*.xplane.pb'))
