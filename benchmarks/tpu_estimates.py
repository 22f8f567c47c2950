"""What programs of few layers say about those of all layers: the compiler's time estimates, operations, collectives.

The TPU compiler writes `estimated_cycles` next to most instructions of a program in HLO. `Program` adds them up along
the control flow. Two kinds of instructions have none: Pallas kernels, whose calls are counted, and collectives.
Synchronous collectives are counted by their bytes; asynchronous ones run beside other instructions and are left out.

A sampler's program is compiled with few unrolled layers at the compiler's default effort and extrapolated to all, like
the operations and collectives.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import roofline, tpu_programs, tpu_shapes

# Compiler effort: 0 is XLA's default. At -1, the effort of the table's memory figures, the schedule is an order of
# magnitude worse.
EFFORT = 0.0
# Program → layers of the smallest one that is extrapolated. `extend` computes only keys and values in its last layer:
# its first complete layer is that of two.
FEWEST_LAYERS = dict(update=1, extend=2, decode=1)
# Slots of a host in the programs whose operations are counted.
SLOTS = 64
# The first line of a computation, and the first line of the program's entry computation.
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{$')
# Name, result types and kind of an instruction.
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BODY = re.compile(r'body=%?([\w.\-]+)')
_CONDITION = re.compile(r'condition=%?([\w.\-]+)')
_CONSTANT = re.compile(r'= s32\[\]\S* constant\((\d+)\)')
_CALLED = re.compile(r'(?:to_apply|true_computation|false_computation)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_OPERAND = re.compile(r'%([\w.\-]+)')
_KERNEL = 'custom_call_target="tpu_custom_call"'
_COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    types: str
    kind: str
    line: str
    operands: tuple[str, ...]


@dataclasses.dataclass
class Cycles:
    """Estimated cycles of a part of a program on one chip.

    Attributes:
      places: cycles of instructions that read or write an array with the dimension of the cache.
      rest: cycles of all other instructions.
      kernels: calls of Pallas kernels, which have no estimate.
      moved: bytes of synchronous collectives, which have no estimate.
    """

    places: float = 0.0
    rest: float = 0.0
    kernels: float = 0.0
    moved: float = 0.0

    @property
    def total(self) -> float:
        """Cycles of all instructions with an estimate."""
        return self.places + self.rest

    def add(self, other: Cycles, times: float = 1.0) -> None:
        """Adds `times` × the cycles of another part."""
        self.places += times * other.places
        self.rest += times * other.rest
        self.kernels += times * other.kernels
        self.moved += times * other.moved


class Program:
    """A program in HLO, cut into computations.

    Args:
      text: from `compiled.as_text()`.
      dimension: size of an axis by which arrays of the cache are recognised; 0 if there is no cache.
    """

    def __init__(self, text: str, dimension: int = 0):
        self._dimension = re.compile(rf'[\[,]{dimension}[\],]') if dimension else None
        self._computations: dict[str, list[_Instruction]] = {}
        self._entry = ''
        self._step: Cycles | None = None
        current: list[_Instruction] | None = None
        for line in text.splitlines():
            start = None if line.startswith(' ') else _COMPUTATION.match(line)
            if start:
                current = self._computations.setdefault(start[2], [])
                if start[1]:
                    self._entry = start[2]
            elif line.rstrip() == '}':
                current = None
            elif current is not None:
                instruction = _INSTRUCTION.match(line)
                if instruction:
                    name, types, kind, arguments = instruction.groups()
                    operands = tuple(_OPERAND.findall(arguments.partition('), ')[0]))
                    current.append(_Instruction(name, types, kind, line, operands))

    def estimate(self) -> tuple[Cycles, Cycles]:
        """Returns the cycles outside of the source's open loop, and those of one of its iterations.

        The open loop is the one whose trip count depends on data: a decode call ends early if no row can continue. A
        program without such a loop has zero cycles there.
        """
        self._step = None
        outside = self._cycles(self._entry)
        return outside, self._step or Cycles()

    def _cycles(self, computation: str) -> Cycles:
        """Returns the cycles of a computation, loops and branches included."""
        instructions = self._computations[computation]
        types = {instruction.name: instruction.types for instruction in instructions}
        total = Cycles()
        for instruction in instructions:
            if instruction.kind == 'while':
                self._add_loop(total, instruction.line)
            elif instruction.kind in ('conditional', 'call'):
                self._add_branches(total, instruction.line)
            else:
                total.add(self._own_cycles(instruction, types))
        return total

    def _add_loop(self, total: Cycles, line: str) -> None:
        """Adds the iterations of a loop; an open loop is stored as the step instead."""
        body = _BODY.search(line)
        assert body is not None, line[:200]
        cycles = self._cycles(body[1])
        trips = self._trips(line)
        if trips:
            total.add(cycles, trips)
            return
        assert self._step is None, 'two loops without a trip count'
        self._step = cycles

    def _trips(self, line: str) -> int:
        """Returns the trip count of a loop that counts from 0 to a constant, otherwise 0."""
        known = _TRIPS.search(line)
        if known:
            return int(known[1])
        condition = _CONDITION.search(line)
        assert condition is not None, line[:200]
        instructions = self._computations[condition[1]]
        root = instructions[-1]
        if root.kind != 'compare' or 'direction=LT' not in root.line:
            return 0
        for instruction in instructions:
            constant = _CONSTANT.search(instruction.line)
            if constant and instruction.name in root.operands:
                return int(constant[1])
        return 0

    def _add_branches(self, total: Cycles, line: str) -> None:
        """Adds the longest branch, because the estimate does not know which one is taken."""
        names = _CALLED.findall(line)
        branches = _BRANCHES.search(line)
        if branches:
            names += [name.strip().lstrip('%') for name in branches[1].split(',')]
        longest = Cycles()
        for name in names:
            cycles = self._cycles(name)
            if cycles.total >= longest.total:
                longest = cycles
        total.add(longest)

    def _own_cycles(self, instruction: _Instruction, types: dict[str, str]) -> Cycles:
        """Returns the cycles of one instruction without called computations; a fusion has its own estimate."""
        if _KERNEL in instruction.line:
            return Cycles(kernels=1)
        if instruction.kind in _COLLECTIVES:
            return Cycles(moved=sum(roofline.array_bytes(instruction.types)))
        estimated = _CYCLES.search(instruction.line)
        if not estimated:
            return Cycles()
        cycles = int(estimated[1])
        shapes = [instruction.types, *(types.get(name, '') for name in instruction.operands)]
        if self._dimension and any(self._dimension.search(shape) for shape in shapes):
            return Cycles(places=cycles)
        return Cycles(rest=cycles)


# ---- estimates of a sampler's programs -----------------------------------------------------------------------------


def row_seconds(
    name: str, topology: str, row: dict[str, Any], estimates: dict[str, Any]
) -> float | None:
    """Returns the estimated seconds of a row of the compile table, None if there is no estimate, as of updates.

    As in the column of the least time: of a call of 'extend', of a step of 'decode' with its share of the write at the
    end of the call.
    """
    if row['program'] == 'update':
        return None
    stored = estimates.get(key(name, topology, row['slots']))
    if not stored:
        return None
    parts = stored[row['program']]
    once = parts.get('burst', 0.0) / tpu_programs.BURST
    return parts['places'] + parts['rest'] + once


def add_missing(estimates: dict[str, Any], name: str, topology: str, slots: int) -> None:
    """Compiles the programs of the estimate of a model's sampler on a slice, and adds it, unless it is there."""
    name_of_estimate = key(name, topology, slots)
    if name_of_estimate not in estimates:
        estimates[name_of_estimate] = sampler(name, topology, slots)


