"""Adapters over a frozen base; rollouts with several of them are those of merged weights."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from small_policies import equal, packed

from zeroplay_jax.policy import adapters, hf, transformer
from zeroplay_jax.settings.schema import LINEARS


@pytest.mark.parametrize('mode', [{}, {'scan': True, 'remat': True}])
def test_a_fresh_adapter_changes_no_bit(published, mode):
    model = dataclasses.replace(hf.read_config(published), **mode)
    base = hf.load(published, model) | {adapters.SCALE: jnp.full(1, 2.0)}
    fresh = adapters.init(base, LINEARS, 3, seed=0, name='solver')
    hidden = jax.jit(lambda params: transformer.hidden(model, params, *packed(model)))
    equal(hidden(adapters.join(base, fresh)), hidden(base))
