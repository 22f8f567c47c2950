"""The library of a run: documents to ask about, corpora to search, and questions to evaluate on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeroplay_jax.types import Json, Question

if TYPE_CHECKING:
    from zeroplay_jax.retrieval.client import Client

# Depth of documents whose links are not known. In an encyclopedia a chain of any length may start anywhere.
UNLIMITED_DEPTH = 4


@dataclasses.dataclass(frozen=True)
class Document:
    """A passage that a proposer may start from.

    Attributes:
      title, text: as in the corpus.
      depth: longest chain of hops that can start here.
      id: id of the passage in its source; '' without one.
    """

    title: str
    text: str
    depth: int = UNLIMITED_DEPTH
    id: str = ''


class SearchableCorpus:
    """One corpus as tools read it (`tools.registry.DocumentSource`).

    Tools of all rollouts share the client, whose cache answers repeated queries of a group.

    Args:
      client: searches and opens documents; thread-safe.
      top_k: passages per query.   page_words: words per page of a document.
    """

    def __init__(self, client: Client, top_k: int, page_words: int):
        self.client = client
        self._top_k = top_k
        self._page_words = page_words

    @property
    def concurrent_requests(self) -> int:
        """How many requests the backend answers side by side: a server several, an index of this process one."""
        # Threads that search in this process would share its cores and only slow each other down.
        return getattr(self.client.backend, 'connections', 1)

    def search(self, queries: Sequence[str]) -> list:
        """Returns per query at most `top_k` passages (`tools.search.SearchFunction`); None for a failed query."""
        return self.client.retrieve(queries, self._top_k)

    def open(self, references: Sequence[str], pages: Sequence[int]) -> list[Json | None]:
        """Returns per reference {'id', 'title', 'text', 'page', 'pages'}; None for an unknown document or page.

        Args:
          references: ids of passages, or exact titles.
          pages: number of the requested page of each reference, from 1. In the result 'page' is this number and
            'pages' the number of pages of the document.

        Raises:
          RetrievalError: the search server has no whole documents, or it failed (see `Client.open`).
        """
        records: list[Json | None] = []
        for page in self.client.open(references, pages, self._page_words):
            if page is None:
                records.append(None)
            else:
                records.append(dataclasses.asdict(page))
        return records


class WorldMaterial:
    """Questions and answers of the training worlds, for recipes that start from questions or answers."""

    def __init__(self, worlds: Sequence):
        self._worlds = worlds

    def questions(self, per_hop: int, hops: Sequence[int]) -> list[Question]:
        """Returns distinct questions, `per_hop` for each hop count."""
        # Imported in the function, because every config loads this module and most use no world.
        from zeroplay_jax.mini.world import evaluation_questions

        records = evaluation_questions(self._worlds, per_hop, hops)
        return list(map(Question.from_json, records))

    def answers(self) -> list[str]:
        """Returns the values of all facts, each once, in the same order in every process."""
        # A dict keeps the order of insertion; the order of a set of texts differs between processes.
        values: dict[str, None] = {}
        for world in self._worlds:
            for facts in world.facts.values():
                values.update(dict.fromkeys(facts.values()))
        return list(values)


@dataclasses.dataclass(frozen=True)
class Library:
    """Everything outside the policy that a run reads.

    Attributes:
      training: the corpus that roles search in training. In the miniature world it holds no passage
        of the evaluation.
      held_out: the corpus of evaluations: in the miniature world, training and held-out passages; else `training`.
      documents: starting points of proposers: a tuple, or for an index folder a lazy sequence.
      questions: held-out questions.   open_tasks: held-out open tasks with rubrics.
      about: description of the corpus of `held_out`; results are comparable only if it is equal.
      worlds: questions and answers of the training worlds; None for other corpora.
    """

    training: SearchableCorpus
    held_out: SearchableCorpus
    documents: Sequence[Document]
    questions: tuple[Question, ...]
    open_tasks: tuple[Question, ...] = ()
    about: str = ''
    worlds: WorldMaterial | None = None

    @property
    def evaluation_items(self) -> tuple[Question, ...]:
        """Questions and open tasks of an evaluation, in this order."""
        return self.questions + self.open_tasks


def documents_for(documents: Sequence[Document], hops: int) -> Sequence[int]:
    """Returns the indices of the documents from which a chain of that many hops can start."""
    # Documents of an index folder are read lazily and have no individual depth, so all of them qualify; a
    # range of millions of indices takes no memory.
    if not isinstance(documents, tuple):
        return range(len(documents))
    return [index for index, document in enumerate(documents) if document.depth >= hops]
