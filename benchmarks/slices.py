"""Plays rollouts on TPU slices and GPUs without any: seconds per step by cause.

    python -m benchmarks.slices --machine v5p:2x2x4 --model qwen2.5-7b
    python -m benchmarks.slices --machine v5e:4x4 --model qwen2.5-3b --slots 64 --config configs/drzero.py
    python -m benchmarks.slices --machine v5e:4x4 --model qwen2.5-7b --metrics runs/mine/metrics.jsonl
    python -m benchmarks.slices --all

The rules of the scheduler are played call by call. What a call costs is the compiler's estimate from the results of
benchmarks.tpu_aot where there is one, and otherwise a peak rate; the output says which. benchmarks/README.md explains
what is simulated and what is assumed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from typing import Any

from benchmarks import command, slices_costs, slices_workload, tpu_shapes
from benchmarks.slices_costs import MachineCosts, Settings
from benchmarks.slices_play import CAUSES, ENGINES, Result, default_settings, play
from benchmarks.slices_workload import Unit, Workload
from zeroplay_jax.configuration.command_line import config_of_file
from zeroplay_jax.configuration.memory import Memory
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.types import UserError

RESULTS = command.RESULTS / 'slices.json'
# The engine for accelerators. Its figures are the last line of --all.
PROJECT_ENGINE = 'pages'
# Machines of --all: name in the last line → machine, hosts (0 for its own) and steps ahead.
ALL = {
    'v5e:4x4': ('v5e:4x4', 0, 0),
    'v5p:2x2x4': ('v5p:2x2x4', 0, 0),
    'v6e:4x4': ('v6e:4x4', 0, 0),
    'h100': ('h100', 0, 0),
    'h200': ('h200', 0, 0),
    'v5p_64_hosts_sync': ('v5p:2x2x4', 64, 0),
    'v5p_64_hosts_ahead': ('v5p:2x2x4', 64, 1),
}
ALL_MODEL = 'qwen2.5-7b'
# Seed of the lengths of the first step.
SEED = 1
# Steps that are played: with `ahead` the first and the last do not count.
STEPS = {0: 1, 1: 4}
# For a plan as many rollouts are played as fill all slots so often, which stand for the others.
WAVES = 4


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = command.parser('slices', __doc__)
    machines = ', '.join(slices_costs.MACHINES)
    parser.add_argument('--machine', help=f'one of {machines}')
    parser.add_argument('--model', default=ALL_MODEL, help=f'one of {", ".join(tpu_shapes.MODELS)}')
    parser.add_argument('--config', help='config of a run: its lengths, its sampler and its steps')
    parser.add_argument('--metrics', type=pathlib.Path, help='metrics.jsonl of a finished run')
    parser.add_argument(
        '--engine',
        choices=ENGINES,
        help=f'rules of the sampler (as --config says, else {PROJECT_ENGINE})',
    )
    parser.add_argument('--hosts', type=int, default=0, help='another number of the same hosts')
    parser.add_argument('--slots', type=int, default=0, help='slots of a host')
    parser.add_argument('--ahead', type=int, choices=(0, 1), default=0, help='rollout.ahead')
    parser.add_argument('--all', action='store_true', help='every machine')
    parser.add_argument('--write', action='store_true', help='with --all: store the results')
    args = parser.parse_args(argv)
    if bool(args.machine) == args.all:
        parser.error('give --machine or --all')
    if args.hosts < 0 or args.slots < 0:
        parser.error('--hosts and --slots are positive')
    return args


def read_config(name: str) -> Any:
    """Returns the config of a file, with a variant after a colon.

    Raises:
      UserError: there is no such file or variant.
    """
    path, _, _ = name.partition(':')
    if not pathlib.Path(path).is_file():
        raise UserError(f'--config={name}: no such file')
    try:
        return config_of_file(name)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f'--config={name}: {error}') from None


def play_workload(
    machine: MachineCosts, settings: Settings, workload: Workload, ahead: int = 0
) -> Result:
    """Returns the figures of a step of a workload."""
    steps = [workload.draw(SEED + step, step) for step in range(STEPS[ahead])]
    return play(machine, settings, steps, workload, ahead, SEED)


def workload_line(workload: Workload) -> str:
    """Returns a workload in words."""
    groups = workload.draw(SEED)
    prompts, written, read = slices_workload.tokens(groups)
    rollouts = workload.groups * workload.samples
    low, high = workload.latency
    return (
        f'{workload.groups} prompts × {workload.samples} samples, mean {(prompts + written + read) / rollouts:.0f} '
        f'tokens, {written / rollouts:.0f} of them written; tools {low * 1e3:.0f} to {high * 1e3:.0f} ms'
    )


def report(machine: MachineCosts, settings: Settings, result: Result) -> list[str]:
    """Returns the lines of one play."""
    cache = f'{settings.slots} slots'
    if settings.is_paged:
        cache = f'{settings.pages} pages of {settings.page}'
    lines = [f'{machine.model} on {machine.machine}, {machine.hosts} hosts, {cache} each']
    for part, source in machine.sources.items():
        if part != 'kernel' or settings.is_paged:
            lines.append(f'  seconds of {part}: {source}')
    step = sum(result.seconds.values())
    lines.append('')
    lines.append('seconds per step')
    for cause in CAUSES:
        if result.seconds.get(cause):
            seconds = result.seconds[cause]
            lines.append(f'  {cause:<12} {seconds:9.2f} {seconds / step:6.0%}')
    lines.append(f'  {"all":<12} {step:9.2f}')
    bound = result.rollout_seconds / result.bound
    lines.append('')
    lines.append(
        f'{result.tokens_per_second:,.0f} generated tokens/s while sampling, {bound:.2f} × the bound'
    )
    lines.append(
        f'useful: {result.useful_rows:.0%} of the rows of decode steps, {result.useful_tokens:.0%} of the computed '
        f'{"tokens" if settings.is_paged else "prefill tokens"}; at most {result.concurrent} rollouts on a host; '
        f'{result.evictions:.0f} evictions'
    )
    return lines


def unit_seconds(
    machine: MachineCosts, settings: Settings, workload: Workload, unit: Unit
) -> dict[str, float]:
    """Returns the seconds of a unit's rollouts by part, of its updates and of its exchange."""
    seconds: dict[str, float] = {}
    trained = scored = rollouts = 0.0
    for part in unit.parts:
        part_workload = slices_workload.part_workload(workload, part)
        steps = [part_workload.draw(SEED)]
        # A part's turns may be longer than the config's.
        turn_tokens = max(settings.turn_tokens, part_workload.turn_tokens)
        part_settings = dataclasses.replace(settings, turn_tokens=turn_tokens)
        result = play(machine, part_settings, steps, part_workload, 0, SEED)
        seconds[part.name] = result.rollout_seconds * part.repeat
        part_rollouts = part.groups * part.samples
        rollouts += part_rollouts * part.repeat
        if part.trained:
            tokens = sum(slices_workload.tokens(steps[0]))
            trained += tokens * part.repeat
            extra_tokens = part.extra_scored * part_rollouts
            scored += part.scored * (tokens + extra_tokens) * part.repeat
    seconds['update'] = machine.update_seconds(round(trained), round(scored))
    seconds['exchange'] = machine.exchange_seconds(round(rollouts))
    return seconds


