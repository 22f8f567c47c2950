"""Splash attention, the Pallas kernel for TPUs that JAX ships; selected by `ModelConfig.attention='splash'`.

The kernel never holds the attention scores of a whole row: blocks of queries and keys pass through on-chip memory,
forward and backward, and blocks that are fully masked by causality or a sliding window are skipped. Axis names as in
policy/attention.py.
"""

from __future__ import annotations

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.attention import AnyArray
from zeroplay_jax.types import UserError

# Largest number of tokens of a row that the kernel processes at a time.
MAX_BLOCK = 512
# Width of a TPU register tile, of which every block length must be a multiple.
LANES = 128


def attend_packed(
    q: Float[AnyArray, 'batch length heads head_dim'],
    k: Float[AnyArray, 'batch length kv_heads head_dim'],
    v: Float[AnyArray, 'batch length kv_heads head_dim'],
    segment: Int[AnyArray, 'batch length'],
    window: int = 0,
    mesh: Mesh | None = None,
) -> Float[Array, 'batch length heads*head_dim']:
    """Returns the attention of packed rows, as `attention.attend_packed` does with `attention.packed_mask`.

    The results differ at padding only (segment 0), where both are meaningless: here padding attends to padding.

    Args:
      q: queries.
      k: keys.
      v: values.
      segment: segment number of every token, 0 for padding.
      window: number of tokens that a query attends to, itself included; 0: no limit.
      mesh: mesh of the arrays; every device computes its own rows and heads. None: a single device.

    Raises:
      UserError: the length is not a multiple of 128, or the platform is neither a TPU nor a CPU.
    """
    batch, length, heads, head_dim = q.shape
    platform = _check_platform(length, mesh)
    model_shards = 1 if mesh is None else mesh.shape['model']
    # On a CPU the kernel is interpreted, which is slow and serves tests only.
    kernel = _make_kernel(length, heads // model_shards, window, interpret=platform == 'cpu')

    def attend(q, k, v, segment):
        """One device's rows and heads. The kernel wants the heads before the tokens."""

        def attend_row(q, k, v, segment):
            return kernel(q, k, v, segment_ids=splash.SegmentIds(segment, segment))

        heads_first = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        out = jax.vmap(attend_row)(*heads_first, segment)
        return out.transpose(0, 2, 1, 3)

    # The kernel does not scale the scores.
    out = sharding.per_row_and_head(attend, mesh)(q * head_dim**-0.5, k, v, segment)
    return out.reshape(batch, length, heads * head_dim)


def _check_platform(length: int, mesh: Mesh | None) -> str:
    """Returns the platform of the computation; raises UserError where the kernel cannot run."""
    if length % LANES:
        raise UserError(
            f'rows of {length} tokens: policy.attention=splash needs a multiple of {LANES}; '
            'change the row length or set policy.attention=blocked'
        )
    if mesh is None:
        platform = jax.default_backend()
    else:
        platform = mesh.devices.flat[0].platform
    if platform not in ('tpu', 'cpu'):
        raise UserError(
            f'policy.attention=splash is a TPU kernel; on {platform} set policy.attention=blocked'
        )
    return platform


def _make_kernel(length: int, heads: int, window: int, interpret: bool):
    """Returns the kernel for one row and the heads of one device."""
    # Masks are symbolic: the kernel evaluates them block by block and never holds [length, length].
    if window:
        mask = splash_mask.LocalMask((length, length), (window - 1, 0), 0)
    else:
        mask = splash_mask.CausalMask((length, length))
    # The kernel takes one mask per head; all are equal here.
    head_masks = splash_mask.MultiHeadMask([mask] * heads)
    block = _block_length(length)
    block_sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash.make_splash_mha(
        head_masks, block_sizes=block_sizes, head_shards=1, q_seq_shards=1, interpret=interpret
    )


def _block_length(length: int) -> int:
    """Returns the largest multiple of LANES, up to MAX_BLOCK, that divides the row length."""
    block = min(MAX_BLOCK, length)
    while length % block:
        block -= LANES
    return block
