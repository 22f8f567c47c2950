"""The update step and the sampler's programs, compiled for TPU slices ahead of time, with libtpu and without a TPU.

    python -m benchmarks.tpu_aot                                            # five models × four slices: an hour
    python -m benchmarks.tpu_aot --model qwen2.5-3b --topology v5e:4x4

Per program: whether it fits into a chip's memory beside everything else that is there then, and with which rows, slots
and offloading; its operations against those that the mathematics asks for; its collectives; and the least time that
the chip's peaks allow. What was found is kept in benchmarks/results/tpu_aot.json and not compiled again, unless --again
is given; the last line is one JSON object. How the columns come about: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import sys
import time
from typing import Any

import jax

from benchmarks import roofline, tpu_programs, tpu_shapes
from zeroplay_jax.runtime.atomic import write_text
from zeroplay_jax.types import UserError

RESULTS = pathlib.Path(__file__).parent / 'results' / 'tpu_aot.json'
GIB = 2**30
# Rows per data shard of a micro-batch, and slots of a host, in the order in which they are tried.
ROWS = {'v5e': (1,), 'v6e': (2, 1), 'v5p': (2, 1)}
ENOUGH, FEW = (256, 128, 64), (32, 16, 8, 4)
OTHER = "other role's masters and moments"
# What leaves the chip when memory is short, first to last; slots are empty during an update and are freed.
OFFLOAD = {
    'rollout': (OTHER, 'reference', 'teacher', 'moments', 'masters'),
    'update': (OTHER, 'reference', 'teacher', 'slots', "other role's view", 'view', 'moments'),
}
HEADROOM = 1.25 * GIB  # for temporaries, when slots are chosen before anything is compiled


# Columns of a row that `complete` makes.
DERIVED = (
    'model topology mesh flops flops_ratio collectives roofline_seconds bound_by effort'.split()
)


def say(*words) -> None:
    """Progress, to stderr."""
    print(time.strftime('%H:%M:%S'), *words, file=sys.stderr, flush=True)


def settle(
    peak: int, beside: dict[str, int], order: tuple[str, ...], memory: float
) -> dict[str, Any]:
    """What must leave the chip so that `peak` bytes of a program fit beside the rest: the shortest start of `order`."""
    for count in range(len(order) + 1):
        gone = [name for name in order[:count] if beside.get(name)]
        total = peak + sum(size for name, size in beside.items() if name not in gone)
        if total <= memory:
            break
    return dict(fits=total <= memory, hbm_bytes=int(total), offloaded=gone)


# What was compiled in this process: slices of one kind of host share their samplers' programs.
_COMPILED: dict[tuple, tuple] = {}


class Case:
    """One model on one slice."""

    def __init__(self, name: str, topology: str, effort: float):
        self.name, self.topology, self.effort = name, topology, effort
        self.slice = tpu_shapes.TOPOLOGIES[topology]
        self.mesh = tpu_programs.mesh_of(name, topology)
        self.host = tpu_programs.host_mesh(name, topology)
        self.shards = self.mesh.shape['replica'] * self.mesh.shape['fsdp']
        size = tpu_programs.bytes_per_chip
        state = tpu_programs.learner(name, self.mesh, self.shards).state
        masters, moments = size(state['params']), size(state['opt'])
        view = size(tpu_programs.published(name, self.host))
        # Two players with weights of their own that are both trained, a reference and a teacher.
        self.state = {OTHER: masters + moments, 'reference': masters, 'teacher': masters}
        self.own = {'moments': moments, 'masters': masters}
        self.views = {'view': view, "other role's view": view}
        self.slots = 0

    def slot_bytes(self, slots: int) -> int:
        """Bytes per chip of one role's slots."""
        return tpu_programs.bytes_per_chip(tpu_programs.slots(self.name, self.host, slots)[1])

    def sizes(self) -> list[int]:
        """Slots to try: as many as fit, with as little offloaded as leaves room for 64."""
        memory, views = self.slice.chip.memory - HEADROOM, sum(self.views.values())
        need = {n: 2 * self.slot_bytes(n) + views for n in (*ENOUGH, *FEW)}
        for count in range(len(OFFLOAD['rollout']) + 1):
            rest = sum(
                v for k, v in (self.state | self.own).items() if k not in OFFLOAD['rollout'][:count]
            )
            fitting = [n for n in ENOUGH if need[n] + rest <= memory]
            if fitting:
                break
        return [*fitting, *FEW] if fitting else [n for n in FEW if need[n] <= memory] or [FEW[-1]]

    def compile(self, key: tuple, lowered) -> tuple[tpu_programs.Compiled | None, dict]:
        """(program, what to note of it); no program where the compiler ran out of memory. One compile per `key`."""
        key = (self.name, *key)
        if key not in _COMPILED:
            began = time.perf_counter()
            try:
                program = tpu_programs.compile_program(lowered, self.effort)
                noted: dict = dict(arguments=program.arguments, temporaries=program.temporaries)
            except tpu_programs.OutOfMemory as error:
                program, noted = None, dict(fits=False, hbm_bytes=0, offloaded=[], error=str(error))
            program = program and dataclasses.replace(program, text='')
            _COMPILED[key] = (
                program,
                noted | dict(compile_seconds=round(time.perf_counter() - began, 1)),
            )
        return _COMPILED[key]

    def rollout(self) -> list[dict]:
        """Rows of 'extend' and 'decode', with the most slots that fit."""
        rows: list[dict] = []
        for slots in self.sizes():
            own = self.slot_bytes(slots)
            beside = (
                self.state
                | self.own
                | {"other role's view": self.views['view'], "other role's slots": own}
            )
            rows = []
            for program, lowered in tpu_programs.lower_sampler(self.name, self.host, slots).items():
                compiled, noted = self.compile((self.slice.host, slots, program), lowered)
                if compiled:
                    noted = noted | settle(
                        compiled.peak, beside, OFFLOAD['rollout'], self.slice.chip.memory
                    )
                rows.append(dict(program=program, slots=slots, slot_bytes=own, **noted))
                say(self.name, self.topology, program, f'{slots} slots', summary(rows[-1]))
                if not rows[-1]['fits']:
                    break
            self.slots = slots
            if all(row['fits'] for row in rows):
                break
        return rows

    def update(self) -> dict:
        """The row of 'update', with the most rows per micro-batch that fit."""
        row: dict[str, Any] = {}
        for per_shard in ROWS[self.topology.split(':')[0]]:
            rows = per_shard * self.shards
            lowered = tpu_programs.learner(self.name, self.mesh, rows).lower('solver')
            row = dict(
                program='update',
                micro_rows=rows,
                micro_batches=-(-tpu_programs.ROWS // rows),
                parts={},
            )
            for part, others in self.beside_update().items():
                compiled, noted = self.compile((self.topology, rows, part), lowered[part])
                if compiled:
                    noted = noted | settle(
                        compiled.peak, others, OFFLOAD['update'], self.slice.chip.memory
                    )
                row['parts'][part] = noted
                say(self.name, self.topology, part, f'{rows} rows', summary(noted))
                if not noted['fits']:
                    break
            row |= self.step(row['parts'])
            if row['fits']:
                break
        return row

    def beside_update(self) -> dict[str, dict[str, int]]:
        """Per program of an update: what there is besides its own arguments."""
        beside = self.state | self.views | {'slots': 2 * self.slot_bytes(self.slots)}
        return dict(accumulate=beside | {'moments': self.own['moments']}, apply=beside)

    def step(self, parts: dict[str, dict]) -> dict:
        """An update of 'accumulate' and 'apply' as one program: what leaves the chip for one is gone for both."""
        off = max((part['offloaded'] for part in parts.values()), key=len)
        beside = self.beside_update()

        def total(name: str) -> int:
            gone = (other for other in off if other not in parts[name]['offloaded'])
            return parts[name]['hbm_bytes'] - sum(beside[name].get(other, 0) for other in gone)

        most = lambda name: max(part.get(name, 0) for part in parts.values())
        errors = [part['error'] for part in parts.values() if 'error' in part]
        return (dict(error=errors[0]) if errors else {}) | dict(
            fits=all(part['fits'] for part in parts.values()),
            hbm_bytes=0 if errors else max(map(total, parts)),
            offloaded=off,
            arguments=most('arguments'),
            temporaries=most('temporaries'),
            compile_seconds=sum(part['compile_seconds'] for part in parts.values()),
        )


def summary(row: dict) -> str:
    """A row in a few words."""
    if 'error' in row:
        return f'does not compile: {row["error"]}'
    out = f'{row["hbm_bytes"] / GIB:.1f} GiB, {"fits" if row["fits"] else "does not fit"}'
    return out + (f', off the chip: {", ".join(row["offloaded"])}' if row['offloaded'] else '')


def costs(name: str) -> dict[str, dict]:
    """Per program: compiled and least operations of one chip and bytes of its collectives, one call each.

    From unrolled programs of few layers with dense attention and no inner loops, on a v5p slice, whose memory holds
    their scores; extrapolated to all layers. A call is a micro-batch of one row per data shard, an `extend` of
    FILL_ROWS × CHUNK tokens, a step of `decode`.
    """
    topology, t = 'v5p:2x2x4', tpu_programs
    mesh, host = t.mesh_of(name, topology), t.host_mesh(name, topology)
    shards, slots = mesh.shape['replica'] * mesh.shape['fsdp'], ENOUGH[-1]
    found: dict[str, list] = {'update': [], 'extend': [], 'decode': []}
    for layers in (1, 2, 3):
        lowered = (
            {} if layers == 1 else {'extend': t.lower_sampler(name, host, slots, layers)['extend']}
        )
        if layers < 3:
            lowered['decode'] = t.lower_sampler(name, host, slots, layers)['decode']
            # A chunk as long as a chip's rows: the head without a loop.
            unrolled = dict(layers=layers, attention='dense', scan=False, logit_chunk=t.TOKENS)
            lowered['update'] = t.learner(name, mesh, shards, **unrolled).lower('solver')[
                'accumulate'
            ]
        for program, low in lowered.items():
            compiled = t.compile_program(low, plain=True)
            found[program].append(
                dict(flops=compiled.flops, moved=roofline.collectives(compiled.text))
            )
            say(name, program, f'{layers} layers unrolled: {compiled.flops:.3e} operations')
    model, shapes = t.sized(name), t.parameters(t.sized(name))
    chips, split, length = host.size, mesh.shape['model'], t.TOKENS
    least = dict(
        update=roofline.UPDATE_PASSES
        * roofline.forward(model, shapes, length, length, True)
        / split,
        extend=roofline.forward(model, shapes, t.FILL_ROWS * t.CHUNK, length, False) / chips,
        decode=roofline.forward(model, shapes, slots, length, True) / chips,
    )
    first = dict(update=1, extend=2, decode=1)
    return {
        program: _extrapolated(few, more, model.layers - first[program])
        | dict(least_flops=least[program])
        for program, (few, more) in found.items()
    }


def _extrapolated(few: dict, more: dict, layers: int) -> dict:
    """`few` and as many further layers as are said, each adding what `more`, of one layer more, has above it."""
    grow = lambda a, b: a + (b - a) * layers
    kinds = sorted({*few['moved'], *more['moved']})
    return dict(
        flops=grow(few['flops'], more['flops']),
        collectives={k: int(grow(few['moved'].get(k, 0), more['moved'].get(k, 0))) for k in kinds},
    )


def complete(case: Case, row: dict, cost: dict) -> dict:
    """A row with what follows from the model's costs: ratio, collectives and least time of a step."""
    one = cost[row['program']]
    gathers = calls = 1.0
    accessed = float(case.views['view'])
    # Of memory only what cannot be avoided.
    if row['program'] == 'update':
        calls, gathers = (
            tpu_programs.ROWS / case.shards,
            row['micro_batches'],
        )  # rows of a data shard; gathers of weights
        # Per micro-batch: gathered weights are written twice and read thrice, gradients read and written; once a step:
        # masters and moments read and written.
        weights = case.views['view'] * case.host.shape['fsdp']
        accessed = gathers * (5 * weights + 2 * case.own['masters']) + 3 * case.own['moments']
    elif row['program'] == 'extend':
        accessed += row['slot_bytes'] * min(tpu_programs.FILL_ROWS / row['slots'], 1)
    else:
        calls = row['slots'] / ENOUGH[-1]
        accessed += row['slot_bytes']
    moved = {
        k: int(size * (gathers if k == 'all-gather' else calls))
        for k, size in one['collectives'].items()
    }
    seconds, by = roofline.bound(
        case.slice.chip, one['flops'] * calls, accessed, sum(moved.values())
    )
    return dict(
        model=case.name,
        topology=case.topology,
        mesh=dict(case.mesh.shape),
        **row,
        flops=one['flops'] * calls,
        flops_ratio=round(one['flops'] / one['least_flops'], 3),
        collectives=moved,
        roofline_seconds=seconds,
        bound_by=by,
        effort=case.effort,
    )


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    head = 'model | slice | program | setting | fits | HBM, GiB | arguments | temporaries | off the chip'
    lines = [
        f'| {head} | operations ÷ least | collectives, GiB | least time, ms |',
        '|' + '---|' * 12,
    ]
    for row in rows:
        setting = (
            f'{row["slots"]} slots'
            if 'slots' in row
            else f'{row["micro_rows"]} rows × {row["micro_batches"]}'
        )
        sizes = [row.get(name) for name in ('hbm_bytes', 'arguments', 'temporaries')]
        moved = (
            ', '.join(f'{k} {v / GIB:.2f}' for k, v in row['collectives'].items() if v > GIB / 200)
            or '–'
        )
        cells = [
            row['model'],
            row['topology'],
            row['program'],
            setting,
            'yes' if row['fits'] else '**no**',
        ]
        cells += [f'{size / GIB:.1f}' if size else '–' for size in sizes] + [
            '; '.join(row['offloaded']) or '–'
        ]
        cells += [
            f'{row["flops_ratio"]:.2f}',
            moved,
            f'{row["roofline_seconds"] * 1e3:.3g} ({row["bound_by"]})',
        ]
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def compiler_folder() -> pathlib.Path | None:
    """Where libtpu is, or None."""
    apart = pathlib.Path(sys.prefix) / 'tpu-compiler'
    found = importlib.util.find_spec('libtpu')
    return (
        apart
        if (apart / 'libtpu').is_dir()
        else pathlib.Path(str(found.origin)).parents[1]
        if found
        else None
    )


def prepare() -> None:
    """Lets libtpu compile without a TPU; to be called before anything of JAX runs.

    Raises:
      UserError: libtpu is not installed.
    """
    folder = compiler_folder()
    if folder is None:
        raise UserError('libtpu is not installed: make .venv/tpu-compiler')
    sys.path.append(str(folder))
    os.environ |= dict(TPU_SKIP_MDS_QUERY='1', ALLOW_MULTIPLE_LIBTPU_LOAD='1')
    jax.config.update('jax_platforms', 'cpu')


def measure(
    pairs: list[tuple[str, str]], path: pathlib.Path, effort: float, again: bool
) -> list[dict]:
    """Rows of (model, slice) pairs, from `path` or compiled now and added to it."""
    kept: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else dict(costs={}, rows=[])
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, topology in pairs:
        mine = [row for row in kept['rows'] if (row['model'], row['topology']) == (name, topology)]
        case = Case(name, topology, effort)
        rows = [] if again else [{k: v for k, v in row.items() if k not in DERIVED} for row in mine]
        if (
            rows
        ):  # what the compiler said is kept; what follows from it follows from today's formulas
            case.slots = rows[0]['slots']
            rows[-1] |= case.step(rows[-1]['parts'])
        else:
            rows = [*case.rollout(), case.update()]
        if name not in kept['costs']:
            kept['costs'][name] = costs(name)
        rest = [row for row in kept['rows'] if row not in mine]
        kept |= dict(
            jax=jax.__version__,
            rows=rest + [complete(case, row, kept['costs'][name]) for row in rows],
        )
        write_text(path, json.dumps(kept, indent=1))
    order = {pair: i for i, pair in enumerate(pairs)}
    rows = [row for row in kept['rows'] if (row['model'], row['topology']) in order]
    return sorted(rows, key=lambda row: order[row['model'], row['topology']])


def main(argv: list[str] | None = None) -> None:
    """Compiles what is missing and prints the table."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.tpu_aot',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--model', choices=tpu_shapes.MODELS, action='append', help='may be repeated; default: all'
    )
    parser.add_argument(
        '--topology', choices=tpu_shapes.TOPOLOGIES, action='append', help='likewise'
    )
    parser.add_argument(
        '--effort', type=float, default=tpu_programs.EFFORT, help="0: XLA's own, five times slower"
    )
    parser.add_argument('--again', action='store_true', help='compile what is kept, too')
    parser.add_argument('--out', type=pathlib.Path, default=RESULTS, help='file of the results')
    args = parser.parse_args(argv)
    try:
        prepare()
    except UserError as error:
        print(f'tpu_aot: {error}', file=sys.stderr)
        sys.exit(2)
    pairs = [
        (m, t)
        for t in args.topology or tpu_shapes.TOPOLOGIES
        for m in args.model or tpu_shapes.MODELS
    ]
    rows = measure(pairs, args.out, args.effort, args.again)
    print(table(rows))
    short = ('model', 'topology', 'program', 'fits', 'hbm_bytes', 'flops_ratio')
    print(json.dumps({'rows': [{name: row[name] for name in short} for row in rows]}))


if __name__ == '__main__':
    main()
