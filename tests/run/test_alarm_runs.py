"""A whole run that an alarm stops: saved, with a status of its own, and in the report."""

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


def test_it_saves_reports_and_ends_with_status_4(tmp_path):
    workdir = tmp_path / 'run'
    words = ['--config=configs/drzero.py:mini', *config_flags(FIELDS), f'--workdir={workdir}']
    result = run_python('-c', PROGRAM, *words)
    assert 'Traceback' not in result.stderr and result.returncode == 4, result.stderr[-2000:]
    assert 'zeroplay_jax: stopped: step 1 (proposer 1.1): sampler and trainer' in result.stderr
    assert (workdir / 'checkpoints' / '2').is_dir()
    assert summary_of(workdir)['stopped_by'] == 'sampler_gap'
    (record,) = lines(workdir, 'alarms.jsonl')
    assert (record['step'], record['name'], record['level']) == (1, 'sampler_gap', 'stop')
    assert 'Alarm sampler_gap (stopped the run, step 1)' in (workdir / 'report.html').read_text()
    # The step that the config chooses was traced.
    assert list((workdir / 'profile' / 'step_1').rglob('*.xplane.pb'))
