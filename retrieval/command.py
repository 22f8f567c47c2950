"""Error handling shared by the commands: a user error is one line and status 2, without a traceback."""

from __future__ import annotations

import argparse
import logging
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from . import object_cache
from .types import RetrievalError

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
    return pathlib.Path(object_cache.packaged(text))


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
    names: dict[str, str] = {}
    for pair in text.split(','):
        field, _, name = pair.partition('=')
        if field not in ('id', 'text', 'title') or not name or field in names:
            raise argparse.ArgumentTypeError(
                f'{text!r} must name fields of the corpus, such as id=_id,text=passage,title=heading'
            )
        names[field] = name
    return names


FIELDS_HELP = 'names of the fields of a passage, if they are others: id=NAME,text=NAME,title=NAME'


def show_messages() -> None:
    """Prints what this package reports to stderr, and of JAX warnings only: it says which accelerators are missing."""
    logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stderr)
    logging.getLogger('jax').setLevel(logging.WARNING)


def one_line(run: Callable[[], None]) -> None:
    """Runs a command; a user error ends the process with one line and status 2, Ctrl-C with one line and status 130."""
    try:
        run()
    except RetrievalError as error:
        _end(_USER_ERROR, str(error))
    except OSError as error:
        # A full disk or a missing permission; an index folder is renamed into place only when it is complete.
        reason = f'{error.filename or "writing"}: {error.strerror or error}'
        _end(
            _USER_ERROR,
            f'{reason}; no incomplete index was left behind: correct this and repeat the command',
        )
    except KeyboardInterrupt:
        _end(_INTERRUPTED, 'stopped; the same command resumes the work')


def _end(status: int, line: str) -> NoReturn:
    """Prints one error line and exits."""
    # stdout may be piped into another program.
    print(f'retrieval: {line}', file=sys.stderr)
    sys.exit(status)
