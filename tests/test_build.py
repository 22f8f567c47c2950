"""What a run is built of, and what it lets go of."""

import dataclasses
import gc
import weakref

import jax
import pytest

from zeroplay_jax.configs import drzero
from zeroplay_jax.training import build


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_an_engine_does_not_keep_the_loaded_weights(dtype):
    config = drzero.get_config('mini')
    config.world.update(train=(0, 2), evaluation=(0, 1))
    config.policy.dtype = dtype
    parts = build.build(config)
    engine = build.build_engine(config, parts)
    leaves = [weakref.ref(x) for x in jax.tree.leaves(parts.params)]
    parts = dataclasses.replace(parts, params={})
    gc.collect()
    assert leaves and all(ref() is None for ref in leaves)
    assert parts.library is not None and engine.learners
