"""Builds and compiles the programs of learner and sampler for TPU slices, and reads off their memory per chip.

No array is materialised: parameters, optimiser state and slots are jax.ShapeDtypeStruct with the sharding of a run.
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
from collections.abc import Callable

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks.machines import models
from zeroplay_jax.extras.plan.machines import CHIPS
from zeroplay_jax.policy import delta, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig
from zeroplay_jax.rollout import sampler
from zeroplay_jax.types import UserError

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


def compile_program(lowered: jax.stages.Lowered) -> Compiled:
    """Returns the figures of a traced program, compiled for the chips of its shardings.

    Raises:
      OutOfMemory: the program exceeds the memory of a chip.
    """
    try:
        program = lowered.compile(compiler_options={'exec_time_optimization_effort': EFFORT})
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise OutOfMemory(str(error).strip().splitlines()[0][:300]) from None
    memory = program.memory_analysis()
    # Outputs that alias a donated argument take no memory of their own.
    new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    arguments = memory.argument_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    peak = arguments + temporaries + new_outputs
    return Compiled(arguments, temporaries, peak, program.as_text())


def log(*words) -> None:
    """Prints progress to stderr."""
    print(time.strftime('%H:%M:%S'), *words, file=sys.stderr, flush=True)


def slice_devices(topology: str) -> list:
    """Returns the chips of a slice, sorted by host."""
    devices = topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
    return sorted(devices, key=lambda device: (device.process_index, device.id))


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices without the devices.

    Attributes:
      name: of a slice, such as 'v5e:4x4'.
      memory: bytes of a chip that programs may use.
      devices: all of them, sorted by host.
      host_devices: those of one host as a machine of its own, on which its sampler runs.
      attention: of packed rows.
      compile: compiles a traced program; raises OutOfMemory.
    """

    name: str
    memory: float
    devices: list
    host_devices: list
    attention: str = 'splash'
    compile: Callable[[jax.stages.Lowered], Compiled] = compile_program


def machine_of(topology: str) -> Machine:
    """Returns a slice; `prepare_tpu` comes first."""
    kind = topology.partition(':')[0]
    host = slice_devices(models.HOSTS[kind])
    return Machine(topology, CHIPS[kind].memory, slice_devices(topology), host)


def split_of(model: ModelConfig, chips: int) -> int:
    """Returns the size of 'model' on the chips of a host."""
    # As large as possible: the sampler's prefill splits heads over it, whereas over 'fsdp' every chip computes
    # attention for all rows. It must divide chips, key/value heads and vocabulary.
    return math.gcd(chips, model.kv_heads, model.vocab_size)


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


def sized(name: str, layers: int = 0, **overrides) -> ModelConfig:
    """Returns the ModelConfig of a model, truncated to its first `layers` unless that is 0."""
    model = models.model_config(name)
    layers = layers or model.layers
    return dataclasses.replace(model, layers=layers, windows=model.windows[:layers], **overrides)


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
