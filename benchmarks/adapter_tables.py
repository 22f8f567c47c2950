"""What the commands that compile runs with adapters share: flags, tables in Markdown, and the last line."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable

from benchmarks import adapter_cases, command, tpu_programs, tpu_shapes
from benchmarks.adapter_cases import CONFIGS, UNROLLED, Machine
from benchmarks.tpu_programs import Row
from benchmarks.tpu_shapes import ADAPTER_TOPOLOGIES
from zeroplay_jax.configuration.machines import GIB
from zeroplay_jax.runtime.disk import write_text

# The GPUs of `benchmarks.gpu_aot`, the smaller one first.
GPUS = ('h100', 'h200')
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


# Beside the results: what `config_table` returns.
CONFIGS_FILE = 'adapters_configs.tsv'
SEVERAL = 'may be given several times (default: all)'


def shared_parser(name: str, description: str | None, least_rank: int) -> argparse.ArgumentParser:
    """Returns a parser with --model, --config, --adapters, --unrolled, --again and --out.

    Args:
      name: of the benchmark.
      description: its docstring.
      least_rank: 0 if it also compiles full fine-tuning; 1 if --adapters is needed.
    """
    parser = command.parser(name, description)

    def rank(text: str) -> int:
        value = int(text)
        if value < least_rank:
            raise argparse.ArgumentTypeError('give a rank of 1 or more')
        return value

    models = (*tpu_shapes.MODELS, *tpu_shapes.FURTHER_MODELS)
    rank_help = 'rank of adapters' if least_rank else 'rank of adapters; 0: full fine-tuning'
    parser.add_argument(
        '--adapters', type=rank, default=0, required=least_rank > 0, metavar='RANK', help=rank_help
    )
    parser.add_argument('--model', choices=models, action='append', default=[], help=SEVERAL)
    parser.add_argument(
        '--config',
        choices=CONFIGS,
        action='append',
        default=[],
        help="with --adapters: a paper's config, with its lengths; may be given several times",
    )
    parser.add_argument(
        '--unrolled',
        action='store_true',
        help='with --adapters: compile the layers of updates one by one, without policy.scan',
    )
    parser.add_argument('--again', action='store_true', help='compile stored results again')
    parser.add_argument('--out', type=pathlib.Path, help='file of the results')
    return parser


def compile_and_print(cases: list[tuple[str, Machine]], args: argparse.Namespace) -> None:
    """Compiles the cases that are not stored, prints their tables and the last line, and writes that of the models.

    Args:
      cases: see `adapter_cases.measure`.
      args: of `shared_parser`.
    """
    path = args.out or adapter_cases.RESULTS
    rows = adapter_cases.measure(cases, args.adapters, path, args.again, not args.unrolled)
    stored = adapter_cases.stored_rows(path)
    write_text(path.with_suffix('.tsv'), model_table(stored, command.tab_separated))
    write_text(path.with_name(CONFIGS_FILE), config_table(stored, command.tab_separated))
    print(report(rows, stored))
    print(last_line(rows))


def table(rows: list[Row]) -> str:
    """Returns all rows."""
    columns = ('run', 'machine', 'mesh', 'program', 'setting', *tpu_programs.MEMORY_COLUMNS)
    lines = []
    for row in rows:
        if 'slots' in row:
            setting = f'{row["slots"]} slots of {row["context"]:,}'
        else:
            setting = f'{row["micro_rows"]} × {row["row_tokens"]:,}'
        cells = [f'`{row["work"]}`', row['machine'], _mesh(row), row['program'], setting]
        lines.append(cells + tpu_programs.memory_cells(row))
    return command.table(columns, lines)


def report(rows: list[Row], stored: list[Row]) -> str:
    """Returns the tables of the pages: of the rows, and of the models and configs of all stored rows."""
    return '\n\n'.join([table(rows), model_table(stored), config_table(stored)])


def config_table(rows: list[Row], form: Callable[..., str] = command.table) -> str:
    """Returns, for every paper's config, the smallest compiled slice and GPU on which all its programs fit."""
    columns = ['config', 'model', 'full fine-tuning', 'adapters', 'mesh', 'slots, rows']
    columns += ['GiB per chip: rollouts / updates', 'one GPU']
    lines = []
    for name, model in CONFIGS.items():
        work = f'configs/{name}.py'
        smallest = smallest_machine(rows, work, tuple(ADAPTER_TOPOLOGIES))
        fitting = rows_that_fit(rows, work, smallest)
        gpu = smallest_machine(rows, work, GPUS)
        cells = [f'`{name}`', model, FULL[name]]
        if fitting:
            cells += [TYPES[smallest], _mesh(fitting[0]), setting(fitting), _memory(fitting)]
        else:
            cells += ['–'] * 4
        cells.append(f'{gpu.upper()}: {setting(rows_that_fit(rows, work, gpu))}' if gpu else '–')
        lines.append(cells)
    return form(columns, lines)


def model_table(rows: list[Row], form: Callable[..., str] = command.table) -> str:
    """Returns slots and rows of the models on the machines; – where nothing is compiled."""
    rows = [row for row in rows if row['work'] == row['model']]
    compiled_on = {row['machine'] for row in rows}
    machines = [machine for machine in (*ADAPTER_TOPOLOGIES, *GPUS) if machine in compiled_on]
    lines = []
    for name in dict.fromkeys(row['model'] for row in rows):
        cells = [name]
        for machine in machines:
            compiled = _rows_of(rows, name, machine)
            cells.append(setting(compiled) if compiled else '–')
        lines.append(cells)
    return form(('model', *machines), lines)


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


def last_line(rows: list[Row]) -> str:
    """Returns the rows as one line of JSON with the columns that a program would read."""
    columns = ['work', 'machine', 'rank', 'program', 'slots', 'micro_rows', 'fits', 'hbm_bytes']
    columns += ['offloaded']
    shown = [{name: row[name] for name in columns if name in row} for row in rows]
    return json.dumps({'rows': shown})


def _rows_of(rows: list[Row], work: str, machine: str) -> list[Row]:
    return [row for row in rows if (row['work'], row['machine']) == (work, machine)]


def _mesh(row: Row) -> str:
    return '·'.join(str(size) for size in row['mesh'].values())


def _memory(rows: list[Row]) -> str:
    """Returns the fullest memory of rollouts and of updates."""
    rollouts = max(row['hbm_bytes'] for row in rows if 'slots' in row)
    updates = max(row['hbm_bytes'] for row in rows if 'slots' not in row)
    return f'{rollouts / GIB:.1f} / {updates / GIB:.1f}'
