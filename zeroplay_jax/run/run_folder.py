"""The workdir of a run: locked, and compared with its record (`runtime.record`), which is written when the run begins.

A config names files by their paths and tools by their names. Without a record of what they contain, another index,
other questions or a new version of a server's tools would change a resumed run unnoticed, and its results before and
after would be compared as if nothing had happened. The first process reads and writes the record
(`Hosts.run_on_first`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zeroplay_jax.configuration import fields
from zeroplay_jax.extras import load_extra
from zeroplay_jax.learner.checkpoint import FOLDER, saved_steps
from zeroplay_jax.policy.adapter_config import base_folder, is_adapter
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.runtime.disk import file_digests
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.record import Entries, Identity, PolicyTexts, Record, find_difference
from zeroplay_jax.selfplay.context import Role
from zeroplay_jax.selfplay.library import has_index
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT, is_policy_file, prompts_name
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import UserError

# Field of the name of the index that a search server has.
SERVER = 'retrieval.url'
# Field of the checkpoint that a run begins from.
POLICY = 'policy.path'
# What was chosen for the chat template of the checkpoint: names as of `template_record`, {'value'} for each.
TEMPLATE = 'policy.template'
# Attributes of a tool that reach the policy: through the prompt, or as observations.
ATTRIBUTES = (
    'description',
    'parameters',
    'purpose',
    'argument_hint',
    'returns',
    'note',
    'errors',
    'takes_document_ids',
)


@dataclasses.dataclass(frozen=True)
class Place:
    """The local folder in which a run works, and the hooks of what keeps it elsewhere, such as `extras.buckets`.

    All processes call the hooks, which raise UserError (one line) if nothing can be kept any more.

    Attributes:
      workdir: the folder.
      is_shared: whether all processes have the same folder.
      is_whole: whether damaged checkpoints were set aside.
      after_step: called after every step, and the checkpoint of it.
      at_end: called when summary and report are written.
    """

    workdir: pathlib.Path
    is_shared: bool = True
    is_whole: bool = False
    after_step: Callable[[], Any] = lambda: None
    at_end: Callable[[], Any] = lambda: None


@contextlib.contextmanager
def opened(hosts: Hosts, workdir: str | pathlib.Path, config: Config) -> Iterator[Place]:
    """Locks the workdir, and compares the config in its record with `config`.

    The lock is released when the context ends. All processes must call it; errors of the first are raised on all.
    """
    with contextlib.ExitStack() as stack:
        place = Place(pathlib.Path(workdir))
        if downloads.is_address(workdir):
            buckets = load_extra('buckets', 'run')
            place = stack.enter_context(buckets.opened(hosts, str(workdir), config))
        # run_on_first shares errors, so the lock is taken inside it; the ExitStack holds it until this context ends.
        changeable = fields.changeable_fields(config)
        claim = run_workdir.claim(place.workdir, config.to_dict(), changeable)
        hosts.run_on_first(stack.enter_context, claim)
        yield place


def check(workdir: pathlib.Path, config: Config) -> tuple[Entries, bool]:
    """Compares the files of a resumed run with the record; returns their fingerprints now, and whether it is resumed.

    Call it before anything is read. A run without a checkpoint has learnt nothing yet, and its inputs may change.

    Raises:
      UserError: one line; a file differs from that at the run's start.
    """
    entries = fingerprints(config)
    is_resumed = bool(saved_steps(workdir / FOLDER))
    recorded = run_record.read(workdir)
    if recorded is not None and not is_resumed:
        print('no checkpoint yet: begins again', file=sys.stderr)
    if is_resumed and recorded is not None:
        # The search server was not asked yet, and the template was not opened.
        later = (SERVER, TEMPLATE)
        saved = {name: files for name, files in recorded.inputs.items() if name not in later}
        _check_inputs(workdir, saved, entries)
    return entries, is_resumed


def check_checkpoints(workdir: pathlib.Path) -> None:
    """Raises UserError (one line) if a checkpoint, none of which is damaged, is of another run than the record."""
    for step in saved_steps(workdir / FOLDER):
        run_record.check_checkpoint(workdir / FOLDER / str(step), workdir)


def other_run(workdir: pathlib.Path, source: str | None, is_resumed: bool) -> str | None:
    """Returns address or absolute path of the run that a new one begins with; None for any other, and a resumed run.

    Args:
      source: value of --from.
      is_resumed: whether the new run has a checkpoint, and with it the weights of the other run.

    Raises:
      UserError: one line; --from differs from that at the start of the run, or cannot be read.
    """
    recorded = run_record.read(workdir)
    origin = recorded.origin if recorded else None
    began_from = downloads.address_of(origin['workdir']) if origin else None
    wanted = path = None
    if source and downloads.is_address(source):
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


def begin(
    workdir: pathlib.Path,
    config: Config,
    inputs: Entries,
    *,
    index: str,
    template: Mapping[str, str],
    roles: Mapping[str, Role],
    weights: dict[str, list[int]],
    policies: PolicyTexts,
    is_resumed: bool,
) -> Identity:
    """Writes the record of a run that is known to be possible; returns its identity.

    A resumed run keeps its identity and the weights with which it began.

    Args:
      inputs: as `check` returned them.
      index: name of the search index as its server calls it (its hash, or the address of a server that tells none).
      template: what was chosen for the chat template (`role_environment.template_record`).
      roles: roles in training, whose tools are recorded.
      weights: fingerprints of the weights with which a new run begins.
      policies: files of the policies beside their weights.
      is_resumed: as in `check`.

    Raises:
      UserError: one line; the search server of a resumed run has another index than at its start, or its tools differ.
    """
    current = inputs | template_entry(template)
    if config.retrieval.kind == 'http':
        current[SERVER] = {index: {}}
    tools = listings(roles)
    changeable = fields.changeable_fields(config)
    identity = run_record.identity_of(config.to_dict(), changeable, current)
    recorded = run_record.read(workdir) or Record(run_record.plain_config(config.to_dict()))
    changes: dict[str, Any] = {'inputs': current, 'tools': tools, 'policies': policies}
    # They may have become more.
    recorded.config['schedule']['iterations'] = config.schedule.iterations
    if is_resumed:
        if SERVER in recorded.inputs and SERVER in current:
            _check_inputs(workdir, {SERVER: recorded.inputs[SERVER]}, {SERVER: current[SERVER]})
        _check_tools(workdir, recorded.tools, tools)
        newest = saved_steps(workdir / FOLDER)[-1]
        identity = run_record.identity_of_checkpoint(workdir / FOLDER / str(newest)) or identity
    else:
        changes |= {'weights': weights, 'run': run_record.hash_of(identity)}
    run_record.write(workdir, dataclasses.replace(recorded, **changes))
    return identity


def _check_inputs(workdir: pathlib.Path, saved: Entries, current: Entries) -> None:
    """Raises UserError if recorded inputs differ from the current ones."""
    difference = find_difference(saved, current)
    if difference:
        raise UserError(
            f'{workdir}: the run began with another content of config.{difference}; bring that back, or begin '
            f'another run with --from={workdir}'
        )


def _check_tools(workdir: pathlib.Path, saved: Entries | None, current: Entries) -> None:
    """Raises UserError if recorded tools differ from the current ones."""
    difference = find_difference(saved, current) if saved is not None else ''
    if difference:
        raise UserError(
            f'{workdir}: the run started with other tools: role {difference}; bring the earlier tools back, or remove '
            f'"tools" from {workdir / run_record.FILE_NAME} to continue with these'
        )


def is_reported(workdir: pathlib.Path, cursor: int) -> bool:
    """Returns whether the report of a run that stopped before step `cursor` was written."""
    recorded = run_record.read(workdir)
    return recorded is not None and recorded.reported == cursor


def iteration_folder(step: Step) -> str:
    """Returns the name of the folder with the policies of the end of the step's iteration."""
    return f'iteration{step.phase.iteration + 1}'


