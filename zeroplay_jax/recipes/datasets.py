"""What the tasks of recipes start from: documents to ask about, answers to hide, questions to solve."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zeroplay_jax.data import answer_fields, files
from zeroplay_jax.objectives.rewards import stratify
from zeroplay_jax.selfplay.library import Library, documents_for
from zeroplay_jax.selfplay.schedule import BatchCursor, Phase, QuestionPool, Step, in_epochs
from zeroplay_jax.settings.kinds import Problem
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Json, Question, Task, UserError, identity_rng

# (hops, task type) of a document.
Cell = tuple[int, str]


@dataclasses.dataclass(frozen=True)
class SeedDocument:
    """A document that a proposer starts from.

    Attributes:
      title, text: the passage.
      hops: number of facts that the question must need (SCOPE: of searches).
      task_type: type of the open task (SCOPE); '' where the file names none.
      link: name in the text about which there is another document, shown in brackets (Dr. Zero, π-Play); '' for none.
      origin: provenance for the logs.
    """

    title: str
    text: str
    hops: int
    task_type: str = ''
    link: str = ''
    origin: Json = dataclasses.field(default_factory=dict)

    @property
    def passage(self) -> dict[str, str]:
        """Title and text, as a passage of a search has them."""
        return {'title': self.title, 'text': self.text}

    def to_json(self) -> dict[str, Any]:
        """Returns the record of the task log."""
        record = {**self.passage, 'hops': self.hops, **self.origin}
        optional = {'link': self.link, 'type': self.task_type}
        return record | {name: value for name, value in optional.items() if value}

    @classmethod
    def from_json(cls, record: Json) -> SeedDocument:
        """Returns the document of a line of `inputs.documents`."""
        return cls(
            title=record['title'],
            text=record['text'],
            hops=record['hops'],
            task_type=record.get('type', ''),
            link=record.get('link', ''),
            origin=files.provenance(record),
        )


@dataclasses.dataclass(frozen=True)
class HiddenAnswer:
    """An answer for which a proposer invents a question (SSP).

    Attributes:
      answer: the text.
      hops: number of searches that the question must need.
      noise_from: identities of the tasks whose passages may be mixed into the answerability check, in this order.
      origin: provenance for the logs.
    """

    answer: str
    hops: int
    noise_from: tuple[tuple[int, int], ...] = ()
    origin: Json = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the record of the task log."""
        return {'answer': self.answer, 'hops': self.hops, **self.origin}


class DocumentSampler:
    """Samples documents, with hop counts in the exact ratio of `schedule.hop_ratio` in every step.

    They are drawn from the corpus for every step, or taken from the file `inputs.documents`. The types of
    `inputs.types` alternate.

    Args:
      config: of the run.
      library: of the run.
      phases: `Recipe.phases` of the recipe, called for a file when the first step begins; None: `alternate`.
    """

    def __init__(
        self,
        config: Config,
        library: Library,
        phases: Callable[[], Sequence[Phase]] | None = None,
    ):
        self._from_file: DocumentFile | None = None
        if config.inputs.documents:
            self._from_file = DocumentFile(config, phases or (lambda: alternate(config)))
            # With a file no documents of the corpus are needed: a search server has none.
            return
        self._seed = config.seed
        self._repeats = config.schedule.repeat_documents
        self._ratio = tuple(config.schedule.hop_ratio)
        self._types = tuple(config.inputs.types)
        self._documents = library.documents
        # Entry h − 1: indices of the documents from which a chain of h hops can start.
        self._usable: list[Sequence[int]] = [
            documents_for(library.documents, hops) for hops, _ in enumerate(self._ratio, 1)
        ]

    def tasks(self, step: Step, size: int) -> list[Task]:
        """Returns tasks on `size` documents, a function of the arguments.

        Within a step no document repeats while there are enough. Steps that draw from the corpus are independent of
        each other; a file is used up, per hop count and task type, before a document repeats. With
        `schedule.repeat_documents` the phases of an iteration have the same documents.

        Raises:
          UserError: no document can start a question of some hop count of the ratio.
        """
        if self._from_file:
            return self._from_file.tasks(step, size)
        drawn_for = (step.phase.iteration, step.index) if self._repeats else (step.number,)
        rng = identity_rng(self._seed, *drawn_for)
        seeds: list[SeedDocument] = []
        types = itertools.cycle(self._types)
        used: set[int] = set()
        # The ratio is exact in every batch. Dr. Zero's code draws hop counts independently, which
        # in a small batch leaves rare hop counts with a single proposal and nothing to compare it to.
        # One generator draws the whole batch, so the order of the hop counts is part of the random stream.
        for hops, count in enumerate(stratify(self._ratio, size), 1):
            indices = self._draw(rng, hops, count, used)
            used.update(indices)
            seeds += [self._seed_document(index, hops, next(types)) for index in indices]
        return numbered_tasks(step, seeds)

    def _draw(self, rng: np.random.Generator, hops: int, count: int, used: set[int]) -> list[int]:
        """Draws the indices of `count` documents for a hop count, outside `used` as far as possible."""
        usable = self._usable[hops - 1]
        if not count:
            return []
        if not len(usable):
            raise UserError(
                f'no document can start a question of {hops} hops: lower config.schedule.hop_ratio '
                'there'
            )
        # More than `count` are drawn, so that enough remain when those used for other hop counts are left out.
        draws = min(count + len(used), len(usable))
        positions = rng.choice(len(usable), draws, replace=False)
        candidates = [int(usable[position]) for position in positions]
        unused = [index for index in candidates if index not in used]
        indices = unused[:count]
        # A small corpus cannot fill the batch without repeats: missing documents are drawn with replacement.
        missing = count - len(indices)
        repeats = rng.integers(0, len(usable), missing)
        indices += [int(usable[position]) for position in repeats.tolist()]
        return indices

    def _seed_document(self, index: int, hops: int, task_type: str) -> SeedDocument:
        document = self._documents[index]
        # A document without an id has no provenance.
        origin = {'document_id': document.id} if document.id else {}
        return SeedDocument(document.title, document.text, hops, task_type, origin=origin)


