"""The engine: batches filled in order of issue, surplus that waits for the next step, a state that survives."""

import asyncio
import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny

from zeroplay_jax.configs import common
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import hf, sharding
from zeroplay_jax.rollout.sampler import Sampler, SamplerConfig
from zeroplay_jax.rollout.scheduler import Lane, Scheduler
from zeroplay_jax.selfplay import rows as row_tools
from zeroplay_jax.selfplay.engine import Engine, Phase, Step
from zeroplay_jax.selfplay.roles import Table
from zeroplay_jax.types import POLICY, PROMPT, Outcome, Row, Task, Trajectory, Turn


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    folder = tiny.make_folder(tmp_path_factory.mktemp('engine') / 'policy', letters=tiny.LETTERS)
    model = hf.read_config(folder)
    return model, hf.load(folder, model)


def trajectory(identity, version=0, n=8):
    rng = np.random.default_rng(abs(hash(identity)) % 2**31)
    source = np.array([PROMPT] * 3 + [POLICY] * (n - 3), np.int8)
    logp = np.where(source == POLICY, -rng.uniform(1, 3, n), 0).astype(np.float32)
    return Trajectory(
        rng.integers(0, 20, n).astype(np.int32),
        source,
        logp,
        (),
        'eos',
        'solver',
        version,
        identity,
    )


class Game:
    """Items 0, 1, 2, … of two rollouts each; `pays(item)` says what they earn."""

    def __init__(self, config, pays):
        self.config, self.pays, self.draws = config, pays, []

    def phases(self):
        return [Phase('solver', 4, ('solver',))]

    def tasks(self, step, pool, draw):
        self.draws.append(draw)
        c = self.config.solver
        if draw.round and not (c.filter_groups and draw.missing and draw.round < c.fill_rounds):
            return []
        count = draw.missing if c.filter_groups and not draw.round else c.batch
        return [Task((step.number, draw.step + i), {'item': draw.phase + i}) for i in range(count)]

    async def episode(self, table, step, task):
        item = task.payload['item']
        await asyncio.sleep(0.001 * (item % 3))  # the later may end first
        rows = [
            Row(
                'solver',
                trajectory((*task.identity, i), self.version),
                float(r),
                1000 * step.number + task.identity[1],
            )
            for i, r in enumerate(self.pays(item))
        ]
        for row in rows:
            row.info['item'] = item
        return Outcome(rows)

    version = 0


def make(policy, pays, **changes):
    model, params = policy
    config = common.get_config()
    config.solver.update(dict(batch=2, samples=2, learning_rate=1e-3) | changes)
    config.micro.update(rows=2, tokens=32)
    sampler = Sampler(model, SamplerConfig(2, 32, 8, 2, 4, 2, 8), sharding.make_mesh())
    table = Table(Scheduler({'solver': Lane(sampler, 0)}), {}, 'mini')
    learner = Learner(model, sharding.make_mesh(), {'solver': config.solver}, params, (2, 32))
    game = Game(config, pays)
    return Engine(config, game, table, {'solver': learner}, {'solver': 'solver'}), game


def play(engine, index):
    engine.recipe.version = engine.versions['solver']
    return engine.play(Step(engine.recipe.phases()[0], index, index), lambda: None)


MIXED = lambda item: (1, 0) if item % 2 else (0, 0)  # every second item has something to teach


def trained(engine, monkeypatch):
    """Items that reach the packing, per update."""
    seen, pack = [], engine._pack
    monkeypatch.setattr(
        engine,
        '_pack',
        lambda role, rows, d: seen.append([r.info['item'] for r in rows]) or pack(role, rows, d),
    )
    return seen


def test_without_the_filter_a_step_asks_once(policy, monkeypatch):
    engine, game = make(policy, MIXED)
    seen = trained(engine, monkeypatch)
    play(engine, 0)
    assert seen == [[0, 0, 1, 1]] and engine.drawn == 2


def test_the_filter_fills_in_order_of_issue_and_carries_what_is_left(policy, monkeypatch):
    engine, game = make(policy, MIXED, filter_groups=True, batch=3, fill_rounds=4)
    seen = trained(engine, monkeypatch)
    values, _ = play(engine, 0)  # 0 1 2 | 3 4 5: odd ones are informative, three in all
    assert seen == [[1, 1, 3, 3, 5, 5]] and values['filter/full'] == 1 and not engine.surplus
    values, _ = play(engine, 1)  # 6 7 8 | 9 10 11: 7 9 11
    values, _ = play(engine, 2)
    assert [set(s) for s in seen] == [{1, 3, 5}, {7, 9, 11}, {13, 15, 17}]
    assert [d.phase for d in game.draws if d.round == 0] == [0, 6, 12]


