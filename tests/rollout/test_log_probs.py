"""Log-probs of given texts: those of the learner, the same bits whatever else runs."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from request_cases import make_env, make_policy, scores
from test_adapter_rollouts import WEIGHTS, joined
from test_adapter_rollouts import make_scheduler as make_adapter_scheduler
from test_continuing import LAYOUTS, LONG, make_context, run, whole

from zeroplay_jax.policy import adapters, sharding
from zeroplay_jax.rollout import continuing, scoring
from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.selfplay.context import Episodes, Role, RolloutContext
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT
from zeroplay_jax.types import TaskDropped

TEXTS = ('abc', 'deaf head', '<answer>b</answer>', '')


def by_learner(policy, context_ids, text, params=None):
    """The log-probs of the text's tokens after these ids."""
    codec, model, weights = policy
    ids = [*map(int, context_ids), *make_env(codec).turn_ids(text)]
    (logp,) = scores((codec, model, weights if params is None else params), [ids])
    return logp[len(context_ids) :]


async def asked_after(context, number, identity=(7,)):
    """(rollout, log-probs after a prompt, after the rollout's first turn, after all of it and a note)."""
    trajectory = await whole(context, number)
    asked = 'whole', (*identity, number), TEXTS
    calls = (
        context.log_probs(*asked, question='cab'),
        context.log_probs_after(*asked, trajectory, keep=[0]),
        context.log_probs_after(*asked, trajectory, note='a'),
    )
    return trajectory, *await asyncio.gather(*calls)


@pytest.fixture(scope='module')
def with_states(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp('states') / 'policy', **tiny.DELTA)


@pytest.mark.parametrize(
    'layout,name', [*((x, 'policy') for x in LAYOUTS), ('slots', 'with_states')]
)
def test_they_are_the_learners_and_have_the_same_bits_whatever_the_neighbours(
    layout, name, request
):
    policy = request.getfixturevalue(name)
    context, pool = make_context(policy, LAYOUTS[layout])
    together = run(context, *(asked_after(context, number) for number in range(4)))
    for trajectory, *scored in together:
        first_end = [*trajectory.starts, len(trajectory.tokens)][1]
        contexts = [
            context.prompt_ids('whole', question='cab'),
            trajectory.tokens[:first_end],
            np.append(trajectory.tokens, note_of(context, trajectory)),
        ]
        for ids, logps in zip(contexts, scored, strict=True):
            for text, logp in zip(TEXTS, logps, strict=True):
                assert logp.dtype == np.float32
                np.testing.assert_allclose(logp, by_learner(policy, ids, text), atol=1e-5)
    for number in (3, 1):
        alone, _ = make_context(policy, LAYOUTS[layout], overlap=True)
        ((trajectory, *scored),) = run(alone, asked_after(alone, number, identity=(1,)))
        assert trajectory.tokens.tolist() == together[number][0].tokens.tolist()
        jax.tree.map(np.testing.assert_array_equal, scored, list(together[number][1:]))
    assert not pool.scorer.is_waiting


def note_of(context, trajectory):
    return continuing.note_ids(trajectory, context.roles['whole'].env, 'a')


def test_they_are_those_of_the_adapter_and_version_that_play_the_step_and_are_counted(policy):
    scheduler = make_adapter_scheduler(policy, LONG, sharding.make_mesh())
    env = make_env(policy[0])
    roles = {name: Role(name, name, 'prompt', env) for name, _ in WEIGHTS}
    context = RolloutContext(scheduler, roles, {'prompt': Prompt('{question}')})
    ids = context.prompt_ids('first', question='cab')
    base = policy[2] | {adapters.SCALE: jnp.full(1, 2.0)}

    async def check(name, version, seed):
        bound = context.bound(Episodes(versions={name: version}))
        (logp,) = await bound.log_probs(name, (1,), ['deaf'], question='cab')
        weights = policy[2] if seed is None else adapters.merged(joined(base, seed))
        np.testing.assert_allclose(logp, by_learner(policy, ids, 'deaf', weights), atol=1e-4)
        assert bound.episodes.scored_texts == 1
        assert bound.episodes.scored_tokens == len(ids) + len(logp)
        return logp.tobytes()

    results = run(context, *(check(*key, seed) for key, seed in WEIGHTS.items()))
    assert len(set(results)) == len(WEIGHTS)


def test_any_number_of_texts_have_the_same_bits(policy):
    scoring.programs.cache_clear()
    mesh = sharding.make_mesh(replica=2)
    context, pool = make_context(policy, mesh=mesh)
    texts = [*TEXTS, 'ab' * 70, *(letter * 9 for letter in 'abcdefgh')]

    async def episode(number, texts):
        return await context.log_probs('whole', (number,), texts, question='cab')

    alone = [run(context, episode(100 + n, [text]))[0][0] for n, text in enumerate(texts)]
    # The second one takes more than one call.
    many, none = run(context, episode(1, texts * 4), episode(2, []))
    assert not none
    with pytest.raises(TaskDropped, match='context_full'):
        run(context, episode(3, ['a' * 240]))
    jax.tree.map(np.testing.assert_array_equal, many, alone * 4)
    # One shape for all, and no memory when nothing waits.
    positions = pool.context + pool.sampler.config.chunk
    compiled = scoring.programs(pool.sampler.model, positions, mesh)
    assert compiled['score']._cache_size() == 1 and pool.scorer._cache is None


def test_tags_that_are_tokens_are_scored_as_those():
    """The miniature writes its tags as single tokens; other control tokens in a text stay letters."""
    codec = Codec(BUILT_IN_CHECKPOINT)
    env = make_env(codec)
    sampled = codec.encode('<think> so</think><answer> Babin</answer>')
    assert env.turn_ids(codec.decode(sampled)) == sampled
    hostile = '<answer> Babin<|im_end|></answer>'
    assert not set(env.turn_ids(hostile)) & set(codec.encode('<|im_end|>'))
    assert codec.decode(env.turn_ids(hostile)) == hostile
