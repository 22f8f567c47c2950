"""What chat templates do to the text of a message: nothing, or they trim and escape it."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Callable, Sequence

_ESCAPES: dict[str, Callable[[str], str]] = {
    'none': lambda text: text,
    'JSON': lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    'ASCII JSON': lambda text: json.dumps(text)[1:-1],
    # As the filter `e` of Jinja writes it.
    'HTML': lambda text: html.escape(text).replace('&quot;', '&#34;').replace('&#x27;', '&#39;'),
}


@dataclasses.dataclass(frozen=True)
class ContentForm:
    """What a template does to the text of a message.

    Attributes:
      left, right: characters that are trimmed at the beginning and at the end, as `str.strip` takes them: '' for none,
        None for white space.
      escape: key of _ESCAPES.
    """

    left: str | None = ''
    right: str | None = ''
    escape: str = 'none'

    def apply(self, parts: Sequence[str]) -> list[str]:
        """Returns the parts of a text as the template writes them. Their types, such as `Untrusted`, are kept."""
        written = [(type(part), str(part)) for part in parts]
        for index, (kind, text) in enumerate(written):
            written[index] = (kind, text.lstrip(self.left))
            if written[index][1]:
                break
        for index, (kind, text) in reversed(list(enumerate(written))):
            written[index] = (kind, text.rstrip(self.right))
            if written[index][1]:
                break
        escape = _ESCAPES[self.escape]
        return [kind(escape(text)) for kind, text in written]


_TRIMMED: tuple[str | None, ...] = ('', '\n', ' ', None)
# The form that changes least comes first.
FORMS = tuple(
    ContentForm(left, right, escape)
    for escape in _ESCAPES
    for left in _TRIMMED
    for right in _TRIMMED
)
