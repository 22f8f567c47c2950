"""Packed attention in blocks, in plain JAX: memory linear in the length; selected by `ModelConfig.attention='blocked'`.

Dense attention holds a score per pair of tokens: 16.9 GB per row and layer at 12,288 tokens of a model of 28 heads.
Here one block of queries meets one block of keys at a time, and the softmax is accumulated over the blocks
(FlashAttention-2; Dao 2023, arXiv:2307.08691). The backward pass computes the scores again. Pairs of blocks without a
visible pair of tokens are skipped: those of the future, of other segments, and outside of a sliding window.

Axis names as in policy/attention.py; and blocks: blocks of a row, block: tokens of a block, folded: the queries of a
block times the query heads that share a key/value head.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.attention import MASKED_SCORE, AnyArray, Sums, product
from zeroplay_jax.types import UserError

# Tokens of a block of long rows. The scores of a pair of blocks are float32 [batch, kv_heads, folded, block].
MAX_BLOCK = 512
# Shorter rows have blocks of an eighth of their length, because a block visits all pairs of its tokens, also those of
# different segments; but no smaller ones than this: their products would be too small for the hardware.
MIN_BLOCK = 64


def attend_packed(
    q: Float[AnyArray, 'batch length heads head_dim'],
    k: Float[AnyArray, 'batch length kv_heads head_dim'],
    v: Float[AnyArray, 'batch length kv_heads head_dim'],
    segment: Int[AnyArray, 'batch length'],
    window: int = 0,
    mesh: Mesh | None = None,
    block: int = 0,
) -> Float[Array, 'batch length heads*head_dim']:
    """Returns the attention of packed rows, as `attention.attend_packed` does with `attention.packed_mask`.

    The results differ at padding only (segment 0), where they are 0 here.

    Args:
      q: queries.
      k: keys.
      v: values.
      segment: segment number of every token, 0 for padding. The tokens of a segment are neighbours.
      window: number of tokens that a query attends to, itself included; 0: no limit.
      mesh: mesh of the arrays; every device computes its own rows and heads. None: a single device.
      block: tokens of a block; 0: chosen by the length of the rows.
    """
    batch, length, heads, head_dim = q.shape
    if not block:
        block = min(max(length // 8, MIN_BLOCK), MAX_BLOCK)
    # The shortest rows have one block, without padding.
    block = min(block, length)

    def attend(q, k, v, segment):
        return _attend_rows(q, k, v, segment, window, block)

    # The queries are scaled instead of the scores: fewer multiplications, and none in float32.
    q = q * head_dim**-0.5
    attend_local = sharding.per_row_and_head(attend, mesh)
    out = attend_local(q, k, v, segment)
    return out.reshape(batch, length, heads * head_dim)


def _attend_rows(q, k, v, segment, window: int, block: int):
    """Returns the attention [batch, length, heads, head_dim] of scaled queries, on one device."""
    length = q.shape[1]
    kv_heads = k.shape[2]
    q = _fold(_split(q, block), kv_heads)
    k = _fold(_split(k, block), kv_heads)
    v = _fold(_split(v, block), kv_heads)
    segment = _split(segment, block)
    out = _attend_blocks(window, q, k, v, segment)
    out = _unfold(out, block)
    return out[:, :length]


def _split(x, block: int):
    """Returns [blocks, batch, block, …] of [batch, length, …], padded to whole blocks."""
    batch, length = x.shape[:2]
    num_blocks = math.ceil(length / block)
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, num_blocks * block - length)
    x = jnp.pad(x, padding)
    x = x.reshape(batch, num_blocks, block, *x.shape[2:])
    return jnp.swapaxes(x, 0, 1)


def _fold(x, kv_heads: int):
    """Returns [blocks, batch, kv_heads, folded, head_dim] of [blocks, batch, block, heads, head_dim].

    Query heads of a group are neighbours; they are folded into the query axis, so that keys are never repeated.
    """
    num_blocks, batch, _, _, head_dim = x.shape
    x = jnp.swapaxes(x, 2, 3)
    return x.reshape(num_blocks, batch, kv_heads, -1, head_dim)


def _unfold(x, block: int):
    """Returns [batch, blocks·block, heads, head_dim] of [blocks, batch, kv_heads, folded, head_dim]."""
    num_blocks, batch, _, _, head_dim = x.shape
    x = x.reshape(num_blocks, batch, -1, block, head_dim)
    # [batch, blocks, block, heads, head_dim]
    x = x.transpose(1, 0, 3, 2, 4)
    return x.reshape(batch, num_blocks * block, -1, head_dim)


class _Ranges(NamedTuple):
    """Which pairs of blocks have visible tokens in any row.

    Attributes:
      first_keys: int32 [blocks], the first block of keys of every block of queries; the last is that of the queries.
      last_queries: int32 [blocks], the last block of queries of every block of keys; the first is that of the keys.
    """

    first_keys: jax.Array
    last_queries: jax.Array


def _ranges(segment, window: int) -> _Ranges:
    """Returns the pairs of blocks to visit, for segment numbers [blocks, batch, block]."""
    num_blocks, batch, block = segment.shape
    length = num_blocks * block
    rows = jnp.swapaxes(segment, 0, 1)
    rows = rows.reshape(batch, length)
    position = jnp.arange(length, dtype=jnp.int32)
    # Before the first token there is none: the number -1 is that of no segment.
    previous = jnp.pad(rows, ((0, 0), (1, 0)), constant_values=-1)
    previous = previous[:, :-1]
    # Every padding token counts as a start of its own, so that it needs no earlier keys.
    is_padding = rows == 0
    is_start = (rows != previous) | is_padding
    starts = jnp.where(is_start, position, 0)
    starts = jax.lax.cummax(starts, axis=1)
    # The start of a segment ascends along a row: the first token of a block has the earliest.
    block_starts = starts[:, ::block]
    first_token = jnp.min(block_starts, 0)
    if window:
        window_start = position[::block] - (window - 1)
        first_token = jnp.maximum(first_token, window_start)
    first_keys = first_token // block
    # They ascend too: the blocks of queries that visit a block of keys are those up to the last that starts there.
    key_block = jnp.arange(num_blocks, dtype=jnp.int32)
    starts_before = first_keys[None] <= key_block[:, None]
    count = jnp.sum(starts_before, 1, dtype=jnp.int32)
    return _Ranges(first_keys, last_queries=count - 1)


def _visible(segment, query_block, key_block, window: int, folded: int):
    """Returns the mask [batch, 1, folded, block] of a pair of blocks."""
    block = segment.shape[2]
    query_segment = segment[query_block][:, :, None]
    key_segment = segment[key_block][:, None]
    index = jnp.arange(block)
    query_position = query_block * block + index[:, None]
    key_position = key_block * block + index[None]
    in_reach = key_position <= query_position
    if window:
        in_window = key_position > query_position - window
        in_reach &= in_window
    same_segment = query_segment == key_segment
    is_token = key_segment > 0
    mask = in_reach[None] & same_segment & is_token
    # All query heads of a group see the same keys.
    groups = folded // block
    mask = jnp.tile(mask, (1, groups, 1))
    return mask[:, None]


def _masked_scores(q, k, mask):
    """Returns the scores [batch, kv_heads, folded, block] of a pair of blocks."""
    scores = product('bkqd,bksd->bkqs', q, k)
    return jnp.where(mask, scores, MASKED_SCORE)


def _exponentials(scores, offset, mask):
    """Returns exp(scores − offset), 0 where masked."""
    weights = jnp.exp(scores - offset)
    # Without the mask a query that has seen no key yet would count the masked ones: its maximum is theirs.
    return jnp.where(mask, weights, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_blocks(window: int, q, k, v, segment):
    """Returns the attention [blocks, batch, kv_heads, folded, head_dim], in the dtype of the values.

    Args:
      window: as in `attend_packed`.
      q: scaled queries [blocks, batch, kv_heads, folded, head_dim].
      k, v: keys and values [blocks, batch, kv_heads, block, head_dim].
      segment: [blocks, batch, block].
    """
    out, _ = _forward(window, q, k, v, segment)
    return out


def _add_keys(sums: Sums, q, k, v, mask) -> Sums:
    """Returns the sums of a block of queries after one block of keys more."""
    scores = _masked_scores(q, k, mask)
    maximum = jnp.maximum(sums.maximum, jnp.max(scores, -1))
    weights = _exponentials(scores, maximum[..., None], mask)
    weighted = product('bkqs,bksd->bkqd', weights.astype(v.dtype), v)
    return sums.add(maximum, weights, weighted)


def _forward(window: int, q, k, v, segment):
    """Returns the attention of `_attend_blocks`, whose arguments these are, and the residuals for `_backward`."""
    ranges = _ranges(segment, window)
    num_blocks = q.shape[0]
    folded = q.shape[3]

    def attend_query_block(query_block):
        block_q = q[query_block]

        def visit(key_block, sums: Sums) -> Sums:
            mask = _visible(segment, query_block, key_block, window, folded)
            return _add_keys(sums, block_q, k[key_block], v[key_block], mask)

        first = ranges.first_keys[query_block]
        # No query sees a later block than its own.
        end = query_block + 1
        sums = Sums.of_no_keys(block_q.shape)
        sums = jax.lax.fori_loop(first, end, visit, sums)
        # Padding has seen no key.
        total = jnp.where(sums.total > 0, sums.total, 1)
        log_normaliser = sums.maximum + jnp.log(total)
        return sums.attention().astype(v.dtype), log_normaliser[..., None]

    query_blocks = jnp.arange(num_blocks)
    out, log_normaliser = jax.lax.map(attend_query_block, query_blocks)
    residuals = (q, k, v, segment, out, log_normaliser)
    return out, residuals


class _QueryBlocks(NamedTuple):
    """What the gradients need of blocks of queries: of all [blocks, …], or of one block […].

    Attributes:
      q: scaled queries [batch, kv_heads, folded, head_dim].
      out_gradient: gradient of their attention, of the same shape.
      log_normaliser: [batch, kv_heads, folded, 1], logarithm of the sum of their exponentiated scores.
      mean_gradient: of the same shape, Σ p · dp: the gradient of a query's probabilities, weighted by them.
    """

    q: jax.Array
    out_gradient: jax.Array
    log_normaliser: jax.Array
    mean_gradient: jax.Array


def _pair_gradients(queries: _QueryBlocks, k, v, mask):
    """Returns the gradients of queries, keys and values from one pair of blocks, in float32 (Dao 2023, alg. 2)."""
    scores = _masked_scores(queries.q, k, mask)
    probs = _exponentials(scores, queries.log_normaliser, mask)
    rounded_probs = probs.astype(v.dtype)
    v_gradient = product('bkqs,bkqd->bksd', rounded_probs, queries.out_gradient)
    probs_gradient = product('bkqd,bksd->bkqs', queries.out_gradient, v)
    scores_gradient = probs * (probs_gradient - queries.mean_gradient)
    scores_gradient = scores_gradient.astype(queries.q.dtype)
    k_gradient = product('bkqs,bkqd->bksd', scores_gradient, queries.q)
    q_gradient = product('bkqs,bksd->bkqd', scores_gradient, k)
    return q_gradient, k_gradient, v_gradient


def _backward(window: int, residuals, out_gradient):
    """Returns the gradients of the arguments of `_attend_blocks`; None for the segments."""
    q, k, v, segment, out, log_normaliser = residuals
    ranges = _ranges(segment, window)
    num_blocks = q.shape[0]
    folded = q.shape[3]
    # Σ p · dp of a query is the product of its output and its gradient, so that one pass over the keys suffices.
    weighted_gradient = out.astype(jnp.float32) * out_gradient.astype(jnp.float32)
    mean_gradient = jnp.sum(weighted_gradient, -1, keepdims=True)
    queries = _QueryBlocks(q, out_gradient, log_normaliser, mean_gradient)

    def visit_key_block(q_gradient, key_block):
        block_k = k[key_block]
        block_v = v[key_block]

        def visit(query_block, sums):
            q_sum, k_sum, v_sum = sums
            block_queries = jax.tree.map(lambda blocks: blocks[query_block], queries)
            mask = _visible(segment, query_block, key_block, window, folded)
            gradients = _pair_gradients(block_queries, block_k, block_v, mask)
            block_q_gradient, k_gradient, v_gradient = gradients
            q_sum = q_sum.at[query_block].add(block_q_gradient)
            return q_sum, k_sum + k_gradient, v_sum + v_gradient

        # Every sum over blocks is in float32.
        k_zero = jnp.zeros_like(block_k, jnp.float32)
        v_zero = jnp.zeros_like(block_v, jnp.float32)
        sums = (q_gradient, k_zero, v_zero)
        # No key is seen by an earlier block than its own.
        end = ranges.last_queries[key_block] + 1
        sums = jax.lax.fori_loop(key_block, end, visit, sums)
        q_gradient, k_gradient, v_gradient = sums
        rounded_k = k_gradient.astype(k.dtype)
        rounded_v = v_gradient.astype(v.dtype)
        return q_gradient, (rounded_k, rounded_v)

    key_blocks = jnp.arange(num_blocks)
    q_zero = jnp.zeros_like(q, jnp.float32)
    q_gradient, kv_gradients = jax.lax.scan(visit_key_block, q_zero, key_blocks)
    k_gradient, v_gradient = kv_gradients
    return q_gradient.astype(q.dtype), k_gradient, v_gradient, None


_attend_blocks.defvjp(_forward, _backward)


# Splash attention, the Pallas kernel for TPUs that JAX ships; selected by `ModelConfig.attention='splash'`.
#
# The kernel never holds the attention scores of a whole row: blocks of queries and keys pass through on-chip memory,
# forward and backward, and blocks that are fully masked by causality or a sliding window are skipped.


# Largest number of tokens of a row that the kernel processes at a time.
_SPLASH_BLOCK = 512
# Width of a TPU register tile, of which every block length must be a multiple.
LANES = 128


def attend_splash(
    q: Float[AnyArray, 'batch length heads head_dim'],
    k: Float[AnyArray, 'batch length kv_heads head_dim'],
    v: Float[AnyArray, 'batch length kv_heads head_dim'],
    segment: Int[AnyArray, 'batch length'],
    window: int = 0,
    mesh: Mesh | None = None,
) -> Float[Array, 'batch length heads*head_dim']:
    """Returns the attention of packed rows, as `attend_packed` does.

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
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    batch, length, heads, head_dim = q.shape
    platform = _check_platform(length, mesh)
    model_shards = 1 if mesh is None else mesh.shape['model']
    # On a CPU the kernel is interpreted, which is slow and serves tests only.
    kernel = _splash_kernel(length, heads // model_shards, window, interpret=platform == 'cpu')

    def attend(q, k, v, segment):
        """One device's rows and heads. The kernel wants the heads before the tokens."""

        def attend_row(q, k, v, segment):
            return kernel(q, k, v, segment_ids=SegmentIds(segment, segment))

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


def _splash_kernel(length: int, heads: int, window: int, interpret: bool):
    """Returns the kernel for one row and the heads of one device."""
    # Imported here, because Pallas takes a while to load.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    # Masks are symbolic: the kernel evaluates them block by block and never holds [length, length].
    if window:
        mask = splash.LocalMask((length, length), (window - 1, 0), 0)
    else:
        mask = splash.CausalMask((length, length))
    # The kernel takes one mask per head; all are equal here.
    head_masks = splash.MultiHeadMask([mask] * heads)
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
    """Returns the largest multiple of LANES, up to _SPLASH_BLOCK, that divides the row length."""
    block = min(_SPLASH_BLOCK, length)
    while length % block:
        block -= LANES
    return block
