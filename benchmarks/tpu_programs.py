"""Builds and compiles the programs of learner and sampler for TPU slices, and reads off their memory per chip.

No array is materialised: parameters, optimiser state and slots are jax.ShapeDtypeStruct with the sharding of a run.
Notation: B rows of a micro-batch, L tokens of a row, S slots of a host.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks import tpu_shapes
from zeroplay_jax.configs import common
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import delta, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig
from zeroplay_jax.rollout import sampler
from zeroplay_jax.types import UserError

# Rows of a batch and tokens of a row.
ROWS, TOKENS = 256, 4096
# Sampler settings, see SamplerConfig.
CHUNK, FILL_ROWS, BURST = 256, 16, 16
# Compiler effort: -1 compiles about five times faster than the default 0, with a worse schedule.
EFFORT = -1.0


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's figures of one program, per chip.

    Attributes:
      arguments: bytes of the arguments.
      temporaries: bytes of temporary buffers.
      peak: bytes of arguments, temporaries and the outputs that do not reuse an argument's buffer.
      text: the program in HLO; '' without it.
    """

    arguments: int
    temporaries: int
    peak: int
    text: str = dataclasses.field(default='', repr=False)


class OutOfMemory(Exception):
    """A program exceeds the memory of a chip; the message is the first line of the compiler's."""


def tpu_compiler() -> pathlib.Path | None:
    """Returns the folder that contains libtpu, or None."""
    separate_folder = pathlib.Path(sys.prefix) / 'tpu-compiler'
    if (separate_folder / 'libtpu').is_dir():
        return separate_folder
    installed = importlib.util.find_spec('libtpu')
    if installed is None:
        return None
    return pathlib.Path(str(installed.origin)).parents[1]


def prepare_tpu() -> None:
    """Sets up libtpu to compile without a TPU. Call it before JAX runs anything.

    Raises:
      UserError: libtpu is not installed.
    """
    folder = tpu_compiler()
    if folder is None:
        raise UserError('libtpu is not installed: make .venv/tpu-compiler')
    sys.path.append(str(folder))
    os.environ |= dict(TPU_SKIP_MDS_QUERY='1', ALLOW_MULTIPLE_LIBTPU_LOAD='1')
    jax.config.update('jax_platforms', 'cpu')


def compile_program(lowered: jax.stages.Lowered, effort: float = EFFORT) -> Compiled:
    """Returns the figures of a program, compiled for the chips of its shardings.

    Args:
      lowered: the traced program.
      effort: compiler effort, see EFFORT.

    Raises:
      OutOfMemory: the program exceeds the memory of a chip.
    """
    try:
        program = lowered.compile(compiler_options={'exec_time_optimization_effort': effort})
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise OutOfMemory(str(error).strip().splitlines()[0][:300]) from None
    return compiled_figures(program, program.as_text())


def compiled_figures(program: Any, text: str = '') -> Compiled:
    """Returns the figures of a compiled program, with those that its memory analysis does not have."""
    memory = program.memory_analysis()
    # Outputs that alias a donated argument take no memory of their own.
    new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    arguments = memory.argument_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    return Compiled(arguments, temporaries, arguments + temporaries + new_outputs, text)


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
    split = split_of(sized(name), chips_per_host)
    return sharding.make_mesh(hosts, chips_per_host // split, split, devices=devices)


def split_of(model: ModelConfig, chips: int) -> int:
    """Returns the size of 'model' on the chips of a host."""
    # As large as possible: the sampler's prefill splits heads over it, whereas over 'fsdp' every chip computes
    # attention for all rows. It must divide chips, key/value heads and vocabulary.
    return math.gcd(chips, model.kv_heads, model.vocab_size)


def host_mesh(name: str, topology: str) -> Mesh:
    """Returns the mesh of one host's chips, on which its sampler runs."""
    return mesh_of(name, tpu_shapes.host_of(topology))


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
    """Returns the shapes of the weights that a sampler reads: whole on every data shard of its host's mesh."""
    model = sized(name, layers, dtype='bfloat16')
    shapes = jax.eval_shape(functools.partial(transformer.published, model), parameters(model))
    return with_shardings(shapes, sharding.sampler_shardings(shapes, mesh))


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
    """Returns the traced programs 'extend' and 'decode' of a sampler; `layers` as in `sized`."""
    programs, state = slots(name, mesh, count, layers)
    params = published(name, mesh, layers)
    extend = programs['extend'].lower(params, state, np.zeros(FILL_ROWS, np.int32))
    return dict(extend=extend, decode=programs['decode'].lower(params, state))
