"""Steps of the miniature that begin early: equal for every speed of the tools, and played by the weights they name."""

import itertools
import json
import time

import ahead_runs
import jax
import numpy as np
import pytest
from ahead_runs import play

PAGES = dict(sampler__page=32, sampler__pages=128, sampler__token_budget=16)
SETTINGS = {'slots': {}, 'pages': PAGES}
STEPS = 3


class Played:
    """An engine, its state at the start, and what its steps left."""

    def __init__(self, name):
        self.engine = ahead_runs.make_engine(ahead_runs.make_config(**SETTINGS[name]))
        self.initial = jax.tree.map(np.array, self.engine.device_state())
        self.host_state = json.dumps(self.engine.host_state())
        # Steps with tokens that were sampled before the step before them had ended.
        self.early = set()
        (self.pool,) = self.engine.scheduler.pools.values()
        self.pool.on_tokens = self._note
        self.records, self.weights = self.again()

    def _note(self, identity, ids):
        upcoming = self.engine.collector.ahead
        if upcoming is not None and identity[0] == upcoming.episodes.number:
            self.early.add(identity[0])

    def again(self):
        self.restore(self.initial, self.host_state)
        return play(self.engine, last=STEPS), ahead_runs.weights(self.engine)

    def restore(self, device_state, host_state):
        self.engine.restore(device_state, json.loads(host_state))


@pytest.fixture(scope='module', params=['pages', pytest.param('slots', marks=pytest.mark.long)])
def played(request):
    steps = Played(request.param)
    yield steps
    steps.engine.close()


def test_rollouts_of_two_steps_are_in_progress_together(played):
    for number, record in enumerate(played.records):
        # One version older than the newest, but for the first step.
        age = min(number, 1)
        versions = {version for _, version, *_ in record['rollouts']}
        assert versions == {number - age} and record['metrics']['staleness'] == age
    learnt = [record for record in played.records if 'solver/importance' in record['metrics']]
    assert learnt and all(record['metrics']['solver/importance_capped'] < 1 for record in learnt)
    assert {1, 2} <= played.early


def make_tools_slow(played, monkeypatch):
    roles = played.engine.context.roles.values()
    (tool,) = {id(tool): tool for role in roles for tool in role.env.tools.values()}.values()
    run, calls = tool.run, itertools.count()

    def slow(invocations):
        time.sleep(0.15 * (next(calls) % 3))
        return run(invocations)

    monkeypatch.setattr(tool, 'run', slow)


def test_an_interrupt_leaves_no_slot_in_use_and_slow_tools_change_nothing(played, monkeypatch):
    def interrupt(identity, ids):
        if identity[0] == 1:
            raise KeyboardInterrupt

    played.engine.restore(played.initial, json.loads(played.host_state))
    monkeypatch.setattr(played.pool, 'on_tokens', interrupt)
    with pytest.raises(KeyboardInterrupt):
        play(played.engine, last=STEPS)
    assert not played.pool.unfinished()
    assert all(shard.is_idle for shard in played.pool.placement.shards)
    assert played.engine.scheduler._runner is None
    monkeypatch.undo()
    make_tools_slow(played, monkeypatch)
    records, weights = played.again()
    assert records == played.records
    ahead_runs.same_weights(weights, played.weights)
