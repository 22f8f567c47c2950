"""Builds the library of a run: miniature worlds, an index folder, or a search server."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from zeroplay_jax.data import files
from zeroplay_jax.mini.world import World, evaluation_questions, evaluation_tasks
from zeroplay_jax.retrieval import folder as index_folder
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.client import Client, Http, InProcess
from zeroplay_jax.retrieval.corpus import Corpus as StoredCorpus
from zeroplay_jax.retrieval.corpus import split
from zeroplay_jax.retrieval.kept_index import trained_once
from zeroplay_jax.retrieval.lexical import LexicalEncoder
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.selfplay.library import (
    PAGE_WORDS,
    UNLIMITED_DEPTH,
    Document,
    Library,
    NoDocuments,
    SearchableCorpus,
    TrainingCorpus,
    WorldMaterial,
    has_index,
)
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Question, UserError

# Largest number of open tasks per hop count: a world has few passages to describe, and every rubric is one judgement.
_MAX_WORLD_TASKS = 50
# A search server takes minutes to load a large index, and the run is often started at the same time.
_READY_SECONDS = 600.0


class IndexedDocuments(Sequence[Document]):
    """The documents of an index folder, each read from disk when it is indexed: there may be millions."""

    def __init__(self, folder: pathlib.Path):
        self._passages = StoredCorpus(folder / 'corpus')

    def __len__(self) -> int:
        return len(self._passages)

    def __getitem__(self, number):
        record = self._passages.record(int(number))
        title, text = split(record.contents)
        return Document(title, text, UNLIMITED_DEPTH, record.id)

    def __iter__(self) -> Iterator[Document]:
        for number in range(len(self)):
            yield self[number]

    def has_passage(self, passage_id: str) -> bool:
        """Returns whether a passage has this id."""
        return self._passages.has_id(passage_id)


def build_library(config: Config, with_open_tasks: bool = False) -> Library:
    """Builds the library that `config.retrieval` names, with the evaluation questions of `config.eval`.

    Args:
      with_open_tasks: whether evaluations grade open tasks of the held-out worlds as well. For the user's corpora
        `config.eval.tasks` decides.

    Raises:
      UserError: the folder is not an index, the server does not answer in time, or a line of an evaluation file
        is unusable.
    """
    if config.retrieval.kind == 'world':
        return _world_library(config, with_open_tasks)
    corpus, corpus_name = open_real_corpus(config)
    # A search server needs a folder only where documents are read.
    documents: Sequence[Document] = NoDocuments()
    if has_index(config.retrieval.path):
        documents = IndexedDocuments(pathlib.Path(config.retrieval.path))
    # Without a list of held-out passages one corpus serves both: of a real encyclopedia only questions are held out.
    training = corpus
    if config.retrieval.held_out and isinstance(documents, IndexedDocuments):
        held_out = files.held_out_passages(config.retrieval.held_out)
        _check_held_out(config.retrieval, held_out.ids, documents)
        if config.retrieval.kind == 'http':
            _check_ids_of_server(config.retrieval, corpus, held_out, documents)
        top_k = min(config.tools.top_k, len(documents))
        training = TrainingCorpus(corpus.client, top_k, PAGE_WORDS, held_out, len(documents))
    open_tasks: list[Question] = []
    if config.eval.tasks:
        open_tasks = files.open_tasks(config.eval.tasks)
    sampled_tasks = files.sample(open_tasks, config.eval.questions, seed=0)
    return Library(
        training=training,
        held_out=corpus,
        documents=documents,
        questions=tuple(_evaluation_questions(config)),
        open_tasks=tuple(sampled_tasks),
        about=corpus_name,
    )


def _evaluation_questions(config: Config) -> list[Question]:
    """Returns a sample of the questions of every file of `eval.file`; of several each names its file."""
    paths = config.eval.file.split(',') if config.eval.file else []
    questions: list[Question] = []
    for path in paths:
        # The seed is fixed, so that runs with different seeds are compared on the same questions.
        sampled = files.sample(files.questions(path), config.eval.questions, seed=0)
        if len(paths) > 1:
            of_file = {'set': pathlib.Path(path).stem}
            sampled = [
                dataclasses.replace(one, origin={**one.origin, **of_file}) for one in sampled
            ]
        questions += sampled
    return questions


# Counters of a search client that do not depend on when a run was resumed, as times and cache hits do.
SEARCH_COUNTS = ('failed', 'answered', 'empty')


def check_and_reset_failures(library: Library) -> dict[str, float]:
    """Returns `SEARCH_COUNTS` of both corpora together since the last call; resets all counters of their clients.

    Call it before rollouts are trained on or an evaluation's results are used: without passages, answers measure
    the search and not the policy.

    Raises:
      UserError: more than `retrieval.max_failure_rate` of a corpus's searches since the last call failed.
    """
    clients = [library.training.client]
    # Two calls for one client would read counters that the first has reset.
    if library.held_out.client is not library.training.client:
        clients.append(library.held_out.client)
    counts = dict.fromkeys(SEARCH_COUNTS, 0.0)
    for client in clients:
        try:
            client.check_failure_rate()
        except RetrievalError as error:
            raise UserError(f'{error} (limit: config.retrieval.max_failure_rate)') from None
        # `metrics` resets the counters.
        metrics = client.metrics()
        for name in SEARCH_COUNTS:
            counts[name] += metrics[f'search/{name}']
    return counts


def open_real_corpus(
    config: Config, ready_seconds: float | None = None
) -> tuple[SearchableCorpus, str]:
    """Opens the index folder or search server of `config.retrieval`; returns it and its name.

    Waits up to ten minutes, or `ready_seconds`, for a server.

    Raises:
      RetrievalError: the folder is not an index, or the server does not answer in time.
    """
    settings = config.retrieval
    backend: InProcess | Http
    top_k = config.tools.top_k
    if settings.kind == 'folder':
        folder = pathlib.Path(settings.path)
        with progress.clock('open index', config.progress):
            index = index_folder.open_index(folder, encoder_folder=settings.encoder or None)
        backend = InProcess(index, index_folder.fingerprint(folder))
        # An index cannot return more passages than it has.
        top_k = min(top_k, len(index))
    else:
        options: dict[str, Any] = {}
        if ready_seconds is not None:
            # A person waits: two attempts fit into the time of a tool call, so that each failure is told.
            options = dict(timeout=config.rollout.tool_timeout / 2, retries=1, patience=0)
        backend = Http(settings.url, **options)
    client = Client(backend, max_failure_rate=settings.max_failure_rate)
    client.wait_until_ready(_READY_SECONDS if ready_seconds is None else ready_seconds)
    corpus = SearchableCorpus(client, top_k, PAGE_WORDS)
    return corpus, backend.name


def _check_held_out(retrieval, passage_ids: Collection[str], documents: IndexedDocuments) -> None:
    """Raises UserError for a held-out passage that the index does not have: training would read others instead."""
    for passage_id in sorted(passage_ids):
        if not documents.has_passage(passage_id):
            raise UserError(
                f'config.retrieval.held_out={retrieval.held_out}: the index {retrieval.path} has no passage '
                f'{passage_id!r}; make both from one corpus with the same --passage-words'
            )


def _check_ids_of_server(
    retrieval,
    corpus: SearchableCorpus,
    held_out: files.HeldOutPassages,
    documents: IndexedDocuments,
) -> None:
    """Raises UserError if a search server names passages by other ids than the index: none would be left out."""
    queries = sorted(held_out.titles)[:1] or [documents[0].text]
    (passages,) = corpus.search(queries)
    for passage in passages or ():
        if not documents.has_passage(passage['id']):
            raise UserError(
                f'config.retrieval.held_out={retrieval.held_out}: {retrieval.url} returns a passage with the id '
                f'{passage["id"]!r}, which the index {retrieval.path} does not have, so that held-out passages cannot '
                'be left out; serve this index with zeroplay serve'
            )


def _worlds(config: Config, split_name: Literal['train', 'evaluation']) -> list[World]:
    """Returns the miniature worlds of `config.world.train` or `config.world.evaluation`: (first seed, count)."""
    first_seed, count = config.world[split_name]
    seeds = range(first_seed, first_seed + count)
    return [World(seed, split_name, config.world.near_misses) for seed in seeds]


def held_out_corpus_and_questions(config: Config) -> tuple[SearchableCorpus, tuple[Question, ...]]:
    """Builds the corpus that evaluations in the miniature world search; returns it and their questions.

    The corpus holds the passages of all training and evaluation worlds (`config.world`).
    """
    held_out = _worlds(config, 'evaluation')
    # Training passages are distractors; the questions are about held-out worlds only.
    corpus = _world_corpus(config, _worlds(config, 'train') + held_out)
    records = evaluation_questions(held_out, config.eval.questions, tuple(config.eval.hops))
    return corpus, tuple(map(Question.from_json, records))


def _world_library(config: Config, with_open_tasks: bool) -> Library:
    """Returns the library of the miniature worlds: training searches training worlds, evaluations search all."""
    training_worlds = _worlds(config, 'train')
    held_out, questions = held_out_corpus_and_questions(config)
    passages: list[tuple[str, str]] = []
    for world in training_worlds:
        for passage in world.passages:
            passages.append((passage.title, passage.text))
    open_tasks: list[Question] = []
    if with_open_tasks:
        count = min(config.eval.questions, _MAX_WORLD_TASKS)
        worlds = _worlds(config, 'evaluation')
        records = evaluation_tasks(worlds, count, tuple(config.eval.hops))
        open_tasks = list(map(Question.from_json, records))
    # The description enters the fingerprint of results, so it names every setting that changes the corpus.
    description = (
        f'worlds {config.world.train} and {config.world.evaluation}, '
        f'near misses {config.world.near_misses}'
    )
    return Library(
        training=_world_corpus(config, training_worlds),
        held_out=held_out,
        documents=linked_documents(passages),
        questions=questions,
        open_tasks=tuple(open_tasks),
        about=description,
        worlds=WorldMaterial(training_worlds),
    )


def _world_corpus(config: Config, worlds: Sequence[World]) -> SearchableCorpus:
    """Returns a corpus of the passages of these worlds, with an index and a client of its own."""
    titles = []
    texts = []
    for world in worlds:
        for passage in world.passages:
            titles.append(passage.title)
            texts.append(passage.text)
    # The lexical encoder needs neither a model nor a download.
    index = trained_once(LexicalEncoder(), titles, texts)
    client = Client(InProcess(index), max_failure_rate=config.retrieval.max_failure_rate)
    return SearchableCorpus(client, config.tools.top_k, PAGE_WORDS)


def linked_documents(passages: Sequence[tuple[str, str]]) -> tuple[Document, ...]:
    """Returns a document per passage; its `depth` is the number of documents on the longest chain that starts at it.

    In a chain each document names the title of the next one. A hop follows a name to the document of that
    title, so a document that names none cannot start a question of two hops. Depths come from the passages
    alone and give away nothing about answers.

    Args:
      passages: (title, text); every title is one word, as in the miniature worlds.
    """
    titles = {title for title, _ in passages}
    links: dict[str, list[str]] = {}
    for title, text in passages:
        words = dict.fromkeys(re.findall(r'\w+', text))
        links[title] = [word for word in words if word in titles and word != title]

    def longest_chain(title: str, visited: frozenset[str]) -> int:
        """Returns the number of documents on the longest chain that continues from `title`, `visited` included."""
        # No question asks for longer chains, and the search would visit exponentially many of them.
        if len(visited) == UNLIMITED_DEPTH:
            return UNLIMITED_DEPTH
        longest = len(visited)
        for target in links[title]:
            # A chain must not return to a document: the answer would be in the question.
            if target not in visited:
                longest = max(longest, longest_chain(target, visited | {target}))
        return longest

    documents: list[Document] = []
    for title, text in passages:
        depth = longest_chain(title, frozenset([title]))
        documents.append(Document(title, text, depth, id=title))
    return tuple(documents)
