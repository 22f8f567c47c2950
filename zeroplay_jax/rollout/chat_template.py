"""What a checkpoint's chat template writes around messages and does to their texts, found once, with sentinels.

A template is a program of others. It never sees a question or a page: it writes chats of marker words, and of texts
that careless templates change. What it does to them tells how every text has to be written.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import html
import json
import pathlib
import re
from collections.abc import Callable, Sequence

from zeroplay_jax.retrieval.types import short
from zeroplay_jax.rollout import template_process
from zeroplay_jax.types import Json, UserError, first_line

Roles = tuple[str, ...]

# Roles for the results of calls, in the order in which they are tried.
_TOOL_ROLES = ('tool', 'environment', 'observation', 'user')
# Two moments that differ in every part of a date, and the first one at another time of the day.
_DATES = (datetime.datetime(2001, 2, 3), datetime.datetime(2019, 11, 27))
_LATER = datetime.datetime(2001, 2, 3, 23, 58, 59)
# Texts that templates trim, escape, cut, parse or normalise.
_SENTINELS = (
    ' \t\n\n  blanks around and  within\r\n\n a line \n \t ',
    'quotes " \' back\\slash & <b>bold</b> {{ braces }} {% if %} %s $1 \\n',
    '{"name": "lookup", "arguments": {"list": [1, 2.50, null, true]}}',
    '\n\nline feeds\n',
    '["a", "b"]',
    '12.50',
    'a',
    'e\u0301 \u00e9 \u4f60\u597d \U0001f600 \u00a0\u0130\u00df\ufb01\u2028\u200b\u3000.',
    '**text** # Heading\n```json\n{}\n```',
    # Templates that look at the end, the case, the number of words or the length of a text.
    'Who wrote it?',
    'Which of the two writers was born earlier, the one of Emma or the one of Middlemarch?',
    'A short sentence.',
    'CAPITALS',
    'x',
    'one two three',
    'see https://example.org/a?b=1&c=2 or www.example.org',
    'medium ' * 1_000,
    'long ' * 20_000,
)
# Without its end a literal is the rest: otherwise every quotation mark in it would be tried.
_STRING_LITERAL = re.compile(
    r"'((?:[^'\\]|\\.)*+)(?:'|\Z)" + r'|"((?:[^"\\]|\\.)*+)(?:"|\Z)', re.DOTALL
)
_MOST_LITERAL_CHARACTERS = 100
# Published templates have less than 40,000.
_MOST_SOURCE_CHARACTERS = 60_000
# What a template writes anew at every call, or in every process.
_RANDOM = re.compile(r'\|\s*random\b|\blipsum\b')
_ADDRESS = re.compile(r' at 0x[0-9a-f]{6,}')
# Roles of messages before the first answer, which follow a control token in a header.
_HEADER_ROLES = 'system|developer|user'


class TemplateError(UserError):
    """A chat template that cannot write a chat as it is; the message names the file."""


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
      TemplateError: there is no template, or it loses or changes the text of messages, or is not repeatable.
    """

    date: datetime.date | None
    tool_role: str

    def __init__(self, tokenizer, folder: pathlib.Path, date: datetime.date):
        self._path = folder / 'chat_template.jinja'
        if not self._path.is_file():
            self._path = folder / 'tokenizer_config.json'
        if not tokenizer.chat_template:
            raise TemplateError(f'{folder}: its tokenizer has no chat template{_advice(folder)}')
        self._special_tokens = tokenizer.special_tokens_map
        tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self._headers = re.compile(rf'(?:{"|".join(map(re.escape, tokens))})(?:{_HEADER_ROLES})?')
        self._now = datetime.datetime.combine(date, datetime.time())
        self._layouts: dict[tuple[Roles, bool], Layout] = {}
        self._openings: dict[tuple[Roles, str], Layout] = {}
        self._schemas: Sequence[Json] = ()
        self._word = 'Qxzw'
        try:
            self.source = source = tokenizer.get_chat_template()
            if len(source) > _MOST_SOURCE_CHARACTERS:
                raise ValueError(f'it has {len(source):,} characters')
            while self._word in source:
                self._word += 'q'
        except (TypeError, ValueError) as error:
            raise self._error(f'cannot be used ({first_line(error)})') from None
        self._seconds = template_process.MOST_SECONDS
        self._check_repeatable()
        self.layout(('user',))
        self.tool_role, self.tool_error = self._find_tool_role()
        chats: list[Roles] = [('user',)]
        if self.tool_role:
            chats.append(('user', 'assistant', self.tool_role))
        self.notes = self._find_notes(chats)
        # Behind the notes, which take no error for one: a template that has no time left is refused here.
        self.date = date if self._writes_date(chats) else None
        self.end_texts = self._find_end_texts()

    def layout(self, roles: Roles, add_header: bool = True) -> Layout:
        """Returns how a chat with these roles is written.

        Args:
          add_header: whether the header of the next assistant turn follows.

        Raises:
          TemplateError: the template refuses such a chat, or loses or changes the text of a message.
        """
        key = (roles, add_header)
        if key not in self._layouts:
            self._layouts[key] = self._find_layout(roles, add_header)
        return self._layouts[key]

    def opening(self, roles: Roles, schemas: Sequence[Json]) -> Layout:
        """Returns how a chat with these roles that opens a rollout is written, with schemas of tools if there are any.

        Raises:
          TemplateError: as `layout`, or the schemas are left out, or results of calls are written otherwise behind it.
        """
        key = (roles, str(schemas))
        if key not in self._openings:
            listing = copy.copy(self)
            if schemas:
                listing._schemas = schemas
                listing._layouts = {}
            opening = listing.layout(roles)
            if schemas and opening.between == self.layout(roles).between:
                raise self._error('does not write the schemas of tools')
            if self.tool_role:
                # `Codec.suffix` writes every result as that behind a single message of a user.
                usual = self.layout(('user', 'assistant', self.tool_role))
                chat = listing.layout((*roles, 'assistant', self.tool_role))
                if (chat.between[-2:], chat.forms[-1]) != (usual.between[-2:], usual.forms[-1]):
                    raise self._error('writes results of calls otherwise behind such a prompt')
            self._openings[key] = opening
        return self._openings[key]

    def keeps_thoughts(self) -> bool:
        """Returns whether the thoughts of a turn are still there when the result of its call follows."""
        if not self.tool_role:
            return True
        thought = f'{self._word}thought'
        contents = ['x', f'<think>\n{thought}\n</think>\n\nx', 'x']
        text = self._write(('user', 'assistant', self.tool_role), contents)
        return thought in text

    # ---- writing -------------------------------------------------------------------------------------

    def _write(
        self,
        roles: Roles,
        contents: Sequence[str],
        add_header: bool = True,
        now: datetime.datetime | None = None,
    ) -> str:
        """Returns the text of a chat as `apply_chat_template` writes it at a moment, by default at that of `date`."""
        messages = [
            {'role': role, 'content': content}
            for role, content in zip(roles, contents, strict=True)
        ]
        variables = {
            'messages': messages,
            'tools': self._schemas or None,
            'documents': None,
            'add_generation_prompt': add_header,
            **self._special_tokens,
        }
        text, error, self._seconds = template_process.render(
            [self.source, variables, (now or self._now).isoformat(), self._seconds]
        )
        if error:
            raise self._error(f'cannot be used ({first_line(ValueError(error))})')
        return text

    def _error(self, problem: str) -> TemplateError:
        return TemplateError(
            f'{self._path}: the chat template {problem}; mend it, or take that of the instruction-tuned model'
        )

    # ---- sentinels -----------------------------------------------------------------------------------

    def _find_layout(self, roles: Roles, add_header: bool) -> Layout:
        # The letter ends a number: word 1 is no part of word 10.
        words = [f'{self._word}{index}z' for index in range(len(roles))]
        text = rest = self._write(roles, words, add_header)
        between = []
        for role, word in zip(roles, words, strict=True):
            count = rest.count(word)
            if count != 1:
                times = f'writes it {count} times' if count else 'leaves it out or changes it'
                raise self._error(
                    f'does not write the text of a message of role {role!r}: it {times}'
                )
            before, _, rest = rest.partition(word)
            between.append(before)
        between.append(rest)
        forms = []
        for index, role in enumerate(roles):
            # Turns of the assistant keep the ids that were sampled.
            form = ContentForm()
            if role != 'assistant':
                form = self._find_form(roles, index, words, text, add_header)
            forms.append(form)
        return Layout(tuple(between), tuple(forms))

    def _find_form(
        self,
        roles: Roles,
        index: int,
        words: Sequence[str],
        text: str,
        add_header: bool,
    ) -> ContentForm:
        """Returns what the template does to the text of message `index`, the same for all sentinels."""
        before, _, behind = text.partition(words[index])
        written = {}
        for sentinel in _SENTINELS:
            contents = [*words[:index], sentinel, *words[index + 1 :]]
            written[sentinel] = self._write(roles, contents, add_header)
        for form in FORMS:
            if all(
                text == before + ''.join(form.apply([sentinel])) + behind
                for sentinel, text in written.items()
            ):
                return form
        for sentinel, text in written.items():
            if text != before + sentinel + behind:
                raise self._error(
                    f'changes the text of a message of role {roles[index]!r}: {short(sentinel)} becomes '
                    f'{short(text[len(before) : len(text) - len(behind)])}'
                )
        raise AssertionError('the first form changes nothing')

    def _find_tool_role(self) -> tuple[str, str]:
        """Returns `tool_role` and `tool_error`."""
        problem = ''
        for role in _TOOL_ROLES:
            try:
                self._check_later_results(role)
                return role, problem
            except TemplateError as error:
                problem = problem or str(error)
        return '', problem

    def _check_later_results(self, role: str) -> None:
        """Raises TemplateError if a result of a chat with three is not written as the only one of a shorter chat.

        `Codec.suffix` writes every result as that of the first call.
        """
        first = self.layout(('user', 'assistant', role))
        chat = self.layout(('user', *('assistant', role) * 3))
        for index in (2, 4, 6):
            is_written_alike = chat.between[index] == first.between[2]
            if not is_written_alike or chat.forms[index] != first.forms[2]:
                raise self._error(f'writes one of several messages of role {role!r} otherwise')
        if chat.between[-1] != first.between[-1]:
            raise self._error(f'ends a chat with several messages of role {role!r} otherwise')

    def _find_end_texts(self) -> tuple[str, ...]:
        texts = []
        # Some templates end the last turn of a chat with another token than earlier ones.
        followers: list[Roles] = [(), ('user',)]
        if self.tool_role:
            followers.append((self.tool_role,))
        for roles in followers:
            try:
                layout = self.layout(('user', 'assistant', *roles), add_header=bool(roles))
                texts.append(layout.between[2])
            except TemplateError:
                # Only chats that a template can write have ends.
                continue
        return tuple(texts)

    def _check_repeatable(self) -> None:
        """Raises TemplateError if the template writes other texts at another call, or in another process."""
        roles, contents = ('user',), [self._word]
        text = self._write(roles, contents)
        again = self._write(roles, contents)
        if text != again or _RANDOM.search(self.source) or _ADDRESS.search(text):
            raise self._error('writes something else at every call')

    def _writes_date(self, chats: Sequence[Roles]) -> bool:
        """Returns whether the template writes the date; TemplateError if it writes the time of the day."""
        depends = False
        for roles in chats:
            contents = [self._word] * len(roles)
            text = self._write(roles, contents, now=_DATES[0])
            if text != self._write(roles, contents, now=_LATER):
                raise self._error('writes the time of the day, so that no prompt can be repeated')
            depends = depends or text != self._write(roles, contents, now=_DATES[1])
        return depends

    def _find_notes(self, chats: Sequence[Roles]) -> list[str]:
        """Returns `notes`: added words, a missing header, roles whose messages change with a text of the template."""
        literals = [first or second for first, second in _STRING_LITERAL.findall(self.source)]
        texts = []
        for literal in dict.fromkeys(literals):
            if literal.strip() and len(literal) <= _MOST_LITERAL_CHARACTERS:
                texts.append(_unescaped(literal))
        notes = self._addition_notes() + self._header_notes()
        for roles in chats:
            # The last one is for conditions on several texts.
            for text in (*texts, ' '.join(texts)):
                # Such a text may be looked for at both ends, or anywhere.
                if self._changes(roles, f'{text} x {text} y {text}'):
                    notes.append(
                        f'{self._path}: the chat template changes messages of role {roles[-1]!r} with {short(text)} '
                        'in them; they are written unchanged here'
                    )
                    break
        return notes

    def _addition_notes(self) -> list[str]:
        """Returns a line if the template writes more than headers around a question, as a system message of its own."""
        around = self.layout(('user',), add_header=False).between
        words = [' '.join(self._headers.sub(' ', text).split()) for text in around]
        added = ' and '.join(short(text) for text in words if text)
        return [f'{self._path}: the chat template adds {added} to questions'] if added else []

    def _header_notes(self) -> list[str]:
        """Returns a line if prompts end without the header that an assistant's turn has; else nothing."""
        header = self.layout(('user',)).between[-1]
        # Some templates write no header on request, because the end of a question begins the answer.
        if header != self.layout(('user',), add_header=False).between[-1]:
            return []
        try:
            before_turn = self.layout(('user', 'assistant'), add_header=False).between[1]
        except TemplateError:
            return []
        missing = before_turn.removeprefix(header).strip()
        if not missing:
            return []
        return [
            f'{self._path}: the chat template has no add_generation_prompt; prompts end without {missing!r}, which '
            "begins the assistant's turns"
        ]

    def _changes(self, roles: Roles, content: str) -> bool:
        """Returns whether a text as the last message is written in another way than the sentinels."""
        contents = [self._word] * (len(roles) - 1) + [content]
        expected = self.layout(roles).spans([[text] for text in contents])
        try:
            return self._write(roles, contents) != ''.join(expected)
        except TemplateError:
            return True


