"""What commands share: whatever their user can mend is one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from .types import RetrievalError


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, raised as RetrievalError for the command to show."""

    def error(self, message: str) -> NoReturn:
        raise RetrievalError(f'{message}; {self.prog} --help shows how to call it')


def one_line(run: Callable[[], None]) -> None:
    """Runs a command; what its user can mend ends it with one line and status 2, Ctrl-C with status 130."""
    try:
        run()
    except RetrievalError as error:
        _end(2, str(error))
    except OSError as error:
        wrong = f'{error.filename or "writing"}: {error.strerror or error}'
        _end(
            2,
            f'{wrong}; nothing half-done counts as an index: mend this and give the same command again',
        )
    except KeyboardInterrupt:
        _end(130, 'stopped; the same command goes on from here')


def _end(status: int, line: str) -> NoReturn:
    print(f'retrieval: {line}', file=sys.stderr)
    sys.exit(status)
