"""Rollouts whose weights change after their first turn (`rollout.switch`): which weights played what is counted."""

import asyncio
import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from request_cases import CONFIG, echo, make_env, make_pool, requests, same
from test_versions import changed, flat, of_step

from zeroplay_jax.policy import adapters, sharding, transformer
from zeroplay_jax.rollout.episode_batch import EpisodeBatch, VersionSwitch
from zeroplay_jax.rollout.pool_weights import AdapterPoolWeights
from zeroplay_jax.rollout.sampler import Sampler
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.settings.adapters import LINEARS
from zeroplay_jax.types import POLICY

# Slots for all rollouts of both steps, also where those that wait hold at most half of them.
SLOTS = dataclasses.replace(CONFIG, slots=36)
PAGES = dataclasses.replace(SLOTS, page=8, token_budget=16)
NAMES = frozenset(['policy'])


def slow_echo(queries):
    time.sleep(0.005 * (sum(map(len, queries)) % 3))
    return echo(queries)


def newer(policy):
    return changed(policy[2], seed=4)


def make_scheduler(policy, config, **options):
    pool = make_pool(policy, config)
    pool.weights.has_versions = True
    scheduler = Scheduler({'policy': pool}, **options)
    scheduler.publish_weights('policy', policy[2], 1)
    return scheduler, pool


def play(policy, config, mode, early=True, search=echo, **options):
    """Rollouts that change from version 1 to 2, how many waited for their step, and the scheduler's counters."""
    scheduler, pool = make_scheduler(policy, config, **options)
    reqs = requests(make_env(policy[0], search))
    batch = EpisodeBatch({'policy': 1}, VersionSwitch(NAMES, mode == 'recompute'))
    other = EpisodeBatch({'policy': 1})
    scheduler.start(other, [scheduler.rollout(r) for r in of_step(reqs[:5], 3)])
    if early:
        scheduler.start(batch, [scheduler.rollout(r) for r in of_step(reqs, 4)])
    scheduler.wait(other)
    waited = len(pool.waiting_for_weights)
    scheduler.publish_weights('policy', newer(policy), 2, keep=(1,))
    if not early:
        scheduler.start(batch, [scheduler.rollout(r) for r in of_step(reqs, 4)])
    batch.begin({'policy': 2})
    rollouts = flat(scheduler.wait(batch))
    for shard in pool.placement.shards:
        assert shard.is_idle and shard.allocator.available == shard.allocator.count
    assert not pool.groups()
    return rollouts, waited, scheduler.stats


@pytest.fixture(scope='module', params=['slots', 'pages'])
def config(request):
    return dict(slots=SLOTS, pages=PAGES)[request.param]


@pytest.fixture(scope='module')
def played(policy, config):
    return {mode: play(policy, config, mode) for mode in ('keep', 'recompute')}


def first_turn(trajectory):
    """Which tokens the first turn sampled."""
    sampled = trajectory.source == POLICY
    others = np.flatnonzero(~sampled & (np.cumsum(sampled) > 0))
    end = others[0] if len(others) else len(sampled)
    return sampled & (np.arange(len(sampled)) < end)


def scored(policy, params, rollouts):
    """The trainer's log-probs of all tokens, [rollouts, context]."""
    tokens = np.zeros((len(rollouts), CONFIG.context), np.int32)
    for row, t in zip(tokens, rollouts):
        row[: len(t.tokens)] = t.tokens
    positions = np.broadcast_to(np.arange(CONFIG.context, dtype=np.int32), tokens.shape)
    logp, _ = transformer.score(policy[1], params, tokens, positions, np.ones_like(tokens))
    return np.asarray(logp)


def same_logp(rollout, sampled, logp, tolerance=1e-4):
    expected = logp[: len(rollout.tokens)][sampled]
    np.testing.assert_allclose(rollout.logp[sampled], expected, atol=tolerance)


