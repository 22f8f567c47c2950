"""Tool-call syntaxes: how a policy asks for a search, and how the reply is written into its context.

A family owns the stop strings, the parser and the observation's form; the passages' layout is a named style. Both
are part of the contract with the model and are never mixed.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Sequence

import numpy as np

from zeroplay_jax.rollout.tokens import Codec, Untrusted
from zeroplay_jax.types import Json

# Reason code → what the policy reads.
ERROR_TEXTS = {
    'malformed': 'The call could not be read. Write it again in the required form.',
    'unknown_tool': 'There is no such tool. Only search is available.',
    'empty_query': 'The query was empty. Name what to look for.',
    'failed': 'The search failed. Try again or answer from what is known.',
    'timeout': 'The search took too long. Try again or answer from what is known.',
}


def passages_text(documents: Sequence[Sequence[Json]], style: str) -> str:
    """Passages of one call as text; numbering starts again for every query.

    Args:
      documents: per query its passages, each {'title', 'text'}.
      style: 'search_r1' (title and text on one line) or 'verl' (text on the next line).
    """
    between = {'search_r1': ' ', 'verl': '\n'}[style]
    head = {'search_r1': 'Doc {}(Title: {})', 'verl': 'Doc {} (Title: {})'}[style]
    blocks = [
        '\n'.join(head.format(i, d['title']) + between + d['text'] for i, d in enumerate(found, 1))
        or 'No passage found.'
        for found in documents
    ]
    return '\n---\n'.join(blocks)


class Tools(abc.ABC):
    """A family of tool calls.

    Attributes:
      name: in `config.tools.family`.
      call_stop: the string that ends a turn with a call; its opening is the same without the slash.
      style: layout of passages.
      instructions: how a prompt explains the call (fixed text of ours).
    """

    name: str
    call_stop: str
    style: str
    instructions: str

    @abc.abstractmethod
    def call_text(self, queries: Sequence[str]) -> str:
        """The call as a policy writes it."""

    @abc.abstractmethod
    def parse(self, text: str) -> tuple[tuple[str, ...], str | None]:
        """(queries, error) of a turn that ended with `call_stop`; exactly one of the two is set."""

    @abc.abstractmethod
    def wrap(self, codec: Codec, text: str, limit: int) -> np.ndarray:
        """Ids, int32 [n], that carry foreign text to the policy. A long text loses its end until n ≤ limit, but never
        the tags around it, which stand even where the limit is too small for them."""

    def called(self, text: str) -> str | None:
        """What stands between the tags of the turn's one call; None where there is none, or more than one."""
        opening = self.call_stop.replace('</', '<')
        found = re.findall(f'{re.escape(opening)}(.*?){re.escape(self.call_stop)}', text, re.S)
        return found[0] if len(found) == 1 and text.count(opening) == 1 else None

    def observation(
        self, codec: Codec, documents: Sequence[Sequence[Json]], limit: int
    ) -> np.ndarray:
        """Reply ids, int32 [n] (see `wrap`), with the passages of every query."""
        return self.wrap(codec, passages_text(documents, self.style), limit)

    def error(self, codec: Codec, code: str, limit: int) -> np.ndarray:
        """Reply ids, int32 [n] (see `wrap`), for a call that failed with reason `code`."""
        return self.wrap(codec, ERROR_TEXTS[code], limit)


class SearchR1(Tools):
    """`<search>query</search>` in the running text; the reply follows in the same turn (Search-R1)."""

    name, call_stop, style, tag = 'search_r1', '</search>', 'search_r1', 'information'

    @property
    def instructions(self):
        return (
            f'To search, write <search>what to look for</search>; the passages found come back between <{self.tag}> '
            f'and </{self.tag}>.'
        )

    def call_text(self, queries):
        return f'<search>{queries[0]}</search>'

    def parse(self, text):
        query = self.called(text)
        if query is None:
            return (), 'malformed'
        return ((query.strip(),), None) if query.strip() else ((), 'empty_query')

    def wrap(self, codec, text, limit):
        head, tail = codec.encode(f'\n\n<{self.tag}>'), codec.encode(f'</{self.tag}>\n\n')
        body = codec.encode_plain(text)[: max(limit - len(head) - len(tail), 0)]
        return np.asarray(head + body + tail, np.int32)


class RSearch(SearchR1):
    """The same call; the reply stands between the tags of R-Search's checkpoints (SSP, table 1)."""

    name, tag = 'r_search', 'observation'


class Message(Tools):
    """A family whose reply is a message of its own, as the checkpoint's template writes one of a tool."""

    def reply(self, text: str) -> str:
        """The content of the message."""
        return text

    def wrap(self, codec, text, limit):
        body = codec.encode_plain(text)
        while True:  # the passages are cut, not the message around them
            ids = codec.suffix(
                {'role': 'tool', 'content': [Untrusted(self.reply(codec.decode(body)))]}
            )
            if len(ids) <= limit or not body:
                return ids
            body = body[: max(len(body) - max(len(ids) - limit, 1), 0)]


class Qwen(Message):
    """`<tool_call>{"name": "search", "arguments": {"query_list": [...]}}</tool_call>`; the reply is a tool message."""

    name, call_stop, style = 'qwen', '</tool_call>', 'verl'
    instructions = (
        'To search, write <tool_call>{"name": "search", "arguments": {"query_list": ["what to look for"]}}'
        '</tool_call>; one call may hold several queries. The passages found come back as a tool response.'
    )

    def call_text(self, queries):
        call = {'name': 'search', 'arguments': {'query_list': list(queries)}}
        return f'<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>'

    def parse(self, text):
        try:
            call = json.loads(self.called(text) or '')
            name, queries = call['name'], call['arguments']['query_list']
        except (ValueError, KeyError, TypeError, RecursionError):
            return (), 'malformed'
        if name != 'search':
            return (), 'unknown_tool'
        if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
            return (), 'malformed'
        queries = tuple(q.strip() for q in queries)
        return (queries, None) if queries and all(queries) else ((), 'empty_query')

    def reply(self, text):
        return json.dumps({'result': text}, ensure_ascii=False)


class Olmo(Message):
    """`<function_calls>search(query="…")</function_calls>` (OLMo-3; SCOPE); the reply is a tool message."""

    name, call_stop, style = 'olmo', '</function_calls>', 'search_r1'
    instructions = (
        'To search, write <function_calls>search(query="what to look for")</function_calls>. The passages found come '
        'back as a message of the environment.'
    )

    def call_text(self, queries):
        return f'<function_calls>search(query={json.dumps(queries[0], ensure_ascii=False)})</function_calls>'

    def parse(self, text):
        call = re.fullmatch(
            r'\s*(\w+)\(\s*query\s*=\s*(".*")\s*\)\s*', self.called(text) or '', re.S
        )
        if call is None:
            return (), 'malformed'
        try:
            query = json.loads(call[2], strict=False)
        except ValueError:
            return (), 'malformed'
        if call[1] != 'search':
            return (), 'unknown_tool'
        return ((query.strip(),), None) if query.strip() else ((), 'empty_query')


FAMILIES: dict[str, Tools] = {
    tools.name: tools for tools in (SearchR1(), RSearch(), Qwen(), Olmo())
}


def family(name: str) -> Tools:
    """The tool family called `name`; ValueError names those there are."""
    if name not in FAMILIES:
        raise ValueError(f'tools.family={name!r} is unknown; choose one of {", ".join(FAMILIES)}')
    return FAMILIES[name]
