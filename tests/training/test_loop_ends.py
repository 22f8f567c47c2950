"""How the loop over the steps ends: its log is closed, and weights that are not finite are not saved."""

import contextlib
import types
from unittest import mock

import pytest

from zeroplay_jax.configs import quickstart
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.log import MetricsWriter
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.training import loop
from zeroplay_jax.training.outcome import Alarms
from zeroplay_jax.training.run_folder import Place
from zeroplay_jax.types import Preempted, TrainingStopped, UserError

STEPS = [Step(Phase('solver', 4, ('solver',)), index, index) for index in range(4)]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """(function that runs the loop on these results of its steps, the pretended checkpoints, the closed logs)."""
    closed = []
    close = MetricsWriter.close

    def close_and_count(self):
        closed.append(self)
        close(self)

    monkeypatch.setattr(MetricsWriter, 'close', close_and_count)
    monkeypatch.setattr(loop, 'trajectory_records', lambda *_: [])
    config = quickstart.get_config()
    config.progress = False
    config.checkpoint.every = 2
    config.log.writers = ()
    checkpoints = mock.Mock()
    checkpoints.saved_on_interrupt = contextlib.nullcontext
    alarms = Alarms(config.alarms).state()
    state = {'identity': {}, 'cursor': 0, 'seconds': 0.0, 'alarms': alarms, 'stopped': None}

    def run(*outcomes):
        engine = mock.Mock(task_log=[], learners={})
        engine.learning.notices = []
        engine.recipe.rollouts_per_step.return_value = 1
        engine.learning.stuck_policies.return_value = []
        monkeypatch.setattr(loop, '_run_step', mock.Mock(side_effect=outcomes))
        context = types.SimpleNamespace(rollouts=types.SimpleNamespace(hosts=Hosts()))
        cache = mock.Mock()
        cache.take_metrics.return_value = {}
        place = Place(Hosts(), tmp_path)
        loop._train(config, place, context, engine, checkpoints, cache, STEPS, state)

    return run, checkpoints, closed


def saved(checkpoints):
    return [call.args[0] for call in checkpoints.save.call_args_list]


@pytest.mark.parametrize('name', ['nonfinite_weights', 'proposer/nonfinite_weights'])
def test_weights_that_are_not_finite_stop_it_at_once_and_are_not_saved(train, name, tmp_path):
    run, checkpoints, closed = train
    good, bad = ({name: 0.0}, []), ({name: 1.0}, [])
    with pytest.raises(TrainingStopped, match=r'step 3 \(solver .*resumes at step 2\.') as caught:
        run(good, good, good, bad)
    assert caught.value.status == 4
    # Step 3 is the last one, which is always saved otherwise.
    assert saved(checkpoints) == [2] and checkpoints.wait.called
    assert len(closed) == 1
    assert len((tmp_path / 'metrics.jsonl').read_text().splitlines()) == 4


def test_the_log_is_closed_when_the_run_is_asked_to_end(train):
    run, checkpoints, closed = train
    with pytest.raises(Preempted):
        run(({}, []), Preempted())
    assert saved(checkpoints) == [1] and len(closed) == 1


def test_a_log_that_cannot_be_opened_ends_all_processes(monkeypatch, tmp_path):
    config = quickstart.get_config()
    hosts = Hosts()
    calls = []
    monkeypatch.setattr(hosts, 'run_on_all', calls.append)
    monkeypatch.setattr(loop, 'MetricsWriter', mock.Mock(side_effect=UserError('no key')))
    state = {'cursor': 0, loop.STATE_FIELD: {}}
    assert loop._open_log(hosts, config, tmp_path, None, state) is None
    with pytest.raises(UserError, match='no key'):
        calls[0]()
