"""Chooses the fields of a config that depend on a machine: mesh, slots or pages, rows, kernels and placement.

`zeroplay_jax.plan` prints a plan; with `config.plan` a run applies it when it begins, and keeps it.
"""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.configuration.fields import leaves
from zeroplay_jax.configuration.machines import CHIPS, GIB, GPUS, Machine, catalog, machine
from zeroplay_jax.configuration.memory import ERROR, Memory, Roles, memory_of, roles_of
from zeroplay_jax.policy.adapter_config import refuse_feed_forward
from zeroplay_jax.policy.sizes import Sizes, sizes_of
from zeroplay_jax.retrieval import objects
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT, ConfigError
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

# Those that a smaller plan, or another machine, may choose otherwise: the dtype of the weights is the policy's.
RESHAPED = tuple(name for name in PLANNED if name != 'policy.dtype')

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
}


def policy_of(config: Any) -> str:
    """Returns the folder or name of the policy."""
    return config.policy.path or str(BUILT_IN_CHECKPOINT)


def knows_policy(config: Any) -> bool:
    """Returns whether the sizes of the policy are known; if not, it is on the Hub, or cannot be used."""
    try:
        sizes_of(policy_of(config))
    except UserError:
        return False
    return True


def check_adapters(config: Any) -> None:
    """Refuses adapters of the experts of a policy whose sizes are known."""
    if config.policy.adapters.rank and sizes_of(policy_of(config)).experts:
        refuse_feed_forward(config.policy.adapters.linears, 'config.policy.adapters.linears')


def estimate(config: Any, target: Machine) -> Memory:
    """Returns the memory of a run as its config has it; its mesh is known.

    Raises:
      UserError: the sizes of the policy are not known.
    """
    return memory_of(sizes_of(policy_of(config)), roles_of(config), leaves(config), target)


def choose(
    config: Any, target: Machine, given: Collection[str] = (), below: float = math.inf
) -> Memory | None:
    """Returns the memory of a run with the fields that are chosen for a machine; None: it does not fit.

    Args:
      given: names of the fields that stay as they are (`given_by_hand`), but for a -1 of a mesh.
      below: most bytes of a device, if less than it has.

    Raises:
      ConfigError: the given axes of the mesh are not those of the machine.
      UserError: the sizes of the policy are not known.
    """
    if 'mesh.replica' in given:
        config = config.copy_and_resolve_references()
        resolve_mesh(config, target)
    check_split(config, target, given)
    sizes, roles, values = sizes_of(policy_of(config)), roles_of(config), leaves(config)
    if target.kind == 'cpu':
        return memory_of(sizes, roles, values | _on_cpu(values, target, given), target)
    # The number of devices is the machine's.
    values['cpu_devices'] = 1
    limit = min((1 - ERROR) * CHIPS[target.kind].memory, below)
    kept = {name: values[name] for name in given}
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


# ---- plans of runs -----------------------------------------------------------------------------------


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


class Kept(NamedTuple):
    """What a plan leaves as it is.

    Attributes:
      given: fields that were set by hand.
      machine: name of the one for which the run that is resumed was planned; '' for a new run.
    """

    given: frozenset[str] = frozenset()
    machine: str = ''


def keep(config: ConfigDict, workdir: str | pathlib.Path, flags: Collection[str] = ()) -> Kept:
    """Gives a config the shapes with which the run in a workdir began, in place; returns what its plan must not change.

    A run that began without a plan goes on without one.

    Args:
      config: checked.
      workdir: folder or address of a run, or ''; without a record that can be read nothing changes.
      flags: as of `given_by_hand`.
    """
    if config.plan == 'off':
        return Kept()
    given = given_by_hand(config, flags)
    if not workdir:
        return Kept(given)
    # Only a run with a plan loads this code.
    from zeroplay_jax.runtime.workdir import local_run

    try:
        folder = local_run(workdir)
        recorded, stored = run_record.read(folder), fields.read_stored_config(folder)
    except UserError:
        return Kept(given)
    if recorded is None or stored is None:
        return Kept(given)
    if not recorded.machine:
        config.plan = 'off'
        return Kept()
    values = leaves(stored)
    # A -1 that was given stands for the size that it had.
    restored = {*PLANNED} - given | {
        f'mesh.{axis}' for axis, size in config.mesh.items() if size == -1
    }
    config.update_from_flattened_dict({name: values[name] for name in restored})
    return Kept(given, recorded.machine)


