"""Steps over pages on TPU slices: compiled ahead of time with JAX's ragged kernel, memory and estimated time.

    python -m benchmarks.tpu_pages                 # ten minutes per slice on a quiet core
    python -m benchmarks.tpu_pages --chips v5e --again

A step of `sampler.token_budget` tokens prefills and decodes; one of `sampler.decode_buckets` decodes only. Every
number of tokens is a program of its own here, compiled at the compiler's default effort with one and with two unrolled
layers and extrapolated to all. The pages take the memory of the slots of the compile table (`benchmarks.aot`).

The estimate of a step is the compiler's, without the kernel, which has none. The kernel's part is the larger of its
instruction bundles and its memory traffic, at the workload's mean length. Its machine code, in the compiler's dump, is
a list of bundles, one per cycle at best; those of its loops are counted.

Results are stored in benchmarks/results/tpu_pages.json; what is stored is compiled again only with --again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import tempfile
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from benchmarks import command, tpu_programs
from benchmarks.tpu_estimates import Cycles, Program
from benchmarks.tpu_shapes import CHIPS_OF_HOST, GENERATIONS
from zeroplay_jax.extras.plan.machines import CHIPS, GIB
from zeroplay_jax.extras.plan.planning import SHAPES
from zeroplay_jax.policy import ragged_tpu, sharding
from zeroplay_jax.policy.transformer import ModelConfig
from zeroplay_jax.rollout import sampler, token_steps
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.settings.rollouts import SamplerConfig

RESULTS = command.RESULTS / 'tpu_pages.json'
MODEL = 'qwen2.5-7b'
# Generation → slots of a host of its slices in the compile table.
SLOTS = {'v5e': 32, 'v5p': 256, 'v6e': 64}
# Slots per slot of the compile table, of which only the used places take memory, and the most of them.
MORE_SLOTS = 3
MOST_SLOTS = 256
# Mean length of a rollout while it decodes (`benchmarks.slices`): only these places of a slot have to be read.
USED_PLACES = 900
# XLA's default effort. At -1, the effort of the compile table, the schedule is an order of magnitude worse.
EFFORT = 0.0
# Queries of a block.
QUERIES = {'decode': ragged_tpu.SINGLE_QUERIES, 'prefill': ragged_tpu.CHUNK_QUERIES}
# Rows and pages of the compiled kernel. They change the length of loops only.
KERNEL_ROWS, KERNEL_PAGES = 256, 2048
# Places of a page on machines without a compiled kernel; it is read at the memory's peak rate.
PLAIN_PAGE = 64
# An instruction bundle: address, label of a loop or branch, depth of its loop as one '>' per level.
_BUNDLE = re.compile(r'^\s*(?:0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2})?\s*:\s*(>*)\s*\{')


def paged(slots: int, kind: str) -> SamplerConfig:
    """Returns a sampler whose pages take the memory of so many slots; `kind`: of the chips, 'v5e', 'h100'."""
    shapes = SHAPES[kind]
    config = tpu_programs.sampler_config(slots)
    return dataclasses.replace(
        config,
        slots=min(MORE_SLOTS * slots, MOST_SLOTS),
        page=shapes.page,
        pages=slots * config.positions // shapes.page,
        token_budget=shapes.budget,
        decode_buckets=shapes.buckets,
    )


def lower(
    name: str, kind: str, size: SamplerConfig, tokens: int, layers: int
) -> tuple[jax.stages.Lowered, int]:
    """Returns the traced program 'decode' whose steps have `tokens` tokens, and the bytes of its arguments per chip."""
    mesh = tpu_programs.mesh_of(name, GENERATIONS[kind].host)
    model = tpu_programs.sized(name, layers, dtype='bfloat16')
    has_chunks = tokens == size.token_budget
    config = dataclasses.replace(
        size,
        # Without chunks fewer slots can have a token.
        slots=size.slots if has_chunks else tokens,
        token_budget=tokens,
        decode_buckets=(),
        attention='ragged',
    )
    programs, state = tpu_programs.slot_state(model, config, mesh)
    params = tpu_programs.published(name, mesh, layers)
    table = jax.ShapeDtypeStruct(
        (config.slots, config.pages_per_slot), np.int32, sharding=sharding.rows(mesh)
    )
    arguments = tpu_programs.bytes_per_chip((params, state, table))
    decode = programs['decode'] if has_chunks else _decode_only(model, config, mesh, state)
    return decode.lower(params, state, table), arguments


def _decode_only(
    model: ModelConfig,
    config: SamplerConfig,
    mesh: jax.sharding.Mesh,
    slots: sampler.SlotState,
):
    """Returns the program 'decode' of a bucket alone, without the whole step beside it; `slots` are its shapes."""
    layout = jax.tree.map(lambda x: x.sharding, slots)
    local = config.of_shard(sharding.data_shards(mesh))

    def decode(params, state, table):
        step = functools.partial(
            token_steps.next_tokens,
            model,
            local,
            mesh,
            params,
            table,
            None,
            local.token_budget,
            False,
        )
        return token_steps.run_steps(local, (step,), state, table)

    whole_decode = sharding.per_data_shard(decode, mesh, True)
    return jax.jit(whole_decode, donate_argnums=1, out_shardings=(layout, sharding.rows(mesh)))


def compile_step(kind: str, size: SamplerConfig, tokens: int) -> dict[str, Any]:
    """Returns the figures of a step: seconds without the kernel, bytes of a chip."""
    layers = tpu_programs.sized(MODEL).layers
    few: list[Cycles] = []
    for count in (1, 2):
        lowered, _ = lower(MODEL, kind, size, tokens, count)
        compiled = tpu_programs.compile_program(lowered, EFFORT)
        _, step = Program(compiled.text).estimate()
        tpu_programs.log(kind, f'{tokens} tokens, {count} layers', step)
        few.append(step)
    first, second = few
    # All further layers cost what the second one does.
    cycles = first.cycles + (second.cycles - first.cycles) * (layers - 1)
    moved = first.moved + (second.moved - first.moved) * (layers - 1)
    _, arguments = lower(MODEL, kind, size, tokens, layers)
    return dict(
        seconds=GENERATIONS[kind].seconds(cycles, moved),
        arguments=arguments,
        temporaries=compiled.temporaries,
    )


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The ragged paged attention kernel of JAX, for all layers of a model on a host.

    Attributes:
      block: places that the kernel reads at a time.
      traffic: seconds in which a block is read at the memory's peak rate.
      instructions: 'decode' and 'prefill' → seconds of the instructions of a block, of a row around its blocks, and of
        a block of queries around its rows.
    """

    block: int
    traffic: float
    instructions: dict[str, tuple[float, float, float]]

    def seconds(self, grid: int, rows: float, blocks: float, kind: str) -> float:
        """Returns the seconds of a call: the larger of instructions and traffic.

        Args:
          grid: blocks of queries of the program, those without rows included.
          rows: rows, once for each of their blocks of queries.
          blocks: blocks of places that are read.
          kind: 'decode' or 'prefill'.
        """
        per_block, per_row, per_query_block = self.instructions[kind]
        return blocks * max(per_block, self.traffic) + rows * per_row + grid * per_query_block


