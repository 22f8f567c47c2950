"""How the loop over the steps ends: its log is closed, and weights that are not finite are not saved."""

import contextlib
import types
from unittest import mock

import pytest

from zeroplay_jax.configs import quickstart
from zeroplay_jax.run import hooks, loop, run_folder
from zeroplay_jax.run import saver as saving
from zeroplay_jax.run.outcome import EndedStep, RunState
from zeroplay_jax.run.run_folder import Place
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.log import MetricsWriter
from zeroplay_jax.selfplay.schedule import Phase, Step, all_steps, with_evaluations
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
    monkeypatch.setattr(hooks, 'trajectory_records', lambda *_: [])
    config = quickstart.get_config()
    config.progress = False
    config.checkpoint.update(every=2, iterations=True)
    monkeypatch.setattr(loop.ending, '_export', lambda *_: None)
    config.log.writers = ()
    checkpoints = mock.Mock()
    checkpoints.saved_on_error = contextlib.nullcontext
    monkeypatch.setattr(saving, 'Checkpointer', lambda *_, **__: checkpoints)
    upload = mock.Mock()
    state = RunState({})

    def run(*outcomes, steps=STEPS):
        engine = mock.Mock(config=config, task_log=[], plans={}, learners={})
        engine.learning.notices = []
        engine.recipe.state.return_value = None
        engine.learning.stuck_policies.return_value = []
        ends = [
            end if isinstance(end, Exception) else EndedStep(step, *end)
            for step, end in zip(steps, outcomes)
        ]
        monkeypatch.setattr(loop, 'run_step', mock.Mock(side_effect=ends))
        context = types.SimpleNamespace(rollouts=types.SimpleNamespace(hosts=Hosts()))
        cache = mock.Mock()
        cache.take_metrics.return_value = {}
        engine.host_state.return_value = {}
        place = Place(tmp_path, after_step=upload)
        saver = saving.Saver(Hosts(), place, config, engine)
        saver.begin(state)
        loop._train(place, context, engine, saver, cache, steps, state)

    run.upload = upload
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


@pytest.mark.parametrize('number', [0, 1, 3])
def test_a_step_is_saved_before_a_run_ends_because_nothing_can_be_uploaded(train, number):
    run, checkpoints, _ = train
    run.upload.side_effect = [None] * number + [UserError('503; everything is saved')]
    with pytest.raises(UserError, match='503'):
        run(*[({}, [])] * 4)
    # Step 0 is not due.
    assert saved(checkpoints)[-1] == number + 1 and checkpoints.wait.called


def test_policies_of_iterations_that_are_run_again_are_removed(tmp_path):
    phases = [Phase('solver', 2, ('solver',), iteration) for iteration in range(3)]
    steps = with_evaluations(all_steps(phases), 'solver', 2)
    names = {'policy', 'iteration1', 'iteration2', 'iteration3'}
    kept = []
    for cursor in (3, 4, 5, 9):
        for name in names:
            (tmp_path / name / 'solver').mkdir(parents=True, exist_ok=True)
        run_folder.remove_exports(tmp_path, steps[cursor:])
        kept.append(sorted(path.name for path in tmp_path.iterdir()))
    # An iteration ends with the evaluation after it.
    assert steps[3].phase.name == 'evaluation'
    assert kept == [[], ['iteration1'], ['iteration1'], ['iteration1', 'iteration2']]
