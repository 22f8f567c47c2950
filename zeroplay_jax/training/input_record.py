"""Records the content of all files that a run reads in its workdir, and compares a resumed run with the record.

A config names files by their paths. Without the record, another index or other questions under the same path would
change a resumed run unnoticed, and its results before and after would be compared as if nothing had happened.
"""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from zeroplay_jax.configuration.fields import input_paths
from zeroplay_jax.policy.adapter_config import base_folder, is_adapter
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.runtime import disk
from zeroplay_jax.runtime.disk import file_digests
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.library import has_index
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT, POLICY_SUFFIXES
from zeroplay_jax.types import UserError

FILE_NAME = 'inputs.json'
# Field of the name of the index that a search server has.
SERVER = 'retrieval.url'
# Field of the checkpoint that a run begins from.
POLICY = 'policy.path'
# What was chosen for the chat template of the checkpoint: names as of `template_choice.record`, {'value'} for each.
TEMPLATE = 'policy.template'
# Name of a file → {'bytes', 'sha256'}; of a search server name of its index → {}.
Entry = dict[str, dict[str, Any]]


def fingerprints(config) -> dict[str, Entry]:
    """Returns the fingerprints of all files that a run reads, by config field and name of the file.

    Every byte of a policy folder and of files of questions, answers, tasks and documents is read, at 1 to 2 GB/s and
    core; the run reads the weights afterwards anyway. An index folder costs one small file: its manifest holds the
    hashes of all others, and opening the index compares sizes and samples, and the encoder's weights.

    Raises:
      OSError: a file cannot be read.
    """
    return {field: _entry(paths) for field, paths in _paths(config).items()}


def _entry(paths: list[pathlib.Path]) -> Entry:
    """Returns the fingerprints of files by name."""
    files: Entry = {}
    for path, digest in zip(paths, file_digests(paths), strict=True):
        # An adapter and its base have files of the same names.
        name = path.name if path.name not in files else f'{path.parent.name}/{path.name}'
        files[name] = {'bytes': path.stat().st_size, 'sha256': digest}
    return files


def _paths(config) -> dict[str, list[pathlib.Path]]:
    """Returns config field → files."""
    policy = pathlib.Path(config.policy.path or BUILT_IN_CHECKPOINT)
    paths = {POLICY: _start_files(policy)}
    # A search server needs no folder where no documents are read.
    is_server = config.retrieval.kind == 'http'
    if config.retrieval.kind == 'folder' or is_server and has_index(config.retrieval.path):
        paths['retrieval.path'] = [pathlib.Path(config.retrieval.path) / 'manifest.json']
    # Recipes may have such fields of their own.
    for field, value in input_paths(config):
        path = pathlib.Path(value)
        if path.is_file():
            paths[field] = [path]
        # The adapter that a role starts from.
        elif is_adapter(path):
            paths[field] = _policy_files(path)
    return paths


