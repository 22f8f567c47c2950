"""Learning from a teacher that sees more: divergences over the student's top tokens and one tail, and the EMA.

Letters: N places of a chunk, V vocabulary, K top tokens.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

KINDS = ('reverse', 'forward', 'jsd')

Tree = TypeVar('Tree')


def topk_tail_divergence(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    *,
    k: int,
    kind: str = 'reverse',
    tail: bool = True,
    mix: float = 0.5,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Divergence between student and teacher over the student's K likeliest tokens and the rest as one (π-Play eq. 11).

    Probabilities are those of the full softmax, the rest is collapsed into one outcome: K + 1 outcomes. Merging
    outcomes never raises a divergence, so the value is at most the full one, and equals it where K ≥ V. With S the
    student, T the teacher:
      'reverse': KL(S ‖ T), what π-Play's eq. 9 is read as (its direction is not stated).
      'forward': KL(T ‖ S).
      'jsd': mix·KL(S ‖ M) + (1 − mix)·KL(T ‖ M) with M = mix·S + (1 − mix)·T (SDPO's code; at most log 2 at ½).
    The gradient flows through the student's probabilities, that of the rest included; which tokens are the top
    ones is constant, and so is the teacher. All in log space, the rest summed up over its own tokens: where the
    top tokens hold everything, 1 − P has no digits left in float32, but its logarithm has.

    Args:
      student_logits, teacher_logits: float [N, V], of the same places, temperature already in them, finite.
      k: K, at least 1.
      kind: one of KINDS.
      tail: False drops the rest and renormalises the top tokens; that value can exceed the full divergence.
      mix: of 'jsd', between 0 and 1.

    Returns:
      value: float32 [N], nats, not negative but for rounding.
      {'tail_mass': float32 [N]}: the student's probability outside its top tokens, without gradient.

    Raises:
      ValueError: shapes that differ or an option out of range.
    """
    _check(student_logits, teacher_logits, k, kind, mix)
    student = jax.nn.log_softmax(student_logits.astype(jnp.float32))
    teacher = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_logits).astype(jnp.float32))
    if k >= student.shape[1]:
        return _divergence(student, teacher, kind, mix), {'tail_mass': jnp.zeros(student.shape[:1])}
    _, index = jax.lax.top_k(jax.lax.stop_gradient(student_logits), k)
    top = jnp.put_along_axis(jnp.zeros(student.shape, bool), index, True, axis=1, inplace=False)

    def outcomes(logp):
        head = jnp.take_along_axis(logp, index, axis=1)
        rest = jax.nn.logsumexp(jnp.where(top, -jnp.inf, logp), axis=1, keepdims=True)
        if not tail:
            head = head - jax.nn.logsumexp(head, axis=1, keepdims=True)
        return (jnp.concatenate([head, rest], axis=1) if tail else head), rest[:, 0]

    student, rest = outcomes(student)
    value = _divergence(student, outcomes(teacher)[0], kind, mix)
    return value, {'tail_mass': jnp.exp(jax.lax.stop_gradient(rest))}


def _check(student_logits, teacher_logits, k, kind, mix):
    shapes = jnp.shape(student_logits), jnp.shape(teacher_logits)
    if len(shapes[0]) != 2 or shapes[0] != shapes[1]:
        raise ValueError(
            f'topk_tail_divergence: both logits must be [N, V] of one shape, got {shapes}'
        )
    if k < 1:
        raise ValueError(f'topk_tail_divergence: k is {k}; give 1 or more')
    if kind not in KINDS:
        raise ValueError(f'topk_tail_divergence: kind is {kind!r}; choose one of {KINDS}')
    if not 0 < mix < 1:
        raise ValueError(f'topk_tail_divergence: mix {mix} must lie between 0 and 1')


def _divergence(student, teacher, kind, mix):
    """[N] from log-probs [N, C] over the same C outcomes."""
    if kind == 'reverse':
        return _kl(student, teacher)
    if kind == 'forward':
        return _kl(teacher, student)
    middle = jnp.logaddexp(student + jnp.log(mix), teacher + jnp.log1p(-mix))
    return mix * _kl(student, middle) + (1 - mix) * _kl(teacher, middle)


def _kl(p, q):
    return jnp.sum(jnp.exp(p) * (p - q), axis=1)


def ema(teacher: Tree, student: Tree, rate: float) -> Tree:
    """The teacher's next weights: θ_T ← (1 − rate)·θ_T + rate·θ_S (π-Play eq. 10, rate 0.05).

    Args:
      teacher, student: trees of arrays, alike in structure and shapes.
      rate: the student's share, 0 (frozen) to 1 (a copy).

    Returns:
      The tree in float32, whatever came in: in bfloat16 small steps would be rounded away and the teacher stand still.

    Raises:
      ValueError: a rate outside 0 … 1 or trees that differ.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f'ema: rate {rate} must lie in 0 … 1')
    step = lambda t, s: (1 - rate) * t.astype(jnp.float32) + rate * s.astype(jnp.float32)
    return jax.tree.map(step, teacher, student)
