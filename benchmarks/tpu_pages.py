"""Steps over pages on TPU slices: compiled ahead of time with JAX's ragged kernel, memory and estimated time.

    python -m benchmarks.tpu_pages --model qwen2.5-7b --topology v5e:4x4 --topology v5p:2x2x4
    python -m benchmarks.tpu_pages --model qwen2.5-7b --kernels

A step of `sampler.token_budget` tokens prefills and decodes; one of `sampler.decode_buckets` decodes only. Every
number of tokens is a program of its own here, compiled at the compiler's default effort with one and with two unrolled
layers and extrapolated to all. The pages take the memory of the slots of the compile table (`benchmarks.tpu_aot`).

The estimate of a step is the compiler's, without the kernel, which has none. The kernel's part is the larger of its
instruction bundles and its memory traffic, at the workload's mean length. Its machine code, in the compiler's dump, is
a list of bundles, one per cycle at best: --kernels compiles it for all generations and counts those of its loops.

Results are stored beside the compile table; what is stored is not compiled again. The last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import tempfile
from typing import Any, TypeVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from benchmarks import command, tpu_aot, tpu_estimates, tpu_programs, tpu_shapes
from benchmarks.tpu_estimates import Cycles, Program
from benchmarks.tpu_shapes import generation
from zeroplay_jax.configuration.machines import GIB
from zeroplay_jax.configuration.planning import SHAPES
from zeroplay_jax.policy import ragged_tpu, sharding
from zeroplay_jax.policy.transformer import ModelConfig
from zeroplay_jax.rollout import sampler, token_steps
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.settings.rollouts import SamplerConfig
from zeroplay_jax.types import UserError

ConfigT = TypeVar('ConfigT', bound=SamplerConfig)

# Slots per slot of the compile table, of which only the used places take memory, and the most of them.
MORE_SLOTS = 3
MOST_SLOTS = 256
# Generation → slice. Pages and steps are those that a plan chooses.
CHOICES = {'v5e': 'v5e:4x4', 'v5p': 'v5p:2x2x4', 'v6e': 'v6e:4x4'}
# Queries of a block.
QUERIES = {'decode': ragged_tpu.SINGLE_QUERIES, 'prefill': ragged_tpu.CHUNK_QUERIES}
# Rows and pages of the compiled kernel. They change the length of loops only.
KERNEL_ROWS, KERNEL_PAGES = 256, 2048
# An instruction bundle: address, label of a loop or branch, depth of its loop as one '>' per level.
_BUNDLE = re.compile(r'^\s*(?:0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2})?\s*:\s*(>*)\s*\{')


def paged(config: ConfigT, chips: str) -> ConfigT:
    """Returns a sampler whose pages take the memory that the slots of `config` take; `chips`: 'v5e', 'h100'."""
    shapes = SHAPES[chips]
    return dataclasses.replace(
        config,
        slots=min(MORE_SLOTS * config.slots, MOST_SLOTS),
        page=shapes.page,
        pages=config.slots * config.positions // shapes.page,
        token_budget=shapes.budget,
        decode_buckets=shapes.buckets,
    )


def sizes(topology: str, table_slots: int) -> SamplerConfig:
    """Returns the paged sampler of a host of a slice on which the compile table has `table_slots` slots."""
    return paged(tpu_programs.sampler_config(table_slots), generation(topology))


def key(name: str, topology: str, size: SamplerConfig, tokens: int) -> str:
    """Returns the name under which a step is stored. Slices with the same hosts share it."""
    host = tpu_shapes.TOPOLOGIES[topology].host
    if tokens < size.token_budget:
        # Its slots have no influence: it computes the logits of all its tokens.
        return f'{name} {host} {tokens} tokens, decode'
    return f'{name} {host} {tokens} tokens of {size.slots} slots'


def lower(
    name: str, topology: str, size: SamplerConfig, tokens: int, layers: int
) -> tuple[jax.stages.Lowered, int]:
    """Returns the traced program 'decode' whose steps have `tokens` tokens, and the bytes of its arguments per chip."""
    mesh = tpu_programs.host_mesh(name, topology)
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
    params = tpu_programs.with_shardings(params, sharding.sampler_shardings(params, mesh))
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


def compile_step(name: str, topology: str, size: SamplerConfig, tokens: int) -> dict[str, Any]:
    """Returns the figures of a step: seconds without the kernel, calls of the kernel, bytes per chip."""
    chip = tpu_shapes.TOPOLOGIES[topology].chip
    layers = tpu_programs.sized(name).layers
    steps: list[Cycles] = []
    for few in (1, 2):
        lowered, _ = lower(name, topology, size, tokens, few)
        compiled = tpu_programs.compile_program(lowered, tpu_estimates.EFFORT)
        _, step = Program(compiled.text).estimate()
        tpu_programs.log(name, topology, f'{tokens} tokens, {few} layers', step)
        steps.append(step)
    whole = tpu_estimates.scaled(steps, layers - 1)
    _, arguments = lower(name, topology, size, tokens, layers)
    return dict(
        seconds=chip.seconds(whole.total, whole.moved),
        links=chip.seconds(0.0, whole.moved),
        kernels=round(whole.kernels),
        arguments=arguments,
        temporaries=compiled.temporaries,
    )


def add_missing(stored: dict[str, Any], path: pathlib.Path, name: str, topology: str) -> None:
    """Compiles the steps of a model on a slice that are not stored, and stores each at once."""
    size = sizes(topology, table_slots(stored, name, topology))
    for tokens in (size.token_budget, *size.decode_buckets):
        step = key(name, topology, size, tokens)
        steps = stored.setdefault('pages', {})
        if step not in steps:
            steps[step] = compile_step(name, topology, size, tokens)
            store(path, 'pages', {step: steps[step]})


def store(path: pathlib.Path, section: str, results: dict[str, Any]) -> None:
    """Adds results to a section of the file of results."""
    # Read again: another process may have stored other results meanwhile.
    latest = json.loads(path.read_text())
    latest[section] = latest.get(section, {}) | results
    write_text(path, json.dumps(latest, indent=1))


def table_slots(stored: dict[str, Any], name: str, topology: str) -> int:
    """Returns the slots of the compile table."""
    return table_rows(stored, name, topology)['decode']['slots']


def table_rows(stored: dict[str, Any], name: str, topology: str) -> dict[str, dict[str, Any]]:
    """Returns program → row of the compile table.

    Raises:
      UserError: the model was not compiled for the slice.
    """
    rows = {}
    for row in stored['rows']:
        if (row['model'], row['topology']) == (name, topology):
            rows[row['program']] = row
    if not rows:
        raise UserError(f'no row of {name} on {topology}: run benchmarks.tpu_aot first')
    return rows


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The ragged paged attention kernel of JAX, for all layers of a model on a host.

    Attributes:
      page, block: places of a page, and places that the kernel reads at a time.
      traffic: seconds in which a block is read at the memory's peak rate.
      instructions: 'decode' and 'prefill' → seconds of the instructions of a block, of a row around its blocks, and of
        a block of queries around its rows.
    """

    page: int
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


