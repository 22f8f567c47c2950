"""A run that begins with the weights of another one (`--from`): more steps, another learning rate or corpus.

It takes weights, optimiser moments and teachers of all roles, so that a proposer and its solver continue as a pair.
Schedule, question pool, positions in the inputs and evaluations begin anew, unless the new run is the other one with
more iterations (`continuation`). The other run is only read; it may be finished, killed or still running.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from zeroplay_jax.learner.checkpoint import FOLDER, arrays_by_path, state_reader, stored_tree
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.value_network import CHECKPOINT_PREFIX, ValueNetwork
from zeroplay_jax.learner.weights_view import weights_fingerprint
from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.retrieval import hub, json_text, object_cache, objects
from zeroplay_jax.runtime import atomic
from zeroplay_jax.runtime import workdir as workdir_files
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.settings.paths import BUILT_IN_CHECKPOINT, built_in_path
from zeroplay_jax.training import input_record, source_checkpoint
from zeroplay_jax.training.source_checkpoint import Source
from zeroplay_jax.types import Json, UserError

FILE_NAME = 'from.json'
# Parts of a learner's state; the last two are taken where both runs have them.
_PARTS = ('params', 'opt', 'teacher')
# Fields of policy.adapters that decide what the arrays of an adapter, and their base, mean.
_ADAPTER_FIELDS = ('rank', 'alpha', 'linears', 'quantize')


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

    def begins_locally() -> bool:
        recorded = read_record(workdir)
        began_from = object_cache.address_of(recorded['workdir']) if recorded else None
        wanted = _full_name(source) if source else None
        # A resumed run needs the flag no more.
        if began_from != wanted and not (is_resumed and wanted is None):
            if began_from:
                raise UserError(f'{workdir}: the run began with --from={began_from}; give the same')
            if is_resumed:
                raise UserError(
                    f'{workdir}: the run has begun without --from={source}; choose another workdir'
                )
        if wanted is None or is_resumed:
            return False
        if wanted == str(workdir.resolve()):
            raise UserError(f'--from={source}: is the workdir itself; choose another --workdir')
        return True

    begins = hosts.run_on_all_and_gather(lambda: begins_locally() if hosts.is_first else False)[0]
    if source is None or not begins:
        return None
    # Not before: a resumed run needs the other one no more, which may be gone.
    if objects.is_address(source):
        return source_checkpoint.copy_on_all(hosts, source)
    paths = hosts.run_on_all_and_gather(lambda: str(pathlib.Path(source).resolve()))
    return source_checkpoint.newest_on_all(hosts, pathlib.Path(paths[0]))


def _full_name(source: str) -> str:
    """Returns the address or the absolute path in --from."""
    if objects.is_address(source):
        return source.rstrip('/')
    return object_cache.address_of(str(pathlib.Path(source).resolve()))


def check_policies(hosts: Hosts, source: Source, names: list[str]) -> None:
    """Raises UserError unless a checkpoint has weights of all these names; reads a small file in the first process.

    All processes must call it.
    """

    def check_locally() -> None:
        if not hosts.is_first:
            return
        try:
            present = policy_names(source)
        except FileNotFoundError:
            raise UserError(
                f'--from={source.workdir}: checkpoint {source.step} was removed meanwhile; run the command again'
            ) from None
        missing = [name for name in names if name not in present]
        if missing:
            raise UserError(
                f'--from={source.workdir}: has the policies {", ".join(present)} and not {missing[0]}; take a run '
                'with the same trained roles and the same config.weights'
            )

    hosts.run_on_all_and_gather(check_locally)


def check_adapters(hosts: Hosts, source: Source, config, inputs: dict[str, Any]) -> None:
    """Raises UserError unless the adapters of a checkpoint compute the same policies in a new run.

    All processes must call it. Their shapes do not tell another alpha or another base of the same size. Nothing is
    compared if the other run has no config.json or neither run has adapters.

    Args:
      config: of the new run.
      inputs: of the new run, as `input_record.check` returned them; those of the first process are used.
    """

    def check_locally() -> None:
        if hosts.is_first:
            _check_adapters(source, config, inputs)

    hosts.run_on_all_and_gather(check_locally)


def _check_adapters(source: Source, config, inputs: dict[str, Any]) -> None:
    """Does the work of `check_adapters` in one process."""
    # The checkpoint of the best evaluation lies one level deeper.
    run = source.workdir if (source.workdir / FOLDER).is_dir() else source.workdir.parent
    stored = read_object(run / 'config.json').get('policy')
    if stored is None:
        return
    # A run of an earlier version had no adapters, or no quantised base.
    there = {'rank': 0, 'quantize': 'none'} | stored.get('adapters', {})
    here = config.policy.adapters.to_dict()
    if not there['rank'] and not here['rank']:
        return
    for field in _ADAPTER_FIELDS:
        stored_value, value = there.get(field, here[field]), here[field]
        if field == 'linears':
            stored_value, value = sorted(stored_value), sorted(value)
        if stored_value != value:
            raise UserError(
                f'--from={source.workdir}: its policies have policy.adapters.{field}={stored_value}, the new run has '
                f'{value}; give the same'
            )
    field = 'policy.path'
    recorded = read_object(run / input_record.FILE_NAME).get(field)
    if recorded is not None:
        difference = input_record.find_difference({field: recorded}, {field: inputs[field]})
    else:
        stored_path = stored.get('path') or str(BUILT_IN_CHECKPOINT)
        is_same = _is_same_folder(stored_path, config.policy.path or str(BUILT_IN_CHECKPOINT))
        difference = '' if is_same else f'{field}: {stored_path} is another folder'
    if difference:
        raise UserError(
            f'--from={source.workdir}: its adapters have another base ({difference}); give the one of that run'
        )


def _is_same_folder(stored_path: str, path: str) -> bool:
    """Returns whether two values of `policy.path` name the same folder."""
    names = [workdir_files.portable(stored_path), workdir_files.portable(path)]
    if names[0] == names[1]:
        return True
    # What is on the Hub or in a bucket has no path.
    if any(hub.is_name(name) or objects.is_address(name) for name in names):
        return False
    stored_folder, folder = (pathlib.Path(built_in_path(name)).resolve() for name in names)
    return stored_folder == folder


def read_object(path: pathlib.Path) -> Json:
    """Returns the object in a JSON file; {} if there is none."""
    try:
        return json_text.read_object(path)
    except (OSError, ValueError):
        return {}


def policy_names(source: Source) -> list[str]:
    """Returns the names of the policies in a checkpoint."""
    names = stored_tree(source.folder)
    return [name for name in names if not name.startswith(CHECKPOINT_PREFIX)]


def read_params(source: Source, name: str) -> Params:
    """Returns the weights of a checkpoint as NumPy arrays, whatever devices the run had.

    Args:
      name: one of `policy_names`.
    """
    item = {name: {'params': stored_tree(source.folder)[name]['params']}}
    arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    request = ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)
    reader = state_reader()
    return reader.restore(source.folder / 'states', args=request)[name]['params']


def load(hosts: Hosts, source: Source, engine: Engine) -> Source:
    """Gives all learners of an engine the state of a run's newest checkpoint, and publishes their weights.

    All processes must call it, and get the checkpoint that was loaded. It is newer than `source` if the other run has
    saved a step since.

    Raises:
      UserError: the weights have other shapes.
    """
    loaded = source_checkpoint.read_newest(
        lambda: source_checkpoint.newest_on_all(hosts, source.workdir, source.is_copy),
        lambda newest: hosts.run_on_all_and_gather(lambda: _restore(newest, engine)),
    )
    for name in engine.learners:
        engine.publish_weights(name)
    return loaded


def _restore(source: Source, engine: Engine) -> None:
    """Sets the states of all learners, and of the value networks that the checkpoint has."""
    tree = stored_tree(source.folder)
    for name, learner in engine.learners.items():
        stored = {}
        for part in _PARTS:
            if part in tree[name] and part in learner.state:
                stored[part] = tree[name][part]
        # Teachers of earlier versions may have the rank of the adapters.
        if 'teacher' in stored and _shapes(stored['teacher']) != _shapes(learner.state['teacher']):
            del stored['teacher']
        state = _merged(source, name, learner, _read(source, name, stored, learner))
        if 'teacher' in learner.state and 'teacher' not in stored:
            # The average begins with the weights of now and not with those of config.policy.path.
            state['teacher'] = learner.initial_teacher(state['params'])
        learner.restore(state)
    for role, network in engine.value_networks.items():
        name = CHECKPOINT_PREFIX + role
        # The other run may have had no value network.
        if name in tree:
            arrays = _read(source, name, tree[name], network)
            network.restore(_merged(source, name, network, arrays))


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {path: tuple(array.shape) for path, array in arrays_by_path(tree).items()}


def _read(
    source: Source, name: str, stored: Json, network: Learner | ValueNetwork
) -> dict[str, jax.Array]:
    """Returns the arrays of one set of weights by their path, on the devices of the learner.

    Args:
      name: of the weights.
      stored: the part of `stored_tree` to read.
    """
    shardings = arrays_by_path(network.shardings)
    replicated = sharding.replicated(network.mesh)

    def restore_arguments(path: Any, _: Any) -> ocp.ArrayRestoreArgs:
        return ocp.ArrayRestoreArgs(sharding=shardings.get(sharding.path_name(path), replicated))

    arguments = jax.tree_util.tree_map_with_path(restore_arguments, stored)
    request = ocp.args.PyTreeRestore(
        item={name: stored}, restore_args={name: arguments}, partial_restore=True
    )
    reader = state_reader()
    return arrays_by_path(reader.restore(source.folder / 'states', args=request)[name])


def _merged(
    source: Source, name: str, network: Learner | ValueNetwork, arrays: dict[str, jax.Array]
) -> dict[str, Any]:
    """Returns a state with the arrays of a checkpoint where their paths and shapes are equal.

    Raises:
      UserError: an array of the weights is missing or has another shape.
    """

    def merge(path: Any, leaf: Any) -> Any:
        path_name = sharding.path_name(path)
        array = arrays.get(path_name)
        if array is not None and array.shape == leaf.shape:
            return array
        if path_name.startswith('params'):
            there = 'is missing' if array is None else f'has the shape {tuple(array.shape)}'
            raise UserError(
                f'--from={source.workdir}: {name}/{path_name} {there}, config.policy.path has {tuple(leaf.shape)}; '
                'take the model that the run was started with'
            )
        # Moments of an optimiser that the other run lacked, or its position in a warm-up.
        return leaf

    return dict(jax.tree_util.tree_map_with_path(merge, network.state))


def record(hosts: Hosts, workdir: pathlib.Path, source: Source, engine: Engine) -> None:
    """Writes from.json: which checkpoint the run began with, and fingerprints of its weights."""
    fingerprints = {}
    for name, learner in engine.learners.items():
        fingerprints[name] = weights_fingerprint(learner.params, learner.mesh)
    if hosts.is_first:
        write_record(workdir, source, fingerprints)


def write_record(workdir: pathlib.Path, source: Source, fingerprints: dict[str, list[int]]) -> None:
    """Writes from.json; `fingerprints`: name → fingerprint of the weights with which training began."""
    address = object_cache.address_of(str(source.workdir))
    content = {'workdir': address, 'step': source.step, 'weights': fingerprints}
    atomic.write_text(workdir / FILE_NAME, json.dumps(content, indent=1) + '\n')


def read_record(workdir: pathlib.Path) -> Json | None:
    """Returns what `write_record` wrote: 'workdir', 'step', 'weights'; None for a run that began by itself.

    Raises:
      UserError: the file cannot be read.
    """
    path = workdir / FILE_NAME
    try:
        content = json_text.read_object(path)
        if not {'workdir', 'step', 'weights'} <= content.keys():
            raise ValueError('fields are missing')
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(
            f'{path}: cannot be read ({error}); bring it back from a copy, or choose another workdir'
        ) from None
    return content
