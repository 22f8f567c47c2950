"""What the commands of this folder share: their command line, tables in Markdown, and errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zeroplay_jax.types import UserError

RESULTS = pathlib.Path(__file__).parent / 'results'


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of `python -m benchmarks.NAME`; the description is printed as it is."""
    return argparse.ArgumentParser(
        prog=f'python -m benchmarks.{name}',
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Ends the command with one line and status 2 where the user can mend something."""
    try:
        yield
    except UserError as error:
        print(f'{name}: {error}', file=sys.stderr)
        sys.exit(2)


def line(cells: Iterable[Any]) -> str:
    """Returns a line of a table."""
    return f'| {" | ".join(map(str, cells))} |'


def table(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a table, without a line end behind its last line."""
    rule = '|' + '---|' * len(columns)
    return '\n'.join([line(columns), rule, *map(line, rows)])


def read_lines(path: pathlib.Path) -> list[Any]:
    """Returns the objects of a file of JSON lines."""
    # Texts may contain characters at which `splitlines` splits, too.
    lines = path.read_text(encoding='utf-8').split('\n')
    return [json.loads(text) for text in lines if text]


def cpu_environment() -> dict[str, str]:
    """Returns the environment of a process that computes on one CPU device."""
    return os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}


def free_port() -> int:
    """Returns a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(('localhost', 0))
        return probe.getsockname()[1]
