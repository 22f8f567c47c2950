"""Reads the compiler's own time estimate from a TPU program in HLO.

The TPU compiler writes `estimated_cycles` next to most instructions. This module adds them up along the control flow.
Two kinds of instructions have none: Pallas kernels, whose calls are counted, and collectives. Synchronous collectives
are counted by their bytes; asynchronous ones run beside other instructions and are left out.
"""

from __future__ import annotations

import dataclasses
import re

from benchmarks import roofline

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
