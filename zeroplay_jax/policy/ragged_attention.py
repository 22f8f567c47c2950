"""Attention over pages by a kernel; selected by `SamplerConfig.attention='ragged'`.

On TPUs it is the Pallas kernel that JAX ships, ragged paged attention (pages: Kwon et al. 2023, arXiv:2309.06180), on
GPUs the one of policy/ragged_gpu.py. Both read the used pages of every row once per block of its queries, whatever the
length of other rows. Rows that decode have one query, chunks of prompts have many; each kind is a call of its own,
because the block of queries is static: a block of 32 queries wastes 31 of them in a row with one, and a block of one
reads the pages of a chunk once per token.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy import ragged_gpu, ragged_rows, sharding
from zeroplay_jax.policy.paged_attention import LayerPages
from zeroplay_jax.policy.ragged_rows import Rows
from zeroplay_jax.types import UserError

# Width of a TPU register tile. Heads are padded to a multiple, because the kernel reads whole tiles.
LANES = 128
# TPU: positions that are read at a time, and queries of a chunk that share a read. A larger block of queries needs more
# on-chip memory than v5e grants by default.
TPU_BLOCK = 512
TPU_CHUNK_QUERIES = 32
# Key/value heads of a chip whose keys and values fill tiles, by size of an element in bytes; besides these the
# multiples of the last number.
_TPU_KV_HEADS = {2: (1, 2, 4, 8), 4: (1, 2, 4)}


@dataclasses.dataclass(frozen=True)
class StepShape:
    """What is known of a step before it runs.

    Attributes:
      most_singles: most leading rows with one token; 0 if all rows are chunks.
      has_chunks: whether rows may have several tokens.
    """

    most_singles: int
    has_chunks: bool


def platform_of(mesh: Mesh) -> str:
    """Returns the platform of a mesh: 'cpu', 'tpu' or 'gpu'."""
    return mesh.devices.flat[0].platform


def cache_head_dim(head_dim: int, mesh: Mesh) -> int:
    """Returns the size of a head in the cache as the kernel wants it; beyond `head_dim` it holds zeros."""
    if platform_of(mesh) == 'tpu':
        return math.ceil(head_dim / LANES) * LANES
    return ragged_gpu.cache_head_dim(head_dim)


def check(kv_heads: int, page: int, dtype, mesh: Mesh) -> None:
    """Raises UserError if no kernel takes this model and page on this mesh."""
    if platform_of(mesh) != 'tpu':
        ragged_gpu.check(page)
        return
    local_kv_heads = kv_heads // mesh.shape['model']
    counts = _TPU_KV_HEADS[jnp.dtype(dtype).itemsize]
    if local_kv_heads not in counts and local_kv_heads % counts[-1]:
        allowed = ', '.join(str(count) for count in counts)
        raise UserError(
            f'{local_kv_heads} key/value heads on a chip: sampler.attention=ragged takes {allowed} or a multiple '
            f'of {counts[-1]}; choose another mesh.model or set sampler.attention=xla'
        )


def make_attend(
    mesh: Mesh,
    table: Int[Array, 'rows pages_per_row'],
    row: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
    shape: StepShape,
) -> Callable[..., Float[Array, 'tokens heads*head_dim']]:
    """Returns the attention of one step: a function of q, cache and window as `paged_attention.attend_pages`.

    Args:
      mesh: mesh of the arrays; the function runs on one data shard, and every device computes its own heads.
      table: pages of every row.
      row: row of every token. Idle tokens come last.
      position: position of every token within its row; -1 marks an idle token, whose result is 0.
      shape: rows with one token come before chunks.
    """
    platform = platform_of(mesh)
    rows = ragged_rows.rows_of_tokens(table, row, position)
    is_used = position >= 0
    parts = _split(rows, shape)

    def attend(
        q: Float[Array, 'tokens heads head_dim'], cache: LayerPages, window: int = 0
    ) -> Float[Array, 'tokens heads*head_dim']:
        tokens, heads, head_dim = q.shape
        local = functools.partial(_attend_parts, platform, shape, window)
        out = _per_head(local, mesh)(q, cache, parts)
        # Kernels leave results of idle tokens undefined.
        out = jnp.where(is_used[:, None, None], out, 0)
        return out.reshape(tokens, heads * head_dim)

    return attend


def _split(rows: Rows, shape: StepShape) -> tuple[Rows, Rows]:
    """Returns the rows with one token, and the chunks after them."""
    if not shape.has_chunks:
        return rows, rows
    singles = ragged_rows.count_singles(rows, shape.most_singles)
    return rows.first(max(shape.most_singles, 1), singles), rows.after(singles)


def _per_head(local: Callable, mesh: Mesh) -> Callable:
    """Returns a function that runs `local(q, cache, parts)` on every device with its own heads."""
    if mesh.size == 1:
        return local
    head_spec = jax.sharding.PartitionSpec(None, 'model')
    page_spec = jax.sharding.PartitionSpec(None, None, 'model')
    # Within the sampler's programs of several data shards the data axes are mapped already: the mesh is that of the
    # context, and only the axis of the heads is left.
    context_mesh = jax.sharding.get_abstract_mesh()
    is_mapped = not context_mesh.empty and bool(context_mesh.manual_axes)
    return jax.shard_map(
        local,
        mesh=context_mesh if is_mapped else mesh,
        in_specs=(head_spec, page_spec, jax.sharding.PartitionSpec()),
        out_specs=head_spec,
        axis_names={'model'} if is_mapped else set(sharding.AXES),
        check_vma=False,
    )


def _attend_parts(
    platform: str,
    shape: StepShape,
    window: int,
    q: Float[Array, 'tokens heads head_dim'],
    cache: LayerPages,
    parts: tuple[Rows, Rows],
) -> Float[Array, 'tokens heads head_dim']:
    """Returns the attention of the heads of one device."""
    head_dim = q.shape[2]
    if platform == 'tpu':
        kernel = _attend_tpu
    else:
        # On CPUs the kernel is interpreted, which is slow and serves tests only.
        kernel = functools.partial(ragged_gpu.attend, interpret=platform == 'cpu')
    call = functools.partial(kernel, cache=cache, window=window, scale=head_dim**-0.5)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, cache.shape[3] - head_dim)))
    singles, chunks = parts
    if not shape.has_chunks:
        return call(q, rows=singles, is_single=True)[:, :, :head_dim]
    # Chunks come after `singles.count` tokens. The kernel wants them first.
    offset = singles.count
    out = call(jnp.roll(q, -offset, axis=0), rows=chunks, is_single=False)
    out = jnp.roll(out, offset, axis=0)
    if shape.most_singles:
        leading = slice(0, shape.most_singles)
        single_out = call(q[leading], rows=singles, is_single=True)
        is_single = jnp.arange(shape.most_singles) < singles.count
        merged = jnp.where(is_single[:, None, None], single_out, out[leading])
        out = out.at[leading].set(merged)
    return out[:, :, :head_dim]


def _tpu_kernel() -> Callable:
    """Returns JAX's kernel."""
    # Imported here, because the module needs parts of JAX that only TPUs use.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    return ragged_paged_attention