def remove_exports(workdir: pathlib.Path, steps: Sequence[Step]) -> None:
    """Removes the policies that a run exports during these last steps, or after them: they will be outdated."""
    # Of `config.log.rows`, each before the step of its number.
    ends = (f'step{step.number + 1}' for step in steps)
    for name in {'policy', *map(iteration_folder, steps), *ends}:
        shutil.rmtree(workdir / name, ignore_errors=True)


def fingerprints(config: Config) -> Entries:
    """Returns the fingerprints of all files that a run reads, by config field and name of the file.

    Every byte of a policy folder and of files of questions, answers, tasks and documents is read, at 1 to 2 GB/s and
    core; the run reads the weights afterwards anyway. An index folder costs one small file: its manifest holds the
    hashes of all others, and opening the index compares sizes and samples, and the encoder's weights.

    Raises:
      OSError: a file cannot be read.
    """
    entries = {field: _entry(paths) for field, paths in _paths(config).items()}
    name = prompts_name(config.prompts)
    if name != config.prompts:
        # The text itself is in the config of the record.
        entries['prompts'] = {name: {}}
    return entries


def _entry(paths: list[pathlib.Path]) -> dict[str, dict[str, Any]]:
    """Returns the fingerprints of files by name."""
    files: dict[str, dict[str, Any]] = {}
    for path, digest in zip(paths, file_digests(paths), strict=True):
        # An adapter and its base have files of the same names.
        name = path.name if path.name not in files else f'{path.parent.name}/{path.name}'
        files[name] = {'bytes': path.stat().st_size, 'sha256': digest}
    return files


