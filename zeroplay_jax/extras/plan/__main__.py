"""Chooses mesh, slots or pages, rows, kernels and placement of a run on a machine, before there is one.

    zeroplay plan --config=configs/drzero.py --machine=v5litepod-16
    zeroplay plan --config=configs/ssp.py --machine=v5litepod-4 --config.policy.adapters.rank=32
    zeroplay plan --config=configs/drzero.py:small --machine=t4
    zeroplay plan --config=configs/dspo.py --machine=h100x8 --policy=hf://Qwen/Qwen2.5-3B-Instruct

Prints memory by part, time and price, the machine that fits at the least price per hour and what a smaller one takes to
stderr, and to stdout what is chosen: flags for `zeroplay train`, beside those given.

Nothing is downloaded or compiled: of a policy only config.json is read, or its name is known. Machines: v5litepod-4,
v6e-8, v5p-32, t4, l4, rtx4090, h100x8 (GPUs of a host), 2*h100x8 (hosts), cpu:2 (devices).
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from typing import Any

from absl import flags

from zeroplay_jax.configuration import command_line, fields, rules
from zeroplay_jax.configuration.places import read_policy
from zeroplay_jax.extras.plan.machines import CHIPS, GIB, machine
from zeroplay_jax.extras.plan.memory import ERROR, Memory
from zeroplay_jax.extras.plan.planning import (
    advice,
    check_policy,
    choose,
    flags_of,
    given_by_hand,
    policy_of,
    too_small,
)
from zeroplay_jax.settings.kinds import PROMPT_SETS
from zeroplay_jax.types import UserError

_CONFIG = flags.DEFINE_string('config', None, 'The run: a Python file.')
_MACHINE = flags.DEFINE_string('machine', '', 'Where it is to run: v5litepod-4, h100x8, cpu:2.')


def main(argv: list[str]) -> None:
    """Prints the plan of a command."""
    config = command_line.load(_CONFIG.value, argv[1:])
    if not _MACHINE.value:
        raise UserError('--machine is missing; give one such as v5litepod-4, h100x8 or cpu:2')
    target = machine(_MACHINE.value, '--machine')
    if not target.kind:
        raise UserError(
            f'--machine={target.name}: its memory is not known; give one such as v5litepod-8, v6e-8, v5p-16, h100x8, '
            'h200x8 or cpu:8'
        )
    fields.check_values(config)
    check_policy(config)
    if pathlib.Path(policy_of(config)).is_dir():
        read_policy(config)
    given = given_by_hand(config, command_line.changed_fields(argv[1:]))
    planned = choose(config, target, given)
    if planned is None:
        raise UserError(f'--machine={too_small(config, target, given)}')
    _check_rules(config, planned)
    lines = [*_table(planned), _time(config, planned)]
    if target.kind != 'cpu':
        lines.append(advice(config, target, given))
    print('\n'.join(lines), file=sys.stderr)
    print(' '.join(flags_of(config, planned)))


def _check_rules(config: Any, planned: Memory) -> None:
    """Refuses what a run refuses when it has the fields of a plan; files are not read."""
    shaped = config.copy_and_resolve_references()
    shaped.update_from_flattened_dict(
        {name: planned.fields[name] for name in fields.leaves(config)}
    )
    if planned.machine.hosts > 1:
        shaped.distributed.mode = 'auto'
    if shaped.prompts not in PROMPT_SETS:
        shaped.prompts = 'full'
    rules.check(shaped, has_files=False)
    rules.check_shards(shaped, planned.shards, planned.shards // planned.machine.hosts)


def _table(planned: Memory) -> list[str]:
    """Returns the lines of the table of memory."""
    target, rollouts, updates = planned.machine, planned.rollouts, planned.updates
    lines = [f'{target.name}: {target.devices} devices on {target.hosts_text}', '']
    lines.append(f'{"GiB per device":20} rollouts  updates')
    for part in dict.fromkeys((*rollouts, *updates)):
        pair = [parts.get(part, 0) / GIB for parts in (rollouts, updates)]
        if any(pair):
            lines.append(f'{part:20} {pair[0]:8.2f} {pair[1]:8.2f}')
    limit = 'beside libraries and index; within 16 % of a run (benchmarks/results/small.tsv, true_shapes.tsv)'
    if target.kind in CHIPS:
        chip = CHIPS[target.kind]
        if not chip.has_bfloat16:
            lines[1] = (
                f'{target.kind} has no bfloat16: the plan takes float32, because policy.dtype has no float16'
            )
        memory = chip.memory / GIB
        limit = f'of {memory:.2f}; {ERROR:.0%} stay free, because these sums are estimates'
    sums = [sum(parts.values()) / GIB for parts in (rollouts, updates)]
    lines.append(f'{"together":20} {sums[0]:8.2f} {sums[1]:8.2f}  {limit}')
    if planned.fields['offload']:
        state = planned.one['state'] * target.devices / target.hosts / GIB
        lines.append(f'offload: the state of the learners takes {state:.0f} GiB of a host')
    return [*lines, '']


def _time(config: Any, planned: Memory) -> str:
    """Returns tokens per second and hours by the simulator, which a checkout has."""
    if planned.machine.kind == 'cpu':
        return 'time: not simulated for CPUs'
    if importlib.util.find_spec('benchmarks') is None:
        return 'time: simulated in a checkout of the project only'
    from benchmarks.machines import plan_time

    return plan_time.time_of_plan(config, policy_of(config), planned)


if __name__ == '__main__':
    command_line.run_command('zeroplay plan', main)
