"""Atomic file writes: a file is replaced completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """Replaces a file by UTF-8 text atomically; after a failure the previous file is unchanged.

    Args:
      path: the file to write; its folder must exist.
      text: the content, or its pieces, which are joined without separators.
    """
    # os.replace is atomic only within one file system, so the draft lies in the same folder. The process id keeps
    # two processes that write the same file from sharing a draft.
    draft = path.with_name(f'.{path.name}.{os.getpid()}')
    pieces = [text] if isinstance(text, str) else text
    try:
        with draft.open('w', encoding='utf-8') as file:
            file.writelines(pieces)
        os.replace(draft, path)
    except OSError as error:
        # The user knows the name of the file, not that of its draft.
        if error.filename:
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        # After a success there is no draft any more, because os.replace has moved it.
        draft.unlink(missing_ok=True)
