"""The engine: batches filled in order of issue, surplus that waits for the next step, a state that survives."""

import asyncio
import base64
import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import tiny
from refused_calls import check_table

from zeroplay_jax.configs import common
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import hf, sharding
from zeroplay_jax.rollout.sampler import Sampler, SamplerConfig, SlotPut
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.weights import WeightStore
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.judge import RuleJudge
from zeroplay_jax.selfplay.recipe import Recipe, RoleSpec
from zeroplay_jax.selfplay.rows import from_bytes
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.selfplay.update import micro_batches
from zeroplay_jax.settings.schema import TrainedRole
from zeroplay_jax.types import (
    POLICY,
    PROMPT,
    Outcome,
    Row,
    RowInfo,
    Task,
    Trajectory,
    Turn,
)


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    folder = tiny.make_folder(tmp_path_factory.mktemp('engine') / 'policy', letters=tiny.LETTERS)
    model = hf.read_config(folder)
    return model, hf.load(folder, model)


def trajectory(identity, version=0, n=8):
    rng = np.random.default_rng(abs(hash(identity)) % 2**31)
    source = np.array([PROMPT] * 3 + [POLICY] * (n - 3), np.int8)
    logp = np.where(source == POLICY, -rng.uniform(1, 3, n), 0).astype(np.float32)
    tokens = rng.integers(0, 20, n).astype(np.int32)
    return Trajectory(tokens, source, logp, (), 'eos', 'solver', version, identity)


class Game(Recipe):
    """Items 0, 1, 2, … of two rollouts each; `pays(item)` says what they earn."""

    version = 0

    def __init__(self, config, pays):
        self.config, self.pays, self.cursors = config, pays, []

    def phases(self):
        return [Phase('solver', 4, ('solver',))]

    def tasks(self, step, pool, cursor):
        self.cursors.append(cursor)
        solver = self.config.solver
        is_short = solver.filter_groups and cursor.missing and cursor.round < solver.fill_rounds
        if cursor.round and not is_short:
            return []
        count = cursor.missing if solver.filter_groups and not cursor.round else solver.batch
        return [
            Task((step.number, cursor.drawn_in_step + i), {'item': cursor.drawn_in_phase + i})
            for i in range(count)
        ]

    async def episode(self, context, step, task):
        item = task.payload['item']
        await asyncio.sleep(0.001 * (item % 3))  # the later may end first
        group = 1000 * step.number + task.identity[1]
        rows = []
        for i, reward in enumerate(self.pays(item)):
            rollout = self.end(trajectory((*task.identity, i), self.version), context)
            info = RowInfo(details={'item': item})
            rows.append(Row('solver', rollout, reward, group, info=info))
        return Outcome(rows)

    def end(self, rollout, context):
        return rollout


def make(policy, pays, ahead=0, **changes):
    model, params = policy
    config = common.get_config()
    role = TrainedRole(batch=2, samples=2, learning_rate=1e-3).model_dump() | changes
    with config.unlocked():
        config.solver.update(role)
    config.micro.update(rows=2, tokens=32)
    sampler = Sampler(model, SamplerConfig(2, 32, 8, 2, 4, 2, 8), sharding.make_mesh())
    config.rollout.ahead = ahead
    weights = WeightStore({'solver': 1 + ahead})
    scheduler = Scheduler({'solver': SlotPool(sampler, 0)}, weights)
    context = RolloutContext(scheduler, {}, {}, RuleJudge(list, (1, 5)))
    learner = Learner(model, sharding.make_mesh(), {'solver': config.solver}, params, (2, 32))
    game = Game(config, pays)
    specs = {'solver': RoleSpec('solver', 'solver')}
    return Engine(config, game, context, {'solver': learner}, {'solver': 'solver'}, specs), game


def play(engine, index):
    engine.recipe.version = engine.weights.newest['solver']
    return engine.run_step(Step(engine.recipe.phases()[0], index, index), lambda: None)


def snapshot(engine):
    """(arrays of the devices, state of the host), as a checkpoint holds them."""
    arrays = jax.tree.map(np.array, engine.device_state())
    return arrays, json.loads(json.dumps(engine.host_state()))


