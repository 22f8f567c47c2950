"""A run that begins with another one (`--from`): with weights, optimiser moments and teachers of all its roles.

A proposer and its solver so continue as a pair. Schedule, question pool, positions in the inputs, evaluations and the
recipe's state begin anew. The other run is only read; it may be finished, killed or still running.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from zeroplay_jax.configuration import fields
from zeroplay_jax.extras import load_extra
from zeroplay_jax.learner import checkpoint
from zeroplay_jax.learner.checkpoint import (
    FOLDER,
    VALUE_NETWORK_PREFIX,
    arrays_by_path,
    saved_steps,
    state_reader,
    stored_tree,
)
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import sharding
from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.run.policies import fingerprints
from zeroplay_jax.run.run_folder import POLICY, Place
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.record import Entries, find_difference
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.recipe import weights_of_roles
from zeroplay_jax.settings.kinds import warn
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Json, UserError, first_line

if TYPE_CHECKING:
    from zeroplay_jax.learner.value_network import ValueNetwork

# Folder in the workdir of a new run with links to the checkpoint of the other one.
_LINKS = '.from'
# Parts of a learner's state; the last two are taken where both runs have them.
_PARTS = ('params', 'opt', 'teacher')
# Fields of policy.adapters that decide what the arrays of an adapter, and their base, mean.
_ADAPTER_FIELDS = ('rank', 'alpha', 'linears', 'quantize')


class Source(NamedTuple):
    """A whole checkpoint of another run.

    Attributes:
      workdir: that run's workdir, or its folder `best`; absolute.
      step: number of the checkpoint.
      folder: where it is read.
      damage: of a newer checkpoint, in words; '' if this is the newest.
    """

    workdir: pathlib.Path
    step: int
    folder: pathlib.Path
    damage: str = ''

    def print_use(self, verb: str = '') -> None:
        """Prints which checkpoint is read, and before it a warning if a newer one is damaged."""
        if self.damage:
            warn(f'{self.workdir}: {self.damage}; takes checkpoint {self.step} in its place')
        print(f'{verb} checkpoint {self.step} of {self.workdir}'.lstrip(), file=sys.stderr)


class Damaged(UserError):
    """All checkpoints of a run are damaged."""


def newest_checkpoint(
    workdir: pathlib.Path, links: pathlib.Path | None = None, step: int | None = None
) -> Source:
    """Returns the newest whole checkpoint of a run, which may be in progress; changes nothing there.

    Args:
      workdir: the run's workdir, or its folder `best`.
      links: gets links to the files, which stay when the run removes them; None: none.
      step: the only one to be taken; None: any.

    Raises:
      Damaged, UserError: one line; there is no whole checkpoint, or it is of another run than the records beside it.
    """
    folder = workdir / FOLDER if (workdir / FOLDER).is_dir() else workdir
    damage = ''
    first_damage = ''
    for number in reversed(saved_steps(folder)):
        if step not in (None, number):
            continue
        path = folder / str(number)
        if links is not None:
            path = _linked(path, links / str(number))
        damage = checkpoint.find_damage(path)
        if not damage and path.is_dir():
            run_record.check_checkpoint(path, _run_of(workdir))
            return Source(workdir.resolve(), number, path.resolve(), first_damage)
        first_damage = first_damage or f'checkpoint {number} is damaged: {damage}'
    remedy = 'name the workdir of a run that has saved a step'
    if damage:
        raise Damaged(f'{workdir}: its checkpoints are damaged: {damage}; {remedy}')
    if step is not None:
        remedy = 'the run goes on meanwhile; run the command again'
    raise UserError(
        f'{workdir}: it has no checkpoint{"" if step is None else f" {step}"}; {remedy}'
    )


def _run_of(workdir: pathlib.Path) -> pathlib.Path:
    """Returns the workdir of a run, of which `workdir` may be the folder `best`, one level deeper."""
    return workdir if (workdir / FOLDER).is_dir() else workdir.parent


def _linked(folder: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Links the files of a folder into another one, or copies them where there are no links; returns this one."""

    def link(source: str, destination: str) -> None:
        try:
            os.link(source, destination)
        except OSError:
            shutil.copyfile(source, destination)

    try:
        shutil.copytree(folder, target, copy_function=link)
    except OSError as error:
        # A folder that the run has removed meanwhile counts as damaged.
        if folder.is_dir():
            raise UserError(
                f'{folder}: cannot be linked or copied to {target} ({first_line(error)}); run the command again'
            ) from None
    return target


@contextlib.contextmanager
def found(hosts: Hosts, place: Place, other: str) -> Iterator[Source]:
    """Returns a context with the checkpoint that a new run begins with: one step, which the first process chooses.

    All processes must call it.

    Args:
      place: of the new run.
      other: address or path of the other run (`run_folder.other_run`).

    Raises:
      UserError: one line; `other` is no run with a whole checkpoint, or another one for some process.
    """
    # Copies of several processes may meet in one folder.
    links = place.workdir / f'{_LINKS}_{hosts.index}'
    # Of a process that was killed.
    shutil.rmtree(links, ignore_errors=True)
    # Each process of a run in a bucket has a folder of its own, and each reads its own copy of another one there.
    is_each = downloads.is_address(other) or not place.is_shared

    def link(step: int | None = None) -> list[Any]:
        workdir, number, folder, damage = _linked_checkpoint(other, links, step)
        seal = (folder / checkpoint.FILE_NAME).read_text(encoding='utf-8')
        return [str(workdir), number, str(folder), damage, run_record.digest(seal)]

    try:
        chosen = hosts.run_on_first(link)
        if is_each:
            linked = hosts.run_on_all_and_gather(
                lambda: chosen if hosts.is_first else link(chosen[1])
            )
            chosen = linked[hosts.index]
            if len({content for *_, content in linked}) > 1:
                raise UserError(
                    f'--from={other}: the processes have different checkpoints; give all the same run'
                )
        workdir, step, folder, damage, _ = chosen
        yield Source(pathlib.Path(workdir), step, pathlib.Path(folder), damage)
    finally:
        if is_each or hosts.is_first:
            shutil.rmtree(links, ignore_errors=True)


