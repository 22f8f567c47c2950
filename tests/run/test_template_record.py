"""The day in prompts is that of the start of the run, which its record of inputs keeps."""

import datetime

from run_records import begin_run

from zeroplay_jax.configs import drzero
from zeroplay_jax.run import run_folder


def test_the_first_recorded_day_counts(tmp_path):
    config = drzero.get_config('mini')
    run, other = tmp_path / 'run', tmp_path / 'other'
    begin_run(other, config, template={'date': '2020-02-29', 'role of results': 'user'})
    begin_run(run, config)
    assert run_folder.start_date([run, other]) == '2020-02-29'
    assert run_folder.start_date([run]) == datetime.date.today().isoformat()
    begin_run(run, config, template={'date': '2021-01-01'})
    assert run_folder.start_date([run, other]) == '2021-01-01'
