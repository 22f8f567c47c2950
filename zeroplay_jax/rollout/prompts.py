"""Prompts: what a role reads before it writes. Ours and those of a user are TOML files of one form.

zeroplay_jax/prompts/full.toml has all of ours and says what a table of such a file may hold. A recipe of another
package declares its own in `Recipe.prompts`. Values of fields are untrusted text, but {tools}, which explains the
registered tools.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.rollout.foreign_text import Message, Untrusted
from zeroplay_jax.settings.kinds import (
    PACKAGE,
    PROMPT_SETS,
    ConfigError,
    leaves,
    prompts_name,
    prompts_text,
)
from zeroplay_jax.types import Json

# Keys of a prompt in a file.
_KEYS = ('user', 'system', 'tools', 'searched')
# Fields that a role fills by itself.
_OF_ROLE = ('tools', 'searches')
# Fields that a prompt may leave out: a number or a kind may also be part of its text.
OPTIONAL_FIELDS = frozenset((*_OF_ROLE, 'hops', 'kind', 'task_type', 'low', 'high'))
# Prompts of judges and of baselines, which every recipe may need.
_OF_EVALUATIONS = ('judge.', 'answer.')
# Braces in a template: a doubled one, a field, or a lone one, which is an unknown field.
_BRACES = re.compile(r'(\{\{|\}\}|\{[^{}]*\}|[{}])')
_DOUBLED = ('{{', '}}')


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The messages that open a rollout.

    Attributes:
      user: text with fields in braces, the message of the user.
      system: the same of a system message before it; '' for none.
      tools: 'template': the chat template gets the schemas of the tools; '': it does not, {tools} explains them.
      searched: text before the results of the search with the number {hops}, and of later ones; '' for none.
    """

    user: str
    system: str = ''
    tools: str = ''
    searched: str = ''

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of its fields, each once."""
        braces = _BRACES.findall(self.system) + _BRACES.findall(self.user)
        return tuple(part[1:-1] for part in dict.fromkeys(braces) if part not in _DOUBLED)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the fields that a request fills."""
        return tuple(name for name in self.fields if name not in _OF_ROLE)


# Name → what the user reads, or all messages, for all sets; or set name → that.
Prompts = Mapping[str, str | Prompt | Mapping[str, str | Prompt]]


def select(
    source: str, declared: Prompts | None = None, read: Collection[str] | None = None
) -> dict[str, Prompt]:
    """Returns name → prompt: ours, in their place those that a recipe declares, and in theirs those of a user.

    Args:
      source: `config.prompts`: a name of PROMPT_SETS, or path or text of a file of prompts.
      declared: `Recipe.prompts`.
      read: names that a file may have beside those of judges and baselines; None: any that there is.

    Raises:
      ConfigError: one line; the file cannot be read, or a prompt in it lacks a field or has an unknown one.
      KeyError: the recipe declares texts per set, and none for this one.
    """
    sets = sets_under(source)
    selected = {}
    for name in sets:
        selected |= _ours(name)
    for name, text in (declared or {}).items():
        if isinstance(text, Mapping):
            known = [each for each in sets if each in text] or sets
            text = text[known[-1]]
        selected[name] = text if isinstance(text, Prompt) else Prompt(text)
    if source in PROMPT_SETS:
        return selected
    names = [
        name
        for name in selected
        if read is None or name in read or name.startswith(_OF_EVALUATIONS)
    ]
    try:
        prompts = _read(prompts_text(source))
        for name, prompt in prompts.items():
            if name not in names:
                raise ValueError(
                    f'[{name}]: the recipe reads no such prompt; name one of {", ".join(names)}'
                    f'{did_you_mean(name, names)}'
                )
            _check_fields(name, prompt, selected[name])
    except ValueError as error:
        raise ConfigError(f'config.prompts={prompts_name(source)}: {error}') from None
    return selected | prompts


