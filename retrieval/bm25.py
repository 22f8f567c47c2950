"""BM25 with the interface of the other indexes, by means of bm25s (Lù 2024, arXiv:2407.03618).

Lucene's formula with k1 1.5 and b 0.75; lower case, English stop words and Snowball stems, over passages in wire form.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import bm25s
import numpy as np
import Stemmer
from jaxtyping import Float32, Int64

from .corpus import MemoryCorpus
from .exact import Passages, check_queries, read_passages
from .types import Passage, RetrievalError

_METHOD = 'lucene'
_K1 = 1.5
_B = 0.75


class Bm25Index:
    """Ranks by common words. Scores are positive without an upper bound, not cosines."""

    def __init__(self, corpus: Passages, saved: pathlib.Path | None = None):
        """Indexes the texts of N passages, or reads an index that `save` wrote.

        Raises:
          RetrievalError: no passage with a word, or a saved index of another number of passages.
        """
        self.corpus = corpus
        self._stemmer = Stemmer.Stemmer('english')
        # A stemmer is not safe to use from several threads.
        self._lock = threading.Lock()
        if saved:
            # Memory-mapped, without bm25s's own copy of the texts.
            self._bm25 = bm25s.BM25.load(
                str(saved), load_corpus=False, mmap=True, show_progress=False
            )
        else:
            self._bm25 = self._train()
        indexed = self._bm25.scores['num_docs']
        if indexed != len(corpus):
            raise RetrievalError(
                f'bm25: the index has {indexed} passages, the corpus {len(corpus)}; build it again'
            )
        self.parameters: dict[str, Any] = {
            'kind': 'bm25',
            'passages': len(corpus),
            'method': _METHOD,
            'k1': _K1,
            'b': _B,
        }

    def _train(self) -> bm25s.BM25:
        """Returns the scores of all words in all passages."""
        # The title counts as text: a query often names it.
        texts = [self.corpus.record(row).contents for row in range(len(self.corpus))]
        tokens = self._tokenize(texts, return_ids=True)
        # bm25s gives a corpus without words the single word ''.
        if not tokens.vocab or set(tokens.vocab) == {''}:
            raise RetrievalError(
                'bm25: no passage has a word that counts; give a corpus of English text'
            )
        bm25 = bm25s.BM25(method=_METHOD, k1=_K1, b=_B)
        bm25.index(tokens, show_progress=False, leave_progress=False)
        return bm25

    def _tokenize(self, texts: list[str], return_ids: bool) -> Any:
        """Returns the stems of each text, as numbers with their vocabulary or as strings."""
        return bm25s.tokenize(
            texts,
            stopwords='en',
            stemmer=self._stemmer,
            return_ids=return_ids,
            show_progress=False,
        )

    @classmethod
    def build(cls, titles: Sequence[str], texts: Sequence[str]) -> Bm25Index:
        """Returns an index of passages in memory."""
        return cls(MemoryCorpus(titles, texts))

    def __len__(self) -> int:
        return len(self.corpus)

    def save(self, folder: pathlib.Path) -> None:
        """Writes the index into an empty folder."""
        self._bm25.save(str(folder), show_progress=False)

    def search(
        self, queries: Sequence[str], k: int
    ) -> tuple[Int64[np.ndarray, 'queries k'], Float32[np.ndarray, 'queries k']]:
        """Returns the k best passages of each query.

        Args:
          queries: Q texts, none blank.
          k: passages per query, 1 … N.

        Returns:
          (row numbers [Q, k], scores [Q, k]), best first, equal scores by lower row number; −1 and 0 where fewer than
          k passages share a word with the query.

        Raises:
          RetrievalError: k outside 1 … N; a blank query.
        """
        # The same rules as for dense indexes, although BM25 could answer a blank query.
        check_queries(queries, k, len(self))
        ids = np.full((len(queries), k), -1, np.int64)
        scores = np.zeros((len(queries), k), np.float32)
        with self._lock:
            stems_by_query = self._tokenize(list(queries), return_ids=False)
        # One query at a time, so that its scores do not depend on the others.
        for row, stems in enumerate(stems_by_query):
            # Stems that no passage contains have no id.
            stem_ids = self._bm25.get_tokens_ids([stem for stem in stems if stem])
            if not stem_ids:
                continue
            all_scores = self._bm25.get_scores_from_ids(stem_ids)
            best = _best_rows(all_scores, k)
            ids[row, : len(best)] = best
            scores[row, : len(best)] = all_scores[best]
        return ids, scores

    def passages(self, ids: Sequence[int] | Int64[np.ndarray, ' ids']) -> list[Passage]:
        """Returns the passages with some row numbers; RetrievalError for one outside 0 … N−1."""
        return read_passages(self.corpus, ids)


def _best_rows(scores: Float32[np.ndarray, ' passages'], k: int) -> Int64[np.ndarray, ' best']:
    """Returns up to k rows with positive scores, best first, equal scores by lower row."""
    # First discard the many passages that share no word: NumPy's selection is slow among so many equal values.
    candidates = np.flatnonzero(scores > 0)
    if len(candidates) > k:
        candidate_scores = scores[candidates]
        # Keep all that tie with the k-th best; the sort below decides by row.
        kth_score = np.partition(candidate_scores, -k)[-k]
        candidates = candidates[candidate_scores >= kth_score]
    order = np.lexsort((candidates, -scores[candidates]))
    return candidates[order[:k]]