def assert_equal_arrays(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def assert_equal_states(ours, theirs):
    assert ours[1] == theirs[1]
    assert_equal_arrays(ours[0], theirs[0])


@pytest.fixture
def start(policy, monkeypatch):
    """Returns an engine, its game, and a list of the items that reach the packing, per update."""

    def started(pays, **changes):
        engine, game = make(policy, pays, **changes)
        items, batches = [], engine.updates.batches

        def noted(role, rows, distill):
            items.append([row.info.details['item'] for row in rows])
            return batches(role, rows, distill)

        monkeypatch.setattr(engine.updates, 'batches', noted)
        return engine, game, items

    return started


WATCHED = ('filter/full', 'filter/surplus', 'filter/age', 'skipped_updates')


def test_the_table_of_steps(start):
    def steps(pays, count, indices=None, cut=None, truncated='keep', contexts=None, **changes):
        """Per step: items that are trained, how many were drawn, metrics, drops of tasks and rollouts."""
        engine, game, items = start(pays, **changes)
        engine.config.rollout.truncated = truncated
        engine.config.value_network.gae_lambda = 0.9
        if cut:
            truncate(game, *cut)
        if contexts:
            game.end = contexts
        lines = []
        for index in indices or range(count):
            del items[:]
            before = jax.tree.map(np.array, engine.learners['solver'].params)
            metrics, rows = play(engine, index)
            values = {name.removeprefix('solver/'): value for name, value in metrics.items()}
            shown = {name: round(values[name], 3) for name in WATCHED if name in values}
            shown |= {name: round(x, 3) for name, x in values.items() if 'row_drop' in name}
            log = [
                (record['task'], record['drop'], record.get('rollout', record.get('rewards')))
                for record in engine.task_log
            ]
            changed = jax.tree.map(np.array_equal, before, engine.learners['solver'].params)
            assert all(jax.tree.leaves(changed)) == bool(values['skipped_updates'])
            assert values['skipped_updates'] or np.isfinite(values['gradient_norm'])
            drops = [row.trajectory.identity for row in rows if row.drop]
            lines.append(
                f'trained {items}, drawn {engine.collector.drawn}, {shown}, log {log}, {drops}'
            )
        starts = [cursor.drawn_in_phase for cursor in game.cursors if cursor.round == 0]
        return '\n'.join([*lines, f'steps began at {starts}'])

    check_table(pathlib.Path(__file__).parent / 'engine.txt', globals() | {'steps': steps})


def truncate(game, item, finish, first=0):
    """A limit ends the rollouts of an item, from this one on."""
    whole = game.episode

    async def cut(context, step, task):
        outcome = await whole(context, step, task)
        if task.payload['item'] == item:
            for row in outcome.rows[first:]:
                row.trajectory = dataclasses.replace(row.trajectory, finish=finish)
        return outcome

    game.episode = cut


def two_contexts(rollout, context):
    earlier = (dataclasses.replace(rollout, finish='continued'),)
    return dataclasses.replace(rollout, earlier=earlier, turns=(Turn('a', start=3, stop=8),))


def going_on(rollout, context):
    """The second rollout of an item goes on in another one."""
    if rollout.identity[-1] == 1:
        context.episodes.continued.add(rollout.identity)
    return two_contexts(rollout, context)


MIXED = lambda item: (1, 0) if item % 2 else (0, 0)  # every second item has something to teach
ALL = lambda item: (1, 0)
FIRST_IS_DULL = lambda item: (1, 0) if item else (0, 0)
FILTERED = dict(filter_groups=True, batch=3)


def test_the_state_holds_surplus_and_place(policy):
    whole, _ = make(policy, FIRST_IS_DULL, **FILTERED)
    play(whole, 0)
    saved = snapshot(whole)
    play(whole, 1)
    again, _ = make(policy, FIRST_IS_DULL, **FILTERED)
    again.restore(*saved)
    waiting = from_bytes(base64.b64decode(again.filter.state()['solver']))
    assert again.collector.drawn == 6 and [row.info.details['item'] for row in waiting] == [
        4,
        4,
        5,
        5,
    ]
    play(again, 1)
    assert_equal_states(snapshot(again), snapshot(whole))


# Five sampled tokens of a rollout with one context, and ten of one with three.
@pytest.mark.parametrize(
    ('mode', 'shares'),
    [
        ('token', [1 / 3, 2 / 3]),
        ('seq_mean_token_mean', [0.5, 0.5]),
        ('seq_mean_token_sum', [2.5, 5]),
    ],
)
def test_the_contexts_of_a_rollout_have_its_advantage_and_count_as_one_rollout(mode, shares):
    whole, *earlier = (trajectory((0, 1, 0), n=n) for n in (8, 5, 6))
    cut = dataclasses.replace(whole, earlier=tuple(earlier))
    rows = [Row('solver', whole, 1.0, 0, advantage=0.5), Row('solver', cut, 0.0, 0, advantage=-0.5)]
    # One row each, so that the contexts of a rollout are in different micro-batches.
    batches = micro_batches(rows, TrainedRole(aggregation=mode, kl_coef=0.1), (1, 8))
    advantages = [float(batch.advantage[batch.mask][0]) for batch in batches]
    assert advantages == [0.5, -0.5, -0.5, -0.5]
    first, *others = [batch.weight[batch.mask].sum() for batch in batches]
    assert [first, sum(others)] == pytest.approx(shares)


def test_slots_and_other_weights_leave_the_devices_during_an_update(policy, monkeypatch):
    engine, _ = make(policy, MIXED)
    engine.config.offload = True
    model, params = policy
    pools = engine.scheduler.pools
    sampler = Sampler(model, pools['solver'].sampler.config, sharding.make_mesh())
    pools['other'] = SlotPool(sampler, 0)
    engine.scheduler.weights.publish('other', params, 0)
    prompt = [SlotPut(0, np.arange(3, dtype=np.int32), 0, 8, 0.0, np.zeros(2, np.uint32))]
    sampler.put(prompt)
    seen, update = [], engine.learners['solver'].update

    def place():
        (kind,) = {
            x.sharding.memory_kind for x in jax.tree.leaves(engine.weights.params['other', 0])
        }
        return kind

    def look(*args):
        seen.append((sampler.state is None, bool(engine.weights.params['solver', 0]), place()))
        return update(*args)

    monkeypatch.setattr(engine.learners['solver'], 'update', look)
    play(engine, 0)
    assert seen == [(True, False, 'pinned_host')] and place() == 'device'
    sampler.put(prompt)
