"""What recipes start from: documents to ask about, answers to hide, questions to solve."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from zeroplay_jax.objectives.schedules import stratify
from zeroplay_jax.selfplay import files
from zeroplay_jax.selfplay.library import Library, documents_for
from zeroplay_jax.selfplay.recipes.parts.phases import alternate
from zeroplay_jax.selfplay.schedule import BatchCursor, Step
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.types import Json, Question, Task, UserError, identity_rng

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class SeedDocument:
    """A document that a proposer starts from.

    Attributes:
      title, text: the passage.   hops: facts that the question must need.
      kind: type of task (SCOPE); '' where the file names none.
      origin: provenance for the logs.
    """

    title: str
    text: str
    hops: int
    kind: str = ''
    origin: Json = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The record of the task log."""
        record = {'title': self.title, 'text': self.text, 'hops': self.hops, **self.origin}
        if self.kind:
            record['type'] = self.kind
        return record

    @classmethod
    def from_json(cls, record: Json) -> SeedDocument:
        """A line of `inputs.documents`."""
        origin = files.provenance(record)
        return cls(record['title'], record['text'], record['hops'], record.get('type', ''), origin)


@dataclasses.dataclass(frozen=True)
class HiddenAnswer:
    """An answer for which a proposer invents a question (SSP).

    Attributes:
      answer: the text.   hops: searches that the question must need.
      noise_from: identities of the tasks whose passages are mixed into the answerability check.
      origin: provenance for the logs.
    """

    answer: str
    hops: int
    noise_from: tuple[tuple[int, int], ...] = ()
    origin: Json = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The record of the task log."""
        return {'answer': self.answer, 'hops': self.hops, **self.origin}


class EpochDataset(Generic[T]):
    """A list of items in an endless order that is reshuffled every epoch."""

    def __init__(self, items: Sequence[T], seed: int):
        self._items = items
        self._seed = seed

    def take(self, begin: int, count: int) -> list[T]:
        """Items `begin` to `begin + count` of the endless sequence."""
        size = len(self._items)
        orders: dict[int, np.ndarray] = {}
        taken: list[T] = []
        for index in range(begin, begin + count):
            epoch, position = divmod(index, size)
            if epoch not in orders:
                orders[epoch] = identity_rng(self._seed, epoch).permutation(size)
            taken.append(self._items[orders[epoch][position]])
        return taken


class DocumentSampler:
    """Documents with hop counts in the exact ratio of `schedule.hop_ratio` in every step.

    Drawn from the corpus for every step, or taken from the file `inputs.documents`.
    """

    def __init__(self, config, library: Library):
        self._from_file = DocumentFile(config) if config.inputs.documents else None
        self._seed = config.seed
        self._ratio = tuple(config.schedule.hop_ratio)
        self._documents = library.documents
        self._usable = [
            documents_for(library.documents, hops) for hops in range(1, len(self._ratio) + 1)
        ]

    def tasks(self, step: Step, size: int) -> list[Task]:
        """`size` documents, without repeats while there are enough; a function of the arguments."""
        if self._from_file:
            return self._from_file.tasks(step, size)
        rng = identity_rng(self._seed, step.number)
        seeds: list[SeedDocument] = []
        used: set[int] = set()
        for hops, count in enumerate(stratify(self._ratio, size), 1):
            indices = self._draw(rng, hops, count, used)
            used.update(indices)
            seeds += [self._seed_document(index, hops) for index in indices]
        return [Task((step.number, number), seed) for number, seed in enumerate(seeds)]

    def _draw(self, rng: np.random.Generator, hops: int, count: int, used: set[int]) -> list[int]:
        usable = self._usable[hops - 1]
        if not count:
            return []
        if not len(usable):
            raise UserError(
                f'no document can start a question of {hops} hops: lower config.schedule.hop_ratio '
                'there'
            )
        # More than needed, so that enough remain without those used for other hop counts.
        drawn = rng.choice(len(usable), min(count + len(used), len(usable)), replace=False)
        candidates = [int(usable[position]) for position in drawn]
        indices = [index for index in candidates if index not in used][:count]
        shortfall = rng.integers(0, len(usable), count - len(indices))
        return indices + [int(usable[int(position)]) for position in shortfall]

    def _seed_document(self, index: int, hops: int) -> SeedDocument:
        document = self._documents[index]
        origin = {'document_id': document.id} if document.id else {}
        return SeedDocument(document.title, document.text, hops, origin=origin)


class DocumentFile:
    """Documents of a file with the hops, and task types, that the file assigns.

    Every batch has the hops in the exact ratio of the config, and every type equally often, to one.
    No document repeats before all others with its hops and type were used.

    Raises:
      UserError: an unusable line, or hops that the config asks for and no document has.
    """

    def __init__(self, config):
        path = config.inputs.documents
        self._ratio = tuple(config.schedule.hop_ratio)
        self._phases = alternate(config)
        self._batch_of_phase = dict(proposer=config.proposer.batch, generate=config.pool.batch)
        # (hops, type) → documents
        cells: dict[tuple[int, str], list[SeedDocument]] = collections.defaultdict(list)
        wanted_types = set(config.inputs.types) - {''}
        for record in files.documents(path):
            seed = SeedDocument.from_json(record)
            if not wanted_types or seed.kind in wanted_types:
                cells[seed.hops, seed.kind].append(seed)
        self._types = sorted({kind for _, kind in cells})
        self._check(path, cells, wanted_types)
        self._datasets = {
            cell: EpochDataset(seeds, config.seed) for cell, seeds in sorted(cells.items())
        }

    def _check(self, path: str, cells, wanted_types: set[str]) -> None:
        absent_types = wanted_types - set(self._types)
        if absent_types:
            raise UserError(
                f'{path}: no document of type {min(absent_types)!r}; correct config.inputs.types'
            )
        wanted_hops = [hops for hops, share in enumerate(self._ratio, 1) if share]
        for hops in wanted_hops:
            for kind in self._types:
                if (hops, kind) in cells:
                    continue
                of_type = f' of type {kind!r}' if kind else ''
                raise UserError(
                    f'{path}: no document{of_type} has {hops} hops, as {self._ratio} requires; build '
                    'the file with this ratio, or change config.schedule.hop_ratio'
                )

    def tasks(self, step: Step, size: int) -> list[Task]:
        """`size` documents; a function of the arguments."""
        used_before = self._used_before(step)
        seeds: list[SeedDocument] = []
        for cell, count in self._cell_counts(size).items():
            seeds += self._datasets[cell].take(used_before[cell], count)
        return [Task((step.number, number), seed) for number, seed in enumerate(seeds)]

    def _cell_counts(self, size: int) -> collections.Counter[tuple[int, str]]:
        """How many documents of each (hops, type) a batch holds: types alternate over the batch."""
        hop_counts = stratify(self._ratio, size)
        hops = np.repeat(np.arange(len(self._ratio)) + 1, hop_counts)
        cells: collections.Counter[tuple[int, str]] = collections.Counter()
        for number, hop in enumerate(hops):
            cells[int(hop), self._types[number % len(self._types)]] += 1
        return cells

    def _used_before(self, step: Step) -> collections.Counter[tuple[int, str]]:
        """How many documents of each cell all earlier steps used."""
        used: collections.Counter[tuple[int, str]] = collections.Counter()
        current = (step.phase.iteration, step.phase.name)
        for phase in self._phases:
            is_current = (phase.iteration, phase.name) == current
            steps = step.index if is_current else phase.steps
            batch = self._batch_of_phase.get(phase.name, 0)
            for cell, count in self._cell_counts(batch).items():
                used[cell] += count * steps
            if is_current:
                break
        return used


def pool_tasks(config, step: Step, pool: TaskPool, cursor: BatchCursor) -> list[Task]:
    """A batch of the pool's questions; further ones while the filter leaves groups missing."""
    count = _round_size(config.solver, cursor)
    questions = pool.batch(config.seed, step.phase.iteration, cursor.phase, count)
    return [
        Task((step.number, cursor.step + number), question)
        for number, question in enumerate(questions)
    ]


