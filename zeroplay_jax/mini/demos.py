"""What the tiny checkpoint is shown: written-out episodes of every role, in a table.

A role is a row of ROLES: its share of the mixture and the function that writes one episode. Episodes are rendered
by the very functions that rollouts use (`rollout.prompts`, `rollout.tokens`, `rollout.tools`), and the passages in
them come from the real encoder over many worlds, so training text and rollout text are the same ids.

A space stands before every name, inside tags too, so that a name is always spelt with the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zeroplay_jax.mini.world import RELATION_NAMES, Step, World, phrase, question
from zeroplay_jax.retrieval.lexical import LexicalEncoder
from zeroplay_jax.rollout import prompts, tools
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.types import ENV, POLICY, PROMPT

Document = dict[str, str]  # {'title', 'text'}
SEARCH = tools.family('search_r1')
TOP_K = 3
OBSERVATION_TOKENS = 128
# Relations whose value the uneven solver takes from another sentence.
WEAK = frozenset(RELATION_NAMES[1::2])


@dataclasses.dataclass(frozen=True)
class Uneven:
    """How often the demonstrations go wrong; all 0 is the clean checkpoint. Shares from 0 to 1.

    Attributes:
      early: the solver answers with the entity it has just found although the question goes on (per hop).
      confuse: it reads a neighbouring fact (per reading of a relation in WEAK).
      no_think: the proposer leaves its thoughts out.
      hops: the proposer asks for fewer or more hops than it was told.
      form: the proposer's question or answer is not readable.
    """

    early: float = 0.0
    confuse: float = 0.0
    no_think: float = 0.0
    hops: float = 0.0
    form: float = 0.0


class Library:
    """Some worlds and a search over all their passages, by exact scores of the real encoder.

    Attributes:
      worlds: tuple of World.
    """

    def __init__(self, seeds: Sequence[int], split: str, deal: int):
        self.worlds = tuple(World(int(seed), split, deal=deal) for seed in seeds)
        passages = [p for world in self.worlds for p in world.passages]
        self.documents: list[Document] = [{'title': p.title, 'text': p.text} for p in passages]
        self._encoder = LexicalEncoder()
        titles = [p.title for p in passages]
        self._matrix = self._encoder.encode_passages(titles, [p.text for p in passages])
        self._found: dict[str, list[int]] = {}
        self._remember(titles)

    def _remember(self, queries):
        scores = self._encoder.encode_queries(queries) @ self._matrix.T
        best = np.argsort(-scores, 1, kind='stable')[:, :TOP_K]
        self._found |= {query: row.tolist() for query, row in zip(queries, best, strict=True)}

    def search(self, query: str) -> list[Document]:
        """The TOP_K passages nearest to a query, best first."""
        if query not in self._found:
            self._remember([query])
        return [self.documents[i] for i in self._found[query]]

    def document(self, title: str) -> Document:
        """The passage of that title."""
        return next(d for d in self.search(title) if d['title'] == title)


@dataclasses.dataclass
class Demo:
    """One episode: the opening chat (role and fields, or None) and what follows it, in order.

    A part is a text and who wrote it; ENV parts hold passages instead of text.
    """

    role: str | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parts: list[tuple[Any, int]] = dataclasses.field(default_factory=list)

    def say(self, text: str) -> Demo:
        self.parts.append((text, POLICY))
        return self

    def look_up(self, library: Library, think: str, query: str) -> list[Document]:
        """A searching turn and the passages it brought."""
        found = library.search(query)
        self.say(f'<think> {think}</think>' * bool(think) + SEARCH.call_text([f' {query}']))
        self.parts.append((found, ENV))
        return found

    def finish(self, think: str, **tags: str) -> Demo:
        """The last turn: a thought and one block per tag."""
        blocks = ''.join(f'<{tag}> {text}</{tag}>' for tag, text in tags.items())
        return self.say(f'<think> {think}</think>' * bool(think) + blocks + '<|im_end|>')


def render(codec: Codec, demo: Demo) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their sources of an episode, (int32 [T], int8 [T])."""
    ids, source = [], []
    parts = list(demo.parts)
    if demo.role is not None:
        opening = codec.render(prompts.messages('mini', demo.role, **demo.fields))
        ids, source = [opening], [np.full(len(opening), PROMPT, np.int8)]
    for part, who in parts:
        new = (
            SEARCH.observation(codec, [part], OBSERVATION_TOKENS)
            if who == ENV
            else codec.encode(part)
        )
        ids.append(np.asarray(new, np.int32))
        source.append(np.full(len(new), who, np.int8))
    return np.concatenate(ids), np.concatenate(source)


def _pick(rng: np.random.Generator, values):
    return values[int(rng.integers(len(values)))]


