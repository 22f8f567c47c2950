"""Types shared by all modules of retrieval: passages, encoders, indexes, and errors.

A passage in wire form has its title in double quotes on the first line, the text after it (Search-R1, verl).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int64

from .masking import hide

# {'id', 'title', 'text'}; results of a search also have a 'score'.
Passage = dict[str, Any]

# An error line quotes at most this many characters of a user's text.
_QUOTED_CHARACTERS = 60
# An error line quotes at most this many characters of the error of a library.
_MOST_CHARACTERS = 300


class UserError(ValueError):
    """User error: commands print its one line without a traceback and exit with status 2."""

    def __str__(self) -> str:
        # A line may name an address that somebody has given.
        return hide(super().__str__())


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's text, or the name of its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:_MOST_CHARACTERS] if lines else type(error).__name__


class RetrievalError(UserError):
    """A user error of passages, indexes, downloads or servers."""


class CannotOpen(RetrievalError):
    """The backend has no whole documents: a search server without the endpoint /open, or one of another package."""


class SearchFailed(RuntimeError):
    """A search, or the lookup of a document, failed for a reason other than the request; clients count it."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One passage as its source file has it.

    Attributes:
      id: unique in the corpus.
      contents: the wire form.
      document: name of the document of the passage, such as a file of a folder; '' where the source has none. Passages
        without it belong to one document if they have the same title.
    """

    id: str
    contents: str
    document: str = ''


def contents(title: str, text: str) -> str:
    """Returns the wire form of a passage."""
    return f'"{title}"\n{text}'


def split(contents: str) -> tuple[str, str]:
    """Returns (title, text) of a passage in wire form; no title where the first line is not in quotes."""
    # `splitlines` would split at other characters as well; only a line feed ends the title.
    first_line, _, text = contents.partition('\n')
    # A carriage return belongs to the end of the line.
    first_line = first_line.rstrip()
    if len(first_line) >= 2 and first_line[0] == first_line[-1] == '"':
        return first_line[1:-1], text
    return '', contents


@runtime_checkable
class Encoder(Protocol):
    """Maps texts to unit vectors. The vector of a query must not depend on the other queries of the call.

    Attributes:
      dimension: D, the size of a vector.
      settings: JSON-able values that determine the vectors, among them 'kind'. They are stored with an index and
        compared when it is opened.
    """

    dimension: int
    settings: dict[str, Any]

    def encode(self, texts: Iterable[str]) -> Float32[np.ndarray, 'passages dimension']:
        """Returns the vectors of passages in wire form."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, 'queries dimension']:
        """Returns the vectors of queries."""
        ...


@runtime_checkable
class Index(Protocol):
    """Finds passages for queries. Safe to call from several threads.

    Attributes:
      corpus: the passages (`corpus.Corpus`).
    """

    corpus: Any

    def __len__(self) -> int:
        """Returns the number of passages, N."""
        ...

    def search(
        self, queries: Sequence[str], k: int
    ) -> tuple[Int64[np.ndarray, 'queries k'], Float32[np.ndarray, 'queries k']]:
        """Returns (row numbers, scores) of the best k passages of each query, best first.

        Where fewer than k passages match (BM25), the remaining row numbers are −1 and the scores 0.

        Raises:
          RetrievalError: k outside 1 … N, or a blank query.
        """
        ...


def search_records(
    index: Index, queries: Sequence[str], k: int
) -> list[list[tuple[Record, float]]]:
    """Returns per query its passages with their scores, best first; fewer than k where fewer match."""
    row_numbers, scores = index.search(queries, k)
    results = []
    for query_rows, query_scores in zip(row_numbers, scores):
        records = []
        for row, score in zip(query_rows, query_scores):
            # BM25 pads its results with −1.
            if row >= 0:
                records.append((index.corpus.record(int(row)), float(score)))
        results.append(records)
    return results


def short(text: str) -> str:
    """Returns a quoted text, cut to 60 characters, for an error line."""
    # A hostile text of a megabyte must not fill the terminal.
    if len(text) > _QUOTED_CHARACTERS:
        text = text[: _QUOTED_CHARACTERS - 3] + '…'
    return repr(text)
