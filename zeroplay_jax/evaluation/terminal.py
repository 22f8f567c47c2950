"""Output of a rollout for a terminal: labelled lines, and text that cannot control the terminal."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from zeroplay_jax.evaluation.tag_stream import InvalidCall
from zeroplay_jax.types import Json, ToolCall

# Width of the labels in front of the text, in characters.
_LABEL_WIDTH = 10
# SGR parameters of ANSI escape sequences.
_COLOURS = {
    'question': '1',
    'think': '2',
    'text': '0',
    'call': '1;36',
    'result': '34',
    'answer': '1;32',
    'error': '31',
    'note': '2',
}
_RESET = '\x1b[0m'
# Control characters move the cursor, end a line or reverse the direction of writing. Line feed and
# tab are harmless. Surrogates cannot be encoded at all.
_CONTROLS = re.compile(
    '[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]'
)


def clean(text: str) -> str:
    """Returns the text with control characters escaped as in a Python literal, such as `\\x1b`."""
    return _CONTROLS.sub(_python_escape, text)


def _python_escape(character: re.Match[str]) -> str:
    return ascii(character[0])[1:-1]


def one_line_json(value: Json) -> str:
    """Returns JSON on one line; non-ASCII letters are kept, control characters are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return _CONTROLS.sub(_json_escape, text)


def _json_escape(character: re.Match[str]) -> str:
    return f'\\u{ord(character[0]):04x}'


class Printer:
    """Prints the events of a rollout (`evaluation.agent.Agent.ask`) as labelled lines.

    Args:
      colour: whether to write ANSI colours.
    """

    def __init__(self, colour: bool):
        self._colour = colour
        # The kind of the line in progress; '' between lines.
        self._open_kind = ''
        # White space at the end of a piece is printed only if the section continues.
        self._held_blanks = ''

    def report(self, kind: str, content: Any) -> None:
        """Prints one event: one of `tag_stream.TagStream`, or 'call' or 'result' with a `ToolCall`."""
        if kind == 'end':
            self._end_line()
        elif kind == 'call':
            self._print_call(content)
        elif kind == 'invalid_call':
            self._print_invalid_call(content)
        elif kind == 'result':
            self._print_result(content)
        else:
            self._print_piece(kind, content)

    def line(self, kind: str, text: str, label: str | None = None) -> None:
        """Ends the line in progress and prints a whole line; runs of white space inside the text become one space.

        Args:
          kind: key of `_COLOURS`, determines the colour.
          label: text in the label column; None: the kind.
        """
        self._end_line()
        self._begin_line(kind, kind if label is None else label)
        self._write(' '.join(text.split()))
        self._end_line()

    def _print_call(self, call: ToolCall) -> None:
        """Prints a line per search query, or one line with the arguments of another tool."""
        arguments = call.arguments or {}
        if call.tool == 'search' and call.queries:
            for query in call.queries:
                self.line('call', query, label='search')
            return
        # A single text reads better without JSON around it.
        values = list(arguments.values())
        is_single_text = len(values) == 1 and isinstance(values[0], str)
        text = values[0] if is_single_text else json.dumps(arguments, ensure_ascii=False)
        self.line('call', text, label=call.tool)

    def _print_invalid_call(self, call: InvalidCall) -> None:
        """Prints the text of a call that could not be parsed or was refused."""
        self.line('call', call.text, label=call.tool or 'call')

    def _print_result(self, call: ToolCall) -> None:
        """Prints the error, the passages or the text of a call."""
        if call.error is not None:
            self.line('error', call.text)
        elif call.tool == 'search' and call.documents:
            self._print_passages(call)
        else:
            for line in call.text.splitlines():
                if line.strip():
                    self.line('result', line, label='')

    def _print_passages(self, call: ToolCall) -> None:
        """Prints a line per passage of a search."""
        for number, passages in enumerate(call.documents, 1):
            # Searches are numbered only if the call has several queries.
            if len(call.documents) > 1:
                self.line('result', f'of search {number}', label='')
            for rank, passage in enumerate(passages, 1):
                text = f'{passage["title"]}: {passage["text"]}'
                self.line('result', text, label=f'  [{rank}]')
            if not passages:
                self.line('result', 'no passage found', label='')

    def _print_piece(self, kind: str, text: str) -> None:
        """Continues the line of `kind` with a piece, or begins one; white space around a whole section is left out."""
        if self._open_kind != kind:
            self._end_line()
            text = text.lstrip()
            if not text:
                return
            self._begin_line(kind, '' if kind == 'text' else kind)
        text = self._held_blanks + text
        printed = text.rstrip()
        self._held_blanks = text[len(printed) :]
        self._write(printed)

    def _begin_line(self, kind: str, label: str) -> None:
        """Starts a line with its colour and its label, padded to the column of the text."""
        if self._colour:
            sys.stdout.write(f'\x1b[{_COLOURS[kind]}m')
        # The label is followed by at least one space, also if a tool's name fills the whole column.
        sys.stdout.write(f'{clean(label):{_LABEL_WIDTH - 1}} ')
        self._open_kind = kind

    def _write(self, text: str) -> None:
        """Prints text with control characters escaped and further lines indented."""
        indented = clean(text).replace('\n', '\n' + ' ' * _LABEL_WIDTH)
        sys.stdout.write(indented)
        # Flushed at once, so that the user sees the text while it is generated.
        sys.stdout.flush()

    def _end_line(self) -> None:
        """Ends the line in progress, if there is one; drops blanks that were held back."""
        if self._open_kind:
            if self._colour:
                sys.stdout.write(_RESET)
            sys.stdout.write('\n')
            sys.stdout.flush()
        self._open_kind = ''
        self._held_blanks = ''
