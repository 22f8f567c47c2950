"""A launch script in a process of its own, and programs that only pretend."""

import functools
import os
import re
import subprocess
import textwrap

from python_process import ROOT, run_python

LAUNCH = ROOT / 'launch'
RUN = ['--config=configs/drzero.py:mini', "--workdir=/mnt/my share/it's"]
# As many replicas as the machine with the fewest devices has, and the others as shards of them.
RUN += ['--config.mesh.replica=4', '--config.mesh.fsdp=-1', '--config.micro.rows=32']
OPTIONS = {
    'local_2proc': ['--devices', '2', '--port', '23456'],
    'tpu_vm': [
        *'--name zero --zone us-west4-a --type v5litepod-16 --setup'.split(),
        "mount 'a b'",
    ],
    'xpk': '--cluster tpus --name zero --zone us-west4-a --type=v5litepod-16'.split(),
    'slurm': '--nodes 2 --gpus 4 --time 1-12:00:00'.split(),
}


def call(script, *words, path=None, **environment):
    environment = os.environ | {'XLA_FLAGS': ''} | environment
    if path is not None:
        environment['PATH'] = f'{path}:{environment["PATH"]}'
    command = [LAUNCH / f'{script}.sh', *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)


def planned(command):
    """A command of the shell, with the flags of a plan in the place of `$(… plan …)`: plans take long."""
    plan = r'\$\(zeroplay plan ([^)]*)\)'
    return re.sub(plan, lambda match: flags_of_plan(match[1]), command)


# The command, without the simulation of its time, which takes most of it.
PLAN = """
from zeroplay_jax.configuration import command_line
from zeroplay_jax.extras.plan import __main__ as plan
plan._time = lambda *_: ''
command_line.run_command('zeroplay plan', plan.main)
"""


@functools.cache
def flags_of_plan(words):
    done = run_python('-c', PLAN, *words.replace("'", '').split(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fake(folder, program, script):
    path = folder / program
    path.write_text('#!/usr/bin/env bash\n' + textwrap.dedent(script))
    path.chmod(0o755)
    return folder
