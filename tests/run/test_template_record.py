"""The day in prompts is that of the start of the run, which its record of inputs keeps; evaluations name theirs."""

import datetime

import pytest

from zeroplay_jax.configs import drzero
from zeroplay_jax.evaluation.answering import result_settings
from zeroplay_jax.evaluation.results import Results, SetResults
from zeroplay_jax.run import run_folder
from zeroplay_jax.runtime import record
from zeroplay_jax.types import UserError


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


@pytest.mark.fault('third-4', 'compare: evaluations of two days')
def test_evaluations_of_two_days_are_not_compared():
    def result(template):
        settings = result_settings(
            drzero.get_config('mini'), 'p', 'r', template, metric='em', samples=1, limit=0, judge=''
        )
        return Results(settings, {'nq': SetResults('x', [], [])})

    days = [result({'date': day}) for day in ('2026-11-25', '2026-11-26')]
    days[0].differences(days[0])
    assert 'template' not in result({}).settings
    with pytest.raises(UserError, match="template: {'date': '2026-11-25'} and"):
        days[0].differences(days[1])
