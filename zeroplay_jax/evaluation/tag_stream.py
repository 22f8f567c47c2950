"""Splits the text of a policy at its tags while the text is still being generated."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

# Called with the kind and the content of an event.
Report = Callable[[str, Any], None]


@dataclasses.dataclass(frozen=True)
class InvalidCall:
    """A tool call that could not be parsed, or whose arguments its tool refused (`ToolCall.is_valid` is False).

    Attributes:
      tool: the tool that its tag names; '' where the tag is the same for several tools.
      text: the text inside the tag, as the policy wrote it.
    """

    tool: str
    text: str


class TagStream:
    """Reports the text of a policy by its tags. One stream serves one rollout: `feed` its text, `close` every turn.

    A section is the text between two tags. It is reported in pieces, as it is generated; that of a call as a whole.

    Events, each (kind, content):
      'think', 'answer', 'text': a piece of a section inside these tags, or outside of all tags.
      'end': None, after the last piece of a section.
      'invalid_call': an `InvalidCall`. Valid calls are not reported here (see `agent.ReportingEnvironment`).

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
            self._report('invalid_call', InvalidCall(tool, self._call_text))
        self._call_text = ''
        self._report('end', None)
