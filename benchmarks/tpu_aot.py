"""Compiles the update step and the sampler's programs for TPU slices ahead of time, with libtpu and without a TPU.

    python -m benchmarks.tpu_aot                                            # five models × four slices: an hour
    python -m benchmarks.tpu_aot --model qwen2.5-3b --topology v5e:4x4
    python -m benchmarks.tpu_aot --adapters 32                              # all roles as adapters over one base
    python -m benchmarks.tpu_aot --adapters 32 --config ssp --topology v5e:2x2

For every program: whether it fits into a chip's memory together with everything else that is there at the same time,
and with which rows, slots and offloading; its operations relative to the least number; its collectives; the least time
at the chip's peak rates; and the compiler's own estimate. benchmarks/README.md explains the columns.

Results are stored in benchmarks/results/tpu_aot.json and compiled again only with --again. Estimates need programs of
their own: --estimate compiles those that are not stored. The rows of adapters are in results/adapters_aot.json
(`benchmarks.adapter_cases`); they have no operations and times. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import sys
from typing import Any

import jax

from benchmarks import (
    adapter_cases,
    adapter_tables,
    command,
    roofline,
    tpu_estimates,
    tpu_programs,
    tpu_shapes,
)
from benchmarks.adapter_tables import SEVERAL, shared_parser
from benchmarks.tpu_programs import Row
from zeroplay_jax.configuration.machines import GIB
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.types import UserError

RESULTS = command.RESULTS / 'tpu_aot.json'
# Mean length of a rollout while it decodes (`benchmarks.slices`): only these places of a slot have to be read.
USED_PLACES = 900
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


class Case:
    """One model on one slice."""

    def __init__(self, name: str, topology: str):
        self.name = name
        self.topology = topology
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

    def _fitted(self, key: tuple, lowered: Any, beside: dict[str, int], kind: str) -> Row:
        """Returns the columns of a program of the 'rollout' or 'update', see `tpu_programs.fitted`."""
        compile_it = functools.partial(tpu_programs.compile_program, lowered)
        memory = self.slice.chip.memory
        return tpu_programs.fitted((self.name, *key), compile_it, beside, OFFLOAD[kind], memory)

    def rollout(self) -> list[Row]:
        """Returns the rows of 'extend' and 'decode', with the most slots that fit; sets `slots`."""
        rows: list[Row] = []
        for slots in self.slot_counts():
            slot_bytes = self.slot_bytes(slots)
            # The program's own arguments, this role's view and slots, count in its peak.
            beside = self.state | self.own_state
            beside |= {OTHER_VIEW: self.views['view'], OTHER_SLOTS: slot_bytes}
            programs = tpu_programs.lower_sampler(self.name, self.host, slots)
            rows = tpu_programs.sampler_rows(
                self._fitted, self.slice.host, programs, slots, slot_bytes, beside
            )
            self.slots = slots
            if all(row['fits'] for row in rows):
                break
        return rows

    def update(self) -> Row:
        """Returns the row of 'update', with the most rows per micro-batch that fit; needs `slots` of `rollout`."""
        row: Row = {}
        for rows_per_shard in ROWS[tpu_shapes.generation(self.topology)]:
            rows = rows_per_shard * self.shards
            lowered = tpu_programs.learner(self.name, self.mesh, rows).lower('solver')
            parts = {}
            for part, beside in self.beside_update().items():
                key = (self.topology, f'{rows} rows', part)
                parts[part] = self._fitted(key, lowered[part], beside, 'update')
                if not parts[part]['fits']:
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

    def step(self, parts: dict[str, Row]) -> Row:
        """Returns the columns of an update from those of its two programs."""
        offloaded = max((part['offloaded'] for part in parts.values()), key=len)
        beside = self.beside_update()
        totals = []
        for name, part in parts.items():
            total = part['hbm_bytes']
            for other in offloaded:
                if other not in part['offloaded']:
                    total -= beside[name].get(other, 0)
            totals.append(total)
        return tpu_programs.update_columns(parts, totals)


def complete(case: Case, row: dict, cost: dict) -> dict:
    """Returns a row with the columns that follow from the model's costs: ratio, collectives and least time.

    Args:
      case: model and slice.
      row: from `Case.rollout` or `Case.update`.
      cost: result of `tpu_estimates.costs`.
    """
    program_cost = cost[row['program']]
    view = case.views['view']
    # `calls` multiplies the operations and collectives of a call, `gathers` its gathers of weights. Bytes of memory are
    # only those that cannot be avoided.
    gathers = 1.0
    used_share = USED_PLACES / (tpu_programs.TOKENS + tpu_programs.CHUNK)
    if row['program'] == 'update':
        # A call of the cost has one row per data shard; weights are gathered once per micro-batch.
        calls = tpu_programs.ROWS / case.shards
        gathers = row['micro_batches']
        # Per micro-batch, gathered weights are written twice and read three times, gradients are read and written.
        # Once per step, masters and moments are read and written.
        weights = view * case.host.shape['fsdp']
        per_micro_batch = 5 * weights + 2 * case.own_state['masters']
        accessed = gathers * per_micro_batch + 3 * case.own_state['moments']
    elif row['program'] == 'extend':
        calls = 1.0
        share_of_slots = min(tpu_programs.FILL_ROWS / row['slots'], 1)
        accessed = float(view) + row['slot_bytes'] * share_of_slots * used_share
    else:
        calls = row['slots'] / tpu_estimates.SLOTS
        accessed = float(view) + row['slot_bytes'] * used_share
    flops = program_cost['flops'] * calls
    moved = {}
    for kind, size in program_cost['collectives'].items():
        moved[kind] = int(size * (gathers if kind == 'all-gather' else calls))
    seconds, resource = roofline.bound(case.slice.chip, flops, accessed, sum(moved.values()))
    return dict(
        model=case.name,
        topology=case.topology,
        mesh=dict(case.mesh.shape),
        **row,
        flops=flops,
        flops_ratio=round(program_cost['flops'] / program_cost['least_flops'], 3),
        collectives=moved,
        roofline_seconds=seconds,
        bound_by=resource,
        effort=tpu_programs.EFFORT,
    )


def table(rows: list[Row]) -> str:
    """Returns the rows as a Markdown table."""
    columns = ['model', 'slice', 'program', 'setting', *tpu_programs.MEMORY_COLUMNS]
    columns += ['operations ÷ least', 'collectives, GiB', 'least time, ms', 'estimate, ms']
    lines = []
    for row in rows:
        if 'slots' in row:
            setting = f'{row["slots"]} slots'
        else:
            setting = f'{row["micro_rows"]} rows × {row["micro_batches"]}'
        collectives = []
        for kind, size in row['collectives'].items():
            # Smaller sizes would be printed as 0.00.
            if size > GIB / 200:
                collectives.append(f'{kind} {size / GIB:.2f}')
        cells = [row['model'], row['topology'], row['program'], setting]
        cells += tpu_programs.memory_cells(row)
        cells += [f'{row["flops_ratio"]:.2f}', ', '.join(collectives) or '–']
        cells.append(f'{row["roofline_seconds"] * 1e3:.3g} ({row["bound_by"]})')
        estimated = row['estimated_seconds']
        cells.append(f'{estimated * 1e3:.3g}' if estimated else '–')
        lines.append(cells)
    return command.table(columns, lines)


def model_table(rows: list[Row]) -> str:
    """Returns slots and rows of every model on every slice, as the text of a file."""
    cells: dict[str, list[str]] = {name: [name] for name in tpu_shapes.MODELS}
    for name, topology in itertools.product(cells, tpu_shapes.TOPOLOGIES):
        programs = {row['program']: row for row in rows if _pair(row) == (name, topology)}
        setting = '–'
        if programs:
            slots, micro_rows = programs['decode']['slots'], programs['update']['micro_rows']
            setting = f'{slots} slots, {micro_rows} rows'
            if not any(row['offloaded'] for row in programs.values()):
                setting += '; all on the chip'
        cells[name].append(setting)
    return command.tab_separated(('model', *tpu_shapes.TOPOLOGIES), cells.values())


def compiler_folder() -> pathlib.Path | None:
    """Returns the folder that contains libtpu, or None."""
    separate_folder = pathlib.Path(sys.prefix) / 'tpu-compiler'
    if (separate_folder / 'libtpu').is_dir():
        return separate_folder
    installed = importlib.util.find_spec('libtpu')
    if installed is None:
        return None
    return pathlib.Path(str(installed.origin)).parents[1]


def prepare() -> None:
    """Sets up libtpu to compile without a TPU. Call it before JAX runs anything.

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
    pairs: list[tuple[str, str]],
    path: pathlib.Path,
    again: bool,
    estimate: bool = False,
) -> list[dict]:
    """Returns the rows of (model, slice) pairs, from the stored results or compiled now.

    Args:
      pairs: models and slices.
      path: file of the stored results, which is updated after every pair.
      again: whether stored results are compiled again.
      estimate: whether the programs of missing estimates are compiled.
    """
    stored: dict[str, Any] = dict(costs={}, rows=[], estimates={})
    if path.exists():
        stored = json.loads(path.read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    for pair in pairs:
        name, topology = pair
        rows = [row for row in stored['rows'] if _pair(row) == pair]
        others = [row for row in stored['rows'] if _pair(row) != pair]
        if again or not rows:
            case = Case(name, topology)
            rows = [*case.rollout(), case.update()]
            if name not in stored['costs']:
                stored['costs'][name] = tpu_estimates.costs(name)
            rows = [complete(case, row, stored['costs'][name]) for row in rows]
        if estimate:
            tpu_estimates.add_missing(stored['estimates'], name, topology, rows[0]['slots'])
        for row in rows:
            seconds = tpu_estimates.row_seconds(name, topology, row, stored['estimates'])
            row['estimated_seconds'] = seconds
        stored['jax'] = jax.__version__
        stored['rows'] = others + rows
        write_text(path, json.dumps(stored, indent=1))
    return sorted(
        (row for row in stored['rows'] if _pair(row) in pairs),
        key=lambda row: pairs.index(_pair(row)),
    )


def _pair(row: Row) -> tuple[str, str]:
    """Returns model and slice of a row."""
    return row['model'], row['topology']


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = shared_parser('tpu_aot', __doc__, least_rank=0)
    topologies = sorted({*tpu_shapes.TOPOLOGIES, *tpu_shapes.ADAPTER_TOPOLOGIES})
    parser.add_argument('--topology', choices=topologies, action='append', help=SEVERAL)
    estimate_help = 'compile the programs of missing time estimates, at effort 0'
    parser.add_argument('--estimate', action='store_true', help=estimate_help)
    args = parser.parse_args(argv)
    slices = tpu_shapes.ADAPTER_TOPOLOGIES if args.adapters else tpu_shapes.TOPOLOGIES
    for topology in args.topology or ():
        if topology not in slices:
            parser.error(f'--topology {topology}: here the slices are {", ".join(slices)}')
    only_adapters = [f'--model {model}' for model in args.model if model not in tpu_shapes.MODELS]
    only_adapters += ['--config'] * bool(args.config) + ['--unrolled'] * args.unrolled
    if only_adapters and not args.adapters:
        parser.error(f'{only_adapters[0]}: give --adapters, too')
    return args


def adapter_cases_of(args: argparse.Namespace) -> list[tuple[str, adapter_cases.Machine]]:
    """Returns the runs and slices that the arguments name; all of `adapter_cases.CASES` if they name none."""
    tpu_machine = functools.cache(adapter_cases.tpu_machine)
    cases = []
    for name in args.config + args.model or adapter_cases.CASES:
        topologies = args.topology or adapter_cases.CASES.get(name, ('v5e:2x4',))
        cases += [(name, tpu_machine(topology)) for topology in topologies]
    return cases


def main(argv: list[str] | None = None) -> None:
    """Compiles the programs that are not stored, and prints the table."""
    args = parse_arguments(argv)
    with command.one_line_errors('tpu_aot'):
        prepare()
    if args.adapters:
        adapter_tables.compile_and_print(adapter_cases_of(args), args)
        return
    pairs = []
    for topology in args.topology or tpu_shapes.TOPOLOGIES:
        for model in args.model or tpu_shapes.MODELS:
            pairs.append((model, topology))
    path = args.out or RESULTS
    rows = measure(pairs, path, args.again, args.estimate)
    write_text(path.with_suffix('.tsv'), model_table(json.loads(path.read_text())['rows']))
    print(table(rows))
    columns = ('model', 'topology', 'program', 'fits', 'hbm_bytes', 'flops_ratio')
    print(json.dumps({'rows': [{name: row[name] for name in columns} for row in rows]}))


if __name__ == '__main__':
    main()
