"""A rollout as text: for a terminal, turn by turn, and with what was read of the results of its calls.

No text of a policy or page can control the terminal.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import NamedTuple

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


def sections(text: str, call_tags: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns (tag, text between tags) of what a policy wrote, in order; 'text' outside of all tags.

    Args:
      call_tags: names of the tags around tool calls, beside 'think' and 'answer'.
    """
    names = '|'.join(map(re.escape, ('think', 'answer', *call_tags)))
    kind, start = 'text', 0
    parts = []
    for tag in re.finditer(f'<(/?)({names})>', text):
        parts.append((kind, text[start : tag.start()]))
        kind = 'text' if tag[1] else tag[2]
        start = tag.end()
    parts.append((kind, text[start:]))
    return [(kind, part.strip()) for kind, part in parts if part.strip()]


class Printer:
    """Prints turns of a rollout and results of its calls as labelled lines.

    Args:
      colour: whether to write ANSI colours.
    """

    def __init__(self, colour: bool):
        self._colour = colour

    def turn(self, text: str, call: ToolCall | None, call_tags: Mapping[str, str]) -> None:
        """Prints what a policy wrote in a turn, and the call with which it ended.

        Args:
          call: None without one; one that is not valid is printed as it was written.
          call_tags: names of the tags around tool calls, each with the tool that it calls; '' where the tag does not
            determine the tool.
        """
        parts = sections(text, call_tags)
        is_valid_call = call is not None and call.is_valid
        if is_valid_call and parts and parts[-1][0] in call_tags:
            del parts[-1]
        for kind, part in parts:
            if kind in call_tags:
                self.line('call', part, label=call_tags[kind] or 'call')
            else:
                self._print(kind, part, label='' if kind == 'text' else kind)
        if call is not None and call.is_valid:
            self._print_call(call)

    def line(self, kind: str, text: str, label: str | None = None) -> None:
        """Prints a line; runs of white space inside the text become one space.

        Args:
          kind: key of `_COLOURS`, determines the colour.
          label: text in the label column; None: the kind.
        """
        self._print(kind, ' '.join(text.split()), kind if label is None else label)

    def result(self, call: ToolCall) -> None:
        """Prints the error, a line per passage of a search, or the text of a call."""
        if call.error is not None:
            self.line('error', call.text)
            return
        if call.tool != 'search' or not call.documents:
            for line in filter(str.strip, call.text.splitlines()):
                self.line('result', line, label='')
            return
        for number, passages in enumerate(call.documents, 1):
            # Searches are numbered only if the call has several queries.
            if len(call.documents) > 1:
                self.line('result', f'of search {number}', label='')
            for rank, passage in enumerate(passages, 1):
                text = f'{passage["title"]}: {passage["text"]}'
                self.line('result', text, label=f'  [{rank}]')
            if not passages:
                self.line('result', 'no passage found', label='')

    def _print_call(self, call: ToolCall) -> None:
        """Prints a line per search query, or one line with the arguments of another tool."""
        values = list((call.arguments or {}).values())
        texts = call.queries if call.tool == 'search' else ()
        # A single text reads better without JSON around it.
        if not texts and len(values) == 1 and isinstance(values[0], str):
            texts = values
        for text in texts or [json.dumps(call.arguments or {}, ensure_ascii=False)]:
            self.line('call', text, label=call.tool)

    def _print(self, kind: str, text: str, label: str) -> None:
        """Prints text behind a label, with control characters escaped and further lines indented."""
        indented = clean(text).replace('\n', '\n' + ' ' * _LABEL_WIDTH)
        # The label is followed by at least one space, also if a tool's name fills the whole column.
        line = f'{clean(label):{_LABEL_WIDTH - 1}} {indented}'
        print(f'\x1b[{_COLOURS[kind]}m{line}\x1b[0m' if self._colour else line, flush=True)


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
