"""`python -m zeroplay_jax.main --check`: all mistakes of a command at once, on any machine, without starting anything.

    python -m zeroplay_jax.main --check --config=configs/drzero.py --workdir=runs/drzero --on=v5litepod-16

Where a run stops at the first mistake, this names all of them, each in a line. Nothing is created, and nothing is
asked over the network.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from zeroplay_jax.configuration import command_line, fields, rules
from zeroplay_jax.configuration.places import (
    check_documents,
    check_heads,
    check_programs,
    check_tokenizer,
    check_weights,
    fetch_addresses,
    has_architecture,
    keep_prompts,
    read_policy,
)
from zeroplay_jax.extras import load_extra
from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.retrieval import downloads, objects
from zeroplay_jax.runtime.record import FILE_NAME
from zeroplay_jax.runtime.workdir import check_is_folder
from zeroplay_jax.selfplay.recipe import recipe_class
from zeroplay_jax.settings.kinds import PACKAGE, PROMPT_SETS, ConfigError, Mistakes
from zeroplay_jax.types import UserError

_NAME = 'zeroplay_jax'
# Other fields than those of `fields.input_paths` that name files or folders.
_FOLDER_FIELDS = ('policy.path', 'retrieval.path', 'retrieval.encoder')
# What absl reads as false.
_FALSE = ('false', 'f', '0')


def is_asked_for(argv: Sequence[str]) -> bool:
    """Returns whether a command line is to be checked only."""
    given = [flag for flag in argv if re.fullmatch('--?check(=.*)?', flag)]
    return bool(given) and given[-1].partition('=')[2].lower() not in _FALSE


def main(argv: Sequence[str]) -> int:
    """Prints all mistakes of a command line, or that there are none; returns the exit status, 2 with a mistake.

    Args:
      argv: the command line, the program's name first; its flags are defined in `flags.FLAGS`.
    """
    mistakes = Mistakes()
    arguments = _arguments(argv, mistakes)
    # Flags of the command itself; of those without a value the name is enough.
    given = {flag.lstrip('-').partition('=')[0]: flag.partition('=')[2] for flag in arguments}
    if given.get('files', '').lower() in _FALSE:
        given['nofiles'] = ''
    config = _loaded(arguments, mistakes)
    _check_folders(given, mistakes)
    target = _machine(given, mistakes)
    memory = ''
    if config is not None:
        memory = _check_config(config, given, target, mistakes)
    for line in mistakes.lines:
        print(f'{_NAME}: {line}', file=sys.stderr)
    if mistakes.lines:
        count = len(mistakes.lines)
        print(
            f'{_NAME}: {count} mistake{"s" if count > 1 else ""}; nothing was started',
            file=sys.stderr,
        )
        return 2
    if config is not None and (note := command_line.note_of_questions()):
        print(note, file=sys.stderr)
    print(
        f'the command is sound; {memory or "not checked: memory, "}servers, tools of packages, fields and tokenizer of '
        'a policy elsewhere, lengths of prompts and ids of retrieval.held_out'
    )
    if config is not None and 'nofiles' in given:
        paths = [f'{name}={path}' for name, path in _paths(config).items()]
        elsewhere = [path for path in paths if str(PACKAGE) not in path]
        print(f'these have to be there on every machine: {", ".join(elsewhere) or "none"}')
    return 0


# ---- the command line --------------------------------------------------------------------------------


def _arguments(argv: Sequence[str], mistakes: Mistakes) -> list[str]:
    """Returns the arguments behind the program's name, expanded and joined; notes short flags that name nothing."""
    arguments = []
    mistakes.of(lambda: arguments.extend(_joined(command_line.expanded(argv[1:]))))
    if mistakes.lines:
        # The other flags are read without them.
        packaged = _joined(command_line.with_packaged_configs(argv[1:]))
        arguments = [flag for flag in packaged if not re.match('--?(policy|index)(=|$)', flag)]
    return arguments