class DocumentFile:
    """Documents of `inputs.documents` with the hops, and task types, that the file assigns.

    Every batch has the hops in the exact ratio of the config. Its types alternate, so their counts differ by one at
    most. No document repeats before all others with its hops and type were used.

    Args:
      config: of the run.
      phases: returns the recipe's schedule.

    Raises:
      UserError: a line is unusable, or no document has some hops or type that the config requires.
    """

    def __init__(self, config: Config, phases: Callable[[], Sequence[Phase]]):
        path = config.inputs.documents
        self._ratio = tuple(config.schedule.hop_ratio)
        self._config = config
        self._phases = phases
        # Cells are consumed independently of each other, because their shares in a batch are fixed
        # while the file may hold any number of documents of each.
        cells: dict[Cell, list[SeedDocument]] = {}
        # The default ('',) selects all types.
        wanted_types = set(config.inputs.types) - {''}
        # A document without a type gets the next one, per hop count, so that no cell stays empty.
        types = sorted(wanted_types or {''})
        untyped: collections.Counter[int] = collections.Counter()
        for record in files.documents(path):
            seed = SeedDocument.from_json(record)
            if not seed.task_type:
                next_type = types[untyped[seed.hops] % len(types)]
                seed = dataclasses.replace(seed, task_type=next_type)
                untyped[seed.hops] += 1
            cell = (seed.hops, seed.task_type)
            if not wanted_types or seed.task_type in wanted_types:
                cells.setdefault(cell, []).append(seed)
        self._types = sorted({task_type for _, task_type in cells})
        self._check(path, cells, wanted_types)
        self._cells = cells

    def _check(self, path: str, cells, wanted_types: set[str]) -> None:
        """Raises UserError if a type, or a hop count of some type, that the config requires has no document."""
        absent_types = wanted_types - set(self._types)
        if absent_types:
            raise UserError(
                f'{path}: no document of type {min(absent_types)!r}; correct config.inputs.types'
            )
        for hops in _hops_with_share(self._ratio):
            for task_type in self._types:
                if (hops, task_type) in cells:
                    continue
                of_type = f' of type {task_type!r}' if task_type else ''
                raise UserError(
                    f'{path}: no document{of_type} has {hops} hops, as {self._ratio} requires; build '
                    'the file with this ratio, or change config.schedule.hop_ratio'
                )

    def tasks(self, step: Step, size: int) -> list[Task]:
        """Returns tasks on the next `size` documents, a function of the arguments; UserError for an unknown phase."""
        used_before = self._used_before(step, size)
        seeds: list[SeedDocument] = []
        for cell, count in self._cell_counts(size).items():
            begin = used_before[cell]
            seeds += in_epochs(self._cells[cell], begin, count, self._config.seed)
        return numbered_tasks(step, seeds)

    def _cell_counts(self, size: int) -> collections.Counter[Cell]:
        """Returns how many documents of each (hops, type) a batch of `size` documents holds."""
        # Types alternate over the batch and not within each hop count, where the first type would get the odd
        # document of every hop count.
        types = itertools.cycle(self._types)
        return collections.Counter(zip(_stratified_hops(self._ratio, size).tolist(), types))

    def _used_before(self, step: Step, size: int) -> collections.Counter[Cell]:
        """Returns how many documents of each cell all earlier steps used; `size`: of a step of this kind of phase."""
        # This is computed from the schedule and not counted, so there is no state to checkpoint. Positions
        # continue across phases: until a cell is exhausted, generation does not repeat the documents that the
        # proposer trained on.
        used: collections.Counter[Cell] = collections.Counter()
        repeats = self._config.schedule.repeat_documents
        for phase in self._phases_of_documents() if repeats else self._phases():
            # Iteration and name identify a phase: `alternate` has each name once per iteration.
            same_iteration = phase.iteration == step.phase.iteration
            is_current = same_iteration and (repeats or phase.name == step.phase.name)
            steps = step.index if is_current else phase.steps
            # A recipe may give documents to phases that have none in turns.
            is_alike = phase.trains == step.phase.trains
            batch = size if is_alike else documents_of(self._config, phase)
            for cell, count in self._cell_counts(batch).items():
                used[cell] += count * steps
            if is_current:
                return used
        # Without this error every step of the unknown phase would get the same documents.
        raise UserError(
            f'config.inputs.documents: phase {step.phase.name!r} of the recipe is not in the schedule '
            'that DocumentSampler was given; pass it self.phases'
        )

    def _phases_of_documents(self) -> Iterable[Phase]:
        """Returns the longest phase with documents of every iteration."""
        longest: dict[int, Phase] = {}
        for phase in self._phases():
            if documents_of(self._config, phase):
                other = longest.setdefault(phase.iteration, phase)
                longest[phase.iteration] = max(other, phase, key=lambda each: each.steps)
        return longest.values()