def _unescaped(literal: str) -> str:
    """Returns the text of a string literal of Jinja."""
    try:
        return json.loads('"' + literal.replace('"', '\\"') + '"', strict=False)
    except ValueError:
        return literal


def _advice(folder: pathlib.Path) -> str:
    """Returns the end of a message about a folder without a template."""
    if (folder / 'chat_template.json').is_file():
        return ': write the text of "chat_template" in chat_template.json into chat_template.jinja'
    return (
        ', as base models have none; copy chat_template.jinja of its instruction-tuned model there'
    )


# ---- texts of messages -----------------------------------------------------------------------------
#
# What a template does to them: nothing, or it trims and escapes them.


_ESCAPES: dict[str, Callable[[str], str]] = {
    'none': lambda text: text,
    'JSON': lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    'ASCII JSON': lambda text: json.dumps(text)[1:-1],
    # As the filter `e` of Jinja writes it.
    'HTML': lambda text: html.escape(text).replace('&quot;', '&#34;').replace('&#x27;', '&#39;'),
}


@dataclasses.dataclass(frozen=True)
class ContentForm:
    """What a template does to the text of a message.

    Attributes:
      left, right: characters that are trimmed at the beginning and at the end, as `str.strip` takes them: '' for none,
        None for white space.
      escape: key of _ESCAPES.
    """

    left: str | None = ''
    right: str | None = ''
    escape: str = 'none'

    def apply(self, parts: Sequence[str]) -> list[str]:
        """Returns the parts of a text as the template writes them. Their types, such as `Untrusted`, are kept."""
        texts = list(map(str, parts))
        for index, text in enumerate(texts):
            texts[index] = text.lstrip(self.left)
            if texts[index]:
                break
        for index in reversed(range(len(texts))):
            texts[index] = texts[index].rstrip(self.right)
            if texts[index]:
                break
        escape = _ESCAPES[self.escape]
        return [type(part)(escape(text)) for part, text in zip(parts, texts, strict=True)]


_TRIMMED: tuple[str | None, ...] = ('', '\n', ' ', None)
# The form that changes least comes first.
FORMS = tuple(
    ContentForm(left, right, escape)
    for escape in _ESCAPES
    for left in _TRIMMED
    for right in _TRIMMED
)
