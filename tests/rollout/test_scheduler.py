"""The sampler's promises: what a rollout contains depends on its request and on nothing else."""

import dataclasses
import gc
import signal
import threading
import time

import jax
import numpy as np
import pytest
import tiny
from request_cases import CONFIG, echo, make_env, make_pool, requests, run, same, searches

from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.rollout.environment import Environment
from zeroplay_jax.rollout.sampler import PutRow, Sampler, programs
from zeroplay_jax.rollout.scheduler import PromptTooLong, Scheduler
from zeroplay_jax.types import ENV, POLICY, PROMPT


@pytest.fixture(scope='module')
def baseline(policy):
    return run(policy, requests(make_env(policy[0])))


def test_rollouts_have_turns_searches_and_labels(baseline):
    assert sum(t.valid_calls for t in baseline) >= 10 and {len(t.turns) for t in baseline} >= {
        1,
        2,
        3,
    }
    for t in baseline:
        switches = np.flatnonzero(np.diff(t.source))
        assert t.source[0] == PROMPT and t.source[switches[0] + 1] == POLICY
        assert (t.logp[t.source != POLICY] == 0).all() and (t.logp[t.source == POLICY] < 0).all()
        shown = sum(bool(call.documents) for call in t.calls_of('search'))
        assert shown == sum(t.source[i + 1] == ENV for i in switches)


def test_order_and_neighbours_change_nothing_bitwise(policy, baseline):
    same(baseline, run(policy, requests(make_env(policy[0])), order=-1))
    alone = run(policy, requests(make_env(policy[0]))[3:4])
    same(baseline[9:12], alone)


def test_tool_latency_changes_nothing_bitwise(policy, baseline):
    calls = []

    def slow(queries):
        calls.append(len(queries))
        time.sleep(0.02 * (len(calls) % 3))
        return echo(queries)

    same(baseline, run(policy, requests(make_env(policy[0], slow))))
    assert len(calls) > 3


@pytest.mark.parametrize('slots', [1, 2, 7])
def test_slot_count_changes_no_token(policy, baseline, slots):
    config = dataclasses.replace(CONFIG, slots=slots)
    same(baseline, run(policy, requests(make_env(policy[0])), config), 1e-5)


@pytest.mark.parametrize('fsdp,model', [(4, 1), (2, 2), (1, 2)])
def test_device_count_changes_no_token(policy, baseline, fsdp, model):
    mesh = sharding.make_mesh(1, fsdp, model)
    codec, config, params = policy
    params = jax.device_put(params, sharding.parameter_shardings(params, mesh))
    same(baseline, run((codec, config, params), requests(make_env(codec)), mesh=mesh), 1e-5)


def test_group_shares_one_prefill_and_equals_separate_ones(policy, baseline):
    """A sample whose prompt was cloned is bit for bit the sample whose prompt was prefilled for it alone."""
    separate = []
    for request in requests(make_env(policy[0])):
        for sample in range(request.samples):
            pool = make_pool(policy)
            scheduler = Scheduler({'policy': pool})
            scheduler.weights.publish('policy', policy[2], 1)

            async def only(request=request, sample=sample, scheduler=scheduler, pool=pool):
                start = pool.placement.start

                def skip(prefix):
                    for other in [*prefix.waiting]:
                        if other.identity[-1] != sample:
                            prefix.waiting.remove(other)
                            other.future.set_result(None)
                    return start(prefix)

                pool.placement.start = skip
                return await scheduler.rollout(request)

            separate.append(scheduler.run([only()])[0][sample])
    same(baseline, separate)


def test_group_members_are_distinct(baseline):
    for i in range(0, len(baseline), 3):
        # two members may both end at their first token; longer ones must differ
        long = [t.tokens.tobytes() for t in baseline[i : i + 3] if (t.source == POLICY).sum() > 4]
        assert len(set(long)) == len(long)
    assert len({t.tokens.tobytes() for t in baseline}) > 0.8 * len(baseline)


