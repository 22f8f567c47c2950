"""What `benchmarks.rollout` and `benchmarks.gpu` share: rates of the device, and the rows of an update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.workload import median_seconds
from zeroplay_jax.learner.batch import Batch, pack
from zeroplay_jax.types import POLICY, PROMPT, Row, Trajectory


def product_rate(side: int, dtype: str) -> float:
    """Returns the operations per second of a product of square matrices, accumulated in float32."""
    matrix = jnp.ones((side, side), dtype)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    return 2.0 * side**3 / median_seconds(lambda: product(matrix, matrix).block_until_ready(), 5)


def copy_rate(size: int) -> float:
    """Returns the bytes per second, read and written, of an addition to a float32 array of `size` bytes."""
    vector = jnp.ones(size // 4, jnp.float32)
    # An addition, because XLA would leave out a plain copy.
    addition = jax.jit(lambda x: x + 1)
    return 2.0 * size / median_seconds(lambda: addition(vector).block_until_ready(), 5)


def full_batches(vocab_size: int, rows: int, tokens: int, micro_rows: int) -> list[Batch]:
    """Returns full micro-batches of random tokens, on all of which but the first of a row the policy is trained.

    Their log-probs under the old policy are those of a uniform one, about those of small random weights: ratios far
    from 1 would be clipped and lose their gradient.
    """
    rng = np.random.default_rng(0)
    source = np.full(tokens, POLICY, np.int8)
    # No token before the first one predicts it, so it is not trained on.
    source[0] = PROMPT
    logp = np.where(source == POLICY, -np.log(vocab_size), 0.0).astype(np.float32)
    batch = []
    for number in range(rows):
        ids = rng.integers(10, vocab_size, tokens).astype(np.int32)
        trajectory = Trajectory(ids, source, logp, (), 'eos', 'policy', 0, (number,))
        advantage = float(rng.normal())
        batch.append(Row('policy', trajectory, reward=0.0, group=0, advantage=advantage))
    return pack(batch, micro_rows=micro_rows, tokens=tokens, mode='token')
