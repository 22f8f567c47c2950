"""Pallas kernels for attention on TPUs, as JAX ships them; used through policy/transformer.py where a config says so.

Splash attention never holds the scores of a whole row: blocks of queries and keys pass through on-chip memory, forward
and backward, and blocks that the causal or sliding mask empties are skipped. Letters as in policy/attention.py.
"""

from __future__ import annotations

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zeroplay_jax.policy import sharding
from zeroplay_jax.types import UserError

# Places of a row that a kernel handles at a time; the last dimension of a tile of a TPU is 128 wide.
BLOCK, LANES = 512, 128


def check(length: int, mesh: Mesh | None) -> str:
    """Platform on which splash attention of rows of `length` places is about to run.

    Raises:
      UserError: the length is no multiple of 128, or the platform is neither a TPU nor (interpreted, slow) a CPU.
    """
    if length % LANES:
        raise UserError(
            f'rows of {length} tokens: policy.attention=splash works in steps of {LANES}'
        )
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform not in ('tpu', 'cpu'):
        raise UserError(
            f'policy.attention=splash is a TPU kernel; on {platform} take policy.attention=dense'
        )
    return platform


def attend_packed(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment: jax.Array,
    window: int = 0,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Attention of packed rows, as `attention.attend_packed` under `attention.packed_mask(segment, window)`.

    Empty places (segment 0) see each other here; what stands there is nobody's in both.

    Args:
      q: [B, L, H, d]; k, v: [B, L, K, d]; segment: int32 [B, L].
      window: places that a query sees, itself included; 0: all before it.
      mesh: where the rows lie; every device takes its own rows and heads. None: one device.

    Returns:
      [B, L, H·d] in the dtype of q.

    Raises:
      UserError: as in `check`.
    """
    batch, length, heads, dim = q.shape
    kernel = _kernel(length, heads, window, check(length, mesh) == 'cpu', _model_shards(mesh))
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q * dim**-0.5, k, v))
    out = _run(kernel, mesh)(q, k, v, segment)
    return out.transpose(0, 2, 1, 3).reshape(batch, length, heads * dim)


def _model_shards(mesh):
    return 1 if mesh is None else mesh.shape['model']


def _run(kernel, mesh):
    def local(q, k, v, segment):
        one = lambda q, k, v, segment: kernel(
            q, k, v, segment_ids=splash.SegmentIds(segment, segment)
        )
        return jax.vmap(one)(q, k, v, segment)

    if mesh is None or mesh.size == 1:
        return local
    heads = P(sharding.ROW_AXES, 'model')
    specs = (heads, heads, heads, P(sharding.ROW_AXES))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)


def _kernel(length: int, heads: int, window: int, interpret: bool, shards: int):
    """The kernel of one device's heads; its mask is computed block by block inside it."""
    mask: masks.Mask = masks.CausalMask((length, length))
    if window:
        mask = masks.LocalMask((length, length), (window - 1, 0), 0)
    # The largest multiple of a tile's width that divides the row.
    block = max(b for b in range(LANES, min(BLOCK, length) + 1, LANES) if length % b == 0)
    names = (
        'block_q',
        'block_kv',
        'block_kv_compute',
        'block_q_dkv',
        'block_kv_dkv',
        'block_kv_dkv_compute',
    )
    sizes = splash.BlockSizes(**dict.fromkeys((*names, 'block_q_dq', 'block_kv_dq'), block))
    every = masks.MultiHeadMask([mask] * (heads // shards))
    return splash.make_splash_mha(
        every, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret
    )
