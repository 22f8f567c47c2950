"""Config fields of the devices and processes of a run; `schema.Run` has them as sections."""

from __future__ import annotations

from typing import Literal

from zeroplay_jax.settings.bounds import MeshAxis, NonNegativeInt, PositiveInt, Section


class Mesh(Section):
    """Devices per mesh axis; -1 for at most one axis: all devices that remain."""

    replica: MeshAxis = 1
    """Replicas of the weights: one or several per process."""
    fsdp: MeshAxis = 1
    """Shards of weights and batch rows."""
    model: MeshAxis = 1
    """Tensor-parallel shards."""


class Distributed(Section):
    """Several processes in one run."""

    mode: Literal['off', 'auto', 'coordinator'] = 'off'
    """off: one process; auto: TPU VMs, SLURM and GKE provide the addresses; coordinator: as below."""
    coordinator: str = ''
    """host:port of process 0."""
    processes: PositiveInt = 1
    """Number of processes; mesh.replica must be a multiple."""
    process: NonNegativeInt = 0
    """Index of this process."""
    heartbeat: PositiveInt = 100
    """Seconds without a sign of life from a process after which the others stop."""
