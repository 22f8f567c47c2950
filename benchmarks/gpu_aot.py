"""Compiles the programs of a run with adapters for one GPU, without a GPU.

    python -m benchmarks.gpu_aot --adapters 32
    python -m benchmarks.gpu_aot --adapters 32 --config ssp --gpu h200

XLA's compiler for CUDA is in packages of their own (requirements-gpu-aot.txt): make .venv/gpu-compiler. It compiles
for the description of a GPU that is below. Without a GPU it neither tries out kernels nor reports that memory does not
suffice: the sums of memory are compared with that of the GPU here, and there are no times.

The programs, the columns and the file of results are those of `benchmarks.tpu_aot --adapters`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import sys
from typing import NamedTuple

import jax
from jax.experimental import topologies

from benchmarks import adapter_cases, adapter_tables, tpu_programs
from benchmarks.adapter_cases import Machine
from benchmarks.adapter_tables import SEVERAL, shared_parser
from benchmarks.command import one_line_errors
from benchmarks.tpu_programs import Compiled
from zeroplay_jax.configuration.machines import CHIPS
from zeroplay_jax.types import UserError


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


def compiler_folder() -> pathlib.Path | None:
    """Returns the folder that contains XLA's compiler for CUDA, or None."""
    folder = pathlib.Path(sys.prefix) / 'gpu-compiler'
    return folder if (folder / 'jax_plugins').is_dir() else None


def prepare() -> None:
    """Sets up XLA to compile for CUDA without a GPU. Call it before JAX runs anything.

    Raises:
      UserError: the compiler is not installed.
    """
    folder = compiler_folder()
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
        compile=compile_program,
    )


def compile_program(lowered: jax.stages.Lowered) -> Compiled:
    """Returns the figures of a program but its operations, which XLA does not give without a GPU."""
    return tpu_programs.compiled_figures(lowered.compile())


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = shared_parser('gpu_aot', __doc__, least_rank=1)
    parser.add_argument('--gpu', choices=GPUS, action='append', help=SEVERAL)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Compiles the programs that are not stored, and prints the table."""
    args = parse_arguments(argv)
    with one_line_errors('gpu_aot'):
        prepare()
    machines = [gpu_machine(name) for name in args.gpu or GPUS]
    names = args.config + args.model or adapter_cases.CASES
    cases = list(itertools.product(names, machines))
    adapter_tables.compile_and_print(cases, args)


if __name__ == '__main__':
    main()
