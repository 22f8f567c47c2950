"""Seconds and price of a run with the settings of a plan: its rollouts are played without a device.

The rules of the scheduler are played call by call; `costs` says what a call costs, benchmarks/README.md what is
simulated and what is assumed. `zeroplay_jax.extras.plan` prints it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.machines import costs
from benchmarks.machines import workload as workloads
from benchmarks.machines.costs import CallCosts, MachineCosts, Settings
from benchmarks.machines.engines import Device, Engine, Group, Tools
from benchmarks.machines.workload import Part, Workload
from zeroplay_jax.extras.plan.memory import Memory

# Seed of lengths and latencies.
SEED = 1
# For a plan as many rollouts are played as fill all slots so often, which stand for the others.
WAVES = 4
# Steps of a decode call that the host reads while the next one runs: calls are short, because the device does not wait
# for the host between them.
OVERLAPPED_BURST = 4
# Tool calls that run beside each other.
TOOL_THREADS = 16


def play(
    machine: MachineCosts, settings: Settings, groups: Sequence[Group], workload: Workload
) -> float:
    """Plays the groups of a step, which are dealt out to the hosts in turn; returns the seconds of the slowest host."""
    call_costs = CallCosts(machine, settings)
    seconds = []
    for host in range(machine.hosts):
        tools = Tools(workload.latencies((SEED, host)), TOOL_THREADS)
        engine = Engine(Device(settings, call_costs), tools)
        share = groups[host :: machine.hosts]
        for group in share:
            engine.add(group)
        seconds.append(_seconds(engine, sum(len(group.episodes) for group in share)))
    return max(seconds)


def _seconds(engine: Engine, rollouts: int) -> float:
    """Returns the seconds in which an engine ends so many rollouts."""
    now = 0.0
    while engine.ended < rollouts:
        ended = engine.ended
        seconds = engine.round(now)
        now += seconds
        if seconds or engine.ended > ended:
            continue
        if engine.tools.next_end is None:
            raise RuntimeError('a rollout can never be served: the cache is too small for it')
        now = engine.tools.next_end
    return now


def run_seconds(
    machine: MachineCosts, settings: Settings, workload: Workload, parts: Sequence[Part]
) -> float:
    """Returns the seconds of the rollouts of parts, of their updates and of their exchange."""
    total = trained = scored = rollouts = 0.0
    for part in parts:
        part_workload = workloads.part_workload(workload, part)
        groups = part_workload.draw(SEED)
        # A part's turns may be longer than the config's.
        turn_tokens = max(settings.turn_tokens, part_workload.turn_tokens)
        part_settings = dataclasses.replace(settings, turn_tokens=turn_tokens)
        rollout_seconds = play(machine, part_settings, groups, part_workload)
        total += rollout_seconds * part.repeat
        part_rollouts = part.groups * part.samples
        rollouts += part_rollouts * part.repeat
        if part.trained:
            tokens = sum(workloads.tokens(groups))
            trained += tokens * part.repeat
            extra_tokens = part.extra_scored * part_rollouts
            scored += part.scored * (tokens + extra_tokens) * part.repeat
    total += machine.update_seconds(round(trained), round(scored))
    return total + machine.exchange_seconds(round(rollouts))


def time_of_plan(config: Any, policy: str, planned: Memory) -> str:
    """Returns tokens per second, hours and price of a run with the fields of a plan, in a line."""
    if 'solver' not in config:
        return f'time: not simulated for recipe {config.recipe}'
    model = costs.model_of(policy)
    machine = costs.of_plan(planned, model)
    workload, parts = workloads.from_config(config, Workload().latency)
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
    drawn = played.draw(SEED)
    rate = workloads.tokens(drawn)[1] / play(machine, settings, drawn, played)
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
    if planned.machine.kind in costs.COMPILED_SLOTS:
        source = "the compiler's estimates"
        if not model.is_compiled:
            source += f' for {costs.MODEL}, scaled'
    return (
        f'{line}; seconds of rollouts from {source}, of updates from peak rates, none from a run; without transfers of '
        'offload, remote judges, checkpoints, evaluations, compilation'
    )
