"""What games start from: documents to ask about, answers to hide, questions to solve; from files or from the corpus."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zeroplay_jax.objectives.schedules import stratify
from zeroplay_jax.selfplay import files
from zeroplay_jax.selfplay.corpus import Corpus, able
from zeroplay_jax.selfplay.engine import Draw, Step
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.types import Json, Task, UserError, identity_rng


class Documents:
    """Documents with a number of hops (or searches) each, drawn anew every step in the exact ratio."""

    def __init__(self, config, corpus: Corpus):
        self._seed, self._ratio, self._documents = config.seed, tuple(config.schedule.hop_ratio), corpus.documents
        self._by_hops = [able(corpus.documents, hops) for hops in range(1, len(self._ratio) + 1)]

    def tasks(self, step: Step, size: int) -> list[Task]:
        """`size` documents, each at most once as long as there are enough; a function of the arguments."""
        rng, items = identity_rng(self._seed, step.number), []
        taken: set[int] = set()
        for hops, count in enumerate(stratify(self._ratio, size), 1):
            chosen = self._by_hops[hops - 1]
            if count and not len(chosen):
                raise UserError(f'no document can open {hops} hops: lower config.schedule.hop_ratio there')
            # A few more than needed, so that enough are left when those of other hop counts are taken out.
            drawn = rng.choice(len(chosen), min(count + len(taken), len(chosen)), replace=False) if count else ()
            free = [i for i in (int(chosen[at]) for at in drawn) if i not in taken][:count]
            free += [int(chosen[int(at)]) for at in rng.integers(0, len(chosen), count - len(free))] if count else []
            taken.update(free)
            for document in (self._documents[i] for i in free):
                items.append(dict(title=document.title, text=document.text, hops=hops))
        return [Task((step.number, i), item) for i, item in enumerate(items)]


class Deck:
    """A list of items, dealt in an order shuffled anew each time it is through."""

    def __init__(self, items: Sequence[Json], seed: int):
        self._items, self._seed = items, seed

    def deal(self, begin: int, count: int) -> list[Json]:
        """Items number `begin` … of the endless sequence."""
        n = len(self._items)
        orders = {e: identity_rng(self._seed, e).permutation(n) for e in {i // n for i in range(begin, begin + count)}}
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
    return role.batch if role.filter_groups and draw.missing and draw.round < role.fill_rounds else 0


def questions(config, corpus: Corpus) -> list[Json]:
    """Training questions {'question', 'answers', 'hops'}: of `config.inputs.questions`, else of the training worlds."""
    if not config.inputs.questions:
        return list(corpus.train_questions)
    return files.questions(config.inputs.questions)


def answers(config, corpus: Corpus) -> list[Json]:
    """Answers to hide {'answer', 'hops'}: of `config.inputs.answers`, else of the training worlds; hops in ratio."""
    known = (
        [files.gold(r)[0] for r in files.read_lines(config.inputs.answers)] if config.inputs.answers else corpus.answers
    )
    hops = np.repeat(np.arange(len(config.schedule.hop_ratio)) + 1, stratify(config.schedule.hop_ratio, len(known)))
    hops = identity_rng(config.seed, 0).permutation(hops)
    return [dict(answer=answer, hops=int(h)) for answer, h in zip(known, hops, strict=True)]


def given_tasks(path: str) -> list[Json]:
    """Open tasks of a file, as SCOPE's solver takes them: {'question', 'rubrics', 'answers', 'hops'}."""
    found = files.read_lines(path, 'task', answered=False)
    for number, record in enumerate(found, 1):
        items = record.get('rubrics')
        if (
            not isinstance(items, list)
            or not items
            or not all(isinstance(text, str) and text.strip() for text in items)
        ):
            raise UserError(f'{path}, task {number}: "rubrics" must be a list of texts, one per thing to be graded')
    shaped = lambda texts: [{'text': text, 'priority': 'important'} for text in texts]
    return [dict(question=r['task'], rubrics=shaped(r['rubrics']), answers=[], hops=1) for r in found]
