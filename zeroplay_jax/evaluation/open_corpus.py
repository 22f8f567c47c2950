"""Opens the corpus that the policy searches in `zeroplay_jax.ask`, where it answers a user's questions."""

from __future__ import annotations

import dataclasses
import pathlib

from zeroplay_jax.retrieval import folder as index_folder
from zeroplay_jax.retrieval.client import Client, Http, InProcess
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.selfplay.library import SearchableCorpus
from zeroplay_jax.selfplay.library_builder import held_out_corpus_and_questions
from zeroplay_jax.types import UserError

# One question of each of these hop counts is shown as an example.
_EXAMPLE_HOPS = (1, 2)


@dataclasses.dataclass(frozen=True)
class OpenCorpus:
    """A corpus that was opened.

    Attributes:
      source: searches and opens the documents.
      description: names the corpus in one line.
      examples: questions that the corpus answers; none for a corpus of the user.
    """

    source: SearchableCorpus
    description: str
    examples: tuple[str, ...] = ()

    def warning(self) -> str:
        """Returns an error text if too many searches failed, or none found a passage, since the last call; else ''.

        Resets the client's counters.

        The limit is 0 for a folder or a server (any failure counts) and `retrieval.max_failure_rate` for the worlds.
        """
        client = self.source.client
        failure = ''
        try:
            client.check_failure_rate()
        except RetrievalError as error:
            failure = str(error)
        # Resets the counters, so that a failure is reported once.
        counts = client.metrics()
        answered = counts['search/answered']
        if not failure and answered and answered == counts['search/empty']:
            failure = (
                f'none of the {answered:.0f} searches found a passage in {self.description}; check that its index has '
                'passages, in the language of the question'
            )
        return failure


def open_ask_corpus(config, ready_seconds: float) -> OpenCorpus:
    """Opens the corpus of `config.retrieval`.

    For 'world': one corpus of all training and held-out worlds, with examples.

    Args:
      config: config of the run; for 'world', eval.questions and eval.hops are overwritten.
      ready_seconds: how long to wait for a search server.

    Raises:
      UserError: the folder is not an index, or the server does not answer in time.
    """
    try:
        if config.retrieval.kind == 'http':
            return _open_server(config, ready_seconds)
        if config.retrieval.kind == 'folder':
            return _open_folder(config)
    except RetrievalError as error:
        raise UserError(str(error)) from None
    return _open_world(config)


def _open_server(config, ready_seconds: float) -> OpenCorpus:
    """Waits for the search server and returns its corpus."""
    # A rollout abandons a tool call after `tool_timeout`, so two attempts have to fit into it.
    backend = Http(config.retrieval.url, timeout=config.rollout.tool_timeout / 2, retries=1)
    # With a limit of 0, every failed search is reported to the user.
    client = Client(backend, max_failure_rate=0.0)
    client.wait_until_ready(ready_seconds)
    source = SearchableCorpus(client, config.tools.top_k, config.tools.page_words)
    return OpenCorpus(source, config.retrieval.url)


def _open_folder(config) -> OpenCorpus:
    """Returns the corpus of an index folder."""
    path = pathlib.Path(config.retrieval.path)
    index = index_folder.open_index(path, encoder_folder=config.retrieval.encoder or None)
    client = Client(InProcess(index, index_folder.fingerprint(path)), max_failure_rate=0.0)
    # An index cannot return more passages than it has.
    top_k = min(config.tools.top_k, len(index))
    source = SearchableCorpus(client, top_k, config.tools.page_words)
    return OpenCorpus(source, f'{path}, {len(index)} passages')


def _open_world(config) -> OpenCorpus:
    """Returns the corpus of all worlds; overwrites eval.questions and eval.hops of the config."""
    config.eval.update(questions=1, hops=_EXAMPLE_HOPS)
    source, questions = held_out_corpus_and_questions(config)
    description = f'the miniature world: worlds {config.world.train} and {config.world.evaluation}'
    examples = tuple(question.text for question in questions)
    return OpenCorpus(source, description, examples)
