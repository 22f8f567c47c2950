"""Commands in processes that fork from one with the libraries loaded, which takes a tenth of a new one's time."""

import gc
import importlib
import json
import os
import pathlib
import runpy
import sys
import tempfile

from python_process import ROOT, run_python

LIBRARIES = ('zeroplay_jax.evaluation.agent', 'zeroplay_jax.evaluation.report_builder')
LIBRARIES += ('zeroplay_jax.configuration.command_line', 'zeroplay_jax.data.builders')
LIBRARIES += ('benchmarks.slices_play', 'benchmarks.tpu_programs', 'benchmarks.claims_runs')


def load_libraries():
    """Loads what many commands import; collections of garbage in their processes pass over it."""
    for name in LIBRARIES:
        importlib.import_module(name)
    from zeroplay_jax.configuration import fields

    fields.fields_of_all()  # imports all recipes
    gc.freeze()


def run_in_fork(module, words, output):
    """(status, output) of a module that is run as `python -m` does, with the libraries that are loaded here."""
    process = os.fork()
    if not process:
        _run(module, words, output)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), output.read_text(encoding='utf-8')


def _run(module, words, output):
    """Runs a module and ends the process."""
    code = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = [module, *words]
        code = 0
        runpy.run_module(module, run_name='__main__', alter_sys=True)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_all(calls):
    """(status, output) of each call, a module and its words.

    They fork from a process of its own, because the threads of a test process do not survive that.
    """
    code = f'import forked_commands; forked_commands.print_all({json.dumps(calls)!r})'
    printed = run_python('-c', code, PYTHONPATH=f'{ROOT}:{ROOT / "tests"}')
    assert printed.returncode == 0, printed.stderr[-2000:]
    return json.loads(printed.stdout.splitlines()[-1])


def print_all(calls):
    load_libraries()
    with tempfile.TemporaryDirectory() as name:
        output = pathlib.Path(name, 'output')
        print(json.dumps([run_in_fork(*call, output) for call in json.loads(calls)]))