def place_bytes(model: ModelConfig) -> int:
    """Returns the bytes of keys and values of one place in all layers."""
    return model.layers * 2 * model.kv_heads * model.head_dim * 2


def plain_kernel(place: float) -> Kernel:
    """Returns a kernel that reads a place in so many seconds and has no instructions."""
    none = (0.0, 0.0, 0.0)
    return Kernel(PLAIN_PAGE, PLAIN_PAGE * place, dict(decode=none, prefill=none))


def stored() -> dict[str, Any]:
    """Returns generation → its 'steps', by number of tokens, and its 'kernel'."""
    return json.loads(RESULTS.read_text())


def compiled_kernel(kind: str) -> Kernel:
    """Returns the stored kernel of MODEL on a host."""
    figures = stored()[kind]['kernel']
    model = tpu_programs.sized(MODEL)
    place_seconds = place_bytes(model) / (CHIPS_OF_HOST * CHIPS[kind].bandwidth)
    # The kernel runs once per layer; a bundle takes a cycle.
    bundle = GENERATIONS[kind].seconds(model.layers)
    instructions = {}
    for queries in QUERIES:
        counts = (figures[queries][loop] for loop in ('block', 'row', 'grid'))
        instructions[queries] = tuple(count * bundle for count in counts)
    block = figures['block']
    return Kernel(block, block * place_seconds, instructions)