def _start_files(policy: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of the checkpoint that a run begins from: of an adapter, with those of its base."""
    files = _policy_files(policy)
    if is_adapter(policy):
        files += _policy_files(base_folder(policy))
    return files


def _policy_files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in sorted(folder.iterdir()) if path.suffix in POLICY_SUFFIXES]


def check(hosts: Hosts, workdir: pathlib.Path, config, is_resumed: bool) -> dict[str, Entry]:
    """Compares the files of a resumed run with inputs.json in its workdir; returns their fingerprints now.

    Call it before anything is read. All processes must call it; the first one reads, the others get {}.

    Args:
      is_resumed: whether the run has a checkpoint. Without one nothing was learnt yet, and the inputs may change.

    Raises:
      UserError: one line; a file differs from that at the run's start, or the record cannot be read.
    """
    entries: dict[str, Entry] = {}

    def check_locally() -> None:
        if not hosts.is_first:
            return
        entries.update(fingerprints(config))
        path = workdir / FILE_NAME
        if is_resumed and path.is_file():
            saved = read(path)
            # The search server was not asked yet, and the template was not opened.
            saved.pop(SERVER, None)
            saved.pop(TEMPLATE, None)
            _check_equal(path, saved, entries)

    hosts.run_on_all_and_gather(check_locally)
    return entries


def write(
    hosts: Hosts,
    workdir: pathlib.Path,
    config,
    entries: dict[str, Entry],
    index: str,
    template: Mapping[str, str],
    is_resumed: bool,
) -> dict[str, Entry]:
    """Writes inputs.json; compares the index of a search server first. All processes must call it.

    Args:
      entries: as `check` returned them.
      index: name of the search index as its server calls it (its hash, or the address of a server that tells none).
      template: what was chosen for the chat template (`template_choice.record`).
      is_resumed: as in `check`.

    Returns:
      The content of the file, from the first process.

    Raises:
      UserError: a resumed run whose search server has another index than at its start.
    """

    def write_locally() -> dict[str, Entry]:
        path = workdir / FILE_NAME
        current = entries | template_entry(template)
        if config.retrieval.kind == 'http':
            server = {SERVER: {index: {}}}
            saved = read(path) if is_resumed and path.is_file() else {}
            if SERVER in saved:
                _check_equal(path, {SERVER: saved[SERVER]}, server)
            current |= server
        disk.write_text(path, json.dumps(current, indent=1) + '\n')
        return current

    return hosts.run_on_first(write_locally)


def template_entry(template: Mapping[str, str]) -> dict[str, Entry]:
    """Returns the part of the record about the chat template; {} if nothing was chosen for it."""
    if not template:
        return {}
    return {TEMPLATE: {name: {'value': value} for name, value in template.items()}}


def start_date(workdirs: Sequence[pathlib.Path]) -> str:
    """Returns the day, as 2026-11-25, for templates that write the date: the first one that is recorded, else today.

    Prompts must not change when a run goes on over midnight, is resumed or is continued by another one.

    Raises:
      UserError: a record cannot be read.
    """
    for workdir in workdirs:
        path = workdir / FILE_NAME
        recorded = read(path).get(TEMPLATE, {}).get('date') if path.is_file() else None
        if recorded is None:
            continue
        try:
            return datetime.date.fromisoformat(recorded['value']).isoformat()
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f'{path}: {TEMPLATE} has no date such as 2026-11-25; write the day on which the run began'
            ) from None
    return datetime.date.today().isoformat()


def read(path: pathlib.Path) -> dict[str, Entry]:
    """Returns the record at `path`; raises UserError if it cannot be read."""
    try:
        saved = json_text.read_object(path)
        is_record = all(isinstance(files, dict) for files in saved.values())
    except ValueError:
        is_record = False
    if not is_record:
        raise UserError(f'{path}: is not a record of inputs; remove it to continue')
    return saved


def _check_equal(path: pathlib.Path, saved: dict[str, Entry], current: dict[str, Entry]) -> None:
    """Raises UserError if the record `saved` at `path` differs from `current`."""
    difference = find_difference(saved, current)
    if difference:
        raise UserError(
            f'{path.parent}: the run began with another content of config.{difference}; bring that back, or begin '
            f'another run with --from={path.parent}'
        )


def check_start(workdir: pathlib.Path, folder: pathlib.Path) -> None:
    """Compares the checkpoint that a run began from with inputs.json in its workdir, if that has it; reads every byte.

    Args:
      folder: what `policy.path` of the run names now.

    Raises:
      UserError: one line; a file differs from that at the run's start, or the record cannot be read.
      OSError: a file cannot be read.
    """
    path = workdir / FILE_NAME
    saved = read(path).get(POLICY) if path.is_file() else None
    if saved is None:
        return
    difference = find_difference({POLICY: saved}, {POLICY: _entry(_start_files(folder))})
    if difference:
        raise UserError(
            f'{workdir}: the run began with another content of config.{difference} in {folder}; write the folder of '
            f'that content into policy.path of {workdir / "config.json"}'
        )


def find_difference(saved: dict[str, Entry], current: dict[str, Entry]) -> str:
    """Returns the first difference in words, beginning with the config field; '' if there is none."""
    for field in dict.fromkeys((*saved, *current)):
        saved_files = saved.get(field, {})
        current_files = current.get(field, {})
        for name in dict.fromkeys((*saved_files, *current_files)):
            was = saved_files.get(name)
            now = current_files.get(name)
            if was == now:
                continue
            if now is None:
                return f'{field}: {name} is missing'
            if was is None:
                return f'{field}: {name} is new'
            return f'{field}: {name} has other bytes'
    return ''
