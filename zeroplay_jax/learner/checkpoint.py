"""Checkpoints: weights and optimisers of all roles, and the host state of the training loop, in one step of Orbax.

Every step has the SHA-256 of its files. A damaged one is moved aside, and the one before is restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from orbax.checkpoint.path import atomicity

from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout.weights import MOMENT
from zeroplay_jax.runtime import signals
from zeroplay_jax.runtime.disk import file_digests
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.types import Json, UserError

# SHA-256 of all files of a step, written before it gets its name and compared before it is read, in the format of the
# program of that name: `sha256sum --check checksums.sha256` in the folder of a step compares them by hand.
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


# Folders in the workdir: the steps of the run, and those that were damaged.
FOLDER = 'checkpoints'
# Name of a value network in a step, in front of its role.
VALUE_NETWORK_PREFIX = 'value_network_of_'
_DAMAGED = 'damaged'
# Orbax compresses; random bits of weights do not shrink below this share.
_COMPRESSED_SHARE = 0.8
# Parts of warnings about folders per process, which are on purpose.
_EXPECTED_WARNINGS = (
    'Global object size logging disabled',
    'Skipping merge of OCDBT checkpoints',
)


def saved_steps(folder: pathlib.Path) -> list[int]:
    """Returns the complete steps in a folder of checkpoints, in ascending order; [] if there is no such folder."""
    if not folder.is_dir():
        return []
    # Temporary folders of Orbax have a suffix.
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def set_damaged_aside(hosts: Hosts, workdir: pathlib.Path) -> list[str]:
    """Moves the damaged steps at the end of a run's checkpoints into workdir/damaged; returns a line about each.

    The newest step is read and compared with its checksums, then the one before, until one is whole. Reads every byte
    of these; the processes share the files. All of them must call it before they open a `Checkpointer`, and get the
    same lines.

    Raises:
      UserError: one line; all steps are damaged. They stay where they are.
    """
    folder = workdir / FOLDER
    # The first process decides, so that all look at the same steps.
    steps = hosts.run_on_all_and_gather(lambda: saved_steps(folder))[0]
    damage_of_step = _damage_of_newest(hosts, folder, steps)
    if not damage_of_step:
        return []
    newest = steps[-1]
    if len(damage_of_step) == len(steps):
        raise UserError(
            f'{folder}: all checkpoints are damaged ({_damage_text(newest, damage_of_step[newest])}); bring one back '
            'from a copy, or choose another workdir'
        )
    whole = steps[-1 - len(damage_of_step)]
    lines = []
    for step, damage in damage_of_step.items():
        target = workdir / _DAMAGED / str(step)
        lines.append(f'{_damage_text(step, damage)}; it is now in {target}')

    def move() -> None:
        for step in damage_of_step if hosts.is_first else ():
            move_aside(workdir, step)

    hosts.run_on_all_and_gather(move)
    lines[-1] += f'; the run resumes from {whole}, and steps {whole} to {newest - 1} are run again'
    return lines


def move_aside(workdir: pathlib.Path, step: int) -> pathlib.Path:
    """Moves a step of a run into workdir/damaged, in place of an earlier one of this number; returns its new folder."""
    target = workdir / _DAMAGED / str(step)
    target.parent.mkdir(exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    os.rename(workdir / FOLDER / str(step), target)
    return target


def remove_after(
    hosts: Hosts, folder: pathlib.Path, last: int, is_shared: bool = True
) -> list[int]:
    """Removes the steps after step `last` from a folder of checkpoints; returns those that are left.

    All processes must call it before they open a `Checkpointer`.

    Args:
      hosts: processes of the run.
      folder: folder of checkpoints.
      last: the last step to keep.
      is_shared: whether all processes have the same folder.
    """

    def remove() -> list[int]:
        if is_shared and not hosts.is_first:
            return []
        kept = []
        for step in saved_steps(folder):
            if step <= last:
                kept.append(step)
            else:
                shutil.rmtree(folder / str(step))
        return kept

    return hosts.run_on_all_and_gather(remove)[0]


def _damage_of_newest(hosts: Hosts, folder: pathlib.Path, steps: list[int]) -> dict[int, str]:
    """Returns step → its damage, for the steps behind the last whole one, the newest first."""
    damage_of_step: dict[int, str] = {}
    for step in reversed(steps):
        damage = find_damage(folder / str(step), hosts.index, hosts.count)
        damages = [text for text in hosts.gather(damage) if text]
        if not damages:
            break
        damage_of_step[step] = damages[0]
    return damage_of_step


def _damage_text(step: int, damage: str) -> str:
    return f'checkpoint {step} is damaged: {damage}'


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Returns whether a line of the log is none of those that Orbax writes where no process is the first.

    A file that cannot be written has no line either: Orbax logs pages of it in its threads, and raises it besides.
    """
    error = record.exc_info[1] if record.exc_info else None
    if 'os_error_code=' in str(error):
        return False
    return not any(text in str(record.msg) for text in _EXPECTED_WARNINGS)


