"""The update: cutting, packing, padding and devices change nothing; retrieved text teaches nothing; NaN stays out."""

import dataclasses

import jax
import ml_collections
import numpy as np
import pytest
import tiny

from zeroplay_jax.configs import common
from zeroplay_jax.learner.batch import pack
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.loss import LossConfig, loss
from zeroplay_jax.policy import hf, sharding, transformer
from zeroplay_jax.types import ENV, POLICY, PROMPT, Row, Trajectory, UserError

MODES = ('token', 'seq_mean_token_mean', 'seq_mean_token_sum')


@pytest.fixture(scope='module')
def policy(tmp_path_factory):
    folder = tiny.make_folder(tmp_path_factory.mktemp('learner') / 'policy', letters=tiny.LETTERS)
    model = dataclasses.replace(hf.read_config(folder), logit_chunk=16)
    return model, hf.load(folder, model)


def make_rows(model, count=9, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        n = int(rng.integers(8, 25))
        source = rng.choice([POLICY, ENV], n, p=(0.7, 0.3)).astype(np.int8)
        source[: int(rng.integers(1, 5))] = PROMPT
        logp = np.where(source == POLICY, -rng.uniform(1, 4, n), 0).astype(np.float32)
        tokens = rng.integers(0, model.vocab_size, n).astype(np.int32)
        rows.append(
            Row(
                'r',
                Trajectory(tokens, source, logp, (), 'eos', 'r', 0, (i,)),
                0.0,
                i,
                advantage=float(rng.normal()),
            )
        )
    return rows


def role(**changes):
    return ml_collections.ConfigDict(
        common.get_config().solver.to_dict() | dict(learning_rate=0.01) | changes
    )


def learner_of(model, params, config, shape, **options):
    return Learner(model, sharding.make_mesh(), {'r': config}, params, shape, **options)


def gradient(policy, batches, mesh=(1, 1, 1), **changes):
    """Summed gradient and loss over micro-batches."""
    model, params = policy
    mesh = sharding.make_mesh(*mesh)
    params = jax.device_put(params, sharding.parameter_shardings(params, mesh))
    step = jax.jit(
        jax.value_and_grad(
            lambda p, b: loss(model, LossConfig.of(role(**changes)), p, b, b.old_logp, None, 0.0)[0]
        )
    )
    total = None
    for batch in batches:
        new = step(params, jax.device_put(batch, sharding.rows(mesh)))
        total = new if total is None else jax.tree.map(np.add, total, new)
    return total


def close(a, b, tolerance=1e-5):
    assert abs(float(a[0]) - float(b[0])) <= 1e-6 * max(1, abs(float(b[0])))
    for x, y in zip(jax.tree.leaves(a[1]), jax.tree.leaves(b[1]), strict=True):
        assert np.linalg.norm(np.asarray(x) - np.asarray(y)) <= tolerance * (
            np.linalg.norm(y) + 1e-12
        )


LOSSES = [
    *(('token_pg', mode) for mode in MODES),
    pytest.param('reinforce', 'token', marks=pytest.mark.long),
    pytest.param('cispo', 'token', marks=pytest.mark.long),
    pytest.param('sequence_pg', 'seq_mean_token_mean', marks=pytest.mark.long),
    pytest.param('geometric_pg', 'seq_mean_token_mean', marks=pytest.mark.long),
]


@pytest.mark.parametrize('loss_name,mode', LOSSES)
def test_micro_batches_packing_and_padding_change_nothing(policy, mode, loss_name):
    rows = make_rows(policy[0])
    whole = gradient(policy, pack(rows, micro_rows=9, tokens=25, mode=mode), loss=loss_name)
    for micro, tokens in ((1, 25), (2, 60), (4, 200)):
        batches = pack(rows, micro_rows=micro, tokens=tokens, mode=mode)
        close(gradient(policy, batches, loss=loss_name), whole)
    close(
        gradient(policy, pack(rows[::-1], micro_rows=4, tokens=60, mode=mode), loss=loss_name),
        whole,
    )


MESHES = [(2, 2, 2)]
MORE_MESHES = ((1, 2, 1), (1, 1, 2), (1, 4, 1), (1, 8, 1), (8, 1, 1))
MESHES += [pytest.param(mesh, marks=pytest.mark.long) for mesh in MORE_MESHES]


@pytest.mark.parametrize('mesh', MESHES)
def test_device_count_changes_nothing(policy, mesh):
    batches = pack(make_rows(policy[0], 16), micro_rows=8, tokens=50, mode='token')
    close(gradient(policy, batches, mesh), gradient(policy, batches))


def test_only_policy_tokens_teach(policy):
    """Log-probs and advantages at prompt and retrieved places reach neither the loss nor the gradient."""
    rows = make_rows(policy[0])
    batches = pack(rows, micro_rows=9, tokens=25, mode='token')
    want = gradient(policy, batches)
    for batch in batches:
        for name in ('old_logp', 'advantage'):
            array = getattr(batch, name)
            array[~batch.mask] = np.nan
    close(gradient(policy, batches), want, 0.0)


def test_retrieved_text_gets_exactly_zero_gradient(policy):
    """The derivative of the loss by the log-prob of a retrieved or prompt token is exactly 0."""
    from zeroplay_jax.objectives import aggregation, policy_gradient

    (batch,) = pack(make_rows(policy[0], 4), micro_rows=4, tokens=25, mode='token')

    def value(logp):
        per_token, _ = policy_gradient.token_pg(
            logp, batch.old_logp, batch.advantage, batch.mask, clip_low=0.2, clip_high=0.2
        )
        return aggregation.aggregate(per_token, batch.weight)

    slope = np.asarray(jax.grad(value)(batch.old_logp + 0.01))
    assert (slope[~batch.mask] == 0).all() and (slope[batch.mask] != 0).any()


def test_a_first_token_is_never_scored_across_segments(policy):
    rows = make_rows(policy[0], 6)
    for batch in pack(rows, micro_rows=2, tokens=60, mode='token'):
        starts = (batch.positions == 0) & (batch.segment > 0)
        assert not (batch.mask & starts).any()
        for row, first in zip(batch.segment, starts):
            assert row[first].tolist() == list(range(1, first.sum() + 1))


def test_update_moves_probability_with_the_advantage(policy):
    model, params = policy
    rows = make_rows(model, 4)
    batches = pack(rows, micro_rows=2, tokens=50, mode='token')
    score = lambda p, b: transformer.score(model, p, b.tokens, b.positions, b.segment)[0]
    for batch in batches:  # on policy: the ratio is 1, no clip is active
        batch.old_logp[:] = np.where(batch.mask, score(params, batch), 0)
    learner = learner_of(model, params, role(warmup_steps=0), (2, 50))
    gain = lambda p: sum(
        float(np.sum(b.weight * b.advantage * np.asarray(score(p, b)))) for b in batches
    )
    before = gain(learner.params)
    stats = learner.update('r', batches)
    assert gain(learner.params) > before
    assert stats['skipped_updates'] == (0.0, 1.0)
    assert abs(stats['ratio'][0] / stats['ratio'][1] - 1) < 1e-5
    assert stats['entropy'][0] / stats['entropy'][1] > 0.5


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(policy):
    model, params = policy
    learner = learner_of(model, params, role(), (4, 50))
    batches = pack(make_rows(model), micro_rows=4, tokens=50, mode='token')
    learner.update('r', batches)
    before = jax.device_get(learner.state)
    batches[0].advantage[batches[0].mask] = np.inf
    stats = learner.update('r', batches)
    assert stats['skipped_updates'] == (1.0, 1.0) and stats['gradient_norm'][1] == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(learner.state), before)