def _draw(library, rng, hops=None, shares=(0.3, 0.3, 0.25, 0.15)) -> tuple[World, list[Step]]:
    hops = hops or 1 + int(rng.choice(len(shares), p=shares))
    world = _pick(rng, library.worlds)
    return world, world.chain(hops, rng)


def _statement(chain: Sequence[Step]) -> str:
    return f'{phrase(chain)} is {chain[-1][2]}'


def _ask(demo: Demo, world, titles, count, rng) -> Demo:
    """Adds `count` single facts about some of `titles`; only the value is the policy's to say."""
    for _ in range(count):
        title = _pick(rng, titles)
        relation, value = _pick(rng, list(world.facts[title].items()))
        demo.parts.append((f'<think> {_statement([(title, relation, "")])}'.rstrip(), PROMPT))
        demo.say(f' {value}').parts.append(('</think>', PROMPT))
    return demo


def _reordered(text: str, rng) -> str:
    sentences = text.split('. ')
    return ' '.join(sentences[i].rstrip('.') + '.' for i in rng.permutation(len(sentences)))


def copy(library: Library, rng: np.random.Generator, uneven: Uneven) -> Demo:
    """A passage and the same again with its sentences in another order: nearly every token is there to be found.

    Practice this dense forms the heads that copy names within a few hundred steps; single facts alone take
    several times as long.
    """
    text = _pick(rng, _pick(rng, library.worlds).passages).text
    return Demo(parts=[(f' {text}\n', PROMPT)]).say(f' {_reordered(text, rng)}\n')


def passage(library: Library, rng: np.random.Generator, uneven: Uneven) -> Demo:
    """A single passage and what it says."""
    world = _pick(rng, library.worlds)
    title = _pick(rng, world.titles)
    return _ask(Demo(parts=[([library.document(title)], ENV)]), world, [title], 3, rng)


def reading(library: Library, rng: np.random.Generator, uneven: Uneven) -> Demo:
    """The passages of a search and what they say."""
    world = _pick(rng, library.worlds)
    shown = library.search(_pick(rng, world.titles))
    known = [d['title'] for d in shown if d['title'] in world.facts]
    return _ask(Demo(parts=[(shown, ENV)]), world, known, 6, rng)


def retelling(library: Library, rng: np.random.Generator, uneven: Uneven) -> Demo:
    """The passages of a search, and two of them told again by title."""
    shown = library.search(_pick(rng, _pick(rng, library.worlds).titles))
    demo = Demo(parts=[(shown, ENV)])
    for document in [shown[i] for i in rng.permutation(len(shown))][:2]:
        demo.parts.append((f'<think> {document["title"]}</think>', PROMPT))
        demo.say(f'<answer> {_reordered(document["text"], rng)}</answer>')
    return demo


def _read(world, step, rng, uneven):
    """Value of a step as the (uneven) reader sees it."""
    entity, relation, value = step
    if relation in WEAK and rng.random() < uneven.confuse:
        others = list(world.facts[entity].values())
        return others[(others.index(value) + 1) % len(others)]
    return value


def _solve(demo: Demo, library, world, chain, rng, uneven) -> Demo:
    """Searches along a chain, carrying what is left of the question in the thoughts, and answers."""
    rest = list(chain)
    while True:
        entity, relation, _ = rest[0]
        demo.look_up(library, phrase(rest), entity)
        value = _read(world, rest[0], rng, uneven)
        on = len(rest) > 1 and value in world.facts and rest[1][1] in world.facts[value]
        if not on or rng.random() < uneven.early:
            return demo.finish(f'the {relation} of {entity} is {value}', answer=value)
        # After a slip the question goes on from the wrong entity.
        relations, rest = [r for _, r, _ in rest[1:]], []
        for r in relations:
            following = world.facts.get(value, {}).get(r, '')
            rest.append((value, r, following))
            value = following


def solver(library: Library, rng: np.random.Generator, uneven: Uneven) -> Demo:
    """Question → searches → answer."""
    world, chain = _draw(library, rng)
    return _solve(Demo('solver', {'question': question(chain)}), library, world, chain, rng, uneven)


def solver_with_path(library: Library, rng: np.random.Generator, uneven: Uneven) -> Demo:
    """The same beside the path that leads to the answer, whole or only its beginning; never uneven."""
    world, chain = _draw(library, rng)
    path = [chain[0][0]] + [value for _, _, value in chain]
    path = path[: int(rng.integers(2, len(path) + 1))] if rng.random() < 0.3 else path
    demo = Demo('solver_with_path', {'path': ' > '.join(path), 'question': question(chain)})
    return _solve(demo, library, world, chain, rng, Uneven())


