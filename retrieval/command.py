"""What commands share: whatever their user can mend is one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from retrieval.types import RetrievalError


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, raised as RetrievalError for the command to show."""

    def error(self, message: str) -> NoReturn:
        raise RetrievalError(f'{message}; {self.prog} --help shows how to call it')


def one_line(run: Callable[[], None]) -> None:
    """Runs a command; what its user can mend ends it with one line and status 2, Ctrl-C with status 130."""
    try:
        run()
        return
    except RetrievalError as error:
        line, status = str(error), 2
    except OSError as error:
        line, status = f'{error.filename or "writing"}: {error.strerror or error}; nothing half-done counts as an', 2
        line += ' index: mend this and give the same command again'
    except KeyboardInterrupt:
        line, status = 'stopped; the same command goes on from here', 130
    print(f'retrieval: {line}', file=sys.stderr)
    sys.exit(status)
