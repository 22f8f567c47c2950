"""Chooses the fields of a config that depend on a machine: mesh, slots or pages, rows, kernels and placement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.configuration.fields import leaves
from zeroplay_jax.extras.plan.machines import CHIPS, GIB, GPUS, Machine, catalog
from zeroplay_jax.extras.plan.memory import ERROR, Memory, Roles, memory_of, roles_of
from zeroplay_jax.extras.plan.sizes import Sizes, sizes_of
from zeroplay_jax.policy.adapter_config import refuse_feed_forward
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT, ConfigError, warn
from zeroplay_jax.types import UserError

_MESH = ('mesh.replica', 'mesh.fsdp', 'mesh.model')
# The fields that are chosen.
PLANNED = (
    *_MESH,
    'policy.dtype',
    'policy.remat',
    'policy.attention',
    'policy.scan',
    'micro.rows',
    'offload',
    'sampler.page',
    'sampler.attention',
    'sampler.slots',
    'sampler.pages',
    'sampler.token_budget',
    'sampler.decode_buckets',
)

_KEPT = ('policy.dtype', 'policy.remat')

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
# Flag without which adapters would be those of experts, too.
_LINEARS_BESIDE_EXPERTS = "--config.policy.adapters.linears=\"('q','k','v','o')\""


class Shapes(NamedTuple):
    """Shapes for a kind of chip.

    Attributes:
      page: tokens of a page.
      budget, buckets: tokens of a step that prefills, and of smaller steps, for a data shard (results/tpu_pages.tsv).
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
    't4': Shapes(64, 128, (32,)),
    'l4': Shapes(64, 256, (32,)),
    'rtx4090': Shapes(64, 512, (64,)),
}


def policy_of(config: Any) -> str:
    """Returns the folder or name of the policy."""
    return config.policy.path or str(BUILT_IN_CHECKPOINT)


def check_policy(config: Any) -> None:
    """Refuses a split of heads, and adapters of experts, that the policy of a run does not allow.

    Raises:
      UserError: one line; also if the sizes of the policy are not known.
    """
    sizes, split = sizes_of(policy_of(config)), config.mesh.model
    if split > 0 and sizes.kv_heads % split:
        raise ConfigError(
            f'config.mesh.model={split}: num_key_value_heads={sizes.kv_heads} is not divisible by it; give a divisor'
        )
    if config.policy.adapters.rank and sizes.experts:
        refuse_feed_forward(config.policy.adapters.linears, 'config.policy.adapters.linears')


def choose(config: Any, target: Machine, given: Collection[str] = ()) -> Memory | None:
    """Returns the memory of a run with the fields that are chosen for a machine; None: it does not fit.

    Args:
      given: names of the fields that stay as they are (`given_by_hand`), but for a -1 of a mesh.

    Raises:
      ConfigError: the given axes of the mesh are not those of the machine.
      UserError: the sizes of the policy are not known.
    """
    if 'mesh.replica' in given:
        config = config.copy_and_resolve_references()
        resolve_mesh(config, target)
    per_host, split = target.devices // target.hosts, config.mesh.model
    if 'mesh.model' in given and per_host % split:
        raise ConfigError(
            f'config.mesh.model={split}: does not divide the {per_host} devices of a host of {target.name}; give a '
            f'divisor of {per_host}'
        )
    sizes, roles, values = sizes_of(policy_of(config)), roles_of(config), leaves(config)
    if target.kind == 'cpu':
        return memory_of(sizes, roles, values | _on_cpu(values, target, given), target)
    # The number of devices is the machine's.
    values['cpu_devices'] = 1
    chip = CHIPS[target.kind]
    limit = (1 - ERROR) * chip.memory
    kept = {name: values[name] for name in given}
    if not chip.has_bfloat16:
        kept['policy.dtype'] = 'float32'
    placements = list(_placements(sizes, roles, values, target, kept))
    tries = [*itertools.product(placements, _ENOUGH)]
    tries += [(placement, few) for few, placement in itertools.product(_FEW, placements)]
    for placement, full in tries:
        chosen = values | placement
        chosen |= _slots(chosen, target, full, 'sampler.slots' in kept) | kept
        memory = memory_of(sizes, roles, chosen, target)
        if memory.peak <= limit:
            return memory
    return None


