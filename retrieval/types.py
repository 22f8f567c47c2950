"""What the parts of retrieval agree on: passages, encoders, indexes, and the error a user can mend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

Passage = dict[str, Any]


class RetrievalError(ValueError):
    """Something the user can mend; commands print its one line and no traceback."""


class CannotOpen(RetrievalError):
    """The search server has no endpoint for whole documents."""


class SearchFailed(RuntimeError):
    """A search that could not be answered (no fault of the query); clients count it."""


class Encoder(Protocol):
    """Text to unit vectors. A query's vector must not depend on the queries beside it.

    Attributes:
      dimension: D.
      settings: what decides the vectors, JSON-able, with a 'kind'; an index keeps it and compares it when it is opened.
    """

    dimension: int
    settings: dict[str, Any]

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """float32 [N, D]."""
        ...

    def encode(self, texts: Iterable[str]) -> np.ndarray:
        """float32 [N, D] of passages in wire form (see `corpus`)."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """float32 [Q, D]."""
        ...


class Index(Protocol):
    """What a search tool needs. Safe to call from several threads.

    Attributes:
      corpus: where passages are read from, `record(row)` being one as its source gave it.
    """

    corpus: Any

    def __len__(self) -> int:
        """Number of passages, N."""
        ...

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [Q, k], scores float32 [Q, k]), best first; id −1, score 0 where nothing more matches (BM25)."""
        ...

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """{'id', 'title', 'text'} of each id."""
        ...


def short(text: str) -> str:
    """A text for an error line."""
    return repr(text if len(text) <= 60 else text[:57] + '…')
