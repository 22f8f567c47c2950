"""Demonstrations that the tiny checkpoint is trained on: written-out episodes of every role.

ROLES lists the roles: each has a share of the mixture and a function that writes one episode from a library. Everything
that a demonstration states is true in its world.

A space precedes every name, inside tags too, so that a name always has the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from numpy.random import Generator

from tools.checkpoints.demo import Demo, Role, spend, think
from tools.checkpoints.library import Document, Library
from zeroplay_jax.mini.facts import RELATION_NAMES, Fact
from zeroplay_jax.mini.names import pick, shuffled
from zeroplay_jax.mini.world import World, phrase, question
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.foreign_text import passages_text
from zeroplay_jax.types import PROMPT

# Relations at which a solver spends a number more (`demo.spend`).
_SPENT_RELATIONS = frozenset(RELATION_NAMES[1::2])
# Shares of 1, 2, 3, … hops in the episodes of a role.
_SOLVER_HOPS = (0.3, 0.3, 0.25, 0.15)
_ANSWER_HOPS = (0.4, 0.35, 0.25, 0.0)
_PROPOSER_HOPS = (0.3, 0.27, 0.25, 0.18)
_BACKWARD_HOPS = (0.4, 0.35, 0.25)
# Shares of 0, 1 and 2 steps between the initial document and the entity of an open task.
_DESCRIBED_HOPS = (0.35, 0.4, 0.25)


def draw_hops(rng: Generator, shares: Sequence[float]) -> int:
    """Returns a hop count; the shares are those of 1, 2, 3, … hops."""
    return int(rng.choice(len(shares), p=shares)) + 1


def draw_chain(
    library: Library, rng: Generator, shares: Sequence[float]
) -> tuple[World, list[Fact]]:
    """Returns a random world and a random chain in it; `shares` as in `draw_hops`."""
    hops = draw_hops(rng, shares)
    world = pick(rng, library.worlds)
    return world, _chain_of(world, hops, rng)


def _chain_of(world: World, hops: int, rng: Generator) -> list[Fact]:
    """Returns a random chain of a world, which must have one of this length."""
    chain = world.chain(hops, rng)
    # The demonstrations use up to six hops, and only longer chains can be missing from a world.
    assert chain is not None, f'no chain of {hops} hops'
    return chain


def statement(chain: Sequence[Fact]) -> str:
    """Returns what a chain states: 'the birthplace of the author of Gumu is Lomi'."""
    return f'{phrase(chain)} is {chain[-1].value}'


def statements(chain: Sequence[Fact]) -> str:
    """Returns the facts of a chain, one by one."""
    return '. '.join(statement([step]) for step in chain)


def statements_so_far(chain: Sequence[Fact]) -> list[str]:
    """Returns what the first step of a chain states, the first two, and so on."""
    return [statement(chain[:count]) for count in range(1, len(chain) + 1)]


def countdown(thoughts: Sequence[str]) -> list[str]:
    """Returns the thoughts of a chain, each after the number of hops that are left with it."""
    count = len(thoughts)
    return [f'{count - i} hops. {thought}' for i, thought in enumerate(thoughts)]


def copy(library: Library, rng: Generator) -> Demo:
    """Writes a passage as context, then its sentences in another order as the policy's text.

    Nearly every token can be copied from the context. Such dense practice forms copying attention heads within a few
    hundred steps; single facts alone take several times as long.
    """
    world = pick(rng, library.worlds)
    text = pick(rng, world.passages).text
    demo = Demo()
    demo.add_prompt_text(f' {text}\n')
    demo.add_policy_text(f' {_reordered(text, rng)}\n')
    return demo


def passage(library: Library, rng: Generator) -> Demo:
    """Writes a single passage, then three of its facts."""
    world = pick(rng, library.worlds)
    title = pick(rng, world.titles)
    demo = Demo()
    demo.add_documents([library.document(title)])
    _add_facts(demo, world, [title], 3, rng)
    return demo


def reading(library: Library, rng: Generator) -> Demo:
    """Writes the passages of a search for a title, then six of their facts."""
    world = pick(rng, library.worlds)
    documents = library.search(pick(rng, world.titles))
    # The search covers all worlds; the facts are looked up in one.
    titles = [document['title'] for document in documents]
    world_titles = [title for title in titles if title in world.facts]
    demo = Demo()
    demo.add_documents(documents)
    _add_facts(demo, world, world_titles, 6, rng)
    return demo


def retelling(library: Library, rng: Generator) -> Demo:
    """Writes the passages of a search; then, for two of them, the title and the sentences in another order."""
    world = pick(rng, library.worlds)
    documents = library.search(pick(rng, world.titles))
    demo = Demo()
    demo.add_documents(documents)
    for document in shuffled(rng, documents)[:2]:
        demo.add_prompt_text(think(document['title']))
        demo.add_policy_text(f'<answer> {_reordered(document["text"], rng)}</answer>')
    return demo


def _add_facts(demo: Demo, world: World, titles: Sequence[str], count: int, rng: Generator) -> None:
    """Adds `count` random facts of the titles.

    Only the values are policy text; the words before them are prompt text, because the choice of a fact cannot be
    predicted.
    """
    for _ in range(count):
        title = pick(rng, titles)
        relation, value = pick(rng, list(world.facts[title].items()))
        demo.add_prompt_text(f'<think> the {relation} of {title} is')
        demo.add_policy_text(f' {value}')
        demo.add_prompt_text('</think>')


def _reordered(text: str, rng: Generator) -> str:
    """Returns the sentences of a passage in random order."""
    # Removed first: the split would leave a full stop at the last sentence only.
    sentences = text.removesuffix('.').split('. ')
    return '. '.join(shuffled(rng, sentences)) + '.'


def solver(
    library: Library,
    rng: Generator,
    hops: Sequence[float] = _SOLVER_HOPS,
    redundant: float = 0.0,
) -> Demo:
    """Question → searches → answer; `hops`: shares as in `draw_hops`, `redundant`: as in `_add_solution`."""
    world, chain = draw_chain(library, rng, hops)
    demo = Demo('solver', {'question': question(chain)})
    _add_solution(demo, library, world, chain, rng, redundant)
    return demo


def solver_with_path(
    library: Library,
    rng: Generator,
    hops: Sequence[float] = _SOLVER_HOPS,
    redundant: float = 0.0,
) -> Demo:
    """Question and the path of names to its answer, whole or its beginning → searches → answer.

    `hops` and `redundant` as in `solver`.
    """
    world, chain = draw_chain(library, rng, hops)
    path = [chain[0].entity, *(step.value for step in chain)]
    if rng.random() < 0.3:
        # Paths of self-play can lack steps (`privileged.kind` 'qcp_partial'): the policy learns to search for them.
        path = path[: rng.integers(2, len(path) + 1)]
    fields = {'path': ' > '.join(path), 'question': question(chain)}
    demo = Demo('solver_with_path', fields)
    _add_solution(demo, library, world, chain, rng, redundant)
    return demo


def answer_from_documents(
    library: Library, rng: Generator, hops: Sequence[float] = _ANSWER_HOPS
) -> Demo:
    """Question, the documents of its chain and up to three random ones → answer without a search."""
    _, chain = draw_chain(library, rng, hops)
    documents = passages_text([documents_of(library, chain, rng)], 'search_r1')
    demo = Demo('answer_from_documents', {'documents': documents, 'question': question(chain)})
    demo.add_final_turn(statements(chain), answer=chain[-1].value)
    return demo


def documents_of(library: Library, chain: Sequence[Fact], rng: Generator) -> list[Document]:
    """Returns the documents of a chain and up to three random ones, in random order."""
    documents = [library.document(step.entity) for step in chain]
    documents += [pick(rng, library.documents) for _ in range(rng.integers(0, 4))]
    # Shuffled: otherwise the policy could learn positions, because the chain's documents would always come first, in
    # order.
    return shuffled(rng, documents)


def task_solver(
    library: Library,
    rng: Generator,
    hops: Sequence[float] = _DESCRIBED_HOPS,
    is_stated: bool = False,
) -> Demo:
    """Open task → searches → the text of the passage that the task asks for.

    With `is_stated` the solver states the fact that names the described entity before it searches for it.
    """
    chain, title = _draw_described(library, rng, hops)
    demo = Demo('task_solver', {'task': f'Describe {_subject(chain, title)}.'})
    for i, step in enumerate(chain):
        demo.add_search(library, phrase(chain[i:]), step.entity)
    # One more search than hops: the passage of the entity itself is the answer.
    thought = statement(chain[-1:]) if is_stated and chain else title
    demo.add_search(library, thought, title)
    demo.add_final_turn(title, answer=library.document(title)['text'])
    return demo


def _add_solution(
    demo: Demo,
    library: Library,
    world: World,
    chain: Sequence[Fact],
    rng: Generator,
    redundant: float,
) -> None:
    """Adds the searches along a chain and the final turn; each thought is the part of the question still open.

    With the probability `redundant` a search is preceded by one for a random title, which the loss counts as context.
    """
    for i, step in enumerate(chain):
        # The thought states what is still open, because the policy has no other memory of its plan.
        thought = phrase(chain[i:])
        add_redundant_search(demo, library, world, thought, rng, redundant)
        demo.add_search(library, thought, step.entity)
        is_last = step is chain[-1]
        spend(rng, (step.relation in _SPENT_RELATIONS) + (not is_last))
    demo.add_final_turn(statement(chain[-1:]), answer=chain[-1].value)


def add_redundant_search(
    demo: Demo, library: Library, world: World, thought: str, rng: Generator, probability: float
) -> None:
    """Adds, with a probability, a search for a random title, which the loss counts as context."""
    # Nothing is drawn at a probability of 0, so that the episodes stay the same.
    if probability and rng.random() < probability:
        demo.add_search(library, thought, pick(rng, world.titles), source=PROMPT)


def proposer(
    library: Library,
    rng: Generator,
    hops: Sequence[float] = _PROPOSER_HOPS,
    counted: bool = False,
    redundant: float = 0.0,
) -> Demo:
    """Hop count and a document → one search fewer than hops → question and answer.

    `hops`: shares as in `draw_hops`; with `counted`, a thought begins with the number of hops that are left;
    `redundant` as in `add_redundant_search`.
    """
    world, chain = draw_chain(library, rng, hops)
    spend(rng, 2)
    thoughts = statements_so_far(chain)
    if counted:
        thoughts = countdown(thoughts)
    document = prompts.document_text(library.document(chain[0].entity))
    demo = Demo('proposer', {'hops': len(chain), 'document': document})
    # The document answers the first hop, so the first search is for the second one.
    for thought, step in zip(thoughts, chain[1:]):
        add_redundant_search(demo, library, world, thought, rng, redundant)
        demo.add_search(library, thought, step.entity)
    spend(rng)
    demo.add_final_turn(thoughts[-1], question=question(chain), answer=chain[-1].value)
    return demo


def proposer_from_answer(
    library: Library, rng: Generator, hops: Sequence[float] = _BACKWARD_HOPS
) -> Demo:
    """Answer and hop count → searches backwards, from a value to a passage that names it → question and answer."""
    # The search does not always return a passage that names the value; such attempts are discarded.
    while True:
        count = draw_hops(rng, hops)
        world = pick(rng, library.worlds)
        answer = _chain_of(world, 1, rng)[0].value
        demo = Demo('proposer_from_answer', {'hops': count, 'answer': answer})
        chain = add_backward_searches(demo, library, world, answer, count, rng)
        # As in `World.chain`, the question must not contain its answer.
        if len(chain) == count and answer.lower() not in question(chain).lower():
            demo.add_final_turn(statement(chain), question=question(chain), answer=answer)
            return demo


def add_backward_searches(
    demo: Demo,
    library: Library,
    world: World,
    answer: str,
    hops: int,
    rng: Generator,
) -> list[Fact]:
    """Adds searches that extend a chain from its last value towards its start.

    Each one searches for the first entity of the chain (at first for `answer`), and a fact of a passage found that has
    it as value becomes the new first step.

    Returns:
      The chain, which ends with `answer`; shorter than `hops` if a search found no such fact.
    """
    chain: list[Fact] = []
    value = answer
    thought = answer
    for _ in range(hops):
        documents = demo.add_search(library, thought, value)
        # Entities of the chain are excluded, so that it has no cycle.
        visited = {step.entity for step in chain}
        steps = []
        for title in (document['title'] for document in documents):
            for relation, fact_value in world.facts.get(title, {}).items():
                if fact_value == value and title not in visited:
                    steps.append(Fact(title, relation, value))
        if not steps:
            break
        chain = [pick(rng, steps), *chain]
        value = chain[0].entity
        thought = statement(chain)
    return chain


def challenger(library: Library, rng: Generator, hops: Sequence[float] = _DESCRIBED_HOPS) -> Demo:
    """Hop count and a document → searches → open task."""
    chain, title = _draw_described(library, rng, hops)
    start = chain[0].entity if chain else title
    document = prompts.document_text(library.document(start))
    # Hops are counted in passages, the initial document included.
    demo = Demo('challenger', {'hops': len(chain) + 1, 'document': document})
    for thought, step in zip(statements_so_far(chain), chain):
        demo.add_search(library, thought, step.value)
    subject = _subject(chain, title)
    demo.add_final_turn(subject, task=f'Describe {subject}.')
    return demo


def _draw_described(
    library: Library, rng: Generator, shares: Sequence[float]
) -> tuple[list[Fact], str]:
    """Returns a random chain and the title of the entity at its end, which has a passage.

    `shares` are those of 0, 1, … steps.
    """
    # With an empty chain the task names its entity by the title.
    length = int(rng.choice(len(shares), p=shares))
    while True:
        world = pick(rng, library.worlds)
        if length == 0:
            return [], pick(rng, world.titles)
        chain = _chain_of(world, length, rng)
        # A value such as a metal has no passage.
        if chain[-1].value in world.facts:
            return chain, chain[-1].value


def _subject(chain: Sequence[Fact], title: str) -> str:
    """Returns how a task names its entity: by the chain that leads to it, or by its title."""
    return phrase(chain) if chain else title


# The solver and the proposer are the roles of all self-play systems and get more than half of the mixture.
ROLES = {
    # Exercises are for the first stages mainly; a small share in later stages preserves reading.
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
