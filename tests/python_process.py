"""Commands in processes of their own, on one CPU device."""

import os
import pathlib
import signal
import subprocess
import sys
import time

from forked_commands import server_for

ROOT = pathlib.Path(__file__).parents[1]
# Programs within the tests' process run a few times, so that they are compiled with little optimisation: the emitters
# of fusions alone take half of XLA's time on CPUs, and a program in one piece takes less of it than in up to 32.
FLAGS = (
    '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false'
    ' --xla_cpu_parallel_codegen_split_count=1'
)
# Those of commands run hundreds of times: without optimisation a `:mini` run takes 60 seconds of CPU time, with it 44,
# and 36 where an earlier command has compiled the same programs.
FAST = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def config_flags(fields):
    """The flags that set fields of a config, from a text of `name=value` words."""
    return [f'--config.{field}' for field in fields.split()]


def start(command, cwd=ROOT, **environment):
    """Starts a command; its output and errors are pipes of text."""
    words = list(map(str, command))
    return subprocess.Popen(words, cwd=cwd, env=os.environ | FAST | environment, **PIPES)


def start_python(*words, cwd=ROOT, **environment):
    """Starts this Python with these arguments."""
    return start([sys.executable, *words], cwd, **environment)


def run_python(*words, cwd=ROOT, timeout=600, fresh=False, **environment):
    """`subprocess.run` of this Python; `fresh`: in a process that loads its libraries itself."""
    command = [sys.executable, *map(str, words)]
    return run(command, cwd, os.environ | FAST | environment, timeout, fresh)


def run(command, cwd, env, timeout=600, fresh=False):
    """`subprocess.run` of a command without input; modules of Python fork from a process with the libraries."""
    server = None if fresh else server_for(command, cwd, env)
    if server:
        return server.run(command[2:], cwd, env, timeout)
    options = dict(cwd=cwd, env=env, timeout=timeout, stdin=subprocess.DEVNULL)
    return subprocess.run(command, **options, **PIPES)


def finish(process, status=0):
    """(output, errors) of a process that has to end with this status."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == status, out[-1000:] + err[-2000:]
    return out, err


def kill(process):
    """Kills a process that is still running."""
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()


def wait_for(condition, *processes, seconds=300):
    """Waits until a condition holds, which these processes bring about."""
    deadline = time.monotonic() + seconds
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
