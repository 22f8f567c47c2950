"""A run with adapters on a machine: compiles its programs, chooses the slots and adds up the memory of a chip.

Memory counts every array that is on a chip while a program runs, except those that `settle` moves to the host.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable

import jax

from benchmarks import tpu_programs, tpu_shapes
from benchmarks.adapter_work import Row, Shapes, Work, adapter_mesh, work_of
from benchmarks.tpu_cases import GIB, settle
from benchmarks.tpu_programs import Compiled, OutOfMemory, bytes_per_chip
from zeroplay_jax.runtime.disk import write_text

RESULTS = pathlib.Path(__file__).parent / 'results' / 'adapters_aot.json'
# Slots of a host in the one pool of all roles, in the order in which they are tried.
SLOTS = (512, 384, 320, 256, 192, 160, 128, 96, 80, 64, 48, 32, 24, 16, 8, 4)
# Reserved for temporaries when the first number of slots is chosen.
HEADROOM = 0.6 * GIB
# Arrays that are moved off the chip when memory is short, in this order. Slots are empty during an update and freed.
OFFLOAD = {
    'rollout': ('moments', 'teacher', 'masters'),
    'update': ('slots', 'other masters and moments', 'teacher'),
}
# Compiled sampler programs of this process: slices with the same hosts share them.
_COMPILED: dict[tuple, Compiled] = {}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices without the devices.

    Attributes:
      name: 'v5e:4x4', 'h100'.
      host: name of a host, whose sampler's programs are compiled once.
      memory: bytes of a chip that programs may use.
      devices: all of them, sorted by host.
      host_devices: those of one host as a machine of its own, on which its sampler runs.
      attention: of packed rows, 'splash' or 'blocked'.
      compile: compiles a traced program; raises OutOfMemory.
    """

    name: str
    host: str
    memory: float
    devices: list
    host_devices: list
    attention: str
    compile: Callable[[jax.stages.Lowered], Compiled]


def tpu_machine(topology: str, effort: float) -> Machine:
    """Returns a slice; `effort` is the compiler's, see `tpu_programs.EFFORT`."""
    devices, _ = tpu_programs.slice_devices(topology)
    description = tpu_shapes.ADAPTER_TOPOLOGIES[topology]
    host_devices, _ = tpu_programs.slice_devices(description.host)
    return Machine(
        name=topology,
        host=description.host,
        memory=description.chip.memory,
        devices=devices,
        host_devices=host_devices,
        attention='splash',
        compile=functools.partial(tpu_programs.compile_program, effort=effort),
    )


