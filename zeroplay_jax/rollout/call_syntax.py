"""Call syntaxes: how a policy writes a tool call, and how the result is written into its context.

A syntax defines the stop strings, the parser, the form of an observation and the layout of passages.
A model is trained with one syntax, so a run uses a single one. Syntaxes do not depend on what a tool
does, and tools (zeroplay_jax/tools) do not depend on the syntax.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from zeroplay_jax.rollout.foreign_text import (
    Untrusted,
    longest_fitting,
    passages_text,
    without_surrogates,
)
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.settings.kinds import is_server
from zeroplay_jax.tools.base import (
    ERROR_TEXTS,
    MAX_RESULT_CHARACTERS,
    InvalidArguments,
    Tool,
    ToolResult,
)
from zeroplay_jax.types import Json, ToolCall

Tools = Mapping[str, Tool]

_MAX_UNKNOWN_NAME = 64  # characters
# Of a policy at a server: about those of English text and a large vocabulary.
CHARACTERS_PER_TOKEN = 4


class CallSyntax(abc.ABC):
    """A way to write tool calls and their results.

    Attributes:
      name: its value in `config.tools.syntax`.
      passage_style: layout of passages, see `passages_text`.
      tag: name of the tag around a call; '': that of the tool.
      result_tag: name of the tag around a result; '' if there is none.
      writes_messages: whether results are messages of the chat template.
    """

    name: str
    passage_style: str
    tag: str = ''
    result_tag: str = ''
    writes_messages: bool = False

    def stop_strings(self, tools: Tools) -> tuple[str, ...]:
        """Strings that end a turn with a call."""
        tags = dict.fromkeys(self.tag or name for name in tools)
        return tuple(f'</{tag}>' for tag in tags)

    def explain(self, tools: Tools) -> list[str]:
        """The prompt's explanation of the tools, in parts; phrases of the tools are `Untrusted`."""
        parts: list[str] = []
        for tool in tools.values():
            if parts:
                parts.append(' ')
            example = self._example(tool, tools)
            dots = dict.fromkeys(tool.parameters.get('required', ()), '…')
            shown = dots if example is None else example
            # A tool's phrases may come from outside (an MCP server): they must not become control
            # tokens. The tags around them must, or the policy would see other ids than it samples.
            parts.append(Untrusted(tool.introduction))
            parts.append(', write ')
            parts.append(f'<{self.tag or tool.name}>')
            parts.append(Untrusted(self.call_text(tool, shown)))
            parts += self.explain_result(tool)
            explained = _explained_arguments(tool, example)
            if explained:
                parts.append(Untrusted(explained))
        return parts

    def _example(self, tool: Tool, tools: Tools) -> Json | None:
        """Returns arguments that can be shown; None if the tool has none, or the call would not be read as shown."""
        example = tool.example_arguments
        if example is None:
            return None
        read = self.read_call(self.write_call(tool, example), tools)
        return example if read == (tool.name, example, None) else None

    @abc.abstractmethod
    def call_text(self, tool: Tool, arguments: Json) -> str:
        """A call as a policy writes it, without the tags."""

    @abc.abstractmethod
    def explain_result(self, tool: Tool) -> list[str]:
        """The end of a call and what the policy gets back, in parts."""

    def write_call(self, tool: Tool, arguments: Json) -> str:
        """A call as a policy writes it."""
        tag = self.tag or tool.name
        return f'<{tag}>{self.call_text(tool, arguments)}</{tag}>'

    @abc.abstractmethod
    def read_call(self, text: str, tools: Tools) -> tuple[str, Any, str | None]:
        """(tool name, raw arguments, error code) of the call that ended a turn.

        The error code is None if the call was parsed; the arguments are not checked yet.
        """

    @abc.abstractmethod
    def wrap(self, codec: Codec, text: str, limit: int) -> Int[np.ndarray, ' tokens']:
        """Ids, int32, that carry an observation to the policy.

        Long text loses its end until there are at most `limit` ids. The tags around it are always
        complete, even where the limit is too small for them.
        """

    def start(self, codec: Codec, text: str, limit: int) -> str:
        """Returns the beginning of foreign text, at most `limit` tokens."""
        return codec.decode(codec.encode_start(text, limit))

    def parse(self, text: str, tools: Tools) -> ToolCall:
        """Reads the call at the end of a turn and checks it against the tool's schema; never raises.

        Returns:
          A call with either `arguments`, or `error` and the observation text that explains it.
        """
        # An invalid call is an observation, not the end of the rollout (as in Search-R1), so that
        # the policy can learn to correct itself.
        name, raw_arguments, error = self.read_call(text, tools)
        if error is not None:
            return ToolCall(name, None, _error_text(error, name, tools), error=error)
        tool = tools[name]
        try:
            # JSON escapes can produce half of a surrogate pair, which no file can store.
            return ToolCall(name, tool.validated(without_surrogates(raw_arguments)))
        except InvalidArguments as problem:
            explanation = tool.error_text(problem.code, problem.detail)
            return ToolCall(name, None, without_surrogates(explanation), error=problem.code)
        except Exception as error:
            # `prepare` is code of the tool's author: its exceptions become observations and do not end the run.
            tool.failure_log.add(f'its arguments could not be checked: {error!r}', before_run=True)
            return ToolCall(name, None, tool.error_text('failed'), error='failed')

    def result_text(self, tool: Tool, result: ToolResult, show_ids: bool = False) -> str:
        """Returns the text of a result that the policy reads.

        Args:
          show_ids: whether to show passages with their ids.
        """
        # A text has precedence: some tools explain an error better than its reason code does.
        if result.text is not None:
            return result.text[:MAX_RESULT_CHARACTERS]
        if result.error is not None:
            return tool.error_text(result.error)
        return passages_text(result.documents, self.passage_style, show_ids)

    def opening_tags(self, tools: Tools) -> tuple[str, ...]:
        """Strings that open a call."""
        return tuple(stop.replace('</', '<') for stop in self.stop_strings(tools))

    def tag_names(self, tools: Tools) -> tuple[str, ...]:
        """Returns the names of the tags around calls and results."""
        names = [opening.strip('<>') for opening in self.opening_tags(tools)]
        if self.result_tag:
            names.append(self.result_tag)
        return tuple(names)

    def call_body(self, text: str, tools: Tools) -> tuple[str, str] | None:
        """Returns (opening tag, text inside) of the turn's only call; None without a call or with more than one."""
        openings = [tag for tag in self.opening_tags(tools) if tag in text]
        # A second opening makes the call ambiguous. Running the last one would reward a policy for
        # writing calls, and results, inside its own text.
        if len(openings) != 1 or text.count(openings[0]) != 1:
            return None
        opening = openings[0]
        _, _, rest = text.partition(opening)
        body, closing, _ = rest.partition(opening.replace('<', '</'))
        return (opening, body) if closing else None