def documents_of(config: Config, phase: Phase) -> int:
    """Returns on how many documents a step of a phase works, whatever the phase is called.

    `proposer.batch` if it trains the proposer, alone or with other roles; `pool.batch` if it trains no role, which
    generates questions; 0 if it trains other roles, on questions of the pool.
    """
    if 'proposer' in phase.trains:
        return config.proposer.batch
    return 0 if phase.trains else config.pool.batch


def tasks_in_turns(
    config: Config, documents: DocumentSampler, step: Step, pool: QuestionPool, cursor: BatchCursor
) -> list[Task]:
    """Returns the tasks of a step: what the phase trains decides about them (`documents_of`); [] ends the step.

    They are on documents, with hop counts in the exact ratio, or on the next questions of the pool, as many as the
    round needs (`_round_size`).
    """
    size = documents_of(config, step.phase)
    if not size:
        count = _round_size(config.solver, cursor)
        questions = pool.batch(config.seed, step.phase.iteration, cursor.drawn_in_phase, count)
        return numbered_tasks(step, questions, first=cursor.drawn_in_step)
    # Rejected proposals are not replaced: the proposer learns validity from their low rewards.
    if cursor.round > 0:
        return []
    # Generation ends.
    if not step.phase.trains and 0 < config.pool.target <= len(pool.questions):
        return []
    return documents.tasks(step, size)


def dataset_tasks(
    config: Config, questions: Sequence[Question], step: Step, cursor: BatchCursor
) -> list[Task]:
    """Returns the solver's tasks on the next of these questions, as many as the round needs; [] ends the step.

    They are reshuffled every epoch (`in_epochs`). The phase of an iteration continues behind the batches of earlier
    iterations, without what a filter drew on top. The tasks count as external.
    """
    count = _round_size(config.solver, cursor)
    earlier = step.phase.iteration * step.phase.steps * config.solver.batch
    taken = in_epochs(questions, earlier + cursor.drawn_in_phase, count, config.seed)
    return numbered_tasks(step, taken, first=cursor.drawn_in_step, external=True)


def numbered_tasks(
    step: Step, payloads: Sequence[Any], first: int = 0, external: bool = False
) -> list[Task]:
    """Returns one task per payload, with the identity (step number, index within the step); `first`: first index."""
    return [
        Task((step.number, index), payload, external)
        for index, payload in enumerate(payloads, first)
    ]


def _round_size(settings, cursor: BatchCursor) -> int:
    """Returns the number of tasks of a round; 0 ends the step.

    Round 0 takes as many as groups are missing. With the dynamic filter, further rounds take a whole batch each, which
    keeps the slots busy, until no group is missing or `fill_rounds` is reached.

    Args:
      settings: `config.<role>`.
    """
    if cursor.round == 0:
        return cursor.missing
    if not settings.filter_groups or not cursor.missing:
        return 0
    # The rounds are limited, because a policy that solves all questions, or none, yields no informative group.
    if cursor.round >= settings.fill_rounds:
        return 0
    return settings.batch


def _hops_with_share(ratio: Sequence[float]) -> list[int]:
    """Returns the hop counts to which a ratio gives a share above 0."""
    return [hops for hops, share in enumerate(ratio, 1) if share]


def _stratified_hops(ratio: Sequence[float], size: int) -> np.ndarray:
    """Returns the hop counts of `size` items in the exact ratio, ascending."""
    return np.repeat(np.arange(len(ratio)) + 1, stratify(ratio, size))