class AdapterCase:
    """A work on a machine.

    Args:
      work: the run.
      machine: where.
    """

    def __init__(self, work: Work, machine: Machine):
        self.work = work
        self.machine = machine
        model = tpu_programs.sized(work.model)
        per_host = len(machine.host_devices)
        self.mesh = adapter_mesh(model, machine.devices, per_host)
        sampler_mesh = adapter_mesh(model, machine.host_devices, per_host)
        self.shapes = Shapes(work, self.mesh, sampler_mesh, machine.attention)
        # One row of a micro-batch for every data shard.
        self.rows = self.mesh.shape['replica'] * self.mesh.shape['fsdp']
        self.learners = self.shapes.learners(self.rows)

    def resident(self, weights: str = '') -> dict[str, int]:
        """Returns the bytes per chip of the arrays of a run but the slots, by name.

        Args:
          weights: whose learner is updated; the state of the others has a name of its own. '': in rollouts.
        """
        single, stacked = self.shapes.sampler_adapters()
        base = bytes_per_chip(self.shapes.base().params)
        views = self.work.places * bytes_per_chip(single) + bytes_per_chip(stacked)
        sizes = {'base': base, 'adapters of the sampler': views}
        for name, learner in self.learners.items():
            for part, stored_as in (('params', 'masters'), ('opt', 'moments')):
                key = stored_as if name == weights or not weights else 'other masters and moments'
                size = bytes_per_chip(learner.state[part])
                sizes[key] = sizes.get(key, 0) + size
            if 'teacher' in learner.state:
                sizes['teacher'] = bytes_per_chip(learner.state['teacher'])
        return sizes

    def slot_bytes(self, slots: int) -> int:
        """Returns the bytes per chip of the pool of rollouts."""
        _, state = self.shapes.slots(slots)
        return bytes_per_chip(state)

    def rollout(self) -> list[Row]:
        """Returns the rows of 'extend' and 'decode', with the most slots that fit."""
        sizes = self.resident()
        free = self.machine.memory - sum(sizes.values())
        # The slots that are possible with everything on the chip, and failing that with all that can leave it.
        headroom = HEADROOM
        rows: list[Row] = []
        possible_slots = self._possible_slots()
        for slots in possible_slots:
            slot_bytes = self.slot_bytes(slots)
            if slot_bytes + headroom > free and slots != possible_slots[-1]:
                continue
            rows = self._sampler_rows(slots, slot_bytes, sizes)
            if all(row['fits'] and not row['off_chip'] for row in rows):
                break
            # The temporaries of this number of slots are no less than those of a smaller number by more than in
            # proportion, so the next number that is tried leaves room for their share.
            temporaries = max(row.get('temporaries', 0) for row in rows)
            headroom = max(headroom, temporaries / 2)
        return rows

    def _possible_slots(self) -> list[int]:
        shards = self.shapes.sampler_mesh.shape['replica']
        return [slots for slots in SLOTS if slots % shards == 0]

    def _sampler_rows(self, slots: int, slot_bytes: int, sizes: dict[str, int]) -> list[Row]:
        # The base and the adapters side by side are arguments of the programs, like the slots.
        beside = {name: size for name, size in sizes.items() if name != 'base'}
        _, stacked = self.shapes.sampler_adapters()
        beside['adapters of the sampler'] -= bytes_per_chip(stacked)
        rows = []
        for program, lowered in self.shapes.lower_sampler(slots).items():
            identity = (self.work.name, self.work.rank, self.machine.host, slots, program)
            columns = self._compile(lowered, beside, 'rollout', identity)
            rows.append(dict(program=program, slots=slots, slot_bytes=slot_bytes, **columns))
            self._log(program, f'{slots} slots', columns)
            if not columns['fits']:
                break
        return rows

    def updates(self, slots: int) -> list[Row]:
        """Returns the rows of 'update' and, where a role distils, 'teacher'.

        Args:
          slots: of the pool, from `rollout`.
        """
        rows = []
        for program, role in self.work.programs().items():
            weights = self.work.weights[role]
            lowered = self.learners[weights].lower(role)
            sizes = self.resident(weights) | {'slots': self.slot_bytes(slots)}
            parts = {}
            for part, names in self._arguments(program).items():
                beside = {name: size for name, size in sizes.items() if name not in names}
                parts[part] = self._compile(lowered[part], beside, 'update')
                self._log(program, f'{part}, {self.rows} rows', parts[part])
            rows.append(dict(program=program, role=role, micro_rows=self.rows) | _step(parts))
        return rows

    def _arguments(self, program: str) -> dict[str, list[str]]:
        """Returns, by part of an update, the names in `resident` of its arguments, which count in its peak already."""
        accumulate = ['base']
        # Otherwise a micro-batch reads a copy, which is an argument beside the masters.
        if self.work.config.micro.weights == 'masters':
            accumulate.append('masters')
        if program == 'teacher':
            accumulate.append('teacher')
        apply = ['masters']
        # With shared weights every role has moments of its own, and only one of them is an argument. All are counted
        # then, and those of the argument twice.
        if len(self.work.weights) == len(set(self.work.weights.values())):
            apply.append('moments')
        return dict(accumulate=accumulate, apply=apply)

    def _compile(
        self, lowered, beside: dict[str, int], order: str, identity: tuple | None = None
    ) -> Row:
        """Compiles a program, once per identity in this process; returns the columns of its row."""
        started = time.perf_counter()
        columns: Row
        try:
            program = _COMPILED.get(identity) if identity else None
            if program is None:
                program = self.machine.compile(lowered)
        except OutOfMemory as error:
            columns = dict(fits=False, hbm_bytes=0, off_chip=[], error=str(error))
        else:
            if identity:
                _COMPILED[identity] = program
            columns = dict(arguments=program.arguments, temporaries=program.temporaries)
            columns |= settle(program.peak, beside, OFFLOAD[order], self.machine.memory)
            columns['off_chip'] = columns.pop('offloaded')
        columns['compile_seconds'] = round(time.perf_counter() - started, 1)
        return columns

    def _log(self, program: str, setting: str, columns: Row) -> None:
        total = columns['hbm_bytes'] / GIB
        state = 'fits' if columns['fits'] else 'does not fit'
        off_chip = ', '.join(columns['off_chip']) or 'nothing'
        tpu_programs.log(
            self.work.name,
            self.machine.name,
            program,
            f'{setting}: {total:.1f} GiB, {state}, off the chip: {off_chip}',
            f'({columns["compile_seconds"]} s)',
        )

    def rows_of_all(self) -> list[Row]:
        """Returns all rows of the case."""
        rollout = self.rollout()
        rows = rollout + self.updates(rollout[-1]['slots'])
        base = bytes_per_chip(self.shapes.base().params)
        sampler = self.work.config.sampler
        case = dict(
            work=self.work.name,
            model=self.work.model,
            rank=self.work.rank,
            machine=self.machine.name,
            mesh=dict(self.mesh.shape),
            context=sampler.context,
            row_tokens=self.work.config.micro.tokens,
            base_bytes=base,
        )
        return [case | row for row in rows]