def _explained_arguments(tool: Tool, example: Json | None) -> str:
    """Returns what a prompt says about the arguments beside their example; '' if it says all."""
    properties = tool.parameters.get('properties', {})
    if example is None or (properties and not tool.argument_hint):
        return f' Arguments: {as_json(tool.parameters)}.'
    required = tool.parameters.get('required', ())
    optional = [name for name in properties if name not in required]
    return f' Optional arguments: {", ".join(optional)}.' if optional else ''


def _capitalised(phrase: str) -> str:
    # str.capitalize would turn the later letters into lower case.
    return phrase[:1].upper() + phrase[1:]


def _error_text(code: str, name: str, tools: Tools) -> str:
    """Returns the observation for a call that could not be read, or that names an unknown tool."""
    if code == 'unknown_tool':
        # The built-in checkpoints were trained on exactly this text, with search as the only tool.
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

    def explain_result(self, tool: Tool) -> list[str]:
        between = f' back between <{self.result_tag}> and </{self.result_tag}>.'
        return [f'</{tool.name}>; ', Untrusted(tool.returns), between]

    def call_text(self, tool: Tool, arguments: Json) -> str:
        # Plain text if it is read as these arguments, or else JSON.
        if tool.tag_parameter is not None and set(arguments) == {tool.tag_parameter}:
            value = arguments[tool.tag_parameter]
            if _fills_list(tool):
                # A tag holds one text, also where the parameter is a list of texts.
                return value[0]
            if _tag_arguments(tool, value) == arguments:
                return value
        return arguments_as_json(arguments)

    def read_call(self, text: str, tools: Tools) -> tuple[str, Any, str | None]:
        call = self.call_body(text, tools)
        if call is None:
            return '', None, 'malformed'
        opening, body = call
        tool = tools[opening.strip('<>')]
        arguments = _tag_arguments(tool, body)
        if arguments is None:
            return tool.name, None, 'malformed'
        return tool.name, arguments, None

    def wrap(self, codec: Codec, text: str, limit: int) -> Int[np.ndarray, ' tokens']:
        # Tags and text are encoded separately, so that they never merge into common tokens and the tags
        # have the same ids around every result.
        head = codec.encode(f'\n\n<{self.result_tag}>')
        tail = codec.encode(f'</{self.result_tag}>\n\n')
        body_limit = max(limit - len(head) - len(tail), 0)
        # Cut by tokens and not by characters, because `limit` is a number of tokens.
        body = codec.encode_start(text, body_limit)
        return np.asarray(head + body + tail, np.int32)