def unit_lines(unit: Unit, seconds: dict[str, float]) -> list[str]:
    """Returns the table of a config's unit."""
    lines = ['', f'{unit.name}, {unit.count} times: seconds']
    for name, value in seconds.items():
        lines.append(f'  {name:<32} {value:10.1f}')
    total = sum(seconds.values())
    hours = total * unit.count / 3600
    lines.append(f'  {"all":<32} {total:10.1f}')
    lines.append(
        f'{hours:.1f} hours for {unit.count}; checkpoints, evaluations and compilation not included'
    )
    return lines


def one_machine(args: argparse.Namespace) -> dict:
    """Plays a workload on one machine and prints the report; returns the last line."""
    machine = slices_costs.machine_costs(args.machine, args.model)
    if args.hosts:
        machine = machine.on_hosts(args.hosts)
    workload = Workload()
    unit = None
    overrides: dict[str, Any] = {}
    engine = args.engine or PROJECT_ENGINE
    if args.config:
        config = read_config(args.config)
        workload, unit = slices_workload.from_config(config, workload.latency)
        sampler = config.sampler
        has_pages = 0 < sampler.page < sampler.context
        engine = args.engine or ('pages' if has_pages else 'slots')
        sizes = ('slots', 'context', 'chunk', 'fill_rows', 'burst')
        overrides = {name: sampler[name] for name in sizes}
        overrides['turn_tokens'] = config.rollout.turn_tokens
    if args.metrics:
        workload = slices_workload.from_metrics(args.metrics, workload)
    if args.slots:
        overrides['slots'] = args.slots
    settings = default_settings(machine, engine, **overrides)
    result = play_workload(machine, settings, workload, args.ahead)
    lines = [workload_line(workload), *report(machine, settings, result)]
    last: dict[str, Any] = dict(
        machine=machine.machine,
        model=machine.model,
        engine=engine,
        tokens_per_second=round(result.tokens_per_second),
        seconds={cause: round(value, 3) for cause, value in result.seconds.items()},
    )
    if unit:
        seconds = unit_seconds(machine, settings, workload, unit)
        lines += unit_lines(unit, seconds)
        last['unit'] = {name: round(value, 1) for name, value in seconds.items()}
        last['hours'] = round(sum(seconds.values()) * unit.count / 3600, 2)
    print('\n'.join(lines))
    return last


