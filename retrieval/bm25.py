"""BM25 behind the interface of the other indexes, through bm25s (Lù 2024, arXiv:2407.03618).

Lucene's formula, k1 1.5 and b 0.75, lower case, English stop words, Snowball stems, over the passages in wire form.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import bm25s
import numpy as np
import Stemmer

from .corpus import MemoryCorpus
from .index import Passages, check_queries, read_passages
from .types import Passage, RetrievalError


class Bm25Index:
    """Ranks by words in common. Scores are no cosines: positive, without an upper bound."""

    def __init__(self, corpus: Passages, saved: pathlib.Path | None = None):
        """Indexes the texts of N passages, or reads what `save` wrote; `build` takes titles and texts.

        Raises:
          RetrievalError: a saved index of another number of passages.
        """
        self.corpus = corpus
        self._stemmer = Stemmer.Stemmer('english')
        self._lock = threading.Lock()  # a stemmer serves one thread at a time
        if saved:
            self._bm25 = bm25s.BM25.load(
                str(saved), load_corpus=False, mmap=True, show_progress=False
            )
        else:
            tokens = bm25s.tokenize(
                [corpus.record(row).contents for row in range(len(corpus))],
                stopwords='en',
                stemmer=self._stemmer,
                show_progress=False,
            )
            if not tokens.vocab or set(tokens.vocab) == {''}:
                raise RetrievalError(
                    'bm25: no passage has a word that counts; give a corpus of English text'
                )
            self._bm25 = bm25s.BM25(method='lucene', k1=1.5, b=0.75)
            self._bm25.index(tokens, show_progress=False, leave_progress=False)
        found = self._bm25.scores['num_docs']
        if found != len(corpus):
            raise RetrievalError(
                f'bm25: the index has {found} passages, the corpus {len(corpus)}; build it again'
            )
        self.parameters: dict[str, Any] = dict(
            kind='bm25', passages=len(corpus), method='lucene', k1=1.5, b=0.75
        )

    @classmethod
    def build(cls, titles: Sequence[str], texts: Sequence[str]) -> Bm25Index:
        """Indexes passages, whose places 0 … N−1 are their ids."""
        return cls(MemoryCorpus(titles, texts))

    def __len__(self) -> int:
        return len(self.corpus)

    def save(self, folder: pathlib.Path) -> None:
        """Writes the index into an empty folder."""
        self._bm25.save(str(folder), show_progress=False)

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best passages of each query.

        Returns:
          ids int64 [Q, k] and scores float32 [Q, k], best first, equal scores by lower id; −1 and 0 where fewer than k
          passages share a word with the query.

        Raises:
          RetrievalError: k outside 1 … N; a blank query.
        """
        check_queries(queries, k, len(self))
        ids, scores = (
            np.full((len(queries), k), -1, np.int64),
            np.zeros((len(queries), k), np.float32),
        )
        with self._lock:
            split = bm25s.tokenize(
                list(queries),
                stopwords='en',
                stemmer=self._stemmer,
                return_ids=False,
                show_progress=False,
            )
        for row, words in enumerate(split):
            known = self._bm25.get_tokens_ids([word for word in words if word])
            if not known:
                continue
            all_scores = self._bm25.get_scores_from_ids(known)
            # The many that share no word go first: NumPy's selection is slow among so many equals.
            candidates = np.flatnonzero(all_scores > 0)
            if len(candidates) > k:
                found = all_scores[candidates]
                candidates = candidates[found >= np.partition(found, -k)[-k]]
            best = candidates[np.lexsort((candidates, -all_scores[candidates]))[:k]]
            ids[row, : len(best)], scores[row, : len(best)] = best, all_scores[best]
        return ids, scores

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """The passages of some ids; RetrievalError for an id outside 0 … N−1."""
        return read_passages(self.corpus, ids)
