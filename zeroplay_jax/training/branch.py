"""A run that begins with another one (`--from`): with its weights, or as the same run with more iterations.

It takes weights, optimiser moments and teachers of all roles, so that a proposer and its solver continue as a pair.
Schedule, question pool, positions in the inputs, evaluations and the recipe's state begin anew, unless the new run is
the other one with more iterations. The other run is only read; it may be finished, killed or still running.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from zeroplay_jax.configuration import fields
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
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.runtime.disk import file_digests
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.record import Entries, Identity, find_difference
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.settings.kinds import warn
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.training.run_folder import POLICY
from zeroplay_jax.types import Json, UserError

if TYPE_CHECKING:
    from zeroplay_jax.learner.value_network import ValueNetwork

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
    other = hosts.run_on_first(_other_run, workdir, source, is_resumed)
    if other is None:
        return None
    # Not before: a resumed run needs the other one no more, which may be gone.
    if objects.is_address(other):
        return copy_on_all(hosts, other)
    return newest_on_all(hosts, pathlib.Path(other))


def _other_run(workdir: pathlib.Path, source: str | None, is_resumed: bool) -> str | None:
    """Returns address or absolute path of the run that a new one begins with; arguments and errors as of `find`."""
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


def check_policies(source: Source, names: list[str]) -> None:
    """Raises UserError unless a checkpoint has weights of all these names; reads a small file."""
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


def check_adapters(source: Source, config: Config, inputs: Entries) -> None:
    """Raises UserError unless the adapters of a checkpoint compute the same policies in a new run.

    Their shapes do not tell another alpha or another base of the same size. Nothing is compared if the other run has no
    record or neither run has adapters.

    Args:
      config: of the new run.
      inputs: of the new run, as `run_folder.check` returned them.
    """
    # The checkpoint of the best evaluation lies one level deeper.
    run = source.workdir if (source.workdir / FOLDER).is_dir() else source.workdir.parent
    recorded = run_record.read(run)
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


def load(hosts: Hosts, source: Source, engine: Engine) -> Source:
    """Gives all learners of an engine the state of a run's newest checkpoint, and publishes their weights.

    All processes must call it, and get the checkpoint that was loaded. It is newer than `source` if the other run has
    saved a step since.

    Raises:
      UserError: the weights have other shapes.
    """
    loaded = _read_on_all(hosts, source, lambda newest: _restore(newest, engine))
    for name in engine.learners:
        engine.publish(name, version=0)
    engine.take_snapshots()
    return loaded


def _restore(source: Source, engine: Engine) -> None:
    """Sets the states of all learners, and of the value networks that the checkpoint has."""
    tree = stored_tree(source.folder)
    for name, learner in engine.learners.items():
        stored = {}
        for part in _PARTS:
            if part in tree[name] and part in learner.state:
                stored[part] = tree[name][part]
        state = _merged(source, name, learner, _read(source, name, stored, learner))
        if 'teacher' in learner.state and 'teacher' not in stored:
            # The average begins with the weights of now and not with those of config.policy.path.
            state['teacher'] = learner.initial_teacher(state['params'])
        learner.restore(state)
    for role, network in engine.value_networks.items():
        name = VALUE_NETWORK_PREFIX + role
        # The other run may have had no value network.
        if name in tree:
            arrays = _read(source, name, tree[name], network)
            network.restore(_merged(source, name, network, arrays))


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


def origin_of(source: Source) -> Json:
    """Returns `Record.origin` of a run that begins with a checkpoint."""
    return {'workdir': downloads.address_of(str(source.workdir)), 'step': source.step}


# ---- more iterations of the same run ---------------------------------------------------------------
#
# The run ends bit for bit as if it had had that many iterations from its start: beside weights, moments and teachers it
# takes question pool, positions in the inputs, evaluations and logs.


# Files of a workdir that a continued run takes along; steps behind its checkpoint are removed when they are opened.
_PATTERNS = ('*.jsonl', 'events.out.tfevents*')
# Parts of the loop's state with results by the number of their step.
_RESULTS = ('evaluations', 'rubrics', 'scores')
_STAGED = '.continued'


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
    hosts: Hosts,
    workdir: pathlib.Path,
    source: Source,
    steps: Sequence[Step],
    run_identity: Identity,
    is_shared: bool,
) -> Source:
    """Copies logs and newest checkpoint of another run, as if the new run had made them; returns the checkpoint.

    All processes must call it before they open a `Checkpointer`.

    Args:
      workdir: of the new run.
      source: a checkpoint of the other run; its newest one is taken.
      steps: all steps of the new run.
      run_identity: of the new run, which logs and checkpoint get.
      is_shared: whether all processes have the same workdir.
    """

    def copy_locally(newest: Source) -> None:
        if is_shared and not hosts.is_first:
            return
        workdir.mkdir(parents=True, exist_ok=True)
        there = run_record.read(source.workdir)
        if hosts.is_first and there is not None:
            changes = {'weights': there.weights, 'reported': there.reported}
            run_record.update(workdir, origin=origin_of(newest), **changes)
        # The checkpoint comes last: with it the run counts as begun. Logs that reach further than it are cut.
        for pattern in _PATTERNS:
            for path in source.workdir.glob(pattern):
                shutil.copyfile(path, workdir / path.name)
        old_hash = run_record.hash_of(run_record.identity_of_checkpoint(newest.folder))
        for path in workdir.glob('*.jsonl') if old_hash else ():
            _replace_hash(path, old_hash, run_record.hash_of(run_identity))
        _copy_checkpoint(newest.folder, workdir, steps, run_identity)

    return _read_on_all(hosts, source, copy_locally)


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
    """Copies a checkpoint into the workdir of a longer run, without the evaluation at the end of the shorter one.

    Raises:
      OSError: the other run removes the checkpoint meanwhile.
    """
    staged = workdir / _STAGED
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(folder, staged)
    damage = checkpoint.find_damage(staged)
    if damage:
        raise OSError(f'{folder}: {damage}')
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


# ---- checkpoints of another run --------------------------------------------------------------------
#
# That run may be in progress.


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
            warn(f'{self.workdir}: {self.damage}; takes checkpoint {self.step} in its place')
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
    for step in reversed(saved_steps(folder)):
        path = folder / str(step)
        # A step that its run removes meanwhile counts as damaged.
        damage = checkpoint.find_damage(path)
        if not damage and path.is_dir():
            run = workdir if folder != workdir else workdir.parent
            run_record.check_checkpoint(path, run)
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


def _read_on_all(hosts: Hosts, source: Source, read: Callable[[Source], None]) -> Source:
    """Calls `read_newest` in all processes, with what follows on `source`; `read`: in one process."""
    return read_newest(
        lambda: newest_on_all(hosts, source.workdir, source.is_copy),
        lambda newest: hosts.run_on_all(read, newest),
    )


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
    """Returns the number of a step and the SHA-256 of its checksums, which tells its content; '' if it is removed."""
    seal = source.folder / checkpoint.FILE_NAME
    return [source.step, *(file_digests([seal]) if seal.is_file() else [''])]


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
    # Only a run in a bucket loads this code.
    from zeroplay_jax.runtime.remote_workdir import newest_step

    for _ in range(_COPIES):
        step = hosts.run_on_first(newest_step, address)
        copies = hosts.run_on_all_and_gather(functools.partial(_copy, address, step))
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
    from zeroplay_jax.runtime.remote_workdir import StepRemoved, local_source

    def copied() -> Source:
        return newest_checkpoint(pathlib.Path(local_source(address, step)))

    try:
        try:
            source = copied()
        except Damaged:
            downloads.forget(address)
            source = copied()
    except StepRemoved:
        return None
    except Damaged as error:
        raise UserError(f'--from={address}: was downloaded again. {error}') from None
    return [str(source.workdir), _content(source)]