def _attend_tpu(
    q: Float[Array, 'tokens heads head_dim'],
    cache: LayerPages,
    rows: Rows,
    window: int,
    scale: float,
    is_single: bool,
) -> Float[Array, 'tokens heads head_dim']:
    """Returns the attention of tokens by JAX's TPU kernel.

    The kernel takes no row without positions and not zero rows: it begins to read the first row before it knows, and a
    read that nobody awaits is overtaken by the next one. So there is always one row, if necessary one whose result is
    not used: it has the first token and at least one position.
    """
    is_empty = rows.count == 0
    number = jnp.arange(rows.start.shape[0], dtype=jnp.int32)
    start = jnp.where(is_empty, jnp.minimum(number, 1), rows.start)
    page, pages_per_row = cache.shape[1], rows.table.shape[1]
    return _tpu_kernel()(
        q,
        cache,
        rows.length,
        rows.table,
        start,
        jnp.maximum(rows.count, 1)[None],
        sm_scale=scale,
        sliding_window=window or None,
        # Given, because the kernel would look them up by the kind of the first device of the process.
        num_kv_pages_per_block=min(max(TPU_BLOCK // page, 1), pages_per_row),
        num_queries_per_block=1 if is_single else min(TPU_CHUNK_QUERIES, q.shape[0]),
    )
