"""Meshes and where every array lies. The one place that makes a mesh.

Axes: 'replica' (hosts), 'fsdp' (batch rows, slots and parameter shards), 'model' (attention heads, feed-forward
columns, vocabulary). What a sampler reads is whole within every replica, so that each host plays without the others;
what an update owns is split over the replicas too.
"""

from __future__ import annotations

import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from zeroplay_jax.types import UserError

AXES = ('replica', 'fsdp', 'model')
ROW_AXES = ('replica', 'fsdp')

# Every parameter is matched by exactly one rule.
RULES = (
    (r'embedding', P('model', 'fsdp')),
    (r'head', P('fsdp', 'model')),
    (r'layer_\d+/(q|k|v|gate|up)/kernel', P('fsdp', 'model')),
    (r'layer_\d+/(o|down)/kernel', P('model', 'fsdp')),
    (r'layer_\d+/(q|k|v)/bias', P('model')),
    (r'(.*/)?\w*norm/scale', P()),
)


def make_mesh(replica: int = 1, fsdp: int = 1, model: int = 1, devices=None) -> Mesh:
    """Mesh of the axes above over the first devices that are enough.

    Args:
      replica, fsdp, model: sizes; one of them may be -1 for all devices that are left.

    Raises:
      UserError: the sizes do not fit the devices there are.
    """
    # By process: with several, each holds whole replicas.
    devices = (
        sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        if devices is None
        else list(devices)
    )
    sizes = [replica, fsdp, model]
    if -1 in sizes:
        known = int(np.prod([s for s in sizes if s != -1]))
        sizes[sizes.index(-1)] = max(len(devices) // known, 1)
    need = int(np.prod(sizes))
    if need > len(devices):
        raise UserError(
            f'mesh {dict(zip(AXES, sizes))} needs {need} devices, there are {len(devices)}: lower config.mesh'
        )
    if jax.process_count() > 1 and need < len(devices):
        raise UserError(
            f'mesh {dict(zip(AXES, sizes))} over {jax.process_count()} processes leaves some of {len(devices)} devices '
            'over: raise config.mesh'
        )
    grid = np.array(devices[:need]).reshape(sizes)
    # Automatic axes: with explicit ones batched scatters raise and Linen modules fail.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def local_mesh(mesh: Mesh) -> Mesh:
    """The replicas of `mesh` that belong to this process: what its sampler runs on.

    Raises:
      UserError: a replica lies on several processes.
    """
    if jax.process_count() == 1:
        return mesh
    if mesh.shape['replica'] % jax.process_count():
        raise UserError(
            f'mesh {dict(mesh.shape)} over {jax.process_count()} processes: config.mesh.replica must be a multiple of '
            'the processes, because each plays on replicas of its own'
        )
    own = [
        row for row in mesh.devices if all(d.process_index == jax.process_index() for d in row.flat)
    ]
    return Mesh(np.array(own), AXES, axis_types=(AxisType.Auto,) * 3)


def local_view(tree, mesh: Mesh):
    """Arrays of the mesh that `local_mesh` was made of, as arrays of that local one; nothing is copied.

    They must not be split over 'replica'. Whoever donates the original takes the view with it.
    """
    if jax.process_count() == 1:
        return tree

    def view(x):
        place = NamedSharding(mesh, x.sharding.spec)
        return jax.make_array_from_single_device_arrays(
            x.shape, place, [s.data for s in x.addressable_shards]
        )

    return jax.tree.map(view, tree)


def to_host(tree):
    """Arrays in the memory of the hosts that is pinned for their devices, split as they were."""
    return _moved(tree, 'pinned_host')


def to_device(tree):
    """Arrays of `to_host` as new ones in the memory of the devices."""
    return _moved(tree, 'device')


def _moved(tree, kind: str):
    def move(x):
        # Shard by shard: no process need know of the shards of others.
        place = lambda shard: SingleDeviceSharding(shard.device, memory_kind=kind)
        shards = [jax.device_put(shard.data, place(shard)) for shard in x.addressable_shards]
        whole = x.sharding.with_memory_kind(kind)
        return jax.make_array_from_single_device_arrays(x.shape, whole, shards)

    return jax.tree.map(move, tree)


def put(tree, place: NamedSharding):
    """Host arrays, the same in every process, as arrays that lie as `place` says."""
    if jax.process_count() == 1:
        return jax.device_put(tree, place)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, place, lambda index: x[index]), tree
    )


