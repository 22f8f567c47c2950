"""Starts the processes of one run on this machine."""

import os
import socket
import subprocess
import sys

from python_process import FLAGS, ROOT, config_flags

# SSP: a step of it has a proposal, a gate, a check that reads what other episodes found, solves and two updates. The
# solver has rewards and advantages per turn. The replies of who checks are rows, too.
FIELDS = """
    recipe=tests.turn_recipe solver.advantage=turn
    ssp.checker=judge judge.kind=policy judge.tokens=64 reader.samples=3 solver.learning_rate=1e-5
    mesh.replica=2 micro.rows=2 world.train=(0,3) world.evaluation=(0,1) eval.questions=1 eval.hops=(1,)
    proposer.steps=2 solver.steps=2 checkpoint.every=1
    checkpoint.keep=100 solver.top_k=20 proposer.batch=5 log_trajectories=1000 log.writers=()
"""
RUN = ['--config=configs/ssp.py:mini', *config_flags(FIELDS)]
HEARTBEAT = 10


def free_port():
    with socket.socket() as s:
        s.bind(('localhost', 0))
        return s.getsockname()[1]


def processes(command, count, joined):
    """`count` processes with 2 / count devices each; `joined(port, i)` are the arguments that join them."""
    # These runs are short: with optimisation each of the three processes takes 74 seconds of CPU time, without 44.
    flags = f'{FLAGS} --xla_force_host_platform_device_count={2 // count}'
    environment = os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    port, pipes = free_port(), dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return [
        subprocess.Popen(
            [sys.executable, *command, *joined(port, i)], cwd=ROOT, env=environment, **pipes
        )
        for i in range(count)
    ]


def join_flags(port, process):
    """The flags with which one of two processes joins the other."""
    return config_flags(f"""
        distributed.mode=coordinator distributed.coordinator=localhost:{port} distributed.processes=2
        distributed.process={process} distributed.heartbeat={HEARTBEAT}
    """)


def play(workdir, count, *extra):
    words = ['-m', 'zeroplay_jax.main', *RUN, f'--workdir={workdir}', *extra]
    return processes(words, count, join_flags if count > 1 else lambda *_: [])


def processes_of_script(script, *arguments):
    """Two processes that run a script with the port at which they join, their number, and these arguments."""
    return processes(['-c', script], 2, lambda port, i: [str(port), str(i), *arguments])


def finish(running):
    out = [p.communicate(timeout=600)[0] for p in running]
    assert all(p.returncode == 0 for p in running), '\n'.join(text[-2000:] for text in out)
    return out