def apply(config: ConfigDict, target: Machine, kept: Kept) -> list[str]:
    """Gives the config of a new run the fields that are chosen for its machine, in place; returns lines about them.

    On CPUs, and without `config.plan`, nothing changes.

    Raises:
      ConfigError: the machine is too small, or cannot take the shapes of the run that is resumed.
      UserError: the sizes of the policy are not known.
    """
    if config.plan == 'off':
        return []
    if kept.machine and not _takes_shapes_of(target, kept.machine):
        raise ConfigError(
            f'config.plan=auto: the run was planned for {kept.machine}, and this is {target.name}; resume it there, or '
            'begin another run with --from=WORKDIR'
        )
    if kept.machine or target.kind == 'cpu':
        return []
    if not target.kind:
        return [
            f'note: config.plan=auto: the memory of {target.name} is not known, so all shapes are those of the config'
        ]
    planned = choose(config, target, kept.given)
    if planned is None:
        raise ConfigError(f'config.plan=auto: {too_small(config, target, kept.given)}')
    return _take(config, planned)


def _takes_shapes_of(target: Machine, name: str) -> bool:
    """Returns whether a machine takes what was planned for the one of this name."""
    if target.name == name:
        return True
    planned = machine(name)
    if target.kind not in CHIPS and planned.kind not in CHIPS:
        # Nothing was planned.
        return True
    # An H200 takes the shapes of an H100. The same devices have several names.
    kinds = (planned.kind, planned.kind.replace('h100', 'h200'))
    return target.devices == planned.devices and target.kind in kinds


def shrink(config: ConfigDict, target: Machine, kept: Kept, workdir: str) -> str:
    """Takes the next smaller choice for a run that has too little memory in its first steps; returns a line about it.

    The choice is written into the record in the workdir, from which `keep` reads it. '' if there is none: nothing was
    planned, the run has a checkpoint of trained weights, or lies in a bucket.

    Args:
      config: with the plan that was too large.
    """
    from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps

    folder = pathlib.Path(workdir)
    planned = None
    if target.kind in CHIPS and not objects.is_address(workdir):
        planned = choose(config, target, kept.given, (1 - ERROR) * estimate(config, target).peak)
    # Step 0 is an evaluation: the checkpoint before step 1 has the weights with which the run began.
    if planned is None or max(saved_steps(folder / FOLDER), default=0) > 1:
        return ''
    summary = '; '.join(_take(config, planned))
    plain = run_record.plain_config(fields.frozen(config).to_dict())
    folder.mkdir(parents=True, exist_ok=True)
    if run_record.read(folder) is None:
        run_record.write(folder, run_record.Record(plain))
    run_record.update(folder, config=plain, machine=target.name)
    return f'{target.name} has too little memory for the plan; the next smaller one: {summary}'


def forget(config: ConfigDict, planned_for: str) -> None:
    """Gives fields that were planned for a TPU or GPU their defaults, in place: a policy is asked on any machine."""
    if planned_for and machine(planned_for).kind in CHIPS:
        defaults = leaves(fields.default_config())
        config.update_from_flattened_dict({name: defaults[name] for name in RESHAPED})


