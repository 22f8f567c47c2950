"""`zeroplay`, or `python -m zeroplay_jax` where the package is not installed: lists the commands and runs one of them.

Each command is a module of its own: `zeroplay train …` is `python -m zeroplay_jax.main …`.
"""

from __future__ import annotations

import ast
import os
import pathlib
import runpy
import sys

import zeroplay_jax
from zeroplay_jax.commands import COMMANDS
from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.runtime import signals


def summary(command: str) -> str:
    """Returns the first line about a command, which its module begins with; imports nothing."""
    place = pathlib.Path(__file__).parent / COMMANDS[command].replace('.', '/')
    path = place / '__main__.py' if place.is_dir() else place.with_suffix('.py')
    text = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
    return text.split('\n')[0]


def main(words: list[str] | None = None) -> int:
    """Runs a command, or lists all; returns the exit status: 2 for an unknown command.

    Args:
      words: name of the command and its arguments; None: those of the process.
    """
    words = sys.argv[1:] if words is None else words
    # What the package does for `python -m zeroplay_jax.…` while libraries load.
    signals.open_closed()
    signals.end_with_reader()
    if not words or words[0] in ('-h', '--help'):
        width = max(map(len, COMMANDS))
        for name in COMMANDS:
            print(f'zeroplay {name:{width}}  {summary(name)}')
        print('\n--help behind a command shows its flags; docs/index.md says where to begin.')
        print('`python -m zeroplay_jax COMMAND` is the same, installed or not.')
        return 0
    if words[0] == '--version':
        print(f'zeroplay_jax {zeroplay_jax.__version__}')
        return 0
    if words[0] not in COMMANDS:
        fix = did_you_mean(words[0], COMMANDS) or '; `zeroplay` lists the commands'
        print(f'zeroplay_jax: {words[0]!r} is no command{fix}', file=sys.stderr)
        return 2
    # As `python -m` has it, for recipes, rewards and tools in the current folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = COMMANDS[words[0]]
    if module in zeroplay_jax.CTRL_C_WHILE_LOADING:
        signals.exit_while_loading()
    sys.argv[1:] = words[1:]
    runpy.run_module(f'zeroplay_jax.{module}', run_name='__main__', alter_sys=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