def test_the_first_turn_has_the_older_weights_and_the_others_the_newer(policy, played):
    for mode, (rollouts, *_) in played.items():
        older_logp = scored(policy, policy[2], rollouts)
        newer_logp = scored(policy, newer(policy), rollouts)
        changed_rollouts = 0
        for index, t in enumerate(rollouts):
            assert t.version == 1
            first = first_turn(t)
            later = (t.source == POLICY) & ~first
            if not later.any():
                assert t.token_versions is None and t.mean_version == t.newest_version == 1
                continue
            changed_rollouts += 1
            expected = np.where(first, 1, np.where(later, 2, -1))
            np.testing.assert_array_equal(t.token_versions, expected)
            assert t.newest_version == 2
            assert t.mean_version == pytest.approx(1 + later.sum() / t.policy_tokens)
            same_logp(t, first, older_logp[index])
            if mode == 'recompute':
                same_logp(t, later, newer_logp[index])
        assert changed_rollouts > 3


def test_kept_keys_change_the_later_turns_alone(played):
    kept, computed = (played[mode][0] for mode in ('keep', 'recompute'))
    differences = 0
    for a, b in zip(kept, computed, strict=True):
        first = first_turn(a)
        np.testing.assert_array_equal(a.tokens[first], b.tokens[first_turn(b)])
        np.testing.assert_array_equal(a.logp[first], b.logp[first_turn(b)])
        shared = min(len(a.tokens), len(b.tokens))
        differences += not np.array_equal(a.logp[:shared], b.logp[:shared])
    assert differences > 3


@pytest.mark.parametrize('mode', ['keep', 'recompute'])
def test_what_is_early_or_slow_changes_no_bit(policy, config, played, mode):
    rollouts, waited, _ = played[mode]
    assert waited > 3
    late, waited, _ = play(policy, config, mode, early=False)
    assert not waited
    same(rollouts, late)
    same(rollouts, play(policy, config, mode, search=slow_echo, overlap=True)[0])
    for a, b in zip(rollouts, late):
        np.testing.assert_equal(a.token_versions, b.token_versions)


@pytest.mark.parametrize('mode', ['keep', 'recompute'])
def test_waiting_rollouts_leave_slots_to_the_step_in_progress(policy, played, config, mode):
    """The step in progress asks for rollouts when those of the next step have all ended their first turn."""
    few = dataclasses.replace(config, slots=6)
    scheduler, pool = make_scheduler(policy, few)
    reqs = requests(make_env(policy[0]))
    batch = EpisodeBatch({'policy': 1}, VersionSwitch(NAMES, mode == 'recompute'))
    other = EpisodeBatch({'policy': 1})
    held = []

    def is_waiting():
        waiting = len(pool.waiting_for_weights)
        if mode == 'keep':
            return pool.active == waiting > 0
        return waiting and not pool.active and not pool.queue

    async def asks_later():
        while not is_waiting():
            await asyncio.sleep(0.001)
        held.append(pool.active)
        results = []
        for request in of_step(reqs[:2], 3):
            results.append(await scheduler.rollout(request))
        return results

    scheduler.start(batch, [scheduler.rollout(r) for r in of_step(reqs, 4)])
    scheduler.start(other, [asks_later()])
    (results,) = scheduler.wait(other)
    assert len(flat(results)) == 6 and held[0] <= (3 if mode == 'keep' else 0)
    scheduler.publish_weights('policy', newer(policy), 2, keep=(1,))
    batch.begin({'policy': 2})
    same(played[mode][0], flat(scheduler.wait(batch)), tolerance=1e-5)
    assert not pool.groups()


def test_evicted_rollouts_compute_the_same(policy):
    """Rollouts that give their pages up in either turn have the bits of those that do not."""
    # When searches return decides how many give their pages up: 5 to 7 with 16 pages, sometimes none with 24.
    few = dataclasses.replace(PAGES, pages=16)
    rollouts, *_ = play(policy, PAGES, 'recompute')
    evicted, _, stats = play(policy, few, 'recompute', search=slow_echo)
    assert stats['evictions'] > 0
    same(rollouts, evicted)


