"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Writes UTF-8 text, or its pieces, in place of what is there, in one move; a failure leaves that as it was."""
    draft = path.with_name(f'.{path.name}.{os.getpid()}')
    try:
        with draft.open('w', encoding='utf-8') as out:
            out.writelines([text] if isinstance(text, str) else text)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
