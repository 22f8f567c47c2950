"""The identity of a run: its config, and hashes of what it reads.

`identity.json` in the workdir and every checkpoint hold it; every line of the logs, the summary, and the folder of
every exported policy name its hash. What was copied from another run is therefore found before it is used.

Left out are fields that may change when a run is resumed, and names of inputs, whose content counts: a run keeps its
identity in another folder, in a bucket, and on other machines. Needs no JAX.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from zeroplay_jax.retrieval import json_text
from zeroplay_jax.runtime import disk
from zeroplay_jax.runtime import workdir as run_workdir
from zeroplay_jax.types import Json, UserError

FILE_NAME = 'identity.json'
# Entry of a checkpoint's loop state.
STATE_FIELD = 'identity'
# Field of a line of a log and of the summary.
HASH_FIELD = 'run'
_CONTENT = 'content of '
_DIGITS = 16
# In an exported folder. Its suffix is not of those that a run which starts from the folder copies or reads.
EXPORT_FILE = 'run.identity'

# Field of the config → value, and 'content of ' + field → hash of what it names.
Identity = dict[str, Any]


def identity_of(config: Json, changeable: Iterable[str], inputs: Mapping[str, Any]) -> Identity:
    """Returns the identity of a run.

    Args:
      config: nested plain dict of the whole config.
      changeable: dotted names of the fields that may change when the run is resumed.
      inputs: content of inputs.json: field of the config → its files, with their hashes.
    """
    identity = run_workdir.flat_config(config)
    for name in (*changeable, *inputs):
        identity.pop(name, None)
    for name, files in inputs.items():
        identity[_CONTENT + name] = _digest(files)
    return identity


def hash_of(identity: Identity | None) -> str:
    """Returns the hash of an identity, 16 hexadecimal digits; '' without one."""
    return _digest(identity) if identity else ''


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def find_difference(there: Identity, here: Identity) -> str:
    """Returns the first field of both that differs, with its values; '' if there is none.

    A field that only one of them has is of another version.
    """
    for name in sorted(there.keys() & here.keys()):
        if there[name] == here[name]:
            continue
        if name.startswith(_CONTENT):
            return f'another {name}'
        return f'{name}={there[name]}, not {here[name]}'
    return ''


def write(workdir: pathlib.Path, identity: Identity) -> None:
    """Writes identity.json."""
    text = json.dumps(identity, indent=1, sort_keys=True)
    disk.write_text(workdir / FILE_NAME, text + '\n')


def read(workdir: pathlib.Path) -> Identity | None:
    """Returns the identity in a workdir; None if there is none, as in runs of earlier versions.

    Raises:
      UserError: it cannot be read.
    """
    path = workdir / FILE_NAME
    try:
        identity = json_text.read_object(path, float)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        identity = {}
    if not identity:
        raise UserError(f'{path}: is not the identity of a run; bring it back from a copy')
    return identity


def of_checkpoint(step: pathlib.Path) -> Identity | None:
    """Returns the identity in the folder of a checkpoint; None if it has none, as those of earlier versions."""
    try:
        state = json_text.read_object(step / 'loop' / 'metadata', float)
        identity = state.get(STATE_FIELD)
    # Damage is found by the checksums.
    except (OSError, ValueError):
        return None
    return identity if isinstance(identity, dict) else None


def of_records(workdir: pathlib.Path) -> Identity:
    """Returns what config.json and inputs.json in a workdir say; {} for what is missing or cannot be read."""
    return identity_of(
        _read_object(workdir / 'config.json'), (), _read_object(workdir / 'inputs.json')
    )


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json_text.read_object(path, float)
    except (OSError, ValueError):
        return {}


def check_workdir(workdir: pathlib.Path) -> Identity | None:
    """Compares identity.json with config.json and inputs.json beside it; returns it, None without one.

    Raises:
      UserError: one line; they are of different runs.
    """
    identity = read(workdir)
    if identity is not None:
        _check(workdir / FILE_NAME, identity, of_records(workdir), 'config.json and inputs.json')
    return identity


def check_checkpoint(step: pathlib.Path, workdir: pathlib.Path) -> Identity | None:
    """Compares the identity in a checkpoint with the records in a workdir; returns it, None without one.

    Raises:
      UserError: one line; they are of different runs.
    """
    identity = of_checkpoint(step)
    if identity is None:
        return None
    _check(step, identity, of_records(workdir), f'{workdir}/config.json and inputs.json')
    _check(step, identity, read(workdir) or {}, f'{workdir / FILE_NAME}')
    return identity


def check_current(path: pathlib.Path, there: Identity | None, here: Identity) -> None:
    """Raises UserError (one line) if the identity of a file or folder `path` of a run is not that of its config now."""
    _check(path, there or {}, here, 'config and inputs')


def _check(path: pathlib.Path, there: Identity, here: Identity, others: str) -> None:
    difference = find_difference(there, here)
    if difference:
        raise UserError(
            f'{path}: is of another run ({difference}) than {others}; bring back what belongs to this run'
        )


def check_hash(path: pathlib.Path, there: Any, here: str) -> None:
    """Raises UserError (one line) if a file names the hash `there` of another run than `here`; no hash is accepted."""
    if there and here and there != here:
        raise UserError(
            f'{path}: is of another run ({there}) than the folder ({here}); bring back what belongs to this run'
        )


def export_texts(identity: Identity | None) -> dict[str, str]:
    """Returns name → text of the file in an exported folder that names the run; {} without an identity."""
    return {EXPORT_FILE: hash_of(identity) + '\n'} if identity else {}


def check_export(folder: pathlib.Path) -> str:
    """Returns the hash of the run that exported the folder of a policy; '' if it does not say.

    Raises:
      UserError: one line; the folder lies in the workdir of another run.
    """
    try:
        exporter = (folder / EXPORT_FILE).read_text(encoding='utf-8').strip()
    except (OSError, ValueError):
        return ''
    # A run exports its policies to WORKDIR/policy/ROLE.
    workdir = folder.absolute().parent.parent
    check_hash(folder, exporter, hash_of(check_workdir(workdir)))
    return exporter