def _loaded(arguments: Sequence[str], mistakes: Mistakes) -> ConfigDict | None:
    """Returns the config as the run would read it, without the flags that cannot be read; None if there is none."""
    config_files = [flag for flag in arguments if re.match('--?config=', flag)]
    if not config_files:
        mistakes.note(command_line.no_config())
    recipe = command_line.recipe_flag(['', *arguments])
    schema = _config_of(config_files[-1:], recipe, mistakes)
    sound = config_files[-1:]
    for flag in arguments:
        count = len(mistakes.lines)
        if re.match(r'--?(no)?config\.', flag):
            mistakes.of(_check_field, flag, schema)
        elif flag not in config_files:
            mistakes.of(_check_flag, flag)
        if len(mistakes.lines) == count and flag not in config_files:
            sound.append(flag)
    if schema is None:
        # Their values are judged all the same, where they are of fields that most recipes read.
        config = fields.default_config()
        names = fields.leaves(config)
        for flag in sound:
            field = re.match(r'--?config\.([\w.]+)', flag)
            if field and field[1] in names.keys() - {'recipe'}:
                fields.assign(config, f'--{flag.lstrip("-")}')
        mistakes.of(fields.check_values, config)
        return None
    count = len(mistakes.lines)
    mistakes.of(command_line.parse_flags, [_NAME, *sound])
    return flags.FLAGS.config if len(mistakes.lines) == count else None


