"""Commands in processes that fork from one with the libraries loaded, which takes a tenth of a new one's time."""

import atexit
import ctypes
import gc
import importlib
import json
import logging
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import threading
import warnings

ROOT = pathlib.Path(__file__).parents[1]
LIBRARIES = """
    zeroplay_jax.training.loop zeroplay_jax.evaluation.agent zeroplay_jax.evaluation.report_builder
    zeroplay_jax.configuration.command_line zeroplay_jax.data.builders orbax.checkpoint
    benchmarks.slices_play benchmarks.tpu_programs benchmarks.claims_runs
""".split()
# Variables that no library reads while it is imported.
READ_LATER = {
    'XLA_FLAGS',
    'PYTEST_ADDOPTS',
    'PYTEST_CURRENT_TEST',
    'PYTHONPATH',
    'TERM',
    'NO_COLOR',
}
PR_SET_CHILD_SUBREAPER = 36


def load_libraries():
    """Loads what many commands import; collections of garbage in their processes pass over it."""
    from zeroplay_jax.configuration import fields

    for name in LIBRARIES:
        importlib.import_module(name)
    fields.fields_of_all()  # imports all recipes
    gc.freeze()


class Command(subprocess.Popen):
    """`python -m` with these words, in a process that another one forks; a child of this process all the same."""

    def _execute_child(
        self,
        args,
        executable,
        preexec_fn,
        close_fds,
        pass_fds,
        cwd,
        env,
        startupinfo,
        creationflags,
        shell,
        p2cread,
        p2cwrite,
        c2pread,
        c2pwrite,
        errread,
        errwrite,
        *_,
    ):
        given = zip((p2cread, c2pwrite, errwrite), range(3), strict=True)
        descriptors = [standard if given == -1 else given for given, standard in given]
        module, *words = args[2:]
        call = dict(module=module, words=words, cwd=str(cwd), env=dict(env))
        self.pid = _server(root_of(cwd, env)).fork(call, descriptors)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def can_fork(command, cwd, env):
    """Whether a command is `python -m` of a module, in an environment with which the libraries were loaded."""
    is_module = command[:2] == [sys.executable, '-m'] and len(command) > 2
    changed = {name for name in env | os.environ if env.get(name) != os.environ.get(name)}
    return is_module and changed <= READ_LATER and root_of(cwd, env) is not None


def root_of(cwd, env):
    """The folder in which the package is that a command takes; None if it is an installed one."""
    for folder in search_path(cwd, env):
        if pathlib.Path(folder, 'zeroplay_jax', 'main.py').is_file():
            return pathlib.Path(folder).resolve()
    return None


def search_path(cwd, env):
    """Where `python -m` looks for modules first."""
    return [str(cwd), *filter(None, env.get('PYTHONPATH', '').split(os.pathsep))]


class Server:
    """A process that forks commands."""

    def __init__(self, root):
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        paths = [str(root), str(ROOT / 'tests')]
        code = f'import sys; sys.path[:0] = {paths}; import forked_commands; '
        code += f'forked_commands.serve({theirs.fileno()})'
        self._process = subprocess.Popen(
            [sys.executable, '-c', code], cwd=root, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        atexit.register(self._connection.close)

    def fork(self, call, descriptors):
        """The number of a new process with these standard input, output and errors."""
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            # The command loses its parent at once, and this process, which waits for it, takes its place.
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            socket.send_fds(self._connection, [json.dumps(call).encode()], descriptors)
            process = int(self._connection.recv(64))
            prctl(PR_SET_CHILD_SUBREAPER, 0)
            return process


_SERVERS: dict[pathlib.Path, Server] = {}


def _server(root):
    if root not in _SERVERS:
        _SERVERS[root] = Server(root)
    return _SERVERS[root]


def serve(descriptor):
    """Forks a process for every call, until nobody can call any more; in such a process it runs the command."""
    warnings.filterwarnings('ignore', '.* found in sys.modules after import', RuntimeWarning)
    from zeroplay_jax.runtime.log import _import_metric_writers

    _import_metric_writers()  # TensorFlow, without Keras
    importlib.import_module('scann')
    load_libraries()
    # Absl's, which it adds when it is imported, and again where it is used.
    logging.root.handlers.clear()
    with socket.socket(fileno=descriptor) as connection:
        while True:
            text, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 3)
            if not text:
                return
            process = _fork_orphan()
            if not process:
                break
            connection.send(str(process).encode())
            for given in descriptors:
                os.close(given)
    call = json.loads(text)
    _take(descriptors)
    os.chdir(call['cwd'])
    os.environ.clear()
    os.environ.update(call['env'])
    sys.path[:2] = search_path(call['cwd'], call['env'])
    sys.argv = [call['module'], *call['words']]
    runpy.run_module(call['module'], run_name='__main__', alter_sys=True)


def _take(descriptors):
    """Makes these the standard input, output and errors."""
    for standard, given in enumerate(descriptors):
        os.dup2(given, standard)
        os.close(given)
    # The streams that are there remember what they were opened for.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, 'w', closefd=False)
    sys.stderr = sys.__stderr__ = open(
        2, 'w', buffering=1, errors='backslashreplace', closefd=False
    )


def _fork_orphan():
    """The number of a process that has lost its parent; 0 in that process."""
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        process = os.fork()
        if not process:
            os.close(reading)
            os.close(writing)
            return 0
        os.write(writing, str(process).encode())
        os._exit(0)
    os.waitpid(between, 0)
    process = int(os.read(reading, 64))
    os.close(reading)
    os.close(writing)
    return process


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