def training_questions(config: Config, library: Library) -> list[Question]:
    """Returns the questions of the file `inputs.questions`, or without one those of the training worlds.

    Raises:
      UserError: there is neither a file nor a miniature world, or a line is unusable.
    """
    if config.inputs.questions:
        return files.questions(config.inputs.questions)
    if library.worlds is None:
        raise UserError(
            f'recipe {config.recipe} needs questions, and there are none; name a file in '
            'config.inputs.questions'
        )
    hops = _hops_with_share(config.schedule.hop_ratio)
    return library.worlds.questions(config.inputs.world_questions, hops)


def hidden_answers(config: Config, library: Library) -> list[HiddenAnswer]:
    """Returns the answers of the file `inputs.answers`, or without one those of the training worlds.

    Over all of them, hops are in the exact ratio of `schedule.hop_ratio`, in random order.

    Raises:
      UserError: there is neither a file nor a miniature world, or a line is unusable.
    """
    # (answer, provenance). SSP's gates compare with one text, so the first accepted answer is used.
    answers: list[tuple[str, Json]] = []
    if config.inputs.answers:
        for record in files.read_lines(config.inputs.answers):
            answers.append((answer_fields.accepted_answers(record)[0], files.provenance(record)))
    elif library.worlds is not None:
        answers = [(answer, {}) for answer in library.worlds.answers()]
    else:
        raise UserError(
            f'recipe {config.recipe} needs answers, and there are none; name a file in '
            'config.inputs.answers'
        )
    # Hops are shuffled, because a file may be sorted: a topic must not always get the same hop count.
    hops = _stratified_hops(config.schedule.hop_ratio, len(answers))
    pairs = zip(answers, identity_rng(config.seed, 0).permutation(hops).tolist(), strict=True)
    return [HiddenAnswer(answer, hops, origin=origin) for (answer, origin), hops in pairs]


def is_trained(config: Config, role: str, iteration: int) -> bool:
    """Returns whether a role is trained in this iteration (`config.<role>.train_iterations`; -1: always)."""
    limit = config[role].train_iterations
    return limit < 0 or iteration < limit


def generation_steps(config: Config) -> int:
    """Returns the number of generation steps of an iteration: `pool.batches` or, at 0, as many as the solver needs."""
    # A document gives at most one question. Rounded up, so that no question is trained on twice if none is rejected
    # or filtered.
    solver, pool = config.solver, config.pool
    return pool.batches or math.ceil(solver.steps * solver.batch / pool.batch)


def check_generation(config: Config) -> Iterator[Problem]:
    """Yields a `pool.target` that an iteration cannot reach, and steps that cannot repeat each other's documents."""
    if config.schedule.repeat_documents and config.pool.batch != config.proposer.batch:
        text = f'steps of {config.proposer.batch} documents (proposer.batch) are repeated; give as many'
        yield Problem('pool.batch', text)
    documents = generation_steps(config) * config.pool.batch
    if config.pool.target > documents:
        text = f'a document gives one question at most, and an iteration reads {documents}; raise pool.batches'
        yield Problem(
            'pool.target', f'{text} (generation steps) or pool.batch (documents per step)'
        )


def alternate(config: Config) -> list[Phase]:
    """Returns iterations × (proposer is trained, proposer generates questions, solver is trained on them).

    After its `train_iterations` a role has no phase of its own; questions are generated all the same.
    """
    steps = generation_steps(config)
    phases: list[Phase] = []
    for iteration in range(config.schedule.iterations):
        iteration_phases = (
            Phase('proposer', config.proposer.steps, ('proposer',)),
            # clear_pool_every is a period in steps: with the length of the phase, the pool is cleared once, at its
            # first step, so that the solver trains on questions of the latest proposer.
            Phase('generate', steps, clear_pool_every=steps),
            Phase('solver', config.solver.steps, ('solver',)),
        )
        for phase in iteration_phases:
            # 'generate' trains no role, so it is in every iteration.
            if all(is_trained(config, role, iteration) for role in phase.trains):
                phases.append(dataclasses.replace(phase, iteration=iteration))
    return phases


def simultaneous(
    config, steps: int, roles: tuple[str, ...], clear_pool_every: int = 0
) -> list[Phase]:
    """Returns one phase per iteration, in which every step trains all of `roles`, in this order.

    A phase leaves out a role whose `train_iterations` are over.

    Args:
      steps: steps per phase.
      clear_pool_every: see `Phase`.
    """
    phases: list[Phase] = []
    for iteration in range(config.schedule.iterations):
        # A role that is no longer trained still makes rollouts (SSP's ablations with a fixed proposer or solver).
        trained = tuple(role for role in roles if is_trained(config, role, iteration))
        phases.append(Phase('selfplay', steps, trained, iteration, clear_pool_every))
    return phases
