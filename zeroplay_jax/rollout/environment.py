"""The environment of a rollout: when a turn ends, which tool it calls, and what the policy reads next.

An environment knows text, tools and limits. It knows neither the sampler nor the loss.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from zeroplay_jax.rollout.call_syntax import CallSyntax
from zeroplay_jax.rollout.foreign_text import (
    Message,
    Untrusted,
    without_surrogates,
    without_tags,
)
from zeroplay_jax.rollout.prompts import Prompt, fill
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.tools.base import Tool, ToolResult
from zeroplay_jax.types import Json, ToolCall

# Bytes, because turns are searched in the bytes of their tokens.
_THOUGHT_END = b'</think>'


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of a rollout.

    Attributes:
      max_turns: assistant turns; the last one cannot call a tool.
      turn_tokens: sampled tokens of a turn.
      observation_tokens: tokens of an observation, its tags included.
      response_tokens: tokens behind the prompt, turns and observations together; 0: as many as the slot holds.
    """

    max_turns: int
    turn_tokens: int
    observation_tokens: int
    response_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class TurnEnd:
    """How the rollout continues after a turn that a stop string ended.

    Attributes:
      call: the tool call, valid or refused; None for a final turn.
      done: whether the rollout is over.
      malformed: whether the final tag is inside a call that was never closed, so that its answer does not count.
    """

    call: ToolCall | None = None
    done: bool = False
    malformed: bool = False

    def outcome(self, is_last: bool) -> tuple[ToolCall | None, str]:
        """Returns the call as the turn records it, and `Trajectory.finish`, '' if the rollout goes on.

        Args:
          is_last: whether the limits allow no further turn.
        """
        call = self.call
        if self.malformed:
            call = ToolCall('', None, error='malformed')
        # A valid call in the last turn is neither run nor recorded: the policy could not read its result,
        # and metrics and rewards would count a search that never happened.
        if is_last and call is not None and call.error is None:
            call = None
        if self.done:
            return call, 'malformed' if self.malformed else 'answer'
        return call, 'turns' if is_last else ''


