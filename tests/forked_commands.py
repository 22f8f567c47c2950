"""Commands in processes that fork from one with the libraries loaded, which takes a tenth of a new one's time.

For commands of which a test reads the output. Kills, signals, and whatever must not depend on the seed of hashes or on
what is loaded are tested in processes of their own.
"""

import atexit
import gc
import importlib
import json
import logging
import os
import pathlib
import runpy
import signal
import socket
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
# Set by PyTorch, TensorFlow and this project's commands within the tests' process. If they counted as a change, every
# later command would start on its own.
SET_BY_LIBRARIES = {
    'KMP_DUPLICATE_LIB_OK',
    'KMP_INIT_AT_FORK',
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
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        paths = [str(root), str(ROOT / 'tests')]
        code = f'import sys; sys.path[:1] = {paths}; import forked_commands as forked; '
        code += f'forked.serve({theirs.fileno()})'
        self._process = subprocess.Popen(
            [sys.executable, '-c', code],
            cwd=root,
            env=os.environ | {'PYTHONPATH': ''},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self._connection.close)

    def takes(self, env):
        """Whether a process with this environment would have loaded the same libraries in the same way."""
        names = env | self._environment
        changed = {name for name in names if env.get(name) != self._environment.get(name)}
        return changed <= READ_LATER | SET_BY_LIBRARIES

    def run(self, words, cwd, env, timeout):
        """`subprocess.CompletedProcess` of `python -m` with these words; nothing is its input."""
        call = dict(module=words[0], words=words[1:], cwd=str(cwd), env=env)
        with (
            self._lock,
            open(os.devnull) as empty,
            tempfile.TemporaryFile('w+') as out,
            tempfile.TemporaryFile('w+') as err,
        ):
            descriptors = [file.fileno() for file in (empty, out, err)]
            socket.send_fds(self._connection, [json.dumps(call).encode()], descriptors)
            process = int(self._received(None))
            try:
                status = int(self._received(timeout))
            except TimeoutError:
                os.kill(process, signal.SIGKILL)
                self._received(None)
                raise subprocess.TimeoutExpired(words, timeout) from None
            out.seek(0)
            err.seek(0)
            texts = out.read(), err.read()
        command = [sys.executable, '-m', *words]
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), *texts)

    def _received(self, timeout):
        self._connection.settimeout(timeout)
        text = self._connection.recv(64)
        if not text:
            raise RuntimeError(f'the process that forks commands ended: {self._process.wait()}')
        return text


_SERVERS: dict[pathlib.Path, Server] = {}


def server_for(command, cwd, env):
    """What runs this command; None if it has to start on its own."""
    if command[:2] != [sys.executable, '-m']:
        return None
    folders = map(pathlib.Path, search_path(cwd, env))
    roots = [folder.resolve() for folder in folders if (folder / 'zeroplay_jax/main.py').is_file()]
    if not roots:
        return None
    root = roots[0]
    if root not in _SERVERS:
        _SERVERS[root] = Server(root)
    return _SERVERS[root] if _SERVERS[root].takes(env) else None


def search_path(cwd, env):
    """Where `python -m` looks for modules first."""
    return [str(cwd), *filter(None, env.get('PYTHONPATH', '').split(os.pathsep))]


def serve(descriptor):
    """Forks a process for every call, until nobody can call any more; in such a process it runs the command."""
    from zeroplay_jax.retrieval.command import import_tensorflow

    warnings.filterwarnings('ignore', '.* found in sys.modules after import', RuntimeWarning)
    import_tensorflow()  # without Keras
    importlib.import_module('scann')
    load_libraries()
    # Absl's, which it adds when it is imported, and again where it is used.
    logging.root.handlers.clear()
    with socket.socket(fileno=descriptor) as connection:
        while True:
            text, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 3)
            if not text:
                return
            process = os.fork()
            if not process:
                break
            for received in descriptors:
                os.close(received)
            connection.send(str(process).encode())
            _, status = os.waitpid(process, 0)
            connection.send(str(status).encode())
    call = json.loads(text)
    _take(descriptors)
    os.chdir(call['cwd'])
    os.environ.clear()
    os.environ.update(call['env'])
    # In place of the two paths of this module.
    sys.path[:2] = search_path(call['cwd'], call['env'])
    sys.argv = [call['module'], *call['words']]
    _run(call['module'])


def _take(descriptors):
    """Makes these the standard input, output and errors."""
    for standard, received in enumerate(descriptors):
        os.dup2(received, standard)
        os.close(received)
    # The streams that are there remember what they were opened for.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, 'w', closefd=False)
    sys.stderr = sys.__stderr__ = open(
        2, 'w', buffering=1, errors='backslashreplace', closefd=False
    )


def _run(module):
    """Runs a module as `python -m` does and ends the process.

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
