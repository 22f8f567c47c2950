"""What games start from: documents to ask about, answers to hide, questions to solve; from files or from the corpus."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from zeroplay_jax.objectives.schedules import stratify
from zeroplay_jax.selfplay import files
from zeroplay_jax.selfplay.corpus import Corpus, able
from zeroplay_jax.selfplay.engine import Draw, Step
from zeroplay_jax.selfplay.phases import alternate
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.types import Json, Task, UserError, identity_rng


class Documents:
    """Documents with a number of hops (or searches) each, in the exact ratio in every step.

    Drawn anew from the corpus every step, or dealt from the file `config.inputs.documents`, which assigns the hops.
    """

    def __init__(self, config, corpus: Corpus):
        self._assigned = Assigned(config) if config.inputs.documents else None
        self._seed, self._ratio, self._documents = (
            config.seed,
            tuple(config.schedule.hop_ratio),
            corpus.documents,
        )
        self._by_hops = [able(corpus.documents, hops) for hops in range(1, len(self._ratio) + 1)]

    def tasks(self, step: Step, size: int) -> list[Task]:
        """`size` documents, each at most once as long as there are enough; a function of the arguments."""
        if self._assigned:
            return self._assigned.tasks(step, size)
        rng, items = identity_rng(self._seed, step.number), []
        taken: set[int] = set()
        for hops, count in enumerate(stratify(self._ratio, size), 1):
            chosen = self._by_hops[hops - 1]
            if count and not len(chosen):
                raise UserError(
                    f'no document can open {hops} hops: lower config.schedule.hop_ratio there'
                )
            # A few more than needed, so that enough are left when those of other hop counts are taken out.
            drawn = (
                rng.choice(len(chosen), min(count + len(taken), len(chosen)), replace=False)
                if count
                else ()
            )
            free = [i for i in (int(chosen[at]) for at in drawn) if i not in taken][:count]
            free += (
                [int(chosen[int(at)]) for at in rng.integers(0, len(chosen), count - len(free))]
                if count
                else []
            )
            taken.update(free)
            for document in (self._documents[i] for i in free):
                named = {'document_id': document.id} if document.id else {}
                items.append(dict(title=document.title, text=document.text, hops=hops) | named)
        return [Task((step.number, i), item) for i, item in enumerate(items)]


class Assigned:
    """Documents of a file with the hops, and kinds of task where it has some, that they were given there.

    Every batch holds the hops in the ratio of the config exactly, and of every kind as many or one more. No document
    comes again before all others with its hops and kind were there.

    Raises:
      UserError: a line that cannot be used, or hops that the config asks for and no document has.
    """

    def __init__(self, config):
        path, self._ratio = config.inputs.documents, tuple(config.schedule.hop_ratio)
        self._phases = alternate(config)
        self._sizes = dict(proposer=config.proposer.batch, generate=config.pool.batch)
        cells = collections.defaultdict(list)  # (hops, kind) → documents
        only = set(config.inputs.types) - {''}
        for item in files.documents(path):
            if not only or item.get('type', '') in only:
                cells[item['hops'], item.get('type', '')].append(item)
        if only - {kind for _, kind in cells}:
            raise UserError(
                f'{path}: no document of type {min(only - {k for _, k in cells})!r}; mend inputs.types'
            )
        self._types = sorted({kind for _, kind in cells})
        asked = [hops for hops, share in enumerate(self._ratio, 1) if share]
        for hops, kind in ((h, kind) for h in asked for kind in self._types):
            if (hops, kind) not in cells:
                of = f' of type {kind!r}' if kind else ''
                mend = 'build the file with this ratio, or change config.schedule.hop_ratio'
                raise UserError(
                    f'{path}: no document{of} has {hops} hops, as {self._ratio} asks for; {mend}'
                )
        self._decks = {cell: Deck(items, config.seed) for cell, items in sorted(cells.items())}

    def tasks(self, step: Step, size: int) -> list[Task]:
        """`size` documents; a function of the arguments."""
        begin, items = self._dealt_before(step), []
        for (hops, kind), count in self._shares(size).items():
            items += self._decks[hops, kind].deal(begin[hops, kind], count)
        return [Task((step.number, i), item) for i, item in enumerate(items)]

    def _shares(self, size: int) -> collections.Counter[tuple[int, str]]:
        """How many of each (hops, kind) a batch of so many holds: kinds in turn over the whole batch."""
        hops = np.repeat(np.arange(len(self._ratio)) + 1, stratify(self._ratio, size))
        return collections.Counter(
            (int(h), self._types[i % len(self._types)]) for i, h in enumerate(hops)
        )

    def _dealt_before(self, step: Step) -> collections.Counter[tuple[int, str]]:
        """How many of each were dealt in all steps before this one."""
        dealt: collections.Counter[tuple[int, str]] = collections.Counter()
        for phase in self._phases:
            here = (phase.iteration, phase.name) == (step.phase.iteration, step.phase.name)
            for cell, count in self._shares(self._sizes.get(phase.name, 0)).items():
                dealt[cell] += count * (step.index if here else phase.steps)
            if here:
                break
        return dealt


class Deck:
    """A list of items, dealt in an order shuffled anew each time it is through."""

    def __init__(self, items: Sequence[Json], seed: int):
        self._items, self._seed = items, seed

    def deal(self, begin: int, count: int) -> list[Json]:
        """Items number `begin` … of the endless sequence."""
        n = len(self._items)
        orders = {
            e: identity_rng(self._seed, e).permutation(n)
            for e in {i // n for i in range(begin, begin + count)}
        }
        return [self._items[orders[i // n][i % n]] for i in range(begin, begin + count)]


def pool_tasks(config, step: Step, pool: TaskPool, draw: Draw) -> list[Task]:
    """A batch of the pool's questions; more of them while the filter leaves groups missing."""
    count = _wanted_now(config.solver, draw)
    items = pool.batch(config.seed, step.phase.iteration, draw.phase, count)
    return [Task((step.number, draw.step + i), item) for i, item in enumerate(items)]


