"""Attention over pages by a kernel; selected by `SamplerConfig.attention='ragged'`.

On TPUs it is the kernel that JAX ships (policy/ragged_tpu.py), on GPUs an own one (policy/ragged_gpu.py). Pages: Kwon
et al. 2023, arXiv:2309.06180. Both read the used pages of a row once per block of its queries, whatever the length of
other rows. Rows that decode have one query, chunks of prompts have many. Each kind is a call of its own, because the
number of queries of a block is static: a block of 32 wastes 31 of them in a row with one query, and a block of one
reads the pages of a chunk once per token.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from zeroplay_jax.policy import paged_attention, sharding
from zeroplay_jax.policy.paged_attention import AttendTokens, LayerPages, StepShape


def platform_of(mesh: Mesh) -> str:
    """Returns the platform of a mesh: 'cpu', 'tpu' or 'gpu'."""
    return mesh.devices.flat[0].platform


def _kernel(mesh: Mesh) -> types.ModuleType:
    """Returns the module of the platform's kernel. On CPUs the one for GPUs is interpreted, which serves tests only."""
    # Imported here: Pallas takes a while to load, and most runs need neither.
    if platform_of(mesh) == 'tpu':
        from zeroplay_jax.policy import ragged_tpu

        return ragged_tpu
    from zeroplay_jax.policy import ragged_gpu

    return ragged_gpu


def cache_head_dim(head_dim: int, mesh: Mesh) -> int:
    """Returns the size of a head in the cache as the kernel wants it; beyond `head_dim` it holds zeros."""
    return _kernel(mesh).cache_head_dim(head_dim)


def check(kv_heads: int, page: int, dtype, mesh: Mesh) -> None:
    """Raises UserError if the kernel does not take this model or page on this mesh."""
    _kernel(mesh).check(kv_heads // mesh.shape['model'], page, dtype)


def make_attend(
    mesh: Mesh,
    table: Int[Array, 'rows pages_per_row'],
    row: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
    shape: StepShape,
) -> AttendTokens:
    """Returns the attention of the tokens of a step, as `paged_attention.make_attend` does.

    Args:
      mesh: mesh of the arrays; the function runs on one data shard, and every device computes its own heads.
      table: pages of every row.
      row: row of every token. Idle tokens come last.
      position: position of every token within its row; -1 marks an idle token, whose result is 0.
      shape: rows with one token come before chunks.
    """
    kernel = _kernel(mesh)
    rows = paged_attention.rows_of_tokens(table, row, position, shape)
    plan = kernel.make_plan(rows, row.shape[0], shape)
    is_used = position >= 0
    interpret = platform_of(mesh) == 'cpu'

    def attend(q, cache: LayerPages, window: int = 0):
        tokens, heads, head_dim = q.shape
        q = jnp.pad(q, ((0, 0), (0, 0), (0, cache.shape[3] - head_dim)))
        local = functools.partial(
            kernel.attend, shape=shape, window=window, scale=head_dim**-0.5, interpret=interpret
        )
        single_out, chunk_out = _per_head(local, mesh)(q, cache, plan)
        out = _merged(single_out, chunk_out, tokens, rows.singles)
        # Kernels leave the results of idle tokens undefined.
        out = jnp.where(is_used[:, None, None], out[:, :, :head_dim], 0)
        return out.reshape(tokens, heads * head_dim)

    return attend


def _merged(single_out, chunk_out, tokens: int, singles: Int[Array, '']):
    """Returns the results of all tokens from those of rows with one token and those of chunks; None: no call."""
    if single_out is None:
        return chunk_out
    padding = tokens - single_out.shape[0]
    single_out = jnp.pad(single_out, ((0, padding), (0, 0), (0, 0)))
    if chunk_out is None:
        return single_out
    is_single = jnp.arange(tokens) < singles
    return jnp.where(is_single[:, None, None], single_out, chunk_out)


def _per_head(local: Callable, mesh: Mesh) -> Callable:
    """Returns a function that runs `local(q, cache, plan)` on every device with its own heads."""
    in_specs = (P(None, 'model'), P(None, None, 'model'), P())
    return sharding.per_model_shard(local, mesh, in_specs, P(None, 'model'))