def compiled_kernel(stored: dict[str, Any], name: str, topology: str) -> Kernel | None:
    """Returns the stored kernel of a model on a host of a slice; None without one."""
    figures = stored.get('kernels', {}).get(kernel_key(name, generation(topology)))
    if not figures:
        return None
    chip = tpu_shapes.TOPOLOGIES[topology].chip
    model = tpu_programs.sized(name)
    mesh = table_rows(stored, name, topology)['decode']['mesh']
    place_seconds = place_bytes(model) / (mesh['fsdp'] * mesh['model']) / chip.bandwidth
    # The kernel runs once per layer; a bundle takes a cycle.
    bundle = chip.seconds(model.layers)
    instructions = {}
    for kind in QUERIES:
        counts = (figures[kind][loop] for loop in ('block', 'row', 'grid'))
        instructions[kind] = tuple(count * bundle for count in counts)
    block = figures['block']
    return Kernel(figures['page'], block, block * place_seconds, instructions)


def kernel_seconds(kernel: Kernel, size: SamplerConfig, tokens: int) -> tuple[float, str]:
    """Returns the kernel's seconds of a step whose rows all have one token, and what limits it.

    The rows are at the workload's mean length while they decode, `tpu_aot.USED_PLACES`.
    """
    rows = min(size.slots, tokens)
    blocks = -(-tpu_aot.USED_PLACES // kernel.block) * rows
    grid = -(-rows // QUERIES['decode'])
    per_block, per_row, per_query_block = kernel.instructions['decode']
    instructions = blocks * per_block + rows * per_row + grid * per_query_block
    traffic = blocks * kernel.traffic
    return max((traffic, 'traffic'), (instructions, 'instructions'))


# ---- the kernel ------------------------------------------------------------------------------------------------------


def kernel_key(name: str, chips: str) -> str:
    """Returns the name under which a kernel's figures are stored."""
    return f'{name} {chips}'


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


def compile_kernel(name: str, chips: str, queries: int) -> None:
    """Compiles the kernel for one chip of a slice; the compiler writes its dump as LIBTPU_INIT_ARGS says."""
    tpu_aot.prepare()
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    topology, page = CHOICES[chips], SHAPES[chips].page
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
        shape(KERNEL_ROWS * queries, heads, model.head_dim, dtype=jnp.bfloat16),
        shape(KERNEL_PAGES, page, 2 * kv_heads, model.head_dim, dtype=jnp.bfloat16),
        shape(KERNEL_ROWS),
        shape(KERNEL_ROWS, pages_of_row),
        shape(KERNEL_ROWS + 1),
        shape(1),
    )
    tpu_programs.compile_program(lowered, 0.0)


def measure_kernel(name: str, chips: str) -> dict[str, Any]:
    """Returns the figures of the kernel: page, places of a block, and bundles with few and with many queries."""
    page = SHAPES[chips].page
    figures: dict[str, Any] = dict(page=page, block=ragged_tpu.BLOCK)
    for kind, queries in QUERIES.items():
        with tempfile.TemporaryDirectory() as folder:
            # libtpu reads its flags when a process starts.
            flags = f'--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true'
            with mock.patch.dict(os.environ, LIBTPU_INIT_ARGS=flags), command.processes(1) as pool:
                pool.submit(compile_kernel, name, chips, queries).result()
            (dump,) = pathlib.Path(folder).glob('*ragged_paged*-final_bundles.txt')
            figures[kind] = loop_bundles(dump.read_text(errors='replace'))
        tpu_programs.log(name, chips, kind, figures[kind])
    return figures


# ---- the command -----------------------------------------------------------------------------------------------------


def table(stored: dict[str, Any], pairs: list[tuple[str, str]]) -> str:
    """Returns the stored steps of (model, slice) pairs as a Markdown table."""
    columns = ['model', 'slice', 'tokens of a step', 'slots', 'pages', 'arguments, GiB']
    columns += ['temporaries', 'without the kernel, ms', 'kernel, ms', 'limited by']
    rows = []
    for name, topology in pairs:
        size = sizes(topology, table_slots(stored, name, topology))
        kernel = compiled_kernel(stored, name, topology)
        if not kernel:
            raise UserError(f'no kernel of {name} on {topology}: give --kernels, too')
        for tokens in (*size.decode_buckets, size.token_budget):
            step = stored.get('pages', {}).get(key(name, topology, size, tokens))
            if not step:
                continue
            seconds, limit = kernel_seconds(kernel, size, tokens)
            memory = (f'{step["arguments"] / GIB:.1f}', f'{step["temporaries"] / GIB:.2f}')
            times = (f'{step["seconds"] * 1e3:.3g}', f'{seconds * 1e3:.3g}')
            pages = f'{size.pages} of {size.page}'
            rows.append((name, topology, tokens, size.slots, pages, *memory, *times, limit))
    return command.table(columns, rows)


def main(argv: list[str] | None = None) -> None:
    """Compiles the steps or kernels that are not stored, and prints the table."""
    parser = command.parser('tpu_pages', __doc__)
    parser.add_argument('--model', choices=tpu_shapes.MODELS, action='append', help='repeatable')
    parser.add_argument(
        '--topology', choices=tpu_shapes.TOPOLOGIES, action='append', help='repeatable'
    )
    parser.add_argument('--kernels', action='store_true', help='compile the kernels again')
    parser.add_argument('--out', type=pathlib.Path, default=tpu_aot.RESULTS, help='results')
    args = parser.parse_args(argv)
    names = args.model or ('qwen2.5-7b',)
    pairs = list(itertools.product(names, args.topology or ('v5e:4x4', 'v5p:2x2x4')))
    with command.one_line_errors('tpu_pages'):
        tpu_aot.prepare()
        for name, chips in itertools.product(names, CHOICES if args.kernels else ()):
            figures = measure_kernel(name, chips)
            store(args.out, 'kernels', {kernel_key(name, chips): figures})
        for name, topology in pairs:
            add_missing(json.loads(args.out.read_text()), args.out, name, topology)
    stored = json.loads(args.out.read_text())
    print(table(stored, pairs))
    print(json.dumps(stored['pages']))


if __name__ == '__main__':
    main()
