"""Runs a script with the TPU compiler in a process of its own, because libtpu allows one user at a time."""

import json

from python_process import run_python


def last_line(script, timeout=600):
    """The JSON value of the last line that a Python script prints."""
    result = run_python('-c', script, timeout=timeout, XLA_FLAGS='')
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])
