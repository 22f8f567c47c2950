"""`python -m zeroplay_jax` lists the commands of the package; each is a module of its own."""

from __future__ import annotations

import ast
import pathlib
import sys

from zeroplay_jax.objectives.registry import did_you_mean

# In the order in which they are needed.
COMMANDS = (
    'quickstart',
    'main',
    'report',
    'ask',
    'evaluate',
    'compare',
    'evolution',
    'export',
    'inputs',
    'retrieval.build',
    'retrieval.query',
    'retrieval.server',
    'mini.sample',
)


def summary(command: str) -> str:
    """Returns the first line about a command, which its module begins with; imports nothing."""
    path = pathlib.Path(__file__).parent / f'{command.replace(".", "/")}.py'
    text = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
    return text.split('\n')[0]


def main(words: list[str]) -> int:
    """Prints the commands; returns the exit status: 2 if a command was given as a word, which has no meaning here."""
    asks_for_help = not words or words[0] in ('-h', '--help')
    if not asks_for_help:
        fix = did_you_mean(words[0], COMMANDS) or '; `python -m zeroplay_jax` lists the commands'
        if words[0] in COMMANDS:
            fix = f'; python -m zeroplay_jax.{words[0]} is the command'
        print(f'zeroplay_jax: {words[0]!r} has no meaning here{fix}', file=sys.stderr)
        return 2
    width = max(map(len, COMMANDS))
    for command in COMMANDS:
        print(f'python -m zeroplay_jax.{command:{width}}  {summary(command)}')
    print('\n--help behind a command shows its flags; docs/index.md says where to begin.')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