def _fills_list(tool: Tool) -> bool:
    """Returns whether the text of a call is the only entry of a list, as in the built-in search."""
    properties = tool.parameters.get('properties', {})
    schema = properties.get(tool.tag_parameter)
    return isinstance(schema, dict) and schema.get('type') == 'array'


def _tag_arguments(tool: Tool, body: str) -> Any:
    """Returns the arguments inside a tag; None if they cannot be read."""
    parameter = tool.tag_parameter
    properties = tool.parameters.get('properties', {})
    # A tool with a single text never reads JSON: its text may begin with a brace.
    takes_json = parameter is None or len(properties) > 1
    if takes_json and body.lstrip().startswith('{'):
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            # RecursionError: thousands of opening brackets.
            return None
    if parameter is None:
        # An empty tag calls a tool without required parameters.
        is_empty_call = not body.strip() and not tool.parameters.get('required')
        return {} if is_empty_call else None
    if _fills_list(tool):
        return {parameter: [body]}
    return {parameter: body}


class RSearchSyntax(TagSyntax):
    """`TagSyntax` with results between the tags of R-Search's checkpoints (SSP, table 1)."""

    name = 'r_search'
    # The checkpoints were trained with this tag only.
    result_tag = 'observation'


class MessageSyntax(CallSyntax):
    """Base of syntaxes whose results are messages of the checkpoint's chat template (`ChatTemplate.tool_role`)."""

    writes_messages = True

    def message_content(self, text: str) -> str:
        """Content of the tool message."""
        return text

    def wrap(self, codec: Codec, text: str, limit: int) -> Int[np.ndarray, ' tokens']:
        # The template writes the message, so its form is that of the checkpoint's own training.
        def message(length: int) -> Int[np.ndarray, ' tokens']:
            written = codec.decode(codec.whole_characters(body[:length]))
            content = Untrusted(self.message_content(written))
            return codec.suffix({'role': codec.template.tool_role, 'content': [content]})

        # Twice the limit, because a message may have fewer ids than its text alone.
        body = codec.encode_start(text, 2 * limit)
        whole = message(len(body))
        if len(whole) <= limit:
            return whole
        # JSON escapes lengthen a message by an amount that depends on its text.
        excess = len(whole) - limit
        fitting = longest_fitting(len(body), excess, lambda length: len(message(length)) - limit)
        return message(fitting)


class QwenSyntax(MessageSyntax):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the form of Qwen's chat template."""

    name = 'qwen'
    passage_style = 'verl'
    tag = 'tool_call'
    # Written by the chat template.
    result_tag = 'tool_response'

    def explain_result(self, tool: Tool) -> list[str]:
        note = f'; {tool.note}' if tool.note else ''
        returned = f'{note}. {_capitalised(tool.returns)} back as a tool response.'
        return [f'</{self.tag}>', Untrusted(returned)]

    def call_text(self, tool: Tool, arguments: Json) -> str:
        return arguments_as_json({'name': tool.name, 'arguments': arguments})

    def read_call(self, text: str, tools: Tools) -> tuple[str, Any, str | None]:
        call_body = self.call_body(text, tools)
        if call_body is None:
            return '', None, 'malformed'
        try:
            call = json.loads(call_body[1])
            name = call['name']
            arguments = call['arguments']
        except (ValueError, KeyError, TypeError, RecursionError):
            return '', None, 'malformed'
        if _only_search(tools) and not (isinstance(arguments, dict) and 'query_list' in arguments):
            return '', None, 'malformed'
        return _known_tool(name, arguments, tools)

    def message_content(self, text: str) -> str:
        # The form in which verl's search tool responds, which Dr. Zero's released code uses.
        return as_json({'result': text})


class OlmoSyntax(MessageSyntax):
    """`<function_calls>name(argument="…")</function_calls>` (OLMo-3; SCOPE)."""

    name = 'olmo'
    passage_style = 'search_r1'
    tag = 'function_calls'

    def explain_result(self, tool: Tool) -> list[str]:
        returned = f'{_capitalised(tool.returns)} back as a message of the environment.'
        return [f'</{self.tag}>. ', Untrusted(returned)]

    def call_text(self, tool: Tool, arguments: Json) -> str:
        if _is_search(tool):
            arguments = {'query': arguments['query_list'][0]}
        written = [f'{name}={arguments_as_json(value)}' for name, value in arguments.items()]
        return f'{tool.name}({", ".join(written)})'

    def read_call(self, text: str, tools: Tools) -> tuple[str, Any, str | None]:
        call_body = self.call_body(text, tools)
        call = read_function_call(call_body[1]) if call_body else None
        if call is None:
            return '', None, 'malformed'
        name, arguments = call
        # OLMo's search takes one `query`; this project's takes a list of them.
        takes_query = _is_search(tools.get(name))
        # Checkpoints were trained with errors for search(query="…", k=3) and the like.
        if (takes_query or _only_search(tools)) and set(arguments) != {'query'}:
            return '', None, 'malformed'
        if takes_query:
            arguments = {'query_list': [arguments['query']]}
        return _known_tool(name, arguments, tools)


