"""Top-p and top-k: the ids that a token was drawn from travel with it, and the update reads these alone."""

import dataclasses

import numpy as np
import pytest
import torch
from request_cases import CONFIG, PAGED, Forgetful, make_env, make_scheduler, play, requests
from transformers import TopKLogitsWarper, TopPLogitsWarper

from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout.slot_state import kept_ids
from zeroplay_jax.selfplay.update import micro_batches
from zeroplay_jax.settings.rollouts import most_kept
from zeroplay_jax.settings.schema import TrainedRole
from zeroplay_jax.types import POLICY, Row

TOLERANCE = 1e-5


def sets_of(logits, temperature, top_p, top_k, most):
    truncation = np.tile(np.float32([top_p, top_k]), (len(logits), 1))
    kept = kept_ids(most, logits, np.full(len(logits), temperature, 'f'), truncation)
    assert kept.shape == (len(logits), most)
    return [[int(i) for i in row if i >= 0] for row in kept]


@pytest.mark.parametrize(
    'temperature,top_p,top_k',
    [(0.6, 0.95, 20), (1.0, 0.9, 0), (1.5, 1.0, 4), (0.5, 0.3, 9), (2.0, 0.999, 60)],
)
def test_kept_ids_are_those_of_hugging_face(temperature, top_p, top_k):
    logits = np.random.default_rng(0).normal(0, 3, (64, 50)).astype(np.float32)
    scores = torch.tensor(logits) / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    expected = [set(torch.nonzero(torch.isfinite(row))[:, 0].tolist()) for row in scores]
    found = sets_of(logits, temperature, top_p, top_k, most_kept(top_p, top_k))
    assert list(map(set, found)) == expected
    # Likeliest first.
    for row, ids in zip(logits, found, strict=True):
        assert ids == sorted(ids, key=lambda i: -row[i])


def test_of_equal_ids_the_lower_are_kept_and_never_more_than_the_most():
    flat = np.zeros((2, 8), np.float32)
    assert sets_of(flat, 1.0, 0.3, 0, 8) == [[0, 1, 2]] * 2
    assert sets_of(flat, 1.0, 0.99, 0, 5) == [[0, 1, 2, 3, 4]] * 2
    assert sets_of(flat, 1.0, 1.0, 500, most_kept(1.0, 500)) == [[*range(8)]] * 2
    # Whatever is the likeliest id is kept; a draw without truncation, or at temperature 0, leaves nothing out.
    assert sets_of(flat, 1.0, 1e-6, 0, 8) == [[0]] * 2
    assert sets_of(flat, 1.0, 1.0, 0, 8) == sets_of(flat, 0.0, 0.5, 3, 8) == [[]] * 2


def gap_of(learner, batches):
    """Largest difference of log-probs of learner and sampler."""
    rescored = learner.recompute_old_logp('r', batches)
    return max(np.abs(b.old_logp - b.sampler_logp)[b.mask].max() for b in rescored)


@pytest.mark.parametrize(
    'config,top_p,top_k', [(CONFIG, 0.6, 0), (CONFIG, 1.0, 4), (PAGED, 0.7, 6)]
)
def test_the_update_reads_the_ids_that_tokens_were_drawn_from(policy, config, top_p, top_k):
    codec, model, params = policy
    role = TrainedRole(temperature=0.7, top_p=top_p, top_k=top_k, kl_coef=0.1)
    config = dataclasses.replace(config, kept=most_kept(top_p, top_k))
    env = Forgetful(**vars(make_env(codec)))
    asked = [
        dataclasses.replace(request, truncation=(top_p, top_k))
        for request in requests(env, temperature=0.7)
    ]
    # A neighbour that is evaluated.
    greedy = dataclasses.replace(asked[0], identity=(9,), temperature=0.0)
    *rollouts, one, two, three = play(make_scheduler(policy, config)[0], [*asked, greedy])
    np.testing.assert_array_equal(one.tokens, two.tokens)
    assert not len(three.kept)
    assert any(rollout.earlier for rollout in rollouts)

    rows = [Row('r', rollout, 0.0, i, advantage=1.0) for i, rollout in enumerate(rollouts)]
    for context in (context for rollout in rollouts for context in rollout.contexts):
        sampled = np.flatnonzero(context.source == POLICY)
        np.testing.assert_array_equal(np.unique(context.kept[:, 0]), sampled)
        for position in sampled:
            ids = context.kept[context.kept[:, 0] == position, 1]
            assert context.tokens[position] in ids
            assert len(ids) == top_k if top_p == 1 else 1 <= len(ids) <= (top_k or config.kept)
    batches = micro_batches(rows, role, (4, 192))
    shapes = {batch.for_devices(config.kept).kept.shape for batch in batches}
    assert shapes == {(4, 192, config.kept)}
    # On hosts they are as many as were drawn from.
    ids = sum(len(context.kept) for rollout in rollouts for context in rollout.contexts)
    assert sum(len(record) for batch in batches for record in batch.kept) == ids
    learner = Learner(model, sharding.make_mesh(), {'r': role}, params, (4, 192))
    assert gap_of(learner, batches) <= TOLERANCE
    stats = learner.update('r', batches)
    means = {name: total / count for name, (total, count) in stats.items()}
    assert means['prob_gap'] <= TOLERANCE
    # The reference are the same weights.
    assert abs(means['kl']) <= TOLERANCE
    # All ids are more than those that were drawn from.
    free = [dataclasses.replace(batch, kept=None) for batch in batches]
    assert gap_of(learner, free) > 100 * TOLERANCE
