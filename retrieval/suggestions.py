"""Suggests an existing path for one that does not exist."""

from __future__ import annotations

import difflib
import itertools
import pathlib

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