def dataset_tasks(
    config, dataset: EpochDataset[Question], step: Step, cursor: BatchCursor
) -> list[Task]:
    """A batch of external questions; further ones while the filter leaves groups missing."""
    questions = dataset.take(cursor.phase, _round_size(config.solver, cursor))
    return [
        Task((step.number, cursor.step + number), question, external=True)
        for number, question in enumerate(questions)
    ]


def _round_size(role, cursor: BatchCursor) -> int:
    """Items of a round: the missing ones at first, then whole batches, which keep the slots busy."""
    if cursor.round == 0:
        return cursor.missing
    can_continue = role.filter_groups and cursor.round < role.fill_rounds
    return role.batch if can_continue and cursor.missing else 0


def training_questions(config, library: Library) -> list[Question]:
    """Questions of `inputs.questions`, else of the training worlds.

    Raises:
      UserError: neither is available.
    """
    if config.inputs.questions:
        return files.questions(config.inputs.questions)
    if library.worlds is None:
        raise UserError(
            f'recipe {config.recipe} needs questions, and there are none; name a file in '
            'config.inputs.questions'
        )
    hops = [hop for hop, share in enumerate(config.schedule.hop_ratio, 1) if share]
    return library.worlds.questions(config.inputs.world_questions, hops)


def hidden_answers(config, library: Library) -> list[HiddenAnswer]:
    """Answers of `inputs.answers`, else of the training worlds; hops in the exact ratio over the list.

    Raises:
      UserError: neither is available.
    """
    answers: list[tuple[str, Json]] = []
    if config.inputs.answers:
        for record in files.read_lines(config.inputs.answers):
            answers.append((files.accepted_answers(record)[0], files.provenance(record)))
    elif library.worlds is not None:
        answers = [(answer, {}) for answer in library.worlds.answers()]
    else:
        raise UserError(
            f'recipe {config.recipe} needs answers, and there are none; name a file in '
            'config.inputs.answers'
        )
    ratio = config.schedule.hop_ratio
    hops = np.repeat(np.arange(len(ratio)) + 1, stratify(ratio, len(answers)))
    hops = identity_rng(config.seed, 0).permutation(hops)
    return [
        HiddenAnswer(answer, int(hop), origin=origin)
        for (answer, origin), hop in zip(answers, hops, strict=True)
    ]
