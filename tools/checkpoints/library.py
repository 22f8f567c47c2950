"""Search over the passages of several miniature worlds, for writing demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zeroplay_jax.mini.world import World
from zeroplay_jax.retrieval.lexical import LexicalEncoder

Document = dict[str, str]  # {'title', 'text'}
# Passages per query; self-play with the tiny checkpoint uses the same number.
TOP_K = 3


class Library:
    """Several worlds and an exact search over all their passages, with the encoder that rollouts in the worlds use.

    Attributes:
      worlds: list of World.
      documents: the passages of all worlds.
    """

    def __init__(self, seeds: Sequence[int], split: str, deal: int):
        """Generates the worlds and encodes their passages.

        Args:
          seeds: seeds of the worlds.
          split: 'train' or 'evaluation'.
          deal: seed of the facts, see `World`.
        """
        self.worlds = [World(int(seed), split, deal=deal) for seed in seeds]
        self.documents: list[Document] = []
        titles = []
        texts = []
        for world in self.worlds:
            for passage in world.passages:
                titles.append(passage.title)
                texts.append(passage.text)
                self.documents.append({'title': passage.title, 'text': passage.text})
        self._encoder = LexicalEncoder()
        self._passage_vectors = self._encoder.encode_passages(titles, texts)
        self._rows_by_query: dict[str, list[int]] = {}
        # Most queries are titles, so all titles are searched here: one matrix product is faster than one per query.
        self._search_rows(titles)

    def _search_rows(self, queries: Sequence[str]) -> None:
        """Stores the rows of the best documents of each query."""
        scores = self._encoder.encode_queries(queries) @ self._passage_vectors.T
        # A stable sort resolves ties by row, so the result is the same on every machine.
        best_rows = np.argsort(-scores, 1, kind='stable')[:, :TOP_K]
        for query, rows in zip(queries, best_rows, strict=True):
            self._rows_by_query[query] = rows.tolist()

    def search(self, query: str) -> list[Document]:
        """Returns the TOP_K passages with the highest scores, best first."""
        if query not in self._rows_by_query:
            self._search_rows([query])
        rows = self._rows_by_query[query]
        return [self.documents[row] for row in rows]

    def document(self, title: str) -> Document:
        """Returns the passage with this title; KeyError if a search for the title does not return it."""
        # The encoder ranks a passage with exactly this title among the first TOP_K.
        for document in self.search(title):
            if document['title'] == title:
                return document
        raise KeyError(title)
