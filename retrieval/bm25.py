"""BM25 with the interface of the other indexes, by means of bm25s (Lù 2024, arXiv:2407.03618).

Lucene's formula with k1 1.5 and b 0.75; lower case, English stop words and Snowball stems, over passages in wire form.
"""

from __future__ import annotations

import pathlib
import threading
import unicodedata
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import Stemmer
from jaxtyping import Float32, Int64

from .corpus import AnyCorpus, MemoryCorpus
from .index import check_queries
from .types import RetrievalError

_METHOD = 'lucene'
_K1 = 1.5
_B = 0.75


def _import_bm25s() -> ModuleType:
    """Returns the module `bm25s`."""
    # Not imported at the top of this file: the import of bm25s runs a JAX program and thereby starts the devices. JAX's
    # settings could not be changed after an import of this package, even in a process without a BM25 index.
    import bm25s

    return bm25s


class Bm25Index:
    """Ranks by common words. Scores are positive without an upper bound, not cosines."""

    def __init__(self, corpus: AnyCorpus, saved: pathlib.Path | None = None):
        """Indexes the texts of N passages, or reads an index that `save` wrote.

        Raises:
          RetrievalError: no passage with a word, or a saved index of another number of passages.
        """
        self.corpus = corpus
        self._stemmer = Stemmer.Stemmer('english')
        # A stemmer is not safe to use from several threads.
        self._lock = threading.Lock()
        if saved:
            # Maps the files into memory and leaves out bm25s's own copy of the texts.
            self._bm25 = _import_bm25s().BM25.load(
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

    def _train(self) -> Any:
        """Returns bm25s's index of all passages; RetrievalError if no passage has a word that is not a stop word."""
        # The title is indexed with the text, because queries often name it.
        texts = [self.corpus.record(row).contents for row in range(len(self.corpus))]
        tokens = self._tokenize(texts, return_ids=True)
        # bm25s gives a corpus without words the single word ''.
        if not tokens.vocab or set(tokens.vocab) == {''}:
            raise RetrievalError(
                'bm25: no passage has a word that counts; give a corpus of English text'
            )
        bm25 = _import_bm25s().BM25(method=_METHOD, k1=_K1, b=_B)
        bm25.index(tokens, show_progress=False, leave_progress=False)
        return bm25

    def _tokenize(self, texts: list[str], return_ids: bool) -> Any:
        """Returns the stems of each text.

        The stemmer is not thread-safe: callers hold the lock, except in the constructor.

        Args:
          texts: passages or queries.
          return_ids: True: bm25s's object of ids and vocabulary, from which an index is built. False: a list of strings
            per text.
        """
        return _import_bm25s().tokenize(
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
        # A blank query is refused as by dense indexes, although BM25 could return no passages for it.
        check_queries(queries, k, len(self))
        rows = np.full((len(queries), k), -1, np.int64)
        scores = np.zeros((len(queries), k), np.float32)
        with self._lock:
            # As the passages, see `sources.read`: an accent of its own would divide a word.
            composed = [unicodedata.normalize('NFC', query) for query in queries]
            stems_by_query = self._tokenize(composed, return_ids=False)
        # Each query is scored alone, so that its scores do not depend on the others.
        for number, stems in enumerate(stems_by_query):
            # Stems that no passage contains have no id.
            stem_ids = self._bm25.get_tokens_ids([stem for stem in stems if stem])
            if not stem_ids:
                continue
            all_scores = self._bm25.get_scores_from_ids(stem_ids)
            best = _best_rows(all_scores, k)
            rows[number, : len(best)] = best
            scores[number, : len(best)] = all_scores[best]
        return rows, scores


def _best_rows(scores: Float32[np.ndarray, ' passages'], k: int) -> Int64[np.ndarray, ' best']:
    """Returns up to k rows with positive scores, best first, equal scores by lower row."""
    # Passages that share no word are discarded first: NumPy's selection is slow among so many equal values.
    candidates = np.flatnonzero(scores > 0)
    if len(candidates) > k:
        candidate_scores = scores[candidates]
        # All candidates that tie with the k-th best remain; the sort below decides by row.
        kth_score = np.partition(candidate_scores, -k)[-k]
        candidates = candidates[candidate_scores >= kth_score]
    order = np.lexsort((candidates, -scores[candidates]))
    return candidates[order[:k]]