def deck_tasks(config, deck: Deck, step: Step, draw: Draw) -> list[Task]:
    """A batch of questions that people or the world made; more while the filter leaves groups missing."""
    items = deck.deal(draw.phase, _wanted_now(config.solver, draw))
    return [Task((step.number, draw.step + i), item, outside=True) for i, item in enumerate(items)]


def _wanted_now(role, draw: Draw) -> int:
    """Items of a round: what is missing at first, then whole batches, which keep the slots busy."""
    if draw.round == 0:
        return draw.missing
    return (
        role.batch if role.filter_groups and draw.missing and draw.round < role.fill_rounds else 0
    )


def questions(config, corpus: Corpus) -> list[Json]:
    """Training questions {'question', 'answers', 'hops'}: of `config.inputs.questions`, else of the training worlds."""
    if not config.inputs.questions and not corpus.train_questions:
        raise UserError(
            f'recipe {config.recipe} is given questions, and there are none; name a file in inputs.questions'
        )
    if not config.inputs.questions:
        return list(corpus.train_questions)
    return files.questions(config.inputs.questions)


def answers(config, corpus: Corpus) -> list[Json]:
    """Answers to hide {'answer', 'hops', …provenance}: of `config.inputs.answers`, else of the training worlds.

    Hops come in the exact ratio over the whole list.
    """
    if config.inputs.answers:
        known = [
            dict(answer=files.gold(r)[0]) | files.provenance(r)
            for r in files.read_lines(config.inputs.answers)
        ]
    else:
        known = [dict(answer=answer) for answer in corpus.answers]
    hops = np.repeat(
        np.arange(len(config.schedule.hop_ratio)) + 1,
        stratify(config.schedule.hop_ratio, len(known)),
    )
    hops = identity_rng(config.seed, 0).permutation(hops)
    return [item | dict(hops=int(h)) for item, h in zip(known, hops, strict=True)]
