"""A run that begins with another one (`--from`): with its weights, or as the same run with more iterations.

It takes weights, optimiser moments and teachers of all roles, so that a proposer and its solver continue as a pair.
Schedule, question pool, positions in the inputs, evaluations and the recipe's state begin anew, unless the new run is
the other one with more iterations. The other run is only read; it may be finished, killed or still running.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Sequence
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
from zeroplay_jax.retrieval import downloads, objects
from zeroplay_jax.run.run_folder import POLICY, Place
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.record import Entries, Identity, find_difference
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.recipe import weights_of_roles
from zeroplay_jax.selfplay.schedule import Step
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
# Of a longer run: the files that it takes along, whose steps behind its checkpoint are removed when they are opened,
# and the parts of its state with results by the number of their step.
_LOGS = ('*.jsonl', 'events.out.tfevents*')
_RESULTS = ('evaluations', 'rubrics', 'scores')
_STAGED = '.continued'


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


def newest_checkpoint(workdir: pathlib.Path, links: pathlib.Path | None = None) -> Source:
    """Returns the newest whole checkpoint of a run, which may be in progress; changes nothing there.

    Args:
      workdir: the run's workdir, or its folder `best`.
      links: gets links to the files, which stay when the run removes them; None: none.

    Raises:
      Damaged, UserError: one line; there is no whole checkpoint, or it is of another run than the records beside it.
    """
    folder = workdir / FOLDER if (workdir / FOLDER).is_dir() else workdir
    damage = ''
    first_damage = ''
    for step in reversed(saved_steps(folder)):
        path = folder / str(step)
        if links is not None:
            path = _linked(path, links / str(step))
        damage = checkpoint.find_damage(path)
        if not damage and path.is_dir():
            run_record.check_checkpoint(path, _run_of(workdir))
            return Source(workdir.resolve(), step, path.resolve(), first_damage)
        first_damage = first_damage or f'checkpoint {step} is damaged: {damage}'
    remedy = 'name the workdir of a run that has saved a step'
    if damage:
        raise Damaged(f'{workdir}: its checkpoints are damaged: {damage}; {remedy}')
    raise UserError(f'{workdir}: it has no checkpoint; {remedy}')


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
def found(
    hosts: Hosts, place: Place, source: str | None, is_resumed: bool
) -> Iterator[Source | None]:
    """Returns a context with the checkpoint that a new run begins with; None for any other run, and a resumed one.

    All processes must call it, and get the same checkpoint.

    Args:
      place: of the new run.
      source: value of --from, or None.
      is_resumed: whether the new run has a checkpoint, and with it the weights of the other run.

    Raises:
      UserError: one line; --from differs from that at the start of the run, or names no run with a whole checkpoint.
    """
    # Copies of several processes may meet in one folder.
    links = place.workdir / f'{_LINKS}_{hosts.index}'
    # Of a process that was killed.
    shutil.rmtree(links, ignore_errors=True)
    other = hosts.run_on_first(_other_run, place.workdir, source, is_resumed)
    if other is None:
        yield None
        return
    is_copy = objects.is_address(other)
    # Each process of a run in a bucket has a folder of its own, and each reads its own copy of another one there.
    is_each = is_copy or not place.is_shared

    def link() -> list[Any] | None:
        if not is_each and not hosts.is_first:
            return None
        workdir, step, folder, damage = (
            _copy_of(other, links) if is_copy else newest_checkpoint(pathlib.Path(other), links)
        )
        seal = (folder / checkpoint.FILE_NAME).read_text(encoding='utf-8')
        return [run_record.digest(seal), str(workdir), step, str(folder), damage]

    try:
        linked = hosts.run_on_all_and_gather(link)
        contents = {entry[0] for entry in linked if entry is not None}
        if len(contents) > 1:
            raise UserError(
                f'--from={source}: the processes have different checkpoints; run the command again'
            )
        _, workdir, step, folder, damage = linked[hosts.index if is_each else 0]
        yield Source(pathlib.Path(workdir), step, pathlib.Path(folder), damage)
    finally:
        if is_each or hosts.is_first:
            shutil.rmtree(links, ignore_errors=True)


def _copy_of(address: str, links: pathlib.Path) -> Source:
    """Returns the newest checkpoint of a run in a bucket, from a local copy, which is made anew if it is damaged."""
    local_source = load_extra('buckets', 'workdir').local_source
    try:
        return newest_checkpoint(local_source(address), links)
    except Damaged:
        shutil.rmtree(links)
        downloads.forget(address)
        return newest_checkpoint(local_source(address), links)


def _other_run(workdir: pathlib.Path, source: str | None, is_resumed: bool) -> str | None:
    """Returns address or absolute path of the run that a new one begins with; arguments and errors as of `found`."""
    recorded = run_record.read(workdir)
    origin = recorded.origin if recorded else None
    began_from = downloads.address_of(origin['workdir']) if origin else None
    wanted = path = None
    if source and objects.is_address(source):
        wanted = source.rstrip('/')
    elif source:
        path = pathlib.Path(source).resolve()
        wanted = downloads.address_of(str(path))
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
    if wanted == str(workdir.resolve()):
        raise UserError(f'--from={source}: is the workdir itself; choose another --workdir')
    if path is None:
        return source
    # Refuses a record that cannot be read.
    try:
        run_record.read(path)
    except OSError as error:
        raise UserError(f'--from={source}: cannot be read ({error.strerror})') from None
    return str(path)


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
    recorded = run_record.read(_run_of(source.workdir))
    if recorded is None:
        return
    here = config.policy.adapters.to_dict()
    there = here | {'rank': 0} | recorded.config['policy'].get('adapters', {})
    if not there['rank'] and not here['rank']:
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
    """Gives all learners of an engine, and value networks, their states in a checkpoint; `publish` follows.

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