def test_surplus_waits_for_the_next_step_or_is_let_go(policy, monkeypatch):
    pays = lambda item: (1, 0) if item else (0, 0)  # one dull item, then two more than needed
    for kind, second in (('carry', [3, 3, 4, 4, 5, 5]), ('drop', [6, 6, 7, 7, 8, 8])):
        engine, game = make(policy, pays, filter_groups=True, batch=3, surplus=kind)
        seen = trained(engine, monkeypatch)
        first, _ = play(
            engine, 0
        )  # 0 1 2 | 3 4 5: 1 2 3 are trained, 4 5 left over, and one more is asked for
        assert seen[0] == [1, 1, 2, 2, 3, 3] and first['filter/surplus'] == 2
        told = [(fate['task'][1], fate['rewards'], fate['drop']) for fate in engine.fates]
        gone = [(4, [1, 0], 'surplus'), (5, [1, 0], 'surplus')] if kind == 'drop' else []
        assert told == [(0, [0, 0], 'uninformative'), *gone]
        values, _ = play(engine, 1)
        assert seen[1] == ([4, 4, 5, 5, 6, 6] if kind == 'carry' else second)
        assert values['filter/age'] == (pytest.approx(4 / 6) if kind == 'carry' else 0)


def test_what_waited_for_a_phase_that_ended_is_told(policy):
    engine, _ = make(
        policy,
        lambda item: (1, 0) if item else (0, 0),
        filter_groups=True,
        batch=3,
        surplus='carry',
    )
    play(engine, 0)
    assert [fate['drop'] for fate in engine.fates] == ['uninformative']
    play(engine, 0)  # a phase begins
    assert [(fate['task'], fate['drop']) for fate in engine.fates if fate['drop'] == 'surplus'] == [
        ([0, 4], 'surplus'),
        ([0, 5], 'surplus'),
    ]


def test_a_batch_that_cannot_be_filled_stays_short(policy, monkeypatch):
    engine, game = make(policy, lambda item: (1, 1), filter_groups=True, fill_rounds=3)
    before = engine.learners['solver'].params['embedding'].copy()
    values, _ = play(engine, 0)
    assert engine.drawn == 6 and values['filter/full'] == 0 and values['skipped_updates'] == 1
    np.testing.assert_array_equal(before, engine.learners['solver'].params['embedding'])


def test_the_state_holds_surplus_and_place(policy):
    pays = lambda item: (1, 0) if item else (0, 0)
    options = dict(filter_groups=True, batch=3)
    whole, game = make(policy, pays, **options)
    play(whole, 0)
    saved = json.loads(json.dumps(whole.loop()))
    kept = jax.tree.map(np.array, whole.states())
    play(whole, 1)
    again, _ = make(policy, pays, **options)
    again.restore(kept, saved)
    assert again.drawn == 6 and [r.info['item'] for r in again.surplus['solver']] == [4, 4, 5, 5]
    play(again, 1)
    assert again.loop() == whole.loop()
    jax.tree.map(np.testing.assert_array_equal, again.states(), whole.states())


def test_an_outcome_survives_the_way_between_processes():
    turn = Turn(
        't', ('q', 'r'), (({'id': 1, 'title': 'a', 'text': 'b', 'score': 0.1},), ()), None, False
    )
    floats = np.array([0.1, -1 / 3], np.float32)
    t = Trajectory(
        np.arange(2, dtype=np.int32),
        np.array([0, 1], np.int8),
        floats,
        (turn,),
        'eos',
        'w',
        3,
        (1, 2),
    )
    t = dataclasses.replace(t, earlier=(dataclasses.replace(t, turns=(), finish='continued'),))
    row = Row(
        'solver', t, 1 / 3, 7, {'a': 0.1}, 'd', {'x': [1, None]}, 0.5, np.arange(3, dtype=np.int32)
    )
    sent = json.loads(
        json.dumps(row_tools.outcome_state(Outcome([row], [{'question': 'é'}], 'why')))
    )
    got = row_tools.outcome_restore(sent)
    (back,) = got.rows
    assert (got.questions, got.drop) == ([{'question': 'é'}], 'why')
    for name in ('tokens', 'source', 'logp'):
        a, b = getattr(back.trajectory, name), getattr(t, name)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    assert [part.finish for part in back.trajectory.segments] == ['continued', 'eos']
    assert back.trajectory.earlier[0].logp.tobytes() == floats.tobytes()
    assert back.trajectory.turns == (turn,) and back.trajectory.identity == (1, 2)
    assert back.teacher_prompt.dtype == np.int32 and back.teacher_prompt.tolist() == [0, 1, 2]
    plain = lambda r: {
        k: v for k, v in vars(r).items() if k not in ('trajectory', 'teacher_prompt')
    }
    assert plain(back) == plain(row)