def kernel_seconds(kernel: Kernel, size: SamplerConfig, tokens: int) -> tuple[float, str]:
    """Returns the kernel's seconds of a step whose rows all have one token, and what limits it.

    The rows are at the workload's mean length while they decode, USED_PLACES.
    """
    rows = min(size.slots, tokens)
    blocks = -(-USED_PLACES // kernel.block) * rows
    grid = -(-rows // QUERIES['decode'])
    per_block, per_row, per_query_block = kernel.instructions['decode']
    instructions = blocks * per_block + rows * per_row + grid * per_query_block
    traffic = blocks * kernel.traffic
    return max((traffic, 'traffic'), (instructions, 'instructions'))


# ---- the kernel ------------------------------------------------------------------------------------------------------


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


def compile_kernel(kind: str, queries: int) -> None:
    """Compiles the kernel for one chip of a slice; the compiler writes its dump as LIBTPU_INIT_ARGS says."""
    tpu_programs.prepare_tpu()
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    page = SHAPES[kind].page
    block_pages = ragged_tpu.BLOCK // page
    host = GENERATIONS[kind].host
    model = tpu_programs.sized(MODEL)
    split = tpu_programs.mesh_of(MODEL, host).shape['model']
    heads = model.heads // split
    kv_heads = model.kv_heads // split
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
        shape(KERNEL_ROWS * queries, heads, model.head_dim, dtype=jnp.bfloat16),
        shape(KERNEL_PAGES, page, 2 * kv_heads, model.head_dim, dtype=jnp.bfloat16),
        shape(KERNEL_ROWS),
        shape(KERNEL_ROWS, pages_of_row),
        shape(KERNEL_ROWS + 1),
        shape(1),
    )
    tpu_programs.compile_program(lowered, EFFORT)


def measure_kernel(kind: str) -> dict[str, Any]:
    """Returns the figures of the kernel: places of a block, and bundles with few and with many queries."""
    figures: dict[str, Any] = dict(block=ragged_tpu.BLOCK)
    for name, queries in QUERIES.items():
        with tempfile.TemporaryDirectory() as folder:
            # libtpu reads its flags when a process starts.
            flags = f'--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true'
            with mock.patch.dict(os.environ, LIBTPU_INIT_ARGS=flags), command.processes(1) as pool:
                pool.submit(compile_kernel, kind, queries).result()
            (dump,) = pathlib.Path(folder).glob('*ragged_paged*-final_bundles.txt')
            figures[name] = loop_bundles(dump.read_text(errors='replace'))
        tpu_programs.log(kind, name, figures[name])
    return figures


# ---- the command -----------------------------------------------------------------------------------------------------


def table() -> str:
    """Returns the stored steps as the text of a file."""
    columns = ['model', 'host', 'tokens of a step', 'slots', 'pages', 'arguments, GiB']
    columns += ['temporaries', 'without the kernel, ms', 'kernel, ms', 'limited by']
    rows = []
    for kind, figures in stored().items():
        size = paged(SLOTS[kind], kind)
        kernel = compiled_kernel(kind)
        for tokens, step in figures['steps'].items():
            seconds, limit = kernel_seconds(kernel, size, int(tokens))
            memory = (f'{step["arguments"] / GIB:.1f}', f'{step["temporaries"] / GIB:.2f}')
            times = (f'{step["seconds"] * 1e3:.3g}', f'{seconds * 1e3:.3g}')
            shape = (tokens, size.slots, f'{size.pages} of {size.page}')
            rows.append((MODEL, GENERATIONS[kind].host, *shape, *memory, *times, limit))
    return command.tab_separated(columns, rows)


def main(argv: list[str] | None = None) -> None:
    """Compiles the kernels and steps that are not stored, and writes and prints the table."""
    parser = command.parser('tpu_pages', __doc__)
    parser.add_argument('--chips', choices=SLOTS, nargs='+', default=[*SLOTS], help='(all)')
    parser.add_argument('--again', action='store_true', help='compile stored results again')
    args = parser.parse_args(argv)
    results = stored()
    with command.one_line_errors('tpu_pages'):
        tpu_programs.prepare_tpu()
    for kind in args.chips:
        if args.again or kind not in results:
            size = paged(SLOTS[kind], kind)
            steps = {}
            for tokens in (*size.decode_buckets, size.token_budget):
                steps[str(tokens)] = compile_step(kind, size, tokens)
            results[kind] = dict(kernel=measure_kernel(kind), steps=steps)
            write_text(RESULTS, json.dumps(results, indent=1) + '\n')
    write_text(RESULTS.with_suffix('.tsv'), table())
    print(table(), end='')


if __name__ == '__main__':
    main()
