"""Compiled programs of earlier sessions of tests, in .venv/programs: a second session compiles little.

JAX writes a program in place, so that a test which kills a process may leave half of one. A session therefore has a
folder of its own, and at its end whole programs alone are kept.
"""

import atexit
import contextlib
import os
import pathlib
import shutil
import tempfile

KEPT = pathlib.Path(__file__).parents[1] / '.venv' / 'programs'
# Beyond it the folder begins anew: programs of earlier commits are never asked for.
MOST_BYTES = 2 << 30


def begin_session():
    """The folder of this session's programs, with those that were kept."""
    if sum(path.stat().st_size for path in KEPT.glob('*-cache')) > MOST_BYTES:
        shutil.rmtree(KEPT, ignore_errors=True)
    # Beside those that are kept: tens of thousands of files are linked in a second and copied in a minute.
    beside = KEPT.parent if KEPT.parent.is_dir() else None
    folder = pathlib.Path(tempfile.mkdtemp(prefix='programs.', dir=beside))
    # Where files cannot be linked, nothing is kept from session to session.
    with contextlib.suppress(OSError):
        for path in KEPT.glob('*-cache'):
            os.link(path, folder / path.name)
    atexit.register(end_session, folder, os.getpid())
    return str(folder)


def end_session(folder, owner):
    """Keeps what a session has compiled, and removes its folder."""
    # A fork of the process that began the session ends as well.
    if os.getpid() != owner:
        return
    # Without an environment or space, or beside a session that begins anew, nothing more is kept.
    with contextlib.suppress(OSError):
        KEPT.mkdir(exist_ok=True)
        known = {path.name for path in KEPT.iterdir()}
        for path in folder.glob('*-cache'):
            if path.name not in known and is_whole(path):
                os.link(path, KEPT / path.name)
    shutil.rmtree(folder, ignore_errors=True)


def is_whole(path):
    from jax._src.compilation_cache import decompress_executable

    try:
        return bool(decompress_executable(path.read_bytes()))
    except Exception:  # of whichever library has compressed it
        return False