def _joined(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with every flag and its value in one, as --flag=value."""
    joined: list[str] = []
    takes_value = False
    for argument in argv:
        if takes_value and not argument.startswith('--'):
            joined[-1] += f'={argument}'
            takes_value = False
            continue
        joined.append(argument)
        name = argument.lstrip('-')
        known = flags.FLAGS[name] if name in flags.FLAGS else None
        is_switch = known is not None and known.boolean
        takes_value = argument.startswith('-') and '=' not in argument and not is_switch
    return joined


def _config_of(
    config_files: Sequence[str], chosen_recipe: str | None, mistakes: Mistakes
) -> ConfigDict | None:
    """Returns the config of a file as it is, with the sections of the recipe; None if it cannot be read."""
    if not config_files:
        return None
    try:
        command_line.check_arguments(['', config_files[0]], None)
        config = command_line.config_of_file(config_files[0].partition('=')[2])
        of_file = config.get('recipe')
        if chosen_recipe is not None:
            config.recipe = chosen_recipe
        fields.fit_to_recipe(config, is_switched=chosen_recipe not in (None, of_file))
        return config
    except ConfigError as error:
        mistakes.note(str(error))
    except Exception as error:
        # A config is a Python file, so any exception is possible.
        mistakes.note(f'{config_files[0]}: {type(error).__name__}: {error}')
    return None


def _check_field(argument: str, schema: ConfigDict | None) -> None:
    """Refuses a flag --config.FIELD=VALUE with an unknown field, or a value of another type."""
    flag, equals, _ = argument.lstrip('-').partition('=')
    name = flag.split('.', 1)[1]
    if schema is None:
        schema = fields.fields_of_all()
        # The recipe that cannot be read may have this section.
        if '.' in name and name.split('.')[0] not in schema:
            return
    fields.check_name(name, schema)
    if equals:
        fields.assign(
            schema.copy_and_resolve_references(), f'--config.{argument.partition(".")[2]}'
        )


def _check_flag(argument: str) -> None:
    """Refuses an argument that is no flag of the command."""
    name = argument.lstrip('-').partition('=')[0]
    if not argument.startswith('-'):
        raise ConfigError(f'{argument!r} is not a flag; settings are given as --config.FIELD=VALUE')
    if name not in flags.FLAGS and name.removeprefix('no') not in flags.FLAGS:
        raise ConfigError(
            f'--{name}: no such flag{did_you_mean(name, list(flags.FLAGS))}; --help shows them'
        )


def _machine(given: Mapping[str, str], mistakes: Mistakes) -> Any:
    """Returns the machine of --on; None without one, or if there is none of this name, which is noted."""
    if 'on' not in given:
        return None
    try:
        return load_extra('plan', 'machines').machine(given['on'], '--on')
    except UserError as error:
        mistakes.note(str(error))
        return None


# ---- the config --------------------------------------------------------------------------------------


def _check_folders(given: Mapping[str, str], mistakes: Mistakes) -> None:
    """Notes a missing or impossible --workdir, and a --from that is no workdir."""
    workdir, source = given.get('workdir'), given.get('from')
    if workdir:
        mistakes.of(check_is_folder, workdir, True)
    else:
        mistakes.note(command_line.NO_WORKDIR)
    is_here = source and 'nofiles' not in given and not objects.is_address(source)
    if is_here and not pathlib.Path(str(source), FILE_NAME).is_file():
        mistakes.note(f'--from={source}: not the workdir of a run; it has no {FILE_NAME}')


def _check_config(
    config: ConfigDict, given: Mapping[str, str], target: Any, mistakes: Mistakes
) -> str:
    """Notes the mistakes of a config, also on the machine of --on; returns what is to be said of its memory, or ''."""
    has_files = 'nofiles' not in given
    # What lies in a bucket is read when the run starts.
    mistakes.fields |= {name for name, path in _paths(config).items() if objects.is_address(path)}
    workdir = given.get('workdir', '')
    is_here = bool(workdir) and has_files and not objects.is_address(workdir)
    if is_here:
        mistakes.of(keep_prompts, config, workdir)
    _check_values(config, mistakes)
    # What comes with the package is that of this installation.
    for name, path in _paths(config).items():
        config.update_from_flattened_dict({name: downloads.packaged(path)})
    # A run keeps the -1 of a mesh in its config.
    on_machine = config.copy_and_resolve_references()
    if not has_files and config.prompts not in PROMPT_SETS:
        on_machine.prompts = 'full'
    if target is not None:
        mistakes.of(load_extra('plan', 'planning').fit_to, on_machine, target)
    recipe = recipe_class(config.recipe)
    for rule in rules.RULES:
        # It downloads what lies in a bucket.
        if rule is not fetch_addresses and (has_files or rule not in rules.FILE_RULES):
            mistakes.of(rule, on_machine, recipe)
    if has_files:
        mistakes.of(check_documents, on_machine, recipe)
        mistakes.of(check_programs, on_machine)
    mistakes.of(rules.check_training, on_machine, recipe)
    mistakes.of(rules.check_hops, on_machine, recipe)
    mistakes.of(lambda: recipe.check(fields.frozen(on_machine)))
    if has_files:
        mistakes.of(rules.check_evaluation, on_machine)
    if has_files and has_architecture(on_machine):
        mistakes.of(check_heads, on_machine)
        mistakes.of(read_policy, on_machine)
        mistakes.of(check_weights, on_machine)
        mistakes.of(check_tokenizer, on_machine)
    if is_here and not mistakes.lines:
        mistakes.of(fields.check, workdir, config)
    if mistakes.lines or target is None:
        return ''
    memory: list[str] = []
    memory_line = load_extra('plan', 'planning').memory_line
    mistakes.of(lambda: memory.append(memory_line(on_machine, target)))
    return f'{memory[0]}; not checked: ' if any(memory) else ''


def _check_values(config: ConfigDict, mistakes: Mistakes) -> None:
    """Notes values of wrong types and out of bounds, and replaces them: the rules calculate with the values."""
    fields.fit_to_recipe(config)
    before = set(mistakes.fields)
    mistakes.of(fields.check_values, config)
    defaults = fields.leaves(fields.default_config(config.recipe, config))
    for name in mistakes.fields - before:
        if name in defaults:
            config.update_from_flattened_dict({name: defaults[name]})


def _paths(config: ConfigDict) -> dict[str, str]:
    """Returns the fields that name files or folders, with what they name."""
    values = fields.leaves(config)
    paths = {name: values[name] for name in _FOLDER_FIELDS if values.get(name)}
    if config.prompts not in PROMPT_SETS:
        paths['prompts'] = config.prompts
    return paths | dict(fields.input_paths(config))
