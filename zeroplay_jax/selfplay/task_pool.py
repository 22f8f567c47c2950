"""The pool of questions that a proposer made and a solver will train on."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from zeroplay_jax.objectives.rewards import normalize_answer
from zeroplay_jax.types import Json, Question, identity_rng


class TaskPool:
    """Questions in order of arrival, without repeats; refusals and drops are counted by reason.

    Attributes:
      questions: the questions, in order of arrival.
      drops: reason code → number of refused questions and dropped tasks since the pool was last cleared.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Removes all questions and resets `drops`."""
        self.questions: list[Question] = []
        self.drops: collections.Counter[str] = collections.Counter()
        # (reason to refuse a further question of this key, key)
        self._keys: set[tuple[str, str]] = set()

    def add(self, question: Question) -> str | None:
        """Adds a question and returns None, or counts and returns the reason to refuse it.

        'duplicate': the pool has a question of the same text; 'document_taken': one of the same `unique_key`.
        """
        # Texts are compared in normal form, without case, articles and punctuation. SSP's code inserts replayed
        # questions again, which makes a few of them dominate its pool.
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
        """Counts a task that gave no question."""
        self.drops[reason] += 1

    def batch(self, seed: int, iteration: int, begin: int, size: int) -> list[Question]:
        """Returns questions `begin` to `begin + size` of an endless sequence, reshuffled every epoch; [] if empty.

        The order is a function of seed, iteration and epoch.
        """
        count = len(self.questions)
        if count == 0:
            return []
        # No state is kept: after a resume the same `begin` gives the same questions.
        selected: list[Question] = []
        order = None
        for index in range(begin, begin + size):
            epoch, position = divmod(index, count)
            # A batch may begin inside an epoch and reach into the next one.
            if order is None or position == 0:
                order = identity_rng(seed, iteration, epoch).permutation(count)
            selected.append(self.questions[order[position]])
        return selected

    def earlier(self, size: int, drops: Mapping[str, int]) -> TaskPool:
        """Returns the pool as it was with its first `size` questions and these drops, to be read."""
        pool = TaskPool()
        pool.questions = self.questions[:size]
        pool.drops.update(drops)
        return pool

    def state(self) -> Json:
        """Returns the content as JSON, for a checkpoint."""
        records = [question.to_json() for question in self.questions]
        return {'questions': records, 'drops': dict(self.drops)}

    def restore(self, state: Json) -> None:
        """Inverse of `state`."""
        self.clear()
        # `add` rebuilds the keys that refuse duplicates; stored questions have none among themselves.
        for record in state['questions']:
            self.add(Question.from_json(record))
        self.drops.update(state['drops'])
