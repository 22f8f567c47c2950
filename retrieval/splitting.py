"""Cuts long texts into passages of whole sentences."""

from __future__ import annotations

from collections.abc import Iterator

from .records import Record, contents, split
from .sentences import ends_sentence, split_paragraphs, split_sentences, starts_block

# A passage that is longer by up to this factor is not cut: half a passage of Wikipedia-18 contains too few facts.
TOLERANCE = 1.5


def split_text(text: str, max_words: int) -> list[str]:
    """Returns passages of whole sentences that together have all words of a text in order.

    A sentence that is longer than a passage is cut between words. Words are separated by single spaces. A line feed
    separates a list item or heading from what is before it, an empty line from what follows it; without them
    `split_paragraphs` would take both for one sentence.

    Args:
      text: any text; without words it gives no passage.
      max_words: words of a passage at most.
    """
    passages = []
    # Sentences of the passage in progress, with the separators between them, and the number of their words.
    parts: list[str] = []
    num_words = 0
    previous_paragraph = ''
    for paragraph in split_paragraphs(text):
        separator = _separator(previous_paragraph, paragraph)
        previous_paragraph = paragraph
        for sentence in split_sentences(paragraph):
            sentence_words = sentence.split()
            # A passage ends before a sentence that would exceed the limit, so passages differ in length.
            if parts and num_words + len(sentence_words) > max_words:
                passages.append(''.join(parts))
                parts = []
                num_words = 0
            # A sentence longer than a passage is cut; its last words can share a passage with the next sentence.
            # `last_start` is the position of these last words, 0 for a shorter sentence.
            last_start = (len(sentence_words) - 1) // max_words * max_words
            for start in range(0, last_start, max_words):
                passages.append(' '.join(sentence_words[start : start + max_words]))
            last_words = sentence_words[last_start:]
            if parts:
                parts.append(separator)
            parts.append(' '.join(last_words))
            num_words += len(last_words)
            separator = ' '
    if parts:
        passages.append(''.join(parts))
    return passages


def _separator(previous_paragraph: str, paragraph: str) -> str:
    """Returns what separates two paragraphs in a passage, so that they are not read as one sentence."""
    if starts_block(paragraph):
        return '\n'
    return ' ' if ends_sentence(previous_paragraph) else '\n\n'


def split_record(record: Record, max_words: int) -> Iterator[Record]:
    """Yields a passage unchanged, or if it is too long the passages that it is cut into.

    The new passages keep the title; their ids are that of the old passage with '#' and a number from 0. Consecutive
    passages with the same title are one document, so the tool `open` shows all of them. Those of a passage without a
    title get its id as the name of their document.

    Args:
      record: a passage of a corpus file.
      max_words: words of a passage at most; a text of up to `TOLERANCE` times as many is not cut; 0 cuts nothing.
    """
    title, text = split(record.contents)
    if not max_words or len(text.split()) <= TOLERANCE * max_words:
        yield record
        return
    document = record.document
    if not document and not title:
        document = record.id
    for number, passage_text in enumerate(split_text(text, max_words)):
        yield Record(f'{record.id}#{number}', contents(title, passage_text), document)
