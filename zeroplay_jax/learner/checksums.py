"""Checksums of a checkpoint: SHA-256 of all its files, written before it gets its name and compared before it is read.

`checksums.sha256` in the folder of a step has the format of the program of that name, so that
`sha256sum --check checksums.sha256` in that folder compares them by hand.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import shutil
from collections.abc import Mapping

from orbax.checkpoint.path import atomicity

from zeroplay_jax.runtime.digests import file_digests

FILE_NAME = 'checksums.sha256'
# One line of the file; any flipped bit breaks it, or names another hash or file.
_LINE = re.compile(r'([0-9a-f]{64})  (.+)')


class SealedTemporaryPath(atomicity.AtomicRenameTemporaryPath):
    """The temporary folder of a step: its checksums are written before it gets its final name.

    A step without checksums, of a process that was killed between the two, can therefore not exist.
    """

    async def finalize(self) -> None:
        """Completes the folder, writes its checksums and renames it."""
        final = self.get_final()
        # Orbax uses this class for the items inside a step as well, which have names.
        if not final.name.isdigit():
            await super().finalize()
            return
        # Orbax writes its last file and renames in one function. It is given a name that counts as temporary, too.
        complete = final.parent / f'{self.get().name}.complete'
        # Of a process that was killed while it hashed.
        await asyncio.to_thread(shutil.rmtree, complete, ignore_errors=True)
        self._final_path = complete
        await super().finalize()
        self._final_path = final
        await asyncio.to_thread(write, pathlib.Path(os.fspath(complete)))
        os.rename(complete, final)


def write(folder: pathlib.Path) -> None:
    """Writes the checksums of all files in a folder; reads every byte."""
    names = _names(folder)
    digests = file_digests([folder / name for name in names])
    write_digests(folder, dict(zip(names, digests, strict=True)))


def write_digests(folder: pathlib.Path, digests: Mapping[str, str]) -> None:
    """Writes the file of checksums; `digests`: path in the folder → SHA-256."""
    lines = [f'{digest}  {name}\n' for name, digest in sorted(digests.items())]
    with (folder / FILE_NAME).open('w', encoding='utf-8', newline='\n') as file:
        file.writelines(lines)
        # The rename that follows must not reach the disk before the content.
        file.flush()
        os.fsync(file.fileno())


def exist(folder: pathlib.Path) -> bool:
    """Returns whether a folder has checksums; steps of earlier versions have none."""
    return (folder / FILE_NAME).is_file()


def read(folder: pathlib.Path) -> dict[str, str] | None:
    """Returns path → SHA-256 of all files in a folder, as its checksums say; None if these are damaged.

    Raises:
      OSError, UnicodeDecodeError: the file cannot be read.
    """
    text = (folder / FILE_NAME).read_text(encoding='utf-8')
    if not text.endswith('\n'):
        return None
    digests = {}
    # Lines end in a line feed only; `splitlines` would accept other characters.
    for line in text[:-1].split('\n'):
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        digests[match[2]] = match[1]
    return digests


def find_damage(folder: pathlib.Path, part: int = 0, parts: int = 1) -> str:
    """Returns the first difference between a folder and its checksums in words; '' if there is none.

    Args:
      folder: folder of a step.
      part, parts: only every `parts`-th file is read, beginning with number `part`, so that the processes of a run
        share the work. The names of all files are compared in any case.
    """
    try:
        digests = read(folder)
        if digests is None:
            return f'{FILE_NAME} is damaged'
        names = _names(folder)
        missing = sorted(digests.keys() - set(names))
        if missing:
            return f'{missing[0]} is missing'
        unlisted = sorted(set(names) - digests.keys())
        if unlisted:
            return f'{unlisted[0]} is not in {FILE_NAME}'
        names_of_part = names[part::parts]
        computed_digests = file_digests([folder / name for name in names_of_part])
        for name, digest in zip(names_of_part, computed_digests, strict=True):
            if digest != digests[name]:
                return f'{name} differs from its checksum'
    except FileNotFoundError:
        return f'{FILE_NAME} is missing'
    # UnicodeDecodeError is a ValueError. A disk that cannot be read is damage as well.
    except (OSError, ValueError) as error:
        return f'cannot be read: {error}'
    return ''


def _names(folder: pathlib.Path) -> list[str]:
    """Returns the sorted paths of all files in a folder, relative to it, without that of the checksums."""
    names = []
    for path in folder.rglob('*'):
        if path.is_file() and path != folder / FILE_NAME:
            names.append(path.relative_to(folder).as_posix())
    return sorted(names)
