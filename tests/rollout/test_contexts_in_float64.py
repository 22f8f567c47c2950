"""Forks and folds against other code: transformers' model and NumPy, both in float64."""

import dataclasses

import ml_collections
import numpy as np
import pytest
import tiny
import transformers
from test_continuing import QUESTIONS, fold, make_context, run

from zeroplay_jax.learner.role_update import step_loss
from zeroplay_jax.policy import hf
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.selfplay.update import micro_batches
from zeroplay_jax.settings.schema import TrainedRole
from zeroplay_jax.types import POLICY, Row

CLIP = dict(clip_low=0.05, clip_high=0.1)


@pytest.fixture(scope='module')
def both(tmp_path_factory):
    """((codec, model, weights), log-probs of all tokens but the first by the other model)."""
    import torch

    folder = tiny.make_folder(tmp_path_factory.mktemp('both') / 'policy', letters=tiny.LETTERS)
    model = hf.read_config(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).double().eval()

    def log_probs(ids):
        with torch.no_grad():
            logits = theirs(torch.tensor([list(map(int, ids))])).logits[0].numpy()
        assert logits.dtype == np.float64
        # The last position predicts nothing that is there.
        logits = logits[:-1] - logits[:-1].max(-1, keepdims=True)
        chosen = np.take_along_axis(logits, np.asarray(ids)[1:, None], -1)[:, 0]
        return chosen - np.log(np.sum(np.exp(logits), -1))

    return (Codec(folder), model, hf.load(folder, model)), log_probs


def test_the_loss_of_folded_rollouts_reads_the_ratio_of_all_their_contexts(both):
    policy, log_probs = both
    context, _ = make_context(policy)
    folded = run(context, *(fold(context, number) for number in range(len(QUESTIONS))))
    rows, losses = [], []
    for number, (*_, rollout) in enumerate(folded):
        # Other old log-probs than those of the weights, so that there are ratios to clip.
        contexts = []
        for each in rollout.contexts:
            shift = 0.2 * np.sin(np.arange(len(each.logp)) + number) * (each.source == POLICY)
            contexts.append(dataclasses.replace(each, logp=(each.logp + shift).astype(np.float32)))
        *earlier, last = contexts
        advantage = (-1.0) ** number * (1 + number)
        trajectory = dataclasses.replace(last, earlier=tuple(earlier))
        rows.append(Row('whole', trajectory, 1.0, number, advantage=advantage))
        log_ratios = []
        for each in contexts:
            sampled = each.source[1:] == POLICY
            log_ratios += list(log_probs(each.tokens)[sampled] - each.logp[1:][sampled])
        ratio = np.exp(np.mean(log_ratios))
        clipped = np.clip(ratio, 1 - CLIP['clip_low'], 1 + CLIP['clip_high'])
        losses.append(max(-advantage * ratio, -advantage * clipped))
    assert any(len(row.trajectory.contexts) == 3 for row in rows)
    settings = ml_collections.ConfigDict(TrainedRole().model_dump())
    settings.update(loss='sequence_pg', aggregation='seq_mean_token_mean', kl_coef=0.0, **CLIP)
    batches = micro_batches(rows, settings, (2, 240))
    value, _ = step_loss(policy[1], settings, policy[2], policy[2], batches)
    np.testing.assert_allclose(float(value), np.mean(losses), rtol=1e-4)
