"""What a checkpoint's chat template writes around messages and does to their texts, found once, with marks.

A template is a program of others. It never sees a question or a page: it writes chats of marks, and of a few texts
that careless templates change. What it does to them tells how every text has to be written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Sequence

import jinja2
import markupsafe

from zeroplay_jax.retrieval.types import short
from zeroplay_jax.rollout import template_process
from zeroplay_jax.types import Json, UserError, first_line

Roles = tuple[str, ...]

# Roles for the results of calls, in the order in which they are tried.
_TOOL_ROLES = ('tool', 'environment', 'observation', 'user')
# Roles of messages before the first answer, which follow a control token in a header.
_HEADER_ROLES = 'system|developer|user'
# A moment, the same day at another time, and a day that differs in every part of its date.
_MOMENTS = ('2001-02-03T00:00:00', '2001-02-03T23:58:59', '2019-11-27T00:00:00')
_MARK = 'Qxzw'
# Texts that templates trim, escape, cut, parse or normalise, or whose end, case, words or length they look at.
_SAMPLES = (
    ' \t\n\n blanks  around\r\n\n "quotes\' back\\slash & <b>bold</b> {{ x }} {% if %} %s $1 \\n **text** # Heading\n'
    '```json\n{}\n``` e\u0301 \u00e9 \u4f60\u597d \U0001f600 \u00a0\u0130\u00df\ufb01\u2028\u200b\u3000. '
    'www.example.org or https://example.org/a?b=1&c=2 \n \t ',
    '\n\nline feeds\n',
    '{"name": "lookup", "arguments": {"list": [1, 2.50, null, true]}}',
    '["a", "b"]',
    '12.50',
    'a',
    'CAPITALS',
    'A short sentence.',
    'Who wrote it?',
    'Which of the two writers was born earlier, the one of Emma or the one of Middlemarch?',
    'medium ' * 1_000,
    'long ' * 20_000,
)
# Published templates have less than 40,000.
_MOST_SOURCE_CHARACTERS = 60_000
# What a template writes anew at every call, or in every process.
_RANDOM = re.compile(r'\|\s*random\b|\blipsum\b')
_ADDRESS = re.compile(r' at 0x[0-9a-f]{6,}')


@dataclasses.dataclass(frozen=True)
class ContentForm:
    """What a template does to the text of a message.

    Attributes:
      escape: what it does to every character.
      left, right: characters that are trimmed at the beginning and at the end, as `str.strip` takes them: '' for none,
        None for white space.
    """

    escape: Callable[[str], str]
    left: str | None
    right: str | None

    def apply(self, parts: Sequence[str]) -> list[str]:
        """Returns the parts of a text as the template writes them. Their types, such as `Untrusted`, are kept."""
        whole = ''.join(parts)
        start = len(whole) - len(whole.lstrip(self.left))
        end = len(whole.rstrip(self.right))
        written = []
        position = 0
        for part in parts:
            kept = part[max(start - position, 0) : max(end - position, 0)]
            written.append(type(part)(self.escape(kept)))
            position += len(part)
        return written


_TRIMMED: tuple[str | None, ...] = ('', '\n', ' ', None)
_ESCAPES: tuple[Callable[[str], str], ...] = (
    str,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
    lambda text: str(markupsafe.escape(text)),
)
# The form that changes nothing comes first.
_FORMS = [ContentForm(*steps) for steps in itertools.product(_ESCAPES, _TRIMMED, _TRIMMED)]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a template writes a chat with certain roles.

    Attributes:
      between: text before the first message, between two messages, and behind the last one.
      forms: per message what happens to its text.
    """

    between: tuple[str, ...]
    forms: tuple[ContentForm, ...]

    def spans(self, contents: Sequence[Sequence[str]], first: int = 0) -> list[str]:
        """Returns the chat as consecutive texts: those of the template, and the parts of each message.

        Args:
          contents: parts of the messages from number `first` on; the text begins behind the message before it.
        """
        spans = [self.between[first]]
        behind_messages = self.between[first + 1 :]
        for form, parts, behind in zip(self.forms[first:], contents, behind_messages, strict=True):
            spans += form.apply(parts)
            spans.append(behind)
        return spans


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
      tokenizer: of `transformers`.
      folder: of the tokenizer, for messages.
      date: the day that the template gets as today's; it has no time of the day.

    Attributes:
      source: its text.
      date: as given; None for a template that does not write the date.
      tool_role: role of the messages with the results of calls; '' if the template can write no such messages.
      tool_error: why the role 'tool' cannot be used; '' if it can.
      end_texts: what may follow the text of an assistant's turn.
      notes: what a user should know, a line each.

    Raises:
      UserError: there is no template, or it loses or changes the text of messages, or is not repeatable.
    """

    date: datetime.date | None

    def __init__(self, tokenizer, folder: pathlib.Path, date: datetime.date):
        self._path = folder / 'chat_template.jinja'
        if not self._path.is_file():
            self._path = folder / 'tokenizer_config.json'
        if not tokenizer.chat_template:
            raise UserError(f'{folder}: its tokenizer has no chat template{_advice(folder)}')
        self.source = tokenizer.get_chat_template()
        if len(self.source) > _MOST_SOURCE_CHARACTERS:
            raise self._error(f'has {len(self.source):,} characters')
        self._special_tokens = tokenizer.special_tokens_map
        self._now = f'{date}T00:00:00'
        self._layouts: dict[tuple[Roles, bool, str], Layout] = {}
        self._seconds = template_process.MOST_SECONDS
        self._writes_date(('user',))
        self.layout(('user',))
        self.tool_role, self.tool_error = self._find_tool_role()
        chats: list[Roles] = [('user',)]
        if self.tool_role:
            chats.append(('user', 'assistant', self.tool_role))
        self.notes = self._addition_notes(tokenizer.get_added_vocab()) + self._header_notes()
        self.notes += self._word_notes(chats)
        # Behind the notes, which take no error for one: a template that has no time left is refused here.
        is_dated = [self._writes_date(roles) for roles in chats]
        self.date = date if any(is_dated) else None
        self.end_texts = self._find_end_texts()

    def layout(self, roles: Roles, add_header: bool = True, schemas: Sequence[Json] = ()) -> Layout:
        """Returns how a chat with these roles is written.

        Args:
          add_header: whether the header of the next assistant turn follows.
          schemas: of tools that the template lists.

        Raises:
          UserError: the template refuses such a chat, or loses or changes the text of a message.
        """
        key = (roles, add_header, str(schemas))
        if key not in self._layouts:
            self._layouts[key] = self._find_layout(roles, add_header, schemas)
        return self._layouts[key]

    def opening(self, roles: Roles, schemas: Sequence[Json]) -> Layout:
        """Returns how a chat with these roles that opens a rollout is written, with schemas of tools if there are any.

        Raises:
          UserError: as `layout`, or the schemas are left out, or results of calls are written otherwise behind it.
        """
        opening = self.layout(roles, schemas=schemas)
        if schemas and opening.between == self.layout(roles).between:
            raise self._error('does not write the schemas of tools')
        if self.tool_role:
            # `Codec.suffix` writes every result as that behind a single message of a user.
            usual = self.layout(('user', 'assistant', self.tool_role))
            chat = self.layout((*roles, 'assistant', self.tool_role), schemas=schemas)
            if (chat.between[-2:], chat.forms[-1]) != (usual.between[-2:], usual.forms[-1]):
                raise self._error('writes results of calls otherwise behind such a prompt')
        return opening

    def keeps_thoughts(self) -> bool:
        """Returns whether the thoughts of a turn are still there when the result of its call follows."""
        if not self.tool_role:
            return True
        contents = ['x', f'<think>\n{_MARK}\n</think>\n\nx', 'x']
        return _MARK in self._write(('user', 'assistant', self.tool_role), contents)

    def _write(
        self,
        roles: Roles,
        contents: Sequence[str],
        add_header: bool = True,
        schemas: Sequence[Json] = (),
        now: str = '',
    ) -> str:
        """Returns the text of a chat as `apply_chat_template` writes it at a moment, by default at that of `date`."""
        messages = [
            {'role': role, 'content': content}
            for role, content in zip(roles, contents, strict=True)
        ]
        variables = {
            'messages': messages,
            'tools': schemas or None,
            'documents': None,
            'add_generation_prompt': add_header,
            **self._special_tokens,
        }
        text, error, self._seconds = template_process.render(
            [self.source, variables, now or self._now, self._seconds]
        )
        if error:
            raise self._error(f'cannot be used ({first_line(ValueError(error))})')
        return text

    def _error(self, problem: str) -> UserError:
        return UserError(
            f'{self._path}: the chat template {problem}; mend it, or take that of the instruction-tuned model'
        )

    def _find_layout(self, roles: Roles, add_header: bool, schemas: Sequence[Json]) -> Layout:
        # The letter ends a number: mark 1 is no part of mark 10.
        marks = [f'{_MARK}{index}z' for index in range(len(roles))]
        any_mark = '|'.join(marks)
        text = self._write(roles, marks, add_header, schemas)
        if re.findall(any_mark, text) != marks:
            chat = ', '.join(roles)
            raise self._error(f'does not write every text of a chat ({chat}) once and unchanged')
        forms = []
        for index, role in enumerate(roles):
            before, behind = text.split(marks[index])
            fitting = _FORMS
            # Turns of the assistant keep the ids that were sampled.
            for sample in _SAMPLES if role != 'assistant' else ():
                contents = [*marks[:index], sample, *marks[index + 1 :]]
                written = self._write(roles, contents, add_header, schemas)
                fitting = [
                    form
                    for form in fitting
                    if before + ''.join(form.apply([sample])) + behind == written
                ]
                if not fitting:
                    changed = written.removeprefix(before).removesuffix(behind)
                    raise self._error(
                        f'changes the text of a message of role {role!r}: {short(sample)} becomes {short(changed)}'
                    )
            forms.append(fitting[0])
        return Layout(tuple(re.split(any_mark, text)), tuple(forms))

    def _find_tool_role(self) -> tuple[str, str]:
        """Returns `tool_role` and `tool_error`."""
        problem = ''
        for role in _TOOL_ROLES:
            try:
                self._check_later_results(role)
                return role, problem
            except UserError as error:
                problem = problem or str(error)
        return '', problem

    def _check_later_results(self, role: str) -> None:
        """Raises UserError if a result of a chat with three is not written as the only one of a shorter chat.

        `Codec.suffix` writes every result as that of the first call.
        """
        ways = set()
        for count in (1, 3):
            layout = self.layout(('user', *('assistant', role) * count))
            ends = [layout.between[-1]] * count
            ways |= {*zip(layout.between[2::2], layout.forms[2::2], ends)}
        if len(ways) > 1:
            raise self._error(f'writes one of several messages of role {role!r} otherwise')

    def _find_end_texts(self) -> tuple[str, ...]:
        texts = []
        # Some templates end the last turn of a chat with another token than earlier ones.
        followers: list[Roles] = [(), ('user',), (self.tool_role or 'user',)]
        for roles in followers:
            # Only chats that a template can write have ends.
            with contextlib.suppress(UserError):
                layout = self.layout(('user', 'assistant', *roles), add_header=bool(roles))
                texts.append(layout.between[2])
        return tuple(texts)

    def _writes_date(self, roles: Roles) -> bool:
        """Returns whether the template writes the date in a chat.

        Raises:
          UserError: it writes other texts at another call, in another process or at another time of the day.
        """
        contents = [_MARK] * len(roles)
        again = self._write(roles, contents, now=_MOMENTS[0])
        text, later, other = [self._write(roles, contents, now=moment) for moment in _MOMENTS]
        if text != again or _RANDOM.search(self.source) or _ADDRESS.search(text):
            raise self._error('writes something else at every call')
        if text != later:
            raise self._error('writes the time of the day, so that no prompt can be repeated')
        return text != other

    def _word_notes(self, chats: Sequence[Roles]) -> list[str]:
        """Returns a line per chat whose last message is changed where a text of the template is in it."""
        texts = []
        for token in jinja2.Environment().lexer.tokenize(self.source):
            if token.type == 'string' and token.value.strip() and token.value not in texts:
                texts.append(token.value)
        notes = []
        for roles in chats:
            # The last one is for conditions on several texts.
            for text in (*texts, ' '.join(texts)):
                # Such a text may be looked for at both ends, or anywhere.
                contents = [_MARK] * (len(roles) - 1) + [f'{text} x {text} y {text}']
                if self._changes(roles, contents):
                    notes.append(
                        f'{self._path}: the chat template changes messages of role {roles[-1]!r} with {short(text)} '
                        'in them; they are written unchanged here'
                    )
                    break
        return notes

    def _changes(self, roles: Roles, contents: Sequence[str]) -> bool:
        """Returns whether a chat is not written as its layout says."""
        expected = self.layout(roles).spans([[text] for text in contents])
        try:
            return self._write(roles, contents) != ''.join(expected)
        except UserError:
            return True

    def _addition_notes(self, tokens: Sequence[str]) -> list[str]:
        """Returns a line if the template writes more than headers around a question, as a system message of its own."""
        longest_first = sorted(tokens, key=len, reverse=True)
        header = rf'(?:{"|".join(map(re.escape, longest_first))})(?:{_HEADER_ROLES})?'
        around = self.layout(('user',), add_header=False).between
        words = [' '.join(re.sub(header, ' ', text).split()) for text in around]
        added = ' and '.join(short(text) for text in words if text)
        return [f'{self._path}: the chat template adds {added} to questions'] if added else []

    def _header_notes(self) -> list[str]:
        """Returns a line if prompts end without the header that an assistant's turn has; else nothing."""
        header = self.layout(('user',)).between[-1]
        missing = ''
        # Some templates cannot end with a turn; others write no header because a question's end begins the answer.
        with contextlib.suppress(UserError):
            turn = self.layout(('user', 'assistant'), add_header=False)
            missing = turn.between[1].removeprefix(header).strip()
        if not missing or header != self.layout(('user',), add_header=False).between[-1]:
            return []
        return [
            f'{self._path}: the chat template has no add_generation_prompt; prompts end without {missing!r}, which '
            "begins the assistant's turns"
        ]


def _advice(folder: pathlib.Path) -> str:
    """Returns the end of a message about a folder without a template."""
    if (folder / 'chat_template.json').is_file():
        return ': write the text of "chat_template" in chat_template.json into chat_template.jinja'
    return (
        ', as base models have none; copy chat_template.jinja of its instruction-tuned model there'
    )
