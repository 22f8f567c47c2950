"""How the loop over the steps ends: its log is closed, and weights that are not finite are not saved."""

import contextlib
from unittest import mock

import pytest
from run_files import count_steps

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
    """A function that runs the loop on these results of its steps; `checkpoints` and `upload` only pretend."""
    checkpoints = mock.Mock(saved_on_error=contextlib.nullcontext)
    close = mock.patch.object(
        MetricsWriter, 'close', autospec=True, side_effect=MetricsWriter.close
    )
    monkeypatch.setattr(saving, 'Checkpointer', lambda *_, **__: checkpoints)
    monkeypatch.setattr(hooks, 'trajectory_records', lambda *_: [])
    monkeypatch.setattr(loop.ending, '_export', lambda *_: None)
    config = quickstart.get_config()
    config.progress = False
    config.checkpoint.every = 2
    config.log.writers = ()
    engine = mock.Mock(config=config, task_log=[], plans={}, learners={})
    engine.learning = mock.Mock(notices=[], stuck_policies=lambda _: [])
    engine.recipe.state.return_value = None
    engine.host_state.return_value = {}
    context, cache = mock.Mock(), mock.Mock()
    context.rollouts.hosts = Hosts()
    cache.take_metrics.return_value = {}

    def run(*outcomes):
        ends = [
            end if isinstance(end, Exception) else EndedStep(step, *end)
            for step, end in zip(STEPS, outcomes)
        ]
        monkeypatch.setattr(loop, 'run_step', mock.Mock(side_effect=ends))
        state, place = RunState({}), Place(tmp_path, after_step=run.upload)
        saver = saving.Saver(Hosts(), place, config, engine)
        saver.begin(state)
        loop._train(place, context, engine, saver, cache, STEPS, state)

    run.upload, run.checkpoints = mock.Mock(), checkpoints
    with close as run.close:
        yield run


def saved(train):
    return [call.args[0] for call in train.checkpoints.save.call_args_list]


@pytest.mark.parametrize('name', ['nonfinite_weights', 'proposer/nonfinite_weights'])
def test_weights_that_are_not_finite_stop_it_at_once_and_are_not_saved(train, name, tmp_path):
    good, bad = ({name: 0.0}, []), ({name: 1.0}, [])
    with pytest.raises(TrainingStopped, match=r'step 3 \(solver .*resumes at step 2\.') as caught:
        train(good, good, good, bad)
    assert caught.value.status == 4
    # Step 3 is the last one, which is always saved otherwise.
    assert saved(train) == [2] and train.checkpoints.wait.called
    assert train.close.call_count == 1
    assert count_steps(tmp_path) == 4


def test_the_log_is_closed_when_the_run_is_asked_to_end(train):
    with pytest.raises(Preempted):
        train(({}, []), Preempted())
    assert saved(train) == [1] and train.close.call_count == 1


@pytest.mark.parametrize('number', [0, 1, 3])
def test_a_step_is_saved_before_a_run_ends_because_nothing_can_be_uploaded(train, number):
    train.upload.side_effect = [None] * number + [UserError('503; everything is saved')]
    with pytest.raises(UserError, match='503'):
        train(*[({}, [])] * 4)
    # Step 0 is not due.
    assert saved(train)[-1] == number + 1 and train.checkpoints.wait.called


def test_policies_of_iterations_that_are_run_again_are_removed(tmp_path):
    phases = [Phase('solver', 2, ('solver',), iteration) for iteration in range(3)]
    # An iteration ends with the evaluation after it.
    steps = with_evaluations(all_steps(phases), 'solver', 2)
    for cursor, kept in ((3, []), (4, ['iteration1']), (9, ['iteration1', 'iteration2'])):
        for name in ('policy', 'iteration1', 'iteration2', 'iteration3'):
            (tmp_path / name / 'solver').mkdir(parents=True, exist_ok=True)
        run_folder.remove_exports(tmp_path, steps[cursor:])
        assert sorted(path.name for path in tmp_path.iterdir()) == kept
