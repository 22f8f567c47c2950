"""A demonstration episode and its tokens.

Episodes are rendered by the functions that rollouts use (`rollout.prompts`, `tokens`, `call_syntax`), so demonstrations
and rollouts have the same token ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.random import Generator

from tools.checkpoints.library import Document, Library
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.foreign_text import passages_text
from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.types import ENV, POLICY, PROMPT

Tokens = Int[np.ndarray, 'length']
SYNTAX = syntax_of('search_r1')
# Role of a demonstration → its prompt. Their order is part of the training of the built-in tokenizer.
_PROMPTS = {
    'solver': 'solver',
    'proposer': 'proposer',
    'proposer_from_answer': 'proposer.from_answer',
    'answer_from_documents': 'checker',
    'solver_with_path': 'solver.teacher',
    'challenger': 'proposer.task',
    'task_solver': 'solver.task',
}


def forms(prompt_set: str) -> dict[str, Prompt]:
    """Returns role → prompt of one of our sets of prompts (`config.prompts`)."""
    selected = prompts.select(prompt_set)
    return {role: selected[name] for role, name in _PROMPTS.items()}


FORMS = forms('mini')
# Prompts of exercises, which no role has (`parts.py`).
EXERCISES = {
    'restate': Prompt('Restate.\nQuestion: {question}'),
    'ask': Prompt('Ask.'),
    'ask_at_end': Prompt('Write a question.\nDocument: {document}'),
    'walk_to_goal': Prompt('Walk to the end.'),
    'walk': Prompt('{hops} hops. Write a walk.\nDocument: {document}'),
    'walk_back': Prompt('{hops} hops. Write a walk.\nAnswer: {answer}'),
    'trace': Prompt('Documents: {documents}\nWalk to the end of {phrase}'),
}
# Longest observation; three passages fit.
OBSERVATION_TOKENS = 128


class Episode(NamedTuple):
    """The tokens of an episode (int32) and the source of each (int8)."""

    tokens: Tokens
    sources: Tokens


class Part(NamedTuple):
    """One piece of an episode: text, or the documents of an ENV part, and its source (PROMPT, POLICY or ENV)."""

    content: Any
    source: int


@dataclasses.dataclass
class Demo:
    """One episode.

    Attributes:
      role: role or exercise of the opening prompt; None without a prompt.
      fields: fields of the opening prompt.
      parts: the pieces that follow the prompt, in order.
    """

    role: str | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parts: list[Part] = dataclasses.field(default_factory=list)

    def add_prompt_text(self, text: str) -> None:
        """Adds fixed text, which the loss counts as context."""
        self.parts.append(Part(text, PROMPT))

    def add_policy_text(self, text: str) -> None:
        """Adds text that the policy learns to write."""
        self.parts.append(Part(text, POLICY))

    def add_documents(self, documents: list[Document]) -> None:
        """Adds the reply to a search."""
        self.parts.append(Part(documents, ENV))

    def add_search(
        self, library: Library, thought: str, query: str, source: int = POLICY
    ) -> list[Document]:
        """Searches the library; adds a turn with the thought and the query, then the passages found; returns these.

        `source`: POLICY, or PROMPT for a turn that counts as context in the loss.
        """
        documents = library.search(query)
        # With a space before the query, a name has the tokens that it has in running text. The built-in checkpoints
        # were trained on this form.
        call = f'<search> {query}</search>'
        self.parts.append(Part(think(thought) + call, source))
        self.add_documents(documents)
        return documents

    def add_final_turn(self, thought: str, **tags: str) -> None:
        """Adds the last turn: a thought ('' for none), one block <tag> text</tag> per keyword, and the end token."""
        turn = think(thought)
        for tag, text in tags.items():
            turn += f'<{tag}> {text}</{tag}>'
        # The end token is part of the policy's text: it must learn when to stop.
        self.add_policy_text(turn + '<|im_end|>')


@dataclasses.dataclass(frozen=True)
class Role:
    """A role in the mixture of demonstrations.

    Attributes:
      share: share of the episodes, relative to the other roles.
      write: function that writes one episode from (material to draw from, random generator).
    """

    share: float
    write: Callable[[Any, Generator], Demo]


def spend(rng: Generator, count: int = 1) -> None:
    """Draws numbers that nothing depends on.

    The packaged policies were trained on demonstrations that drew them: a seed gives the same ones again.
    """
    rng.random(count)


def think(thought: str) -> str:
    """Returns the block of a thought; empty without a thought."""
    # A policy that does not think writes no empty blocks, so demonstrations without thoughts have none.
    if not thought:
        return ''
    return f'<think> {thought}</think>'


def render(codec: Codec, demo: Demo, observation_tokens: int = OBSERVATION_TOKENS) -> Episode:
    """Returns the tokens of an episode and the source of each.

    Args:
      codec: the tokenizer.
      demo: the episode.
      observation_tokens: longest observation; longer ones are cut.
    """
    ids = []
    sources = []
    if demo.role is not None:
        form = FORMS.get(demo.role) or EXERCISES[demo.role]
        chat = prompts.fill(form, **demo.fields)
        ids.append(codec.render(chat))
        sources.append(PROMPT)
    # Each part is tokenised on its own, as in a rollout: no token spans the policy's text and a search result.
    for part in demo.parts:
        if part.source == ENV:
            results = passages_text([part.content], SYNTAX.passage_style)
            part_ids = SYNTAX.wrap(codec, results, observation_tokens)
        else:
            part_ids = np.asarray(codec.encode(part.content), np.int32)
        ids.append(part_ids)
        sources.append(part.source)
    lengths = list(map(len, ids))
    # One byte per token: sources have only three values.
    token_sources = np.repeat(np.array(sources, np.int8), lengths)
    return Episode(np.concatenate(ids), token_sources)
