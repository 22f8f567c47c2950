"""Commands in processes of their own, on one CPU device, compiled as fast as the programs of the tests."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
# Programs of tests run a few times, so that they are compiled with little optimisation: the emitters of fusions alone
# take half of XLA's time on CPUs.
FLAGS = '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false'
FAST = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': FLAGS}


def start_python(*words, cwd=ROOT, **environment):
    """Starts this Python with these arguments; its output and errors are pipes of text."""
    command = [sys.executable, *map(str, words)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=cwd, env=os.environ | FAST | environment, **pipes)


def run_python(*words, cwd=ROOT, timeout=600, **environment):
    """The same until it has ended."""
    command = [sys.executable, *map(str, words)]
    environment = os.environ | FAST | environment
    options = dict(cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    return subprocess.run(command, **options)
