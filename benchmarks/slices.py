"""Plays rollouts on TPU slices and GPUs without any: generated tokens per second of sampling.

    python -m benchmarks.slices          # four minutes; writes results/slices.tsv

The rules of the scheduler are played call by call; slices_costs says what a call costs, benchmarks/README.md what is
simulated and what is assumed. `extras.plan` plays the workload of a config with the settings that it has chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import command, slices_costs, slices_workload, tpu_pages
from benchmarks.slices_costs import MachineCosts, Settings
from benchmarks.slices_play import bound, play
from benchmarks.slices_workload import Part, Workload
from benchmarks.tpu_shapes import CHIPS_OF_HOST
from zeroplay_jax.extras.plan.memory import Memory
from zeroplay_jax.runtime.disk import write_text

RESULTS = command.RESULTS / 'slices.tsv'


class Machine(NamedTuple):
    """Hosts of a row of the table.

    Attributes:
      kind: of the chips.
      hosts, chips: number of hosts, and chips of each.
      slots: of a host, whose memory the pages take: on slices those of the compile table, on GPUs those that fit beside
        the weights of two roles.
      ahead: `rollout.ahead`.
    """

    kind: str
    hosts: int
    chips: int
    slots: int
    ahead: int = 0


def _slice(kind: str, hosts: int, ahead: int = 0) -> Machine:
    return Machine(kind, hosts, CHIPS_OF_HOST, tpu_pages.SLOTS[kind], ahead)


MACHINES = {
    'v5e:4x4': _slice('v5e', 4),
    'v5p:2x2x4': _slice('v5p', 4),
    'v6e:4x4': _slice('v6e', 4),
    'h100': Machine('h100', 1, 1, 64),
    'h200': Machine('h200', 1, 1, 128),
    'v5p, 64 hosts': _slice('v5p', 64),
    'v5p, 64 hosts, rollout.ahead=1': _slice('v5p', 64, ahead=1),
}
# Seed of the lengths of the first step.
SEED = 1
# Steps that are played: with `ahead` the first and the last do not count.
STEPS = {0: 1, 1: 4}
# For a plan as many rollouts are played as fill all slots so often, which stand for the others.
WAVES = 4
# Steps of a decode call that the host reads while the next one runs: calls are short, because the device does not wait
# for the host between them.
OVERLAPPED_BURST = 4


def drawn_steps(workload: Workload, ahead: int = 0) -> list[list[slices_workload.Group]]:
    """Returns the groups of the steps that are played."""
    return [workload.draw(SEED + step, step) for step in range(STEPS[ahead])]


def paged_settings(machine: Machine) -> Settings:
    """Returns the settings of a host of the table."""
    sampler = tpu_pages.paged(machine.slots, machine.kind)
    pages = {name: getattr(sampler, name) for name in ('slots', 'page', 'pages', 'token_budget')}
    return Settings(
        **pages, decode_buckets=sampler.decode_buckets, burst=OVERLAPPED_BURST, overlap=True
    )


def rates(machine: Machine) -> tuple[float, float]:
    """Returns the generated tokens per second of a machine, and the bound of schedulers with its steps and slots."""
    workload = Workload()
    model = slices_costs.published_model(tpu_pages.MODEL)
    costs = slices_costs.machine_costs(machine.kind, model, machine.chips, machine.hosts)
    steps = drawn_steps(workload, machine.ahead)
    arguments = (costs, paged_settings(machine), steps, workload, machine.ahead)
    counted = steps[1:-1] if machine.ahead else steps
    written = sum(slices_workload.tokens(step)[1] for step in counted) / len(counted)
    return written / play(*arguments, SEED), written / bound(*arguments)


def run_seconds(
    machine: MachineCosts, settings: Settings, workload: Workload, parts: Sequence[Part]
) -> float:
    """Returns the seconds of the rollouts of parts, of their updates and of their exchange."""
    total = trained = scored = rollouts = 0.0
    for part in parts:
        part_workload = slices_workload.part_workload(workload, part)
        steps = [part_workload.draw(SEED)]
        # A part's turns may be longer than the config's.
        turn_tokens = max(settings.turn_tokens, part_workload.turn_tokens)
        part_settings = dataclasses.replace(settings, turn_tokens=turn_tokens)
        rollout_seconds = play(machine, part_settings, steps, part_workload, 0, SEED)
        total += rollout_seconds * part.repeat
        part_rollouts = part.groups * part.samples
        rollouts += part_rollouts * part.repeat
        if part.trained:
            tokens = sum(slices_workload.tokens(steps[0]))
            trained += tokens * part.repeat
            extra_tokens = part.extra_scored * part_rollouts
            scored += part.scored * (tokens + extra_tokens) * part.repeat
    total += machine.update_seconds(round(trained), round(scored))
    return total + machine.exchange_seconds(round(rollouts))


def time_of_plan(config: Any, policy: str, planned: Memory) -> str:
    """Returns tokens per second, hours and price of a run with the fields of a plan, in a line."""
    if 'solver' not in config:
        return f'time: not simulated for recipe {config.recipe}'
    model = slices_costs.model_of(policy)
    machine = slices_costs.of_plan(planned, model)
    workload, parts = slices_workload.from_config(config, Workload().latency)
    sampler = planned.sampler
    shards = planned.shards // machine.hosts
    settings = Settings(
        slots=shards * sampler.slots,
        context=sampler.context,
        chunk=sampler.chunk,
        fill_rows=sampler.fill_rows,
        burst=sampler.burst,
        turn_tokens=config.rollout.turn_tokens,
    )
    if sampler.is_paged:
        settings = dataclasses.replace(
            settings,
            page=sampler.page,
            pages=shards * sampler.page_count,
            token_budget=shards * sampler.token_budget,
            decode_buckets=tuple(shards * bucket for bucket in sampler.decode_buckets),
            burst=OVERLAPPED_BURST,
            overlap=True,
        )
    most = WAVES * settings.slots * machine.hosts
    groups = max(min(workload.groups, most // workload.samples), 1)
    played = dataclasses.replace(workload, groups=groups)
    steps = drawn_steps(played)
    rate = slices_workload.tokens(steps[0])[1] / play(machine, settings, steps, played, 0, SEED)
    lengths = f'{workload.prompt} prompt tokens, turns of {workload.written} written and {workload.observed[1]} read'
    line = f'time, simulated: {rate:,.0f} generated tokens/s in rollouts ({lengths}), '
    if parts is None:
        line += f'no hours: not simulated for recipe {config.recipe}'
    else:
        shorter = []
        for part in parts:
            groups = max(min(part.groups, most // part.samples), 1)
            repeat = part.repeat * part.groups / groups
            shorter.append(dataclasses.replace(part, groups=groups, repeat=repeat))
        hours = run_seconds(machine, settings, workload, shorter) / 3600
        digits = 0 if hours >= 10 else 1
        price = hours * planned.machine.dollars
        solver_steps = config.schedule.iterations * config.solver.steps
        line += f'{hours:.{digits}f} hours (about ${price:.0f}) for {solver_steps} solver steps'
    source = 'peak rates'
    if planned.machine.kind in tpu_pages.SLOTS:
        source = "the compiler's estimates"
        if not model.is_compiled:
            source += f' for {tpu_pages.MODEL}, scaled'
    return (
        f'{line}; seconds of rollouts from {source}, of updates from peak rates, none from a run; without transfers of '
        'offload, remote judges, checkpoints, evaluations, compilation'
    )


def row(name: str) -> tuple[str, str, str]:
    """Returns a row of the table."""
    rate, most = rates(MACHINES[name])
    return name, f'{rate:,.0f}', f'{most:,.0f}'


def main(argv: list[str] | None = None) -> None:
    """Plays the workload on every machine, and writes and prints the table."""
    command.parser('slices', __doc__).parse_args(argv)
    text = command.tab_separated(('machine', 'pages', 'bound'), map(row, MACHINES))
    write_text(RESULTS, text)
    print(text, end='')


if __name__ == '__main__':
    main()
