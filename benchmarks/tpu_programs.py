"""Builds and compiles the programs of learner and sampler for a TPU slice, and reads off their memory per chip.

No array is materialised: parameters, optimiser state and slots are jax.ShapeDtypeStruct with the sharding of a run.
Notation: B rows of a micro-batch, L tokens of a row, S slots of a host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks import tpu_shapes
from zeroplay_jax.configs import common
from zeroplay_jax.configuration.machines import GIB
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import attention, delta, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig
from zeroplay_jax.rollout import sampler

# Rows of a batch and tokens of a row.
ROWS, TOKENS = 256, 4096
# Sampler settings, see SamplerConfig.
CHUNK, FILL_ROWS, BURST = 256, 16, 16
# Compiler effort: -1 compiles about five times faster than the default 0, with a worse schedule.
EFFORT = -1.0
# Compiler options that keep a gather and its product whole. Otherwise XLA makes a loop of partial products, and
# `cost_analysis` counts the body of a loop once.
PLAIN_PRODUCTS = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': 1 << 20}

# A row of a compile table.
Row: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's figures of one program, per chip.

    Attributes:
      arguments: bytes of the arguments.
      temporaries: bytes of temporary buffers.
      peak: bytes of arguments, temporaries and the outputs that do not reuse an argument's buffer.
      flops: operations.
      text: the program in HLO.
    """

    arguments: int
    temporaries: int
    peak: int
    flops: float
    text: str = dataclasses.field(repr=False)


# Compiled programs of this process, with the columns that they have in every row: slices with the same host share their
# samplers' programs.
_COMPILED: dict[tuple, tuple[Compiled | None, Row]] = {}


class OutOfMemory(Exception):
    """A program exceeds the memory of a chip; the message is the first line of the compiler's."""


def compile_program(
    lowered: jax.stages.Lowered, effort: float = EFFORT, plain: bool = False
) -> Compiled:
    """Returns the figures of a program, compiled for the chips of its shardings.

    Args:
      lowered: the traced program.
      effort: compiler effort, see EFFORT.
      plain: whether to apply PLAIN_PRODUCTS.

    Raises:
      OutOfMemory: the program exceeds the memory of a chip.
    """
    options = {'exec_time_optimization_effort': effort}
    if plain:
        options |= PLAIN_PRODUCTS
    try:
        program = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise OutOfMemory(str(error).strip().splitlines()[0][:300]) from None
    flops = program.cost_analysis().get('flops', 0.0)
    return compiled_figures(program, flops, program.as_text())


def compiled_figures(program: Any, flops: float = 0.0, text: str = '') -> Compiled:
    """Returns the figures of a compiled program, with those that its memory analysis does not have."""
    memory = program.memory_analysis()
    # Outputs that alias a donated argument take no memory of their own.
    new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    arguments = memory.argument_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    return Compiled(arguments, temporaries, arguments + temporaries + new_outputs, flops, text)


def log(*words) -> None:
    """Prints progress to stderr."""
    print(time.strftime('%H:%M:%S'), *words, file=sys.stderr, flush=True)


def slice_devices(topology: str) -> tuple[list, int]:
    """Returns the chips of a slice, sorted by host, and the chips of a host."""
    devices = topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
    hosts = len({device.process_index for device in devices})
    in_order = sorted(devices, key=lambda device: (device.process_index, device.id))
    return in_order, len(devices) // hosts