@dataclasses.dataclass(frozen=True)
class Environment:
    """Tools and limits of one role.

    Attributes:
      codec: tokenizer of the policy.
      syntax: how calls are written.
      limits: bounds of a rollout.
      tools: by name; empty for a role without tools.
      terminal_tags: closing any of these tags ends the rollout.
      call_openings: opening tags of the calls of all tools of the run. Used for a role without tools only: an answer
        inside such a call does not count.
      drop_thinking: whether a turn's thoughts are removed from the context when the turn is over, as in Qwen3's
        template.
      searched: (number of a search, text before its result and those of later ones).
    """

    codec: Codec
    syntax: CallSyntax
    limits: Limits
    tools: Mapping[str, Tool]
    terminal_tags: tuple[str, ...] = ('answer',)
    call_openings: tuple[str, ...] = ()
    drop_thinking: bool = False
    searched: tuple[int, str] = (0, '')

    @property
    def call_stops(self) -> tuple[str, ...]:
        """Strings that end a turn with a call."""
        return self.syntax.stop_strings(self.tools)

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a turn."""
        terminal_stops = tuple(f'</{tag}>' for tag in self.terminal_tags)
        return self.call_stops + terminal_stops

    @property
    def shows_document_ids(self) -> bool:
        """Whether passages are shown with their ids."""
        # Shown only if a tool takes them as arguments: ids would change the observations of all other runs.
        return any(tool.takes_document_ids for tool in self.tools.values())

    @property
    def schemas(self) -> list[Json]:
        """The tools as chat templates and servers list them."""
        schemas: list[Json] = []
        for tool in self.tools.values():
            names = 'name', 'description', 'parameters'
            function = {name: getattr(tool, name) for name in names}
            schemas.append({'type': 'function', 'function': function})
        return schemas

    def messages(self, prompt: Prompt, **fields: object) -> list[Message]:
        """Returns the chat that opens a rollout; `fields` are values of `Prompt.inputs`, untrusted."""
        escaped = {name: self.escaped(str(value)) for name, value in fields.items()}
        # The last turn cannot call a tool.
        escaped.setdefault('searches', str(self.limits.max_turns - 1))
        return fill(prompt, self.syntax.explain(self.tools), **escaped)

    def prompt_ids(self, prompt: Prompt, **fields: object) -> Int[np.ndarray, ' tokens']:
        """Returns the ids, int32, of `messages`, with which the context of a rollout begins.

        Raises:
          UserError: the chat template cannot write such a chat, or the schemas of the tools (`Prompt.tools`).
        """
        schemas = self.schemas if prompt.tools else []
        return self.codec.render(self.messages(prompt, **fields), schemas)

    def escaped(self, text: str) -> str:
        """Returns foreign text in which no tag of calls, results, answers or thoughts can be taken for a real one."""
        return without_tags(text, self._tag_names)

    @property
    def _tag_names(self) -> tuple[str, ...]:
        return (*self.syntax.tag_names(self.tools), *self.terminal_tags, 'think')

    def turn_ids(self, text: str) -> list[int]:
        """Returns the ids of a text as a turn of the policy: tags are its tokens, all else is foreign text."""
        pattern = '|'.join(f'</?{re.escape(name)}>' for name in self._tag_names)
        # Every second piece is a tag.
        pieces = re.split(f'({pattern})', text)
        spans = [piece if index % 2 else Untrusted(piece) for index, piece in enumerate(pieces)]
        return self.codec.encode_spans(spans)

    def read_turn(self, text: str) -> TurnEnd:
        """Returns how the rollout continues after a turn, given its text cut after a stop string."""
        if text.endswith(self.call_stops):
            return TurnEnd(self.syntax.parse(text, self.tools))
        # A final tag behind an opening tag that is not closed is part of the text of a call. Scoring such
        # an answer would reward malformed calls.
        openings = self.syntax.opening_tags(self.tools) or self.call_openings
        malformed = any(opening in text for opening in openings)
        return TurnEnd(done=True, malformed=malformed)

    def retained_tokens(self, turn_ids: Sequence[int]) -> list[int]:
        """Returns the ids of a turn that stay in the context of later turns.

        These are all ids; with `drop_thinking`, those after the last thought and the white space behind it.
        """
        all_ids = [int(token) for token in turn_ids]
        # Bytes are searched and not text: a character may be spread over several tokens.
        pieces = [self.codec.token_bytes[token] for token in all_ids]
        text = b''.join(pieces)
        thought_end = text.rfind(_THOUGHT_END)
        if not self.drop_thinking or thought_end < 0:
            return all_ids
        retained = text[thought_end + len(_THOUGHT_END) :].lstrip()
        retained_start = len(text) - len(retained)
        # Tokens that lie in the retained text as a whole keep their sampled ids: encoding them again
        # could give other ids than were sampled. Only a token that spans the beginning of the retained
        # text has to be encoded again.
        piece_start = len(text)
        first_whole = len(pieces)
        while first_whole > 0:
            previous_start = piece_start - len(pieces[first_whole - 1])
            if previous_start < retained_start:
                break
            first_whole -= 1
            piece_start = previous_start
        torn = text[retained_start:piece_start].decode(errors='replace')
        return self.codec.encode_plain(torn) + all_ids[first_whole:]

    def with_result(self, call: ToolCall, result: ToolResult) -> ToolCall:
        """Returns the call with its result filled in."""
        # The call records the whole text for the log; `observation` cuts it for the policy.
        text = self.syntax.result_text(self.tools[call.tool], result, self.shows_document_ids)
        documents = tuple(
            tuple(without_surrogates(dict(passage)) for passage in passages)
            for passages in result.documents
        )
        return dataclasses.replace(
            call, text=without_surrogates(text), documents=documents, error=result.error
        )

    def observation(self, call: ToolCall, number: int = 0) -> Int[np.ndarray, ' tokens']:
        """Returns the ids, int32, of the reply to a finished or refused call.

        There are at most `observation_tokens`, unless the tags alone are longer.

        Args:
          number: of valid searches so far.
        """
        limit = self.limits.observation_tokens
        # A page may have a megabyte. What is behind the longest text of `limit` ids cannot be read.
        readable = call.text[: limit * self.codec.longest_token]
        # The call records the text as it came; the tags in it are escaped for the policy only.
        text = self.escaped(readable)
        enough, message = self.searched
        if message and number >= enough:
            # First, because the end of a long result is cut.
            text = f'{message}\n{text}'
        ids = self.syntax.wrap(self.codec, text, limit)
        # A character or an escape that does not fit leaves up to two ids free.
        may_be_cut = call.error is None and len(ids) > limit - 3
        if may_be_cut and len(self.syntax.wrap(self.codec, text, limit + 8)) > len(ids):
            _warn_of_cut(call.tool)
        return ids


@functools.lru_cache
def _warn_of_cut(tool: str) -> None:
    """Warns once per tool of results of which the policy reads the beginning alone."""
    logging.warning(
        f'results of {tool} are longer than config.rollout.observation_tokens, and their end is cut off; raise it, or '
        'return less'
    )
