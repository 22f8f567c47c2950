"""The folder of a run: it belongs to one config, and to one process at a time.

Needs no JAX, so that a folder of another run is refused before anything is loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any, TextIO

from zeroplay_jax.extras import load_extra
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.runtime.record import FILE_NAME, WorkdirError, flat_config, read
from zeroplay_jax.types import Json, UserError

# A message names this many differing fields at most.
_MAX_FIELDS_IN_ERROR = 5
_LOCK = '.lock'
# It may only grow.
_LENGTH = 'schedule.iterations'


class InUse(WorkdirError):
    """Another process has reserved the folder."""


def local_run(workdir: str | pathlib.Path, checkpoints: str = '') -> pathlib.Path:
    """Returns the folder of a run to be read; of one in a bucket a local copy (`extras.buckets`), brought up to date.

    Args:
      workdir: a path, or gs://bucket/path.
      checkpoints: of a copy: 'checkpoints' brings the newest one as well, 'best' that of the best evaluation.

    Raises:
      UserError: one line; there is no run in the bucket, or it cannot be read.
    """
    if not downloads.is_address(workdir):
        return pathlib.Path(workdir)
    return load_extra('buckets', 'copies').local_run(str(workdir), checkpoints)


def check_is_folder(workdir: str | pathlib.Path, allows_bucket: bool = False) -> None:
    """Refuses an address of which pathlib would make a local folder, and a place where no folder can be created.

    Args:
      workdir: folder or address.
      allows_bucket: whether gs://bucket/path is accepted.

    Raises:
      WorkdirError: one line.
    """
    # pathlib shortens the two slashes to one. A single letter may be a drive.
    if not re.match(r'[A-Za-z][A-Za-z0-9+.-]+:/', str(workdir)):
        _check_place(pathlib.Path(workdir))
        return
    if not allows_bucket:
        raise WorkdirError(
            f'--workdir={workdir}: this cannot be written to a bucket or another address; give a folder'
        )
    if not downloads.is_address(workdir):
        raise WorkdirError(f'--workdir={workdir}: give a folder, or gs://bucket/path')
    try:
        load_extra('buckets', 'objects').split(str(workdir))
    except UserError as error:
        raise WorkdirError(f'--workdir={error}') from None


def _check_place(workdir: pathlib.Path) -> None:
    """Raises WorkdirError if the folder is neither there nor can be created."""
    existing = next(
        path for path in (workdir, *workdir.absolute().parents) if os.path.lexists(path)
    )
    if existing == workdir and workdir.is_dir():
        return
    # Permissions do not tell that nothing can be created in /proc or on a read-only disk.
    try:
        # A name may be too long.
        with contextlib.suppress(FileNotFoundError):
            os.lstat(workdir)
        tempfile.TemporaryDirectory(prefix='.', dir=existing).cleanup()
    except OSError as error:
        raise WorkdirError(
            f'--workdir={workdir}: cannot be created ({error.strerror}); name another folder'
        ) from None


def check(
    workdir: pathlib.Path,
    config: Json,
    free: tuple[str, ...] = (),
) -> None:
    """Compares the config of the run in a folder, if there is one, with `config`; changes nothing.

    Args:
      workdir: folder of the run; it need not exist.
      config: nested plain dict of the whole config.
      free: fields, such as 'checkpoint.keep', that may differ between a run and its continuation.

    Raises:
      WorkdirError: the workdir was started with another config, its record cannot be read, or it contains other files.
    """
    record = read(workdir)
    if record is not None:
        _check_equal(workdir, flat_config(record.config), flat_config(config), free)
    elif workdir.exists():
        _check_empty(workdir)


@contextlib.contextmanager
def claim(
    workdir: pathlib.Path,
    config: Json,
    free: tuple[str, ...] = (),
) -> Iterator[None]:
    """Reserves the workdir for this config, and for this process while the context is open.

    Write the record (`record.write`) once the run is known to be possible: if the start fails before, the workdir
    accepts a corrected config, and what was created is removed when the context ends.

    Args:
      workdir, config, free: as in `check`; the folder is created if it is missing.

    Raises:
      WorkdirError: as `check`, or the workdir is in use by another process (InUse) or cannot be locked.
    """
    # The config is compared before the lock is taken: a wrong config is the more useful error.
    check(workdir, config, free)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(workdir))
        except OSError as error:
            raise WorkdirError(
                f'workdir {workdir} cannot be locked ({error.strerror}); choose one on another file system'
            ) from None
        yield


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Reserves a folder for this process while the context is open.

    Args:
      folder: created if it is missing, and then removed at the end if it is empty. The lock is removed as well, unless
        there is the record of a run.

    Raises:
      InUse: the folder is in use by another process.
      OSError: the folder cannot be created or locked.
    """
    created = _create(folder)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_flock(folder))
        except OSError:
            _remove_created(folder, created)
            raise
        try:
            yield
        finally:
            if not (folder / FILE_NAME).exists():
                _remove_created(folder, created)


