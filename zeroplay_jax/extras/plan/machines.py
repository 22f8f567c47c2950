"""Machines by their names, before there is one: their devices, and the figures of a device."""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.types import UserError

GIB = 2**30


class Chip(NamedTuple):
    """Peak figures of one TPU chip or GPU, from its data sheet.

    Attributes:
      flops: bfloat16 operations per second; float32 ones without bfloat16.
      bandwidth: bytes per second of its memory.
      memory: bytes that programs may use.
      dollars: price of an hour on demand. Of TPUs the list price of Google Cloud in 2025, of GPUs a rough market price:
        machines are put in order by it.
      has_bfloat16: whether products of bfloat16 are computed; without it a run computes in float32.
    """

    flops: float
    bandwidth: float
    memory: float
    dollars: float
    has_bfloat16: bool = True


CHIPS = {
    'v5e': Chip(197e12, 819e9, 15.75 * GIB, 1.2),
    'v6e': Chip(918e12, 1640e9, 31.25 * GIB, 2.7),
    'v5p': Chip(459e12, 2765e9, 95.0 * GIB, 4.2),
    'h100': Chip(989e12, 3.35e12, 77 * GIB, 3.0),
    'h200': Chip(989e12, 4.8e12, 138 * GIB, 3.8),
    # NVIDIA's data sheet of the T4: 8.1e12 float32 operations. Its tensor cores have float16, which is no policy.dtype.
    't4': Chip(8.1e12, 320e9, 14.5 * GIB, 0.35, False),
    # Data sheet of the L4: 242e12 operations with sparsity, half of it without.
    'l4': Chip(121e12, 300e9, 21.8 * GIB, 0.7),
    # NVIDIA's paper on the Ada architecture: dense bfloat16 with float32 sums.
    'rtx4090': Chip(165e12, 1008e9, 23.2 * GIB, 0.5),
}
GPUS = ('h100', 'h200', 't4', 'l4', 'rtx4090')
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
h100x1 h100x2 h100x4 h100x8 h200x1 h200x2 h200x4 h200x8 t4x1 l4x1 rtx4090x1
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


def machine(name: str, flag: str) -> Machine:
    """Returns a machine by its name: 'v5litepod-16', '2*v5litepod-16', 'h100x8', 'h100', 'cpu:2', '8' or '2*8' devices.

    Args:
      flag: which gave the name, for the error.

    Raises:
      UserError: there is no such machine.
    """
    gpus = '|'.join(GPUS)
    pattern = rf'(?:(\d{{1,4}})\*)?(?:(v\d\w*)-|(cpu):|({gpus})x)?(\d{{1,5}})'
    single = name.rpartition('*')[2]
    match = re.fullmatch(pattern, f'{name}x1' if single in GPUS else name)
    count, size = (int(match[1] or 1), int(match[5])) if match else (0, 0)
    if not match or not count or not size or (match[2] and match[2] not in _TPUS):
        proposed = did_you_mean(single.replace('v5e', 'v5litepod'), _CATALOG.split())
        raise UserError(
            f'{flag}={name}: no such machine; give an accelerator type such as v5litepod-16 or v5p-32, GPUs of a host '
            f'such as h100x8, several of these such as 2*h100x8, or cpu:2{proposed}'
        )
    devices, hosts, kind = size, 1, match[3] or match[4] or ''
    if match[2]:
        devices_per_host, largest_host, units = _TPUS[match[2]]
        devices = size // units
        hosts = 1 if devices <= largest_host else devices // devices_per_host
        if size % units or (devices > largest_host and devices % devices_per_host):
            devices = 0
        kind = match[2].replace('litepod', 'e')
        kind = kind if kind in CHIPS else ''
    offered = _OFFERED.get(kind, (devices,))
    if not devices or devices not in offered:
        raise UserError(f'{flag}={name}: there is no {single}; {_sizes_text(kind)}')
    return Machine(name, count * devices, count * hosts, kind)


def _sizes_text(kind: str) -> str:
    """Returns what to give in place of a machine that is not on offer."""
    if kind in GPUS:
        return f'a host has up to 8 GPUs; give several such as 2*{kind}x8'
    slices = kind.replace('v5e', 'v5litepod')
    names = [name for name in _CATALOG.split() if name.startswith(f'{slices}-')]
    if not names:
        return 'give one such as v5litepod-16'
    return f'there are {", ".join(names)}, and several of these such as 2*{names[-1]}'


def catalog() -> list[Machine]:
    """Returns machines to choose from, the cheapest first."""
    machines = [machine(name, '') for name in _CATALOG.split()]
    return sorted(machines, key=lambda choice: choice.dollars)
