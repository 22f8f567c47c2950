"""Paragraphs and sentences of plain English text, found by punctuation alone."""

from __future__ import annotations

import re

# A full stop, the quotes or brackets that close the sentence, white space, and the start of another sentence.
_SENTENCE_END = re.compile(r'(?<=[.!?])["\')\]”’]{0,2}\s+(?=["\'(\[“‘]?[A-Z0-9])')
# A full stop after one of these, or after an initial, does not end a sentence.
_ABBREVIATION = re.compile(
    r'(?:\b(?:Mr|Mrs|Ms|Dr|St|Jr|Sr|Prof|Rev|Gen|Col|Capt|Lt|Sgt|No|Nos|vs|ca|c|b|d|r|ft|approx|est|cf|e\.g|i\.e|U\.S'
    r'|Ltd|Inc|Co|Corp|Bros|Mt|Ave|Vol|pp|p)|\b[A-Z])\.$'
)
# The longest abbreviation with its full stop, and the character before it.
_ABBREVIATION_LENGTH = 8
# Headings, list items, table rows and quotations of Markdown start a paragraph of their own.
_BLOCK_MARKS = ('#', '-', '*', '+', '|', '>', '```', '•', '◦', '‣')
# Numbers of list items have at most two digits: a year with a full stop may begin a wrapped line.
_LIST_MARK = re.compile(r'(?:[-*+•◦‣]|\d{1,2}[.)]) +')
# Text that is wrapped by hand has lines of about 70 characters; shorter lines are headings, items and verses.
_WRAPPED_LINE = 40


def split_sentences(text: str) -> list[str]:
    """Returns the sentences of a paragraph in order; the words after the last full stop count as one.

    Args:
      text: a paragraph, its words separated by single spaces (`split_paragraphs`); '' gives [''].
    """
    sentences = []
    start = 0
    for boundary in _SENTENCE_END.finditer(text):
        end_of_words = boundary.start()
        # Only the last characters are searched: a text full of initials would take quadratic time otherwise.
        tail = text[max(start, end_of_words - _ABBREVIATION_LENGTH) : end_of_words]
        if _ABBREVIATION.search(tail):
            continue
        # The closing quotes belong to the sentence that they close.
        end = end_of_words + len(boundary.group().rstrip())
        sentences.append(text[start:end])
        start = boundary.end()
    sentences.append(text[start:])
    return sentences


def starts_block(line: str) -> bool:
    """Returns whether a line starts a paragraph of its own: a heading, list item, table row or quotation."""
    return line.startswith(_BLOCK_MARKS) or _LIST_MARK.match(line) is not None


def without_list_mark(paragraph: str) -> str:
    """Returns a list item without the mark or number in front of it, and any other paragraph unchanged."""
    mark = _LIST_MARK.match(paragraph)
    if mark is None:
        return paragraph
    return paragraph[mark.end() :]


def ends_sentence(paragraph: str) -> bool:
    """Returns whether a text ends like a sentence, apart from quotes and brackets behind the full stop."""
    return paragraph.rstrip('"\')]”’').endswith(('.', '!', '?'))


def split_paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of a text, each with single spaces between its words; empty ones are left out.

    A paragraph ends with every line, except where the text was wrapped by hand: the line is no heading and ends without
    a full stop or colon; it is long, or the next line begins with a small letter; and the next line is neither empty
    nor a heading, list item, table row or quotation of Markdown.
    """
    paragraphs: list[list[str]] = []
    # Whether the next line belongs to the last paragraph: any line, or only one that begins with a small letter.
    continues = False
    continues_in_lower_case = False
    for line in text.splitlines():
        words = line.split()
        if not words:
            continues = continues_in_lower_case = False
            continue
        is_continuation = continues or (continues_in_lower_case and words[0][0].islower())
        if is_continuation and not starts_block(' '.join(words[:2])):
            paragraphs[-1].extend(words)
        else:
            paragraphs.append(words)
        # A heading takes one line, however long.
        is_heading = words[0].startswith('#')
        is_open = not is_heading and not ends_sentence(words[-1]) and not words[-1].endswith(':')
        continues = is_open and len(line) >= _WRAPPED_LINE
        continues_in_lower_case = is_open
    return [' '.join(words) for words in paragraphs]