def test_sampler_log_probs_are_the_trainers(policy, baseline):
    _, model, params = policy
    length = max(len(t.tokens) for t in baseline)
    tokens = np.zeros((len(baseline), length), np.int32)
    for i, t in enumerate(baseline):
        tokens[i, : len(t.tokens)] = t.tokens
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    logp, _ = transformer.score(model, params, tokens, positions, np.ones_like(tokens))
    for i, t in enumerate(baseline):
        ours = np.asarray(logp[i, : len(t.tokens)])[t.source == POLICY]
        assert np.abs(ours - t.logp[t.source == POLICY]).max() < 1e-4


class Forgetful(Environment):
    """Three tokens of every turn are its thoughts."""

    def retained_tokens(self, turn_ids):
        return [int(i) for i in turn_ids[3:]]


@pytest.fixture(scope='module')
def forgetful(policy):
    env = make_env(policy[0])
    fields = {f.name: getattr(env, f.name) for f in dataclasses.fields(env)}
    return requests(Forgetful(**fields))


def test_thoughts_leave_the_context_when_their_turn_is_over(policy, forgetful):
    rollouts = run(policy, forgetful)
    assert sum(len(t.earlier) for t in rollouts) >= 10
    for t in rollouts:
        for before, after in zip(t.contexts, t.contexts[1:]):
            # The turn that ended `before` begins behind its last token that was not the policy's.
            start = np.flatnonzero(before.source != POLICY)[-1] + 1
            kept = before.tokens[start + 3 :]
            head = np.concatenate([before.tokens[:start], kept])
            np.testing.assert_array_equal(after.tokens[: len(head)], head)
            assert (
                not (after.source[: len(head)] == POLICY).any() and after.source[len(head)] == ENV
            )
            assert before.finish == 'continued' and not before.turns
        # What the policy wrote is labelled so once.
        text = policy[0].decode(np.concatenate([s.tokens[s.source == POLICY] for s in t.contexts]))
        assert text.startswith(''.join(turn.text for turn in t.turns[:1]))
        assert t.policy_tokens == sum((s.source == POLICY).sum() for s in t.contexts)
    test_sampler_log_probs_are_the_trainers(policy, [s for t in rollouts for s in t.contexts])


def test_cut_contexts_depend_on_their_request_alone(policy, forgetful):
    flat = lambda rollouts: [s for t in rollouts for s in t.contexts]
    baseline = flat(run(policy, forgetful))
    same(flat(run(policy, forgetful, order=-1)), baseline)
    more = dataclasses.replace(CONFIG, slots=7)
    same(flat(run(policy, forgetful, more)), baseline, 1e-5)


def test_one_compile_per_program(policy):
    codec, model, _ = policy
    # A shape of its own: tests of adapters and versions call the programs of CONFIG with other arguments.
    shape = dataclasses.replace(CONFIG, slots=6)
    config = dataclasses.replace(shape, eos=codec.eos_ids)
    compiled = programs(model, config, sharding.make_mesh())
    run(policy, requests(make_env(codec)), shape)
    run(policy, requests(make_env(codec), count=11, samples=2, temperature=0.7), shape)
    assert {name: f._cache_size() for name, f in compiled.items()} == dict.fromkeys(compiled, 1)


def test_rewind_and_put_equal_a_fresh_prefill(policy):
    """After a rewind to a shared prefix and another suffix, the cache is that of a fresh episode."""
    _, model, params = policy
    config = dataclasses.replace(CONFIG, eos=())
    key, rng = np.array([1, 2], np.uint32), np.random.default_rng(0)
    prefix, one, other = (rng.integers(0, 8, n).astype(np.int32) for n in (9, 12, 12))

    def decode(sampler):
        return jax.device_get(sampler.decode(params))

    def fill(sampler, tokens, start):
        sampler.put([PutRow(2, tokens, start, limit=60, temperature=1.0, key=key)])
        for _ in range(3):
            sampler.extend(params, [2])

    used, fresh = (Sampler(model, config, sharding.make_mesh()) for _ in range(2))
    fill(used, np.concatenate([prefix, one]), 0)
    decode(used)
    used.rewind([2], [len(prefix)])
    fill(used, other, len(prefix))
    # the fresh one is filled in the same two steps, so that the chunk borders are the same
    fill(fresh, prefix, 0)
    fresh.rewind([2], [len(prefix)])
    fill(fresh, other, len(prefix))
    a, b = decode(used), decode(fresh)
    assert a.count[2] == 4
    np.testing.assert_array_equal(a.tokens[2], b.tokens[2])
    np.testing.assert_array_equal(a.logp[2], b.logp[2])


