"""Questions that a proposer made and a solver will train on, with their provenance."""

from __future__ import annotations

import collections

from zeroplay_jax.objectives.rewards import normalize_answer
from zeroplay_jax.types import Json, Question, identity_rng


class TaskPool:
    """Questions in order of arrival, without repeats; refusals and drops are counted by reason.

    Attributes:
      questions: in order of arrival.
      drops: reason code → count.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Empties the pool for a new iteration."""
        self.questions: list[Question] = []
        self.drops: collections.Counter[str] = collections.Counter()
        # (reason to refuse another one, key)
        self._keys: set[tuple[str, str]] = set()

    def add(self, question: Question) -> str | None:
        """Takes a question and returns None, or counts and returns the reason to refuse it.

        'duplicate': its text is in the pool; 'document_taken': a question with its `unique_key` is.
        """
        # Normalised: questions that differ in case, articles or punctuation only have the same text.
        # SSP's code inserts replayed questions again, which makes a few of them dominate its pool.
        keys = [('duplicate', normalize_answer(question.text))]
        if question.unique_key:
            keys.append(('document_taken', question.unique_key))
        for reason, key in keys:
            if (reason, key) in self._keys:
                self.drops[reason] += 1
                return reason
        self._keys.update(keys)
        self.questions.append(question)
        return None

    def drop(self, reason: str) -> None:
        """Counts an item that did not become a question."""
        self.drops[reason] += 1

    def batch(self, seed: int, iteration: int, begin: int, size: int) -> list[Question]:
        """Questions `begin` to `begin + size` of an endless sequence, reshuffled every epoch."""
        count = len(self.questions)
        if count == 0:
            return []
        # Position, not state: after a resume the same `begin` gives the same questions.
        selected: list[Question] = []
        order = None
        for index in range(begin, begin + size):
            epoch, position = divmod(index, count)
            # A batch may begin inside an epoch and reach into the next one.
            if order is None or position == 0:
                order = identity_rng(seed, iteration, epoch).permutation(count)
            selected.append(self.questions[order[position]])
        return selected

    def state(self) -> Json:
        """JSON content, for the checkpoint."""
        records = [question.to_json() for question in self.questions]
        return {'questions': records, 'drops': dict(self.drops)}

    def restore(self, state: Json) -> None:
        """Inverse of `state`."""
        self.clear()
        # `add` rebuilds the keys that refuse duplicates; stored questions have none among themselves.
        for record in state['questions']:
            self.add(Question.from_json(record))
        self.drops.update(state['drops'])
