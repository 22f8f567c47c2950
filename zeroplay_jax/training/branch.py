"""A run that begins with the weights of another one (`--from`): more steps, another learning rate or corpus.

It takes weights, optimiser moments and teachers of all roles, so that a proposer and its solver continue as a pair.
Schedule, question pool, positions in the inputs and evaluations begin anew. The other run is only read; it may be
finished, killed or still running.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from zeroplay_jax.learner import checksums
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.learner.fingerprint import weights_fingerprint
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.runtime import atomic
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.types import Json, UserError

FILE_NAME = 'from.json'
# Parts of a learner's state; the last two are taken where both runs have them.
_PARTS = ('params', 'opt', 'teacher')


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint of another run.

    Attributes:
      workdir: that run's workdir, or its folder `best`; absolute.
      step: number of the checkpoint.
      folder: folder of the checkpoint.
    """

    workdir: pathlib.Path
    step: int
    folder: pathlib.Path


def newest_checkpoint(workdir: pathlib.Path) -> Source:
    """Returns the newest whole checkpoint of a run, which may be in progress; changes nothing.

    Args:
      workdir: the run's workdir, or its folder `best`.

    Raises:
      UserError: one line; there is no whole checkpoint.
    """
    folder = workdir / FOLDER
    if not folder.is_dir():
        folder = workdir
    damage = ''
    for step in reversed(saved_steps(folder)):
        path = folder / str(step)
        # Steps of an earlier version have no checksums. A step that its run removes meanwhile counts as damaged.
        damage = checksums.find_damage(path) if checksums.exist(path) else ''
        if not damage and path.is_dir():
            return Source(workdir.resolve(), step, path.resolve())
    reason = f'its checkpoints are damaged: {damage}' if damage else 'it has no checkpoint'
    raise UserError(f'{workdir}: {reason}; name the workdir of a run that has saved a step')


def find(
    hosts: Hosts, workdir: pathlib.Path, source: str | None, is_resumed: bool
) -> Source | None:
    """Returns the checkpoint that a new run begins with; None for any other run, and for one that is resumed.

    All processes must call it, and get the same checkpoint.

    Args:
      workdir: of the new run.
      source: value of --from, or None.
      is_resumed: whether the new run has a checkpoint, and with it the weights of the other run.

    Raises:
      UserError: one line; --from differs from that at the start of the run, or names no run.
    """

    def find_locally() -> list | None:
        recorded = read_record(workdir)
        began_from = recorded['workdir'] if recorded else None
        wanted = str(pathlib.Path(source).resolve()) if source else None
        # A resumed run needs the flag no more.
        if began_from != wanted and not (is_resumed and wanted is None):
            if began_from:
                raise UserError(f'{workdir}: the run began with --from={began_from}; give the same')
            if is_resumed:
                raise UserError(
                    f'{workdir}: the run has begun without --from={source}; choose another workdir'
                )
        if wanted is None or is_resumed:
            return None
        if pathlib.Path(wanted) == workdir.resolve():
            raise UserError(f'--from={source}: is the workdir itself; choose another --workdir')
        found = newest_checkpoint(pathlib.Path(wanted))
        return [str(found.workdir), found.step, str(found.folder)]

    result = hosts.run_on_all_and_gather(lambda: find_locally() if hosts.is_first else None)[0]
    if result is None:
        return None
    return Source(pathlib.Path(result[0]), result[1], pathlib.Path(result[2]))


def check_policies(source: Source, names: list[str]) -> None:
    """Raises UserError unless a checkpoint has weights of all these names; reads a small file."""
    present = policy_names(source)
    missing = [name for name in names if name not in present]
    if missing:
        raise UserError(
            f'--from={source.workdir}: has the policies {", ".join(present)} and not {missing[0]}; take a run with '
            'the same trained roles and the same config.weights'
        )


def policy_names(source: Source) -> list[str]:
    """Returns the names of the sets of weights in a checkpoint."""
    return list(_stored_tree(source.folder))


def read_params(source: Source, name: str) -> Params:
    """Returns the weights of a checkpoint as NumPy arrays, whatever devices the run had.

    Args:
      name: one of `policy_names`.
    """
    item = {name: {'params': _stored_tree(source.folder)[name]['params']}}
    arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    request = ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)
    reader = ocp.PyTreeCheckpointHandler()
    return reader.restore(source.folder / 'states', args=request)[name]['params']


