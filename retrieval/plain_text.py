"""Reads files of plain text as people keep them: any line ends, words divided at the end of a line."""

from __future__ import annotations

import pathlib
import re

from . import json_text
from .json_text import Unusable

_SOFT_HYPHEN = '\u00ad'
# A word divided at the end of a line, by the hyphen of ASCII or the one that typesetters write.
_DIVIDED = re.compile(r'(?<![^\W_])([^\W\d_]+)[-\u2010][ \t]*\n[ \t]*([^\W_]+)')
_WORD = re.compile(r'[^\W_]+(?:-[^\W_]+)*')
# Behind these the hyphen stands for the end of a later word: 'pre- and postfix'.
_SUSPENDED = ('and', 'or', 'to')


def read_text(path: pathlib.Path) -> str:
    """Returns the content of a text file, its lines ended by line feeds and its divided words joined.

    Raises:
      OSError: it cannot be read.
      Unusable: it is no UTF-8 text, or markup that only a converter makes into one.
    """
    data = path.read_bytes()
    kind, fix = json_text.kind_of(data)
    if kind:
        raise Unusable(f'it is {kind}; {fix}', kind)
    text = json_text.decode(data).replace('\r\n', '\n').replace('\r', '\n')
    return join_divided_words(text)


def join_divided_words(text: str) -> str:
    """Returns a text without soft hyphens, and with words joined that the end of a line divides.

    The hyphen is kept where the text has the word with it elsewhere, or has its second half as a word of its own.
    """
    text = re.sub(rf'{_SOFT_HYPHEN}(?:\n[ \t]*)?', '', text)
    if _DIVIDED.search(text) is None:
        return text
    undivided = _DIVIDED.sub(' ', text).replace('\u2010', '-')
    words = {word.lower() for word in _WORD.findall(undivided)}

    def joined(divided: re.Match[str]) -> str:
        first, second = divided.groups()
        if second in _SUSPENDED:
            return divided.group()
        whole = f'{first}{second}'.lower()
        hyphenated = f'{first}-{second}'
        if whole in words:
            return first + second
        is_compound = hyphenated.lower() in words or second.lower() in words
        # Only the inner part of a word is divided: 'GPT-4', 'COVID-related', 'x-axis', 'Anglo-Saxon' and
        # 'state-of-the-art' are written with the hyphen.
        is_compound |= first.isupper() or text[divided.start() - 1 : divided.start()] == '-'
        is_part = len(first) > 1 and second.islower()
        return hyphenated if is_compound or not is_part else first + second

    return _DIVIDED.sub(joined, text)