def _is_search(tool: Tool | None) -> bool:
    """Returns whether a tool is the built-in search, or one like it."""
    if tool is None or tool.name != 'search':
        return False
    return tool.tag_parameter == 'query_list' and _fills_list(tool)


def _only_search(tools: Tools) -> bool:
    """Returns whether the built-in search is the only tool."""
    # The built-in checkpoints, and those of the papers, were trained with search alone. A call of any tool
    # without a query was answered as malformed then, and not as a call of an unknown tool.
    return tuple(tools) == ('search',) and _fills_list(tools['search'])


def _known_tool(name: Any, arguments: Any, tools: Tools) -> tuple[str, Any, str | None]:
    """Returns a parsed call as `read_call` does, with the error 'unknown_tool' if the run lacks the tool."""
    # The name may be any JSON value. The log records the beginning of its text.
    if not isinstance(name, str) or name not in tools:
        return without_surrogates(str(name)[:_MAX_UNKNOWN_NAME]), None, 'unknown_tool'
    return name, arguments, None


class FunctionSyntax(QwenSyntax):
    """Calls that an OpenAI-compatible server returns beside the text, which turns record as `QwenSyntax` writes them.

    The model's tokenizer is not known: a result has four characters for each token of its limit.
    """

    name = 'functions'
    writes_messages = False

    def explain(self, tools: Tools) -> list[str]:
        # The server gets their schemas.
        return []

    def start(self, codec: Codec, text: str, limit: int) -> str:
        return text[: CHARACTERS_PER_TOKEN * limit]

    def wrap(self, codec: Codec, text: str, limit: int) -> Int[np.ndarray, ' tokens']:
        return np.asarray(codec.encode_plain(self.start(codec, text, limit)), np.int32)


SYNTAXES: dict[str, CallSyntax] = {
    syntax.name: syntax for syntax in (TagSyntax(), RSearchSyntax(), QwenSyntax(), OlmoSyntax())
}


def syntax_of(name: str) -> CallSyntax:
    """Returns the call syntax of a `config.tools.syntax`."""
    return SYNTAXES[name]


def syntax_for(config) -> CallSyntax:
    """Returns the call syntax of a config: of `tools.syntax`, or for a policy at a server its function calls."""
    return FunctionSyntax() if is_server(config.policy.path) else syntax_of(config.tools.syntax)


# A call in the form of a Python function call.
_FUNCTION_CALL = re.compile(r'\s*([\w-]+)\((.*)\)\s*', re.DOTALL)
# Begins what may be a tag, within a text of an argument.
_TAG_START = re.compile(r'<(?=[/A-Za-z_])')


def as_json(value: Any) -> str:
    """Returns a JSON value as one line, with letters of all languages as they are."""
    # Escapes such as \u00e9 would cost several tokens per letter.
    return json.dumps(value, ensure_ascii=False)


def arguments_as_json(value: Any) -> str:
    """Returns an argument as JSON in which no text looks like a tag, which could end the call."""
    return _TAG_START.sub(r'\\u003c', as_json(value))


def read_function_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Returns (name, arguments) of 'name(argument=JSON, …)'; None for any other text."""
    call = _FUNCTION_CALL.fullmatch(text)
    if call is None:
        return None
    # Values are read by a JSON decoder and never evaluated as Python, because the text comes from a model.
    # strict=False accepts line feeds in texts.
    decoder = json.JSONDecoder(strict=False)
    arguments: dict[str, Any] = {}
    rest = call[2]
    has_more = bool(rest.strip())
    while has_more:
        # Names are those of a schema, which need not be names of Python.
        written_name, _, rest = rest.partition('=')
        name = written_name.strip()
        rest = rest.lstrip()
        if not name or name in arguments:
            return None
        try:
            arguments[name], end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        rest = rest[end:].lstrip()
        has_more = rest.startswith(',')
        if rest and not has_more:
            return None
        rest = rest[1:]
    return call[1], arguments
