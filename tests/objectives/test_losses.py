"""Built-in losses: each is tested, and says rightly whether it can be cut into tokens."""

import importlib.resources

import numpy as np
import pytest
from batches import CLIPS
from test_policy_gradient import REFERENCES

from zeroplay_jax.objectives.losses import POLICY_LOSSES, resolve_loss

OPTIONS = dict(dual_clip=0.0, **CLIPS)


@pytest.fixture
def arrays(batch):
    return [batch[name] for name in ('logp', 'old_logp', 'advantage', 'mask', 'segment')]


@pytest.mark.parametrize('name', POLICY_LOSSES)
def test_every_built_in_loss_has_invariance_tests_a_reference_and_a_row_on_the_page(name):
    loss = resolve_loss(name)
    assert loss is POLICY_LOSSES[name]
    assert loss.uses_ratio == (name != 'reinforce')
    assert loss.ratio_per_token == (name not in ('sequence_pg', 'geometric_pg'))
    page = importlib.resources.files('zeroplay_jax.objectives').joinpath('README.md').read_text()
    assert f'`{name}`' in page
    assert name in REFERENCES, 'a float64 reference in tests/objectives/test_policy_gradient.py'


@pytest.mark.parametrize('name', POLICY_LOSSES)
def test_an_elementwise_loss_is_one_that_can_be_cut_into_tokens(arrays, name):
    """Losses and statistics of single tokens add up to those of whole rows, for these losses and no other."""
    loss = resolve_loss(name)
    per_token, stats = loss(*arrays, **OPTIONS)
    tokens = [np.reshape(array, (-1, 1)) for array in arrays]
    losses, parts = loss(*tokens, **OPTIONS)
    is_equal = np.allclose(np.reshape(losses, per_token.shape), per_token, atol=1e-6)
    for statistic, expected in stats.items():
        is_equal &= np.allclose(parts[statistic], expected, rtol=1e-5, atol=1e-5)
    assert is_equal == loss.elementwise
