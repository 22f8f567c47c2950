"""One Orbax checkpoint holds the whole run: weights and optimisers of every role, and the loop's own state."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from zeroplay_jax.types import Json, UserError


class WorkdirError(UserError):
    """A workdir that belongs to another run; the message names the fields that differ."""


class Checkpointer:
    """Saves (states, loop) by step under `workdir/checkpoints`, in the background and atomically.

    A step's files are written aside and renamed when whole, so a process killed at any moment leaves the last
    whole step behind.
    """

    def __init__(self, workdir: pathlib.Path, keep: int):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, create=True
        )
        self._manager = ocp.CheckpointManager((workdir / 'checkpoints').resolve(), options=options)

    def latest(self) -> int | None:
        """The last whole step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, states: dict[str, Any], loop: Json) -> None:
        """Starts saving; what is given is copied before this returns, and may be donated or changed afterwards."""
        loop = json.loads(json.dumps(dict(loop)))  # the writer's thread reads it later
        self._manager.save(
            step,
            args=ocp.args.Composite(
                states=ocp.args.StandardSave(states), loop=ocp.args.JsonSave(loop)
            ),
        )

    def restore(self, states: dict[str, Any]) -> tuple[dict[str, Any], Json]:
        """The last step's (states, loop); `states` gives structure, shapes and shardings."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, states)
        found = self._manager.restore(
            self.latest(),
            args=ocp.args.Composite(
                states=ocp.args.StandardRestore(abstract), loop=ocp.args.JsonRestore()
            ),
        )
        return found['states'], found['loop']

    def wait(self) -> None:
        """Blocks until what was saved is on disk."""
        self._manager.wait_until_finished()

    @contextlib.contextmanager
    def saved_on_interrupt(self) -> Iterator[None]:
        """Ctrl-C waits for what is being saved, which would be lost; among several processes nobody would come."""
        try:
            yield
        except KeyboardInterrupt:
            if jax.process_count() == 1:
                self.close()
            raise

    def close(self) -> None:
        """Waits and releases threads."""
        self._manager.close()


@contextlib.contextmanager
def claim(
    workdir: pathlib.Path, config: Json, free: tuple[str, ...] = ()
) -> Iterator[Callable[[], None]]:
    """Holds the workdir for this config, against other processes too, while the context is open.

    Args:
      config: nested plain dict of the whole config.
      free: fields ('checkpoint.keep') that may differ between a run and its continuation.

    Yields:
      A function that writes `config.json`, to be called once the run is known to be possible: a config that
      fails before leaves the workdir free for its correction.

    Raises:
      WorkdirError: the workdir was begun with another config, holds files of something else, or is in use.
    """
    new = json.loads(json.dumps(config))
    path = workdir / 'config.json'
    if path.exists():
        _compare(workdir, _flat(json.loads(path.read_text())), _flat(new), free)
    elif workdir.exists() and (
        strangers := sorted(p.name for p in workdir.iterdir() if p.name[0] != '.')
    ):
        raise WorkdirError(
            f'workdir {workdir} holds {strangers[0]!r} but no config.json; choose an empty one'
        )
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / '.lock').open('w') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WorkdirError(
                f'workdir {workdir} is in use by another process; wait for it or choose another'
            ) from None

        def write() -> None:
            if not path.exists():
                staged = workdir / '.config.json'
                staged.write_text(json.dumps(new, indent=2, sort_keys=True))
                os.replace(staged, path)

        yield write


def _compare(workdir, old, new, free):
    differ = [
        k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k) and k not in free
    ]
    if differ:
        shown = ', '.join(f'{k} (there {old.get(k)}, now {new.get(k)})' for k in differ[:5])
        more = f' and {len(differ) - 5} more' if len(differ) > 5 else ''
        raise WorkdirError(
            f'workdir {workdir} belongs to another config: {shown}{more}; choose another workdir'
        )


def _flat(tree: Json, prefix: str = '') -> dict[str, Any]:
    out = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= _flat(value, f'{prefix}{key}.')
        else:
            out[prefix + key] = value
    return out