def test_stop_string_inside_a_token_keeps_the_token(policy):
    class CutSyntax(tiny.EchoSyntax):
        stop = 'ca'  # the token 'cab' goes on after it

    codec = policy[0]
    env = dataclasses.replace(make_env(codec), syntax=CutSyntax())
    found = 0
    for t in run(policy, requests(env, count=16)):
        for turn in t.turns:
            assert turn.text.count('ca') <= 1 and (not turn.call or turn.text.endswith('ca'))
        ends = [i for i in np.flatnonzero(np.diff(t.source)) if t.source[i] == POLICY]
        found += sum(codec.token_bytes[t.tokens[i]] == b'cab' for i in ends)
    assert found


def test_observation_that_would_overflow_ends_the_episode(policy):
    config = dataclasses.replace(CONFIG, context=40)
    out = run(policy, requests(make_env(policy[0], observation_tokens=24)), config)
    cut = [t for t in out if t.finish == 'context']
    assert cut and all(len(t.tokens) <= 40 for t in out)
    assert any(t.turns[-1].call and t.source[-1] == POLICY for t in cut)


def test_failing_tool_is_an_observation_and_is_counted(policy):
    def broken(queries):
        raise OSError('no index')

    out = run(policy, requests(make_env(policy[0], broken, observation_tokens=40)))
    calls = searches(out)
    assert calls and all(call.error == 'failed' and not call.documents for call in calls)
    assert sum(t.failed_calls for t in out) == len(calls)
    text = 'The search failed. Try again or answer from what is known.'
    assert {call.text for call in calls} == {text}


def test_a_query_that_fails_does_not_fail_its_neighbours(policy):
    def picky(queries):
        if any('a' in q for q in queries):
            raise ValueError('will not')
        return echo(queries)

    env = make_env(policy[0], picky, observation_tokens=40)
    together = run(policy, requests(env), dataclasses.replace(CONFIG, slots=24))
    calls = searches(together)
    assert {call.error for call in calls} == {None, 'failed'}
    queries = [call.arguments['query_list'][0] for call in calls]
    assert all((call.error == 'failed') == ('a' in query) for call, query in zip(calls, queries))
    same(together[6:9], run(policy, requests(env)[2:3], dataclasses.replace(CONFIG, slots=24)))


def test_a_search_that_brings_too_little_is_a_failure(policy):
    out = run(policy, requests(make_env(policy[0], lambda queries: [], observation_tokens=40)))
    assert {call.error for call in searches(out)} == {'failed'}


def test_waiting_for_a_search_does_not_spin(policy):
    def slow(queries):
        time.sleep(0.2)
        return echo(queries)

    scheduler = Scheduler({'policy': make_pool(policy, dataclasses.replace(CONFIG, slots=1))})
    scheduler.weights.publish('policy', policy[2], 1)
    started = time.perf_counter()
    scheduler.run([scheduler.rollout(r) for r in requests(make_env(policy[0], slow), samples=1)])
    whole = time.perf_counter() - started
    assert scheduler.stats['rounds'] < 6 * scheduler.stats['chunks']
    for name in ('seconds', 'fetch_seconds', 'tool_wait_seconds'):
        assert 0 < scheduler.stats[name] <= whole, name


def test_results_are_never_formatted():
    """asyncio hands its handler of Ctrl-C to signal.getsignal, which formats it: the main task and its result."""
    formatted = []

    class Result:
        def __repr__(self):
            formatted.append(self)
            return 'Result'

    async def episode():
        return Result()

    handler = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # deaf to it, asyncio would leave it alone
    try:
        (found,) = Scheduler({}).run([episode()])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert isinstance(found, Result) and not formatted


