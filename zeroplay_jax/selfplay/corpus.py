"""What the players can search and start from: passages, an index over them, and documents to ask about."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence

from zeroplay_jax.mini.world import World, evaluation_questions, evaluation_tasks
from zeroplay_jax.retrieval import folder as index_folder
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.client import Client, Http, InProcess
from zeroplay_jax.retrieval.corpus import Corpus as Passages
from zeroplay_jax.retrieval.corpus import split
from zeroplay_jax.retrieval.index import Index, ScannIndex
from zeroplay_jax.retrieval.lexical import LexicalEncoder
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.selfplay import files
from zeroplay_jax.types import Json, UserError

# Any passage of an encyclopedia names others, so any number of hops may begin there.
_ANY_DEPTH = 4
_MOST_TASKS = 50  # of a hop count: a world has few passages to describe, and every rubric is a verdict of the judge


@dataclasses.dataclass(frozen=True)
class Document:
    """A passage that a proposer may start from; at most `depth` hops can be chained from it, `id` is the corpus's."""

    title: str
    text: str
    depth: int
    id: str = ''


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Everything outside the policy that a run plays with.

    Attributes:
      client: what players search while they learn; of the miniature, no passage of the evaluation is in it.
      held_out: what is searched in evaluations: in the miniature the same passages and those of the held-out worlds.
      documents: starting points of proposers.
      questions: held-out evaluation questions {'question', 'answers', 'hops'}.
      tasks: held-out open tasks {'question', 'rubrics', 'hops', …}, where there are some to measure by.
      top_k: passages per query.
      train_questions: the same of the training worlds, and `answers` of theirs: for games that are given some.
      about: names corpus, index and encoder of `held_out`: results are comparable where it is the same.
    """

    client: Client
    held_out: Client
    documents: Sequence[Document]
    questions: tuple[Json, ...]
    top_k: int
    tasks: tuple[Json, ...] = ()
    train_questions: tuple[Json, ...] = ()
    answers: tuple[str, ...] = ()
    about: str = ''

    def search(self, queries: Sequence[str]) -> list:
        """Per query its `top_k` passages, best first, for training; None for a query that failed."""
        return self.client.retrieve(queries, self.top_k)

    def check(self) -> None:
        """Raises UserError where too many searches failed for what was measured or played to mean anything."""
        for client in (self.client, self.held_out):
            try:
                client.check()
            except RetrievalError as error:
                raise UserError(str(error)) from None

    def search_held_out(self, queries: Sequence[str]) -> list:
        """The same for evaluation."""
        return self.held_out.retrieve(queries, self.top_k)


class Opened(Sequence[Document]):
    """The documents of an index folder, read from disk one by one: there may be millions."""

    def __init__(self, folder: pathlib.Path):
        self._passages = Passages(folder / 'corpus')

    def __len__(self) -> int:
        return len(self._passages)

    def __getitem__(self, number):
        record = self._passages.record(int(number))
        title, text = split(record.contents)
        return Document(title, text, _ANY_DEPTH, record.id)

    def __iter__(self) -> Iterator[Document]:
        return (self[i] for i in range(len(self)))


def build(config) -> Corpus:
    """The corpus that `config.retrieval` names: miniature worlds, an index folder, or a search server.

    Raises:
      UserError: a folder that is no index, or a server that does not come up.
    """
    try:
        return _worlds(config) if config.retrieval.kind == 'world' else _real(config)
    except RetrievalError as error:
        raise UserError(str(error)) from None


def _real(config) -> Corpus:
    """A corpus of the user's, with the user's questions to evaluate on."""
    c = config.retrieval
    folder = pathlib.Path(c.path)
    if c.kind == 'folder':
        with progress.clock('open index', config.progress):
            index = index_folder.open_index(folder, encoder_folder=c.encoder or None)
        backend: InProcess | Http = InProcess(index, index_folder.fingerprint(folder))
    else:
        backend = Http(c.url, timeout=c.timeout, retries=c.retries)
    client = Client(backend, cache=c.cache, most_failed=c.most_failed)
    client.wait_until_ready(c.ready_seconds)
    found = files.questions(config.eval.file) if config.eval.file else []
    # The same for every seed of a run, so that seeds can be compared.
    questions = tuple(files.drawn(found, config.eval.questions, 0))
    open_tasks = (
        files.drawn(files.open_tasks(config.eval.tasks), config.eval.questions, 0)
        if config.eval.tasks
        else ()
    )
    return Corpus(
        client,
        client,
        Opened(folder),
        questions,
        config.tools.top_k,
        tuple(open_tasks),
        about=backend.name,
    )


def _members(config) -> tuple[list[World], list[World]]:
    """The worlds of training and those held out."""
    near = config.world.near_misses
    train, held_out = (
        [World(first + i, split, near) for i in range(count)]
        for split, (first, count) in (
            ('train', config.world.train),
            ('evaluation', config.world.evaluation),
        )
    )
    return train, held_out


def exam(config) -> tuple[Client, tuple[Json, ...]]:
    """What evaluations in the miniature world search, and their questions {'question', 'answers', 'hops'}."""
    train, held_out = _members(config)
    client = Client(
        InProcess(_index(train + held_out, config.retrieval.overfetch)), config.retrieval.cache
    )
    return client, tuple(
        evaluation_questions(held_out, config.eval.questions, tuple(config.eval.hops))
    )


def _worlds(config) -> Corpus:
    train, unseen = _members(config)
    client = Client(InProcess(_index(train, config.retrieval.overfetch)), config.retrieval.cache)
    held_out, questions = exam(config)
    documents = linked_documents([(p.title, p.text) for world in train for p in world.passages])
    given: dict = {}
    if config.recipe == 'dspo' and not config.inputs.questions:
        hops = [h for h, share in enumerate(config.schedule.hop_ratio, 1) if share]
        given['train_questions'] = tuple(
            evaluation_questions(train, config.inputs.world_questions, hops)
        )
    if config.recipe == 'scope':
        count = min(config.eval.questions, _MOST_TASKS)
        given['tasks'] = tuple(evaluation_tasks(unseen, count, tuple(config.eval.hops)))
    if config.recipe == 'ssp' and not config.inputs.answers:
        given['answers'] = tuple(
            dict.fromkeys(v for w in train for facts in w.facts.values() for v in facts.values())
        )
    about = f'worlds {config.world.train} and {config.world.evaluation}, near misses {config.world.near_misses}'
    return Corpus(client, held_out, documents, questions, config.tools.top_k, about=about, **given)


def _index(worlds: Sequence[World], overfetch: int) -> Index:
    passages = [p for world in worlds for p in world.passages]
    titles, texts = [p.title for p in passages], [p.text for p in passages]
    return ScannIndex.build(LexicalEncoder(), titles, texts, overfetch=overfetch)


def linked_documents(
    passages: Sequence[tuple[str, str]], deepest: int = _ANY_DEPTH
) -> tuple[Document, ...]:
    """Documents with the length of the longest chain of distinct ones in which each names the next one's title.

    A hop follows a name to its own document, so a document that names none cannot open a question of two hops.
    This reads the passages only: it is no knowledge about answers.
    """
    titles = {title for title, _ in passages}
    links = {
        title: [w for w in dict.fromkeys(re.findall(r'\w+', text)) if w in titles and w != title]
        for title, text in passages
    }

    def depth(title, seen):
        if len(seen) == deepest:
            return deepest
        return max(
            (depth(to, seen | {to}) for to in links[title] if to not in seen), default=len(seen)
        )

    return tuple(
        Document(title, text, depth(title, frozenset([title])), title) for title, text in passages
    )


def able(documents: Sequence[Document], hops: int) -> Sequence[int]:
    """Places of the documents that so many hops can begin with; of an opened corpus without reading it."""
    if isinstance(documents, Opened):
        return range(len(documents))
    return [i for i, d in enumerate(documents) if d.depth >= hops]
