"""The library of a run: documents to ask about, corpora to search, and questions to evaluate on."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeroplay_jax.data.files import HeldOutPassages
from zeroplay_jax.settings.kinds import MAX_HOPS
from zeroplay_jax.types import Json, Question, UserError

if TYPE_CHECKING:
    from zeroplay_jax.retrieval.client import Client
    from zeroplay_jax.retrieval.corpus import DocumentPage

# Depth of documents whose links are not known. In an encyclopedia a chain of any length may start anywhere.
UNLIMITED_DEPTH = MAX_HOPS
# Largest number of passages that `TrainingCorpus` fetches per query: the limit of a search server.
_MAX_FETCHED = 100


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


def _check_list(queries: object) -> None:
    """Raises TypeError for a text, each letter of which would be a query."""
    if isinstance(queries, str):
        raise TypeError(f'search takes a list of queries, not the text {queries!r}; put it in [ ]')


# Words of a page of a document, which the tool `open` shows.
PAGE_WORDS = 200


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
        _check_list(queries)
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
        found = self.client.open(references, pages, self._page_words)
        return [None if page is None else self._shown(page) for page in found]

    def _shown(self, page: DocumentPage) -> Json | None:
        """Returns a page as `open` does."""
        record = dataclasses.asdict(page)
        del record['passages']
        return record


class TrainingCorpus(SearchableCorpus):
    """A corpus without its held-out passages: no search returns one, and no page of a document shows one.

    Args:
      client, top_k, page_words: see `SearchableCorpus`.
      held_out: the passages.
      size: number of passages of the corpus.
    """

    def __init__(
        self, client: Client, top_k: int, page_words: int, held_out: HeldOutPassages, size: int
    ):
        super().__init__(client, top_k, page_words)
        self._held_out = held_out
        self._most = max(top_k, min(size, _MAX_FETCHED))

    def search(self, queries: Sequence[str]) -> list:
        """Returns per query its best passages that are not held out, at most `top_k`; None for a failed query.

        Fewer than `top_k` are returned where nearly all of the first hundred are held out.
        """
        _check_list(queries)
        results: list[Sequence[Json] | None] = [None] * len(queries)
        pending = list(range(len(queries)))
        # Few of the best passages are held out, so that further ones are fetched only for queries that lack some.
        fetched = min(2 * self._top_k, self._most)
        while pending:
            answers = self.client.retrieve([queries[index] for index in pending], fetched)
            incomplete = []
            for index, passages in zip(pending, answers, strict=True):
                if passages is None:
                    results[index] = None
                    continue
                allowed = [each for each in passages if each['id'] not in self._held_out.ids]
                results[index] = allowed[: self._top_k]
                # BM25 finds fewer passages than were requested where no others share a word with the query.
                has_others = len(passages) == fetched < self._most
                if len(allowed) < self._top_k and has_others:
                    incomplete.append(index)
            pending = incomplete
            fetched = min(2 * fetched, self._most)
        return results

    def _shown(self, page: DocumentPage) -> Json | None:
        """Returns a page without its held-out passages; None where nothing is left."""
        allowed = [each for each in page.passages if each['id'] not in self._held_out.ids]
        if len(allowed) == len(page.passages) and page.id not in self._held_out.ids:
            return super()._shown(page)
        if not allowed:
            return None
        # The id and the title of a document are those of its first passage, which may be held out too.
        first = allowed[0]
        text = ' '.join(passage['text'] for passage in allowed)
        kept = dataclasses.replace(page, id=first['id'], title=first['title'], text=text)
        return super()._shown(kept)


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
      training: the corpus that roles search in training. It holds no passage of the miniature world's evaluation, and
        none that `retrieval.held_out` lists.
      held_out: the corpus of evaluations, with held-out passages; `training` itself where there are none.
      documents: starting points of proposers: a tuple, or for an index folder a lazy sequence; for a search server
        `NoDocuments`.
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


class NoDocuments(Sequence[Document]):
    """Stands for the documents of a search server: there are none without an index folder."""

    def __len__(self) -> int:
        raise UserError(
            'config.retrieval.kind=http: a search server lists no documents, and the recipe reads some; name the index '
            'folder that it serves by --config.retrieval.path=FOLDER'
        )

    def __getitem__(self, number):
        return len(self)


def has_index(path: str) -> bool:
    """Returns whether a path is an index folder."""
    # The manifest is written last: a folder without one is incomplete.
    return bool(path) and (pathlib.Path(path) / 'manifest.json').is_file()


def documents_for(documents: Sequence[Document], hops: int) -> Sequence[int]:
    """Returns the indices of the documents from which a chain of that many hops can start."""
    # Documents of an index folder are read lazily and have no individual depth, so all of them qualify; a
    # range of millions of indices takes no memory.
    if not isinstance(documents, tuple):
        return range(len(documents))
    return [index for index, document in enumerate(documents) if document.depth >= hops]
