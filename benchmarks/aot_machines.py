"""Machines without the machines: TPU slices and GPUs for which XLA compiles ahead of time.

XLA's compiler for CUDA is in packages of their own (requirements-gpu-aot.txt): make .venv/gpu-compiler. It compiles
for the description of a GPU that is below. Without a GPU it neither tries out kernels nor reports that memory does not
suffice: the sums of memory are compared with that of the GPU by the cases.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
from jax.experimental import topologies

from benchmarks import tpu_programs, tpu_shapes
from benchmarks.tpu_programs import Compiled
from zeroplay_jax.extras.plan.machines import CHIPS
from zeroplay_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices without the devices.

    Attributes:
      name: 'v5e:4x4', 'h100'.
      host: name of a host, on which a sampler runs.
      memory: bytes of a chip that programs may use.
      devices: all of them, sorted by host.
      host_devices: those of one host as a machine of its own, on which its sampler runs.
      attention: of packed rows, 'splash' or 'blocked'.
      compile: compiles a traced program; raises OutOfMemory.
    """

    name: str
    host: str
    memory: float
    devices: list
    host_devices: list
    attention: str
    compile: Callable[[jax.stages.Lowered], Compiled]


@functools.cache
def machine_of(name: str) -> Machine:
    """Returns a slice or a GPU, whose compiler is set up."""
    return gpu_machine(name) if name in GPUS else tpu_machine(name)


def tpu_machine(topology: str) -> Machine:
    """Returns a slice."""
    devices, _ = tpu_programs.slice_devices(topology)
    host = tpu_shapes.host_of(topology)
    host_devices, _ = tpu_programs.slice_devices(host)
    return Machine(
        name=topology,
        host=host,
        memory=CHIPS[tpu_shapes.generation(topology)].memory,
        devices=devices,
        host_devices=host_devices,
        attention='splash',
        compile=tpu_programs.compile_program,
    )


class Gpu(NamedTuple):
    """A GPU of NVIDIA's Hopper generation.

    Attributes:
      name: as the driver reports it.
      memory: bytes of its memory.
    """

    name: str
    memory: int


GPUS = {
    'h100': Gpu('NVIDIA H100 80GB HBM3', 84929347584),
    'h200': Gpu('NVIDIA H200', 150754820096),
}
# What XLA knows of a GPU that is not there: a text proto of GpuTargetConfigProto, figures of the data sheet.
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""


def prepare(names: Collection[str]) -> None:
    """Sets up the compilers of machines. Call it before JAX runs anything.

    Raises:
      UserError: a compiler is not installed.
    """
    if any(name in GPUS for name in names):
        _prepare_gpu()
    if any(name not in GPUS for name in names):
        tpu_programs.prepare_tpu()


def gpu_compiler() -> pathlib.Path | None:
    """Returns the folder that contains XLA's compiler for CUDA, or None."""
    folder = pathlib.Path(sys.prefix) / 'gpu-compiler'
    return folder if (folder / 'jax_plugins').is_dir() else None


def _prepare_gpu() -> None:
    folder = gpu_compiler()
    if folder is None:
        raise UserError("XLA's compiler for CUDA is not installed: make .venv/gpu-compiler")
    sys.path.append(str(folder))
    os.environ['CUDA_VISIBLE_DEVICES'] = '-1'
    jax.config.update('jax_platforms', 'cpu')


def gpu_machine(name: str) -> Machine:
    """Returns one GPU."""
    gpu = GPUS[name]
    bandwidth = int(CHIPS[name].bandwidth)
    description = _DESCRIPTION.format(**gpu._asdict(), bandwidth=bandwidth)
    topology = topologies.get_topology_desc(
        platform='cuda', target_config=description, topology='1x1x1'
    )
    return Machine(
        name=name,
        host=name,
        memory=CHIPS[name].memory,
        devices=topology.devices,
        host_devices=topology.devices,
        attention='blocked',
        compile=_compile_for_gpu,
    )


def _compile_for_gpu(lowered: jax.stages.Lowered) -> Compiled:
    return tpu_programs.compiled_figures(lowered.compile())
