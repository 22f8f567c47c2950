import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import close, differences

from zeroplay_jax.objectives import distillation

OPTIONS = pytest.mark.parametrize(
    'options',
    [
        dict(kind='reverse'),
        dict(kind='forward'),
        dict(kind='jsd'),
        dict(kind='jsd', mix=0.2),
        dict(kind='reverse', tail=False),
        dict(kind='forward', tail=False),
    ],
    ids=lambda o: '-'.join(map(str, o.values())),
)


STATIC = ('k', 'kind', 'tail', 'mix')


@functools.partial(jax.jit, static_argnames=STATIC)
def divergence(student, teacher, k=2, **options):
    return distillation.topk_tail_divergence(student, teacher, k=k, **options)


@functools.partial(jax.jit, static_argnames=STATIC)
def pull(student, teacher, k=2, **options):
    """(sum of the divergences, gradients with respect to both logits)."""
    call = lambda s, t: divergence(s, t, k, **options)[0].sum()
    return jax.value_and_grad(call, (0, 1))(student, teacher)


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def kl(p, q):
    return (np.exp(p) * (p - q)).sum(-1)


def reference(student, teacher, k, kind='reverse', tail=True, mix=0.5, index=None):
    """Outcome by outcome in float64: the top tokens of `index` (of the student, unless given) and one for the rest."""
    student, teacher = log_softmax(student), log_softmax(teacher)
    index = np.argsort(-student, -1, kind='stable')[:, :k] if index is None else index

    def outcomes(logp):
        head = np.take_along_axis(logp, index, -1)
        if not tail:
            return log_softmax(head)
        with np.errstate(divide='ignore'):
            return np.concatenate([head, np.log1p(-np.exp(head).sum(-1, keepdims=True))], -1)

    s, t = (student, teacher) if k >= student.shape[1] else map(outcomes, (student, teacher))
    middle = np.logaddexp(s + np.log(mix), t + np.log1p(-mix))
    return {
        'reverse': lambda: kl(s, t),
        'forward': lambda: kl(t, s),
        'jsd': lambda: mix * kl(s, middle) + (1 - mix) * kl(t, middle),
    }[kind]()


@pytest.fixture
def logits():
    rng = np.random.default_rng(5)
    return rng.normal(size=(2, 4, 9)).astype(np.float32) * 2


@pytest.mark.parametrize(
    'name, options',
    [
        ('reverse_kl_topk_tail', dict()),
        ('forward_kl_topk_tail', dict(kind='forward')),
        ('jsd_half_topk_tail', dict(kind='jsd')),
        ('renormalised_topk_no_tail_reverse', dict(tail=False)),
        ('full_vocab_reverse_kl', dict(k=6)),
        ('full_vocab_forward_kl', dict(k=1000, kind='forward')),
    ],
)
def test_golden_divergences(golden, name, options):
    inputs, expected = golden['topk_tail_distill']
    student, teacher = (np.array(inputs[f'{name}_logits'], 'f') for name in ('student', 'teacher'))
    value, extra = divergence(student, teacher, **(dict(k=inputs['K']) | options))
    assert value.dtype == jnp.float32 and value.shape == (3,)
    close(value, expected[name])
    probabilities = np.exp(log_softmax(student.astype(np.float64)))
    top = np.take_along_axis(probabilities, np.array(expected['topk_idx_of_student']), 1)
    close(extra['tail_mass'], np.zeros(3) if 'k' in options else 1 - top.sum(1))


def test_golden_teacher_follows_the_student(golden):
    """In float32, where bfloat16 would stand still."""
    inputs, expected = golden['topk_tail_distill']
    teacher, student = (
        jnp.array(inputs[name], jnp.bfloat16) for name in ('teacher_params0', 'student_params')
    )
    for _ in range(3):
        teacher = distillation.ema(teacher, student, inputs['tau'])
    close(teacher, expected['teacher_params_after_3_updates'])


@OPTIONS
@pytest.mark.parametrize('k', [1, 3, 9])
def test_value_and_gradient_match_float64(logits, options, k):
    student, teacher = logits
    close(
        divergence(student, teacher, k, **options)[0],
        reference(*logits.astype(np.float64), k, **options),
    )
    top = np.argsort(-student, -1, kind='stable')[:, :k]
    wanted = differences(
        lambda z: reference(z, teacher.astype(np.float64), k, index=top, **options).sum(), student
    )
    _, (gradient, of_teacher) = pull(student, teacher, k, **options)
    close(gradient, wanted, atol=2e-6)
    assert not np.any(of_teacher)


@OPTIONS
@pytest.mark.parametrize('gap', [20.0, 1e4])
def test_top_tokens_that_hold_everything_give_no_nan(options, gap):
    """1 − P rounds to 0 in float32 from a gap of 17 on."""
    sure = np.zeros((3, 6), np.float32)
    sure[:, 1] = gap
    unsure = np.linspace(0, 1, 18, dtype=np.float32).reshape(3, 6)
    others = np.roll(sure, 1, 1)
    for student, teacher in ((sure, unsure), (unsure, sure), (sure, sure), (sure, others)):
        value, (gradient, _) = pull(student, teacher, 2, **options)
        assert np.isfinite(value) and np.all(np.isfinite(gradient)) and value > -1e-6


def test_a_vanishing_tail_keeps_its_digits():
    """Where 1 − P is 0 in float32: the exact value, not a clamp's."""
    student, teacher = np.array([[20.0, 0.0, 0.0, 0.0]]), np.zeros((1, 4))
    value, extra = divergence(student, teacher, 1, kind='forward')
    close(value, reference(student, teacher, 1, 'forward'))
    close(extra['tail_mass'], [3 * np.exp(-20.0)], atol=0, rtol=1e-5)


def test_low_precision_logits_are_computed_in_float32(logits):
    low = [jnp.asarray(z, jnp.bfloat16) for z in logits]
    value, extra = divergence(*low, 3)
    wanted, _ = divergence(*(z.astype(jnp.float32) for z in low), 3)
    assert value.dtype == extra['tail_mass'].dtype == jnp.float32 and np.array_equal(value, wanted)


def test_ties_take_exactly_k_tokens():
    """As bfloat16 logits have them: equal logits beyond the K-th belong to the rest."""
    student = np.array([[1.0, 1.0, 1.0, 1.0, 0.0]], np.float32)
    teacher = np.array([[0.0, 1.0, 2.0, 3.0, 4.0]], np.float32)
    value, extra = divergence(student, teacher, 2)
    close(value, reference(student.astype(np.float64), teacher.astype(np.float64), 2))
    close(extra['tail_mass'], 1 - 2 * np.exp(log_softmax(student))[:, 0])


def test_the_teacher_moves_in_float32_where_bfloat16_would_stand_still():
    teacher = jnp.ones(1, jnp.bfloat16)
    student = jnp.full(1, 1.0078125, jnp.bfloat16)  # the next bfloat16 after 1
    moved = distillation.ema(teacher, student, 0.05)
    assert moved.dtype == jnp.float32
    close(moved, [1 + 0.05 * 0.0078125], atol=0, rtol=1e-7)
