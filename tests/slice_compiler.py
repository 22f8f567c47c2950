"""Runs a script with the TPU compiler in a process of its own, because libtpu allows one user at a time."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def last_line(script, timeout=600):
    """The JSON value of the last line that a Python script prints."""
    environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
    environment.pop('XLA_FLAGS', None)
    result = subprocess.run(
        [sys.executable, '-c', script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])