def _stored_tree(folder: pathlib.Path) -> Json:
    """Returns the tree of the arrays of a checkpoint, with shape and dtype of each."""
    # Without a `Checkpointer` around it, which warns that an item of a step has no file of its own about times.
    return ocp.PyTreeCheckpointHandler().metadata(folder / 'states').tree


def load(source: Source, engine: Engine) -> None:
    """Gives all learners of an engine the state of a checkpoint, and publishes their weights.

    Raises:
      UserError: the weights have other shapes.
    """
    stored_tree = _stored_tree(source.folder)
    for name, learner in engine.learners.items():
        stored = {}
        for part in _PARTS:
            if part in stored_tree[name] and part in learner.state:
                stored[part] = stored_tree[name][part]
        arrays = _read(source, name, stored, learner)
        learner.restore(dict(_merged(source, name, learner, arrays)))
        engine.publish_weights(name)


def _read(source: Source, name: str, stored: Json, learner: Learner) -> dict[str, jax.Array]:
    """Returns the arrays of one set of weights by their path, on the devices of the learner.

    Args:
      name: of the weights.
      stored: the part of `_stored_tree` to read.
    """
    shardings = _by_path(learner.shardings)
    replicated = sharding.replicated(learner.mesh)

    def restore_arguments(path: Any, _: Any) -> ocp.ArrayRestoreArgs:
        return ocp.ArrayRestoreArgs(sharding=shardings.get(sharding.path_name(path), replicated))

    arguments = jax.tree_util.tree_map_with_path(restore_arguments, stored)
    request = ocp.args.PyTreeRestore(
        item={name: stored}, restore_args={name: arguments}, partial_restore=True
    )
    reader = ocp.PyTreeCheckpointHandler()
    return _by_path(reader.restore(source.folder / 'states', args=request)[name])


def _by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their path; tuples with and without names have equal paths."""
    return {
        sharding.path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _merged(source: Source, name: str, learner: Learner, arrays: dict[str, jax.Array]) -> Json:
    """Returns a learner's state with the arrays of a checkpoint where their paths and shapes are equal.

    Raises:
      UserError: an array of the weights is missing or has another shape.
    """

    def merge(path: Any, own: Any) -> Any:
        path_name = sharding.path_name(path)
        array = arrays.get(path_name)
        if array is not None and array.shape == own.shape:
            return array
        if path_name.startswith('params'):
            there = 'is missing' if array is None else f'has the shape {tuple(array.shape)}'
            raise UserError(
                f'--from={source.workdir}: {name}/{path_name} {there}, config.policy.path has {tuple(own.shape)}; take '
                'the model that the run was started with'
            )
        # Moments of an optimiser that the other run lacked, or its position in a warm-up.
        return own

    merged = jax.tree_util.tree_map_with_path(merge, learner.state)
    if 'teacher' in learner.state and not any(path.startswith('teacher') for path in arrays):
        # The average begins with the weights of now and not with those of config.policy.path.
        merged['teacher'] = learner.initial_teacher(merged['params'])
    return merged


def record(hosts: Hosts, workdir: pathlib.Path, source: Source, engine: Engine) -> None:
    """Writes from.json: which checkpoint the run began with, and fingerprints of its weights."""
    fingerprints = {}
    for name, learner in engine.learners.items():
        fingerprints[name] = weights_fingerprint(learner.params, learner.mesh)
    content = {'workdir': str(source.workdir), 'step': source.step, 'weights': fingerprints}
    if hosts.is_first:
        atomic.write_text(workdir / FILE_NAME, json.dumps(content, indent=1) + '\n')


def read_record(workdir: pathlib.Path) -> Json | None:
    """Returns what `record` wrote: 'workdir', 'step', 'weights'; None for a run that began by itself.

    Raises:
      UserError: the file cannot be read.
    """
    path = workdir / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        if not {'workdir', 'step', 'weights'} <= content.keys():
            raise ValueError('fields are missing')
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f'{path}: cannot be read ({error}); bring it back from a copy, or choose another workdir'
        ) from None
    return content