def _step(parts: dict[str, Row]) -> Row:
    """Returns the columns of an update from those of its two programs."""
    errors = [part['error'] for part in parts.values() if 'error' in part]
    columns: Row = dict(error=errors[0]) if errors else {}
    columns['fits'] = all(part['fits'] for part in parts.values())
    columns['hbm_bytes'] = 0 if errors else max(part['hbm_bytes'] for part in parts.values())
    columns['off_chip'] = max((part['off_chip'] for part in parts.values()), key=len)
    columns['arguments'] = max(part.get('arguments', 0) for part in parts.values())
    columns['temporaries'] = max(part.get('temporaries', 0) for part in parts.values())
    columns['compile_seconds'] = sum(part['compile_seconds'] for part in parts.values())
    return columns


def key(row: Row) -> tuple:
    """Returns what identifies the case of a row."""
    return row['work'], row['machine'], row['rank']


def stored_rows(path: pathlib.Path = RESULTS) -> list[Row]:
    """Returns the stored rows."""
    if not path.exists():
        return []
    return json.loads(path.read_text())['rows']


def store(path: pathlib.Path, rows: list[Row]) -> None:
    """Adds the rows of a case to the stored ones, in place of earlier ones of the same case."""
    replaced = {key(row) for row in rows}
    others = [row for row in stored_rows(path) if key(row) not in replaced]
    path.parent.mkdir(parents=True, exist_ok=True)
    # One row per line.
    lines = ',\n'.join(json.dumps(row) for row in others + rows)
    write_text(path, f'{{"jax": "{jax.__version__}", "rows": [\n{lines}\n]}}\n')


def measure(
    cases: list[tuple[str, Machine]],
    rank: int,
    path: pathlib.Path,
    again: bool,
    scan: bool = True,
) -> list[Row]:
    """Returns the rows of the cases, from the stored results or compiled now.

    Args:
      cases: names of `work_of`, with machines.
      rank: of the adapters.
      path: file of the stored results, which is updated after every case.
      again: whether stored results are compiled again.
      scan: `policy.scan`.
    """
    rows = []
    for name, machine in cases:
        work = work_of(name, rank, scan)
        identity = (work.name, machine.name, rank)
        rows_of_case = [row for row in stored_rows(path) if key(row) == identity]
        if again or not rows_of_case:
            rows_of_case = AdapterCase(work, machine).rows_of_all()
            store(path, rows_of_case)
        rows += rows_of_case
    return rows
