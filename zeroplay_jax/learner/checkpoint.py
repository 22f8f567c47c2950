"""One Orbax checkpoint holds the whole run: weights and optimisers of every role, and the loop's own state."""

from __future__ import annotations

import json
import os
import pathlib
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
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True, create=True)
        self._manager = ocp.CheckpointManager((workdir / 'checkpoints').resolve(), options=options)

    def latest(self) -> int | None:
        """The last whole step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, states: dict[str, Any], loop: Json) -> None:
        """Starts saving; device arrays are copied before this returns, so they may be donated afterwards."""
        self._manager.save(
            step,
            args=ocp.args.Composite(states=ocp.args.StandardSave(states), loop=ocp.args.JsonSave(dict(loop))),
        )

    def restore(self, states: dict[str, Any]) -> tuple[dict[str, Any], Json]:
        """The last step's (states, loop); `states` gives structure, shapes and shardings."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, states)
        found = self._manager.restore(
            self.latest(),
            args=ocp.args.Composite(states=ocp.args.StandardRestore(abstract), loop=ocp.args.JsonRestore()),
        )
        return found['states'], found['loop']

    def wait(self) -> None:
        """Blocks until what was saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and releases threads."""
        self._manager.close()


def claim(workdir: pathlib.Path, config: Json, free: tuple[str, ...] = ()) -> None:
    """Makes the workdir this config's own, or checks that it is.

    Args:
      config: nested plain dict of the whole config.
      free: fields ('checkpoint.keep') that may differ between a run and its continuation.

    Raises:
      WorkdirError: the workdir was begun with another config, or holds files of something else.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / 'config.json'
    new = json.loads(json.dumps(config))
    if not path.exists():
        strangers = [p.name for p in workdir.iterdir() if not p.name.startswith('.')]
        if strangers:
            raise WorkdirError(
                f'workdir {workdir} holds {sorted(strangers)[0]!r} but no config.json; choose an empty one'
            )
        staged = workdir / '.config.json'
        staged.write_text(json.dumps(new, indent=2, sort_keys=True))
        os.replace(staged, path)
        return
    old, new = _flat(json.loads(path.read_text())), _flat(new)
    differ = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k) and k not in free]
    if differ:
        shown = ', '.join(f'{k} (there {old.get(k)}, now {new.get(k)})' for k in differ[:5])
        more = f' and {len(differ) - 5} more' if len(differ) > 5 else ''
        raise WorkdirError(f'workdir {workdir} belongs to another config: {shown}{more}; choose another workdir')


def _flat(tree: Json, prefix: str = '') -> dict[str, Any]:
    out = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= _flat(value, f'{prefix}{key}.')
        else:
            out[prefix + key] = value
    return out
