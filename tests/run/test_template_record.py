"""The day in prompts is that of the start of the run, which its record of inputs keeps."""

import datetime

import pytest

from zeroplay_jax.configs import drzero
from zeroplay_jax.run import run_folder
from zeroplay_jax.runtime import record


def write(workdir, template):
    workdir.mkdir(exist_ok=True)
    config = drzero.get_config('mini')
    start = dict(index='', roles={}, weights={}, policies={}, is_resumed=False)
    inputs = {'policy.path': {}}
    run_folder.begin(workdir, config, inputs, template=template, **start)


@pytest.mark.fault('third-4', 'a run resumed on another day, and one that continues another run')
def test_the_first_recorded_day_counts(tmp_path):
    run, other = tmp_path / 'run', tmp_path / 'other'
    write(other, {'date': '2020-02-29', 'role of results': 'user'})
    assert run_folder.start_date([run, other]) == '2020-02-29'
    write(run, {'date': '2021-01-01'})
    assert run_folder.start_date([run, other]) == '2021-01-01'
    write(run, {})
    assert record.read(run).inputs == {'policy.path': {}}
    assert run_folder.start_date([run]) == datetime.date.today().isoformat()
