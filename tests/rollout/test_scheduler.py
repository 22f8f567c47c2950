"""The sampler's promises: what a rollout contains depends on its request and on nothing else."""

import dataclasses
import gc
import types

import numpy as np
import pytest
from request_cases import (
    CONFIG,
    PAGED,
    Forgetful,
    check_log_probs,
    echo,
    make_env,
    make_scheduler,
    play,
    requests,
    run,
    same,
    searches,
)

from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout.requests import Rollout
from zeroplay_jax.rollout.sampler import programs
from zeroplay_jax.rollout.scheduler import PromptTooLong
from zeroplay_jax.rollout.slot_state import NO_TOKEN
from zeroplay_jax.types import ENV, POLICY, PROMPT


@pytest.fixture(scope='module')
def baseline(policy):
    return run(policy)


def check_spans(codec, rollouts):
    """The spans of the turns are all sampled tokens, once each, and decode to the text of their turn."""
    for t in rollouts:
        unseen = [context.source == POLICY for context in t.contexts]
        for turn in t.turns:
            span = slice(turn.start, turn.stop)
            assert turn.stop > turn.start and unseen[turn.context][span].all()
            unseen[turn.context][span] = False
            assert codec.decode(t.contexts[turn.context].tokens[span]).startswith(turn.text)
        assert not any(map(np.any, unseen))


def test_rollouts_have_turns_searches_and_labels(policy, baseline):
    check_spans(policy[0], baseline)
    assert sum(t.valid_calls for t in baseline) >= 10
    assert {len(t.turns) for t in baseline} >= {1, 2, 3}
    for t in baseline:
        switches = np.flatnonzero(np.diff(t.source))
        assert t.source[0] == PROMPT and t.source[switches[0] + 1] == POLICY
        assert (t.logp[t.source != POLICY] == 0).all() and (t.logp[t.source == POLICY] < 0).all()
        shown = sum(bool(call.documents) for call in t.calls_of('search'))
        assert shown == sum(t.source[i + 1] == ENV for i in switches)


def test_a_turn_takes_no_step_behind_a_token_that_ends_it(policy, baseline, monkeypatch):
    codec = policy[0]
    assert b'h' in codec.token_bytes
    scheduler, pool = make_scheduler(policy)
    same(baseline, play(scheduler, requests(make_env(codec))))
    kept = sum(turn.stop - turn.start for t in baseline for turn in t.turns)
    assert scheduler.stats.pop('generated_tokens') == kept
    # The host alone finds the same ends, some steps later; the slots forget those of the rollouts before.
    monkeypatch.setattr('zeroplay_jax.rollout.slots.end_ids', lambda codec, stops: ())
    decode = pool.sampler.decode

    def checked(*arguments):
        held = [rollout is not None for rollout in pool.rollouts]
        assert (pool.sampler.ends[held] == NO_TOKEN).all()
        return decode(*arguments)

    monkeypatch.setattr(pool.sampler, 'decode', checked)
    same(baseline, play(scheduler, requests(make_env(codec))))
    assert scheduler.stats['generated_tokens'] > kept


def test_group_shares_one_prefill_and_equals_separate_ones(policy, baseline):
    """A sample whose prompt was cloned is bit for bit the sample whose prompt was prefilled for it alone."""
    scheduler, pool = make_scheduler(policy)
    clone_siblings, clone, clones = pool.clone_siblings, pool.sampler.clone, []

    def without_prompts():
        for prefix in pool.placement.open_prefixes:
            pool.placement._drop_pages(prefix)
        clone_siblings()

    pool.clone_siblings = without_prompts
    pool.sampler.clone = lambda rows: clones.extend(rows) or clone(rows)
    same(baseline, play(scheduler, requests(make_env(policy[0]))))
    assert not clones


def test_group_members_are_distinct(baseline):
    for i in range(0, len(baseline), 3):
        # two members may both end at their first token; longer ones must differ
        long = [t.tokens.tobytes() for t in baseline[i : i + 3] if (t.source == POLICY).sum() > 4]
        assert len(set(long)) == len(long)
    assert len({t.tokens.tobytes() for t in baseline}) > 0.8 * len(baseline)


def test_thoughts_leave_the_context_when_their_turn_is_over(policy):
    forgetful = requests(Forgetful(**vars(make_env(policy[0]))))
    rollouts = run(policy, forgetful)
    assert sum(len(t.earlier) for t in rollouts) >= 10
    check_spans(policy[0], rollouts)
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
    check_log_probs(policy, rollouts)


def test_whole_turns_before_a_cut_are_trained_in_their_own_context():
    sources = [PROMPT, POLICY, ENV, POLICY, POLICY]
    rollout = types.SimpleNamespace(tokens=[5, 6, 7, 8, 9], source=sources, logp=[], earlier=[])
    Rollout.end_context(rollout, 3, [9], 'ended')
    assert rollout.source == [PROMPT, PROMPT, ENV, PROMPT] and rollout.tokens == [5, 6, 7, 9]
    assert rollout.earlier == ['ended']