def test_the_adapter_changes_with_the_version(policy):
    codec, model, params = policy
    mesh = sharding.make_mesh()
    base = params | {adapters.SCALE: jnp.full(1, 2.0)}
    # Shapes of test_adapter_rollouts.py, whose programs are kept.
    config = dataclasses.replace(CONFIG, eos=codec.eos_ids)
    views = []
    for seed in (1, 2):
        adapter = adapters.init(base, LINEARS, 3, seed, 'role')
        view = adapters.join(base, changed(adapter, seed))
        views.append(jax.device_put(view, sharding.replicated(mesh)))

    def play_adapters(early):
        weights = AdapterPoolWeights({'policy': 2, 'other': 1})
        pool = SlotPool(Sampler(model, config, mesh), 5, weights)
        scheduler = Scheduler({'policy': pool})
        scheduler.publish_weights('policy', views[0], 1)
        reqs = of_step(requests(make_env(codec)), 4)
        batch = EpisodeBatch({'policy': 1}, VersionSwitch(NAMES, recomputes=True))
        if early:
            scheduler.start(batch, [scheduler.rollout(r) for r in reqs])
            first = EpisodeBatch({'policy': 1})
            scheduler.start(first, [scheduler.rollout(r) for r in of_step(reqs, 3)])
            scheduler.wait(first)
        scheduler.publish_weights('policy', views[1], 2, keep=(1,))
        if not early:
            scheduler.start(batch, [scheduler.rollout(r) for r in reqs])
        batch.begin({'policy': 2})
        return flat(scheduler.wait(batch))

    rollouts = play_adapters(early=True)
    same(rollouts, play_adapters(early=False))
    changed_rollouts = [t for t in rollouts if t.token_versions is not None]
    assert len(changed_rollouts) > 3
    for version, view in enumerate(views, 1):
        logp = scored(policy, adapters.merged(view), changed_rollouts)
        for index, t in enumerate(changed_rollouts):
            same_logp(t, t.token_versions == version, logp[index], tolerance=1e-3)


def test_rollouts_without_a_slot_do_not_hold_up_those_in_slots(policy):
    """Rollouts of frozen weights fill all slots while older ones, which have left theirs, wait for their step."""
    pool = make_pool(policy, dataclasses.replace(CONFIG, slots=4))
    pool.weights.has_versions = True
    scheduler = Scheduler({'policy': pool, 'frozen': pool}, deterministic=False, tool_timeout=20.0)
    scheduler.publish_weights('policy', policy[2], 1)
    may_answer = threading.Event()

    def search(queries):
        may_answer.wait(20)
        return echo(queries)

    reqs = []
    for number, request in enumerate(requests(make_env(policy[0]), count=8, samples=1) * 3):
        if number >= 8:
            env = make_env(policy[0], search)
            request = dataclasses.replace(request, weights='frozen', env=env)
        reqs.append(dataclasses.replace(request, identity=(4, number)))

    async def until_all_slots_are_frozen():
        while True:
            names = [r.group.request.weights for r in pool.placement.active() if not r.is_running]
            if names == 4 * ['frozen'] and pool.waiting_for_weights:
                return
            await asyncio.sleep(0)

    batch = EpisodeBatch({}, VersionSwitch(NAMES, recomputes=True))
    step_in_progress = EpisodeBatch({})
    scheduler.start(step_in_progress, [until_all_slots_are_frozen()])
    scheduler.start(batch, [scheduler.rollout(request) for request in reqs])
    scheduler.wait(step_in_progress)
    scheduler.publish_weights('policy', policy[2], 2, keep=(1,))
    batch.begin({'policy': 2, 'frozen': 2})
    may_answer.set()
    # In a thread, because a slot that nothing frees would be waited for without end.
    results = []
    waiting = threading.Thread(target=lambda: results.extend(scheduler.wait(batch)), daemon=True)
    waiting.start()
    waiting.join(20)
    assert len(results) == len(reqs)