def key(name: str, topology: str, slots: int) -> str:
    """Returns the name under which the sampler's estimates are stored. Slices with the same hosts share them."""
    return f'{name} {tpu_shapes.TOPOLOGIES[topology].host} {slots} slots'


def extrapolated(pair: list[dict[str, float]], more_layers: int) -> dict[str, float]:
    """Returns the figures of a program with `more_layers` more layers than the first of a pair.

    Args:
      pair: figures of two programs that differ by one layer; one that is missing is 0.
      more_layers: further layers.
    """
    first, second = pair
    whole = {}
    for name in first | second:
        start = first.get(name, 0)
        whole[name] = start + (second.get(name, 0) - start) * more_layers
    return whole


def scaled(pair: Sequence[Cycles], more_layers: int) -> Cycles:
    """Returns the cycles with `more_layers` more layers than the first of a pair of programs, which differ by one."""
    return Cycles(**extrapolated([vars(cycles) for cycles in pair], more_layers))


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
    layers = tpu_programs.sized(name).layers
    outside, steps = zip(*(_compiled(name, topology, slots, 'decode', few) for few in (1, 2)))
    burst = scaled(outside, layers - 1)
    step = scaled(steps, layers - 1)
    head = scaled(steps, -1)
    calls = [_compiled(name, topology, slots, 'extend', few)[0] for few in (2, 3)]
    extend = scaled(calls, layers - 2)
    return dict(
        decode=dict(
            places=chip.seconds(step.places),
            rest=chip.seconds(step.rest, step.moved),
            head=chip.seconds(max(head.rest, 0.0), max(head.moved, 0.0)),
            burst=chip.seconds(burst.total, burst.moved),
        ),
        extend=dict(
            places=chip.seconds(extend.places),
            rest=chip.seconds(extend.rest, extend.moved),
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


# ---- operations and collectives --------------------------------------------------------------------------------------


def costs(name: str) -> dict[str, dict]:
    """Returns the operations and the collectives of one chip, per program and call.

    They are measured on unrolled programs of few layers with dense attention and no inner loop, because
    `cost_analysis` counts the body of a loop once, and extrapolated to all layers. The slice is v5p, whose memory holds
    the dense scores. A call is a micro-batch of one row per data shard, an `extend` of FILL_ROWS × CHUNK tokens, or a
    step of `decode`.

    Args:
      name: the model, a key of `tpu_shapes.MODELS`.

    Returns:
      'update', 'extend' or 'decode' → {'flops': operations of the compiled program, 'least_flops': operations that its
      result needs (`roofline.forward`), 'collectives': kind → bytes}.
    """
    topology = 'v5p:2x2x4'
    mesh = tpu_programs.mesh_of(name, topology)
    host = tpu_programs.host_mesh(name, topology)
    model = tpu_programs.sized(name)
    length = tpu_programs.TOKENS
    extend_tokens = tpu_programs.FILL_ROWS * tpu_programs.CHUNK
    update_forward = roofline.forward(model, length, length)
    least = dict(
        update=roofline.UPDATE_PASSES * update_forward / mesh.shape['model'],
        extend=roofline.forward(model, extend_tokens, length, head=False) / host.size,
        decode=roofline.forward(model, SLOTS, length) / host.size,
    )
    result = {}
    for program, least_flops in least.items():
        fewest = FEWEST_LAYERS[program]
        costs_of_few = []
        for layers in (fewest, fewest + 1):
            if program == 'update':
                lowered = _unrolled_update(name, mesh, layers)
            else:
                lowered = tpu_programs.lower_sampler(name, host, SLOTS, layers)[program]
            compiled = tpu_programs.compile_program(lowered, plain=True)
            tpu_programs.log(
                name, program, f'{layers} layers unrolled: {compiled.flops:.3e} operations'
            )
            costs_of_few.append({'flops': compiled.flops} | roofline.collectives(compiled.text))
        whole = extrapolated(costs_of_few, model.layers - fewest)
        flops = whole.pop('flops')
        collectives = {kind: int(whole[kind]) for kind in sorted(whole)}
        result[program] = dict(flops=flops, collectives=collectives, least_flops=least_flops)
    return result


def _unrolled_update(name: str, mesh, layers: int) -> jax.stages.Lowered:
    """Returns the traced program `accumulate` with one row per data shard."""
    learner = tpu_programs.learner(
        name,
        mesh,
        mesh.shape['replica'] * mesh.shape['fsdp'],
        layers=layers,
        attention='dense',
        scan=False,
        # One chunk of logits is as long as a chip's row, so that the head has no loop.
        logit_chunk=tpu_programs.TOKENS,
    )
    return learner.lower('solver')['accumulate']
