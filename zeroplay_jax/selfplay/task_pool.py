"""Questions that the proposer made and the solver will train on, each with where it came from."""

from __future__ import annotations

import collections
from typing import Any

from zeroplay_jax.objectives.rewards import normalize_answer
from zeroplay_jax.types import Json, identity_rng


class TaskPool:
    """Questions in order of arrival, without repeats; everything that was turned away is counted by reason.

    Attributes:
      questions: [{'question', 'answers', 'hops', …provenance}].
      drops: reason code → count.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Empties the pool for a new iteration."""
        self.questions: list[dict[str, Any]] = []
        self.drops: collections.Counter[str] = collections.Counter()
        self._seen: set[tuple[str, str]] = set()  # (why another of this name is refused, the name)

    def add(self, question: dict[str, Any]) -> str | None:
        """Takes a question and returns None, or counts and returns why not.

        'duplicate': its text is here already; 'document_taken': of those that share an 'only' (SCOPE: their document)
        the first is taken.
        """
        names = [('duplicate', normalize_answer(question['question']))]
        if 'only' in question:
            names.append(('document_taken', question['only']))
        for reason, name in names:
            if (reason, name) in self._seen:
                self.drops[reason] += 1
                return reason
        self._seen.update(names)
        self.questions.append(question)
        return None

    def drop(self, reason: str) -> None:
        """Counts what did not become a question."""
        self.drops[reason] += 1

    def batch(self, seed: int, iteration: int, begin: int, size: int) -> list[dict[str, Any]]:
        """Questions number `begin` … of an endless order, shuffled anew each time the pool is through."""
        picked: list[dict[str, Any]] = []
        n = len(self.questions)
        for at in range(begin, begin + size if n else begin):
            epoch, place = divmod(at, n)
            if not picked or place == 0:
                order = identity_rng(seed, iteration, epoch).permutation(n)
            picked.append(self.questions[order[place]])
        return picked

    def state(self) -> Json:
        """JSON-able content, for the checkpoint."""
        return {'questions': self.questions, 'drops': dict(self.drops)}

    def restore(self, state: Json) -> None:
        """Takes back what `state` gave."""
        self.clear()
        for question in state['questions']:
            self.add(dict(question))
        self.drops.update(state['drops'])
