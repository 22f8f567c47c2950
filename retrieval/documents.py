"""Whole documents: the passages of one document joined and cut into pages of a fixed number of words.

A corpus holds passages. A source that cuts long texts (an encyclopedia article, a file) into passages puts those of
one document in consecutive rows; `Corpus.document_rows` returns them and `Corpus.find_document` looks them up.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from .records import Record
from .types import Passage, RetrievalError

# Words of a page where the caller does not choose: five passages of Wikipedia-18.
WORDS_PER_PAGE = 500

_WORD = re.compile(r'\S+')


@runtime_checkable
class DocumentCorpus(Protocol):
    """A corpus that knows which passages make up a document (`MemoryCorpus`, `Corpus`)."""

    def record(self, number: int) -> Record:
        """Returns a passage in wire form."""
        ...

    def passage(self, number: int) -> Passage:
        """Returns a passage as {'id', 'title', 'text'}."""
        ...

    def find_document(self, reference: str) -> range | None:
        """Returns the rows of the document with this passage id or title, None if there is none."""
        ...


@dataclasses.dataclass(frozen=True)
class DocumentPage:
    """One page of a document.

    Attributes:
      title: title of the document's first passage.
      text: words of this page, with the white space between them as in the source.
      page: number of this page, from 1.
      pages: number of pages of the document, at least 1.
      id: id of the document's first passage; opening it gives the same document.
    """

    title: str
    text: str
    page: int
    pages: int
    id: str


def document_page(
    corpus: DocumentCorpus, reference: str, page: int = 1, words_per_page: int = WORDS_PER_PAGE
) -> DocumentPage | None:
    """Returns one page of a document.

    Args:
      corpus: where the document is looked up.
      reference: id of any of its passages, or its exact title.
      page: number of the page, from 1.
      words_per_page: words of every page but the last one, at least 1.

    Returns:
      The page; None where no document has this id or title, or the document has fewer pages.

    Raises:
      RetrievalError: `page` or `words_per_page` below 1, or a title where the index cannot look titles up.
    """
    if page < 1 or words_per_page < 1:
        raise RetrievalError(
            f'open: page {page} with {words_per_page} words per page; both must be at least 1'
        )
    # The lookup gives row numbers; the texts of these rows are read below.
    rows = corpus.find_document(reference)
    if rows is None:
        return None
    text = ' '.join(corpus.passage(row)['text'] for row in rows)
    # Matches instead of `split`: with their positions the text is cut without changing the white space between words.
    words = list(_WORD.finditer(text))
    # A document without any words still has one (empty) page.
    pages = max(1, -(-len(words) // words_per_page))
    if page > pages:
        return None
    page_words = words[(page - 1) * words_per_page : page * words_per_page]
    page_text = ''
    if page_words:
        page_text = text[page_words[0].start() : page_words[-1].end()]
    # All pages have the id and title of the first passage, whichever passage was named.
    first_row = rows[0]
    title = corpus.passage(first_row)['title']
    return DocumentPage(title, page_text, page, pages, corpus.record(first_row).id)


def title_run(title_of: Callable[[int], str], row: int, total: int, window: int) -> range:
    """Returns the run of consecutive rows around `row` with the same title; only `row` itself if the title is empty.

    Args:
      title_of: function from a row number to the title of that passage.
      row: row number of a passage.
      total: number of passages in the corpus.
      window: largest number of rows looked at on each side of `row`.
    """
    title = title_of(row)
    first = row
    end = row + 1
    # Passages without a title do not belong together.
    if not title:
        return range(first, end)
    # The window bounds the number of passages read if a corpus has one title throughout.
    lowest_row = max(0, row - window)
    while first > lowest_row and title_of(first - 1) == title:
        first -= 1
    highest_end = min(total, row + 1 + window)
    while end < highest_end and title_of(end) == title:
        end += 1
    return range(first, end)


def row_number(reference: str) -> int | None:
    """Returns the row number that a reference like '17' denotes; None for any other text, '017' included."""
    # The length is checked first: converting a hostile text of a million digits takes seconds.
    if len(reference) > 20 or not reference.isascii() or not reference.isdigit():
        return None
    number = int(reference)
    # Leading zeros: '017' can be an id or a title, but never a row number as text.
    if str(number) != reference:
        return None
    return number
