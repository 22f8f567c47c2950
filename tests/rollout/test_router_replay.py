"""Rollouts of a mixture of experts: the experts of every token travel with it, and the update uses them again."""

import dataclasses
import time

import jax
import numpy as np
import pytest
from request_cases import (
    CONFIG,
    EXPERTS,
    PAGED,
    echo,
    make_env,
    make_policy,
    make_scheduler,
    play,
    requests,
    run,
)

from zeroplay_jax.learner.batch import pack
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.types import POLICY, Row

# Few pages: rollouts give theirs to others while they search.
ENGINES = {'slots': CONFIG, 'few pages': dataclasses.replace(PAGED, slots=6, pages=8)}
TOLERANCE = 2e-4

score = jax.jit(transformer.score, static_argnums=(0, 5, 6))


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    """(codec, model, parameters) whose routers can hardly tell two and two experts apart; a token has three."""
    codec, model, params = make_policy(tmp_path_factory.mktemp('moe') / 'policy', **EXPERTS)
    for name in ('layer_0', 'layer_1'):
        router = np.array(params[name]['moe']['router'])
        noise = np.random.default_rng(0).uniform(-1e-7, 1e-7, (router.shape[0], 4))
        router[:, 4:] = router[:, :4] * (1 + noise)
        params[name]['moe']['router'] = jax.numpy.asarray(router)
    return codec, model, params


def slow_echo(queries):
    time.sleep(0.01)
    return echo(queries)


def gaps(policy, rollouts, replays=True, **changes):
    """Largest and mean difference of the update's log-probs and the sampler's."""
    _, model, params = policy
    rows = [Row('r', rollout, 0.0, i, advantage=1.0) for i, rollout in enumerate(rollouts)]
    batches = pack(rows, micro_rows=4, tokens=192, mode='token')
    model = dataclasses.replace(model, **changes)
    found = []
    for batch in batches:
        record = batch.experts if replays else None
        arguments = (batch.tokens, batch.positions, batch.segment, 1.0, None, record)
        logp, _ = score(model, params, *arguments)
        found.append(np.abs(np.asarray(logp) - batch.old_logp)[batch.mask])
    found = np.concatenate(found)
    return found.max(), found.mean()


@pytest.mark.parametrize('engine', ENGINES)
def test_the_update_computes_what_the_sampler_did_where_routers_hardly_choose(policy, engine):
    scheduler, _ = make_scheduler(policy, ENGINES[engine])
    # Rollouts that wait for their results can lose their pages.
    search = slow_echo if engine == 'few pages' else echo
    rollouts = play(scheduler, requests(make_env(policy[0], search)))
    assert bool(scheduler.stats['evictions']) == (engine == 'few pages')
    assert any(rollout.calls for rollout in rollouts)
    for rollout in rollouts:
        assert rollout.experts.dtype == np.int8
        assert rollout.experts.shape == (len(rollout.tokens), 6)
        assert (rollout.experts[:-1] >= 0).all() and (rollout.experts[-1] == -1).all()
    assert gaps(policy, rollouts)[0] <= TOLERANCE
    assert gaps(policy, rollouts, replays=False)[0] > 10 * TOLERANCE


def test_shards_and_devices_that_share_experts_record_what_they_compute(policy):
    rollouts = run(policy, config=PAGED, mesh=sharding.make_mesh(2, 1, 2))
    assert sum(int(np.sum(rollout.source == POLICY)) for rollout in rollouts) > 100
    assert gaps(policy, rollouts)[0] <= TOLERANCE
    # In another dtype the update stays near the sampler.
    _, replayed = gaps(policy, rollouts, dtype='bfloat16')
    _, free = gaps(policy, rollouts, replays=False, dtype='bfloat16')
    assert replayed < 0.5 * free
