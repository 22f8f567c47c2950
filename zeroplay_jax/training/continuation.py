"""A run that continues the schedule of another one with more iterations (`--from`).

It ends bit for bit as if it had had that many iterations from its start: beside weights, moments and teachers it takes
question pool, positions in the inputs, evaluations and logs. The other run is only read, and may be finished, killed or
still running.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from zeroplay_jax.configuration import resumption
from zeroplay_jax.learner import checkpoint
from zeroplay_jax.learner.checkpoint import FOLDER
from zeroplay_jax.runtime import identity
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.training import branch, input_record, source_checkpoint, tool_record
from zeroplay_jax.training.run_folder import REPORTED_FILE
from zeroplay_jax.training.source_checkpoint import Source

# Files of a workdir that a continued run takes along; steps behind its checkpoint are removed when they are opened.
_PATTERNS = ('*.jsonl', 'events.out.tfevents*', REPORTED_FILE)
# Parts of the loop's state with results by the number of their step.
_RESULTS = ('evaluations', 'rubrics', 'scores')
_STAGED = '.continued'


def is_longer(hosts: Hosts, workdir: pathlib.Path, source: Source, config) -> bool:
    """Returns whether a new run continues the schedule of another one instead of beginning a new one.

    It does if it has more iterations, and equal values of all other fields that must not change when a run is resumed,
    and if both read the same files, search the same index and have the same tools. All processes must call it, after
    the inputs and the tools of the new run were recorded.

    Args:
      workdir: of the new run.
      source: the newest checkpoint of the other run; one of its folder `best` is never continued.
      config: of the new run.
    """

    def read_both(name: str) -> list[dict[str, Any]]:
        return [dict(branch.read_object(folder / name)) for folder in (source.workdir, workdir)]

    def compare_locally() -> bool:
        if not hosts.is_first or not (source.workdir / FOLDER).is_dir():
            return False
        stored = branch.read_object(source.workdir / 'config.json').get('schedule', {})
        iterations = stored.get('iterations')
        if not isinstance(iterations, int) or config.schedule.iterations <= iterations:
            return False
        like_stored = config.to_dict()
        like_stored['schedule']['iterations'] = iterations
        changeable = resumption.changeable_fields(config)
        try:
            run_workdir.check(source.workdir, like_stored, changeable, resumption.defaults(config))
        except run_workdir.WorkdirError:
            return False
        try:
            difference = input_record.find_difference(*read_both(input_record.FILE_NAME))
            difference += tool_record.find_role_difference(*read_both(tool_record.FILE_NAME))
        # A record that another program has changed.
        except (AttributeError, TypeError):
            return False
        return not difference

    return hosts.run_on_all_and_gather(compare_locally)[0]


def copy(
    hosts: Hosts,
    workdir: pathlib.Path,
    source: Source,
    steps: Sequence[Step],
    first_weights: dict[str, list[int]],
    run_identity: identity.Identity,
    is_shared: bool,
) -> Source:
    """Copies logs and newest checkpoint of another run, as if the new run had made them; returns the checkpoint.

    All processes must call it before they open a `Checkpointer`.

    Args:
      workdir: of the new run.
      source: a checkpoint of the other run; its newest one is taken.
      steps: all steps of the new run.
      first_weights: fingerprints of the weights with which the other run has begun.
      run_identity: of the new run, which logs and checkpoint get.
      is_shared: whether all processes have the same workdir.
    """

    def copy_locally(newest: Source) -> None:
        if is_shared and not hosts.is_first:
            return
        workdir.mkdir(parents=True, exist_ok=True)
        recorded = branch.read_record(source.workdir)
        weights = recorded['weights'] if recorded else first_weights
        branch.write_record(workdir, newest, weights)
        # The checkpoint comes last: with it the run counts as begun. Logs that reach further than it are cut.
        for pattern in _PATTERNS:
            for path in source.workdir.glob(pattern):
                shutil.copyfile(path, workdir / path.name)
        there = identity.hash_of(identity.of_checkpoint(newest.folder))
        for path in workdir.glob('*.jsonl') if there else ():
            _replace_hash(path, there, identity.hash_of(run_identity))
        _copy_checkpoint(newest.folder, workdir, steps, run_identity)

    copied = source_checkpoint.read_newest(
        lambda: source_checkpoint.newest_on_all(hosts, source.workdir, source.is_copy),
        lambda newest: hosts.run_on_all_and_gather(lambda: copy_locally(newest)),
    )
    return copied


def _replace_hash(path: pathlib.Path, there: str, here: str) -> None:
    """Writes the hash of the new run in place of that of the other one at the end of each line of a log."""
    ends = [json.dumps({identity.HASH_FIELD: run})[1:].encode() + b'\n' for run in (there, here)]
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
    run_identity: identity.Identity,
) -> None:
    """Copies a checkpoint into the workdir of a longer run, without the evaluation at the end of the shorter one.

    Raises:
      OSError: the other run removes the checkpoint meanwhile.
    """
    # No step of an earlier version has checksums. If others have them, this one lost them while it was removed.
    are_sealed = any(checkpoint.exist(step) for step in folder.parent.iterdir())
    staged = workdir / _STAGED
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(folder, staged)
    damage = checkpoint.find_damage(staged) if are_sealed else ''
    if damage:
        raise OSError(f'{folder}: {damage}')
    path = staged / 'loop' / 'metadata'
    state: dict[str, Any] = json.loads(path.read_text(encoding='utf-8'))
    number = str(state['cursor'] - 1)
    # The evaluation that ends the shorter schedule is no step of the longer one. It changes nothing but its results.
    if number in state['evaluations'] and steps[int(number)].phase.name != 'evaluation':
        for name in _RESULTS:
            state.get(name, {}).pop(number, None)
        state['cursor'] -= 1
    state[identity.STATE_FIELD] = run_identity
    path.write_text(json.dumps(state), encoding='utf-8')
    checkpoint.write(staged)
    target = workdir / FOLDER / str(state['cursor'])
    target.parent.mkdir(exist_ok=True)
    os.replace(staged, target)
