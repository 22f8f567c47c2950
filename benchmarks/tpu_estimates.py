"""The compiler's time estimate of a program for a TPU.

The TPU compiler writes `estimated_cycles` next to most instructions of a program in HLO. `Program` adds them up along
the control flow. Two kinds of instructions have none: Pallas kernels, which are left out, and collectives. Synchronous
collectives are counted by their bytes; asynchronous ones run beside other instructions and are left out.
"""

from __future__ import annotations

import dataclasses
import math
import re

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
# One array type, such as 'bf16[16,4096]': the bits of an element, and the dimensions. 'pred' has a byte per element.
_ARRAY = re.compile(r'[a-z]+(\d*)\[([\d,]*)\]')
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
    """Estimate of a part of a program on one chip.

    Attributes:
      cycles: of the instructions with an estimate.
      moved: bytes of synchronous collectives, which have no estimate.
    """

    cycles: float = 0.0
    moved: float = 0.0

    def add(self, other: Cycles, times: float = 1.0) -> None:
        """Adds `times` × the cycles of another part."""
        self.cycles += times * other.cycles
        self.moved += times * other.moved


class Program:
    """A program in HLO, cut into computations.

    Args:
      text: from `compiled.as_text()`.
    """

    def __init__(self, text: str):
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
        total = Cycles()
        for instruction in self._computations[computation]:
            if instruction.kind == 'while':
                self._add_loop(total, instruction.line)
            elif instruction.kind in ('conditional', 'call'):
                self._add_branches(total, instruction.line)
            else:
                total.add(_own_cycles(instruction))
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
            if cycles.cycles >= longest.cycles:
                longest = cycles
        total.add(longest)


def _own_cycles(instruction: _Instruction) -> Cycles:
    """Returns the cycles of one instruction without called computations; a fusion has its own estimate."""
    if instruction.kind in _COLLECTIVES:
        return Cycles(moved=array_bytes(instruction.types))
    estimated = _CYCLES.search(instruction.line)
    return Cycles(cycles=int(estimated[1])) if estimated else Cycles()


def array_bytes(types: str) -> int:
    """Returns the bytes of the arrays in the result types of an HLO instruction."""
    total = 0
    for bits, dimensions in _ARRAY.findall(types):
        # A scalar has no dimensions.
        shape = [int(size) for size in dimensions.split(',') if size]
        total += int(bits or 8) // 8 * math.prod(shape)
    return total
