"""`zeroplay train --check`: all mistakes of a command at once, on any machine, without starting anything.

    zeroplay train --check --config=configs/drzero.py --workdir=runs/drzero --on=v5litepod-16

Where a run stops at the first mistake, this names all of them, each in a line. Nothing is created, and nothing is
asked over the network.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from zeroplay_jax.configuration import command_line, fields, rules
from zeroplay_jax.configuration.places import check_programs, elsewhere, keep_prompts, read_policy
from zeroplay_jax.extras import load_extra
from zeroplay_jax.policy import adapter_config
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.runtime.record import FILE_NAME
from zeroplay_jax.runtime.workdir import check_is_folder
from zeroplay_jax.settings.kinds import (
    BUILT_IN_CHECKPOINT,
    PACKAGE,
    PROMPT_SETS,
    ConfigError,
    leaves,
)
from zeroplay_jax.tools import registry
from zeroplay_jax.types import UserError

_NAME = 'zeroplay_jax'
# Other fields than those of `fields.input_paths` that name files or folders.
_FOLDER_FIELDS = ('policy.path', 'retrieval.path', 'retrieval.encoder')


def main(words: Sequence[str]) -> int:
    """Prints all mistakes of a command line, or that there are none; returns the exit status, 2 with a mistake.

    Args:
      words: what absl left over of the command line, as for `command_line.load`; its flags are in `flags.FLAGS`.
    """
    mistakes: list[str] = []
    target = None
    with _noted(mistakes):
        target = _machine(flags.FLAGS.on)
    _check_folders(mistakes)
    config = _loaded(words, mistakes)
    memory = ''
    if config is not None:
        memory = _check_config(config, target, mistakes)
    for line in mistakes:
        print(f'{_NAME}: {line}', file=sys.stderr)
    if mistakes:
        count = len(mistakes)
        print(
            f'{_NAME}: {count} mistake{"s" if count > 1 else ""}; nothing was started',
            file=sys.stderr,
        )
        return 2
    assert config is not None
    if note := command_line.note_of_questions(flags.FLAGS.config, config, words):
        print(note, file=sys.stderr)
    print(
        f'the command is sound; {memory or "not checked: memory, "}servers, tools and losses of packages, fields and '
        'tokenizer of a policy elsewhere, values of weights, lengths of prompts and ids of retrieval.held_out'
    )
    if not flags.FLAGS.files:
        paths = [f'{name}={path}' for name, path in _paths(config).items()]
        elsewhere = [path for path in paths if str(PACKAGE) not in path]
        print(f'these have to be there on every machine: {", ".join(elsewhere) or "none"}')
    return 0


@contextlib.contextmanager
def _noted(mistakes: list[str]) -> Iterator[None]:
    """A context in which an error of the user becomes one of the mistakes."""
    try:
        yield
    except UserError as error:
        # Several checks read the same file.
        if str(error) not in mistakes:
            mistakes.append(str(error))


def _machine(name: str) -> Any:
    """Returns the machine of --on; None without one; ConfigError if there is none of this name."""
    return load_extra('plan', 'machines').machine(name, '--on') if name else None


def _check_folders(mistakes: list[str]) -> None:
    """Notes a missing or impossible --workdir, and a --from that is no workdir."""
    workdir, source = flags.FLAGS.workdir, flags.FLAGS['from'].value
    with _noted(mistakes):
        if not workdir:
            raise ConfigError(command_line.NO_WORKDIR)
        check_is_folder(workdir, True)
    is_here = source and flags.FLAGS.files and not downloads.is_address(source)
    if is_here and not pathlib.Path(source, FILE_NAME).is_file():
        mistakes.append(f'--from={source}: not the workdir of a run; it has no {FILE_NAME}')


def _loaded(words: Sequence[str], mistakes: list[str]) -> ConfigDict | None:
    """Returns the config as the run would read it, without the flags that cannot be read; None if there is none."""
    with _noted(mistakes):
        config = fields.config_of_file(flags.FLAGS.config)
        flags_of: dict[str, list[str]] = {}
        for group in fields.with_values(words):
            with _noted(mistakes):
                flags_of |= fields.flags_by_field(command_line.with_short_flags(group))
        # A recipe brings its fields. Without it those of the others are not known.
        fields.put(config, {name: flags_of[name] for name in flags_of.keys() & {'recipe'}})
        for name in flags_of.keys() - {'recipe'}:
            with _noted(mistakes):
                fields.put(config, {name: flags_of[name]})
        return config
    return None


def _check_config(config: ConfigDict, target: Any, mistakes: list[str]) -> str:
    """Notes the mistakes of a config, also on the machine of --on; returns what is to be said of its memory, or ''."""
    has_files, workdir = flags.FLAGS.files, flags.FLAGS.workdir or ''
    is_here = bool(workdir) and has_files and not downloads.is_address(workdir)
    if is_here:
        with _noted(mistakes):
            keep_prompts(config, workdir)
    fields.fit_to_recipe(config)
    # What comes with the package is that of this installation; what lies in a bucket is read when the run starts.
    in_buckets = []
    for name, path in _paths(config).items():
        config.update_from_flattened_dict({name: downloads.packaged(path)})
        if downloads.is_address(path):
            in_buckets.append(name)
    # A run keeps the -1 of a mesh in its config.
    on_machine = config.copy_and_resolve_references()
    on_machine.update_from_flattened_dict(dict.fromkeys(in_buckets, ''))
    if target is not None:
        with _noted(mistakes):
            load_extra('plan', 'planning').fit_to(on_machine, target)
    unread = elsewhere(config) if has_files else ['prompts', *elsewhere(config)]
    mistakes += rules.lines(on_machine, has_files=has_files, unread=unread)
    if has_files:
        with _noted(mistakes):
            check_programs(on_machine)
        for entry in config.tools.names:
            with _noted(mistakes):
                registry.check_name(entry)
                if ':' in entry:
                    registry.imported(entry)
    if has_files and 'policy.path' not in in_buckets:
        with _noted(mistakes):
            check_policy(on_machine, mistakes)
    if is_here and not mistakes:
        with _noted(mistakes):
            fields.check(workdir, config)
    if mistakes or target is None:
        return ''
    memory = ''
    # Of a policy in a bucket the name may tell the sizes.
    on_machine.policy.path = config.policy.path
    with _noted(mistakes):
        memory = load_extra('plan', 'planning').memory_line(on_machine, target)
    return memory and f'{memory}; not checked: '


def check_policy(config: ConfigDict, mistakes: list[str]) -> None:
    """Notes what is wrong with the files of a policy, and which settings do not go with it; imports JAX.

    Raises:
      UserError: its architecture cannot be read.
    """
    path = config.policy.path or BUILT_IN_CHECKPOINT
    # `places.policy_folder` names what is missing.
    try:
        folder = adapter_config.base_folder(path)
    except UserError:
        return
    if not (folder / 'config.json').is_file():
        return
    from zeroplay_jax.policy import hf, shape, sharding, stored_tensors
    from zeroplay_jax.rollout.tokens import open_codec

    model = shape.read_config(folder)
    with _noted(mistakes):
        # A -1 is known when there are devices.
        sharding.check_heads(model.heads, model.kv_heads, max(config.mesh.model, 1))
    with _noted(mistakes):
        if config.policy.adapters.rank and model.experts is not None:
            linears = config.policy.adapters.linears
            adapter_config.refuse_feed_forward(linears, 'config.policy.adapters.linears')
    with _noted(mistakes):
        read_policy(config)
    with _noted(mistakes):
        if any(folder.glob('*.safetensors')):
            stored_tensors.checked_headers(folder, model)
        if adapter_config.is_adapter(path):
            hf.check_adapter(path, model)
    with _noted(mistakes):
        if (folder / 'tokenizer.json').is_file():
            open_codec(pathlib.Path(path))


def _paths(config: ConfigDict) -> dict[str, str]:
    """Returns the fields that name files or folders, with what they name."""
    values = leaves(config)
    paths = {name: values[name] for name in _FOLDER_FIELDS if values.get(name)}
    if config.prompts not in PROMPT_SETS:
        paths['prompts'] = config.prompts
    return paths | dict(fields.input_paths(config))