def _own_bytes(array: jax.Array) -> int:
    """Returns at least the bytes of an array that this process saves: shards of which it has the first copy."""
    own_shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    return sum(shard.data.nbytes for shard in own_shards)


def stored_tree(folder: pathlib.Path) -> Json:
    """Returns the tree of the arrays of a checkpoint, with shape and dtype of each."""
    return state_reader().metadata(folder / 'states').tree


def state_reader() -> ocp.PyTreeCheckpointHandler:
    """Returns what reads the arrays of a checkpoint."""
    absl_logging.get_absl_logger().addFilter(_is_unexpected)
    # Orbax has one setting for all handlers of a process: who creates folders for metadata of arrays when a step is
    # saved. By default it is process 0; others with folders of their own would wait for it in vain. In a shared folder
    # None does no harm: each process creates the folder unless it is there.
    processes = ocp.options.MultiprocessingOptions(primary_host=None)
    # Without a `Checkpointer` around it, which warns that an item of a step has no file of its own about times.
    return ocp.PyTreeCheckpointHandler(multiprocessing_options=processes)


def arrays_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their path; tuples with and without names have equal paths."""
    return {
        sharding.path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _tree_difference(folder: pathlib.Path, states: Any) -> str:
    """Returns the first array of a checkpoint that `states` lacks, or has in another shape, in words; '' for none."""
    try:
        there = arrays_by_path(stored_tree(folder))
    # Orbax and its libraries raise exceptions of many types. The restore that follows will say what it is.
    except Exception:
        return ''
    here = arrays_by_path(states)
    # Snapshots come first, because a recipe may be edited.
    names = sorted(there.keys() | here.keys(), key=lambda name: (MOMENT not in name, name))
    for name in names:
        if name not in there:
            return f'lacks {name}'
        if name not in here:
            return f'has {name}'
        if tuple(there[name].shape) != tuple(here[name].shape):
            return f'has {name} of shape {tuple(there[name].shape)}, not {tuple(here[name].shape)}'
    return ''


class Checkpointer:
    """Saves pairs (arrays `states`, JSON `loop`) by step under `workdir/checkpoints`, asynchronously and atomically.

    The files of a step are written to a temporary folder, which is renamed when complete. A process that is killed at
    any moment leaves the last complete step behind.

    Attributes:
      is_shared: whether all processes have the same folder.
    """

    def __init__(
        self, workdir: pathlib.Path, keep: int, folder: str = FOLDER, is_shared: bool = True
    ):
        """Opens the folder.

        Args:
          workdir: folder of the run.
          keep: number of steps to keep; older ones are deleted.
          folder: name of the folder in the workdir.
          is_shared: whether all processes have the same workdir. If not, each saves the shards that it owns, and a step
            can be restored when the folder of each process has the files of all.
        """
        self.is_shared = is_shared
        # Process 0 creates folders and completes steps for all; with None each process does it for itself.
        processes = ocp.options.MultiprocessingOptions(primary_host=0 if is_shared else None)
        async_options = None
        if not is_shared:
            # Created beside the training, folders count as created in all processes when process 0 has its own.
            async_options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=True,
            create=True,
            temporary_path_class=SealedTemporaryPath,
            async_options=async_options,
            multiprocessing_options=processes,
        )
        absl_logging.get_absl_logger().addFilter(_is_unexpected)
        handlers = None
        if not is_shared:
            handlers = {
                # A database (OCDBT) has a root that lists the shards of all processes. Without it each shard is a file,
                # and the files of all processes together are a checkpoint.
                'states': ocp.StandardCheckpointHandler(
                    use_ocdbt=False, multiprocessing_options=processes
                ),
                'loop': ocp.JsonCheckpointHandler(multiprocessing_options=processes),
            }
        # Orbax refuses relative paths.
        self._folder = (workdir / folder).resolve()
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        """Returns the last complete step, or None."""
        return self._manager.latest_step()

    @signals.interrupt_held()
    def save(self, step: int, states: dict[str, Any], loop: Json) -> None:
        """Starts to save a step. The arguments are copied before it returns and may be donated or changed afterwards.

        Args:
          step: number of the step.
          states: tree of arrays.
          loop: host state, JSON-able.

        Raises:
          OSError: the disk is too full.
          RuntimeError: the folder has this step or a later one.
        """
        if jax.process_index() == 0 or not self.is_shared:
            self._check_space(states)
        # Orbax copies arrays at once, but serialises JSON later in its own thread.
        loop_copy = json.loads(json.dumps(dict(loop)))
        items = ocp.args.Composite(
            states=ocp.args.StandardSave(states), loop=ocp.args.JsonSave(loop_copy)
        )
        if not self._manager.save(step, args=items):
            raise RuntimeError(
                f'{self._folder}: step {step} was not saved, because step {self.latest()} is there'
            )

    def _check_space(self, states: dict[str, Any]) -> None:
        """Raises OSError if the disk has no room for `states`."""
        # Orbax notices it as well, by many tracebacks of its threads.
        arrays = jax.tree.leaves(states)
        if self.is_shared:
            size = sum(array.nbytes for array in arrays)
        else:
            size = sum(_own_bytes(array) for array in arrays)
        if shutil.disk_usage(self._folder).free < _COMPRESSED_SHARE * size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))

    def restore(self, states: dict[str, Any]) -> tuple[dict[str, Any], Json]:
        """Returns (states, loop) of the last complete step.

        Args:
          states: tree of arrays with the structure, shapes and shardings to restore to.

        Raises:
          UserError: one line; the step is of a run with other weights or optimisers.
        """
        # Shapes and shardings come from the current run, so a checkpoint restores under another mesh.
        abstract_states = jax.tree.map(ocp.utils.to_shape_dtype_struct, states)
        items = ocp.args.Composite(
            states=ocp.args.StandardRestore(abstract_states), loop=ocp.args.JsonRestore()
        )
        step = self.latest()
        path = self._folder / str(step)
        difference = _tree_difference(path, states)
        if difference:
            remedy = 'bring back the checkpoints of this run'
            if MOMENT in difference:
                remedy = 'give Recipe.roles the snapshots of this run, or begin a new one with its weights (--from)'
            raise UserError(f'{path}: is of another run: it {difference}; {remedy}')
        restored = self._manager.restore(step, args=items)
        return restored['states'], restored['loop']

    @signals.interrupt_held()
    def wait(self) -> None:
        """Blocks until all started saves are on disk."""
        self._manager.wait_until_finished()

    @contextlib.contextmanager
    def saved_on_error(self) -> Iterator[None]:
        """Returns a context in which an error, or Ctrl-C, first completes the save in progress.

        It would be lost otherwise, and the threads of Orbax would end with pages of tracebacks.
        """
        try:
            yield
        except BaseException:
            # With several processes a save needs all of them, and the others may never be interrupted.
            if jax.process_count() == 1:
                # The first error is the one to be read.
                with contextlib.suppress(Exception):
                    self.close()
            raise

    @signals.interrupt_held()
    def close(self) -> None:
        """Waits for saves in progress and releases threads."""
        self._manager.close()