def _linked_checkpoint(other: str, links: pathlib.Path, step: int | None) -> Source:
    """Returns the newest whole checkpoint of a run, or that of a step; of one in a bucket from a local copy."""
    if not downloads.is_address(other):
        return newest_checkpoint(pathlib.Path(other), links, step)
    copies = load_extra('buckets', 'copies')
    try:
        return newest_checkpoint(copies.local_source(other, step), links, step)
    except Damaged:
        # The copy, which is made anew.
        shutil.rmtree(links)
        copies.forget(other)
        return newest_checkpoint(copies.local_source(other, step), links, step)


def check(source: Source, config: Config, inputs: Entries) -> None:
    """Refuses a checkpoint without the weights of a new run, or with adapters that compute other policies there.

    Shapes do not tell another alpha or another base of the same size. Adapters are not compared if the other run has no
    record or neither run has adapters.

    Args:
      config: of the new run.
      inputs: of the new run, as `run_folder.check` returned them.

    Raises:
      UserError: one line.
    """
    present = policy_names(source)
    for name in weights_of_roles(config).values():
        if name not in present:
            raise UserError(
                f'--from={source.workdir}: has the policies {", ".join(present)} and not {name}; take a run with the '
                'same trained roles and the same config.weights'
            )
    workdir = _run_of(source.workdir)
    recorded = run_record.read(workdir)
    try:
        stored = fields.read_stored_config(workdir)
    except UserError as error:
        raise UserError(f'--from={source.workdir}: {error}') from None
    if recorded is None or stored is None:
        return
    here, there = config.policy.adapters, stored.policy.adapters
    if not there.rank and not here.rank:
        return
    for field in _ADAPTER_FIELDS:
        stored_value, value = there[field], here[field]
        if field == 'linears':
            stored_value, value = sorted(stored_value), sorted(value)
        if stored_value != value:
            raise UserError(
                f'--from={source.workdir}: its policies have policy.adapters.{field}={stored_value}, the new run has '
                f'{value}; give the same'
            )
    base = {POLICY: recorded.inputs.get(POLICY, {})}
    difference = find_difference(base, {POLICY: inputs[POLICY]})
    if difference:
        raise UserError(
            f'--from={source.workdir}: its adapters have another base ({difference}); give the one of that run'
        )


def policy_names(source: Source) -> list[str]:
    """Returns the names of the policies in a checkpoint."""
    names = stored_tree(source.folder)
    return [name for name in names if not name.startswith(VALUE_NETWORK_PREFIX)]


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


def load(source: Source, engine: Engine) -> None:
    """Gives all learners of an engine, and value networks, their states in a checkpoint.

    Raises:
      UserError: the weights have other shapes.
    """
    tree = stored_tree(source.folder)
    for name, learner in engine.learners.items():
        stored = {}
        for part in _PARTS:
            if part in tree[name] and part in learner.state:
                stored[part] = tree[name][part]
        state = _state_of(source, name, stored, learner)
        if 'teacher' in learner.state and 'teacher' not in stored:
            # The average begins with the weights of now and not with those of config.policy.path.
            state['teacher'] = learner.initial_teacher(state['params'])
        learner.restore(state)
    for role, network in engine.value_networks.items():
        name = VALUE_NETWORK_PREFIX + role
        # The other run may have had no value network.
        if name in tree:
            network.restore(_state_of(source, name, tree[name], network))


def begin(hosts: Hosts, workdir: pathlib.Path, engine: Engine, source: Source) -> None:
    """Gives a new run the weights of a checkpoint, and notes them in its record; all processes must call it."""
    hosts.run_on_all(load, source, engine)
    for name in engine.learners:
        engine.publish(name, version=0)
    engine.take_snapshots()
    weights = fingerprints(engine)
    if hosts.is_first:
        origin = {'workdir': downloads.address_of(str(source.workdir)), 'step': source.step}
        run_record.update(workdir, origin=origin, weights=weights)
        source.print_use('begins with')


def _state_of(
    source: Source, name: str, stored: Json, network: Learner | ValueNetwork
) -> dict[str, Any]:
    """Returns the state of a network with the arrays of a checkpoint where their paths and shapes are equal.

    Args:
      name: of the weights.
      stored: the part of `stored_tree` to read.

    Raises:
      UserError: an array of the weights is missing or has another shape.
    """
    shardings = arrays_by_path(network.shardings)
    replicated = sharding.replicated(network.mesh)

    def restore_arguments(path: Any, _: Any) -> ocp.ArrayRestoreArgs:
        return ocp.ArrayRestoreArgs(sharding=shardings.get(sharding.path_name(path), replicated))

    arguments = jax.tree_util.tree_map_with_path(restore_arguments, stored)
    request = ocp.args.PyTreeRestore(
        item={name: stored}, restore_args={name: arguments}, partial_restore=True
    )
    restored = state_reader().restore(source.folder / 'states', args=request)
    arrays = arrays_by_path(restored[name])

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
