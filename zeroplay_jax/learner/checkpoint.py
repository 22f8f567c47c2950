"""Checkpoints and the claim of a workdir.

One Orbax checkpoint holds the whole run: weights and optimisers of all roles, and the host state of the training loop.
"""

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

# A message names this many differing fields at most.
_MAX_FIELDS_IN_ERROR = 5


class WorkdirError(UserError):
    """The workdir belongs to another run; the message names the fields that differ."""


class Checkpointer:
    """Saves pairs (arrays `states`, JSON `loop`) by step under `workdir/checkpoints`, asynchronously and atomically.

    The files of a step are written to a temporary folder, which is renamed when complete. A process that is killed at
    any moment leaves the last complete step behind.
    """

    def __init__(self, workdir: pathlib.Path, keep: int):
        """Opens the folder.

        Args:
          workdir: folder of the run.
          keep: number of steps to keep; older ones are deleted.
        """
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, create=True
        )
        # Orbax refuses relative paths.
        folder = (workdir / 'checkpoints').resolve()
        self._manager = ocp.CheckpointManager(folder, options=options)

    def latest(self) -> int | None:
        """Returns the last complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, states: dict[str, Any], loop: Json) -> None:
        """Starts to save a step. The arguments are copied before it returns and may be donated or changed afterwards.

        Args:
          step: number of the step.
          states: tree of arrays.
          loop: host state, JSON-able.
        """
        # Orbax copies arrays at once, but serialises JSON later in its own thread.
        loop_copy = json.loads(json.dumps(dict(loop)))
        items = ocp.args.Composite(
            states=ocp.args.StandardSave(states), loop=ocp.args.JsonSave(loop_copy)
        )
        self._manager.save(step, args=items)

    def restore(self, states: dict[str, Any]) -> tuple[dict[str, Any], Json]:
        """Returns (states, loop) of the last complete step.

        Args:
          states: tree of arrays with the structure, shapes and shardings to restore to.
        """
        # Shapes and shardings come from the current run, so a checkpoint restores under another mesh.
        abstract_states = jax.tree.map(ocp.utils.to_shape_dtype_struct, states)
        items = ocp.args.Composite(
            states=ocp.args.StandardRestore(abstract_states), loop=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(self.latest(), args=items)
        return restored['states'], restored['loop']

    def wait(self) -> None:
        """Blocks until all started saves are on disk."""
        self._manager.wait_until_finished()

    @contextlib.contextmanager
    def saved_on_interrupt(self) -> Iterator[None]:
        """Returns a context in which Ctrl-C first completes the save in progress, which would be lost otherwise."""
        try:
            yield
        except KeyboardInterrupt:
            # With several processes a save needs all of them, and the others may never be interrupted.
            if jax.process_count() == 1:
                self.close()
            raise

    def close(self) -> None:
        """Waits for saves in progress and releases threads."""
        self._manager.close()


@contextlib.contextmanager
def claim(
    workdir: pathlib.Path, config: Json, free: tuple[str, ...] = ()
) -> Iterator[Callable[[], None]]:
    """Reserves the workdir for this config, and for this process while the context is open.

    Args:
      workdir: folder of the run; it is created if missing.
      config: nested plain dict of the whole config.
      free: fields, such as 'checkpoint.keep', that may differ between a run and its continuation.

    Yields:
      A function that writes `config.json`. Call it once the run is known to be possible: if the start fails before, the
      workdir accepts a corrected config.

    Raises:
      WorkdirError: the workdir was started with another config, contains other files, or is in use.
    """
    # Converted to JSON and back, so that tuples compare equal to the lists that are read from the file.
    plain_config = json.loads(json.dumps(config))
    path = workdir / 'config.json'
    if path.exists():
        saved_config = json.loads(path.read_text())
        _check_equal(workdir, _flatten(saved_config), _flatten(plain_config), free)
    elif workdir.exists():
        _check_empty(workdir)

    # The config is compared before the lock is taken: a wrong config is the more useful error.
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / '.lock').open('w') as lock:
        # The kernel releases the lock when the process ends, even if it is killed; a plain lock file would remain.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WorkdirError(
                f'workdir {workdir} is in use by another process; wait for it or choose another'
            ) from None

        def write() -> None:
            if path.exists():
                return
            # Written to another file and renamed, so that a killed process never leaves an incomplete config.json.
            staged = workdir / '.config.json'
            staged.write_text(json.dumps(plain_config, indent=2, sort_keys=True))
            os.replace(staged, path)

        yield write


def _check_empty(workdir: pathlib.Path) -> None:
    """Raises WorkdirError if the workdir contains visible files."""
    # Hidden files are the lock and the staged config of a run that did not start.
    visible_names = sorted(path.name for path in workdir.iterdir() if path.name[0] != '.')
    if visible_names:
        raise WorkdirError(
            f'workdir {workdir} holds {visible_names[0]!r} but no config.json; choose an empty one'
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
        if field not in free and saved.get(field) != current.get(field):
            differing.append(f'{field} (there {saved.get(field)}, now {current.get(field)})')
    if not differing:
        return
    fields = ', '.join(differing[:_MAX_FIELDS_IN_ERROR])
    num_omitted = len(differing) - _MAX_FIELDS_IN_ERROR
    if num_omitted > 0:
        fields += f' and {num_omitted} more'
    raise WorkdirError(
        f'workdir {workdir} belongs to another config: {fields}; choose another workdir'
    )


def _flatten(tree: Json, prefix: str = '') -> dict[str, Any]:
    """Returns a nested dict as a flat one: {'solver.batch': 32} for {'solver': {'batch': 32}}."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f'{prefix}{key}.')
        else:
            flat[prefix + key] = value
    return flat