def _on_cpu(values: dict[str, Any], target: Machine, given: Collection[str]) -> dict[str, Any]:
    """Returns the fields on a CPU: a device per core, and slots whose used positions alone are read."""
    devices = target.devices
    split = values['mesh.model'] if 'mesh.model' in given else 1
    chosen: dict[str, Any] = {'mesh.replica': devices // split, 'mesh.fsdp': 1, 'mesh.model': split}
    if 'mesh.replica' in given:
        chosen |= {name: values[name] for name in _MESH}
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
    sizes: Sizes, roles: Roles, values: dict[str, Any], target: Machine, kept: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields fields of meshes, rows and placements with those in `kept`, the fastest first."""
    is_gpu = target.kind in GPUS
    shapes = SHAPES[target.kind]
    per_host = target.devices // target.hosts
    most = per_host if is_gpu else min(per_host, _MOST_SPLIT)
    most = math.gcd(most, sizes.kv_heads, sizes.vocab_size)
    # On TPUs as in the compiled tables.
    splits = [split for split in (1, 2, 4, 8) if most % split == 0] if is_gpu else [most]
    splits = [kept['mesh.model']] if 'mesh.model' in kept else splits
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
        # Triton compiles for GPUs with compute capability 8.0 and up, which have bfloat16.
        has_pages &= CHIPS[target.kind].has_bfloat16
        # Of slots alone the used positions can be read.
        has_pages &= kept.get('sampler.attention') != 'used'
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
            'sampler.attention': 'ragged' if kept.get('sampler.page', has_pages) else 'xla',
        } | kept


def _slots(values: dict[str, Any], target: Machine, full: int, are_given: bool) -> dict[str, Any]:
    """Returns slots or pages for so many rollouts of full length in a data shard, or for as many as there are."""
    all_shards = values['mesh.replica'] * values['mesh.fsdp']
    page = values['sampler.page']
    shards = all_shards // target.hosts
    shapes = SHAPES[target.kind] if page else Shapes(0, 0, ())
    # The most rollouts of a step.
    sections = [name.removesuffix('.batch') for name in values if name.endswith('.batch')]
    rollouts = max(values[f'{name}.batch'] * values.get(f'{name}.samples', 1) for name in sections)
    wanted = -(-rollouts // all_shards)
    slots = min(full * (_SLOTS_PER_ROLLOUT if page else 1), _MOST_SLOTS, wanted)
    if are_given:
        slots = values['sampler.slots'] // shards
    pages = min(full, slots) * -(-values['sampler.context'] // page) if page else 0
    return {
        'sampler.slots': slots * shards,
        'sampler.pages': pages * shards,
        'sampler.token_budget': shapes.budget * shards,
        'sampler.decode_buckets': tuple(bucket * shards for bucket in shapes.buckets),
    }


def given_by_hand(config: Any, flags: Collection[str] = ()) -> frozenset[str]:
    """Returns the names of the planned fields that a plan leaves as they are.

    They are those that flags set, and those that the config sets to another value than the default. The axes of a mesh
    stay together, but for a size of 'model' alone; where no flag gives one, -1 leaves it to the plan.
    """
    values, defaults = leaves(config), leaves(fields.default_config())
    given = {name for name in PLANNED if name in flags or values[name] not in (defaults[name], -1)}
    axes = given & {*_MESH}
    if axes == {'mesh.model'} and config.mesh.model != -1:
        axes = set()
    return frozenset(given.union(_MESH if axes else ()))


def flags_of(config: Any, planned: Memory) -> list[str]:
    """Returns the flags with which a config gets the fields of a plan; a shell needs no quotes for them."""
    words = []
    for name, value in leaves(config).items():
        chosen = planned.fields[name]
        if chosen != value:
            # A list of one value ends in a comma.
            text = ','.join(map(str, (*chosen, ''))) if isinstance(chosen, tuple) else chosen
            words.append(f'--config.{name}={text}')
    return words


def too_small(config: Any, target: Machine, given: Collection[str] = ()) -> str:
    """Returns the text about a machine for which nothing can be chosen; `given` as of `choose`."""
    what = f'{target.name}: too small for {policy_of(config)} and the roles of this config'
    # A plan takes the dtype of the config, and rematerialises in any case.
    shapes = [name for name in PLANNED if name in given and name not in _KEPT]
    if shapes:
        what += f' with {", ".join(shapes)} as given'
    return f'{what}; {advice(config, target, given)}'


def advice(config: Any, target: Machine, given: Collection[str] = ()) -> str:
    """Returns what fits, with meshes that are chosen anew: the cheapest machine, also with less memory; and `target`.

    Args:
      given: as of `choose`.
    """
    changed, flags = config.copy_and_resolve_references(), ''
    is_fitting = _fits(config, target, given)
    # Machines → the fewest changes with which they fit.
    texts: dict[str, str] = {}
    for name, value in (None, None), *_CHANGES:
        if name is not None:
            if leaves(config)[name] not in (0, 'none'):
                continue
            changed.update_from_flattened_dict({name: value})
            flags += f' --config.{name}={value}'
            if name == 'policy.adapters.rank' and sizes_of(policy_of(config)).experts:
                flags += ' ' + _LINEARS_BESIDE_EXPERTS
        fitting = (choice for choice in catalog() if _fits(changed, choice, given))
        machines = list(itertools.islice(fitting, 1))
        if not is_fitting and _fits(changed, target, given):
            machines.append(target)
        prices = [f'{choice.name} (about ${choice.dollars:.2f} an hour)' for choice in machines]
        if prices:
            texts.setdefault(', '.join(prices), f'the cheapest that fits{flags and " with"}{flags}')
    lines = [f'{what}: {names}' for names, what in texts.items()]
    return '; '.join(lines) or 'no machine that is known fits'


def _fits(config: Any, target: Machine, given: Collection[str]) -> bool:
    """Returns whether a run fits with a mesh of the plan that can split the given rows, slots and pages."""
    planned = choose(config, target, frozenset(given) - {*_MESH})
    if planned is None:
        return False
    shards = planned.shards
    of_host = shards // target.hosts
    parts = {'micro.rows': shards, 'sampler.slots': of_host, 'sampler.pages': of_host}
    return not any(planned.fields[name] % count for name, count in parts.items())


def resolve_mesh(config: ConfigDict, target: Machine) -> None:
    """Replaces the -1 of a mesh by its size on a machine, in place.

    Raises:
      ConfigError: the mesh is not made of all devices, or a replica would span hosts.
    """
    rules.check_free_axes(config)
    fixed = math.prod(size for size in config.mesh.values() if size != -1)
    # At least 1: too many devices are named below.
    free = max(1, target.devices // fixed)
    config.mesh.update({axis: free for axis, size in config.mesh.items() if size == -1})
    required = math.prod(config.mesh.values())
    if required != target.devices:
        text = ', '.join(f'{name[5:]}={leaves(config)[name]}' for name in _MESH)
        raise ConfigError(
            f'config.mesh: {text}: is made of {required} devices, and {target.name} has {target.devices} on '
            f'{target.hosts_text}; give all three, with the product {target.devices}'
        )
    rules.check_replicas(config, target.hosts)


def fit_to(config: ConfigDict, target: Machine) -> None:
    """As `resolve_mesh`; refuses rows, slots and pages, too, that the devices of a machine cannot divide."""
    resolve_mesh(config, target)
    shards = config.mesh.replica * config.mesh.fsdp
    rules.check_shards(config, shards, shards // target.hosts)


def memory_line(config: Any, target: Machine) -> str:
    """Returns how much memory of a machine a run takes as its config has it, '' if that is not known.

    Raises:
      ConfigError: more than a device has, or a split of heads that the policy does not allow.
    """
    if target.kind not in CHIPS:
        return ''
    try:
        sizes = sizes_of(policy_of(config))
    except UserError as error:
        warn(f'--on={target.name}: memory was not checked: {error}')
        return ''
    check_policy(config)
    memory = memory_of(sizes, roles_of(config), leaves(config), target)
    limit = CHIPS[target.kind].memory
    text = f'memory: about {memory.peak / GIB:.1f} GiB of {limit / GIB:.1f} a device'
    if memory.peak > (1 + ERROR) * limit:
        raise ConfigError(
            f'--on={target.name}: {text}; zeroplay plan --machine={target.name} chooses what fits'
        )
    return text