def publish(engine: Engine) -> None:
    """Publishes the weights that `load` has read; all processes must have read theirs."""
    for name in engine.learners:
        engine.publish(name, version=0)
    engine.take_snapshots()


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


def origin_of(source: Source) -> Json:
    """Returns `Record.origin` of a run that begins with a checkpoint."""
    return {'workdir': downloads.address_of(str(source.workdir)), 'step': source.step}


def is_longer(workdir: pathlib.Path, source: Source, config: Config) -> bool:
    """Returns whether a new run continues the schedule of another one instead of beginning a new one.

    It does if it has more iterations, and equal values of all other fields that must not change when a run is resumed,
    and if both read the same files, search the same index and have the same tools. Call it after the inputs and the
    tools of the new run were recorded.

    Args:
      workdir: of the new run.
      source: the newest checkpoint of the other run; one of its folder `best` is never continued.
      config: of the new run.
    """
    if not (source.workdir / FOLDER).is_dir():
        return False
    there, here = run_record.read(source.workdir), run_record.read(workdir)
    if there is None or here is None:
        return False
    iterations = there.config['schedule']['iterations']
    if config.schedule.iterations <= iterations:
        return False
    like_stored = config.to_dict()
    like_stored['schedule']['iterations'] = iterations
    changeable = fields.changeable_fields(config)
    try:
        run_workdir.check(source.workdir, like_stored, changeable)
    except run_workdir.WorkdirError:
        return False
    difference = find_difference(there.inputs, here.inputs)
    return not (difference or find_difference(there.tools or {}, here.tools or {}))


def copy(
    hosts: Hosts, place: Place, source: Source, steps: Sequence[Step], run_identity: Identity
) -> None:
    """Copies logs and checkpoint of a shorter run, as if the new run had made them.

    The run ends bit for bit as if it had had that many iterations from its start: beside weights, moments and teachers
    it takes question pool, positions in the inputs, evaluations and logs. All processes must call it before they open a
    `Checkpointer`.

    Args:
      place: of the new run.
      source: a checkpoint of the other run.
      steps: all steps of the new run.
      run_identity: of the new run, which logs and checkpoint get.
    """
    workdir = place.workdir

    def copy_locally() -> None:
        if place.is_shared and not hosts.is_first:
            return
        workdir.mkdir(parents=True, exist_ok=True)
        there = run_record.read(source.workdir)
        if hosts.is_first and there is not None:
            changes = {'weights': there.weights, 'reported': there.reported}
            run_record.update(workdir, origin=origin_of(source), **changes)
        # The checkpoint comes last: with it the run counts as begun. Logs that reach further than it are cut.
        for pattern in _LOGS:
            for path in source.workdir.glob(pattern):
                shutil.copyfile(path, workdir / path.name)
        old_hash = run_record.hash_of(run_record.identity_of_checkpoint(source.folder))
        for path in workdir.glob('*.jsonl') if old_hash else ():
            _replace_hash(path, old_hash, run_record.hash_of(run_identity))
        _copy_checkpoint(source.folder, workdir, steps, run_identity)

    hosts.run_on_all(copy_locally)


def _replace_hash(path: pathlib.Path, there: str, here: str) -> None:
    """Writes the hash of the new run in place of that of the other one at the end of each line of a log."""
    ends = [json.dumps({run_record.HASH_FIELD: run})[1:].encode() + b'\n' for run in (there, here)]
    # A name that is no log: a kill may leave it behind.
    copy = path.with_name(f'{_STAGED}.{path.name}.part')
    with path.open('rb') as source, copy.open('wb') as target:
        for line in source:
            target.write(line.removesuffix(ends[0]) + ends[1] if line.endswith(ends[0]) else line)
    os.replace(copy, path)


def _copy_checkpoint(
    folder: pathlib.Path,
    workdir: pathlib.Path,
    steps: Sequence[Step],
    run_identity: Identity,
) -> None:
    """Copies a checkpoint into the workdir of a longer run, without the evaluation at the end of the shorter one."""
    staged = workdir / _STAGED
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(folder, staged)
    path = staged / 'loop' / 'metadata'
    state = json.loads(path.read_text(encoding='utf-8'))
    number = str(state['cursor'] - 1)
    # The evaluation that ends the shorter schedule is no step of the longer one. It changes nothing but its results.
    if number in state['evaluations'] and steps[int(number)].phase.name != 'evaluation':
        for name in _RESULTS:
            state.get(name, {}).pop(number, None)
        state['cursor'] -= 1
    state[run_record.STATE_FIELD] = run_identity
    path.write_text(json.dumps(state), encoding='utf-8')
    checkpoint.write(staged)
    target = workdir / FOLDER / str(state['cursor'])
    target.parent.mkdir(exist_ok=True)
    os.replace(staged, target)
