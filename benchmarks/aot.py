"""Compiles the programs of learner and sampler for TPU slices and GPUs ahead of time, without these.

    python -m benchmarks.aot                                                # five models × four slices: an hour
    python -m benchmarks.aot --run qwen2.5-3b --machine v5e:4x4
    python -m benchmarks.aot --adapters 32                                  # all roles as adapters over one base
    python -m benchmarks.aot --adapters 32 --run ssp --machine v5e:2x2 --machine h100

For every program: whether it fits into a chip's memory together with everything else that is there at the same time,
and with which rows, slots and offloading. A run is a model with whole weights; with adapters also a paper's config,
with its lengths. benchmarks/README.md explains the columns.

Results are stored in benchmarks/results/aot.json and compiled again only with --again.
"""

from __future__ import annotations

import argparse
import itertools

from benchmarks import aot_cases, aot_machines, command
from benchmarks.aot_cases import CONFIGS, UNROLLED, Row
from benchmarks.aot_machines import GPUS
from benchmarks.tpu_shapes import ADAPTER_TOPOLOGIES, MODELS, TOPOLOGIES, WHOLE_MODELS
from zeroplay_jax.extras.plan.machines import GIB
from zeroplay_jax.runtime.disk import write_text

# Type of the slice of a config for full fine-tuning, at the head of its file.
FULL = {
    'drzero': 'v5litepod-16',
    'piplay': 'v5p-32',
    'ssp': 'v5p-32',
    'dspo': 'v5p-32',
    'scope': 'v5p-32',
}
# Slice → its name when it is requested.
TYPES = {
    'v5e:2x2': 'v5litepod-4',
    'v5e:2x4': 'v5litepod-8',
    'v5e:4x4': 'v5litepod-16',
    'v6e:2x4': 'v6e-8',
    'v5p:2x2x1': 'v5p-8',
}
# Runs and slices of --adapters without further arguments.
_SLICES_OF_MODELS = ('v5e:2x4', 'v5e:4x4', 'v6e:2x4', 'v5p:2x2x1')
CASES = {
    'qwen2.5-7b': _SLICES_OF_MODELS,
    **dict.fromkeys(CONFIGS, ('v5e:2x2',)),
    'scope': ('v5e:2x2', 'v5e:2x4', 'v5p:2x2x1'),
    **dict.fromkeys(('qwen2.5-3b', 'qwen3-8b', 'llama-3.1-8b'), _SLICES_OF_MODELS),
    **dict.fromkeys(('qwen3-30b-a3b', 'qwen3.5-9b'), ('v5p:2x2x1',)),
}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = command.parser('aot', __doc__)
    several = 'may be given several times (default: those of the tables)'
    machines = dict.fromkeys((*TOPOLOGIES, *ADAPTER_TOPOLOGIES, *GPUS))
    parser.add_argument('--adapters', type=int, default=0, metavar='RANK', help='0: whole weights')
    parser.add_argument(
        '--run', choices=(*MODELS, *CONFIGS), action='append', help=f'model or config; {several}'
    )
    parser.add_argument('--machine', choices=machines, action='append', help=several)
    parser.add_argument(
        '--unrolled',
        action='store_true',
        help='with --adapters: compile the layers of updates one by one, without policy.scan',
    )
    parser.add_argument('--again', action='store_true', help='compile stored results again')
    args = parser.parse_args(argv)
    if args.adapters < 0:
        parser.error(f'--adapters {args.adapters}: give a rank of 1 or more')
    if not args.adapters:
        if args.unrolled:
            parser.error('--unrolled: give --adapters, too')
        for name in args.run or ():
            if name not in WHOLE_MODELS:
                parser.error(f'--run {name}: give --adapters, too')
    machines_of_table = (*ADAPTER_TOPOLOGIES, *GPUS) if args.adapters else tuple(TOPOLOGIES)
    with_or_without = 'without' if args.adapters else 'with'
    for name in args.machine or ():
        if name not in machines_of_table:
            parser.error(
                f'--machine {name}: only {with_or_without} --adapters; give one of {", ".join(machines_of_table)}'
            )
    return args


