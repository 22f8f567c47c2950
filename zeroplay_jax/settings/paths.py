"""Folders that come with the package."""

from __future__ import annotations

import os
import pathlib
import re

PACKAGE = pathlib.Path(__file__).parents[1]
# The checkpoint behind policy.path=''.
BUILT_IN_CHECKPOINT = PACKAGE / 'mini' / 'base'
# A small policy that also sets and does open tasks (configs/scope.py:mini).
OPEN_CHECKPOINT = PACKAGE / 'mini' / 'open' / 'base'
CONFIGS = PACKAGE / 'configs'
# A small policy that reads English, for texts of the user (configs/english.py).
ENGLISH_CHECKPOINT = PACKAGE / 'mini' / 'english' / 'base'
# Fifteen short texts, an example of a user's corpus.
EXAMPLE_TEXTS = PACKAGE / 'mini' / 'texts'
# Path of a checkpoint or text that some clone or installation of the project brings.
_IN_A_CLONE = re.compile(r'/(?:.*/)?(zeroplay_jax/mini/.+)')


def built_in_name(path: str) -> str:
    """Returns the name of a file or folder that comes with the package, such as 'zeroplay_jax/mini/clean'.

    The name is the same in all clones of the project. A path in a clone that was moved or removed has it, too. Any
    other text is returned as it is.
    """
    match = _IN_A_CLONE.fullmatch(path)
    if match is None:
        return path
    local_path = PACKAGE.parent / match[1]
    if not os.path.exists(local_path):
        return path
    # A clone that still exists may have changed its files.
    if os.path.exists(path) and not os.path.samefile(path, local_path):
        return path
    return match[1]


def built_in_path(text: str) -> str:
    """Returns the path, in this clone, of what `built_in_name` names; any other text as it is."""
    name = built_in_name(text)
    path = PACKAGE.parent / name
    if name.startswith('zeroplay_jax/mini/') and os.path.exists(path):
        return str(path)
    return text
