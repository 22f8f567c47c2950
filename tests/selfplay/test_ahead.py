"""Rollouts of the next step begin while this one's last are in progress: what plays what is counted, not timed.

Episodes sample nothing here; the run of the league in run_library.py plays with real ones.
"""

import asyncio
import copy
import dataclasses
import pathlib

import pytest
from refused_calls import check_table
from test_engine import (  # noqa: F401
    Game,
    assert_equal_arrays,
    make,
    policy,
    snapshot,
)

from zeroplay_jax.runtime import signals
from zeroplay_jax.selfplay.schedule import Phase, all_steps, evaluation_step
from zeroplay_jax.types import Preempted

PAYS = lambda item: (1, 0) if item % 3 else (0, 0)
FILTERED = dict(filter_groups=True, batch=3, fill_rounds=3, surplus='drop')


class Versions(Game):
    """Rows carry the version that their step names."""

    waits = ()

    async def episode(self, context, step, task):
        if task.identity in self.waits:
            await asyncio.sleep(0.2)
        outcome = await super().episode(context, step, task)
        version = context.episodes.versions['solver']
        for row in outcome.rows:
            row.trajectory = dataclasses.replace(row.trajectory, version=version)
        return outcome


@pytest.fixture(scope='module')
def game(policy):  # noqa: F811
    """Returns (engine, game, steps) at the start; engines are used again, because each compiles its programs."""
    engines = {}

    def made(ahead=1, phases=None, name='', **options):
        key = (ahead, name, *options.items())
        if key not in engines:
            engine, game = make(policy, PAYS, ahead, **(FILTERED | options))
            engines[key] = (engine, game, snapshot(engine))
        engine, game, state = engines[key]
        engine.restore(*copy.deepcopy(state))
        game.__class__ = Versions
        engine.collector.context = engine.context
        for attribute in ('phases', 'episode', 'waits'):
            vars(game).pop(attribute, None)
        if phases:
            game.phases = lambda: phases
        return engine, game, all_steps(game.phases())

    return made


def played_steps(engine, schedule, first=0, last=None):
    """Plays steps of a schedule, whose next one may begin early; yields their (metrics, rows)."""
    followed = zip(schedule, [*schedule[1:], None])
    for step, next_step in list(followed)[first:last]:
        yield engine.run_step(step, lambda: None, next_step)


def play(engine, schedule, first=0, last=None):
    """(versions, items, log) of every step of a schedule."""
    records = []
    for metrics, rows in played_steps(engine, schedule, first, last):
        versions = {row.trajectory.version for row in rows}
        items = [row.info.details['item'] for row in rows]
        records.append((versions, items, engine.task_log, metrics.get('staleness')))
    return records


def is_idle(engine):
    return not engine.scheduler._episodes and engine.scheduler._runner is None


def columns(records):
    return [list(column) for column in zip(*records)]


def test_which_weights_play_what(game):
    def played(phases=None, **options):
        """Per step: versions of the weights, staleness, items in order."""
        engine, _, schedule = game(phases=phases, **options)
        lines = []
        for versions, items, _, staleness in play(engine, schedule):
            lines.append(f'versions {versions}, staleness {staleness}, items {items[::2]}')
        assert is_idle(engine)
        weights = engine.weights
        return '\n'.join([*lines, f'kept {sorted(weights.views)}, {sorted(weights.params)}'])

    check_table(pathlib.Path(__file__).parent / 'ahead.txt', {'played': played, 'Phase': Phase})


def test_an_evaluation_is_a_barrier(game):
    engine, _, schedule = game()
    schedule.insert(2, evaluation_step(0))
    engine.run_step(schedule[0], lambda: None, schedule[1])
    assert engine.collector.has_begun(schedule[1])
    engine.run_step(schedule[1], lambda: None, schedule[2])
    assert engine.collector.ahead is None
    assert columns(play(engine, schedule, 3))[0] == [{2}, {2}]


def preempt(*_):
    raise Preempted('stopped by SIGTERM')


@pytest.mark.parametrize(
    ('ahead', 'surplus', 'last'), [(1, 'drop', 1), (1, 'drop', 2), (0, 'carry', 1), (0, 'carry', 2)]
)
def test_a_preempted_step_leaves_the_state_before_it(game, monkeypatch, ahead, surplus, last):
    """What is saved then is what a checkpoint before that step holds, and the step can be played again."""
    phases = [Phase('solver', 2, ('solver',)), Phase('solver', 2, ('solver',), iteration=1)]
    if ahead:
        phases = None
    options = dict(ahead=ahead, surplus=surplus, phases=phases)
    engine, _, schedule = game(name=surplus, **options)
    play(engine, schedule, 0, last)
    kept, saved = snapshot(engine)
    assert bool(saved['carried_over'].get('solver')) == (surplus == 'carry')
    with monkeypatch.context() as patch:
        patch.setattr(signals, 'raise_if_requested', preempt)
        with pytest.raises(Preempted):
            play(engine, schedule, last)
    arrays, dropped = snapshot(engine)
    if surplus == 'carry' and last == 2:
        # The position in the datasets is reset at the first step of a phase in any case.
        assert dropped['drawn'] == [0, 0]
        dropped['drawn'] = saved['drawn']
    assert dropped == saved
    assert_equal_arrays(arrays, kept)
    records = play(engine, schedule, last)
    whole, *_ = game(name=f'whole {surplus}', **options)
    assert play(whole, schedule)[last:] == records
    assert_equal_arrays(engine.device_state(), whole.device_state())


def test_a_step_without_tasks_leaves_nothing_behind(game, monkeypatch):
    engine, played, schedule = game()
    draw = played.tasks
    monkeypatch.setattr(
        played, 'tasks', lambda step, *others: draw(step, *others) if step.number == 2 else []
    )
    assert columns(play(engine, schedule[:3]))[0] == [set(), set(), {1}]
    assert is_idle(engine)
