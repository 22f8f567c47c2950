"""What the commands share: errors of one line, suggested paths, quiet libraries."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import itertools
import logging
import math
import os
import pathlib
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

from . import downloads
from .types import RetrievalError, UserError

_USER_ERROR = 2
# The status of a process that SIGINT ended: 128 + 2.
_INTERRUPTED = 130

# Shorter passages would be pieces of sentences.
_MIN_PASSAGE_WORDS = 20

LOCAL_RESULTS = (
    'results are written to this machine; name a local path, and copy it with gcloud storage cp'
)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises RetrievalError instead of printing its usage and exiting."""

    def __init__(self, **settings: Any):
        # Descriptions and examples are printed as they are.
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(**({'formatter_class': form} | settings))

    def error(self, message: str) -> NoReturn:
        # argparse prints its usage over many lines, which hides the error.
        raise RetrievalError(f'{message}; {self.prog} --help shows how to call it')

    def parse_known_args(self, args=None, namespace=None):
        """Parses as argparse does, and refuses an address in a bucket as the place of results."""
        parsed, unknown = super().parse_known_args(args, namespace)
        # pathlib.Path makes 'gs:/bucket' of 'gs://bucket', which would become a folder here.
        out = str(getattr(parsed, 'out', None) or '')
        if out.startswith('gs:/'):
            self.error(f'--out {out}: {LOCAL_RESULTS}')
        return parsed, unknown


def path_or_packaged(text: str) -> pathlib.Path:
    """Returns the path of a file or folder, also of one that comes with the package. For argparse's `type`."""
    return pathlib.Path(downloads.packaged(text))


def number_type(
    kind: Callable[[str], Any], least: float, most: float = sys.float_info.max
) -> Callable[[str], Any]:
    """Returns a function for argparse's `type` for numbers from `least` to `most`; `kind` converts the text."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        # Comparisons with NaN are false.
        if least <= value <= most:
            return value
        bounds = f'{least} or more' if most == sys.float_info.max else f'{least} to {most}'
        raise argparse.ArgumentTypeError(f'{text!r} is not possible; give a number of {bounds}')

    return parse


def passage_words(text: str) -> int:
    """Returns the number in the text of an option: 0, or at least `_MIN_PASSAGE_WORDS`. For argparse's `type`."""
    if not text.isdecimal() or 0 < int(text) < _MIN_PASSAGE_WORDS:
        message = (
            f'{text!r} words are too few for a passage; give 0, or {_MIN_PASSAGE_WORDS} or more'
        )
        raise argparse.ArgumentTypeError(message)
    return int(text)


def passage_fields(text: str) -> dict[str, str]:
    """Returns {'id', 'text' or 'title': name of the field} of the text of an option. For argparse's `type`."""
    names = {}
    for pair in text.split(','):
        field, _, name = pair.partition('=')
        if field not in ('id', 'text', 'title') or not name or field in names:
            raise argparse.ArgumentTypeError(
                f'{text!r} must name fields of the corpus, such as id=_id,text=passage,title=heading'
            )
        names[field] = name
    return names


FIELDS_HELP = 'names of the fields of a passage, if they are others: id=NAME,text=NAME,title=NAME'


class MessageFormatter(logging.Formatter):
    """Messages of this project, which it gives the root logger, as they are; others after the name of their logger."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.name == 'root' else f'{record.name}: {text}'


def show_messages(level: int = logging.INFO) -> None:
    """Prints messages from a level on to stderr, and of JAX warnings only: it says which accelerators are missing."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(MessageFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger('jax').setLevel(logging.WARNING)


@functools.cache
def warn_once(line: str) -> None:
    """Prints a warning on standard error, once: it is true of many lines of a file, or of files that are read twice."""
    print(f'warning: {line}', file=sys.stderr)


# The line after Ctrl-C of a command that goes on where it was.
RESUMABLE = 'stopped; the same command resumes the work'


def exit_status(
    name: str,
    run: Callable[[], object],
    disk_fix: str = 'correct this and run the same command again',
    stopped: str = 'stopped',
) -> int:
    """Runs a command; returns its exit status: 0, or after one line 2 for a user error and 130 for Ctrl-C.

    Args:
      name: of the command, which begins the line.
      run: the command, the parsing of its arguments included.
      disk_fix: what to do about a full disk, or a missing file or permission.
      stopped: the line after Ctrl-C.
    """
    status = _USER_ERROR
    try:
        run()
        return 0
    except UserError as error:
        line = str(error)
    except OSError as error:
        problem = error.strerror or str(error)
        # A full disk names no file.
        if error.filename:
            problem = f'{error.filename}: {problem}'
        line = f'{problem}; {disk_fix}'
    except KeyboardInterrupt:
        status, line = _INTERRUPTED, stopped
    # stdout may be piped into another program.
    print(f'{name}: {line}', file=sys.stderr)
    return status