def test_nothing_to_learn_skips_the_step(policy):
    model, params = policy
    learner = learner_of(model, params, role(), (4, 50))
    before = jax.device_get(learner.state)
    assert learner.update('r', []) == {'skipped_updates': (1.0, 1.0)}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(learner.state), before)


def test_kl_pulls_back_to_the_first_weights(policy):
    model, params = policy
    rows = make_rows(model, 6)
    for row in rows:
        row.advantage = 0.0
    batches = pack(rows, micro_rows=3, tokens=50, mode='token')
    learner = learner_of(model, params, role(kl_coef=1.0, learning_rate=1e-3), (3, 50))
    noisy = jax.tree.map(
        lambda x: x + 0.05 * np.random.default_rng(0).normal(size=x.shape).astype('f'), params
    )
    learner.state = jax.device_put({**learner.state, 'params': noisy}, learner.shardings)
    kl = [(s := learner.update('r', batches))['kl'][0] / s['kl'][1] for _ in range(6)]
    assert kl[-1] < 0.8 * kl[0]


def test_paid_entropy_rises(policy):
    model, params = policy
    rows = make_rows(model, 6)
    for row in rows:
        row.advantage = 0.0
    batches = pack(rows, micro_rows=3, tokens=50, mode='token')
    means = {}
    for coef in (0.0, 1.0):
        config = role(entropy_coef=coef, learning_rate=3e-3, weight_decay=0.0)
        learner = learner_of(model, params, config, (3, 50))
        means[coef] = [
            (s := learner.update('r', batches))['entropy'][0] / s['entropy'][1] for _ in range(5)
        ]
    assert means[1.0][-1] > means[1.0][0] + 0.01 and means[0.0][-1] == pytest.approx(
        means[0.0][0], abs=1e-4
    )