@functools.cache
def mesh_of(name: str, topology: str) -> Mesh:
    """Returns the mesh of a run on a slice: one replica per host, whose chips are split into 'fsdp' and 'model'.

    Args:
      name: the model.
      topology: the slice.
    """
    devices, chips_per_host = slice_devices(topology)
    hosts = len(devices) // chips_per_host
    model = sized(name)
    # 'model' is as large as possible: the sampler's prefill splits heads over it, whereas over 'fsdp' every chip
    # computes attention for all rows. It must divide chips, key/value heads and vocabulary.
    split = math.gcd(chips_per_host, model.kv_heads, model.vocab_size)
    return sharding.make_mesh(hosts, chips_per_host // split, split, devices=devices)


def host_mesh(name: str, topology: str) -> Mesh:
    """Returns the mesh of one host's chips, on which its sampler runs."""
    return mesh_of(name, tpu_shapes.TOPOLOGIES[topology].host)


def bytes_per_chip(tree) -> int:
    """Returns the bytes that sharded shapes take on one chip."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shard_shape = leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shard_shape) * leaf.dtype.itemsize
    return total


def with_shardings(shapes, shardings):
    """Returns a tree of jax.ShapeDtypeStruct with the shapes of the first tree and the shardings of the second."""

    def with_sharding(x, leaf_sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=leaf_sharding)

    return jax.tree.map(with_sharding, shapes, shardings)


def parameters(model: ModelConfig):
    """Returns the shapes of the float32 parameters."""
    return jax.eval_shape(functools.partial(transformer.init, model), jax.random.key(0))


def learner(name: str, mesh: Mesh, rows: int, **overrides) -> Learner:
    """Returns the learner of a role, built from shapes.

    Args:
      name: the model.
      mesh: where it trains.
      rows: B.
      **overrides: fields of ModelConfig.
    """
    fields: dict[str, Any] = dict(
        dtype='bfloat16', remat=True, attention='splash', scan=True, mesh=mesh
    )
    model = sized(name, **(fields | overrides))
    return Learner(
        model, mesh, {'solver': common.get_config().solver}, parameters(model), (rows, TOKENS)
    )


def sized(name: str, layers: int = 0, **overrides) -> ModelConfig:
    """Returns the ModelConfig of a model, truncated to its first `layers` unless that is 0."""
    model = tpu_shapes.model_config(name)
    layers = layers or model.layers
    return dataclasses.replace(model, layers=layers, windows=model.windows[:layers], **overrides)


def published(name: str, mesh: Mesh, layers: int = 0):
    """Returns the shapes of the weights that a sampler reads, sharded over its host's mesh."""
    model = sized(name, layers, dtype='bfloat16')
    shapes = jax.eval_shape(functools.partial(transformer.published, model), parameters(model))
    return with_shardings(shapes, sharding.parameter_shardings(shapes, mesh))


def slots(name: str, mesh: Mesh, count: int, layers: int = 0):
    """Returns (programs, shapes of the slots) of a sampler with `count` slots on its host's mesh."""
    model = sized(name, layers, dtype='bfloat16')
    return slot_state(model, sampler_config(count), mesh)


def sampler_config(slots: int, **fields: Any) -> sampler.SamplerConfig:
    """Returns the settings of a sampler with so many slots on its host; `fields` are further ones."""
    return sampler.SamplerConfig(
        slots=slots,
        context=TOKENS,
        chunk=CHUNK,
        fill_rows=FILL_ROWS,
        burst=BURST,
        put_rows=FILL_ROWS,
        put_tokens=CHUNK,
        eos=(0, 1),
        **fields,
    )


def slot_state(model: ModelConfig, config: sampler.SamplerConfig, mesh: Mesh):
    """Returns (programs, shapes of the slots) of a sampler on its host's mesh."""
    programs = sampler.programs(model, config, mesh)
    state = jax.eval_shape(programs['empty'])
    # Slots are split over the data axes; the caches also by key/value heads over 'model'.
    cache = sharding.pages(mesh) if config.is_paged else sharding.cache(mesh)
    shardings = jax.tree.map(lambda _: sharding.rows(mesh), state)
    layers = delta.layout(state.cache[: model.layers], mesh, cache)
    shardings = dataclasses.replace(shardings, cache=(*layers, *shardings.cache[model.layers :]))
    return programs, with_shardings(state, shardings)


def lower_sampler(
    name: str, mesh: Mesh, count: int, layers: int = 0
) -> dict[str, jax.stages.Lowered]:
    """Returns the traced programs 'extend' and 'decode' of a sampler.

    With `layers` other than 0 the model is truncated to its first layers and `extend` has no loop over rows, so that
    `cost_analysis`, which counts the body of a loop once, counts all rows.
    """
    programs, state = slots(name, mesh, count, layers)
    params = published(name, mesh, layers)
    unrolled: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if layers:
        # `extend` attends _PREFILL_ROWS rows at a time in a loop; with all rows at a time there is no loop.
        unrolled = mock.patch.object(attention, '_PREFILL_ROWS', FILL_ROWS)
    with unrolled:
        extend = programs['extend'].lower(params, state, np.zeros(FILL_ROWS, np.int32))
    return dict(extend=extend, decode=programs['decode'].lower(params, state))


# ---- rows of the compile tables ------------------------------------------------------------------------------------


def settle(
    peak: int, beside: dict[str, int], order: tuple[str, ...], memory: float
) -> dict[str, Any]:
    """Chooses the arrays to offload so that a program fits: the first entries of `order`, as few as possible.

    Args:
      peak: bytes of the program.
      beside: bytes of all other arrays on the chip, by name.
      order: names in the order in which they are offloaded.
      memory: bytes of the chip.

    Returns:
      {'fits', 'hbm_bytes': total on the chip, 'offloaded': offloaded names that had any bytes}.
    """
    for count in range(len(order) + 1):
        offloaded = [name for name in order[:count] if beside.get(name)]
        total = peak + sum(beside.values()) - sum(beside[name] for name in offloaded)
        if total <= memory:
            break
    return dict(fits=total <= memory, hbm_bytes=int(total), offloaded=offloaded)


def fitted(
    key: tuple,
    compile_it: Callable[[], Compiled],
    beside: dict[str, int],
    order: tuple[str, ...],
    memory: float,
) -> Row:
    """Returns and logs the columns of a program: its memory, what has to leave the chip (`settle`) or why it fails.

    Args:
      key: what identifies the program in this process, which compiles it once.
      compile_it: compiles it; raises OutOfMemory.
      beside, order, memory: see `settle`.
    """
    if key not in _COMPILED:
        started = time.perf_counter()
        program = None
        columns: Row
        try:
            # The text of a program is large and not needed here.
            program = dataclasses.replace(compile_it(), text='')
        except OutOfMemory as error:
            columns = dict(fits=False, hbm_bytes=0, offloaded=[], error=str(error))
        else:
            columns = dict(arguments=program.arguments, temporaries=program.temporaries)
        columns['compile_seconds'] = round(time.perf_counter() - started, 1)
        _COMPILED[key] = program, columns
    program, columns = _COMPILED[key]
    if program:
        columns = columns | settle(program.peak, beside, order, memory)
    log(*key, summary(columns))
    return columns


def sampler_rows(
    fit: Callable[..., Row],
    host: str,
    programs: dict[str, jax.stages.Lowered],
    slots: int,
    slot_bytes: int,
    beside: dict[str, int],
) -> list[Row]:
    """Returns the rows of a sampler's programs, up to the first that does not fit.

    Args:
      fit: returns the columns of a program, from its key, the traced program, `beside` and 'rollout'.
      host: name of the host.
      programs: traced, by name.
      slots, slot_bytes: number of slots of the host, and their bytes per chip.
      beside: see `settle`.
    """
    rows = []
    for program, lowered in programs.items():
        columns = fit((host, f'{slots} slots', program), lowered, beside, 'rollout')
        rows.append(dict(program=program, slots=slots, slot_bytes=slot_bytes, **columns))
        if not columns['fits']:
            break
    return rows


def update_columns(parts: dict[str, Row], totals: list[int]) -> Row:
    """Returns the columns of an update from those of its two programs and their totals on the chip.

    An array that is offloaded for one program is off the chip for both.
    """
    errors = [part['error'] for part in parts.values() if 'error' in part]
    columns: Row = dict(error=errors[0]) if errors else {}
    columns['fits'] = all(part['fits'] for part in parts.values())
    columns['hbm_bytes'] = 0 if errors else max(totals)
    columns['offloaded'] = max((part['offloaded'] for part in parts.values()), key=len)
    for name in ('arguments', 'temporaries'):
        columns[name] = max(part.get(name, 0) for part in parts.values())
    columns['compile_seconds'] = sum(part['compile_seconds'] for part in parts.values())
    return columns


MEMORY_COLUMNS = ('fits', 'memory, GiB', 'arguments', 'temporaries', 'off the chip')


def memory_cells(row: Row) -> list[str]:
    """Returns the cells of a row for MEMORY_COLUMNS."""
    cells = ['yes' if row['fits'] else '**no**']
    for column in ('hbm_bytes', 'arguments', 'temporaries'):
        size = row.get(column)
        cells.append(f'{size / GIB:.1f}' if size else '–')
    return [*cells, '; '.join(row['offloaded']) or '–']


def summary(row: dict) -> str:
    """Returns a row in a few words, for the progress messages."""
    if 'error' in row:
        return f'does not compile: {row["error"]}'
    fits = 'fits' if row['fits'] else 'does not fit'
    text = f'{row["hbm_bytes"] / GIB:.1f} GiB, {fits}'
    if row['offloaded']:
        text += f', off the chip: {", ".join(row["offloaded"])}'
    return text
