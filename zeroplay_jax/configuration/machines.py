"""Machines by their names, before there is one: their devices, and the figures of a device."""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.settings.kinds import ConfigError

GIB = 2**30


class Chip(NamedTuple):
    """Peak figures of one TPU chip or GPU, from its data sheet.

    Attributes:
      flops: bfloat16 operations per second.
      bandwidth: bytes per second of its memory.
      memory: bytes that programs may use.
      dollars: price of an hour on demand. Of TPUs the list price of Google Cloud in 2025, of GPUs a rough market price:
        machines are put in order by it.
    """

    flops: float
    bandwidth: float
    memory: float
    dollars: float


CHIPS = {
    'v5e': Chip(197e12, 819e9, 15.75 * GIB, 1.2),
    'v6e': Chip(918e12, 1640e9, 31.25 * GIB, 2.7),
    'v5p': Chip(459e12, 2765e9, 95.0 * GIB, 4.2),
    'h100': Chip(989e12, 3.35e12, 77 * GIB, 3.0),
    'h200': Chip(989e12, 4.8e12, 138 * GIB, 3.8),
}
GPUS = ('h100', 'h200')
# Beginnings of the names that JAX gives devices → their kind; the longest one counts.
_DEVICES = {
    'TPU v5 lite': 'v5e',
    'TPU v5e': 'v5e',
    'TPU v5': 'v5p',
    'TPU v6 lite': 'v6e',
    'TPU v6e': 'v6e',
    'NVIDIA H100': 'h100',
    'NVIDIA H200': 'h200',
    'cpu': 'cpu',
}
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
# Devices of a slice, or GPUs of a host, that are on offer. Those of a v5p are all multiples of a host's.
_OFFERED = {
    **dict.fromkeys(('v5e', 'v6e'), (1, 4, 8, 16, 32, 64, 128, 256)),
    'v5p': range(4, 8961, 4),
    **dict.fromkeys(GPUS, range(1, 9)),
}
# Machines to choose from.
_CATALOG = """
v5litepod-1 v5litepod-4 v5litepod-8 v5litepod-16 v5litepod-32 v5litepod-64 v5litepod-128 v5litepod-256
v6e-1 v6e-4 v6e-8 v6e-16 v6e-32 v6e-64 v6e-128 v6e-256 v5p-8 v5p-16 v5p-32 v5p-64 v5p-128 v5p-256
h100x1 h100x2 h100x4 h100x8 h200x1 h200x2 h200x4 h200x8
"""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices on which a run is to start.

    Attributes:
      name: as the user gave it.
      devices: number of devices as JAX counts them, of all hosts.
      hosts: number of hosts, each with one process.
      kind: key of CHIPS, 'cpu', or '' where only the number of devices is known.
    """

    name: str
    devices: int
    hosts: int
    kind: str = ''

    @property
    def hosts_text(self) -> str:
        """The number of hosts in words."""
        return f'{self.hosts} host{"s" if self.hosts > 1 else ""}'

    @property
    def dollars(self) -> float:
        """Price of an hour; needs a chip that is known."""
        return self.devices * CHIPS[self.kind].dollars


def machine(name: str, flag: str = '--on') -> Machine:
    """Returns a machine by its name: 'v5litepod-16', '2*v5litepod-16', 'h100x8', 'h100', 'cpu:2', '8' or '2*8' devices.

    Args:
      flag: which gave the name, for the error.

    Raises:
      ConfigError: there is no such machine.
    """
    kind = name.rpartition('*')[2]
    full_name = f'{name}x1' if kind in GPUS else name
    gpus = '|'.join(GPUS)
    match = re.fullmatch(
        rf'(?:(\d{{1,4}})\*)?(?:(v\d\w*)-|(cpu):|({gpus})x)?(\d{{1,5}})', full_name
    )
    count = int(match[1] or 1) if match else 0
    size = int(match[5]) if match else 0
    if not match or not count or not size or (match[2] and match[2] not in _TPUS):
        # Of a number of devices no machine is meant.
        names = _CATALOG.split() if kind[:1].isalpha() else ()
        similar = kind.replace('v5e', 'v5litepod')
        sizes = [each for each in names if each.startswith(f'{similar}-')]
        proposed = did_you_mean(similar, names)
        if sizes:
            proposed = f'; of {kind} there are {", ".join(sizes)}'
        raise ConfigError(
            f'{flag}={name}: no such machine; give an accelerator type such as v5litepod-16 or v5p-32, GPUs of a host '
            f'such as h100x8, several of these such as 2*h100x8, or cpu:2{proposed}'
        )
    if not match[2]:
        return Machine(name, count * size, count, match[3] or match[4] or '')
    devices_per_host, largest_host, units = _TPUS[match[2]]
    devices = size // units
    hosts = 1 if devices <= largest_host else devices // devices_per_host
    if size % units or not devices or (devices > largest_host and devices % devices_per_host):
        raise ConfigError(
            f'{flag}={name}: there is no slice of this size; give one such as v5litepod-16'
        )
    kind = match[2].replace('litepod', 'e')
    return Machine(name, count * devices, count * hosts, kind if kind in CHIPS else '')


def check_offered(target: Machine, flag: str) -> None:
    """Refuses slices of sizes that are not on offer, and more GPUs than a host has; `flag` gave the name."""
    count, _, single = target.name.rpartition('*')
    devices = target.devices // int(count or 1)
    if devices in _OFFERED.get(target.kind, (devices,)):
        return
    if target.kind in GPUS:
        fix = f'a host has up to 8 GPUs; give several such as 2*{target.kind}x8'
    else:
        names = [name for name in _CATALOG.split() if machine(name).kind == target.kind]
        fix = f'there are {", ".join(names)}, and several of these such as 2*{names[-1]}'
    raise ConfigError(f'{flag}={target.name}: there is no {single}; {fix}')


def here() -> Machine:
    """Returns the machine of this run; the processes must have met."""
    import jax

    from zeroplay_jax.retrieval.jax_options import all_devices

    devices = all_devices()
    return machine_of(devices[0].device_kind, len(devices), jax.process_count())


def machine_of(device: str, devices: int, hosts: int) -> Machine:
    """Returns the machine with so many devices on all hosts; `device`: what JAX calls one of them."""
    names = [name for name in _DEVICES if device.startswith(name)]
    kind = _DEVICES[max(names, key=len)] if names else ''
    tpu = kind.replace('v5e', 'v5litepod')
    if tpu in _TPUS:
        name = f'{tpu}-{devices * _TPUS[tpu][2]}'
    else:
        name = f'{hosts}*' if hosts > 1 else ''
        name += {'cpu': 'cpu:', '': ''}.get(kind, f'{kind}x') + str(devices // hosts)
    return Machine(name, devices, hosts, kind)


def catalog() -> list[Machine]:
    """Returns machines to choose from, the cheapest first."""
    return sorted(map(machine, _CATALOG.split()), key=lambda choice: choice.dollars)
