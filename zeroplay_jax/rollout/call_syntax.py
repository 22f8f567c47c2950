"""Call syntaxes: how a policy writes a tool call, and how the result is written into its context.

A syntax owns the stop strings, the parser, the form of an observation and the layout of passages.
It is part of the contract with a trained model: mixing two syntaxes in one run is not possible. It
knows nothing about what a tool does; tools (zeroplay_jax/tools) know nothing about syntaxes.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from zeroplay_jax.rollout.messages import Untrusted
from zeroplay_jax.rollout.passages import passages_text
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.tools.base import ERROR_TEXTS, InvalidArguments, Tool, ToolResult
from zeroplay_jax.types import Json, ToolCall

Tools = Mapping[str, Tool]


class CallSyntax(abc.ABC):
    """A way to write tool calls and their results.

    Attributes:
      name: its value in `config.tools.syntax`.
      passage_style: layout of passages, see `passages_text`.
    """

    name: str
    passage_style: str

    @abc.abstractmethod
    def stop_strings(self, tools: Tools) -> tuple[str, ...]:
        """Strings that end a turn with a call."""

    @abc.abstractmethod
    def explain(self, tools: Tools) -> list[str]:
        """The prompt's explanation of the tools, in parts; phrases of the tools are `Untrusted`."""

    @abc.abstractmethod
    def write_call(self, tool: Tool, arguments: Json) -> str:
        """A call as a policy writes it."""

    @abc.abstractmethod
    def read_call(self, text: str, tools: Tools) -> tuple[str, Any, str | None]:
        """(tool name, raw arguments, error code) of the call that ended a turn; error is None if it parsed."""

    @abc.abstractmethod
    def wrap(self, codec: Codec, text: str, limit: int) -> np.ndarray:
        """Ids, int32 [n], that carry an observation to the policy.

        Long text loses its end until n ≤ limit. The tags around it are always complete, even
        where the limit is too small for them.
        """

    def parse(self, text: str, tools: Tools) -> ToolCall:
        """The call at the end of a turn, checked against the tool's schema.

        Returns:
          A call with either `arguments`, or `error` and the observation text that explains it.
        """
        name, raw_arguments, error = self.read_call(text, tools)
        if error is not None:
            return ToolCall(name, None, _error_text(error, name, tools), error=error)
        tool = tools[name]
        try:
            return ToolCall(name, tool.validated(raw_arguments))
        except InvalidArguments as problem:
            explanation = tool.error_text(problem.code, problem.detail)
            return ToolCall(name, None, explanation, error=problem.code)

    def result_text(self, tool: Tool, result: ToolResult) -> str:
        """What the policy reads of a result."""
        if result.text is not None:
            return result.text
        if result.error is not None:
            return tool.error_text(result.error)
        return passages_text(result.documents, self.passage_style, tool.show_document_ids)

    def opening_tags(self, tools: Tools) -> tuple[str, ...]:
        """Strings that open a call."""
        return tuple(stop.replace('</', '<') for stop in self.stop_strings(tools))

    def call_body(self, text: str, tools: Tools) -> tuple[str, str] | None:
        """(opening tag, text inside) of the turn's only call; None for no call or more than one."""
        openings = self.opening_tags(tools)
        if sum(text.count(opening) for opening in openings) != 1:
            return None
        opening = next(tag for tag in openings if tag in text)
        closing = opening.replace('<', '</')
        bodies = re.findall(f'{re.escape(opening)}(.*?){re.escape(closing)}', text, re.DOTALL)
        return (opening, bodies[0]) if len(bodies) == 1 else None


def _error_text(code: str, name: str, tools: Tools) -> str:
    """Observation for a call without a tool to ask for its own text."""
    if code == 'unknown_tool':
        # With search alone, exactly the text that the built-in checkpoints were trained on.
        if tuple(tools) == ('search',):
            return 'There is no such tool. Only search is available.'
        return ERROR_TEXTS[code].replace('{tools}', ', '.join(tools))
    if name in tools:
        return tools[name].error_text(code)
    return ERROR_TEXTS[code]