# Shapes of their own: tests of adapters and versions call the programs of others with other arguments.
SHAPES = [
    (dataclasses.replace(CONFIG, slots=6), set()),
    (dataclasses.replace(PAGED, put_tokens=5), {'extend'}),
]


@pytest.mark.parametrize('shape,unused', SHAPES)
def test_one_compile_per_program(policy, shape, unused):
    codec, model, _ = policy
    config = dataclasses.replace(shape, eos=codec.eos_ids)
    compiled = programs(model, config, sharding.make_mesh())
    run(policy, requests(make_env(codec)), shape)
    run(policy, requests(make_env(codec), count=11, samples=2, temperature=0.7), shape)
    sizes = {name: f._cache_size() for name, f in compiled.items()}
    assert sizes == dict.fromkeys(compiled.keys() - unused, 1)


def test_a_rollout_that_fills_its_slot_ends_with_that_reason(policy):
    reqs = requests(make_env(policy[0]))
    long = [dataclasses.replace(r, prompt=np.resize(r.prompt, 70)) for r in reqs]
    ends = [t for t in run(policy, long) if t.finish == 'context']
    assert ends and all(len(t.tokens) <= CONFIG.context for t in ends)


def broken(queries):
    raise OSError('no index')


@pytest.mark.parametrize('search', [broken, lambda queries: []], ids=['raises', 'too few results'])
def test_failing_tool_is_an_observation_and_is_counted(policy, search):
    out = run(policy, requests(make_env(policy[0], search, observation_tokens=40)))
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
    many = dataclasses.replace(CONFIG, slots=24)
    together = run(policy, requests(env), many)
    calls = searches(together)
    assert {call.error for call in calls} == {None, 'failed'}
    queries = [call.arguments['query_list'][0] for call in calls]
    assert all((call.error == 'failed') == ('a' in query) for call, query in zip(calls, queries))
    same(together[6:9], run(policy, requests(env)[2:3], many))


def test_the_noise_after_a_cut_is_that_of_no_other_request(policy):
    _, pool = make_scheduler(policy)
    cases = ((5,), []), ((5,), [0]), ((5,), [0, 0]), ((5, 1, 1), []), ((5, 1), [])
    keys = [
        tuple(pool._noise_key(types.SimpleNamespace(identity=identity, earlier=earlier)))
        for identity, earlier in cases
    ]
    assert len(set(keys)) == len(cases)


def test_turn_limits(policy):
    out = run(policy, requests(make_env(policy[0], turn_tokens=5, max_turns=2)))
    assert {t.finish for t in out} >= {'turn_tokens', 'turns'}
    assert max(len(t.turns) for t in out) == 2
    for t in out:
        policy_runs = np.split(t.source, np.flatnonzero(np.diff(t.source)) + 1)
        assert max(len(r) for r in policy_runs if r[0] == POLICY) <= 5
        if t.finish == 'turns':
            assert not t.turns[-1].call


def test_response_limit(policy, baseline):
    """A response of up to its limit is what it is without one; a longer one ends there, whatever its turns."""
    limited = run(policy, requests(make_env(policy[0], response_tokens=24)))
    prompts = [len(request.prompt) for request in requests(make_env(policy[0])) for _ in range(3)]
    assert {t.finish for t in limited} > {'response_tokens'}
    for long, short, prompt in zip(baseline, limited, prompts, strict=True):
        length = len(short.tokens)
        assert length - prompt <= 24
        np.testing.assert_array_equal(long.tokens[:length], short.tokens)
        if short.finish != 'response_tokens':
            assert (short.finish, length) == (long.finish, len(long.tokens))


@pytest.mark.timeout(600)  # a mutant waits for ever
@pytest.mark.parametrize('spare', [0, 1])
def test_an_observation_needs_room_for_itself_and_one_token(policy, baseline, spare):
    reqs = requests(make_env(policy[0]))
    number = next(i for i, t in enumerate(baseline) if ENV in t.source and t.source[-1] == POLICY)
    whole, prompt = baseline[number], len(reqs[number // 3].prompt)
    observed = np.flatnonzero(whole.source == ENV)
    first = observed[: np.argmax(np.append(np.diff(observed) != 1, True)) + 1]
    limit = int(first[-1]) + 1 + spare - prompt
    cut = run(policy, requests(make_env(policy[0], response_tokens=limit)))[number]
    length = first[-1] + 2 if spare else first[0]
    assert spare or cut.finish == 'response_tokens'
    np.testing.assert_array_equal(cut.tokens, whole.tokens[:length])


def test_prompt_without_room_is_refused(policy):
    request = dataclasses.replace(requests(make_env(policy[0]))[0], prompt=np.zeros(96, np.int32))
    with pytest.raises(PromptTooLong, match='96 tokens'):
        run(policy, [request])


def test_of_several_episodes_that_raise_one_error_is_reported(policy, caplog):
    scheduler, _ = make_scheduler(policy)

    async def bad(number):
        raise KeyError(number)

    with pytest.raises(KeyError):
        scheduler.run([bad(number) for number in range(3)])
    gc.collect()
    assert 'never retrieved' not in caplog.text
