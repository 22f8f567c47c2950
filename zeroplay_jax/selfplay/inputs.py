"""What games start from: documents to ask about, answers to hide, questions to solve; from files or from the corpus.

Files are JSON lines. Answers of a line are a text or a list of texts under any of the names that public sets use, and
a list of texts from here on.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import numpy as np

from zeroplay_jax.objectives.schedules import stratify
from zeroplay_jax.selfplay.corpus import Corpus
from zeroplay_jax.selfplay.engine import Draw, Step
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.types import Json, Task, UserError, identity_rng

ANSWER_FIELDS = ('answers', 'golden_answers', 'answer', 'target')


class Documents:
    """Documents with a number of hops (or searches) each, drawn anew every step in the exact ratio."""

    def __init__(self, config, corpus: Corpus):
        self._seed, self._ratio = config.seed, tuple(config.schedule.hop_ratio)
        self._by_hops = [[d for d in corpus.documents if d.depth >= hops] for hops in range(1, len(self._ratio) + 1)]

    def tasks(self, step: Step, size: int) -> list[Task]:
        """`size` documents, each at most once as long as there are enough; a function of the arguments."""
        rng, items = identity_rng(self._seed, step.number), []
        taken: set[str] = set()
        for hops, count in enumerate(stratify(self._ratio, size), 1):
            documents = [d for d in self._by_hops[hops - 1] if d.title not in taken]
            if len(documents) < count:
                documents = self._by_hops[hops - 1]
            if count and not documents:
                raise UserError(
                    f'no document can open a question of {hops} hops: lower config.schedule.hop_ratio there'
                )
            picked = rng.choice(len(documents), count, replace=count > len(documents))
            taken |= {documents[d].title for d in picked}
            items += [dict(title=documents[d].title, text=documents[d].text, hops=hops) for d in picked]
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
    found = read_lines(config.inputs.questions, 'question')
    return [dict(question=r['question'], answers=gold(r), hops=int(r.get('hops', 1))) for r in found]


def answers(config, corpus: Corpus) -> list[Json]:
    """Answers to hide {'answer', 'hops'}: of `config.inputs.answers`, else of the training worlds; hops in ratio."""
    known = [gold(r)[0] for r in read_lines(config.inputs.answers)] if config.inputs.answers else corpus.answers
    hops = np.repeat(np.arange(len(config.schedule.hop_ratio)) + 1, stratify(config.schedule.hop_ratio, len(known)))
    hops = identity_rng(config.seed, 0).permutation(hops)
    return [dict(answer=answer, hops=int(h)) for answer, h in zip(known, hops, strict=True)]


def given_tasks(path: str) -> list[Json]:
    """Open tasks of a file, as SCOPE's solver takes them: {'question', 'rubrics', 'answers', 'hops'}."""
    found = read_lines(path, 'task', answered=False)
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


def read_lines(path: str, *required: str, answered: bool = True) -> list[Json]:
    """Objects of a JSON-lines file.

    Raises:
      UserError: no such file, or a line that is not an object with the required texts and, where `answered`, an
        answer; names the line.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding='utf-8').split('\n')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{path}: cannot be read ({error})') from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            missing = [name for name in required if not isinstance(record[name], str)]
            _ = answered and gold(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f'{path}, line {number}: {_wanted(required, answered)} ({error})') from None
        if missing:
            raise UserError(f'{path}, line {number}: {_wanted(required, answered)}')
        found.append(record)
    if not found:
        raise UserError(f'{path}: holds no line; {_wanted(required, answered)}')
    return found


def _wanted(required, answered):
    fields = [f'"{name}"' for name in required] + ['"answers" (a text or list of texts)'] * answered
    return f'every line must be a JSON object with {" and ".join(fields)}'


def gold(record: Json) -> list[str]:
    """Accepted answers of a line as a list of texts.

    Raises:
      ValueError: none, an empty one, or something that is no text.
    """
    field = next((name for name in ANSWER_FIELDS if name in record), None)
    value = record[field] if field else None
    if isinstance(value, dict):  # {'target': [...]} in verl's reward_model form
        value = value.get('target')
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(a, str) and a.strip() for a in listed):
        raise ValueError(f'no answers among the fields {", ".join(ANSWER_FIELDS)}')
    return list(listed)