class TagSyntax(CallSyntax):
    """Every tool has a tag of its own: `<search>query</search>`, `<open>id</open>` (Search-R1).

    The plain text inside fills the tool's only required text parameter. Tools with several
    parameters also take a JSON object inside the tag.
    """

    name = 'search_r1'
    passage_style = 'search_r1'
    result_tag = 'information'

    def stop_strings(self, tools: Tools) -> tuple[str, ...]:
        return tuple(f'</{name}>' for name in tools)

    def explain(self, tools: Tools) -> list[str]:
        parts: list[str] = []
        for tool in tools.values():
            hint = tool.argument_hint or json.dumps(tool.example_arguments, ensure_ascii=False)
            separator = ' ' if parts else ''
            parts += [
                separator,
                Untrusted(tool.introduction),
                f', write <{tool.name}>',
                Untrusted(hint),
                f'</{tool.name}>; ',
                Untrusted(tool.returns),
                f' back between <{self.result_tag}> and </{self.result_tag}>.',
            ]
        return parts

    def write_call(self, tool: Tool, arguments: Json) -> str:
        parameter = tool.tag_parameter
        body = json.dumps(arguments, ensure_ascii=False)
        if parameter is not None and set(arguments) == {parameter}:
            value = arguments[parameter]
            body = value if isinstance(value, str) else value[0]
        return f'<{tool.name}>{body}</{tool.name}>'

    def read_call(self, text: str, tools: Tools) -> tuple[str, Any, str | None]:
        call = self.call_body(text, tools)
        if call is None:
            return '', None, 'malformed'
        opening, body = call
        tool = tools[opening.strip('<>')]
        arguments = _tag_arguments(tool, body)
        return tool.name, arguments, 'malformed' if arguments is None else None

    def wrap(self, codec: Codec, text: str, limit: int) -> np.ndarray:
        head = codec.encode(f'\n\n<{self.result_tag}>')
        tail = codec.encode(f'</{self.result_tag}>\n\n')
        room = max(limit - len(head) - len(tail), 0)
        body = codec.encode_plain(text)[:room]
        return np.asarray(head + body + tail, np.int32)


def _tag_arguments(tool: Tool, body: str) -> Any:
    """Arguments inside a tag; None where they cannot be read."""
    parameter = tool.tag_parameter
    properties = tool.parameters.get('properties', {})
    takes_json = parameter is None or len(properties) > 1
    if takes_json and body.lstrip().startswith('{'):
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            return None
    if parameter is None:
        return {} if not body.strip() and not tool.parameters.get('required') else None
    is_list = properties[parameter].get('type') == 'array'
    return {parameter: [body] if is_list else body}


class RSearchSyntax(TagSyntax):
    """The same calls; results are between the tags of R-Search's checkpoints (SSP, table 1)."""

    name = 'r_search'
    result_tag = 'observation'


class MessageSyntax(CallSyntax):
    """Results are messages of their own, as the checkpoint's chat template writes one of a tool."""

    stop_string: str

    def stop_strings(self, tools: Tools) -> tuple[str, ...]:
        return (self.stop_string,) if tools else ()

    def message_content(self, text: str) -> str:
        """Content of the tool message."""
        return text

    def wrap(self, codec: Codec, text: str, limit: int) -> np.ndarray:
        body = codec.encode_plain(text)
        while True:
            content = Untrusted(self.message_content(codec.decode(body)))
            ids = codec.suffix({'role': 'tool', 'content': [content]})
            if len(ids) <= limit or not body:
                return ids
            # JSON escapes make the message longer than its body: shorten and render again.
            excess = max(len(ids) - limit, 1)
            body = body[: max(len(body) - excess, 0)]


class QwenSyntax(MessageSyntax):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the form of Qwen's chat template."""

    name = 'qwen'
    passage_style = 'verl'
    stop_string = '</tool_call>'

    def explain(self, tools: Tools) -> list[str]:
        parts: list[str] = []
        for tool in tools.values():
            call = {'name': tool.name, 'arguments': tool.example_arguments}
            separator = ' ' if parts else ''
            note = f'; {tool.note}' if tool.note else ''
            returns = tool.returns[:1].upper() + tool.returns[1:]
            parts += [
                separator,
                Untrusted(tool.introduction),
                ', write <tool_call>',
                Untrusted(json.dumps(call, ensure_ascii=False)),
                '</tool_call>',
                Untrusted(f'{note}. {returns} back as a tool response.'),
            ]
        return parts

    def write_call(self, tool: Tool, arguments: Json) -> str:
        call = {'name': tool.name, 'arguments': dict(arguments)}
        return f'<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>'

    def read_call(self, text: str, tools: Tools) -> tuple[str, Any, str | None]:
        call_body = self.call_body(text, tools)
        if call_body is None:
            return '', None, 'malformed'
        try:
            call = json.loads(call_body[1])
            name, arguments = call['name'], call['arguments']
        except (ValueError, KeyError, TypeError, RecursionError):
            return '', None, 'malformed'
        return _known_tool(name, arguments, tools)

    def message_content(self, text: str) -> str:
        return json.dumps({'result': text}, ensure_ascii=False)


