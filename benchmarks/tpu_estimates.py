"""The compiler's time estimates of the programs of a run, from small programs scaled to all layers.

A sampler's program is compiled with few unrolled layers at the compiler's default effort and extrapolated, like the
operations in `tpu_costs`. An update's program has its layers in a loop with a known trip count and is read as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks import roofline, tpu_programs, tpu_shapes
from benchmarks.hlo_estimate import Cycles, Program

# Compiler effort: 0 is XLA's default. At -1, the effort of the table's memory figures, the schedule is an order of
# magnitude worse: an update of Qwen2.5-7B on v5p:2x2x4 is estimated at 105 s.
EFFORT = 0.0
# Cycles per second, by generation. The vendor does not publish them; they follow from the peak operations and the size
# of the matrix units (128 × 128, of v6e 256 × 256).
CLOCK = {'v5e': 1.5e9, 'v5p': 1.75e9, 'v6e': 1.75e9}


def row_seconds(
    name: str, topology: str, row: dict[str, Any], estimates: dict[str, Any]
) -> float | None:
    """Returns the estimated seconds of a row of the compile table, None if there is no estimate.

    As in the column of the least time: of a call of 'extend', of a step of 'decode' with its share of the write at the
    end of the call, of all micro-batches of 'update'.
    """
    if row['program'] == 'update':
        stored = estimates.get(update_key(name, topology, row['micro_rows']))
        return stored and stored['seconds'] * row['micro_batches']
    stored = estimates.get(key(name, topology, row['slots']))
    if not stored:
        return None
    parts = stored[row['program']]
    once = parts.get('burst', 0.0) / tpu_programs.BURST
    return parts['places'] + parts['rest'] + once


def add_missing(
    estimates: dict[str, Any], name: str, topology: str, rows: list[dict[str, Any]]
) -> None:
    """Compiles the programs of the estimates that are missing for the rows of a model on a slice, and adds them."""
    for row in rows:
        if row['program'] == 'update':
            name_of_estimate = update_key(name, topology, row['micro_rows'])
            if name_of_estimate not in estimates:
                estimates[name_of_estimate] = _compiled_update(name, topology, row['micro_rows'])
        else:
            name_of_estimate = key(name, topology, row['slots'])
            if name_of_estimate not in estimates:
                estimates[name_of_estimate] = sampler(name, topology, row['slots'])


def update_key(name: str, topology: str, rows: int) -> str:
    """Returns the name under which the estimate of an update is stored."""
    return f'{name} {topology} {rows} rows'


def key(name: str, topology: str, slots: int) -> str:
    """Returns the name under which the sampler's estimates are stored. Slices with the same hosts share them."""
    return f'{name} {tpu_shapes.TOPOLOGIES[topology].host} {slots} slots'


def scaled(pair: list[Cycles], more_layers: int) -> Cycles:
    """Returns the cycles with `more_layers` more layers than the first of a pair of programs, which differ by one."""
    first, second = pair
    fields = {}
    for field in dataclasses.fields(Cycles):
        start = getattr(first, field.name)
        per_layer = getattr(second, field.name) - start
        fields[field.name] = start + per_layer * more_layers
    return Cycles(**fields)


def sampler(name: str, topology: str, slots: int) -> dict[str, dict[str, float]]:
    """Returns estimated seconds of the sampler's programs on one host.

    Args:
      name: the model.
      topology: the slice.
      slots: S.

    Returns:
      'decode': {'places': attention over the cache, per step; 'rest': all else, per step; 'head': the part of 'rest'
      that does not grow with the layers; 'burst': once per call, mostly the writing of new keys and values}.
      'extend': {'places', 'rest'} per call.
    """
    chip = tpu_shapes.TOPOLOGIES[topology].chip
    clock = CLOCK[topology.partition(':')[0]]
    layers = tpu_programs.sized(name).layers

    def seconds(cycles: float, moved: float) -> float:
        return cycles / clock + moved / chip.links

    outside, steps = zip(*(_compiled(name, topology, slots, 'decode', few) for few in (1, 2)))
    burst = scaled(list(outside), layers - 1)
    step = scaled(list(steps), layers - 1)
    head = scaled(list(steps), -1)
    # `extend` needs only the keys and values of the last layer, so the first complete layer is that of two.
    calls = [_compiled(name, topology, slots, 'extend', few)[0] for few in (2, 3)]
    extend = scaled(calls, layers - 2)
    return dict(
        decode=dict(
            places=seconds(step.places, 0.0),
            rest=seconds(step.rest, step.moved),
            head=seconds(max(head.rest, 0.0), max(head.moved, 0.0)),
            burst=seconds(burst.total, burst.moved),
        ),
        extend=dict(
            places=seconds(extend.places, 0.0),
            rest=seconds(extend.rest, extend.moved),
        ),
    )


def _compiled(
    name: str, topology: str, slots: int, program: str, layers: int
) -> tuple[Cycles, Cycles]:
    """Returns the estimates of a sampler's program with few layers, see `Program.estimate`."""
    host = tpu_programs.host_mesh(name, topology)
    programs, state = tpu_programs.slots(name, host, slots, layers)
    params = tpu_programs.published(name, host, layers)
    arguments: tuple = (params, state)
    if program == 'extend':
        arguments = (params, state, np.zeros(tpu_programs.FILL_ROWS, np.int32))
    lowered = programs[program].lower(*arguments)
    compiled = tpu_programs.compile_program(lowered, EFFORT)
    positions = state.tokens.shape[1]
    tpu_programs.log(name, topology, program, f'{layers} layers, {slots} slots: estimated')
    return Program(compiled.text, positions).estimate()


def _compiled_update(name: str, topology: str, rows: int) -> dict[str, float]:
    """Compiles a micro-batch; returns its estimate."""
    mesh = tpu_programs.mesh_of(name, topology)
    lowered = tpu_programs.learner(name, mesh, rows).lower('solver')['accumulate']
    compiled = tpu_programs.compile_program(lowered, EFFORT)
    tpu_programs.log(name, topology, f'accumulate of {rows} rows: estimated')
    return update(name, topology, compiled.text, rows)


def update(name: str, topology: str, text: str, rows: int) -> dict[str, float]:
    """Returns the estimated seconds of a micro-batch.

    Args:
      name: the model.
      topology: the slice.
      text: the compiled program 'accumulate' in HLO.
      rows: rows of the micro-batch.

    Returns:
      {'seconds', 'kernels': their share in it, the kernels of attention at the chip's peak operations; 'links': the
      share of synchronous collectives, at the links' peak rate}.
    """
    chip = tpu_shapes.TOPOLOGIES[topology].chip
    clock = CLOCK[topology.partition(':')[0]]
    mesh = tpu_programs.mesh_of(name, topology)
    outside, step = Program(text).estimate()
    assert not step.total, 'an update has no open loop'
    model = tpu_programs.sized(name)
    tokens = rows * tpu_programs.TOKENS
    mean_keys = roofline.attended_keys(model, tpu_programs.TOKENS)
    attention = 4 * model.heads * model.head_dim * mean_keys * tokens * roofline.UPDATE_PASSES
    kernels = attention / mesh.size / chip.flops
    links = outside.moved / chip.links
    return dict(seconds=outside.total / clock + kernels + links, kernels=kernels, links=links)
