"""Prompts: what a role reads before it writes. Ours and those of a user are TOML files of one form.

zeroplay_jax/prompts/full.toml has all of ours and says what a table of such a file may hold. A recipe of another
package declares its own in `Recipe.prompts`. Values of fields are untrusted text, but {tools}, which explains the
registered tools.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import string
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.rollout.foreign_text import Message, Untrusted
from zeroplay_jax.settings.kinds import (
    PACKAGE,
    PROMPT_SETS,
    ConfigError,
    prompts_name,
    prompts_text,
)
from zeroplay_jax.types import Json

# Keys of a prompt in a file, and the values of `tools`.
_KEYS = ('user', 'system', 'tools')
_EXPLAINED_BY = ('text', 'template')
# Fields that a role fills by itself.
_OF_ROLE = ('tools', 'searches')
# Fields that a prompt may leave out: what it is told of a number or a kind may also be part of its text.
_OPTIONAL = frozenset((*_OF_ROLE, 'hops', 'kind', 'low', 'high'))


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The messages that open a rollout.

    Attributes:
      user: text with fields in braces, the message of the user.
      system: the same of a system message before it; '' for none.
      tools: 'template': the chat template gets the schemas of the tools; 'text': it does not, {tools} explains them.
    """

    user: str
    system: str = ''
    tools: str = 'text'

    @functools.cached_property
    def fields(self) -> tuple[str, ...]:
        """The names of its fields, each once."""
        parts = itertools.chain(_parts(self.system), _parts(self.user))
        return tuple(dict.fromkeys(name for _, name, _, _ in parts if name is not None))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the fields that a request fills."""
        return tuple(name for name in self.fields if name not in _OF_ROLE)


# Name → prompt, or its text; or {prompt set: one of both}.
Prompts = Mapping[str, str | Prompt | Mapping[str, str | Prompt]]


def select(source: str, declared: Prompts | None = None) -> dict[str, Prompt]:
    """Returns name → prompt: ours, in their place those that a recipe declares, and in theirs those of a user.

    Args:
      source: `config.prompts`: a name of PROMPT_SETS, or path or text of a file of prompts.
      declared: `Recipe.prompts`.

    Raises:
      ConfigError: one line; the file cannot be read, or a prompt in it lacks a field or has an unknown one.
      KeyError: the recipe declares texts per set, and none for this one.
    """
    prompt_set = source if source in PROMPT_SETS else 'full'
    selected = dict(_ours('full'))
    if prompt_set != 'full':
        selected |= _ours(prompt_set)
    for name, value in (declared or {}).items():
        if isinstance(value, Mapping):
            value = value[prompt_set]
        selected[name] = Prompt(value) if isinstance(value, str) else value
    return selected | of_user(source, selected)


def of_user(source: str, known: Mapping[str, Prompt]) -> dict[str, Prompt]:
    """Returns name → prompt of a file of a user; {} for a name of PROMPT_SETS.

    Args:
      source: as of `select`.
      known: all prompts that there are, in whose place they may stand.

    Raises:
      ConfigError: as `select`.
    """
    if source in PROMPT_SETS:
        return {}
    try:
        prompts = _read(prompts_text(source))
        for name, prompt in prompts.items():
            if name not in known:
                names = ', '.join(known)
                raise ValueError(
                    f'[{name}]: there is no such prompt; name one of {names}{did_you_mean(name, known)}'
                )
            _check_fields(name, prompt, known[name])
    except ValueError as error:
        raise ConfigError(f'config.prompts={prompts_name(source)}: {error}') from None
    return prompts


@functools.cache
def _ours(name: str) -> dict[str, Prompt]:
    return _read((PACKAGE / 'prompts' / f'{name}.toml').read_text(encoding='utf-8'))


# ---- files -----------------------------------------------------------------------------------------
#
# What is wrong is a ValueError with the problem and the fix.


def _read(text: str) -> dict[str, Prompt]:
    """Returns name → prompt of the text of a file, in its order; of [solver.task] the name is solver.task."""
    try:
        pending = list(tomllib.loads(text).items())
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f'not TOML ({error}); mend that place') from None
    prompts = {}
    while pending:
        name, table = pending.pop(0)
        if not isinstance(table, dict):
            raise ValueError(
                f'{name}: stands above all tables; write [ROLE] such as [solver] above it'
            )
        forms = {key: value for key, value in table.items() if isinstance(value, dict)}
        pending[:0] = [(f'{name}.{key}', form) for key, form in forms.items()]
        values = {key: value for key, value in table.items() if key not in forms}
        if values or not forms:
            prompts[name] = _prompt(name, values)
    if not prompts:
        raise ValueError('has no prompt; write [ROLE] such as [solver], and below it user = "…"')
    return prompts


def _prompt(name: str, values: Mapping[str, Any]) -> Prompt:
    """Returns the prompt of a table."""
    for key, value in values.items():
        where = f'[{name}] {key}'
        if key not in _KEYS:
            raise ValueError(
                f'{where}: there is no such key; give one of {", ".join(_KEYS)}{did_you_mean(key, _KEYS)}'
            )
        if not isinstance(value, str):
            raise ValueError(f'{where}: must be a text; put it in quotes')
        if not value.strip():
            raise ValueError(f'{where}: is empty; write a text, or take it away')
        try:
            parts = _parts(value)
        except ValueError as error:
            raise ValueError(f'{where}: {error}; write {{{{ and }}}} for braces') from None
        for _, field, form, conversion in parts:
            if form or conversion:
                raise ValueError(
                    f'{where}: {{{field}}} has more than a name; write {{{field}}} alone, and {{{{ and }}}} for braces'
                )
    if 'user' not in values:
        raise ValueError(
            f'[{name}]: has no user; write user = "…", the message that the role reads'
        )
    if values.get('tools', 'text') not in _EXPLAINED_BY:
        raise ValueError(
            f'[{name}] tools: is {values["tools"]!r}; give one of {", ".join(_EXPLAINED_BY)}'
        )
    return Prompt(**values)


def _check_fields(name: str, prompt: Prompt, ours: Prompt) -> None:
    """Raises ValueError for a field that the role does not fill, or that has to be there and is not."""
    offered = [*ours.fields]
    if 'tools' in offered:
        offered += [field for field in _OF_ROLE if field not in offered]
    elif prompt.tools == 'template':
        raise ValueError(f'[{name}] tools: this role has no tools; take it away')
    for field in prompt.fields:
        if field not in offered:
            names = ', '.join(f'{{{each}}}' for each in offered)
            raise ValueError(
                f'[{name}]: there is no field {{{field}}}; it has {names}, and braces are written '
                f'{{{{ and }}}}{did_you_mean(field, offered)}'
            )
    for field in offered:
        if field not in prompt.fields and field not in _OPTIONAL:
            raise ValueError(f'[{name}]: lacks {{{field}}}; write it where that text belongs')


def _parts(text: str) -> list[tuple[str, str | None, str | None, str | None]]:
    """Returns (text, name of the field behind it, its format, its conversion) for the parts of a template."""
    return list(string.Formatter().parse(text))


# ---- texts -----------------------------------------------------------------------------------------


def document_text(document: Json) -> str:
    """Returns a document {'title', 'text'} as it is written in a prompt.

    With 'link', a name in the text about which there is another document, its first occurrence is put in square
    brackets. The spaces inside them give the name the same tokens as in running text.
    """
    text = document['text']
    link = document.get('link')
    if link:
        text = _linked_name(link).sub(lambda match: f'[ {match.group()} ]', text, count=1)
    return f'(Title: {document["title"]}) {text}'


def has_link(text: str, link: str) -> bool:
    """Returns whether a name occurs in a text as `document_text` puts it in brackets: not as a part of a word."""
    return _linked_name(link).search(text) is not None


def _linked_name(link: str) -> re.Pattern[str]:
    return re.compile(rf'(?<!\S){re.escape(link)}(?!\w)')


def documents_text(documents: Sequence[Json]) -> str:
    """Returns documents as one text, one per line."""
    return '\n'.join(document_text(document) for document in documents)


def fill(prompt: Prompt, tools: Sequence[str] = (), **fields: object) -> list[Message]:
    """Returns the chat that opens a rollout: a message of the user, and one of the system before it if there is one.

    Args:
      tools: parts that explain the tool calls, for the field {tools}.
      fields: values of all other fields, untrusted.

    Raises:
      KeyError: the prompt has a field without a value.
    """
    messages: list[Message] = []
    for role, text in (('system', prompt.system), ('user', prompt.user)):
        # The template is parsed and not formatted, so that every value stays a part of its own, which the codec
        # encodes as untrusted text, and braces in a value have no meaning.
        content: list[str] = []
        for literal, field, _, _ in _parts(text):
            content.append(literal)
            # `tools` has trusted parts too: the tags of calls.
            if field == 'tools':
                content.extend(tools)
            elif field is not None:
                content.append(Untrusted(str(fields[field])))
        if text:
            messages.append({'role': role, 'content': content})
    return messages
