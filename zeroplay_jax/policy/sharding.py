"""Device meshes and the sharding of every array. No other module makes a mesh.

Mesh axes: 'replica' (hosts), 'fsdp' (batch rows, slots of the sampler, parameter shards), 'model' (attention heads,
feed-forward columns, vocabulary). The weights that a sampler reads are whole within every replica, so that every host
samples without communication with the others; the training state is split over the replicas too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from zeroplay_jax.retrieval.jax_options import all_devices
from zeroplay_jax.types import UserError

AXES = ('replica', 'fsdp', 'model')
# The data axes: rows and slots are split over both.
ROW_AXES = ('replica', 'fsdp')

# (pattern of parameter paths, partition). Every parameter must match exactly one rule.
RULES = (
    (r'embedding', P('model', 'fsdp')),
    (r'head', P('fsdp', 'model')),
    # Column-parallel, then row-parallel: one sum over 'model' per attention and per feed-forward network (Shoeybi et
    # al. 2019, arXiv:1909.08053, §3).
    (r'layer_\d+/(q|k|v|(shared_)?gate|(shared_)?up)/kernel', P('fsdp', 'model')),
    (r'layer_\d+/(o|(shared_)?down)/kernel', P('model', 'fsdp')),
    (r'layer_\d+/(q|k|v)/bias', P('model')),
    # Scales of int8 kernels are split as the outputs (policy/adapters.py).
    (r'layer_\d+/(q|k|v|(shared_)?gate|(shared_)?up)/kernel_scale', P('model')),
    (r'layer_\d+/(o|(shared_)?down)/kernel_scale', P('fsdp')),
    (r'(.*/)?\w*norm/scale', P()),
    # Of an adapter, A is split as the inputs of its kernel and B as the outputs (policy/adapters.py).
    (r'layer_\d+/(q|k|v|gate|up)/lora_a', P('fsdp', None)),
    (r'layer_\d+/(q|k|v|gate|up)/lora_b', P(None, 'model')),
    (r'layer_\d+/(o|down)/lora_a', P('model', None)),
    (r'layer_\d+/(o|down)/lora_b', P(None, 'fsdp')),
    # Gated delta nets are whole on the devices of 'model': the channels of their heads are not neighbours, and to
    # exchange them would hold up other data shards, whose loops have other lengths.
    (
        r'layer_\d+/(in_proj_qkv|in_proj_z|rate|decay|shared_router)/(kernel|lora_a)',
        P('fsdp', None),
    ),
    (r'layer_\d+/out/(kernel|lora_b)', P(None, 'fsdp')),
    (r'layer_\d+/(in_proj_qkv|in_proj_z|rate|decay|shared_router)/(kernel_scale|lora_b)', P()),
    (r'layer_\d+/out/(kernel_scale|lora_a)', P()),
    (r'layer_\d+/(filters|decay_log|decay_bias)', P()),
    (r'adapter_scale', P()),
    # Experts are whole on a device of the 'model' axis (policy/experts.py).
    (r'layer_\d+/moe/router', P('fsdp', None)),
    (r'layer_\d+/moe/(gate|up)', P('model', 'fsdp', None)),
    (r'layer_\d+/moe/down', P('model', None, 'fsdp')),
    (r'layer_\d+/moe/(gate|up)_scale', P('model', None)),
    (r'layer_\d+/moe/down_scale', P('model', 'fsdp')),
    # The output of a value network (learner/value_network.py).
    (r'value/kernel', P('fsdp', None)),
    (r'value/bias', P()),
)

# Meshes


def make_mesh(replica: int = 1, fsdp: int = 1, model: int = 1, devices=None) -> Mesh:
    """Returns a mesh of the first devices, as many as the sizes require.

    Args:
      replica, fsdp, model: sizes of the axes. One of them may be -1: as many as the remaining devices allow.
      devices: devices to choose from; None: all.

    Raises:
      UserError: there are too few devices, or several processes and unused devices.
    """
    if devices is None:
        # Sorted by process, so that with several processes each has whole replicas.
        devices = sorted(all_devices(), key=lambda device: (device.process_index, device.id))
    else:
        devices = list(devices)
    sizes = [replica, fsdp, model]
    if -1 in sizes:
        fixed_sizes = [size for size in sizes if size != -1]
        free_axis = sizes.index(-1)
        free_size = len(devices) // int(np.prod(fixed_sizes))
        # At least 1, so that too few devices are reported as such below.
        sizes[free_axis] = max(free_size, 1)
    required = int(np.prod(sizes))
    processes = jax.process_count()
    if required > len(devices):
        raise UserError(
            f'mesh {_describe(sizes)} needs {required} devices, there are {len(devices)}: '
            'lower config.mesh, or raise config.cpu_devices on a CPU'
        )
    # A process without devices in the mesh could not take part in its computations.
    if processes > 1 and required < len(devices):
        raise UserError(
            f'mesh {_describe(sizes)} over {processes} processes leaves some of {len(devices)} devices unused: '
            'raise config.mesh'
        )
    grid = np.array(devices[:required]).reshape(sizes)
    return _mesh(grid)


def _describe(sizes: list[int]) -> str:
    return str(dict(zip(AXES, sizes)))


def _mesh(grid: np.ndarray) -> Mesh:
    """Returns the mesh of a [replica, fsdp, model] array of devices."""
    # Automatic axes: with explicit ones batched scatters raise and Linen modules fail.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def local_mesh(mesh: Mesh) -> Mesh:
    """Returns the replicas of a mesh that belong to this process; its sampler runs on them.

    None extends over several processes (`configuration.rules.check_replicas`).
    """
    if jax.process_count() == 1:
        return mesh
    local_replicas = []
    for replica in mesh.devices:
        processes_of_replica = {device.process_index for device in replica.flat}
        if processes_of_replica == {jax.process_index()}:
            local_replicas.append(replica)
    return _mesh(np.array(local_replicas))


# Moving arrays


def local_view(tree, mesh: Mesh):
    """Returns the arrays of a global mesh as arrays of this process's `local_mesh`, without a copy.

    The buffers are shared: donating the original invalidates the result.

    Args:
      tree: arrays that are not split over 'replica'.
      mesh: the local mesh.
    """
    if jax.process_count() == 1:
        return tree

    def view(array):
        # The spec does not name 'replica', so each shard has the same slice in the global and in the local mesh.
        target = NamedSharding(mesh, array.sharding.spec)
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, target, shards)

    return jax.tree.map(view, tree)


def to_host(tree):
    """Returns copies of the arrays in host memory that is pinned for their devices. The sharding is unchanged."""
    return _to_memory(tree, 'pinned_host')


def to_device(tree):
    """Returns copies of the arrays in device memory; inverse of `to_host`."""
    return _to_memory(tree, 'device')


def _to_memory(tree, memory_kind: str):
    """Returns copies of the arrays in a kind of memory, with the same partition."""

    def move(array):
        # Moved shard by shard: `device_put` of the whole array would involve the shards of the other processes.
        shards = []
        for shard in array.addressable_shards:
            target = SingleDeviceSharding(shard.device, memory_kind=memory_kind)
            shards.append(jax.device_put(shard.data, target))
        sharding = array.sharding.with_memory_kind(memory_kind)
        return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)

    return jax.tree.map(move, tree)


def put_rows(tree, target: NamedSharding):
    """Returns host arrays as arrays with the sharding `target`; every process passes its own rows (`held_rows`)."""
    if jax.process_count() == 1:
        return jax.device_put(tree, target)

    def place(array):
        return jax.make_array_from_process_local_data(target, array)

    return jax.tree.map(place, tree)


def held_rows(tree, target: NamedSharding):
    """Returns the rows of host arrays, equally many, that this process's devices hold of arrays split by `target`."""
    if jax.process_count() == 1:
        return tree
    num_rows = len(jax.tree.leaves(tree)[0])
    rows = set()
    for index in target.addressable_devices_indices_map((num_rows,)).values():
        rows.update(range(num_rows)[index[0]])
    return jax.tree.map(lambda array: array[sorted(rows)], tree)