def _create(workdir: pathlib.Path) -> list[pathlib.Path]:
    """Creates a folder with its parents; returns those that did not exist, the innermost first."""
    created = []
    for folder in (workdir, *workdir.parents):
        if folder.exists():
            break
        created.append(folder)
    workdir.mkdir(parents=True, exist_ok=True)
    return created


def _remove_created(workdir: pathlib.Path, created: list[pathlib.Path]) -> None:
    """Removes the hidden files of a run that did not start, and the folders in `created` that are empty then."""
    (workdir / _LOCK).unlink(missing_ok=True)
    # A folder with logs of a launch script stays.
    with contextlib.suppress(OSError):
        for folder in created:
            folder.rmdir()


@contextlib.contextmanager
def _flock(workdir: pathlib.Path) -> Iterator[None]:
    """Returns a context in which no other process can claim the workdir.

    Raises:
      InUse: another process has claimed it.
      OSError: the file system has no locks, or the file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        while True:
            lock = stack.enter_context((workdir / _LOCK).open('w'))
            # The kernel releases the lock when the process ends, even if it is killed; a plain lock file would remain.
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InUse(
                    f'workdir {workdir} is in use by another process; wait for it or choose another'
                ) from None
            if _is_at(lock, workdir / _LOCK):
                break
        yield


def _is_at(file: TextIO, path: pathlib.Path) -> bool:
    """Returns whether an open file is still the one at `path`."""
    # A run that did not start may have removed it in the meantime; its lock would protect nothing.
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _check_empty(workdir: pathlib.Path) -> None:
    """Raises WorkdirError if the workdir contains visible files."""
    # Hidden files are the lock and the draft of a record of a run that did not start.
    visible_names = sorted(path.name for path in workdir.iterdir() if path.name[0] != '.')
    if visible_names:
        raise WorkdirError(
            f'workdir {workdir} holds {visible_names[0]!r} but no {FILE_NAME}; choose an empty one'
        )


def _check_equal(
    workdir: pathlib.Path,
    saved: dict[str, Any],
    current: dict[str, Any],
    free: tuple[str, ...],
) -> None:
    """Raises WorkdirError if the flattened configs differ in a field that is not free."""
    differing = []
    for field in sorted(saved.keys() | current.keys()):
        there, here = saved.get(field), current.get(field)
        may_change = field in free
        if field == _LENGTH and isinstance(there, int) and isinstance(here, int):
            may_change = there < here
        if there != here and not may_change:
            differing.append(f'{field} (there {there}, now {here})')
    if not differing:
        return
    fields = ', '.join(differing[:_MAX_FIELDS_IN_ERROR])
    num_omitted = len(differing) - _MAX_FIELDS_IN_ERROR
    if num_omitted > 0:
        fields += f' and {num_omitted} more'
    raise WorkdirError(
        f'workdir {workdir} belongs to another config: {fields}; choose another workdir'
    )