def cases_of(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns the runs and machines that the arguments name."""
    if not args.adapters:
        return list(itertools.product(args.run or WHOLE_MODELS, args.machine or TOPOLOGIES))
    cases = []
    for name in args.run or CASES:
        machines = args.machine or CASES.get(name, ('v5e:2x4',))
        cases += [(name, machine) for machine in machines]
    return cases


def main(argv: list[str] | None = None) -> None:
    """Compiles the programs that are not stored, prints their table, and writes those of models and configs."""
    args = parse_arguments(argv)
    cases = cases_of(args)
    rows = []
    with command.one_line_errors('aot'):
        aot_machines.prepare([machine for _, machine in cases])
        for name, machine_name in cases:
            machine = aot_machines.machine_of(machine_name)
            rows += aot_cases.measure(name, machine, args.adapters, args.again, not args.unrolled)
    for file, text in tables(aot_cases.stored_rows()).items():
        write_text(command.RESULTS / file, text)
    print(table(rows))


def tables(rows: list[Row]) -> dict[str, str]:
    """Returns name of a file → text, from all stored rows."""
    return {
        'aot.tsv': model_table(rows, has_adapters=False),
        'aot_adapters.tsv': model_table(rows, has_adapters=True),
        'aot_configs.tsv': config_table(rows),
    }


def table(rows: list[Row]) -> str:
    """Returns all rows as a table in Markdown."""
    columns = ['run', 'machine', 'mesh', 'program', 'setting', 'fits', 'memory, GiB', 'arguments']
    columns += ['temporaries', 'off the chip']
    lines = []
    for row in rows:
        setting = f'{row.get("micro_rows")} × {row["row_tokens"]:,}'
        if 'slots' in row:
            setting = f'{row["slots"]} slots of {row["context"]:,}'
        cells = [f'`{row["work"]}`', row['machine'], _mesh(row), row['program'], setting]
        cells.append('yes' if row['fits'] else '**no**')
        for column in ('hbm_bytes', 'arguments', 'temporaries'):
            size = row.get(column)
            cells.append(f'{size / GIB:.1f}' if size else '–')
        cells.append('; '.join(row['offloaded']) or '–')
        lines.append(cells)
    return command.table(columns, lines)


def config_table(rows: list[Row]) -> str:
    """Returns, as the text of a file, for every paper's config the smallest slice and GPU on which it fits."""
    columns = ['config', 'model', 'full fine-tuning', 'adapters', 'mesh', 'slots, rows']
    columns += ['GiB per chip: rollouts / updates', 'one GPU']
    lines = []
    for name, model in CONFIGS.items():
        work = f'configs/{name}.py'
        smallest = smallest_machine(rows, work, tuple(ADAPTER_TOPOLOGIES))
        fitting = rows_that_fit(rows, work, smallest)
        gpu = smallest_machine(rows, work, tuple(GPUS))
        cells = [f'`{name}`', model, FULL[name]]
        if fitting:
            cells += [TYPES[smallest], _mesh(fitting[0]), setting(fitting), _memory(fitting)]
        else:
            cells += ['–'] * 4
        cells.append(f'{gpu.upper()}: {setting(rows_that_fit(rows, work, gpu))}' if gpu else '–')
        lines.append(cells)
    return command.tab_separated(columns, lines)


def model_table(rows: list[Row], has_adapters: bool) -> str:
    """Returns, as the text of a file, slots and rows of the models on the machines; – where nothing is compiled."""
    of_models = []
    for row in rows:
        if row['work'] == row['model'] and bool(row['rank']) == has_adapters:
            of_models.append(row)
    compiled_on = {row['machine'] for row in of_models}
    names = (*ADAPTER_TOPOLOGIES, *GPUS) if has_adapters else TOPOLOGIES
    machines = [name for name in names if name in compiled_on]
    lines = []
    for name in dict.fromkeys(row['model'] for row in of_models):
        cells = [name]
        for machine in machines:
            compiled = _rows_of(of_models, name, machine)
            cells.append(setting(compiled) if compiled else '–')
        lines.append(cells)
    return command.tab_separated(('model', *machines), lines)


def smallest_machine(rows: list[Row], work: str, machines: tuple[str, ...]) -> str:
    """Returns the first of the machines on which all programs of a run were compiled and fit, '' for none."""
    for machine in machines:
        if rows_that_fit(rows, work, machine):
            return machine
    return ''


def rows_that_fit(rows: list[Row], work: str, machine: str) -> list[Row]:
    """Returns the rows of a run on a machine if all fit; else those without `policy.scan`; [] if neither fits."""
    for name in (work, work + UNROLLED):
        compiled = _rows_of(rows, name, machine)
        if compiled and all(row['fits'] for row in compiled):
            return compiled
    return []


def setting(rows: list[Row]) -> str:
    """Returns slots and rows of the rows of a case."""
    if not all(row['fits'] for row in rows):
        return '**does not fit**'
    slots = rows[0]['slots']
    micro_rows = rows[-1]['micro_rows']
    text = f'{slots} slots, {micro_rows} row{"" if micro_rows == 1 else "s"}'
    if rows[0]['work'].endswith(UNROLLED):
        text += '; `policy.scan=False`'
    return text if any(row['offloaded'] for row in rows) else f'{text}; all on the chip'


def _rows_of(rows: list[Row], work: str, machine: str) -> list[Row]:
    return [row for row in rows if (row['work'], row['machine']) == (work, machine)]


def _mesh(row: Row) -> str:
    return '·'.join(str(size) for size in row['mesh'].values())


def _memory(rows: list[Row]) -> str:
    """Returns the fullest memory of rollouts and of updates."""
    rollouts = max(row['hbm_bytes'] for row in rows if 'slots' in row)
    updates = max(row['hbm_bytes'] for row in rows if 'slots' not in row)
    return f'{rollouts / GIB:.1f} / {updates / GIB:.1f}'


if __name__ == '__main__':
    main()