def local_rows(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Returns the rows of every array that this process holds, in order; inverse of `put_rows`.

    All arrays are read in one transfer, because each transfer waits for the device.
    """
    if jax.process_count() == 1:
        return jax.device_get(list(arrays))
    shards = jax.device_get([_shards_by_row(array) for array in arrays])
    return [np.concatenate(array_shards) for array_shards in shards]


def _shards_by_row(array: jax.Array) -> list[jax.Array]:
    """Returns the parts of an array on devices of this process, in the order of their rows, each once."""
    # Devices along 'model' hold the same rows.
    shard_of_row = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return [shard_of_row[row] for row in sorted(shard_of_row)]


def to_numpy(array) -> np.ndarray:
    """Returns a whole array in host memory. An array split over processes is gathered: all processes must call this."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


# Parameters


def path_name(path) -> str:
    """Returns a name such as 'layer_0/q/kernel' for a tree path."""
    return jax.tree_util.keystr(path, simple=True, separator='/')


def parameter_spec(name: str) -> P:
    """Returns the partition of a parameter; raises UserError unless exactly one rule matches its name."""
    matching = [spec for pattern, spec in RULES if re.fullmatch(pattern, name)]
    if len(matching) != 1:
        raise UserError(
            f'parameter {name!r} is matched by {len(matching)} sharding rules, must be one: policy/sharding.py RULES'
        )
    return matching[0]


def parameter_sharding(
    name: str, shape: tuple[int, ...], mesh: Mesh, training_layout: bool = False
) -> NamedSharding:
    """Returns the sharding of a parameter.

    Args:
      name: path of the parameter.
      shape: of the whole parameter.
      mesh: of the result.
      training_layout: layout of the training state (master weights, moments, gradients, teacher) instead of the
        sampler's: where the size allows it, axes split over 'fsdp' are split over 'replica' too (ZeRO; Rajbhandari et
        al. 2020, arXiv:1910.02054, §5).

    Raises:
      UserError: not exactly one rule matches, or the mesh does not divide the shape.
    """
    spec = parameter_spec(name)
    for axis, size in zip(spec, shape):
        if axis is not None and size % mesh.shape[axis]:
            raise UserError(
                f'parameter {name!r}: {size} of its shape {shape} is not divisible by mesh axis {axis!r} of '
                f'{mesh.shape[axis]}; choose another config.mesh'
            )
    if training_layout and mesh.shape['replica'] > 1:
        spec = _split_over_replicas(spec, shape, mesh)
    return NamedSharding(mesh, spec)


def _split_over_replicas(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the partition with 'replica' added to 'fsdp' where the size allows it."""
    shards = mesh.shape['replica'] * mesh.shape['fsdp']
    axes = []
    for axis, size in zip(spec, shape):
        # A size that only 'fsdp' divides keeps that split and is replicated over 'replica'.
        if axis == 'fsdp' and size % shards == 0:
            axis = ROW_AXES
        axes.append(axis)
    return P(*axes)


def parameter_shardings(params, mesh: Mesh, training_layout: bool = False):
    """Returns the tree of shardings for a tree of parameters (arrays or shapes), see `parameter_sharding`."""

    def sharding(path, leaf):
        return parameter_sharding(path_name(path), leaf.shape, mesh, training_layout)

    return jax.tree_util.tree_map_with_path(sharding, params)


def check_heads(heads: int, kv_heads: int, model_shards: int) -> None:
    """Raises UserError for a size of the 'model' axis of a mesh that would split a head."""
    for name, count in (('num_attention_heads', heads), ('num_key_value_heads', kv_heads)):
        if count % model_shards:
            raise UserError(
                f"{name}={count} is not divisible by mesh axis 'model' of {model_shards}; choose another config.mesh"
            )


def state_shardings(state, params, mesh: Mesh):
    """Returns the tree of shardings for a training state: optimiser moments, averages of the weights, counters.

    An entry whose path ends with the path of a parameter of the same shape is split as that parameter; every other
    entry is replicated.
    """
    shapes = {}
    shardings = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path)
        shapes[name] = leaf.shape
        shardings[name] = parameter_sharding(name, leaf.shape, mesh, training_layout=True)

    def sharding(path, leaf):
        parts = path_name(path).split('/')
        # Optimisers wrap the tree of parameters in states of their own: the longest matching suffix is the path.
        for start in range(len(parts)):
            suffix = '/'.join(parts[start:])
            if shapes.get(suffix) == leaf.shape:
                return shardings[suffix]
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding, state)


# Activations, batches and the state of a sampler


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that keeps the whole array on every device."""
    return NamedSharding(mesh, P())


def rows(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of batch rows and of sampler slots: the first axis over the data axes."""
    return NamedSharding(mesh, P(ROW_AXES))


def cache(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of the key/value cache: slots over the data axes, heads over 'model'.

    Keys and values differ in their last two axes only (policy/attention.py), so it fits both.
    """
    return NamedSharding(mesh, P(ROW_AXES, 'model'))


def pages(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of the paged cache: pages over the data axes, heads over 'model'."""
    return NamedSharding(mesh, P(ROW_AXES, None, 'model'))


def data_shards(mesh: Mesh) -> int:
    """Returns the number of parts into which rows and slots are split."""
    return mesh.shape['replica'] * mesh.shape['fsdp']


def constrain_rows(
    x: Float[Array, 'batch length hidden_size'], mesh: Mesh
) -> Float[Array, 'batch length hidden_size']:
    """Returns x with its first axis constrained to be split over the data axes."""
    return jax.lax.with_sharding_constraint(x, rows(mesh))


def per_row_and_head(attend: Callable, mesh: Mesh | None) -> Callable:
    """Returns a function that runs `attend(q, k, v, segment)` on every device with its own rows and heads.

    For attention that XLA cannot partition by itself.

    Args:
      attend: function of q, k, v [batch, length, heads, head_dim] and segment [batch, length] to
        [batch, length, heads, head_dim].
      mesh: mesh of the arrays; rows are split over the data axes, heads over 'model'. None: a single device.
    """
    if mesh is None or mesh.size == 1:
        return attend
    row_spec = P(ROW_AXES)
    head_spec = P(ROW_AXES, None, 'model')
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(head_spec, head_spec, head_spec, row_spec),
        out_specs=head_spec,
        check_vma=False,
    )


def is_split(mesh: Mesh | None) -> bool:
    """Returns whether rows are split over several shards; None: no mesh."""
    return mesh is not None and data_shards(mesh) > 1


def on_data_shards(function: Callable, mesh: Mesh | None, in_specs, out_specs) -> Callable:
    """Returns a function that runs `function` on every data shard; the 'model' axis remains with XLA.

    Args:
      function: of trees of arrays.
      mesh: the mesh; None: no mesh.
      in_specs, out_specs: partitions of arguments and results, over the data axes only.
    """
    if not is_split(mesh):
        return function
    # With the check of varying values, differentiating inside of a loop would sum the gradient of what is whole over
    # the shards in every iteration, and a user's loss could not loop over constants such as `jnp.zeros`.
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(ROW_AXES),
        check_vma=False,
    )


def per_model_shard(function: Callable, mesh: Mesh, in_specs, out_specs) -> Callable:
    """Returns a function that runs `function`, a part of a sampler's program, on every device of the 'model' axis.

    Args:
      function: of trees of arrays of a data shard.
      mesh: the mesh.
      in_specs, out_specs: partitions of arguments and results, over 'model' only.
    """
    if mesh.size == 1:
        return function
    # Within the programs of several data shards the data axes are mapped already: the mesh is that of the context, and
    # only the axis 'model' is left.
    context_mesh = jax.sharding.get_abstract_mesh()
    is_mapped = not context_mesh.empty and bool(context_mesh.manual_axes)
    return jax.shard_map(
        function,
        mesh=context_mesh if is_mapped else mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={'model'} if is_mapped else set(AXES),
        check_vma=False,
    )


def per_data_shard(function: Callable, mesh: Mesh, has_params: bool = False) -> Callable:
    """Returns a function that runs `function(*arrays)` on every data shard with its part of all arrays.

    The first axis of every array and result is split over the data axes. Not made for gradients.

    Args:
      function: positional arguments are trees of arrays.
      mesh: the mesh.
      has_params: whether the first argument are weights, which every shard reads whole.
    """

    def run(*arguments):
        specs = [P(ROW_AXES)] * len(arguments)
        if has_params:
            specs[0] = P()
        return on_data_shards(function, mesh, tuple(specs), P(ROW_AXES))(*arguments)

    return run


def whole_on_shards(params, mesh: Mesh):
    """Returns weights as the programs of a sampler read them: whole on every data shard, split over 'model' only.

    Weights that are split over 'fsdp' are copied, because the programs would gather them in every call.
    """
    if mesh.shape['fsdp'] == 1:
        return params
    return jax.device_put(params, sampler_shardings(params, mesh))


def sampler_view(params, mesh: Mesh):
    """Returns the weights of this process's replicas (`local_view`), whole on every data shard."""
    local = local_mesh(mesh)
    return whole_on_shards(local_view(params, local), local)


def sampler_shardings(params, mesh: Mesh):
    """Returns the tree of shardings of `whole_on_shards`."""

    def sharding(path, _):
        axes = [axis if axis == 'model' else None for axis in parameter_spec(path_name(path))]
        return NamedSharding(mesh, P(*axes))

    return jax.tree_util.tree_map_with_path(sharding, params)
