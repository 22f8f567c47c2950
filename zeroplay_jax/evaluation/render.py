"""A rollout as text: for a terminal, with the results of its calls, and while it is still being generated.

No text of a policy or page can control the terminal.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zeroplay_jax.rollout.environment import Environment
from zeroplay_jax.rollout.tokens import text_spans
from zeroplay_jax.types import Json, ToolCall, Trajectory

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
    return _CONTROLS.sub(lambda control: ascii(control[0])[1:-1], text)


def one_line_json(value: Json) -> str:
    """Returns JSON on one line; non-ASCII letters are kept, control characters are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return _CONTROLS.sub(lambda control: f'\\u{ord(control[0]):04x}', text)


class Printer:
    """Prints the events of a rollout (`session.Session`) as labelled lines.

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
        """Prints one event: one of `TagStream`, or 'call' or 'result' with a `ToolCall`."""
        if kind == 'end':
            self._end_line()
        elif kind == 'call':
            self._print_call(content)
        elif kind == 'invalid_call':
            self.line('call', content.text, label=content.tool or 'call')
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


# More tokens than any result has.
_UNLIMITED = 1 << 30


class Observation(NamedTuple):
    """The result of one tool call in the context of the policy.

    Attributes:
      text: what the policy read, with the tags around it; '' if nothing of it fitted into the context.
      tokens_left_out: tokens at the end of the result that it did not read.
    """

    text: str
    tokens_left_out: int


@dataclasses.dataclass(frozen=True)
class SampledRollout(Trajectory):
    """A rollout that `zeroplay_jax.sample_rollouts` returns.

    Attributes:
      observations: one for each tool call, in order.
    """

    observations: tuple[Observation, ...] = ()


def with_observations(trajectory: Trajectory, env: Environment) -> SampledRollout:
    """Returns a rollout with the observations of its calls.

    Args:
      env: the environment of the rollout.
    """
    spans = [span for span in text_spans(env.codec, trajectory) if span['source'] == 'env']
    calls = [turn.call for turn in trajectory.turns if turn.call is not None]
    observations = []
    for number, call in enumerate(calls):
        whole = env.syntax.wrap(env.codec, env.escaped(call.text), _UNLIMITED)
        text = ''
        num_read = 0
        # The result of the last call has no span if it did not fit into the slot.
        if number < len(spans):
            text = spans[number]['text'].strip()
            num_read = len(spans[number]['tokens'])
        observations.append(Observation(text, max(len(whole) - num_read, 0)))
    return SampledRollout(**vars(trajectory), observations=tuple(observations))


def rollout_text(trajectory: Trajectory) -> str:
    """Returns the turns of the policy, and its tool calls with what it read of their results.

    Of a rollout without observations, such as one of a run, the results are whole: how much was read is not known.
    """
    observations = list(getattr(trajectory, 'observations', ()))
    lines = []
    for turn in trajectory.turns:
        lines.append(turn.text.strip())
        if turn.call is None:
            continue
        result = turn.call.text.strip()
        if observations:
            read, num_left_out = observations.pop(0)
            result = f'{read} [… {num_left_out} tokens left out]'.strip() if num_left_out else read
        outcome = turn.call.error or 'ok'
        lines.append(f'  [{turn.call.tool or "call"}: {outcome}] {result}')
    tokens = f'{trajectory.policy_tokens} of {len(trajectory.tokens)} tokens written by the policy'
    lines.append(f'({trajectory.finish}; {tokens})')
    return '\n'.join(lines)


# Called with the kind and the content of an event.
Report = Callable[[str, Any], None]


class TagStream:
    """Reports the text of a policy by its tags. One stream serves one rollout: `feed` its text, `close` every turn.

    A section is the text between two tags. It is reported in pieces, as it is generated; that of a call as a whole.

    Events, each (kind, content):
      'think', 'answer', 'text': a piece of a section inside these tags, or outside of all tags.
      'end': None, after the last piece of a section.
      'invalid_call': a `ToolCall` without arguments, whose text is what stands inside the tag. Valid calls are not
        reported here (see `session`).

    Args:
      report: receives the events.
      call_tags: names of the tags around tool calls, each with the tool that it calls; '' where
        the tag does not determine the tool.
    """

    def __init__(self, report: Report, call_tags: Mapping[str, str]):
        self._report = report
        self._call_tags = dict(call_tags)
        names = ['think', 'answer', *call_tags]
        alternatives = '|'.join(re.escape(name) for name in names)
        self._tag_pattern = re.compile(f'<(/?)({alternatives})>')
        self._tags = [f'<{name}>' for name in names] + [f'</{name}>' for name in names]
        # The tag that is open; 'text' outside of all tags.
        self._kind = 'text'
        # Text that is not reported yet, because it may be the beginning of a tag.
        self._pending = ''
        # Tag and text of the last call, as long as it is not known whether it is valid.
        self._call_tag = ''
        self._call_text = ''

    def feed(self, text: str) -> None:
        """Takes generated text and reports it, except the text of a call and an incomplete tag at the end."""
        self._pending += text
        tag = self._tag_pattern.search(self._pending)
        while tag is not None:
            self._add(self._pending[: tag.start()])
            is_closing = bool(tag[1])
            name = tag[2]
            # A closed call is not reported here: it normally ends the turn, and only then is it known whether it is
            # valid. `close` then discards or reports it. A further tag in the same turn reports it as invalid,
            # because a call counts at the end of a turn only.
            if not (is_closing and name in self._call_tags):
                self._end_section()
            self._kind = 'text' if is_closing else name
            self._pending = self._pending[tag.end() :]
            tag = self._tag_pattern.search(self._pending)
        complete_length = self._length_before_partial_tag()
        self._add(self._pending[:complete_length])
        self._pending = self._pending[complete_length:]

    def _length_before_partial_tag(self) -> int:
        """Returns the length of the pending text without the beginning of a tag at its end."""
        # Only the last '<' can begin a tag that is still incomplete: no tag contains another '<'.
        position = self._pending.rfind('<')
        if position >= 0:
            end = self._pending[position:]
            if any(tag.startswith(end) for tag in self._tags):
                return position
        return len(self._pending)

    def close(self, call_was_valid: bool = False) -> None:
        """Ends the turn: reports the remaining text, then 'end'.

        Args:
          call_was_valid: the turn ended with a valid call, whose text is discarded, because the environment reports
            the parsed call. Otherwise the text of a call is reported as 'invalid_call' before 'end'.
        """
        if call_was_valid:
            self._call_text = ''
        self._add(self._pending)
        self._end_section()
        self._kind = 'text'
        self._pending = ''

    def _add(self, text: str) -> None:
        """Reports text of the open tag; collects it instead if the tag is that of a call."""
        if self._kind in self._call_tags:
            self._call_tag = self._kind
            self._call_text += text
        elif text:
            self._report(self._kind, text)

    def _end_section(self) -> None:
        """Reports the collected text of a call, if there is any, as an invalid call, then 'end'."""
        if self._call_text:
            tool = self._call_tags[self._call_tag]
            self._report('invalid_call', ToolCall(tool, None, self._call_text))
        self._call_text = ''
        self._report('end', None)
