"""Which checkpoint of another run is read (`branch`, `continuation`, `export`); that run may be in progress."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from zeroplay_jax.learner import checkpoint
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.retrieval import object_cache
from zeroplay_jax.runtime import identity
from zeroplay_jax.runtime.digests import file_digests
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.remote_workdir import StepRemoved, local_source, newest_step
from zeroplay_jax.types import UserError

# Steps of a run in a bucket that are tried, while the run removes them before all processes have copied them.
_COPIES = 5


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint of another run.

    Attributes:
      workdir: that run's workdir, or its folder `best`; absolute.
      step: number of the checkpoint.
      folder: folder of the checkpoint.
      is_copy: whether `workdir` is this process's copy of a run in a bucket, so that each host has another one.
      damage: of a newer checkpoint, in words; '' if this is the newest.
    """

    workdir: pathlib.Path
    step: int
    folder: pathlib.Path
    is_copy: bool = False
    damage: str = ''

    def print_use(self, verb: str = '') -> None:
        """Prints which checkpoint is read, and before it a warning if a newer one is damaged."""
        if self.damage:
            print(
                f'warning: {self.workdir}: {self.damage}; takes checkpoint {self.step} in its place',
                file=sys.stderr,
            )
        print(f'{verb} checkpoint {self.step} of {self.workdir}'.lstrip(), file=sys.stderr)


class Damaged(UserError):
    """All checkpoints of a run are damaged."""


def newest_checkpoint(workdir: pathlib.Path) -> Source:
    """Returns the newest whole checkpoint of a run, which may be in progress; changes nothing.

    Args:
      workdir: the run's workdir, or its folder `best`.

    Raises:
      Damaged, UserError: one line; there is no whole checkpoint, or it is of another run than the records beside it.
    """
    folder = steps_folder(workdir)
    damage = ''
    first_damage = ''
    steps = saved_steps(folder)
    # Steps of an earlier version have no checksums.
    are_sealed = any(checkpoint.exist(folder / str(step)) for step in steps)
    for step in reversed(steps):
        path = folder / str(step)
        # A step that its run removes meanwhile counts as damaged.
        damage = checkpoint.find_damage(path) if are_sealed else ''
        if not damage and path.is_dir():
            run = workdir if folder != workdir else workdir.parent
            identity.check_checkpoint(path, run)
            return dataclasses.replace(_source(workdir, step), damage=first_damage)
        if damage and not first_damage and path.is_dir():
            first_damage = f'checkpoint {step} is damaged: {damage}'
    remedy = 'name the workdir of a run that has saved a step'
    if damage:
        raise Damaged(f'{workdir}: its checkpoints are damaged: {damage}; {remedy}')
    raise UserError(f'{workdir}: it has no checkpoint; {remedy}')


def _source(workdir: pathlib.Path, step: int, is_copy: bool = False) -> Source:
    folder = steps_folder(workdir) / str(step)
    return Source(workdir.resolve(), step, folder.resolve(), is_copy)


def steps_folder(workdir: pathlib.Path) -> pathlib.Path:
    """Returns the folder with the steps of a run, of which `workdir` may be the folder `best`."""
    folder = workdir / FOLDER
    return folder if folder.is_dir() else workdir


def read_newest(choose: Callable[[], Source], read: Callable[[Source], object]) -> Source:
    """Calls `read` with a checkpoint of a run that may be in progress; returns the checkpoint that was read.

    If the run removes the checkpoint meanwhile, `read` is called again with its next one.

    Args:
      choose: returns the newest checkpoint.
      read: raises any exception if it cannot read the checkpoint.

    Raises:
      UserError: of `read` or `choose`. Other exceptions of `read` are raised if there is no other checkpoint.
    """
    source = choose()
    while True:
        try:
            read(source)
        except UserError:
            raise
        # Orbax and its libraries raise exceptions of many types.
        except Exception:
            newest = choose()
            if newest.step == source.step:
                raise
            source = newest
        else:
            return source


def newest_on_all(hosts: Hosts, workdir: pathlib.Path, is_copy: bool = False) -> Source:
    """Returns the `newest_checkpoint` that the first process finds. All processes must call it.

    Args:
      hosts: processes of the new run.
      workdir: of the other run, or its folder `best`, for this process.
      is_copy: whether each process has another folder. Then each compares its checkpoint with the checksums.

    Raises:
      UserError: one line; a process has no whole checkpoint, or a copy of another one.
    """

    def find_locally() -> list[Any] | None:
        # The first process decides: the run may save or remove a step between two looks.
        if not hosts.is_first and not is_copy:
            return None
        newest = newest_checkpoint(workdir)
        damages.append(newest.damage)
        return _content(newest)

    damages: list[str] = []
    contents = hosts.run_on_all_and_gather(find_locally)
    if is_copy:
        _check_equal(workdir, contents)
    chosen = _source(workdir, contents[0][0], is_copy)
    return dataclasses.replace(chosen, damage=damages[0] if damages else '')


def _content(source: Source) -> list[Any]:
    """Returns the number of a step and the SHA-256 of its checksums, which tells its content; '' without checksums."""
    if not checkpoint.exist(source.folder):
        return [source.step, '']
    (digest,) = file_digests([source.folder / checkpoint.FILE_NAME])
    return [source.step, digest]


def _check_equal(source: str | pathlib.Path, contents: Sequence[list[Any]]) -> None:
    """Raises UserError unless all processes have the same checkpoint."""
    for process, content in enumerate(contents):
        if content != contents[0]:
            raise UserError(
                f'--from={source}: process {process} has another copy of checkpoint {content[0]} than process 0 of '
                f'{contents[0][0]}; run the command again'
            )


def copy_on_all(hosts: Hosts, address: str) -> Source:
    """Copies the newest step of a run in a bucket to every host; returns the copy of this process.

    All processes must call it, and copy the step that the first one chooses.

    Args:
      hosts: processes of the new run.
      address: of the other run, or of its folder `best`.

    Raises:
      UserError: one line; there is no such run, its step is damaged, or it removes steps faster than they are copied.
    """
    for _ in range(_COPIES):
        steps = hosts.run_on_all_and_gather(
            lambda: newest_step(address) if hosts.is_first else None
        )
        copies = hosts.run_on_all_and_gather(functools.partial(_copy, address, steps[0]))
        # A process whose step was removed; the run has saved a newer one before.
        if None in copies:
            continue
        _check_equal(address, [content for _, content in copies])
        folder, (step, _) = copies[hosts.index]
        return _source(pathlib.Path(folder), step, is_copy=True)
    raise UserError(
        f'--from={address}: removes steps faster than all hosts copy them; run the command again'
    )


def _copy(address: str, step: int) -> list[Any] | None:
    """Copies a step to this host; returns its folder and `_content`, or None if the run has removed the step.

    Raises:
      UserError: one line; the step is damaged in the bucket.
    """
    try:
        source = _whole_copy(address, step)
    except StepRemoved:
        return None
    return [str(source.workdir), _content(source)]


def _whole_copy(address: str, step: int) -> Source:
    """Returns the copy of a step; a damaged one is downloaded again."""
    try:
        return newest_checkpoint(pathlib.Path(local_source(address, step)))
    except Damaged:
        object_cache.forget(address)
    try:
        return newest_checkpoint(pathlib.Path(local_source(address, step)))
    except Damaged as error:
        raise UserError(f'--from={address}: was downloaded again. {error}') from None