def _paths(config: Config) -> dict[str, list[pathlib.Path]]:
    """Returns config field → files."""
    policy = pathlib.Path(config.policy.path or BUILT_IN_CHECKPOINT)
    paths = {POLICY: _start_files(policy)}
    # A search server needs no folder where no documents are read.
    is_server = config.retrieval.kind == 'http'
    if config.retrieval.kind == 'folder' or is_server and has_index(config.retrieval.path):
        paths['retrieval.path'] = [pathlib.Path(config.retrieval.path) / 'manifest.json']
    # Recipes may have such fields of their own.
    for field, value in fields.input_paths(config):
        several = [pathlib.Path(path) for path in value.split(',')]
        path = pathlib.Path(value)
        if path.is_file():
            paths[field] = [path]
        # The adapter that a role starts from.
        elif is_adapter(path):
            paths[field] = _policy_files(path)
        # Of `eval.file`.
        elif all(each.is_file() for each in several):
            paths[field] = several
    return paths


def _start_files(policy: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of the checkpoint that a run begins from: of an adapter, with those of its base."""
    files = _policy_files(policy)
    if is_adapter(policy):
        files += _policy_files(base_folder(policy))
    return files


def _policy_files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in sorted(folder.iterdir()) if is_policy_file(path.name)]


def template_entry(template: Mapping[str, str]) -> Entries:
    """Returns the part of the inputs about the chat template; {} if nothing was chosen for it."""
    if not template:
        return {}
    return {TEMPLATE: {name: {'value': value} for name, value in template.items()}}


def start_date(workdirs: Sequence[pathlib.Path]) -> str:
    """Returns the day, as 2026-11-25, for templates that write the date: the first one that is recorded, else today.

    Prompts must not change when a run goes on over midnight, is resumed or is continued by another one.
    """
    for workdir in workdirs:
        recorded = run_record.read(workdir)
        date = recorded.inputs.get(TEMPLATE, {}).get('date') if recorded else None
        if date is not None:
            return date['value']
    return datetime.date.today().isoformat()


def check_start(workdir: pathlib.Path, folder: pathlib.Path) -> None:
    """Compares the checkpoint that a run began from with the record in its workdir; reads every byte.

    Args:
      folder: what `policy.path` of the run names now.

    Raises:
      UserError: one line; a file differs from that at the run's start.
      OSError: a file cannot be read.
    """
    recorded = run_record.read(workdir)
    if recorded is None or POLICY not in recorded.inputs:
        return
    saved = {POLICY: recorded.inputs[POLICY]}
    difference = find_difference(saved, {POLICY: _entry(_start_files(folder))})
    if difference:
        raise UserError(
            f'{workdir}: the run began with another content of config.{difference} in {folder}; write the folder of '
            f'that content into policy.path of {workdir / run_record.FILE_NAME}'
        )


def listings(roles: Mapping[str, Role]) -> Entries:
    """Returns the tools of each role that has any, as JSON values."""
    attributes_of_roles: Entries = {}
    for role_name, role in roles.items():
        for name, tool in role.env.tools.items():
            attributes = {attribute: getattr(tool, attribute) for attribute in ATTRIBUTES}
            attributes_of_roles.setdefault(role_name, {})[name] = attributes
    # Converted to JSON and back, so that tuples compare equal to the lists that are read from the file.
    return json.loads(json.dumps(attributes_of_roles, default=dict))