def too_small(config: Any, target: Machine, given: Collection[str] = ()) -> str:
    """Returns the text about a machine for which nothing can be chosen; `given` as of `choose`."""
    what = f'{target.name}: too small for {policy_of(config)} and the roles of this config'
    # A plan rematerialises in any case.
    shapes = [name for name in RESHAPED if name in given and name != 'policy.remat']
    if shapes:
        what += f' with {", ".join(shapes)} as given'
    axes = [name for name in _MESH if name in given]
    if axes and _fits(config, target, given):
        return f'{what}; leave out {", ".join(axes)}: then it is large enough'
    return f'{what}; {cheapest(config, target, given)}'


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
    axes = ('replica', 'fsdp', 'model')
    fixed = math.prod(size for size in config.mesh.values() if size != -1)
    # At least 1: too many devices are named below.
    free = max(1, target.devices // fixed)
    sizes = {axis: free if config.mesh[axis] == -1 else config.mesh[axis] for axis in axes}
    text = ', '.join(f'{axis}={size}' for axis, size in sizes.items())
    required = math.prod(sizes.values())
    if required != target.devices:
        fsdp, model = sizes['fsdp'], sizes['model']
        if target.devices % (target.hosts * fsdp * model):
            fsdp = model = 1
        raise ConfigError(
            f'config.mesh: {text}: is made of {required} devices, and {target.name} has {target.devices} on '
            f'{target.hosts_text}; give all three, with the product {target.devices}, such as '
            f'replica={target.devices // (fsdp * model)}, fsdp={fsdp}, model={model}'
        )
    config.mesh.update(sizes)
    rules.check_replicas(config, target.hosts)


def check_split(config: ConfigDict, target: Machine, given: Collection[str]) -> None:
    """Refuses a given size of the axis 'model' that does not divide the devices of a host, on which a replica lies."""
    per_host = target.devices // target.hosts
    split = config.mesh.model
    if 'mesh.model' in given and per_host % split:
        raise ConfigError(
            f'config.mesh.model={split}: does not divide the {per_host} devices of a host of {target.name}; give a '
            f'divisor of {per_host}'
        )


# ---- what is printed ---------------------------------------------------------------------------------


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


def _take(config: ConfigDict, planned: Memory) -> list[str]:
    """Gives a config the fields of a plan, in place; returns lines that say what was chosen, and why."""
    chosen, target = planned.fields, planned.machine
    config.update_from_flattened_dict({name: chosen[name] for name in PLANNED})
    slots = f'{chosen["sampler.slots"]} rollouts per host and set of weights'
    if planned.sampler.is_paged:
        slots += f' in {chosen["sampler.pages"]} pages of {chosen["sampler.page"]} tokens'
    parts = [
        'mesh ' + ' · '.join(f'{chosen[name]} {name[5:]}' for name in _MESH),
        f'{slots} ({chosen["sampler.attention"]})',
        f'updates of {chosen["micro.rows"]} rows ({chosen["policy.attention"]})',
    ]
    parts += ["the learners' state in host memory"] * chosen['offload']
    sums = [sum(each.values()) / GIB for each in (planned.rollouts, planned.updates)]
    return [
        f'plan for {target.name} and {policy_of(config)}: {", ".join(parts)}',
        f'shapes that fit: {sums[0]:.1f} GiB of a device in rollouts, {sums[1]:.1f} in updates, of '
        f'{CHIPS[target.kind].memory / GIB:.1f}',
    ]


def table(planned: Memory) -> list[str]:
    """Returns the lines of the table of memory."""
    target, rollouts, updates = planned.machine, planned.rollouts, planned.updates
    lines = [f'{target.name}: {target.devices} devices on {target.hosts_text}', '']
    lines.append(f'{"GiB per device":20} rollouts  updates')
    for part in dict.fromkeys((*rollouts, *updates)):
        pair = [parts.get(part, 0) / GIB for parts in (rollouts, updates)]
        if any(pair):
            lines.append(f'{part:20} {pair[0]:8.2f} {pair[1]:8.2f}')
    limit = 'beside libraries and index; within 16 % of a run (benchmarks.machines.true_shapes)'
    if target.kind in CHIPS:
        memory = CHIPS[target.kind].memory / GIB
        limit = f'of {memory:.2f}; {ERROR:.0%} stay free, because these sums are estimates'
    sums = [sum(parts.values()) / GIB for parts in (rollouts, updates)]
    lines.append(f'{"together":20} {sums[0]:8.2f} {sums[1]:8.2f}  {limit}')
    if planned.fields['offload']:
        state = planned.one['state'] * target.devices / target.hosts / GIB
        lines.append(f'offload: the state of the learners takes {state:.0f} GiB of a host')
    return [*lines, '']


def cheapest(config: Any, target: Machine, given: Collection[str] = ()) -> str:
    """Returns the cheapest machine that fits, the smallest of the kind of `target`, and what fits with less memory.

    Args:
      given: as of `choose`; a mesh is chosen anew.
    """
    fitting = [choice for choice in catalog() if _fits(config, choice, given)]
    of_kind = [choice for choice in fitting if choice.kind == target.kind]
    advice = [
        ('the cheapest per hour that fits', fitting),
        (f'the smallest {target.kind}', of_kind),
    ]
    cheaper = [other for other in catalog() if not fitting or other.dollars < fitting[0].dollars]
    is_enough = _fits(config, target, given)
    changed = config.copy_and_resolve_references()
    flags = ''
    for name, value in _CHANGES:
        if leaves(config)[name] not in (0, 'none'):
            continue
        changed.update_from_flattened_dict({name: value})
        flags += f' --config.{name}={value}'
        if name == 'policy.adapters.rank' and sizes_of(policy_of(config)).experts:
            flags += ' ' + _LINEARS_BESIDE_EXPERTS
        if not is_enough and _fits(changed, target, given):
            is_enough = True
            advice.append((f'large enough with{flags}', [target]))
        enough = (choice for choice in cheaper if _fits(changed, choice, given))
        advice.append((f'the cheapest with{flags}', list(itertools.islice(enough, 1))))
    return _advice_text(advice)


def _advice_text(advice: Iterable[tuple[str, Sequence[Machine]]]) -> str:
    """Returns a line with the first machine of each pair behind its text; no machine is named twice."""
    texts = {}
    for what, choices in advice:
        for choice in choices[:1]:
            texts.setdefault(choice, f'{what}: {choice.name} (about ${choice.dollars:.2f} an hour)')
    return '; '.join(texts.values()) or 'no machine that is known fits'
