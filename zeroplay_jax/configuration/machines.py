"""Devices of a machine by its name, and whether a mesh fits them, before there is such a machine. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
import re

from ml_collections import ConfigDict

from zeroplay_jax.settings.errors import ConfigError

# Chips of a TPU host, by generation, in slices of several hosts; the largest slice with a single host; and how many
# units of the name (chips, or cores of which two are a chip) a device has.
_TPUS = {
    'v2': (8, 8, 1),
    'v3': (8, 8, 1),
    'v4': (4, 4, 2),
    'v5p': (4, 4, 2),
    'v5litepod': (4, 8, 1),
    'v6e': (4, 8, 1),
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices on which a run is to start.

    Attributes:
      name: as the user gave it.
      devices: number of devices as JAX counts them, of all hosts.
      hosts: number of hosts, each with one process.
    """

    name: str
    devices: int
    hosts: int


def machine(name: str) -> Machine:
    """Returns a machine by its name: 'v5litepod-16', '2*v5litepod-16', '8' devices or '2*8' devices on two hosts.

    Raises:
      ConfigError: there is no such machine.
    """
    match = re.fullmatch(r'(?:(\d{1,4})\*)?(?:(v\d\w*)-)?(\d{1,5})', name)
    count = int(match[1] or 1) if match else 0
    size = int(match[3]) if match else 0
    if not match or not count or not size or (match[2] and match[2] not in _TPUS):
        raise ConfigError(
            f'--on={name}: no such machine; give an accelerator type such as v5litepod-16 or v5p-32, a number of '
            'devices, or HOSTS*DEVICES such as 2*8'
        )
    if not match[2]:
        return Machine(name, count * size, count)
    devices_per_host, largest_host, units = _TPUS[match[2]]
    devices = size // units
    hosts = 1 if devices <= largest_host else devices // devices_per_host
    if size % units or not devices or (hosts > 1 and devices % devices_per_host):
        raise ConfigError(
            f'--on={name}: there is no slice of this size; give one such as v5litepod-16'
        )
    return Machine(name, count * devices, count * hosts)


def resolve_mesh(config: ConfigDict, target: Machine) -> None:
    """Replaces the -1 of a mesh by its size on a machine, in place.

    Raises:
      ConfigError: the mesh is not made of all devices, or a replica would span hosts.
    """
    axes = ('replica', 'fsdp', 'model')
    fixed = math.prod(size for size in config.mesh.values() if size != -1)
    # At least 1: too many devices are named below.
    free = max(1, target.devices // fixed)
    sizes = {axis: free if config.mesh[axis] == -1 else config.mesh[axis] for axis in axes}
    text = ', '.join(f'{axis}={size}' for axis, size in sizes.items())
    required = math.prod(sizes.values())
    hosts = f'{target.hosts} host{"s" if target.hosts > 1 else ""}'
    if required != target.devices:
        raise ConfigError(
            f'config.mesh: {text}: is made of {required} devices, and {target.name} has {target.devices} on '
            f'{hosts}; give sizes whose product is {target.devices}, such as '
            f'replica={target.hosts}, fsdp=1, model={target.devices // target.hosts}'
        )
    # Every process rolls out with whole weights.
    if sizes['replica'] % target.hosts:
        raise ConfigError(
            f'config.mesh: {text}: {target.name} has {hosts}, and each samples on replicas of its own; '
            f'give a mesh.replica that is a multiple of {target.hosts}'
        )
    config.mesh.update(sizes)
