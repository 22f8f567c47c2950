"""Text of others (pages, tools, models, users): marked as such, laid out, and made safe to store and to prompt with."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from zeroplay_jax.types import Json

Message = dict[str, Any]  # {'role': str, 'content': str or a list of str and Untrusted}


class Untrusted(str):
    """Text from a model, a document or a tool: encoded as plain characters, never as control tokens."""


# Style → heading of a passage, and separator between heading and text. The published checkpoints of each
# code base were trained on exactly this layout, so not even a blank may change.
_LAYOUTS = {
    'search_r1': ('Doc {number}{id}(Title: {title})', ' '),
    'verl': ('Doc {number}{id} (Title: {title})', '\n'),
}


def passages_text(documents: Sequence[Sequence[Json]], style: str, show_ids: bool = False) -> str:
    """Returns the passages of one call as text; numbering restarts for every query.

    Args:
      documents: per query its passages, each {'title', 'text'}, with 'id' where ids are shown.
      style: 'search_r1' (title and text on one line) or 'verl' (text on the next line).
      show_ids: whether to add each passage's id, for tools that take one.
    """
    heading, separator = _LAYOUTS[style]
    blocks = []
    for passages in documents:
        lines = []
        for number, passage in enumerate(passages, 1):
            shown_id = ''
            # A tool of another package may return passages without ids.
            if show_ids and 'id' in passage:
                shown_id = f' [id {passage["id"]}]'
            title = heading.format(number=number, id=shown_id, title=passage['title'])
            lines.append(title + separator + passage['text'])
        # An empty observation would look like a failed call.
        block = '\n'.join(lines) or 'No passage found.'
        blocks.append(block)
    return '\n---\n'.join(blocks)


# Replaces the '<' of a tag in foreign text: visible, and known to language models from HTML.
_ESCAPED = '&lt;'


def without_tags(text: str, names: tuple[str, ...]) -> str:
    """Returns the text with the '<' of every tag of these names written as '&lt;'; everything else is unchanged.

    Many models write tags such as `</information>` with ordinary tokens. A page that contains one would have the same
    ids as the end of the observation itself, and what follows it would look like text of the policy.

    Args:
      text: foreign text.
      names: names of tags, in any case; opening and closing tags count, with white space inside as well.
    """
    # Most texts have no angle bracket at all.
    if '<' not in text or not names:
        return text
    return _tag_pattern(names).sub(_ESCAPED, text)


@functools.cache
def _tag_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern of the '<' that begins a tag of one of these names."""
    choices = '|'.join(map(re.escape, names))
    # White space is limited to a few characters, so that the time is linear in the text.
    return re.compile(
        rf'<(?=\s{{0,8}}/?\s{{0,8}}(?:{choices})\s{{0,8}}/?\s{{0,8}}>)', re.IGNORECASE
    )


def without_surrogates(value: Any) -> Any:
    """Returns a JSON value with every unpaired surrogate in its texts replaced by U+FFFD; tuples become lists."""
    if isinstance(value, str):
        return value.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_surrogates(item) for item in value]
    return value


def longest_fitting(length: int, excess: int, excess_of: Callable[[int], int]) -> int:
    """Returns the longest length of a text at which a message with it is not too long; 0 if none fits.

    Args:
      length: of a text that is too long.
      excess: tokens by which the message with this text is too long.
      excess_of: length of a text → tokens by which the message with it is too long, ascending; not positive if it fits.
    """
    fits, too_long = 0, length
    guess = length - excess
    # Two guesses come first, because `excess_of` writes a message and most messages grow as their text does.
    for _ in range(2):
        if not fits < guess < too_long:
            break
        guessed_excess = excess_of(guess)
        if guessed_excess > 0:
            too_long = guess
        else:
            fits = guess
        guess -= guessed_excess or -1
    candidates = range(fits + 1, too_long)
    return fits + bisect.bisect_right(candidates, 0, key=excess_of)