@pytest.mark.parametrize('remat', [True, False])
def test_the_scorer_divides_by_the_temperature_as_the_sampler_does(policy, remat):
    model, params = policy
    model = dataclasses.replace(model, remat=remat)
    tokens = np.arange(12, dtype=np.int32)[None] % model.vocab_size
    positions, segment = np.arange(12)[None], np.ones((1, 12), np.int32)
    x = transformer.hidden(model, params, tokens, positions, segment)[0]
    z = np.asarray(transformer.logits(model, params, x), np.float64) / 0.7
    want = z - np.log(np.exp(z).sum(-1, keepdims=True))
    logp, entropy = transformer.score(model, params, tokens, positions, segment, 0.7)
    np.testing.assert_allclose(logp[0, 1:], want[np.arange(11), tokens[0, 1:]], atol=3e-5)
    np.testing.assert_allclose(entropy[0, 1:], -(np.exp(want) * want).sum(-1)[:-1], atol=3e-5)


def test_warm_up_and_clipping(policy):
    from zeroplay_jax.learner import optimizer

    tx = optimizer.make(role(warmup_steps=4, clip_norm=1.0, weight_decay=0.0, learning_rate=0.1))
    params = {'w': np.ones((2, 2), np.float32)}
    state, sizes = tx.init(params), []
    for _ in range(6):
        updates, state = tx.update({'w': np.full((2, 2), 1e6, np.float32)}, state, params)
        sizes.append(float(np.abs(updates['w']).max()))
    np.testing.assert_allclose(sizes, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1], rtol=1e-4)


def test_weight_decay_leaves_norms_alone():
    from zeroplay_jax.learner import optimizer

    params = {'kernel': np.ones((2, 2)), 'scale': np.ones(2)}
    assert optimizer.matrices(params) == {'kernel': True, 'scale': False}


def test_one_program_for_any_number_of_micro_batches(policy):
    model, params = policy
    learner = learner_of(model, params, role(), (2, 50))
    for count in (3, 9, 30):
        learner.update('r', pack(make_rows(model, count), micro_rows=2, tokens=50, mode='token'))
    update = learner._role_updates['r']
    assert update.accumulate._cache_size() == 1 and update.apply._cache_size() == 1


def test_a_trajectory_that_is_too_long_is_refused(policy):
    with pytest.raises(ValueError, match='micro.tokens=10'):
        pack(make_rows(policy[0]), micro_rows=1, tokens=10, mode='token')


OUTSIDE_LOSS = """
from zeroplay_jax.objectives import masking


def scaled(logp, old_logp, advantage, mask, segment, *, clip_low, clip_high, dual_clip):
    mask, logp, advantage = masking.masked('scaled', mask, logp, advantage)
    return -2 * advantage * logp, {'scaled_logp': masking.total(2 * logp, mask)}
"""


def test_a_loss_outside_the_project_trains(policy, tmp_path, monkeypatch):
    """Twice REINFORCE: the same update but for the gradient's norm, with the statistics of the outside loss."""
    (tmp_path / 'outside_learner_losses.py').write_text(OUTSIDE_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    model, params = policy
    batches = pack(make_rows(model, 4), micro_rows=2, tokens=50, mode='token')
    stats = {}
    for name in ('reinforce', 'outside_learner_losses:scaled'):
        learner = learner_of(model, params, role(loss=name, clip_norm=1e9), (2, 50))
        stats[name] = learner.update('r', batches)
    plain, outside = stats.values()
    assert outside['scaled_logp'][0] == pytest.approx(2 * plain['logp'][0], rel=1e-6)
    assert outside['gradient_norm'][0] == pytest.approx(2 * plain['gradient_norm'][0], rel=1e-5)
    assert 'ratio' in plain and 'ratio' not in outside


def test_an_unknown_loss_is_one_clear_line(policy):
    model, params = policy
    with pytest.raises(UserError, match="config.r.loss: loss 'ppo' is not built in") as error:
        learner_of(model, params, role(loss='ppo'), (2, 50))
    assert '\n' not in str(error.value)
