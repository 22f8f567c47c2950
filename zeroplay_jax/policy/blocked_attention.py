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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.attention import MASKED_SCORE, AnyArray, product

# Tokens of a block. The scores of a pair of blocks are float32 [batch, kv_heads, folded, block].
BLOCK = 512


def attend_packed(
    q: Float[AnyArray, 'batch length heads head_dim'],
    k: Float[AnyArray, 'batch length kv_heads head_dim'],
    v: Float[AnyArray, 'batch length kv_heads head_dim'],
    segment: Int[AnyArray, 'batch length'],
    window: int = 0,
    mesh: Mesh | None = None,
    block: int = BLOCK,
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
      block: tokens of a block.
    """
    batch, length, heads, head_dim = q.shape

    def attend(q, k, v, segment):
        return _attend_rows(q, k, v, segment, window, min(block, length))

    out = sharding.per_row_and_head(attend, mesh)(q * head_dim**-0.5, k, v, segment)
    return out.reshape(batch, length, heads * head_dim)


def _attend_rows(q, k, v, segment, window: int, block: int):
    """Returns the attention [batch, length, heads, head_dim] of scaled queries, on one device."""
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    groups = heads // kv_heads
    num_blocks = -(-length // block)  # ceiling

    def split(x):
        """[batch, length, …] → [blocks, batch, block, …], padded to whole blocks."""
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, num_blocks * block - length)
        x = jnp.pad(x, padding)
        x = x.reshape(batch, num_blocks, block, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    # Query heads of a group are neighbours; they are folded into the query axis, so that keys are never repeated.
    q = split(q).reshape(num_blocks, batch, block, kv_heads, groups, head_dim)
    q = q.transpose(0, 1, 3, 4, 2, 5)
    q = q.reshape(num_blocks, batch, kv_heads, groups * block, head_dim)
    k = split(k).transpose(0, 1, 3, 2, 4)
    v = split(v).transpose(0, 1, 3, 2, 4)
    out = _attend_blocks(window, q, k, v, split(segment))
    out = out.reshape(num_blocks, batch, kv_heads, groups, block, head_dim)
    out = out.transpose(1, 0, 4, 2, 3, 5)
    return out.reshape(batch, num_blocks * block, heads, head_dim)[:, :length]


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
    rows = jnp.moveaxis(segment, 0, 1).reshape(batch, num_blocks * block)
    index = jnp.arange(num_blocks * block, dtype=jnp.int32)
    previous = jnp.pad(rows, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    # Every padding token counts as a start of its own, so that it needs no earlier keys.
    is_start = (rows != previous) | (rows == 0)
    starts = jax.lax.cummax(jnp.where(is_start, index, 0), axis=1)
    # The start of a segment ascends along a row: the first token of a block has the earliest.
    first_token = jnp.min(starts[:, ::block], 0)
    if window:
        first_token = jnp.maximum(first_token, index[::block] - (window - 1))
    first_keys = first_token // block
    # They ascend too: the blocks of queries that visit a block of keys are those up to the last that starts there.
    block_index = jnp.arange(num_blocks, dtype=jnp.int32)
    last_queries = jnp.sum(first_keys[None] <= block_index[:, None], 1, dtype=jnp.int32) - 1
    return _Ranges(first_keys, last_queries)


def _visible(segment, query_block, key_block, window: int, folded: int):
    """Returns the mask [batch, 1, folded, block] of a pair of blocks."""
    block = segment.shape[2]
    query_segment = segment[query_block][:, :, None]
    key_segment = segment[key_block][:, None]
    query_position = query_block * block + jnp.arange(block)[:, None]
    key_position = key_block * block + jnp.arange(block)[None]
    in_reach = key_position <= query_position
    if window:
        in_reach &= key_position > query_position - window
    mask = in_reach[None] & (query_segment == key_segment) & (key_segment > 0)
    return jnp.tile(mask, (1, folded // block, 1))[:, None]


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


def _forward(window: int, q, k, v, segment):
    """Returns the attention of `_attend_blocks`, whose arguments these are, and the residuals for `_backward`."""
    first_keys = _ranges(segment, window).first_keys
    num_blocks, _, _, folded, _ = q.shape

    def attend_query_block(query_block):
        block_q = q[query_block]

        def attend_key_block(key_block, carry):
            maximum, normaliser, total = carry
            mask = _visible(segment, query_block, key_block, window, folded)
            scores = product('bkqd,bksd->bkqs', block_q, k[key_block])
            scores = jnp.where(mask, scores, MASKED_SCORE)
            new_maximum = jnp.maximum(maximum, jnp.max(scores, -1, keepdims=True))
            # Without the mask a query that has seen no key yet would count the masked ones: its maximum is theirs.
            probs = jnp.where(mask, jnp.exp(scores - new_maximum), 0)
            # What was summed under the previous maximum is scaled to the new one.
            scale = jnp.exp(maximum - new_maximum)
            normaliser = normaliser * scale + jnp.sum(probs, -1, keepdims=True)
            values = product('bkqs,bksd->bkqd', probs.astype(v.dtype), v[key_block])
            return new_maximum, normaliser, total * scale + values

        # Sums of the softmax in float32. Derived from the queries, so that they vary over devices as these do.
        total = jnp.zeros_like(block_q, jnp.float32)
        normaliser = total[..., :1]
        carry = (normaliser + MASKED_SCORE, normaliser, total)
        maximum, normaliser, total = jax.lax.fori_loop(
            first_keys[query_block], query_block + 1, attend_key_block, carry
        )
        # Padding has seen no key.
        normaliser = jnp.where(normaliser > 0, normaliser, 1)
        out = (total / normaliser).astype(v.dtype)
        return out, maximum + jnp.log(normaliser)

    out, log_normaliser = jax.lax.map(attend_query_block, jnp.arange(num_blocks))
    return out, (q, k, v, segment, out, log_normaliser)


def _backward(window: int, saved, out_gradient):
    q, k, v, segment, out, log_normaliser = saved
    last_queries = _ranges(segment, window).last_queries
    num_blocks, _, _, folded, _ = q.shape
    # The gradient of a softmax needs Σ p · dp of every query, which is the product of its output and its gradient.
    weighted_sum = out.astype(jnp.float32) * out_gradient.astype(jnp.float32)
    weighted_sum = jnp.sum(weighted_sum, -1, keepdims=True)

    def key_block_gradients(q_gradient, key_block):
        block_k = k[key_block]
        block_v = v[key_block]

        def visit(query_block, carry):
            q_gradient, k_gradient, v_gradient = carry
            block_q = q[query_block]
            gradient = out_gradient[query_block]
            mask = _visible(segment, query_block, key_block, window, folded)
            scores = product('bkqd,bksd->bkqs', block_q, block_k)
            scores = jnp.where(mask, scores, MASKED_SCORE)
            probs = jnp.where(mask, jnp.exp(scores - log_normaliser[query_block]), 0)
            v_gradient += product('bkqs,bkqd->bksd', probs.astype(v.dtype), gradient)
            probs_gradient = product('bkqd,bksd->bkqs', gradient, block_v)
            scores_gradient = probs * (probs_gradient - weighted_sum[query_block])
            scores_gradient = scores_gradient.astype(q.dtype)
            k_gradient += product('bkqs,bkqd->bksd', scores_gradient, block_q)
            block_gradient = product('bkqs,bksd->bkqd', scores_gradient, block_k)
            q_gradient = q_gradient.at[query_block].add(block_gradient)
            return q_gradient, k_gradient, v_gradient

        # Every sum over blocks is in float32.
        k_zero = jnp.zeros_like(block_k, jnp.float32)
        v_zero = jnp.zeros_like(block_v, jnp.float32)
        q_gradient, k_gradient, v_gradient = jax.lax.fori_loop(
            key_block, last_queries[key_block] + 1, visit, (q_gradient, k_zero, v_zero)
        )
        return q_gradient, (k_gradient.astype(k.dtype), v_gradient.astype(v.dtype))

    q_gradient = jnp.zeros_like(q, jnp.float32)
    q_gradient, (k_gradient, v_gradient) = jax.lax.scan(
        key_block_gradients, q_gradient, jnp.arange(num_blocks)
    )
    return q_gradient.astype(q.dtype), k_gradient, v_gradient, None


_attend_blocks.defvjp(_forward, _backward)