def path_name(path) -> str:
    """'layer_0/q/kernel' from a tree path."""
    return '/'.join(str(getattr(p, 'key', getattr(p, 'name', getattr(p, 'idx', p)))) for p in path)


def parameter_spec(name: str) -> P:
    """Partition of the parameter called `name`; an error unless exactly one rule speaks of it."""
    found = [spec for pattern, spec in RULES if re.fullmatch(pattern, name)]
    if len(found) != 1:
        raise UserError(
            f'parameter {name!r} is matched by {len(found)} sharding rules, must be one: policy/sharding.py RULES'
        )
    return found[0]


def parameter_sharding(
    name: str, shape: tuple[int, ...], mesh: Mesh, owned: bool = False
) -> NamedSharding:
    """Where the parameter `name` of that shape lies.

    `owned` is the layout of what an update keeps (masters, moments, gradients, teacher): where it divides, what lies
    over 'fsdp' is split over 'replica' too (ZeRO; Rajbhandari et al. 2020, arXiv:1910.02054, §5).

    Raises:
      UserError: no rule or several speak of it, or its shape does not divide by the mesh.
    """
    spec = parameter_spec(name)
    for axis, size in zip(spec, shape):
        if axis is not None and size % mesh.shape[axis]:
            raise UserError(
                f'parameter {name!r}: {size} of its shape {shape} does not divide by mesh axis {axis!r} of '
                f'{mesh.shape[axis]}; choose another config.mesh'
            )
    replicas = mesh.shape['replica']
    if owned and replicas > 1:
        splits = [
            axis == 'fsdp' and not size % (replicas * mesh.shape['fsdp'])
            for axis, size in zip(spec, shape)
        ]
        spec = P(*(ROW_AXES if split else axis for axis, split in zip(spec, splits)))
    return NamedSharding(mesh, spec)


def parameter_shardings(params, mesh: Mesh, owned: bool = False):
    """Tree of NamedSharding for a parameter tree (arrays or shapes), each as `parameter_sharding` says."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: parameter_sharding(path_name(path), x.shape, mesh, owned), params
    )


def check_heads(heads: int, kv_heads: int, mesh: Mesh) -> None:
    """Refuses a mesh whose 'model' axis would cut through a head."""
    size = mesh.shape['model']
    for name, count in (('num_attention_heads', heads), ('num_key_value_heads', kv_heads)):
        if count % size:
            raise UserError(
                f"{name}={count} does not divide by mesh axis 'model' of {size}; choose another config.mesh"
            )


def state_shardings(state, params, mesh: Mesh):
    """Optimiser state, EMA: what has a parameter's path suffix and shape lies as the parameter, all else everywhere."""
    by_name = {
        path_name(path): (x.shape, parameter_sharding(path_name(path), x.shape, mesh, owned=True))
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }

    def place(path, x):
        parts = path_name(path).split('/')
        for start in range(len(parts)):
            entry = by_name.get('/'.join(parts[start:]))
            if entry and entry[0] == x.shape:
                return entry[1]
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(place, state)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, P())


def rows(mesh: Mesh) -> NamedSharding:
    """Batch rows over all data axes."""
    return NamedSharding(mesh, P(ROW_AXES))


def constrain_rows(x: jax.Array, mesh: Mesh) -> jax.Array:
    """x, its first axis over all data axes."""
    return jax.lax.with_sharding_constraint(x, rows(mesh))


def per_row_shard(function, mesh: Mesh):
    """`function(whole, *rows)` run by every data shard on its own rows; 'model' stays with XLA.

    `whole` is a tree that every shard sees entire, `rows` are arrays [B, …], and so are the results. The gradient of
    `whole` is summed over the shards once, at the end, whatever loops the function runs.
    """
    if mesh.shape['replica'] * mesh.shape['fsdp'] == 1:
        return function

    def local(whole, *rows):
        whole = jax.tree.map(lambda x: jax.lax.pcast(x, ROW_AXES, to='varying'), whole)
        return function(whole, *rows)

    def run(whole, *rows):
        specs = (P(), *(P(ROW_AXES) for _ in rows))
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=P(ROW_AXES), axis_names=set(ROW_AXES)
        )
        return mapped(whole, *rows)

    return run


def slots(mesh: Mesh) -> NamedSharding:
    """Sampler slots over all data axes."""
    return NamedSharding(mesh, P(ROW_AXES))


def cache(mesh: Mesh) -> NamedSharding:
    """Key/value cache: slots over all data axes, heads over 'model' (both orders of policy/attention.py begin S, K)."""
    return NamedSharding(mesh, P(ROW_AXES, 'model'))
