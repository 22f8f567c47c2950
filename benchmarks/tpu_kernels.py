"""Instructions of JAX's paged attention kernel on TPUs, from the compiler's dump.

    python -m benchmarks.tpu_kernels --model qwen2.5-7b

A Pallas kernel has no time estimate in a compiled program. Its machine code is a list of instruction bundles, one per
cycle at best. The bundles of its loops give its time without waiting for memory; `benchmarks.slices` takes the larger
of that time and the time of its memory traffic. Results are stored beside the compile table, with one entry per model
and generation. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from benchmarks import tpu_aot, tpu_programs, tpu_shapes
from zeroplay_jax.policy import ragged_tpu
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.types import UserError

# Generation → slice, places of a page.
CHOICES = {'v5e': ('v5e:4x4', 64), 'v5p': ('v5p:2x2x4', 128), 'v6e': ('v6e:4x4', 64)}
# Queries of a block.
QUERIES = {'decode': ragged_tpu.SINGLE_QUERIES, 'prefill': ragged_tpu.CHUNK_QUERIES}
# Rows and pages of the compiled kernel. They change the length of loops only.
ROWS, PAGES = 256, 2048
# An instruction bundle: address, label of a loop or branch, depth of its loop as one '>' per level.
_BUNDLE = re.compile(r'^\s*(?:0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2})?\s*:\s*(>*)\s*\{')


def key(name: str, generation: str) -> str:
    """Returns the name under which a kernel's figures are stored."""
    return f'{name} {generation}'


def loop_bundles(text: str) -> dict[str, int]:
    """Returns the bundles of the kernel's loops.

    Args:
      text: final bundles of the kernel. Its loops are nested: blocks of queries, rows in the block, blocks of places.

    Returns:
      {'block': of the innermost loop, once per block of places; 'row': of the loop around it, once per row and block
      of queries; 'grid': of the outermost loop, once per block of queries. Branches count as if both were taken}.
    """
    depths = [len(match[1]) for match in map(_BUNDLE.match, text.splitlines()) if match]
    deepest = max(depths, default=0)
    if deepest < 3:
        raise ValueError('fewer than three nested loops in the bundles')
    block = sum(depth == deepest for depth in depths)
    row = sum(1 < depth < deepest for depth in depths)
    grid = sum(depth == 1 for depth in depths)
    return dict(block=block, row=row, grid=grid)


def compile_kernel(name: str, generation: str, queries: int) -> None:
    """Compiles the kernel for one chip of a slice; the compiler writes its dump as LIBTPU_INIT_ARGS says."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    topology, page = CHOICES[generation]
    block_pages = ragged_tpu.BLOCK // page
    model = tpu_programs.sized(name)
    split = tpu_programs.host_mesh(name, topology).shape['model']
    heads = model.heads // split
    kv_heads = model.kv_heads // split
    host = tpu_shapes.TOPOLOGIES[topology].host
    device = topologies.get_topology_desc(platform='tpu', topology_name=host).devices[0]
    # The kernel reads the chip's kind from the mesh around it.
    mesh = jax.sharding.Mesh(np.array([device]), ('chip',))
    whole = jax.sharding.PartitionSpec()
    sharding = jax.sharding.NamedSharding(mesh, whole)

    def shape(*dimensions: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dimensions, dtype, sharding=sharding)

    pages_of_row = -(-tpu_programs.TOKENS // page)

    def attend(query, pages, lengths, table, starts, count):
        return ragged_paged_attention(
            query,
            pages,
            lengths,
            table,
            starts,
            count,
            sm_scale=model.head_dim**-0.5,
            num_kv_pages_per_block=block_pages,
            num_queries_per_block=queries,
        )

    on_chip = jax.shard_map(
        attend, mesh=mesh, in_specs=(whole,) * 6, out_specs=whole, check_vma=False
    )
    lowered = jax.jit(on_chip).lower(
        shape(ROWS * queries, heads, model.head_dim, dtype=jnp.bfloat16),
        shape(PAGES, page, 2 * kv_heads, model.head_dim, dtype=jnp.bfloat16),
        shape(ROWS),
        shape(ROWS, pages_of_row),
        shape(ROWS + 1),
        shape(1),
    )
    tpu_programs.compile_program(lowered, 0.0)


def measure(name: str, generation: str) -> dict[str, Any]:
    """Returns the figures of the kernel: page, places of a block, and bundles with few and with many queries."""
    _, page = CHOICES[generation]
    figures: dict[str, Any] = dict(page=page, block=ragged_tpu.BLOCK)
    for kind, queries in QUERIES.items():
        with tempfile.TemporaryDirectory() as folder:
            # libtpu reads its flags when a process starts.
            flags = f'--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true'
            command = [sys.executable, '-m', 'benchmarks.tpu_kernels', '--compile']
            command += [name, generation, str(queries)]
            environment = os.environ | {'LIBTPU_INIT_ARGS': flags}
            subprocess.run(command, env=environment, check=True, capture_output=True)
            (dump,) = pathlib.Path(folder).glob('*ragged_paged*-final_bundles.txt')
            figures[kind] = loop_bundles(dump.read_text(errors='replace'))
        tpu_programs.log(name, generation, kind, figures[kind])
    return figures


def main(argv: list[str] | None = None) -> None:
    """Compiles the kernels of a model for all generations and stores their figures."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.tpu_kernels',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--model',
        choices=tpu_shapes.MODELS,
        action='append',
        help='model; repeat for several (all)',
    )
    parser.add_argument(
        '--out', type=pathlib.Path, default=tpu_aot.RESULTS, help='table that gets the counts'
    )
    parser.add_argument('--compile', nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        tpu_aot.prepare()
    except UserError as error:
        print(f'tpu_kernels: {error}', file=sys.stderr)
        sys.exit(2)
    if args.compile:
        name, generation, queries = args.compile
        compile_kernel(name, generation, int(queries))
        return
    figures = {}
    for name in args.model or tpu_shapes.MODELS:
        for generation in CHOICES:
            figures[key(name, generation)] = measure(name, generation)
    stored = json.loads(args.out.read_text())
    stored['kernels'] = stored.get('kernels', {}) | figures
    write_text(args.out, json.dumps(stored, indent=1))
    print(json.dumps(figures))


if __name__ == '__main__':
    main()
