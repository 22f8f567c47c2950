"""Steps over pages on TPU slices: compiled ahead of time with JAX's ragged kernel, memory and estimated time.

    python -m benchmarks.tpu_pages --model qwen2.5-7b --topology v5e:4x4 --topology v5p:2x2x4

A step of `sampler.token_budget` tokens prefills and decodes; one of `sampler.decode_buckets` decodes only. Every
number of tokens is a program of its own here, compiled at the compiler's default effort with one and with two unrolled
layers and extrapolated to all. The pages take the memory of the slots of the compile table (`benchmarks.tpu_aot`).

The estimate of a step is the compiler's, without the kernel, which has none. The kernel's part is the larger of its
instruction bundles and its memory traffic, at the workload's mean length (`benchmarks.tpu_kernels`). Results are stored
beside the compile table; what is stored is not compiled again. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from benchmarks import tpu_aot, tpu_estimates, tpu_kernels, tpu_programs, tpu_shapes
from benchmarks.hlo_estimate import Cycles, Program
from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.transformer import ModelConfig
from zeroplay_jax.rollout import sampler, token_steps
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.types import UserError

# Slots per slot of the compile table, of which only the used places take memory, and the most of them.
MORE_SLOTS = 3
MOST_SLOTS = 256
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Settings of a paged sampler on a host.

    Attributes:
      slots, page, pages: as of SamplerConfig.
      budget: tokens of a step that prefills.
      buckets: tokens of smaller steps.
    """

    slots: int
    page: int
    pages: int
    budget: int
    buckets: tuple[int, ...]


# Tokens of a step that prefills, and of smaller steps, by generation.
STEPS = {'v5e': (256, (32,)), 'v5p': (1024, (64, 128, 256)), 'v6e': (512, (64,))}


def sizes(topology: str, table_slots: int) -> Sizes:
    """Returns the sizes for a slice on which the compile table has `table_slots` slots."""
    generation = topology.partition(':')[0]
    page = tpu_kernels.CHOICES[generation][1]
    positions = tpu_programs.TOKENS + tpu_programs.CHUNK
    budget, buckets = STEPS[generation]
    return Sizes(
        slots=min(MORE_SLOTS * table_slots, MOST_SLOTS),
        page=page,
        pages=table_slots * positions // page,
        budget=budget,
        buckets=buckets,
    )


def key(name: str, topology: str, size: Sizes, tokens: int) -> str:
    """Returns the name under which a step is stored. Slices with the same hosts share it."""
    host = tpu_shapes.TOPOLOGIES[topology].host
    if tokens < size.budget:
        # Its slots have no influence: it computes the logits of all its tokens.
        return f'{name} {host} {tokens} tokens, decode'
    return f'{name} {host} {tokens} tokens of {size.slots} slots'


def lower(
    name: str, topology: str, size: Sizes, tokens: int, layers: int
) -> tuple[jax.stages.Lowered, int]:
    """Returns the traced program 'decode' whose steps have `tokens` tokens, and the bytes of its arguments per chip."""
    mesh = tpu_programs.host_mesh(name, topology)
    model = tpu_programs.sized(name, layers, dtype='bfloat16')
    has_chunks = tokens == size.budget
    config = sampler.SamplerConfig(
        slots=size.slots,
        context=tpu_programs.TOKENS,
        chunk=tpu_programs.CHUNK,
        fill_rows=tpu_programs.FILL_ROWS,
        burst=tpu_programs.BURST,
        put_rows=tpu_programs.FILL_ROWS,
        put_tokens=tpu_programs.CHUNK,
        eos=(0, 1),
        page=size.page,
        pages=size.pages,
        token_budget=tokens,
        attention='ragged',
    )
    if not has_chunks:
        # Fewer slots can have a token.
        config = dataclasses.replace(config, slots=tokens)
    programs = sampler.programs(model, config, mesh)
    state = jax.eval_shape(programs['empty'])
    layout = jax.tree.map(lambda _: sharding.slots(mesh), state)
    cache_layout = jax.tree.map(lambda _: sharding.pages(mesh), state.cache)
    layout = dataclasses.replace(layout, cache=cache_layout)
    state = tpu_programs.with_shardings(state, layout)
    params = tpu_programs.published(name, mesh, layers)
    params = tpu_programs.with_shardings(params, sharding.sampler_shardings(params, mesh))
    table = jax.ShapeDtypeStruct(
        (config.slots, config.pages_per_slot), np.int32, sharding=sharding.slots(mesh)
    )
    arguments = tpu_programs.bytes_per_chip((params, state, table))
    decode = programs['decode'] if has_chunks else _decode_only(model, config, mesh, layout)
    return decode.lower(params, state, table), arguments


def _decode_only(
    model: ModelConfig,
    config: sampler.SamplerConfig,
    mesh: jax.sharding.Mesh,
    layout: sampler.SlotState,
):
    """Returns the program 'decode' of a bucket alone, without the whole step beside it; `layout` is of the state."""
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
    return jax.jit(whole_decode, donate_argnums=1, out_shardings=(layout, sharding.slots(mesh)))


