"""Folders that come with the package."""

from __future__ import annotations

import filecmp
import os
import pathlib
import re

PACKAGE = pathlib.Path(__file__).parents[1]
# The checkpoint behind policy.path=''.
BUILT_IN_CHECKPOINT = PACKAGE / 'mini' / 'base'
# A small policy that also sets and does open tasks (configs/scope.py:mini).
OPEN_CHECKPOINT = PACKAGE / 'mini' / 'open' / 'base'
# Answers some questions of every hop count: three steps have something to learn (configs/drzero.py:mini).
HOPS_CHECKPOINT = PACKAGE / 'mini' / 'hops' / 'base'
CONFIGS = PACKAGE / 'configs'
# A small policy that reads English, for texts of the user (configs/english.py).
ENGLISH_CHECKPOINT = PACKAGE / 'mini' / 'english' / 'base'
# Fifteen short texts, an example of a user's corpus.
EXAMPLE_TEXTS = PACKAGE / 'mini' / 'texts'
# Files of a policy folder that a run reads; a README may change.
POLICY_SUFFIXES = ('.json', '.safetensors', '.jinja', '.txt')
# Path of a checkpoint or text that some clone or installation of the project brings.
_IN_A_CLONE = re.compile(r'/(?:.*/)?(zeroplay_jax/mini/.+)')


def built_in_name(path: str) -> str:
    """Returns the name of a file or folder that comes with the package, such as 'zeroplay_jax/mini/clean'.

    The name is the same in all clones of the project. A path in a clone that was moved or removed has it, too. Any
    other text is returned as it is.
    """
    match = _IN_A_CLONE.fullmatch(os.path.normpath(path))
    if match is None:
        return path
    local_path = PACKAGE.parent / match[1]
    if not os.path.exists(local_path):
        return path
    # A clone that still exists may have changed its files.
    if os.path.exists(path) and not _has_same_content(path, local_path):
        return path
    return match[1]


def _has_same_content(path: str, local_path: pathlib.Path) -> bool:
    """Returns whether two files, or two folders in the files that a run reads, have the same bytes."""
    if os.path.samefile(path, local_path):
        return True
    if os.path.isfile(path) and local_path.is_file():
        return filecmp.cmp(path, local_path, shallow=False)
    if not (os.path.isdir(path) and local_path.is_dir()):
        return False
    names = _names_of_read_files(path)
    if names != _names_of_read_files(local_path):
        return False
    equal_names, _, _ = filecmp.cmpfiles(path, local_path, names, shallow=False)
    return sorted(equal_names) == names


def _names_of_read_files(folder: str | pathlib.Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(POLICY_SUFFIXES))


def built_in_path(text: str) -> str:
    """Returns the path, in this clone, of what `built_in_name` names; any other text as it is."""
    name = os.path.normpath(built_in_name(text))
    path = PACKAGE.parent / name
    if name.startswith('zeroplay_jax/mini/') and os.path.exists(path):
        return str(path)
    return text
