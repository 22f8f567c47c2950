"""What a run reads: documents to ask about, corpora to search, and questions to evaluate on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeroplay_jax.types import Json, Question

if TYPE_CHECKING:
    from zeroplay_jax.retrieval.client import Client

# In an encyclopedia every passage names others, so any number of hops may start from any document.
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

    Args:
      client: searches and opens documents; thread-safe.
      top_k: passages per query.   page_words: words per page of a document.
    """

    def __init__(self, client: Client, top_k: int, page_words: int):
        self.client = client
        self._top_k = top_k
        self._page_words = page_words

    # Tools of all rollouts share the client: its cache answers repeated queries of a group.
    def search(self, queries: Sequence[str]) -> list:
        """Per query its `top_k` passages, best first; None for a query that failed."""
        return self.client.retrieve(queries, self._top_k)

    def open(self, references: Sequence[str], pages: Sequence[int]) -> list[Json | None]:
        """Per reference {'id', 'title', 'text', 'page', 'pages'}; None for an unknown document or page."""
        records: list[Json | None] = []
        for page in self.client.open(references, pages, self._page_words):
            if page is None:
                records.append(None)
            else:
                records.append(dataclasses.asdict(page))
        return records


class WorldMaterial:
    """Questions and answers of the training worlds, for recipes that are given some."""

    def __init__(self, worlds: Sequence):
        self._worlds = worlds

    def questions(self, per_hop: int, hops: Sequence[int]) -> list[Question]:
        """Distinct questions, `per_hop` for each hop count."""
        # Imported here: this module is loaded with every config, most of which use no world.
        from zeroplay_jax.mini.world import evaluation_questions

        records = evaluation_questions(self._worlds, per_hop, hops)
        return list(map(Question.from_json, records))

    def answers(self) -> list[str]:
        """All values of facts, each once, in a fixed order."""
        # A dict keeps the order of insertion; a set of texts has another order in every process.
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
      held_out: the corpus of evaluations; in the miniature world training passages and held-out ones.
      documents: starting points of proposers.
      questions: held-out questions.   open_tasks: held-out open tasks with rubrics.
      about: names corpus, index and encoder of `held_out`; results are comparable only if it is equal.
      worlds: the training worlds' own questions and answers; None for other corpora.
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
        """Everything that an evaluation asks."""
        return self.questions + self.open_tasks


def documents_for(documents: Sequence[Document], hops: int) -> Sequence[int]:
    """Indices of the documents from which a chain of that many hops can start."""
    # Millions of documents are read lazily from disk and have no individual depth; a range of their
    # indices takes no memory.
    if not isinstance(documents, tuple):
        return range(len(documents))
    return [index for index, document in enumerate(documents) if document.depth >= hops]
