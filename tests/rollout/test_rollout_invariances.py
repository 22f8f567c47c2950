"""What a rollout contains depends on its request and on nothing else, with every kind of decoder and of engine."""

import dataclasses
import functools

import pytest
import tiny
from request_cases import (
    CONFIG,
    EXPERTS,
    GEMMA,
    PAGED,
    TOLERANCE,
    Forgetful,
    check_idle,
    check_log_probs,
    echo,
    late_echo,
    make_env,
    make_policy,
    make_scheduler,
    play,
    requests,
    run,
    same,
)

from zeroplay_jax.policy import sharding

# Kind of rollouts → fields of the decoder, and whether thoughts leave the context.
KINDS = {
    'plain': ({}, False),
    'forgetful': ({}, True),
    'states': (tiny.DELTA, False),
    'forgetful states': (tiny.DELTA, True),
    'windows': (GEMMA, False),
    'experts': (EXPERTS, False),
    'truncated': ({}, True),
}
# Tokens of the last kind are drawn from at most eight ids.
KEPT = dataclasses.replace(CONFIG, kept=8)
USED = dataclasses.replace(CONFIG, attention='used')


@pytest.fixture(scope='module')
def policy_of(tmp_path_factory):
    """Function of a kind of rollouts: their (codec, model, parameters)."""
    folder = tmp_path_factory.mktemp('kinds')
    return functools.cache(lambda kind: make_policy(folder / kind, **KINDS[kind][0]))


def requests_of(policy, kind, search=echo):
    env = make_env(policy[0], search)
    asked = requests(Forgetful(**vars(env)) if KINDS[kind][1] else env)
    if kind == 'truncated':
        asked = [dataclasses.replace(request, truncation=(0.8, 8)) for request in asked]
    return asked


@pytest.fixture(scope='module')
def expected_of(policy_of):
    """Function of a kind: its rollouts, played once."""

    @functools.cache
    def expected(kind, config=CONFIG):
        policy = policy_of(kind)
        rollouts = run(policy, requests_of(policy, kind), config)
        assert sum(t.valid_calls for t in rollouts) >= 4
        assert (sum(len(t.earlier) for t in rollouts) >= 10) == KINDS[kind][1]
        return rollouts

    return expected


@pytest.mark.parametrize(
    'kind,config',
    [
        ('plain', CONFIG),
        ('plain', USED),
        ('plain', PAGED),
        ('forgetful', CONFIG),
        ('forgetful states', CONFIG),
        ('experts', CONFIG),
        ('truncated', KEPT),
        ('truncated', dataclasses.replace(PAGED, kept=8)),
    ],
)
def test_order_neighbours_tools_and_overlap_change_no_bit(policy_of, expected_of, kind, config):
    policy, expected = policy_of(kind), expected_of(kind, config)
    late = requests_of(policy, kind, late_echo)
    # By default tools are waited for, whatever their timeout.
    options = dict(overlap=True, tool_timeout=0.01)
    same(expected, run(policy, late, config, order=-1, **options))
    same(expected[9:12], run(policy, requests_of(policy, kind)[3:4], config))


PAGES = dict(page=16, token_budget=12)


@pytest.mark.parametrize(
    'kind,changes,mesh',
    [
        ('plain', dict(slots=7), (1, 1, 1)),
        ('plain', dict(attention='used'), (1, 1, 1)),
        ('plain', {}, (1, 2, 2)),
        ('plain', PAGES, (1, 2, 2)),
        ('plain', dict(page=CONFIG.context), (1, 1, 1)),
        # Pages for little more than one rollout.
        ('plain', PAGES | dict(slots=5, pages=6), (1, 1, 1)),
        ('forgetful', dict(slots=7), (1, 1, 1)),
        ('states', {}, (1, 2, 2)),
        ('windows', PAGES, (1, 1, 1)),
        ('truncated', dict(kept=8), (1, 2, 2)),
        ('truncated', PAGES | dict(slots=5, pages=6, kept=8), (1, 1, 1)),
    ],
    ids=str,
)
def test_slots_pages_and_devices_change_no_token(policy_of, expected_of, kind, changes, mesh):
    config, policy = dataclasses.replace(CONFIG, **changes), policy_of(kind)
    scheduler, pool = make_scheduler(policy, config, sharding.make_mesh(*mesh))
    expected = expected_of(kind, KEPT if kind == 'truncated' else CONFIG)
    same(expected, play(scheduler, requests_of(policy, kind)), TOLERANCE)
    check_idle(pool)


@pytest.mark.parametrize('kind', ['plain', 'forgetful', 'forgetful states', 'windows'])
def test_log_probs_are_those_of_the_trainer(policy_of, expected_of, kind):
    rollouts = expected_of(kind)
    check_log_probs(policy_of(kind), rollouts)
    # Longer than two windows.
    assert max(len(t.tokens) for t in rollouts) > 2 * 16


def test_a_prompt_of_one_token_begins_with_an_empty_state(policy_of):
    policy = policy_of('states')
    reqs = requests_of(policy, 'states')
    short = [dataclasses.replace(request, prompt=request.prompt[:1]) for request in reqs]
    check_log_probs(policy, run(policy, short))


def test_a_state_that_a_later_turn_replaces_is_computed_again_for_siblings(policy_of):
    """Two slots for six samples: most of them wait when the one that prefilled their prompt begins its second turn."""
    policy = policy_of('states')
    reqs = requests(make_env(policy[0]), count=3, samples=6)
    two = dataclasses.replace(CONFIG, slots=2)
    scheduler, pool = make_scheduler(policy, two)
    dropped, drop = [], pool.placement._drop_pages

    def count(prefix):
        dropped.append(prefix.waiting and prefix.pages is not None)
        drop(prefix)

    pool.placement._drop_pages = count
    rollouts = play(scheduler, reqs)
    assert any(dropped)
    same(rollouts, run(policy, reqs, two, order=-1))
    # Four slots: more of them are copies of one state.
    same(rollouts, run(policy, reqs), TOLERANCE)


@pytest.mark.parametrize('paged', [False, True])
def test_more_samples_than_slots_or_pages(policy_of, paged):
    policy = policy_of('plain')
    reqs = requests(make_env(policy[0]), count=2, samples=9)
    few = dataclasses.replace(PAGED, slots=3, pages=9)
    if not paged:
        few = dataclasses.replace(CONFIG, slots=2)
    many = run(policy, reqs, dataclasses.replace(CONFIG, slots=24))
    same(many, run(policy, reqs, few), TOLERANCE)
