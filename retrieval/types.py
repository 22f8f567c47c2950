"""Types shared by all modules of retrieval: passages, encoders, indexes, and errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int64

# {'id', 'title', 'text'}; results of a search also have a 'score'.
Passage = dict[str, Any]

# An error line quotes at most this many characters of a user's text.
_QUOTED_CHARACTERS = 60


class RetrievalError(ValueError):
    """User error: commands show it as one line without a traceback."""


class CannotOpen(RetrievalError):
    """The backend has no whole documents: a search server without the endpoint /open, or one of another package."""


class SearchFailed(RuntimeError):
    """A search, or the lookup of a document, failed for a reason other than the request; clients count it."""


@runtime_checkable
class Encoder(Protocol):
    """Maps texts to unit vectors. The vector of a query must not depend on the other queries of the call.

    A passage in wire form is its title in double quotes, a line feed and its text (see `records`).

    Attributes:
      dimension: D, the size of a vector.
      settings: JSON-able values that determine the vectors, among them 'kind'. They are stored with an index and
        compared when it is opened.
    """

    dimension: int
    settings: dict[str, Any]

    def encode_passages(
        self, titles: Sequence[str], texts: Sequence[str]
    ) -> Float32[np.ndarray, 'passages dimension']:
        """Returns the vectors of passages, each given by its title and its text."""
        ...

    def encode(self, texts: Iterable[str]) -> Float32[np.ndarray, 'passages dimension']:
        """Returns the vectors of passages in wire form (see `records`)."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, 'queries dimension']:
        """Returns the vectors of queries."""
        ...


@runtime_checkable
class Index(Protocol):
    """Finds passages for queries. Safe to call from several threads.

    Attributes:
      corpus: the passages (`corpus.MemoryCorpus` or `corpus.Corpus`).
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

    def passages(self, rows: Sequence[int]) -> list[Passage]:
        """Returns {'id', 'title', 'text'} of each row."""
        ...


def short(text: str) -> str:
    """Returns a quoted text, cut to 60 characters, for an error line."""
    # A hostile text of a megabyte must not fill the terminal.
    if len(text) > _QUOTED_CHARACTERS:
        text = text[: _QUOTED_CHARACTERS - 3] + '…'
    return repr(text)
