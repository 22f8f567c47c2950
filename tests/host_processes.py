"""Starts the processes of one run on this machine."""

import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
# SSP: a step of it has a proposal, a gate, a check that reads what other episodes found, solves and two updates.
RUN = [
    '--config=configs/ssp.py:mini',
    '--config.mesh.replica=2',
    '--config.micro.rows=2',
    '--config.world.train=(0,3)',
    '--config.world.evaluation=(0,1)',
    '--config.eval.questions=3',
    '--config.checkpoint.every=1',
    '--config.checkpoint.keep=100',
    '--config.proposer.batch=5',
    '--config.log_trajectories=1000',
]
HEARTBEAT = 10


def free_port():
    with socket.socket() as s:
        s.bind(('localhost', 0))
        return s.getsockname()[1]


def processes(command, count, joined):
    """`count` processes with 2 / count devices each; `joined(port, i)` are the arguments that join them."""
    flags = f'--xla_force_host_platform_device_count={2 // count}'
    environment = os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    port, pipes = free_port(), dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return [
        subprocess.Popen(
            [sys.executable, *command, *joined(port, i)], cwd=ROOT, env=environment, **pipes
        )
        for i in range(count)
    ]


def play(workdir, count, *extra):
    def joined(port, i):
        fields = dict(
            mode='coordinator',
            coordinator=f'localhost:{port}',
            processes=2,
            process=i,
            heartbeat=HEARTBEAT,
        )
        return [f'--config.distributed.{k}={v}' for k, v in fields.items()] if count > 1 else []

    return processes(
        ['-m', 'zeroplay_jax.main', *RUN, f'--workdir={workdir}', *extra], count, joined
    )


def finish(running):
    out = [p.communicate(timeout=600)[0] for p in running]
    assert all(p.returncode == 0 for p in running), '\n'.join(text[-2000:] for text in out)
    return out
