"""The commands by their short names: `zeroplay NAME` runs the module `zeroplay_jax.MODULE`."""

from __future__ import annotations

import pathlib
import shutil
import sys

from zeroplay_jax.extras import EXTRAS

# name → module, in the order in which they are needed.
COMMANDS = {
    'quickstart': 'quickstart',
    'train': 'main',
    'report': 'report',
    'ask': 'ask',
    'evaluate': 'evaluate',
    'compare': 'compare',
    'export': 'export',
    'index': 'retrieval.build',
    'search': 'retrieval.query',
    'serve': 'retrieval.server',
    'sample': 'mini.sample',
    **{name: f'extras.{name}' for name, extra in EXTRAS.items() if extra.is_command},
}


def to_copy(name: str) -> list[str]:
    """Returns the words with which a user of this Python runs a command, from the current folder.

    `zeroplay NAME`, with the folder of the program where a shell would not find it; `PYTHON -m zeroplay_jax.MODULE`
    where the package is not installed.
    """
    python = pathlib.Path(sys.executable)
    program = python.with_name('zeroplay')
    if not program.is_file():
        return [_shown(python), '-m', f'zeroplay_jax.{COMMANDS[name]}']
    found = shutil.which('zeroplay')
    is_found = found is not None and program.samefile(found)
    return ['zeroplay' if is_found else _shown(program), name]


def _shown(path: pathlib.Path) -> str:
    """Returns a relative path, which is easier to read, for one in the current folder."""
    folder = pathlib.Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
