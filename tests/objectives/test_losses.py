"""Losses by name: the built-in ones, and functions of modules outside this project."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from batches import CLIPS

from zeroplay_jax.objectives import policy_gradient
from zeroplay_jax.objectives.losses import POLICY_LOSSES, PolicyLoss, resolve_loss

OPTIONS = dict(dual_clip=0.0, **CLIPS)

OUTSIDE = """
import jax.numpy as jnp
from zeroplay_jax.objectives import masking
from zeroplay_jax.objectives.losses import PolicyLoss


def squared(logp, old_logp, advantage, mask, segment, *, clip_low, clip_high, dual_clip):
    mask, logp, advantage = masking.masked('squared', mask, logp, advantage)
    return advantage * logp**2, {'square': masking.total(logp**2, mask)}


declared = PolicyLoss(squared, statistics=('square',), uses_ratio=False, per_token=True)
misdeclared = PolicyLoss(squared, statistics=('cube',))


def summed(logp, *arrays, **options):
    return jnp.sum(logp), {}


def alone(logp, old_logp, advantage, mask, segment, *, clip_low, clip_high, dual_clip):
    return logp


def averaged(logp, old_logp, advantage, mask, segment, *, clip_low, clip_high, dual_clip):
    return logp, {'x': logp.mean()}


number = 3
"""


def arrays(batch):
    return [batch[name] for name in ('logp', 'old_logp', 'advantage', 'mask', 'segment')]


@pytest.fixture
def outside(tmp_path, monkeypatch):
    (tmp_path / 'outside_losses.py').write_text(OUTSIDE)
    (tmp_path / 'outside_broken.py').write_text('import no_such_dependency\n')
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize('name', POLICY_LOSSES)
def test_built_in_losses_have_one_signature_and_return_the_declared_statistics(batch, name):
    loss = resolve_loss(name)
    assert loss is POLICY_LOSSES[name]
    per_token, stats = loss(*arrays(batch), **OPTIONS)
    assert per_token.shape == batch['mask'].shape and per_token.dtype == jnp.float32
    assert set(stats) == set(loss.statistics)
    parameters = list(inspect.signature(loss.function).parameters)
    # The last one is passed to losses that declare means alone.
    assert parameters == list(inspect.signature(PolicyLoss.__call__).parameters)[1:-1]


def test_properties_of_the_built_in_losses():
    assert [name for name, loss in POLICY_LOSSES.items() if not loss.uses_ratio] == ['reinforce']
    per_sequence = {name for name, loss in POLICY_LOSSES.items() if not loss.per_token}
    assert per_sequence == {'sequence_pg', 'geometric_pg'}


@pytest.mark.parametrize('name', POLICY_LOSSES)
def test_an_elementwise_loss_is_one_that_can_be_cut_into_tokens(batch, name):
    """Losses and statistics of single tokens add up to those of whole rows, for these losses and no other."""
    loss = resolve_loss(name)
    per_token, stats = loss(*arrays(batch), **OPTIONS)

    def of_token(token):
        one_token = [np.reshape(array, -1)[token][None, None] for array in arrays(batch)]
        return loss(*one_token, **OPTIONS)

    losses, parts = zip(*map(of_token, range(batch['mask'].size)))
    is_equal = np.allclose(np.reshape(losses, per_token.shape), per_token, atol=1e-6)
    for statistic, expected in stats.items():
        sums = np.sum([part[statistic] for part in parts], axis=0)
        is_equal &= np.allclose(sums, expected, rtol=1e-5, atol=1e-5)
    assert is_equal == loss.elementwise


def test_a_function_outside_the_project_is_a_loss(batch, outside):
    loss = resolve_loss('outside_losses:squared')
    per_token, stats = loss(*arrays(batch), **OPTIONS)
    mask = batch['mask']
    expected = np.where(mask, batch['advantage'] * batch['logp'] ** 2, 0)
    np.testing.assert_allclose(per_token, expected, rtol=1e-6)
    assert set(stats) == {'square'} and stats['square'][1] == mask.sum()
    assert loss.uses_ratio and loss.per_token and loss.statistics is None
    # It may couple tokens.
    assert not loss.elementwise


@pytest.mark.parametrize(
    'name, message',
    [
        ('misdeclared', r"loss squared: returned statistics \['square'\], declared \['cube'\]"),
        ('summed', r'loss summed: returned shape \(\) .*; return one value per token'),
        ('alone', r'loss alone: returned a .*; return \(losses of the tokens, .*\)'),
        ('averaged', r"loss averaged: statistic 'x' is a single value; return \(sum, count\)"),
    ],
)
def test_wrong_results_of_an_outside_loss_are_one_clear_line(batch, outside, name, message):
    loss = resolve_loss(f'outside_losses:{name}')
    with pytest.raises(ValueError, match=message) as error:
        loss(*arrays(batch), **OPTIONS)
    assert '\n' not in str(error.value)
    declared = resolve_loss('outside_losses:declared')
    assert not declared.uses_ratio and declared.statistics == ('square',)
    declared(*arrays(batch), **OPTIONS)


@pytest.mark.parametrize(
    'name, message',
    [
        (
            'ppo',
            "loss 'ppo' is not built in; choose one of reinforce, token_pg, .*, cispo, or give",
        ),
        ('token_gp', r'; did you mean token_pg\?$'),
        ('outside_losses', "is not built in; .* give 'package.module:function'"),
        ('outside_losses:', 'is not built in'),
        (':squared', 'is not built in'),
        ('.outside_losses:squared', 'is not built in'),
        ('no_such_module:f', "cannot import module 'no_such_module' .*; check its name"),
        ('outside_losses.deeper:f', "cannot import module 'outside_losses.deeper'"),
        ('outside_broken:f', "No module named 'no_such_dependency'"),
        ('outside_losses:absent', "module 'outside_losses' has no 'absent'; define it there"),
        ('outside_losses:number', "'number' is a int; name a function"),
        ('textwrap:dedent', r'too many positional .*; it is called with \(logp, old'),
    ],
)
def test_bad_names_are_one_clear_line(outside, name, message):
    with pytest.raises(ValueError, match=message) as error:
        resolve_loss(name)
    assert '\n' not in str(error.value)


def test_a_loss_per_sequence_is_not_elementwise():
    with pytest.raises(ValueError, match='ratio per sequence is not elementwise'):
        PolicyLoss(policy_gradient.sequence_pg, per_token=False, elementwise=True)