def test_overdue_tool_becomes_an_error_only_when_not_deterministic(policy):
    def slow(queries):
        time.sleep(0.3)
        return echo(queries)

    env = make_env(policy[0], slow, observation_tokens=40, max_turns=2)
    out = run(policy, requests(env, count=6), deterministic=False, tool_timeout=0.05)
    late = [call for call in searches(out) if call.error == 'timeout']
    text = 'The search took too long. Try again or answer from what is known.'
    assert late and all(call.text == text and not call.documents for call in late)
    waited = run(policy, requests(env, count=6), tool_timeout=0.05)
    assert searches(waited) and not any(call.error for call in searches(waited))


def test_a_limit_of_the_tool_itself_comes_before_that_of_the_run(policy):
    released = threading.Event()

    def stuck(queries):
        released.wait(20)
        return echo(queries)

    env = make_env(policy[0], stuck, observation_tokens=40, max_turns=2)
    env.tools['search'].timeout = 0.05
    try:
        started = time.monotonic()
        out = run(policy, requests(env, count=6), deterministic=False, tool_timeout=1000.0)
        assert time.monotonic() - started < 15
    finally:
        released.set()
    assert {call.error for call in searches(out)} == {'timeout'}


def test_more_samples_than_slots(policy, baseline):
    reqs = requests(make_env(policy[0]), count=2, samples=9)
    few = run(policy, reqs, dataclasses.replace(CONFIG, slots=2))
    same(few, run(policy, reqs, dataclasses.replace(CONFIG, slots=24)), 1e-5)


def test_greedy_ignores_the_key(policy):
    a, b, c = run(policy, requests(make_env(policy[0]), count=1, temperature=0.0))
    same([a, a], [b, c])


def test_turn_limits(policy):
    out = run(policy, requests(make_env(policy[0], turn_tokens=5, max_turns=2)))
    assert {t.finish for t in out} >= {'turn_tokens', 'turns'} and max(
        len(t.turns) for t in out
    ) == 2
    for t in out:
        policy_runs = np.split(t.source, np.flatnonzero(np.diff(t.source)) + 1)
        assert max(len(r) for r in policy_runs if r[0] == POLICY) <= 5
        if t.finish == 'turns':
            assert not t.turns[-1].call


def test_response_limit(policy):
    """A response of up to its limit is what it is without one; a longer one ends there, whatever its turns."""
    free = run(policy, requests(make_env(policy[0])))
    limited = run(policy, requests(make_env(policy[0], response_tokens=24)))
    prompts = [len(request.prompt) for request in requests(make_env(policy[0])) for _ in range(3)]
    assert {t.finish for t in limited} > {'response_tokens'}
    for long, short, prompt in zip(free, limited, prompts, strict=True):
        length = len(short.tokens)
        assert length - prompt <= 24
        np.testing.assert_array_equal(long.tokens[:length], short.tokens)
        if short.finish != 'response_tokens':
            assert (short.finish, length) == (long.finish, len(long.tokens))


def test_prompt_without_room_is_refused(policy):
    request = dataclasses.replace(requests(make_env(policy[0]))[0], prompt=np.zeros(96, np.int32))
    with pytest.raises(PromptTooLong, match='96 tokens'):
        run(policy, [request])


def test_an_episode_that_raises_stops_the_run_and_frees_the_slots(policy):
    pool = make_pool(policy)
    scheduler = Scheduler({'policy': pool})
    scheduler.weights.publish('policy', policy[2], 1)
    reqs = requests(make_env(policy[0]))

    async def bad():
        await scheduler.rollout(reqs[0])
        raise KeyError('lost')

    with pytest.raises(KeyError, match='lost'):
        scheduler.run([bad(), *(scheduler.rollout(r) for r in reqs[1:])])
    assert pool.active == 0
    again = scheduler.run([scheduler.rollout(r) for r in reqs])
    same([t for g in again for t in g], run(policy, reqs))


def test_of_several_episodes_that_raise_one_error_is_reported(policy, caplog):
    scheduler = Scheduler({'policy': make_pool(policy)})

    async def bad(number):
        raise KeyError(number)

    with pytest.raises(KeyError):
        scheduler.run([bad(number) for number in range(3)])
    gc.collect()
    assert 'never retrieved' not in caplog.text