class OlmoSyntax(MessageSyntax):
    """`<function_calls>name(argument="…")</function_calls>` (OLMo-3; SCOPE)."""

    name = 'olmo'
    passage_style = 'search_r1'
    stop_string = '</function_calls>'
    # OLMo's search takes one `query`; the tool takes a list.
    _ALIASES = {'search': ('query', 'query_list')}

    def explain(self, tools: Tools) -> list[str]:
        parts: list[str] = []
        for tool in tools.values():
            separator = ' ' if parts else ''
            returns = tool.returns[:1].upper() + tool.returns[1:]
            parts += [
                separator,
                Untrusted(tool.introduction),
                ', write <function_calls>',
                Untrusted(self._function_call(tool, tool.example_arguments)),
                '</function_calls>. ',
                Untrusted(f'{returns} back as a message of the environment.'),
            ]
        return parts

    def write_call(self, tool: Tool, arguments: Json) -> str:
        return f'<function_calls>{self._function_call(tool, arguments)}</function_calls>'

    def _function_call(self, tool: Tool, arguments: Json) -> str:
        alias, parameter = self._ALIASES.get(tool.name, ('', ''))
        written = []
        for name, value in arguments.items():
            if name == parameter:
                name, value = alias, value[0]
            written.append(f'{name}={json.dumps(value, ensure_ascii=False)}')
        return f'{tool.name}({", ".join(written)})'

    def read_call(self, text: str, tools: Tools) -> tuple[str, Any, str | None]:
        call_body = self.call_body(text, tools)
        call = re.fullmatch(r'\s*([\w-]+)\((.*)\)\s*', call_body[1] if call_body else '', re.DOTALL)
        arguments = None if call is None else _keyword_arguments(call[2])
        if call is None or arguments is None:
            return '', None, 'malformed'
        alias, parameter = self._ALIASES.get(call[1], ('', ''))
        if parameter and call[1] in tools:
            # Checkpoints were trained with errors for search(query="…", k=3) and the like.
            if set(arguments) != {alias}:
                return '', None, 'malformed'
            arguments = {parameter: [arguments[alias]]}
        return _known_tool(call[1], arguments, tools)


def _known_tool(name: Any, arguments: Any, tools: Tools) -> tuple[str, Any, str | None]:
    if not isinstance(name, str) or name not in tools:
        return str(name)[:64], None, 'unknown_tool'
    return name, arguments, None


def _keyword_arguments(text: str) -> dict[str, Any] | None:
    """`name=JSON, name=JSON` as a dict; None where it is anything else."""
    # strict=False: a policy may put a line feed into a text.
    decoder = json.JSONDecoder(strict=False)
    arguments: dict[str, Any] = {}
    position = 0
    while text.strip():
        keyword = re.compile(r'\s*(\w+)\s*=\s*').match(text, position)
        if keyword is None or keyword[1] in arguments:
            return None
        try:
            value, position = decoder.raw_decode(text, keyword.end())
        except (ValueError, RecursionError):
            return None
        arguments[keyword[1]] = value
        separator = re.compile(r'\s*(,|$)').match(text, position)
        if separator is None:
            return None
        if not separator[1]:
            break
        position = separator.end()
    return arguments


SYNTAXES: dict[str, CallSyntax] = {
    syntax.name: syntax for syntax in (TagSyntax(), RSearchSyntax(), QwenSyntax(), OlmoSyntax())
}


def syntax_of(name: str) -> CallSyntax:
    """The call syntax called `name`; ValueError names the known ones."""
    if name not in SYNTAXES:
        raise ValueError(f'tools.syntax={name!r} is unknown; choose one of {", ".join(SYNTAXES)}')
    return SYNTAXES[name]
