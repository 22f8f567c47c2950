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
_BLOCK_MARKS = ('#', '-', '*', '+', '|', '>', '```')
# Text that is wrapped by hand has lines of about 70 characters; shorter lines are headings and verses.
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


def split_paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of a text, each with single spaces between its words; empty ones are left out.

    A paragraph ends with every line, except where the text was wrapped by hand: the line is long, is no heading and
    ends without a full stop or colon, and the next line is neither empty nor a heading, list item, table row or
    quotation of Markdown.
    """
    paragraphs: list[list[str]] = []
    # Whether the next line belongs to the last paragraph.
    continues = False
    for line in text.splitlines():
        words = line.split()
        if not words:
            continues = False
            continue
        starts_block = words[0].startswith(_BLOCK_MARKS)
        if continues and not starts_block:
            paragraphs[-1].extend(words)
        else:
            paragraphs.append(words)
        ends_sentence = words[-1].rstrip('"\')]”’').endswith(('.', '!', '?', ':'))
        continues = len(line) >= _WRAPPED_LINE and not ends_sentence
        # A heading takes one line, however long.
        if words[0].startswith('#'):
            continues = False
    return [' '.join(words) for words in paragraphs]