def time_of_plan(config: Any, model: str, planned: Memory) -> str:
    """Returns tokens per second, hours and price of a run with the fields of a plan, in a line."""
    if 'solver' not in config:
        return f'time: not simulated for recipe {config.recipe}'
    machine = slices_costs.of_plan(planned, model)
    workload, unit = slices_workload.from_config(config, Workload().latency)
    sampler = planned.sampler
    shards = planned.shards // machine.hosts
    sizes = {name: getattr(sampler, name) for name in ('context', 'chunk', 'fill_rows', 'burst')}
    sizes |= dict(slots=shards * sampler.slots, turn_tokens=config.rollout.turn_tokens)
    engine = 'pages' if sampler.is_paged else 'slots'
    settings = default_settings(machine, engine, **sizes)
    if sampler.is_paged:
        settings = dataclasses.replace(
            settings,
            slots=shards * sampler.slots,
            page=sampler.page,
            pages=shards * sampler.page_count,
            token_budget=shards * sampler.token_budget,
            decode_buckets=tuple(shards * bucket for bucket in sampler.decode_buckets),
        )
    most = WAVES * settings.slots * machine.hosts
    groups = max(min(workload.groups, most // workload.samples), 1)
    played = dataclasses.replace(workload, groups=groups)
    result = play_workload(machine, settings, played)
    line = f'time, simulated: {result.tokens_per_second:,.0f} generated tokens/s in rollouts'
    answers = (config.solver.batch, config.solver.samples)
    # The unit is that of the paper's batches.
    if unit and answers in [(part.groups, part.samples) for part in unit.parts]:
        parts = []
        for part in unit.parts:
            groups = max(min(part.groups, most // part.samples), 1)
            repeat = part.repeat * part.groups / groups
            parts.append(dataclasses.replace(part, groups=groups, repeat=repeat))
        shorter = dataclasses.replace(unit, parts=tuple(parts))
        seconds = sum(unit_seconds(machine, settings, workload, shorter).values())
        hours = seconds * unit.count / 3600
        price = hours * planned.machine.dollars
        line += f', {hours:.0f} hours (about ${price:.0f}) for {unit.count} times {unit.name}'
    is_compiled = 'compiler' in machine.sources['sampler']
    source = "the compiler's estimates" if is_compiled else 'peak rates'
    return (
        f'{line}; seconds of rollouts from {source}, of updates from peak rates, none from a run; without transfers of '
        'offload, remote judges, checkpoints, evaluations, compilation'
    )


def all_row(name: str, engine: str) -> Result:
    """Returns the figures of one entry of ALL."""
    machine_name, hosts, ahead = ALL[name]
    machine = slices_costs.machine_costs(machine_name, ALL_MODEL)
    if hosts:
        machine = machine.on_hosts(hosts)
    return play_workload(machine, default_settings(machine, engine), Workload(), ahead)


def every_machine() -> dict[str, Any]:
    """Plays the workload on every machine with every engine; prints a table and returns the results."""
    print(workload_line(Workload()))
    print(
        f'{ALL_MODEL}; generated tokens/s while sampling, and the bound of schedulers with these steps and slots\n'
    )
    results: dict[str, Any] = {engine: {} for engine in ENGINES}
    rows = []
    for name, (machine_name, _, _) in ALL.items():
        for engine in ENGINES:
            result = all_row(name, engine)
            results[engine][name] = round(result.tokens_per_second)
        bound = result.tokens_per_second * result.rollout_seconds / result.bound
        source = slices_costs.machine_costs(machine_name, ALL_MODEL).sources['sampler']
        rates = (*(results[engine][name] for engine in ENGINES), round(bound))
        rows.append((name, source, *(f'{rate:,}' for rate in rates)))
    print(command.table(('machine', 'seconds from', *ENGINES, 'bound'), rows))
    print(f'\nThe last line has the figures of {PROJECT_ENGINE}, the engine for accelerators.')
    return results


def main(argv: list[str] | None = None) -> None:
    """Prints the report of one machine, or the table of all."""
    args = parse_arguments(argv)
    with command.one_line_errors('slices'):
        if args.all:
            results = every_machine()
            if args.write:
                write_text(RESULTS, json.dumps(results, indent=1) + '\n')
            last = results[PROJECT_ENGINE]
        else:
            last = one_machine(args)
    print(json.dumps(last))


if __name__ == '__main__':
    main()
