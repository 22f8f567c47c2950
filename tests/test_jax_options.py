"""Options of JAX, of the environment or of a notebook: a run gives the same numbers, or is refused in one line."""

import jax
import numpy as np
import pytest
import tiny
from refused_calls import refused

import zeroplay_jax as zp
from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout import slot_state

# Option → a value under which dtypes, noise or products differ, or programs do not trace.
REFUSED = {
    'jax_default_matmul_precision': 'bfloat16',
    'jax_enable_x64': True,
    'jax_numpy_dtype_promotion': 'strict',
    'jax_numpy_rank_promotion': 'raise',
    'jax_threefry_partitionable': False,
}
# Option → a value under which noise is the same because it names its generator.
NOISE = {
    'jax_default_prng_impl': ('rbg', 'unsafe_rbg'),
    'jax_enable_custom_prng': (True,),
    'jax_high_dynamic_range_gumbel': (True,),
    'jax_legacy_prng_key': ('error',),
    'jax_random_seed_offset': (7,),
}


@pytest.fixture
def option():
    """A function that sets an option for the test."""
    before = {}

    def change(name, value):
        before.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)

    yield change
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize('name', REFUSED)
def test_an_option_that_changes_numbers_is_refused(option, name):
    option(name, REFUSED[name])
    line = refused(sharding.make_mesh)
    assert line.startswith(f'{name}={REFUSED[name]}: ')
    assert f'unset {name.upper()}, or call jax.config.update' in line


def test_an_option_that_is_set_later_is_refused(option, tmp_path):
    policy = zp.load_policy(tiny.make_folder(tmp_path / 'policy'), zp.config('drzero', 'mini'))
    option('jax_enable_x64', True)
    assert refused(zp.policy_loss, policy, [], []).startswith('jax_enable_x64=True: ')


def tokens_of_noise():
    """Tokens of equal logits: they are those with the largest noise."""
    rows = 16
    key = np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2)
    logits = np.zeros((rows, 97), np.float32)
    # A new function: JAX traces it again, whatever is in the keys of its cache.
    sample = jax.jit(lambda *arrays: slot_state.sample(*arrays))
    token, _ = sample(logits, np.ones(rows, np.float32), key, np.arange(rows))
    return token.tolist()


@pytest.mark.parametrize(('name', 'value'), [(n, v) for n, vs in NOISE.items() for v in vs])
def test_options_of_noise_change_no_token(option, name, value):
    expected = tokens_of_noise()
    assert len(set(expected)) > 8
    option(name, value)
    assert tokens_of_noise() == expected