def proposer(library: Library, rng: np.random.Generator, uneven: Uneven) -> Demo:
    """Hops and a document → one search fewer than hops → question and answer."""
    world, chain = _draw(library, rng, shares=(0.3, 0.27, 0.25, 0.18))
    start, asked = chain[0][0], len(chain)
    if rng.random() < uneven.hops:
        chain = (
            world.chain(int(_pick(rng, [h for h in (1, 2, 3) if h != asked])), rng, start) or chain
        )
    silent = rng.random() < uneven.no_think
    thought = lambda steps: '' if silent else _statement(steps)
    demo = Demo(
        'proposer', {'hops': asked, 'document': prompts.document_text(library.document(start))}
    )
    for i in range(1, len(chain)):
        demo.look_up(library, thought(chain[:i]), chain[i][0])
    tags = {'question': question(chain), 'answer': chain[-1][2]}
    if rng.random() < uneven.form:
        tags = {'question': tags['question']} if rng.random() < 0.5 else {'answer': tags['answer']}
    return demo.finish(thought(chain), **tags)


def proposer_from_answer(library: Library, rng: np.random.Generator, uneven: Uneven) -> Demo:
    """Answer and hops → searches backwards, from a value to a passage that names it → question and answer."""
    while True:
        hops = 1 + int(rng.choice(3, p=(0.4, 0.35, 0.25)))
        world, seed = _draw(library, rng, hops=1)
        answer = seed[0][2]
        demo = Demo('proposer_from_answer', {'hops': hops, 'answer': answer})
        chain: list[Step] = []
        for _ in range(hops):
            value = chain[0][0] if chain else answer
            found = demo.look_up(library, _statement(chain) if chain else answer, value)
            steps = [
                (d['title'], relation, value)
                for d in found
                for relation, v in world.facts.get(d['title'], {}).items()
                if v == value and d['title'] not in {e for e, _, _ in chain}
            ]
            if not steps:
                break
            chain = [_pick(rng, steps), *chain]
        if len(chain) == hops and answer.lower() not in question(chain).lower():
            return demo.finish(_statement(chain), question=question(chain), answer=answer)


def answer_from_documents(library: Library, rng: np.random.Generator, uneven: Uneven) -> Demo:
    """Question and documents, some of them beside the point → answer without a search."""
    world, chain = _draw(library, rng, shares=(0.4, 0.35, 0.25, 0.0))
    shown = [library.document(e) for e, _, _ in chain]
    shown += [_pick(rng, library.documents) for _ in range(int(rng.integers(0, 4)))]
    shown = [shown[i] for i in rng.permutation(len(shown))]
    fields = {'documents': tools.passages_text([shown], 'search_r1'), 'question': question(chain)}
    thought = '. '.join(
        f'the {relation} of {entity} is {value}' for entity, relation, value in chain
    )
    return Demo('answer_from_documents', fields).finish(thought, answer=chain[-1][2])


def _described(library, rng):
    """A chain that ends at something with a passage of its own, or a single entity: (steps, title)."""
    hops = int(rng.choice(3, p=(0.35, 0.4, 0.25)))
    while True:
        world = _pick(rng, library.worlds)
        if not hops:
            return [], _pick(rng, world.titles)
        chain = world.chain(hops, rng)
        if chain[-1][2] in world.facts:
            return chain, chain[-1][2]


def challenger(library: Library, rng: np.random.Generator, uneven: Uneven) -> Demo:
    """Hops and a document → searches → an open task."""
    chain, title = _described(library, rng)
    start = chain[0][0] if chain else title
    demo = Demo(
        'challenger',
        {'hops': len(chain) + 1, 'document': prompts.document_text(library.document(start))},
    )
    for i in range(len(chain)):
        demo.look_up(library, _statement(chain[: i + 1]), chain[i][2])
    subject = phrase(chain) if chain else title
    return demo.finish(subject, task=f'Describe {subject}.')


def task_solver(library: Library, rng: np.random.Generator, uneven: Uneven) -> Demo:
    """An open task → searches → an answer in sentences, taken from the last passage."""
    chain, title = _described(library, rng)
    demo = Demo('task_solver', {'task': f'Describe {phrase(chain) if chain else title}.'})
    for i in range(len(chain)):
        demo.look_up(library, phrase(chain[i:]), chain[i][0])
    demo.look_up(library, title, title)
    return demo.finish(title, answer=library.document(title)['text'])


@dataclasses.dataclass(frozen=True)
class Role:
    """A row of the mixture: share of the episodes (relative to the others), and who writes one."""

    share: float
    write: Callable[[Library, np.random.Generator, Uneven], Demo]


ROLES = {
    'copy': Role(0.0, copy),
    'passage': Role(0.02, passage),
    'reading': Role(0.06, reading),
    'retelling': Role(0.06, retelling),
    'solver': Role(0.30, solver),
    'solver_with_path': Role(0.08, solver_with_path),
    'proposer': Role(0.26, proposer),
    'proposer_from_answer': Role(0.07, proposer_from_answer),
    'answer_from_documents': Role(0.05, answer_from_documents),
    'challenger': Role(0.04, challenger),
    'task_solver': Role(0.04, task_solver),
}
