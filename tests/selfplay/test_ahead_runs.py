"""Steps of the miniature that begin early: equal for every speed of the tools, and played by the weights they name."""

import itertools
import json
import time

import ahead_runs
import jax
import numpy as np
import pytest
from ahead_runs import play

LAYOUTS = {
    'slots': {},
    'pages': dict(sampler__page=32, sampler__pages=128, sampler__token_budget=16),
}
STEPS = 3


class Played:
    """An engine, its state at the start, and what its steps left."""

    def __init__(self, layout):
        self.engine = ahead_runs.make_engine(ahead_runs.make_config(**LAYOUTS[layout]))
        self.initial = jax.tree.map(np.array, self.engine.device_state())
        self.host_state = json.dumps(self.engine.host_state())
        # Steps with tokens that were sampled before the step before them had ended.
        self.early = set()
        (self.pool,) = self.engine.scheduler.pools.values()
        self.pool.on_tokens = self._note
        self.records, self.weights = self.again()

    def _note(self, identity, ids):
        upcoming = self.engine.collector._next
        if upcoming is not None and identity[0] == upcoming.step.number:
            self.early.add(identity[0])

    def again(self):
        self.engine.versions.clear()
        self.engine.restore(self.initial, json.loads(self.host_state))
        return play(self.engine, last=STEPS), ahead_runs.weights(self.engine)


@pytest.fixture(scope='module', params=['slots', pytest.param('pages', marks=pytest.mark.long)])
def played(request):
    return Played(request.param)


def versions(records):
    return [{version for _, version, *_ in record['rollouts']} for record in records]


def test_rollouts_of_two_steps_are_in_progress_together(played):
    assert versions(played.records) == [{0}, {0}, {1}]
    assert [record['metrics']['staleness'] for record in played.records] == [0, 1, 1]
    learnt = [record for record in played.records if 'importance' in record['metrics']]
    assert learnt and all(record['metrics']['importance_capped'] < 1 for record in learnt)
    assert {1, 2} <= played.early


def test_slow_tools_change_nothing(played, monkeypatch):
    roles = played.engine.context.roles.values()
    (tool,) = {id(tool): tool for role in roles for tool in role.env.tools.values()}.values()
    run, calls = tool.run, itertools.count()

    def slow(invocations):
        time.sleep(0.15 * (next(calls) % 3))
        return run(invocations)

    monkeypatch.setattr(tool, 'run', slow)
    records, weights = played.again()
    assert records == played.records
    ahead_runs.same_weights(weights, played.weights)


def test_an_interrupt_leaves_no_slot_in_use(played, monkeypatch):
    def interrupt(identity, ids):
        if identity[0] == 1:
            raise KeyboardInterrupt

    played.engine.restore(played.initial, json.loads(played.host_state))
    monkeypatch.setattr(played.pool, 'on_tokens', interrupt)
    with pytest.raises(KeyboardInterrupt):
        play(played.engine, last=STEPS)
    assert not played.pool.groups() and not played.pool.waiting_for_pages
    assert all(shard.is_idle for shard in played.pool.placement.shards)
    assert played.engine.scheduler._runner is None
    monkeypatch.undo()
    assert played.again()[0] == played.records
