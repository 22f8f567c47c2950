"""Self-distillation from a teacher with privileged context: top-K + tail divergences, and the teacher's EMA.

Letters: N positions of a chunk, V vocabulary, K top tokens.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zeroplay_jax.objectives.types import AnyArray

Tree = TypeVar('Tree')


def topk_tail_divergence(
    student_logits: Float[AnyArray, 'positions vocabulary'],
    teacher_logits: Float[AnyArray, 'positions vocabulary'],
    *,
    k: int,
    kind: str = 'reverse',
    tail: bool = True,
    mix: float = 0.5,
) -> tuple[Float[Array, ' positions'], dict[str, Float[Array, ' positions']]]:
    """Computes the divergence between student and teacher over the student's K likeliest tokens and one tail outcome.

    This is π-Play eq. 11. Probabilities are those of the full softmax; all tokens outside the top K are merged into one
    outcome, which makes K + 1 outcomes. Merging outcomes never raises a divergence, so the value is at most the full
    divergence, and equals it where K ≥ V. With S the student and T the teacher:
      'reverse': KL(S ‖ T), our reading of π-Play eq. 9 (the paper does not state the direction).
      'forward': KL(T ‖ S).
      'jsd': mix·KL(S ‖ M) + (1 − mix)·KL(T ‖ M) with M = mix·S + (1 − mix)·T (SDPO's code; at most log 2 at mix ½).
    The gradient flows through the student's probabilities, including the tail's. The selection of the top tokens and
    the teacher are constants.

    Args:
      student_logits: float [N, V], finite, already divided by the temperature.
      teacher_logits: float [N, V], of the same positions, likewise.
      k: K, at least 1.
      kind: one of these.
      tail: False drops the tail and renormalises the top tokens; that value can exceed the full divergence.
      mix: weight of the student in 'jsd', between 0 and 1, both exclusive.

    Returns:
      divergence: float32 [N], nats, not negative up to rounding.
      {'tail_mass': float32 [N]}: the student's probability outside its top tokens, without gradient.
    """
    # Logits arrive in the dtype of the activations. In bfloat16 the differences of log-probs would be noise.
    student_logp = jax.nn.log_softmax(student_logits.astype(jnp.float32))
    # The teacher is not trained through this loss; it follows by `ema`.
    constant_teacher_logits = jax.lax.stop_gradient(teacher_logits)
    teacher_logp = jax.nn.log_softmax(constant_teacher_logits.astype(jnp.float32))
    num_positions, vocab_size = student_logp.shape
    if k >= vocab_size:
        divergence = _divergence(student_logp, teacher_logp, kind, mix)
        return divergence, {'tail_mass': jnp.zeros(num_positions)}

    # The top tokens are the student's, because with 'reverse' they carry nearly all of the divergence.
    _, top_tokens = jax.lax.top_k(jax.lax.stop_gradient(student_logits), k)
    # A mask of positions instead of a threshold on the K-th logit: with ties a threshold would select more than K.
    no_tokens = jnp.zeros(student_logp.shape, bool)
    is_top = jnp.put_along_axis(no_tokens, top_tokens, True, axis=1, inplace=False)

    def merge_outcomes(logp):
        """Returns (log-probs of the outcomes, [N, K + 1] or without `tail` [N, K]; the tail's, [N]) of [N, V]."""
        top_logp = jnp.take_along_axis(logp, top_tokens, axis=1)
        # The tail is summed over its own tokens, in log space. 1 − P(top) would have no digits left in float32 where
        # the top tokens hold nearly all probability.
        tail_only_logp = jnp.where(is_top, -jnp.inf, logp)
        tail_logp = jax.nn.logsumexp(tail_only_logp, axis=1, keepdims=True)
        if tail:
            outcomes = jnp.concatenate([top_logp, tail_logp], axis=1)
        else:
            # Without a tail the top tokens are a distribution of their own.
            outcomes = top_logp - jax.nn.logsumexp(top_logp, axis=1, keepdims=True)
        return outcomes, tail_logp[:, 0]

    student_outcomes, student_tail_logp = merge_outcomes(student_logp)
    teacher_outcomes, _ = merge_outcomes(teacher_logp)
    divergence = _divergence(student_outcomes, teacher_outcomes, kind, mix)
    tail_mass = jnp.exp(jax.lax.stop_gradient(student_tail_logp))
    return divergence, {'tail_mass': tail_mass}


def _divergence(student_logp, teacher_logp, kind, mix):
    """Returns the divergence [N] of `kind` from log-probs [N, C] over the same C outcomes."""
    if kind == 'reverse':
        return _kl(student_logp, teacher_logp)
    if kind == 'forward':
        return _kl(teacher_logp, student_logp)
    if kind != 'jsd':
        raise ValueError(f'kind={kind!r}: give reverse, forward or jsd')
    # log M is computed from log-probs: the mixture of two tiny probabilities keeps its digits.
    mixture_logp = jnp.logaddexp(student_logp + jnp.log(mix), teacher_logp + jnp.log1p(-mix))
    student_term = mix * _kl(student_logp, mixture_logp)
    teacher_term = (1 - mix) * _kl(teacher_logp, mixture_logp)
    return student_term + teacher_term


def _kl(p_logp, q_logp):
    """Returns KL(p ‖ q) [N] from log-probs [N, C]."""
    return jnp.sum(jnp.exp(p_logp) * (p_logp - q_logp), axis=1)


def ema(teacher: Tree, student: Tree, rate: float) -> Tree:
    """Returns the teacher's next weights θ_T ← (1 − rate)·θ_T + rate·θ_S (π-Play eq. 10, rate 0.05).

    Args:
      teacher: tree of arrays.
      student: tree of the same structure and shapes.
      rate: weight of the student, 0 (frozen teacher) to 1 (a copy of the student).

    Returns:
      The tree in float32, for inputs of any dtype.
    """

    def move(teacher_weight, student_weight):
        # Computed in float32: in bfloat16 a step of 5 % of a small difference is rounded away.
        teacher_part = (1 - rate) * teacher_weight.astype(jnp.float32)
        student_part = rate * student_weight.astype(jnp.float32)
        return teacher_part + student_part

    return jax.tree.map(move, teacher, student)
