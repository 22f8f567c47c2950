"""Finds names and dates in a text by rules, without a language model."""

from __future__ import annotations

import re

# Capital letters of Latin script: the blocks up to Latin Extended-B.
_UPPER = ''.join(letter for letter in map(chr, range(0x250)) if letter.isupper())
# An initial such as 'J.', or a word that begins with a capital.
_WORD = rf'(?:[{_UPPER}]\.|[{_UPPER}][\w’\'-]*\w)'
_JOINER = r'(?:of the|of|de la|de|del|della|di|da|du|la|le|van der|van|von|der|bin|ibn|al)'
_MONTH = '(?:January|February|March|April|May|June|July|August|September|October|November|December)'
# Dates come first: their month would otherwise be taken for a name.
_MENTION = re.compile(
    rf'(?P<date>\b(?:\d{{1,2}} {_MONTH} \d{{4}}|{_MONTH} \d{{1,2}}, \d{{4}}))\b'
    rf'|(?P<year>(?<![\w,.$£€])(?:1\d|20)\d\d(?![\w%]|[,.]\d))'
    rf'|(?P<entity>(?<!\w){_WORD}(?: (?:{_JOINER} )?{_WORD})+)'
)
# Words that have a capital only because they begin a sentence.
_OPENERS = frozenset(
    'A After Although An And As At Because Before Both But By During For From He Her His However If In It Its On Once '
    'One Or Our She Since So Some That The Their Then There These They This Those Though Through To Two Under Until '
    'Upon Was We What When Where Which While Who With Within'.split()
)


def mentions(text: str) -> list[tuple[str, str]]:
    """Returns (kind, text) of the dates and names in a passage, in order; kind is 'date' or 'entity'.

    Dates are full dates (12 March 1998; March 12, 1998) and years from 1000 to 2099 that stand alone.

    Names are two or more capitalised words in a row, with initials and joiners such as 'of the' or
    'von' between them. Words that only begin a sentence (The, In, When, …) and a possessive 's are
    removed; a sentence that ends in an initial ends the name. Capitals are those of Latin script, so
    texts in other scripts have dates only.
    """
    mentioned: list[tuple[str, str]] = []
    for match in _MENTION.finditer(text):
        if match.lastgroup != 'entity':
            mentioned.append(('date', match[0]))
            continue
        name = _name(match[0].split())
        # A single capitalised word may be any word at the beginning of a sentence.
        if ' ' in name and name[0] in _UPPER:
            mentioned.append(('entity', name))
    return mentioned


def _name(words: list[str]) -> str:
    """Returns the name in a match of `_MENTION`: without openers, and cut where a new sentence begins."""
    while words and words[0] in _OPENERS:
        words = words[1:]
    end = len(words)
    for index in range(1, len(words)):
        # 'World War I. The Beatles': the dot ends a sentence.
        if words[index] in _OPENERS and words[index - 1].endswith('.'):
            end = index
            break
    return re.sub(r"(?:['’]s|\.)$", '', ' '.join(words[:end]))


def answer_of_title(title: str) -> str | None:
    """Returns a title without the brackets at its end; None for titles of lists and disambiguations."""
    is_list = re.match(r'(?:Lists? of|Index of|Outline of) ', title) is not None
    if is_list or '(disambiguation)' in title:
        return None
    return re.sub(r' *\([^()]*\)$', '', title).strip()
