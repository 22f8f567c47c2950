"""Chooses the fields of a config that depend on a machine: mesh, slots or pages, rows, kernels and placement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from zeroplay_jax.configuration.fields import leaves
from zeroplay_jax.configuration.machines import CHIPS, GIB, GPUS, Machine, catalog
from zeroplay_jax.configuration.memory import ERROR, Memory, Roles, memory_of, roles_of
from zeroplay_jax.policy.sizes import Sizes, sizes_of
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT

# Chips over which weights are split at most, on TPUs the chips of a host of a large slice.
_MOST_SPLIT = 4
# Rollouts of full length per data shard that are tried: enough of them in the fastest placement, else the most.
_ENOUGH = (256, 224, 192, 160, 128, 112, 96, 80, 64, 56, 48, 40, 32, 28, 24, 20, 16)
_FEW = (14, 12, 10, 8, 7, 6, 5, 4, 3, 2)
# Slots per rollout of full length that the pages hold: rollouts are shorter. And the most slots of a data shard.
_SLOTS_PER_ROLLOUT, _MOST_SLOTS = 3, 256

# On CPUs: tokens of a prefill call of a device, and of a row from which dense scores would take most of an update.
_PREFILL_TOKENS, _LONG_ROW = 512, 1024

# What makes a run smaller, each with those before it: a field and its value.
_CHANGES = (('policy.adapters.rank', 32), ('policy.adapters.quantize', 'int8'))


class Shapes(NamedTuple):
    """Shapes for a kind of chip.

    Attributes:
      page: tokens of a page.
      budget, buckets: tokens of a step that prefills, and of smaller steps, for a data shard (benchmarks.tpu_pages).
      rows: rows of a micro-batch for a data shard, in the order in which they are tried.
    """

    page: int
    budget: int
    buckets: tuple[int, ...]
    rows: tuple[int, ...] = (1,)


SHAPES = {
    'v5e': Shapes(64, 256, (32,)),
    'v6e': Shapes(64, 512, (64,), (2, 1)),
    'v5p': Shapes(128, 1024, (64, 128, 256), (2, 1)),
    'h100': Shapes(64, 512, (64,)),
    'h200': Shapes(64, 512, (64,)),
}


def policy_of(config: Any) -> str:
    """Returns the folder or name of the policy."""
    return config.policy.path or str(BUILT_IN_CHECKPOINT)


def estimate(config: Any, target: Machine) -> Memory:
    """Returns the memory of a run as its config has it; its mesh is known.

    Raises:
      UserError: the sizes of the policy are not known.
    """
    return memory_of(sizes_of(policy_of(config)), roles_of(config), dict(leaves(config)), target)


def choose(config: Any, target: Machine) -> Memory | None:
    """Returns the memory of a run with the fields that are chosen for a machine; None: it does not fit.

    Raises:
      UserError: the sizes of the policy are not known.
    """
    sizes, roles, values = sizes_of(policy_of(config)), roles_of(config), dict(leaves(config))
    if target.kind == 'cpu':
        return memory_of(sizes, roles, values | _on_cpu(values, target), target)
    limit = (1 - ERROR) * CHIPS[target.kind].memory
    placements = list(_placements(sizes, roles, values, target))
    tries = [*itertools.product(placements, _ENOUGH)]
    tries += [(placement, few) for few, placement in itertools.product(_FEW, placements)]
    for placement, full in tries:
        chosen = values | placement
        chosen |= _slots(chosen, target, full)
        memory = memory_of(sizes, roles, chosen, target)
        if memory.peak <= limit:
            return memory
    return None


def _on_cpu(values: dict[str, Any], target: Machine) -> dict[str, Any]:
    """Returns the fields on a CPU: a device per core, and slots whose used positions alone are read."""
    devices = target.devices
    chosen: dict[str, Any] = {'mesh.replica': devices, 'mesh.fsdp': 1, 'mesh.model': 1}
    # Where rows of bfloat16 are few, XLA multiplies in float32, and keeps a copy of all weights for it during a call.
    chosen['policy.dtype'] = 'float32'
    # Only a loop keeps the backward pass from reading what the first pass computed: XLA's CPU backend merges both.
    chosen['policy.scan'] = values['policy.scan'] or values['policy.remat']
    if values['micro.tokens'] > _LONG_ROW:
        chosen['policy.attention'] = 'blocked'
    # A call computes all of its chunks, however few are there.
    most = max(devices * _PREFILL_TOKENS // values['sampler.chunk'], devices)
    chosen['sampler.fill_rows'] = min(values['sampler.fill_rows'], most)
    for name in ('sampler.slots', 'micro.rows'):
        chosen[name] = -(-values[name] // devices) * devices
    attention = values['sampler.attention'] if values['sampler.page'] else 'used'
    return chosen | {'cpu_devices': devices // target.hosts, 'sampler.attention': attention}


def _placements(
    sizes: Sizes, roles: Roles, values: dict[str, Any], target: Machine
) -> Iterator[dict[str, Any]]:
    """Yields fields of meshes, rows and placements, the fastest first."""
    is_gpu = target.kind in GPUS
    shapes = SHAPES[target.kind]
    per_host = target.devices // target.hosts
    most = per_host if is_gpu else min(per_host, _MOST_SPLIT)
    most = math.gcd(most, sizes.kv_heads, sizes.vocab_size)
    # On TPUs as in the compiled tables.
    splits = [split for split in (1, 2, 4, 8) if most % split == 0] if is_gpu else [most]
    lengths = [values['micro.tokens'], values.get('privileged.tokens', 0) * roles.distills]
    is_splash = not is_gpu and not any(length % 128 for length in lengths)
    # Only adapters were compiled without a loop over the layers, which takes less memory.
    placements = [(False, True), (True, True), (True, False)][: 3 if roles.rank else 2]
    if values['rollout.ahead']:
        placements = [(False, True)]
    for split, rows, (offload, scan) in itertools.product(splits, shapes.rows, placements):
        heads = sizes.kv_heads // split
        # What the kernel for pages takes (policy/ragged_tpu.py).
        has_pages = is_gpu or heads in (1, 2, 4) or heads % 8 == 0
        has_pages &= shapes.page < values['sampler.context'] and not sizes.delta_layers
        yield {
            'policy.dtype': 'bfloat16',
            'policy.remat': True,
            'policy.attention': 'splash' if is_splash else 'blocked',
            'policy.scan': scan,
            'mesh.replica': target.devices // split,
            'mesh.fsdp': 1,
            'mesh.model': split,
            'micro.rows': rows * target.devices // split,
            'offload': offload,
            'sampler.page': shapes.page if has_pages else 0,
            'sampler.attention': 'ragged' if has_pages else 'xla',
        }


def _slots(values: dict[str, Any], target: Machine, full: int) -> dict[str, Any]:
    """Returns slots or pages for so many rollouts of full length in a data shard, or for as many as there are."""
    all_shards, page = values['mesh.replica'], values['sampler.page']
    shards = all_shards // target.hosts
    shapes = SHAPES[target.kind] if page else Shapes(0, 0, ())
    # The most rollouts of a step.
    sections = [name.removesuffix('.batch') for name in values if name.endswith('.batch')]
    rollouts = max(values[f'{name}.batch'] * values.get(f'{name}.samples', 1) for name in sections)
    wanted = -(-rollouts // all_shards)
    slots = min(full * (_SLOTS_PER_ROLLOUT if page else 1), _MOST_SLOTS, wanted)
    pages = min(full, slots) * -(-values['sampler.context'] // page) if page else 0
    return {
        'sampler.slots': slots * shards,
        'sampler.pages': pages * shards,
        'sampler.token_budget': shapes.budget * shards,
        'sampler.decode_buckets': tuple(bucket * shards for bucket in shapes.buckets),
    }


# ---- what is printed ---------------------------------------------------------------------------------


def flags_of(config: Any, planned: Memory) -> list[str]:
    """Returns the flags with which a config gets the fields of a plan; a shell needs no quotes for them."""
    words = []
    for name, value in leaves(config):
        chosen = planned.fields[name]
        if chosen != value:
            # A list of one value ends in a comma.
            text = ','.join(map(str, (*chosen, ''))) if isinstance(chosen, tuple) else chosen
            words.append(f'--config.{name}={text}')
    return words


def table(planned: Memory) -> list[str]:
    """Returns the lines of the table of memory."""
    target, rollouts, updates = planned.machine, planned.rollouts, planned.updates
    hosts = f'{target.hosts} host{"s" if target.hosts > 1 else ""}'
    lines = [f'{target.name}: {target.devices} devices on {hosts}', '']
    lines.append(f'{"GiB per device":20} rollouts  updates')
    for part in dict.fromkeys((*rollouts, *updates)):
        pair = [parts.get(part, 0) / GIB for parts in (rollouts, updates)]
        if any(pair):
            lines.append(f'{part:20} {pair[0]:8.2f} {pair[1]:8.2f}')
    limit = 'beside libraries and index; within 15 % of a run (benchmarks.true_shapes)'
    if target.kind in CHIPS:
        memory = CHIPS[target.kind].memory / GIB
        limit = f'of {memory:.2f}; {ERROR:.0%} stay free, because these sums are estimates'
    sums = [sum(parts.values()) / GIB for parts in (rollouts, updates)]
    lines.append(f'{"together":20} {sums[0]:8.2f} {sums[1]:8.2f}  {limit}')
    if planned.fields['offload']:
        state = planned.one['state'] * target.devices / target.hosts / GIB
        lines.append(f'offload: the state of the learners takes {state:.0f} GiB of a host')
    return [*lines, '']


def cheapest(config: Any, target: Machine) -> str:
    """Returns the cheapest machine that fits, the smallest of the kind of `target`, and what fits with less memory."""
    fitting = [choice for choice in catalog() if choose(config, choice)]
    named = {choice.name: ('the cheapest machine that fits', choice) for choice in fitting[:1]}
    for choice in [choice for choice in fitting if choice.kind == target.kind][:1]:
        named.setdefault(choice.name, (f'the smallest {target.kind}', choice))
    changed = config.copy_and_resolve_references()
    given = 'with'
    for name, value in _CHANGES:
        if dict(leaves(config))[name] in (0, 'none'):
            changed.update_from_flattened_dict({name: value})
            given += f' --config.{name}={value}'
            # The machine that was asked for, if this is what makes it large enough.
            choices = [] if choose(config, target) else [target]
            choices += [
                other for other in catalog() if not fitting or other.dollars < fitting[0].dollars
            ]
            for choice in [choice for choice in choices if choose(changed, choice)][:1]:
                named.setdefault(choice.name, (given, choice))
    texts = [
        f'{what}: {choice.name} (about ${choice.dollars:.2f} an hour)'
        for what, choice in named.values()
    ]
    return '; '.join(texts) or 'no machine that is known fits'
