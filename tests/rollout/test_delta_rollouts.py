"""Gated delta nets in rollouts: a state per slot changes nothing of what the sampler promises (test_scheduler.py)."""

import dataclasses

import numpy as np
import pytest
import tiny
from request_cases import (
    CONFIG,
    check_requests_alone_count,
    make_env,
    make_scheduler,
    play,
    requests,
    run,
    same,
)
from test_continuing import LONG, make_context
from test_continuing import run as run_episodes
from test_log_probs import asked_after, by_learner, note_of
from test_scheduler import Forgetful
from test_scheduler import test_sampler_log_probs_are_the_trainers as check_log_probs

from zeroplay_jax.policy import hf, sharding
from zeroplay_jax.rollout.tokens import Codec


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp('delta') / 'policy'
    tiny.make_folder(folder, letters=tiny.LETTERS, **tiny.DELTA)
    model = hf.read_config(folder)
    return Codec(folder), model, hf.load(folder, model)


@pytest.fixture(scope='module')
def baseline(policy):
    return run(policy)


def test_order_neighbours_and_tools_change_no_bit(policy, baseline):
    assert sum(t.valid_calls for t in baseline) >= 10
    check_requests_alone_count(policy, baseline)


def test_the_trainer_computes_the_same_log_probs(policy, baseline):
    check_log_probs(policy, baseline)


def test_a_state_that_a_later_turn_replaces_is_computed_again_for_siblings(policy):
    """Two slots for six samples: most of them wait when the one that prefilled their prompt begins its second turn."""
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
    same(rollouts, run(policy, reqs), 1e-5)


def test_thoughts_leave_the_state_with_the_context(policy):
    env = make_env(policy[0])
    fields = {f.name: getattr(env, f.name) for f in dataclasses.fields(env)}
    forgetful = requests(Forgetful(**fields))
    rollouts = run(policy, forgetful)
    contexts = [context for t in rollouts for context in t.contexts]
    assert sum(len(t.earlier) for t in rollouts) >= 10
    check_log_probs(policy, contexts)
    again = run(policy, forgetful, order=-1)
    same([context for t in again for context in t.contexts], contexts)


def test_a_prompt_of_one_token_begins_with_an_empty_state(policy):
    env = make_env(policy[0])
    short = [dataclasses.replace(r, prompt=r.prompt[:1]) for r in requests(env)]
    same(run(policy, short, order=-1), run(policy, short))


def test_data_shards_and_split_heads_change_no_token(policy, baseline):
    same(baseline, run(policy, mesh=sharding.make_mesh(1, 2, 2)), 1e-5)


def test_log_probs_of_texts_are_the_learners(policy):
    context, _ = make_context(policy, LONG)
    ((trajectory, *scored), _) = run_episodes(
        context, asked_after(context, 0), asked_after(context, 1)
    )
    prompt = context.prompt_ids('whole', question='cab')
    note = np.append(trajectory.tokens, note_of(context, trajectory))
    for ids, logps in ((prompt, scored[0]), (note, scored[2])):
        for text, logp in zip(('abc', 'deaf head', '<answer>b</answer>', ''), logps, strict=True):
            np.testing.assert_allclose(logp, by_learner(policy, ids, text), atol=1e-5)
