"""A model on a TPU slice: compiles its programs and chooses slots, rows and what leaves the chip."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from benchmarks import tpu_programs, tpu_shapes

GIB = 2**30
# Rows per data shard of a micro-batch, in the order in which they are tried.
ROWS = {'v5e': (1,), 'v6e': (2, 1), 'v5p': (2, 1)}
# Slots of a host, in the order in which they are tried. FEW_SLOTS are tried only if 64 do not fit.
ENOUGH_SLOTS = (256, 128, 64)
FEW_SLOTS = (32, 16, 8, 4)
OTHER_ROLE = "other role's masters and moments"
OTHER_VIEW = "other role's view"
OTHER_SLOTS = "other role's slots"
# Arrays that are moved off the chip when memory is short, in this order. Slots are empty during an update and freed.
OFFLOAD = {
    'rollout': (OTHER_ROLE, 'reference', 'teacher', 'moments', 'masters'),
    'update': (OTHER_ROLE, 'reference', 'teacher', 'slots', OTHER_VIEW, 'view', 'moments'),
}
# Reserved for temporaries when slots are chosen before anything is compiled.
HEADROOM = 1.25 * GIB
# Compiled programs of this process by model and shape: slices with the same host share their samplers' programs.
_COMPILED: dict[tuple, tuple] = {}


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


class Case:
    """One model on one slice."""

    def __init__(self, name: str, topology: str, effort: float):
        self.name = name
        self.topology = topology
        self.effort = effort
        self.slice = tpu_shapes.TOPOLOGIES[topology]
        self.mesh = tpu_programs.mesh_of(name, topology)
        self.host = tpu_programs.host_mesh(name, topology)
        self.shards = self.mesh.shape['replica'] * self.mesh.shape['fsdp']
        state = tpu_programs.learner(name, self.mesh, self.shards).state
        masters = tpu_programs.bytes_per_chip(state['params'])
        moments = tpu_programs.bytes_per_chip(state['opt'])
        view = tpu_programs.bytes_per_chip(tpu_programs.published(name, self.host))
        # There are two trained roles with separate weights, a reference and a teacher.
        self.state = {OTHER_ROLE: masters + moments, 'reference': masters, 'teacher': masters}
        self.own_state = {'moments': moments, 'masters': masters}
        self.views = {'view': view, OTHER_VIEW: view}
        self.slots = 0

    def slot_bytes(self, slots: int) -> int:
        """Returns the bytes per chip of one role's slots."""
        _, shapes = tpu_programs.slots(self.name, self.host, slots)
        return tpu_programs.bytes_per_chip(shapes)

    def slot_counts(self) -> list[int]:
        """Returns the slot counts to try: the largest that fit, with the least offloading that makes 64 fit."""
        memory = self.slice.chip.memory - HEADROOM
        views = sum(self.views.values())
        need = {}
        for slots in (*ENOUGH_SLOTS, *FEW_SLOTS):
            need[slots] = 2 * self.slot_bytes(slots) + views
        state = self.state | self.own_state
        for count in range(len(OFFLOAD['rollout']) + 1):
            offloaded = OFFLOAD['rollout'][:count]
            on_chip = sum(size for name, size in state.items() if name not in offloaded)
            fitting = [slots for slots in ENOUGH_SLOTS if need[slots] + on_chip <= memory]
            if fitting:
                return [*fitting, *FEW_SLOTS]
        few_fitting = [slots for slots in FEW_SLOTS if need[slots] <= memory]
        return few_fitting or [FEW_SLOTS[-1]]

    def compile(self, key: tuple, lowered) -> tuple[tpu_programs.Compiled | None, dict]:
        """Compiles a program once per `key`.

        Returns:
          The program, None where the compiler ran out of memory, and the columns of its row.
        """
        key = (self.name, *key)
        if key in _COMPILED:
            return _COMPILED[key]
        started = time.perf_counter()
        program = None
        columns: dict[str, Any]
        try:
            program = tpu_programs.compile_program(lowered, self.effort)
        except tpu_programs.OutOfMemory as error:
            columns = dict(fits=False, hbm_bytes=0, offloaded=[], error=str(error))
        else:
            columns = dict(arguments=program.arguments, temporaries=program.temporaries)
            # The text of a program is large and not needed any more.
            program = dataclasses.replace(program, text='')
        columns['compile_seconds'] = round(time.perf_counter() - started, 1)
        _COMPILED[key] = (program, columns)
        return _COMPILED[key]

    def rollout(self) -> list[dict]:
        """Returns the rows of 'extend' and 'decode', with the most slots that fit; sets `slots`."""
        memory = self.slice.chip.memory
        rows: list[dict] = []
        for slots in self.slot_counts():
            slot_bytes = self.slot_bytes(slots)
            # The program's own arguments, this role's view and slots, count in its peak.
            beside = self.state | self.own_state
            beside |= {OTHER_VIEW: self.views['view'], OTHER_SLOTS: slot_bytes}
            rows = []
            for program, lowered in tpu_programs.lower_sampler(self.name, self.host, slots).items():
                compiled, columns = self.compile((self.slice.host, slots, program), lowered)
                if compiled:
                    columns = columns | settle(compiled.peak, beside, OFFLOAD['rollout'], memory)
                rows.append(dict(program=program, slots=slots, slot_bytes=slot_bytes, **columns))
                tpu_programs.log(
                    self.name, self.topology, program, f'{slots} slots', summary(columns)
                )
                if not columns['fits']:
                    break
            self.slots = slots
            if all(row['fits'] for row in rows):
                break
        return rows

    def update(self) -> dict:
        """Returns the row of 'update', with the most rows per micro-batch that fit; needs `slots` of `rollout`."""
        memory = self.slice.chip.memory
        generation, _, _ = self.topology.partition(':')
        row: dict[str, Any] = {}
        for rows_per_shard in ROWS[generation]:
            rows = rows_per_shard * self.shards
            lowered = tpu_programs.learner(self.name, self.mesh, rows).lower('solver')
            parts = {}
            for part, beside in self.beside_update().items():
                compiled, columns = self.compile((self.topology, rows, part), lowered[part])
                if compiled:
                    columns = columns | settle(compiled.peak, beside, OFFLOAD['update'], memory)
                parts[part] = columns
                tpu_programs.log(self.name, self.topology, part, f'{rows} rows', summary(columns))
                if not columns['fits']:
                    break
            micro_batches = -(-tpu_programs.ROWS // rows)
            row = dict(program='update', micro_rows=rows, micro_batches=micro_batches, parts=parts)
            row |= self.step(parts)
            if row['fits']:
                break
        return row

    def beside_update(self) -> dict[str, dict[str, int]]:
        """Returns, per program of an update, the bytes on the chip besides its arguments, by name."""
        beside = self.state | self.views | {'slots': 2 * self.slot_bytes(self.slots)}
        # The moments are an argument of 'apply'.
        return dict(accumulate=beside | {'moments': self.own_state['moments']}, apply=beside)

    def step(self, parts: dict[str, dict]) -> dict:
        """Returns the columns of an update from those of its two programs.

        An array that is offloaded for one program is off the chip for both.
        """
        offloaded = max((part['offloaded'] for part in parts.values()), key=len)
        beside = self.beside_update()
        totals = []
        for name, part in parts.items():
            total = part['hbm_bytes']
            for other in offloaded:
                if other not in part['offloaded']:
                    total -= beside[name].get(other, 0)
            totals.append(total)
        errors = [part['error'] for part in parts.values() if 'error' in part]
        columns: dict[str, Any] = dict(error=errors[0]) if errors else {}
        columns['fits'] = all(part['fits'] for part in parts.values())
        columns['hbm_bytes'] = 0 if errors else max(totals)
        columns['offloaded'] = offloaded
        columns['arguments'] = max(part.get('arguments', 0) for part in parts.values())
        columns['temporaries'] = max(part.get('temporaries', 0) for part in parts.values())
        columns['compile_seconds'] = sum(part['compile_seconds'] for part in parts.values())
        return columns


def summary(row: dict) -> str:
    """Returns a row in a few words, for the progress messages."""
    if 'error' in row:
        return f'does not compile: {row["error"]}'
    fits = 'fits' if row['fits'] else 'does not fit'
    text = f'{row["hbm_bytes"] / GIB:.1f} GiB, {fits}'
    if row['offloaded']:
        text += f', off the chip: {", ".join(row["offloaded"])}'
    return text
