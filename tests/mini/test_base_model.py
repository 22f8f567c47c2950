import dataclasses
import zlib

import jax
import numpy as np
import pytest

from tools.checkpoints import (
    base_hops,
    base_model,
    base_open,
    batches,
    demos,
    supervised,
)
from tools.checkpoints.stages import STAGES, Stage
from zeroplay_jax.policy import hf, transformer
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.types import POLICY

pytestmark = pytest.mark.results

TINY = Stage('tiny', steps=12, rows=4, tokens=128, shares={'passage': 1.0})


@pytest.fixture(scope='module')
def blank(tmp_path_factory):
    folder = tmp_path_factory.mktemp('blank')
    base_model.write_config_and_tokenizer(folder)
    return folder


@pytest.fixture(scope='module')
def stock():
    return list(batches.libraries(0, 'train', count=2, worlds=2))


def first_batch(stage, stock, codec, step=0):
    return batches.pack(stage, batches.episodes(stage, demos.ROLES, stock, codec, 0, step))


def test_packing_keeps_episodes_whole(blank, stock):
    codec = Codec(blank)
    stage = dataclasses.replace(TINY, tokens=512, shares={})
    batch = first_batch(stage, stock, codec)
    stream = batches.episodes(stage, demos.ROLES, stock, codec, 0, 0)
    wanted = {tokens.tobytes(): source for tokens, source in (next(stream) for _ in range(200))}
    for row in range(stage.rows):
        assert batch['segment'][row].max() >= 1
        for segment in range(1, batch['segment'][row].max() + 1):
            at = batch['segment'][row] == segment
            source = wanted[batch['tokens'][row][at].tobytes()]
            assert (batch['positions'][row][at] == np.arange(at.sum())).all()
            assert (batch['policy'][row][at] == (source == POLICY)).all()
    assert not batch['tokens'][batch['segment'] == 0].any()


def test_batches_are_a_function_of_seed_stage_and_step(blank, stock):
    codec = Codec(blank)
    same = first_batch(TINY, stock, codec), first_batch(TINY, stock, codec)
    assert all((same[0][k] == same[1][k]).all() for k in same[0])
    assert (first_batch(TINY, stock, codec, step=1)['tokens'] != same[0]['tokens']).any()


def test_loss_counts_each_kind_of_token_once(blank, stock):
    codec = Codec(blank)
    config = hf.read_config(blank)
    params = transformer.init(config, jax.random.key(0))
    batch = first_batch(TINY, stock, codec)
    value, info = supervised.loss(config, TINY.context_weight, params, batch)
    places = (batch[name] for name in ('tokens', 'positions', 'segment'))
    logp, _ = transformer.score(config, params, *places)
    nll = -np.asarray(logp)
    inside = (batch['segment'] > 0) & (batch['positions'] > 0)
    own = inside & (batch['policy'] > 0)
    np.testing.assert_allclose(info['loss'], nll[own].mean(), rtol=1e-5)
    expected = nll[own].mean() + TINY.context_weight * nll[inside & ~own].mean()
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.long
def test_training_learns_and_is_reproducible(blank, stock):
    codec, config = Codec(blank), hf.read_config(blank)
    batch = first_batch(TINY, stock, codec, step=99)
    runs = []
    for _ in range(2):
        params, log = transformer.init(config, jax.random.key(0)), []
        before = float(supervised.loss(config, TINY.context_weight, params, batch)[0])
        params = supervised.train(TINY, config, params, codec, demos.ROLES, stock, 0, log)
        runs.append((params, log))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), runs[0][0], runs[1][0]))
    assert runs[0][1] == runs[1][1] and runs[0][1][-1]['step'] == TINY.steps
    assert float(supervised.loss(config, TINY.context_weight, runs[0][0], batch)[0]) < before - 0.1


def test_stage_names_give_different_streams():
    stages = (*STAGES, *base_open.STAGES, *base_hops.STAGES)
    keys = [zlib.crc32(stage.name.encode()) for stage in stages]
    assert len(set(keys)) == len(keys)
