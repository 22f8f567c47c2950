"""Layouts of retrieved passages; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from zeroplay_jax.types import Json

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
