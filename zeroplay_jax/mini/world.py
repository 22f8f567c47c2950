"""The miniature world: a small synthetic encyclopedia in plain English, generated from a seed.

A world contains people, cities, countries, books, companies, rivers and currencies. Each has a passage: a title and
two or three short sentences, each of which ends with the value of one relation. A question composes one to six
relations ('What is the birthplace of the author of Gumu?').

All names are invented. No name occurs in both splits or in two worlds of a split, so one index can hold the passages
of many worlds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator

from zeroplay_jax.mini.facts import CLOSED, RELATIONS, Fact, rubrics_of
from zeroplay_jax.mini.names import NAMES_PER_WORLD, name_pairs, pick, shuffled
from zeroplay_jax.types import UserError

Item = dict[str, Any]  # a question or an open task
DEFAULT_HOPS = (1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Passage:
    """One document.

    Attributes:
      id: unique over all worlds and splits, such as 'train-0-17'.
      title: name of the entity.
      text: two or three sentences.
    """

    id: str
    title: str
    text: str


class World:
    """One encyclopedia. All of it is a deterministic function of the constructor's arguments.

    Attributes:
      passages: list of Passage, shuffled.
      titles: the titles of `passages`, in the same order.
      facts: title → relation → value, near misses included.
      kinds: title → kind.
      originals: title of a near miss → title that it resembles.
    """

    def __init__(self, seed: int, split: str = 'train', near_misses: float = 0.25, deal: int = 0):
        """Generates the world.

        Args:
          seed: index of the world, from 0; two worlds of a split share no name.
          split: 'train' or 'evaluation'; they share no name.
          near_misses: share of the entities that get a distractor: a document with a similar title and other facts.
          deal: seed of the facts that the same names get. Self-play and evaluation use 0, the base checkpoint is
            trained on other deals.

        Raises:
          UserError: a seed for which no names are left.
        """
        # The names of a split are finite, and worlds do not share them.
        last_seed = worlds_available(split) - 1
        if not 0 <= seed <= last_seed:
            raise UserError(
                f'World(seed={seed}, split={split!r}): the names suffice for seeds 0 to {last_seed}'
            )
        self.seed = seed
        self.split = split
        self._rng = np.random.default_rng([seed, split == 'evaluation', deal])
        # Each pair of similar names gives one entity and the title of its possible near miss.
        self._names: dict[str, list[str]] = {}
        similar_names: dict[str, str] = {}
        for kind, count in NAMES_PER_WORLD.items():
            # Consecutive slices, so that no name occurs in two worlds.
            first = seed * count
            pairs = name_pairs(split, kind)[first : first + count]
            self._names[kind] = [name for name, _ in pairs]
            similar_names.update(pairs)

        # All names are chosen before any fact: a fact may name every entity but the similar ones. Kinds without
        # relations (languages, mountains, lakes) are values only.
        self.facts: dict[str, dict[str, str]] = {}
        self.kinds: dict[str, str] = {}
        for kind in RELATIONS:
            for name in self._names[kind]:
                self._add_entity(name, kind, excluded_facts={})

        # The facts of a near miss differ from the original's: a reader who confuses the two answers incorrectly.
        self.originals: dict[str, str] = {}
        entities = list(self.facts)
        near_miss_count = round(near_misses * len(entities))
        for original in shuffled(self._rng, entities)[:near_miss_count]:
            near_miss = similar_names[original]
            self.originals[near_miss] = original
            kind = self.kinds[original]
            self._add_entity(near_miss, kind, excluded_facts=self.facts[original])

        # Shuffled, or the position in the index would tell a near miss from an original.
        self.titles = tuple(shuffled(self._rng, list(self.facts)))
        self.passages = []
        for i, title in enumerate(self.titles):
            text = self._write_text(title)
            self.passages.append(Passage(f'{split}-{seed}-{i}', title, text))

    def _add_entity(self, name: str, kind: str, excluded_facts: dict[str, str]) -> None:
        """Draws the facts of an entity, none of them equal to the excluded fact of the same relation."""
        self.kinds[name] = kind
        self.facts[name] = {}
        for relation, (_, value_kind) in RELATIONS[kind].items():
            # No entity is a value of itself: nobody is their own teacher.
            excluded_values = (name, excluded_facts.get(relation))
            candidates = CLOSED.get(value_kind) or self._names[value_kind]
            values = [value for value in candidates if value not in excluded_values]
            self.facts[name][relation] = pick(self._rng, values)

    def _write_text(self, name: str) -> str:
        """Returns one sentence per fact, in random order; only the first one contains the name."""
        kind = self.kinds[name]
        # The pronoun is drawn for people only, and before the order: another order of draws would change all texts.
        pronoun = 'It'
        if kind == 'person':
            pronoun = pick(self._rng, ('He', 'She'))
        sentences = []
        # A reader has to resolve the pronoun of all sentences but the first.
        subject = name
        for relation in shuffled(self._rng, list(RELATIONS[kind])):
            sentence, _ = RELATIONS[kind][relation]
            value = self.facts[name][relation]
            sentences.append(sentence.format(s=subject, v=value))
            subject = pronoun
        return ' '.join(sentences)

    def chain(self, hops: int, rng: Generator) -> list[Fact] | None:
        """Returns a random chain of facts in which each value is the next entity.

        Args:
          hops: number of steps, at least 1.
          rng: source of randomness.

        Returns:
          The steps, or None if there is no chain of that length. No entity occurs twice, and the question's text does
          not contain the answer.
        """
        for title in shuffled(rng, self.titles):
            chain = self._extend([], title, hops, rng)
            if chain is not None:
                return chain
        return None

    def _extend(
        self, prefix: list[Fact], entity: str, hops: int, rng: Generator
    ) -> list[Fact] | None:
        """Returns `prefix` and `hops` more steps from `entity` on, by randomised depth-first search, or None."""
        # A value such as 'poet' has no passage and hence no relations.
        relations = list(self.facts.get(entity, ()))
        for relation in shuffled(rng, relations):
            value = self.facts[entity][relation]
            chain = [*prefix, Fact(entity, relation, value)]
            # A cycle would make the question longer but no harder.
            visited = [step.entity for step in chain]
            if value in visited:
                continue
            if hops == 1:
                # A substring test, since a question about 'Lomin' would leak the answer 'Lomi'.
                if value.lower() not in question(chain).lower():
                    return chain
                continue
            longer_chain = self._extend(chain, value, hops - 1, rng)
            if longer_chain is not None:
                return longer_chain
        return None

    def value(self, entity: str, relation: str) -> str | None:
        """Returns the value of a relation, or None if the entity does not have it."""
        return self.facts.get(entity, {}).get(relation)

    def resolve(self, text: str) -> tuple[str | None, int]:
        """Returns (answer, hops) of a question in the world's form; notebooks/03_selfplay.ipynb grades with it.

        The answer is None if a fact is missing; the result is (None, 0) if the text has another form.
        """
        # Relations and names are single words, as `question` writes them.
        match = re.fullmatch(r'What is ((?:the \w+ of )+)(\w+)\?', text.strip())
        if not match:
            return None, 0
        relations = re.findall(r'the (\w+) of', match[1])
        value: str | None = match[2]
        # The relation next to the entity is applied first.
        for relation in reversed(relations):
            if value is None:
                break
            value = self.value(value, relation)
        return value, len(relations)


def worlds_available(split: str) -> int:
    """Returns how many worlds the names of a split suffice for; the kind whose names run out first limits it."""
    worlds_by_kind = []
    for kind, names_per_world in NAMES_PER_WORLD.items():
        pairs = name_pairs(split, kind)
        worlds_by_kind.append(len(pairs) // names_per_world)
    return min(worlds_by_kind)


def phrase(chain: Sequence[Fact]) -> str:
    """Returns the noun phrase of a chain: 'the birthplace of the author of Gumu'."""
    # English nests outwards: the last relation of the chain is named first.
    relations = [f'the {step.relation} of' for step in reversed(chain)]
    return ' '.join(relations) + f' {chain[0].entity}'


def question(chain: Sequence[Fact]) -> str:
    """Returns the question that the last value answers: 'What is the birthplace of the author of Gumu?'."""
    return f'What is {phrase(chain)}?'


def evaluation_questions(
    worlds: Sequence[World], per_hop: int, hops: Sequence[int] = DEFAULT_HOPS, seed: int = 0
) -> list[Item]:
    """Returns random distinct questions with known answers, spread evenly over the worlds.

    Args:
      worlds: the worlds to ask about.
      per_hop: number of questions per hop count.
      hops: hop counts.
      seed: seed of the draw.

    Returns:
      List of {'question': str, 'answers': [str], 'hops': int, 'world': seed of the world}, by hop count in the
      order of `hops`.

    Raises:
      UserError: the worlds do not have that many distinct questions.
    """
    return _draw_distinct(_draw_question, 'question', worlds, per_hop, hops, seed)


def evaluation_tasks(
    worlds: Sequence[World], per_hop: int, hops: Sequence[int] = DEFAULT_HOPS, seed: int = 0
) -> list[Item]:
    """Returns random distinct open tasks: to describe the entity at the end of a chain of hops − 1 facts.

    Args:
      worlds: the worlds to ask about.
      per_hop: number of tasks per hop count.
      hops: numbers of passages to read, the described one included.
      seed: seed of the draw.

    Returns:
      List of {'question': the task, 'rubrics': one per fact of the passage, 'answers': [], 'hops': int,
      'world': seed of the world}, by hop count in the order of `hops`.

    Raises:
      UserError: the worlds do not have that many distinct tasks.
    """
    return _draw_distinct(_draw_task, 'task', worlds, per_hop, hops, seed)


def _draw_question(world: World, hops: int, rng: Generator) -> Item | None:
    """Returns a random question, or None if the world has no chain of this length."""
    chain = world.chain(hops, rng)
    if chain is None:
        return None
    return {'question': question(chain), 'answers': [chain[-1].value]}


def _draw_task(world: World, hops: int, rng: Generator) -> Item | None:
    """Returns a random open task; None if there is no such chain or the entity at its end has no passage.

    `hops` counts passages: a chain of hops − 1 facts leads to the entity, whose own passage is the last one to read.
    """
    if hops == 1:
        title = pick(rng, world.titles)
        subject = title
    else:
        chain = world.chain(hops - 1, rng)
        # A value without a passage, such as a metal, cannot be described.
        if chain is None or chain[-1].value not in world.facts:
            return None
        title = chain[-1].value
        subject = phrase(chain)
    # Titles and passages have the same order.
    passage = world.passages[world.titles.index(title)]
    return {
        'question': f'Describe {subject}.',
        'rubrics': rubrics_of(passage.text),
        'answers': [],
    }


def _draw_distinct(
    draw: Callable[[World, int, Generator], Item | None],
    noun: str,
    worlds: Sequence[World],
    per_hop: int,
    hops: Sequence[int],
    seed: int,
) -> list[Item]:
    """Returns `per_hop` distinct items per hop count, drawn from the worlds in turn.

    Args:
      draw: returns a random item of a world with a number of hops, or None if the attempt failed.
      noun: what an item is called in errors: 'question' or 'task'.
      worlds, per_hop, hops, seed: as in `evaluation_questions`.

    Raises:
      UserError: the worlds do not have that many distinct items.
    """
    items = []
    for hop_count in hops:
        # One stream per hop count: the items of one do not depend on the other hop counts.
        rng = np.random.default_rng([seed, hop_count])
        seen_questions: set[str] = set()
        # Near exhaustion most draws repeat earlier items, so the number of attempts is limited.
        for attempt in range(20 * per_hop):
            if len(seen_questions) == per_hop:
                break
            # Round robin: no world contributes more than its share.
            world = worlds[attempt % len(worlds)]
            item = draw(world, hop_count, rng)
            if item is None or item['question'] in seen_questions:
                continue
            seen_questions.add(item['question'])
            items.append({**item, 'hops': hop_count, 'world': world.seed})
        if len(seen_questions) < per_hop:
            raise UserError(
                f'evaluation_{noun}s: {len(worlds)} worlds gave only {len(seen_questions)} distinct '
                f'{hop_count}-hop {noun}s of {per_hop}; give more worlds or ask for fewer {noun}s'
            )
    return items