def compile_step(name: str, topology: str, size: Sizes, tokens: int) -> dict[str, Any]:
    """Returns the figures of a step: seconds without the kernel, calls of the kernel, bytes per chip."""
    chip = tpu_shapes.TOPOLOGIES[topology].chip
    clock = tpu_estimates.CLOCK[topology.partition(':')[0]]
    layers = tpu_programs.sized(name).layers
    steps: list[Cycles] = []
    temporaries = 0
    for few in (1, 2):
        lowered, _ = lower(name, topology, size, tokens, few)
        compiled = tpu_programs.compile_program(lowered, tpu_estimates.EFFORT)
        _, step = Program(compiled.text).estimate()
        tpu_programs.log(name, topology, f'{tokens} tokens, {few} layers', step)
        steps.append(step)
        temporaries = compiled.temporaries
    whole = tpu_estimates.scaled(steps, layers - 1)
    _, arguments = lower(name, topology, size, tokens, layers)
    return dict(
        seconds=whole.total / clock + whole.moved / chip.links,
        links=whole.moved / chip.links,
        kernels=round(whole.kernels),
        arguments=arguments,
        temporaries=temporaries,
    )


def add_missing(stored: dict[str, Any], path: pathlib.Path, name: str, topology: str) -> None:
    """Compiles the steps of a model on a slice that are not stored, and stores each at once."""
    size = sizes(topology, table_slots(stored, name, topology))
    for tokens in (size.budget, *size.buckets):
        step = key(name, topology, size, tokens)
        steps = stored.setdefault('pages', {})
        if step not in steps:
            steps[step] = compile_step(name, topology, size, tokens)
            # Read again: another process may have stored other results meanwhile.
            latest = json.loads(path.read_text())
            latest['pages'] = latest.get('pages', {}) | {step: steps[step]}
            write_text(path, json.dumps(latest, indent=1))


def table_slots(stored: dict[str, Any], name: str, topology: str) -> int:
    """Returns the slots of the compile table."""
    return _table_row(stored, name, topology)['slots']


def _table_row(stored: dict[str, Any], name: str, topology: str) -> dict[str, Any]:
    """Returns the row of 'decode' in the compile table.

    Raises:
      UserError: it is not there.
    """
    for row in stored['rows']:
        if (row['model'], row['topology'], row['program']) == (name, topology, 'decode'):
            return row
    raise UserError(f'no row of {name} on {topology}: run benchmarks.tpu_aot first')


def kernel_seconds(
    stored: dict[str, Any], name: str, topology: str, size: Sizes, tokens: int
) -> tuple[float, str]:
    """Returns the kernel's seconds of a step whose rows all have one token, and what limits it.

    The rows are at the workload's mean length while they decode, `tpu_aot.USED_PLACES`.
    """
    generation = topology.partition(':')[0]
    figures = stored['kernels'][tpu_kernels.key(name, generation)]
    model = tpu_programs.sized(name)
    mesh = _table_row(stored, name, topology)['mesh']
    chips = mesh['fsdp'] * mesh['model']
    rows = min(size.slots, tokens)
    blocks = -(-tpu_aot.USED_PLACES // figures['block']) * rows
    counts = figures['decode']
    grid = -(-rows // tpu_kernels.QUERIES['decode'])
    bundles = blocks * counts['block'] + rows * counts['row'] + grid * counts['grid']
    instructions = bundles * model.layers / tpu_estimates.CLOCK[generation]
    place = model.layers * 2 * model.kv_heads * model.head_dim * 2 / chips
    traffic = blocks * figures['block'] * place / tpu_shapes.TOPOLOGIES[topology].chip.bandwidth
    if traffic > instructions:
        return traffic, 'traffic'
    return instructions, 'instructions'


def table(stored: dict[str, Any], pairs: list[tuple[str, str]]) -> str:
    """Returns the stored steps of (model, slice) pairs as a Markdown table."""
    head = 'model | slice | tokens of a step | slots | pages | arguments, GiB | temporaries'
    lines = [f'| {head} | without the kernel, ms | kernel, ms | limited by |', '|' + '---|' * 10]
    for name, topology in pairs:
        size = sizes(topology, table_slots(stored, name, topology))
        for tokens in (*size.buckets, size.budget):
            step = stored.get('pages', {}).get(key(name, topology, size, tokens))
            if not step:
                continue
            kernel, limit = kernel_seconds(stored, name, topology, size, tokens)
            cells = [name, topology, str(tokens), str(size.slots)]
            cells.append(f'{size.pages} of {size.page}')
            cells.append(f'{step["arguments"] / GIB:.1f}')
            cells.append(f'{step["temporaries"] / GIB:.2f}')
            cells.append(f'{step["seconds"] * 1e3:.3g}')
            cells.append(f'{kernel * 1e3:.3g}')
            cells.append(limit)
            lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def main(argv: list[str] | None = None) -> None:
    """Compiles the steps that are not stored, and prints the table."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.tpu_pages',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--model', choices=tpu_shapes.MODELS, action='append', help='repeatable')
    parser.add_argument(
        '--topology', choices=tpu_shapes.TOPOLOGIES, action='append', help='repeatable'
    )
    parser.add_argument('--out', type=pathlib.Path, default=tpu_aot.RESULTS, help='results')
    args = parser.parse_args(argv)
    try:
        tpu_aot.prepare()
        pairs = []
        for topology in args.topology or ('v5e:4x4', 'v5p:2x2x4'):
            for name in args.model or ('qwen2.5-7b',):
                pairs.append((name, topology))
        for name, topology in pairs:
            add_missing(json.loads(args.out.read_text()), args.out, name, topology)
    except UserError as error:
        print(f'tpu_pages: {error}', file=sys.stderr)
        sys.exit(2)
    stored = json.loads(args.out.read_text())
    print(table(stored, pairs))
    print(json.dumps(stored['pages']))


if __name__ == '__main__':
    main()