def sets_under(source: str) -> tuple[str, ...]:
    """Returns the names of our sets that count for `config.prompts`, of a prompt in several the last one's.

    A set lies over the one that `over` in its file names, a file of a user over 'full'.
    """
    if source not in PROMPT_SETS:
        return ('full',)
    below = _file(source).get('over')
    return (*sets_under(below), source) if below else (source,)


@functools.cache
def _file(name: str) -> Json:
    return tomllib.loads((PACKAGE / 'prompts' / f'{name}.toml').read_text(encoding='utf-8'))


@functools.cache
def _ours(name: str) -> dict[str, Prompt]:
    keys = leaves(_file(name))
    keys.pop('over', None)
    return _of_leaves(keys)


def _read(text: str) -> dict[str, Prompt]:
    """Returns name → prompt of the text of a file, in its order; of [solver.task] the name is solver.task."""
    try:
        keys = leaves(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f'not TOML ({error}); mend that place') from None
    return _of_leaves(keys)


def _of_leaves(keys: Mapping[str, Any]) -> dict[str, Prompt]:
    if not keys:
        raise ValueError('has no prompt; write [ROLE] such as [solver], and below it user = "…"')
    tables: dict[str, dict[str, Any]] = {}
    for path, value in keys.items():
        name, _, key = path.rpartition('.')
        where = f'[{name}] {key}'
        if not name:
            raise ValueError(f'{key}: is in no table; write [ROLE] such as [solver] above it')
        if key not in _KEYS:
            raise ValueError(
                f'{where}: there is no such key; give one of {", ".join(_KEYS)}{did_you_mean(key, _KEYS)}'
            )
        if not isinstance(value, str) or not value.strip():
            raise ValueError(
                f'{where}: must be a text, and not an empty one; write it in quotes, or take it away'
            )
        if key == 'tools' and value != 'template':
            raise ValueError(f'{where}: is {value!r}; give template, or take it away')
        tables.setdefault(name, {})[key] = value
    for name, table in tables.items():
        if 'user' not in table:
            raise ValueError(
                f'[{name}]: has no user; write user = "…", the message that the role reads'
            )
    return {name: Prompt(**table) for name, table in tables.items()}


def _check_fields(name: str, prompt: Prompt, ours: Prompt) -> None:
    """Raises ValueError for a field that the role does not fill, or that has to be there and is not."""
    offered = set(ours.fields)
    if 'tools' in offered:
        offered.update(_OF_ROLE)
    elif prompt.tools:
        raise ValueError(f'[{name}] tools: this role has no tools; take it away')
    if prompt.searched and not ours.searched:
        raise ValueError(
            f'[{name}] searched: only a challenger has a number of searches; take it away'
        )
    if _BRACES.search(prompt.searched):
        raise ValueError(f'[{name}] searched: has no fields; take the braces away')
    for field in prompt.fields:
        if field not in offered:
            raise ValueError(
                f'[{name}]: there is no field {{{field}}}; it has {", ".join(sorted(offered))}, and braces are written '
                f'{{{{ and }}}}{did_you_mean(field, offered)}'
            )
    for field in sorted(offered.difference(prompt.fields, OPTIONAL_FIELDS)):
        raise ValueError(f'[{name}]: lacks {{{field}}}; write it where that text belongs')


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
        # Split and not formatted, so that every value stays a part of its own, which the codec encodes as untrusted
        # text, and braces in a value have no meaning.
        content = []
        for part in _BRACES.split(text):
            if part in _DOUBLED:
                content.append(part[0])
            elif part == '{tools}':
                # They have trusted parts too: the tags of calls.
                content.extend(tools)
            elif part.startswith(('{', '}')):
                content.append(Untrusted(str(fields[part[1:-1]])))
            else:
                content.append(part)
        # A system message is left out where its fields are empty.
        if role == 'user' or any(content):
            messages.append({'role': role, 'content': content})
    return messages
