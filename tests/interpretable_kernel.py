"""JAX's ragged paged attention kernel for TPUs, changed so that a CPU can interpret it.

The installed source is read and three spots are replaced that interpret mode does not know: the view of the buffer
with the pages, the strided reads of packed numbers, and the masked write. What is compiled for TPUs is the original.
"""

import importlib.util
import pathlib
import types

from jax.experimental import pallas as pl

NAME = 'jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel'


def _replaced(source: str, start: str, end: str, text: str) -> str:
    """The source with everything from `start` up to `end`, which must both be there once, replaced."""
    assert source.count(start) == 1, f'JAX changed its kernel: {start!r}'
    before, rest = source.split(start)
    assert end in rest, f'JAX changed its kernel: {end!r}'
    return before + text + rest[rest.index(end) :]


def load() -> types.ModuleType:
    """The module of the kernel, for interpret mode."""
    path = pathlib.Path(importlib.util.find_spec(NAME).origin)
    source = _replaced(
        path.read_text(),
        '      kv_ref = cur_async_copy_kv.wait().reshape(',
        '      kv_packing = get_dtype_packing(kv_ref.dtype)',
        '      kv_ref = cur_async_copy_kv.wait()[...]'
        '.reshape(-1, num_combined_kv_heads_per_blk, head_dim)\n',
    )
    source = _replaced(
        source,
        '  def strided_load_kv(',
        '  def fold_on_2nd_minor(',
        '  def strided_load_kv(ref, start, step):\n'
        '    return [ref[:, start]], [ref[:, start + 1]]\n\n',
    )
    changes = {
        'kv_load_step = max(1, kv_packing // 2)': 'kv_load_step = 1',
        'pltpu.store(ref, val, mask=jnp.logical_and(iota >= start, iota < end))': (
            'ref[...] = jnp.where(jnp.logical_and(iota >= start, iota < end), val, ref[...])'
        ),
    }
    for old, new in changes.items():
        assert source.count(old) == 1, f'JAX changed its kernel: {old!r}'
        source = source.replace(old, new)
    module = types.ModuleType('interpretable_kernel')
    exec(compile(source, str(path), 'exec'), module.__dict__)
    # The kernel's only call, as an interpreted one.
    plain_call = pl.pallas_call

    def interpreted_call(*arguments, **keywords):
        return plain_call(*arguments, **keywords, interpret=True)

    module.pl = types.SimpleNamespace(**vars(pl) | {'pallas_call': interpreted_call})
    return module
