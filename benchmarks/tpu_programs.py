"""The learner's and the sampler's programs for a TPU slice, from shapes alone, and what they hold on every chip.

Nothing is materialised: parameters, optimiser state and slots are jax.ShapeDtypeStruct with the sharding that a run
gives them. Letters: B rows of a micro-batch, L tokens of a row, S slots of a host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks import tpu_shapes
from zeroplay_jax.configs import common
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import attention, sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig
from zeroplay_jax.rollout import sampler

ROWS, TOKENS = 256, 4096  # of a batch
CHUNK, FILL_ROWS, BURST = 256, 16, 16
# Effort of the compiler: -1 schedules less well and compiles about five times faster than 0, its own choice.
EFFORT = -1.0
# Without it the gathers of a layer hide in loops of partial products, whose bodies `cost_analysis` counts once.
PLAIN_PRODUCTS = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': 1 << 20}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program, per chip; sizes in bytes."""

    arguments: int
    temporaries: int
    peak: int  # arguments, temporaries and those outputs that take no argument's place
    flops: float
    text: str = dataclasses.field(repr=False)


class OutOfMemory(Exception):
    """The compiler found no room for a program; the message is the first line it gave."""


def compile_program(
    lowered: jax.stages.Lowered, effort: float = EFFORT, plain: bool = False
) -> Compiled:
    """Compiles for the chips of its shardings.

    Raises:
      OutOfMemory: RESOURCE_EXHAUSTED.
    """
    options = {'exec_time_optimization_effort': effort} | (PLAIN_PRODUCTS if plain else {})
    try:
        program = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise OutOfMemory(str(error).strip().splitlines()[0][:300]) from None
    m, cost = program.memory_analysis(), program.cost_analysis()
    spilled = m.output_size_in_bytes - m.alias_size_in_bytes
    return Compiled(
        m.argument_size_in_bytes,
        m.temp_size_in_bytes,
        m.argument_size_in_bytes + m.temp_size_in_bytes + spilled,
        cost.get('flops', 0.0),
        program.as_text(),
    )


@functools.cache
def mesh_of(name: str, topology: str) -> Mesh:
    """Mesh for a model on a slice as a run lays it: a replica per host, and its chips' heads along 'model'.

    'model' is as large as key/value heads and vocabulary divide: the sampler's prefill splits by heads, while over
    'fsdp' every chip would attend for all rows.
    """
    devices = topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
    hosts = len({d.process_index for d in devices})
    devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    chips, model = len(devices) // hosts, sized(name)
    split = max(
        m
        for m in range(1, chips + 1)
        if not any(n % m for n in (chips, model.kv_heads, model.vocab_size))
    )
    return sharding.make_mesh(hosts, chips // split, split, devices=devices)


def host_mesh(name: str, topology: str) -> Mesh:
    """The mesh of one host's chips, on which its sampler runs."""
    return mesh_of(name, tpu_shapes.TOPOLOGIES[topology].host)


def bytes_per_chip(tree) -> int:
    """Bytes that shapes with shardings take on one chip."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _placed(shapes, places):
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, places
    )


def parameters(model: ModelConfig):
    """Shapes of the float32 parameters."""
    return jax.eval_shape(functools.partial(transformer.init, model), jax.random.key(0))


def learner(name: str, mesh: Mesh, rows: int, **overrides) -> Learner:
    """The learner of a role on `mesh`, from shapes; `rows` is B, overrides are fields of ModelConfig."""
    fields: dict[str, Any] = dict(
        dtype='bfloat16', remat=True, attention='splash', scan=True, mesh=mesh
    )
    model = sized(name, **(fields | overrides))
    return Learner(
        model, mesh, {'solver': common.get_config().solver}, parameters(model), (rows, TOKENS)
    )


def sized(name: str, layers: int = 0, **overrides) -> ModelConfig:
    """ModelConfig of a model, cut to its first `layers` where that is not 0."""
    model = tpu_shapes.model_config(name)
    layers = layers or model.layers
    return dataclasses.replace(model, layers=layers, windows=model.windows[:layers], **overrides)


def published(name: str, mesh: Mesh, layers: int = 0):
    """Shapes of the weights that a sampler reads, on its host's mesh."""
    model = sized(name, layers, dtype='bfloat16')
    shapes = jax.eval_shape(functools.partial(transformer.published, model), parameters(model))
    return _placed(shapes, sharding.parameter_shardings(shapes, mesh))


def slots(name: str, mesh: Mesh, count: int, layers: int = 0):
    """(programs, shapes of the slots) of a sampler with `count` slots on its host's mesh."""
    model = sized(name, layers, dtype='bfloat16')
    config = sampler.SamplerConfig(
        count, TOKENS, CHUNK, FILL_ROWS, BURST, FILL_ROWS, CHUNK, eos=(0, 1)
    )
    programs = sampler.programs(model, config, mesh)
    state = jax.eval_shape(programs['empty'])
    places = jax.tree.map(lambda _: sharding.slots(mesh), state)
    places = dataclasses.replace(
        places, cache=jax.tree.map(lambda _: sharding.cache(mesh), state.cache)
    )
    return programs, _placed(state, places)


def lower_sampler(
    name: str, mesh: Mesh, count: int, layers: int = 0
) -> dict[str, jax.stages.Lowered]:
    """'extend' and 'decode' of a sampler, traced; cut to its first `layers`, without `extend`'s loop over rows."""
    programs, state = slots(name, mesh, count, layers)
    params = published(name, mesh, layers)
    whole = (
        mock.patch.object(attention, '_PREFILL_ROWS', FILL_ROWS)
        if layers
        else contextlib.nullcontext()
    )
    with whole:
        extend = programs['extend'].lower(params, state, np.zeros(FILL_ROWS, np.int32))
    return dict(extend=extend, decode=programs['decode'].lower(params, state))