def one_line(run: Callable[[], None]) -> None:
    """Runs a command of this package as `exit_status`; an error ends the process."""
    # An index folder is renamed into place only when it is complete.
    fix = 'no incomplete index was left behind: correct this and repeat the command'
    status = exit_status('retrieval', run, fix, RESUMABLE)
    if status:
        sys.exit(status)


# Names of a folder that are compared; a folder may have millions of files.
_MAX_NAMES = 10_000


def similar_path(path: str | pathlib.Path) -> str:
    """Returns '; did you mean PATH?' for a missing path with an existing one of similar spelling, else ''.

    The first missing part of the path is replaced by the most similar name in its folder.
    """
    path = pathlib.Path(path)
    for number in range(len(path.parts)):
        folder = pathlib.Path(*path.parts[:number])
        name = path.parts[number]
        if (folder / name).exists():
            continue
        try:
            names = [entry.name for entry in itertools.islice(folder.iterdir(), _MAX_NAMES)]
        except OSError:
            # No folder, or one that this user may not read.
            return ''
        # Sorted, because the order of a folder depends on the file system.
        for similar_name in difflib.get_close_matches(name, sorted(names)):
            candidate = folder.joinpath(similar_name, *path.parts[number + 1 :])
            if candidate.exists():
                return f'; did you mean {candidate}?'
        return ''
    return ''


# C++ libraries write to the terminal directly, past the logging of Python.
_STDERR = 2  # the file descriptor, which C++ writes to


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides all output of this process to file descriptor 2; if the block raises, prints the hidden output."""
    # Text that Python has buffered was written before the block and must appear.
    sys.stderr.flush()
    terminal = os.dup(_STDERR)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), _STDERR)
        try:
            yield
        except BaseException:
            # The hidden output probably explains the exception.
            hidden.seek(0)
            os.write(terminal, hidden.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, _STDERR)
            os.close(terminal)


# Imported without Keras, which takes a third of the import time and is not used here, and without devices: it only
# tokenizes, searches and logs here, and would reserve all memory of the GPUs.
_LEGACY_KERAS = 'TF_USE_LEGACY_KERAS'
# While ScaNN is imported TensorFlow is hidden: a thread that imports it by itself, and not by `import_tensorflow`,
# would fail in this tenth of a second.
_TENSORFLOW_LOCK = threading.Lock()


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defers Ctrl-C to the end of the block, because what libraries run while they load may swallow the exception."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in came[:1]:
            signal.raise_signal(number)


@functools.cache
def import_scann() -> ModuleType:
    """Returns ScaNN's module for NumPy, without importing TensorFlow.

    ScaNN's package has operations for TensorFlow, too, which are not used here, and goes on where it is not installed:
    so the import takes 0.1 s of a CPU instead of 3.6.
    """
    with _TENSORFLOW_LOCK:
        is_hidden = 'tensorflow' not in sys.modules
        if is_hidden:
            # Python raises ModuleNotFoundError for a module that is None here.
            sys.modules['tensorflow'] = None  # type: ignore[assignment]
        try:
            from scann.scann_ops.py import scann_ops_pybind
        finally:
            if is_hidden:
                del sys.modules['tensorflow']
    return scann_ops_pybind


def import_tensorflow() -> ModuleType:
    """Returns the module `tensorflow`, which takes seconds to import the first time.

    The import loads neither Keras nor the packages that Keras imports, and prints nothing. Every call hides GPUs and
    TPUs from TensorFlow in this process, which other code may have imported before.
    """
    # With the value 1 TensorFlow looks for the package tf_keras instead of keras. tf_keras is rarely installed, and
    # then no Keras is loaded. The variable is restored, because later uses of tf.keras read it again.
    before = os.environ.get(_LEGACY_KERAS)
    os.environ[_LEGACY_KERAS] = '1'
    try:
        with _TENSORFLOW_LOCK, _interrupts_deferred(), quiet():
            import tensorflow

            # Too late, and an error, where other code of this process has used TensorFlow before.
            with contextlib.suppress(RuntimeError):
                for kind in ('GPU', 'TPU'):
                    tensorflow.config.set_visible_devices([], kind)
    finally:
        if before is None:
            del os.environ[_LEGACY_KERAS]
        else:
            os.environ[_LEGACY_KERAS] = before
    return tensorflow
