"""The record of a run: `run.json` in its workdir says of which config, inputs and tools a run is, and where it began.

Identity of a run: its config, and hashes of what it reads. Every checkpoint holds it; `run.json`, every line of the
logs, the summary and the folder of every exported policy name its hash. What was copied from another run is therefore
found before it is used. Left out are fields that may change when a run is resumed, and names of inputs, whose content
counts: a run keeps its identity in another folder, in a bucket, and on other machines. The number of iterations may
change, so a run and the same one with a longer schedule have one hash.

Needs no JAX, so that a folder of another run is refused before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pydantic

from zeroplay_jax.retrieval import downloads, json_text
from zeroplay_jax.runtime import disk
from zeroplay_jax.settings.kinds import built_in_name, leaves, prompts_name
from zeroplay_jax.types import Json, UserError

FILE_NAME = 'run.json'
# Entry of a checkpoint's loop state.
STATE_FIELD = 'identity'
# Field of a line of a log and of the summary.
HASH_FIELD = 'run'
# In an exported folder. Its suffix is not of those that a run which starts from the folder copies or reads.
EXPORT_FILE = 'run.identity'
_CONTENT = 'content of '
_DIGITS = 16
_MAX_VALUE_CHARACTERS = 80  # of a value that an error message quotes

# Field of the config → value, and 'content of ' + field → hash of what it names.
Identity = dict[str, Any]
# Group → name → its attributes. Of inputs: field of the config → name of a file → {'bytes', 'sha256'}. Of tools: role →
# name of a tool → what the policy sees of it, in the order of the prompt.
Entries = dict[str, dict[str, dict[str, Any]]]
# Name of weights → 'whole' or 'adapter' → name of a file of the exported policy → text.
PolicyTexts = dict[str, dict[str, dict[str, str]]]


class WorkdirError(UserError):
    """The workdir cannot be used for this run; the message says why."""


@pydantic.with_config(extra='forbid')
@dataclasses.dataclass(frozen=True)
class Record:
    """The content of `run.json`.

    Attributes:
      config: as the run began with it (`plain_config`).
      inputs: what the files of the config contain; {} until they are known.
      tools: the tools as the policy sees them; None until they are known, or if the entry was removed by hand.
      weights: name of weights → fingerprint with which training began.
      policies: files of the policies beside their weights.
      run: hash of the identity.
      origin: 'workdir' and 'step' of the checkpoint that the run began with; None for a run that began by itself.
      reported: number of steps after which the last report was written.
      id: under which services for curves know the run.
    """

    config: Json
    inputs: Entries = dataclasses.field(default_factory=dict)
    tools: Entries | None = None
    weights: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    policies: PolicyTexts = dataclasses.field(default_factory=dict)
    run: str = ''
    origin: Json | None = None
    reported: int | None = None
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    def texts_of_policies(self, identity: Identity) -> PolicyTexts:
        """Returns `policies`, each with the file that names the run; `identity`: as a checkpoint has it."""
        exporter = {EXPORT_FILE: hash_of(identity) + '\n'} if identity else {}
        texts: PolicyTexts = {}
        for weights, of_kinds in self.policies.items():
            texts[weights] = {kind: {**files, **exporter} for kind, files in of_kinds.items()}
        return texts


def read(workdir: pathlib.Path) -> Record | None:
    """Returns the record in a workdir; None if there is none.

    Raises:
      WorkdirError: one line; the file cannot be read, or is of another version.
      OSError: the folder cannot be read.
    """
    path = workdir / FILE_NAME
    try:
        return pydantic.TypeAdapter(Record).validate_python(json_text.read_object(path, float))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        problem = str(error)
        if isinstance(error, pydantic.ValidationError):
            first = error.errors()[0]
            problem = f'{".".join(map(str, first["loc"]))}: {first["msg"]}'
        raise WorkdirError(
            f'{path}: cannot be read ({problem}); bring it back from a copy, read it with its version, or '
            'choose another workdir'
        ) from None


def write(workdir: pathlib.Path, record: Record) -> None:
    """Replaces `run.json`; a killed process leaves the old one or the new one."""
    text = json.dumps(dataclasses.asdict(record), indent=1)
    disk.write_text(workdir / FILE_NAME, text + '\n')


def recorded(workdir: pathlib.Path) -> Record:
    """Returns the record in a workdir, which must have one."""
    record = read(workdir)
    assert record is not None
    return record


def update(workdir: pathlib.Path, **changes: Any) -> None:
    """Replaces fields of the record in a workdir, which must have one."""
    write(workdir, dataclasses.replace(recorded(workdir), **changes))


def find_difference(saved: Entries, current: Entries) -> str:
    """Returns the first difference between two parts of records in words, such as 'GROUP: NAME is new'; '' without one.

    Of attributes those are compared that both have: another version may have further ones.
    """
    for group in dict.fromkeys((*saved, *current)):
        was, now = saved.get(group, {}), current.get(group, {})
        for name in dict.fromkeys((*was, *now)):
            if name not in now:
                return f'{group}: {name} is missing'
            if name not in was:
                return f'{group}: {name} is new'
            for attribute, there in was[name].items():
                here = now[name].get(attribute, there)
                if there == here:
                    continue
                if 'sha256' in was[name]:
                    return f'{group}: {name} has other bytes'
                return f'{group}: {name} differs in {attribute} (there {_quoted(there)}, now {_quoted(here)})'
        # A prompt explains tools in their order.
        if list(was) != list(now):
            return f'{group}: the order was {", ".join(was)} and is {", ".join(now)}'
    return ''


def _quoted(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > _MAX_VALUE_CHARACTERS:
        return text[:_MAX_VALUE_CHARACTERS] + '…'
    return text


def flat_config(config: Json) -> dict[str, Any]:
    """Returns dotted name of a field → value, in the form in which configs of different places are compared."""
    # A run from hf://owner/model is resumed with any path of the model in a cache, because the Hub may have a newer
    # revision since. The inputs of the record compare the content.
    flat = _map_texts(leaves(plain_config(config)), downloads.name_in_path)
    if 'prompts' in flat:
        flat['prompts'] = prompts_name(flat['prompts'])
    return flat


def plain_config(config: Json) -> Json:
    """Returns a config as a record has it: sorted, lists in place of tuples, `portable` names in place of paths."""
    return _map_texts(json.loads(json.dumps(config, sort_keys=True)), portable)


def _map_texts(value: Any, function: Callable[[str], str]) -> Any:
    """Returns a JSON value with `function` applied to all texts in it."""
    if isinstance(value, dict):
        return {name: _map_texts(field, function) for name, field in value.items()}
    if isinstance(value, list):
        return [_map_texts(item, function) for item in value]
    return function(value) if isinstance(value, str) else value


def portable(path: str) -> str:
    """Returns the name by which other machines and other clones find a file or folder; any other text as it is.

    Names are addresses in a bucket and names on the Hub, of which `path` is the local copy, and those of built-in
    checkpoints.
    """
    return built_in_name(downloads.name_of(downloads.address_of(path)))


def identity_of(config: Json, changeable: Iterable[str], inputs: Mapping[str, Any]) -> Identity:
    """Returns the identity of a run.

    Args:
      config: nested plain dict of the whole config.
      changeable: dotted names of the fields that may change when the run is resumed.
      inputs: `Record.inputs`.
    """
    identity = flat_config(config)
    for name in (*changeable, *inputs):
        identity.pop(name, None)
    for name, files in inputs.items():
        identity[_CONTENT + name] = digest(files)
    return identity


def hash_of(identity: Identity) -> str:
    """Returns the hash of an identity, 16 hexadecimal digits; '' of an empty one."""
    return digest(identity) if identity else ''


def digest(value: Any) -> str:
    """Returns the hash of a JSON value, 16 hexadecimal digits; the order of the fields does not matter."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def identity_of_checkpoint(step: pathlib.Path) -> Identity:
    """Returns the identity in the folder of a checkpoint; {} if it cannot be read, which the checksums tell."""
    try:
        state = json_text.read_object(step / 'loop' / 'metadata', float)
    except (OSError, ValueError):
        return {}
    identity = state.get(STATE_FIELD)
    return identity if isinstance(identity, dict) else {}


def check_checkpoint(step: pathlib.Path, workdir: pathlib.Path) -> None:
    """Compares the identity in a checkpoint with the record in a workdir, if there are both.

    A field that only one of them has is of another version.

    Raises:
      UserError: one line; they are of different runs.
    """
    record = read(workdir)
    if record is None:
        return
    there, here = identity_of_checkpoint(step), identity_of(record.config, (), record.inputs)
    for name in sorted(there.keys() & here.keys()):
        if there[name] == here[name]:
            continue
        difference = f'{name}={there[name]}, not {here[name]}'
        if name.startswith(_CONTENT):
            difference = f'another {name}'
        raise UserError(
            f'{step}: is of another run ({difference}) than {workdir / FILE_NAME}; bring back what belongs to this run'
        )


def check_hash(path: pathlib.Path, there: Any, here: str) -> None:
    """Raises UserError (one line) if a file names the hash `there` of another run than `here`; no hash is accepted."""
    if there and here and there != here:
        raise UserError(
            f'{path}: is of another run ({there}) than the folder ({here}); bring back what belongs to this run'
        )


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
    record = read(folder.absolute().parent.parent)
    check_hash(folder, exporter, record.run if record else '')
    return exporter
