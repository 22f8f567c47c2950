"""The schedule of a run: phases of similar steps, evaluations, positions in the tasks, and the question pool."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from zeroplay_jax.objectives.answers import normalize_answer
from zeroplay_jax.types import Json, Question, identity_rng

T = TypeVar('T')


class QuestionPool:
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
        """Returns questions `begin` to `begin + size` of the endless sequence of `in_epochs`; [] if there are none."""
        if not self.questions:
            return []
        return in_epochs(self.questions, begin, size, seed, iteration)

    def earlier(self, size: int, drops: Mapping[str, int]) -> QuestionPool:
        """Returns the pool as it was with its first `size` questions and these drops, to be read."""
        pool = QuestionPool()
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


def in_epochs(items: Sequence[T], begin: int, count: int, seed: int, *identity: int) -> list[T]:
    """Returns items `begin` to `begin + count` of an endless sequence, in which every epoch has a new order.

    The order is a function of seed, identity and number of the epoch: a resumed run continues where it stopped.

    Args:
      items: at least one.
    """
    orders = {}
    taken = []
    for index in range(begin, begin + count):
        epoch, position = divmod(index, len(items))
        if epoch not in orders:
            orders[epoch] = identity_rng(seed, *identity, epoch).permutation(len(items))
        taken.append(items[orders[epoch][position]])
    return taken


@dataclasses.dataclass(frozen=True)
class Phase:
    """A sequence of steps of one kind.

    Attributes:
      name: name in metrics and logs; with `iteration` it identifies the phase.
      steps: number of steps.
      trains: roles that are updated in each step, in this order; (): rollouts only.
      iteration: outer iteration of the recipe's schedule, from 0.
      clear_pool_every: the pool is emptied at the first step and every this many steps of the phase; 0: never.
    """

    name: str
    steps: int
    trains: tuple[str, ...] = ()
    iteration: int = 0
    clear_pool_every: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: `index` within its phase, `number` within the run (seeds its randomness)."""

    phase: Phase
    index: int
    number: int


@dataclasses.dataclass(frozen=True)
class BatchCursor:
    """Position in the recipe's tasks when a step requests more of them.

    Attributes:
      drawn_in_phase: number of tasks drawn earlier in this phase, in this step included; with `rollout.ahead` also
        the first ones of the next step.
      drawn_in_step: number of tasks drawn earlier in this step.
      round: number of earlier requests in this step. Round 0 draws its first tasks; later rounds draw more, in the
        built-in recipes only with `filter_groups`.
      missing: groups that the batch still lacks, of the trained role that lacks most; in round 0, the batch size minus
        carried-over groups. 0 in a phase that trains no role.
      external: number of external tasks (`Task.external`) drawn earlier in this phase.
    """

    drawn_in_phase: int = 0
    drawn_in_step: int = 0
    round: int = 0
    missing: int = 0
    external: int = 0


def all_steps(phases: Sequence[Phase]) -> list[Step]:
    """Returns all steps of the phases in order, numbered from 0."""
    steps: list[Step] = []
    for phase in phases:
        for index in range(phase.steps):
            number = len(steps)
            steps.append(Step(phase, index, number))
    return steps


def evaluation_step(iteration: int) -> Step:
    """Returns a step that evaluates the policy on held-out questions; `with_evaluations` replaces its number 0."""
    phase = Phase('evaluation', 1, iteration=iteration)
    return Step(phase, index=0, number=0)


def with_evaluations(steps: Sequence[Step], role: str, every: int) -> list[Step]:
    """Returns the steps with evaluations at the start, at the end, and in between; all are numbered again.

    Args:
      role: the evaluated role.
      every: its training steps between two evaluations; 0: none in between.
    """
    # The first evaluation precedes training: results are reported as a difference from the initial policy.
    scheduled = [evaluation_step(0)]
    trained_steps = 0
    for step in steps:
        scheduled.append(step)
        # Steps of other roles do not change the evaluated policy.
        if role not in step.phase.trains:
            continue
        trained_steps += 1
        is_due = every > 0 and trained_steps % every == 0
        # The evaluation after the last step is added below.
        if is_due and step is not steps[-1]:
            scheduled.append(evaluation_step(step.phase.iteration))
    # The final evaluation gets the iteration of the last step, so that it is plotted where training ended.
    scheduled.append(evaluation_step(scheduled[-1].phase.iteration))
    # Numbers are assigned last. They seed the steps, so an evaluation needs a number of its own.
    return [Step(step.phase, step.index, number) for number, step in enumerate(scheduled)]