def test_every_context_of_a_rollout_is_a_row_with_its_advantage():
    whole = trajectory((0, 1, 0))
    cut = dataclasses.replace(
        whole, earlier=(trajectory((0, 1, 0), n=5), trajectory((0, 1, 0), n=6))
    )
    rows = [Row('solver', whole, 1.0, 0, advantage=0.5), Row('solver', cut, 0.0, 0, advantage=-0.5)]
    found = row_tools.segments(rows)
    assert [len(r.trajectory.tokens) for r in found] == [8, 5, 6, 8]
    assert [r.advantage for r in found] == [0.5, -0.5, -0.5, -0.5]
    assert cut.policy_tokens == sum(int((r.trajectory.source == POLICY).sum()) for r in found[1:])


@pytest.mark.parametrize('offload', [False, True])
def test_slots_and_other_weights_leave_the_devices_during_an_update(policy, monkeypatch, offload):
    engine, _ = make(policy, MIXED)
    engine.config.offload = offload
    model, params = policy
    lanes = engine.scheduler.lanes
    lanes['other'] = Lane(Sampler(model, lanes['solver'].sampler.config, sharding.make_mesh()), 0)
    engine.scheduler.publish('other', params, 0)
    prompt = [(0, np.arange(3, dtype=np.int32), 0, 8, 0.0, np.zeros(2, np.uint32))]
    lanes['other'].sampler.put(prompt)
    lanes['other'].sampler.rewind([0], [1])
    seen, update = [], engine.learners['solver'].update

    def look(*args):
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(lanes['other'].params)}
        seen.append((lanes['other'].sampler.state is None, bool(lanes['solver'].params), kinds))
        return update(*args)

    monkeypatch.setattr(engine.learners['solver'], 'update', look)
    play(engine, 0)
    assert seen == [(True, False, {'pinned_host'}) if offload else (False, True, {'device'})]
    assert {x.sharding.memory_kind for x in jax.tree.leaves(lanes['other'].params)} == {'device'}
    lanes['other'].sampler.put(prompt)
    assert int(lanes['other'].sampler.state.length[0]) == 3


def test_a_rollout_that_a_limit_ended_is_learnt_from_or_not(policy, monkeypatch):
    for kind, learnt in (('keep', 8), ('drop', 6)):
        engine, game = make(policy, lambda item: (1, 0), batch=4)
        engine.config.rollout.truncated = kind
        whole = game.episode

        async def one_cut(table, step, task, whole=whole):
            outcome = await whole(table, step, task)
            if task.payload['item'] == 2:
                for row in outcome.rows:
                    row.trajectory = dataclasses.replace(row.trajectory, finish='turn_tokens')
            return outcome

        monkeypatch.setattr(game, 'episode', one_cut)
        values, rows = play(engine, 0)
        assert sum(row.drop is None for row in rows) == learnt
        assert values.get('row_drop/truncated', 0) == (8 - learnt) / 8
        assert [fate['drop'] for fate in engine.fates] == ['truncated'] * (8 - learnt)


def test_a_group_that_loses_what_it_could_teach_does_not_fill_the_batch(policy, monkeypatch):
    engine, game = make(policy, lambda item: (1, 0), filter_groups=True, batch=2, fill_rounds=3)
    engine.config.rollout.truncated = 'drop'
    whole = game.episode

    async def first_cut(table, step, task):
        outcome = await whole(table, step, task)
        if task.payload['item'] == 0:
            row = outcome.rows[1]
            row.trajectory = dataclasses.replace(row.trajectory, finish='context')
        return outcome

    monkeypatch.setattr(game, 'episode', first_cut)
    seen = trained(engine, monkeypatch)
    values, _ = play(engine, 0)
    assert seen == [[1, 1, 2, 2]] and values['filter/full'] == 1


def test_a_reward_that_is_not_finite_is_told_with_its_rollout(policy):
    engine, _ = make(policy, lambda item: (float('nan'), 0.0) if item == 1 else (1, 0), batch=3)
    values, rows = play(engine, 0)
    assert [row.drop for row in rows] == [None, None, 'nonfinite_reward', None, None, None]
    assert values['row_drop/nonfinite_reward'] == pytest.approx(1 / 6) and np.isfinite(
        values['gradient_norm']
    )
    (fate,) = engine.fates
    assert fate['drop'] == 'nonfinite_reward' and fate['rollout'] == list(
        rows[2].trajectory.identity
    )


def test_a_batch_without_a_finite_gradient_is_skipped_and_named(policy, monkeypatch):
    engine, _ = make(policy, lambda item: (1, 0), batch=2)
    learner = engine.learners['solver']
    before = jax.tree.map(np.asarray, learner.params)
    pack = engine._pack

    def poisoned(role, rows, distill):
        batches = pack(role, rows, distill)
        return [
            dataclasses.replace(b, advantage=np.where(b.mask, np.float32('nan'), b.advantage))
            for b in batches
        ]

    monkeypatch.setattr(engine, '_pack', poisoned)
    values, rows = play(engine, 0)
    assert values['skipped_updates'] == 1
    (fate,) = engine.fates
    assert fate['drop'] == 'nonfinite_gradient'
    assert fate['rollouts'] == [list(row.trajectory.identity) for row in rows]
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, learner.params))
