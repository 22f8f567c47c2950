"""Commands in processes that fork from one with the libraries loaded, which takes a tenth of a new one's time.

For commands of which a test reads the output. Kills, signals, and whatever must not depend on the seed of hashes or on
what is loaded are tested in processes of their own.
"""

import atexit
import functools
import gc
import importlib
import json
import logging
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings

ROOT = pathlib.Path(__file__).parents[1]
LIBRARIES = """
    zeroplay_jax.run.loop zeroplay_jax.session zeroplay_jax.evaluation.report_builder
    zeroplay_jax.configuration.command_line zeroplay_jax.extras.inputs.builders orbax.checkpoint
    transformers.models.auto.configuration_auto transformers.models.qwen3.configuration_qwen3
    benchmarks.machines.plan_time zeroplay_jax.configs.ablations
""".split()
# Variables that no library reads while it is imported.
READ_LATER = {'XLA_FLAGS', 'PYTEST_ADDOPTS', 'PYTEST_CURRENT_TEST', 'PYTHONPATH', 'NO_COLOR'}
# Set by PyTorch, TensorFlow, JAX (Mosaic) and this project's commands within the tests' process. If they counted as a
# change, every later command would start on its own.
SET_BY_LIBRARIES = {
    'KMP_DUPLICATE_LIB_OK',
    'KMP_INIT_AT_FORK',
    'MOSAIC_GPU_CUDA_ROOT',
    'TORCHINDUCTOR_CACHE_DIR',
    'ENABLE_RUNTIME_UPTIME_TELEMETRY',
    'TF2_BEHAVIOR',
    'TPU_ML_PLATFORM',
    'TPU_ML_PLATFORM_VERSION',
    'XLA_PYTHON_CLIENT_MEM_FRACTION',
}


def load_libraries():
    """Loads what many commands import; collections of garbage in their processes pass over it."""
    from zeroplay_jax.configuration import fields

    for name in LIBRARIES:
        importlib.import_module(name)
    fields.fields_of_all()  # imports all recipes
    gc.freeze()


class Server:
    """A process that forks commands of the package in a folder, and waits for them."""

    def __init__(self, root):
        self._environment = dict(os.environ)
        self._lock = threading.Lock()
        paths = [str(root), str(ROOT / 'tests')]
        code = (
            f'import sys; sys.path[:1] = {paths}; import forked_commands; forked_commands.serve()'
        )
        self._process = subprocess.Popen(
            [sys.executable, '-c', code],
            cwd=root,
            env=os.environ | {'PYTHONPATH': ''},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.stdin.close)

    def takes(self, env):
        """Whether a process with this environment would have loaded the same libraries in the same way."""
        names = env | self._environment
        changed = {name for name in names if env.get(name) != self._environment.get(name)}
        return changed <= READ_LATER | SET_BY_LIBRARIES

    def run(self, words, cwd, env, timeout):
        """`subprocess.CompletedProcess` of `python -m` with these words; nothing is its input."""
        with self._lock, tempfile.TemporaryDirectory() as folder:
            outputs = [pathlib.Path(folder, name) for name in ('out', 'err')]
            call = dict(words=words, cwd=str(cwd), env=env, outputs=list(map(str, outputs)))
            print(json.dumps(call), file=self._process.stdin, flush=True)
            process = int(self._process.stdout.readline())
            killer = threading.Timer(timeout, os.kill, (process, signal.SIGKILL))
            killer.start()
            status = int(self._process.stdout.readline())
            killer.cancel()
            texts = [path.read_text(encoding='utf-8') for path in outputs]
        return subprocess.CompletedProcess([sys.executable, '-m', *words], status, *texts)


@functools.cache
def server_in(root):
    return Server(root)


def server_for(command, cwd, env):
    """What runs this command; None if it has to start on its own."""
    if command[:2] != [sys.executable, '-m']:
        return None
    for folder in map(pathlib.Path, search_path(cwd, env)):
        if (folder / 'zeroplay_jax/main.py').is_file():
            server = server_in(folder.resolve())
            return server if server.takes(env) else None
    return None


def search_path(cwd, env):
    """Where `python -m` looks for modules first."""
    return [str(cwd), *filter(None, env.get('PYTHONPATH', '').split(os.pathsep))]


def serve():
    """Forks a process for every call, a line of the input; answers with its id and, when it ends, with its status."""
    from zeroplay_jax.retrieval.command import import_tensorflow

    # Streams of their own: what libraries print is no answer, and commands find theirs as if new.
    calls, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    warnings.filterwarnings('ignore', '.* found in sys.modules after import', RuntimeWarning)
    import_tensorflow()  # without Keras
    importlib.import_module('scann')
    load_libraries()
    # Absl's, which it adds when it is imported, and again where it is used.
    logging.root.handlers.clear()
    for line in calls:
        process = os.fork()
        if not process:
            play(**json.loads(line))
        print(process, file=answers, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def play(words, cwd, env, outputs):
    """Runs a command in this process as `python -m` does, and ends it."""
    for standard, path in enumerate([os.devnull, *outputs]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), standard)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    # In place of the two paths of this module.
    sys.path[:2] = search_path(cwd, env)
    sys.argv = list(words)
    end_with(words[0])


def end_with(module):
    """Runs a module and ends the process.

    An interpreter that ends frees all that was imported, which takes longer than most refusals; here it ends without.
    """
    code = 1
    try:
        runpy.run_module(module, run_name='__main__', alter_sys=True)
        code = 0
    except SystemExit as ending:
        status = ending.code
        code = status if isinstance(status, int) else int(status is not None)
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # waits for threads that are no daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
