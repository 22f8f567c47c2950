"""Demonstrations that the tiny checkpoint is trained on: written-out episodes of every role.

ROLES lists the roles: each has a share of the mixture and a function that writes one episode.

A space precedes every name, inside tags too, so that a name always has the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from numpy.random import Generator

from tools.checkpoints.demo import Demo, Role, think
from tools.checkpoints.library import Document, Library
from zeroplay_jax.mini.facts import RELATION_NAMES, Fact
from zeroplay_jax.mini.names import pick, shuffled
from zeroplay_jax.mini.world import World, phrase, question
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.foreign_text import passages_text
from zeroplay_jax.types import PROMPT

# Relations that the imperfect solver confuses with another relation of the same entity: every second one, so that
# self-play can improve some relations while others are already right.
WEAK_RELATIONS = frozenset(RELATION_NAMES[1::2])
# Shares of 1, 2, 3, … hops in the episodes of a role.
_SOLVER_HOPS = (0.3, 0.3, 0.25, 0.15)
_ANSWER_HOPS = (0.4, 0.35, 0.25, 0.0)
_PROPOSER_HOPS = (0.3, 0.27, 0.25, 0.18)
_BACKWARD_HOPS = (0.4, 0.35, 0.25)
# Shares of 0, 1 and 2 steps between the initial document and the entity of an open task.
_DESCRIBED_HOPS = (0.35, 0.4, 0.25)


@dataclasses.dataclass(frozen=True)
class ErrorRates:
    """Probabilities of deliberate errors in the demonstrations; all zero for the clean checkpoint.

    Attributes:
      early_answer: per hop but the last, that the solver answers with the intermediate entity.
      wrong_fact: per value of a weak relation (`WEAK_RELATIONS`), that the solver reads another fact of the entity.
      no_think: that the proposer omits its thoughts.
      wrong_hops: that the proposer asks a question with another number of hops than requested.
      malformed: that the proposer omits the question or the answer.
    """

    early_answer: float = 0.0
    wrong_fact: float = 0.0
    no_think: float = 0.0
    wrong_hops: float = 0.0
    malformed: float = 0.0


def draw_hops(rng: Generator, shares: Sequence[float]) -> int:
    """Returns a hop count; the shares are those of 1, 2, 3, … hops."""
    index = rng.choice(len(shares), p=shares)
    return int(index) + 1


def draw_chain(
    library: Library, rng: Generator, shares: Sequence[float]
) -> tuple[World, list[Fact]]:
    """Returns a random world and a random chain in it; `shares` as in `draw_hops`."""
    hops = draw_hops(rng, shares)
    world = pick(rng, library.worlds)
    chain = _chain_of(world, hops, rng)
    return world, chain


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


def countdown(thoughts: Sequence[str]) -> list[str]:
    """Returns the thoughts of a chain, each after the number of hops that are left with it."""
    count = len(thoughts)
    return [f'{count - i} hops. {thought}' for i, thought in enumerate(thoughts)]


def copy(library: Library, rng: Generator, errors: ErrorRates) -> Demo:
    """Writes a passage as context, then its sentences in another order as the policy's text; `errors` has no effect.

    Nearly every token can be copied from the context. Such dense practice forms copying attention heads within a few
    hundred steps; single facts alone take several times as long.
    """
    world = pick(rng, library.worlds)
    text = pick(rng, world.passages).text
    reordered_text = _reordered(text, rng)
    demo = Demo()
    demo.add_prompt_text(f' {text}\n')
    demo.add_policy_text(f' {reordered_text}\n')
    return demo


def passage(library: Library, rng: Generator, errors: ErrorRates) -> Demo:
    """Writes a single passage, then three of its facts."""
    world = pick(rng, library.worlds)
    title = pick(rng, world.titles)
    document = library.document(title)
    demo = Demo()
    demo.add_documents([document])
    _add_facts(demo, world, [title], 3, rng)
    return demo


def reading(library: Library, rng: Generator, errors: ErrorRates) -> Demo:
    """Writes the passages of a search for a title, then six of their facts."""
    world = pick(rng, library.worlds)
    query = pick(rng, world.titles)
    documents = library.search(query)
    # The search covers all worlds; the facts are looked up in one.
    titles = [document['title'] for document in documents]
    world_titles = [title for title in titles if title in world.facts]
    demo = Demo()
    demo.add_documents(documents)
    _add_facts(demo, world, world_titles, 6, rng)
    return demo


def retelling(library: Library, rng: Generator, errors: ErrorRates) -> Demo:
    """Writes the passages of a search; then, for two of them, the title and the sentences in another order."""
    world = pick(rng, library.worlds)
    query = pick(rng, world.titles)
    documents = library.search(query)
    demo = Demo()
    demo.add_documents(documents)
    retold_documents = shuffled(rng, documents)[:2]
    for document in retold_documents:
        thought = think(document['title'])
        reordered_text = _reordered(document['text'], rng)
        demo.add_prompt_text(thought)
        demo.add_policy_text(f'<answer> {reordered_text}</answer>')
    return demo


def _add_facts(demo: Demo, world: World, titles: Sequence[str], count: int, rng: Generator) -> None:
    """Adds `count` random facts of the titles.

    Only the values are policy text; the words before them are prompt text, because the choice of a fact cannot be
    predicted.
    """
    for _ in range(count):
        title = pick(rng, titles)
        facts = list(world.facts[title].items())
        relation, value = pick(rng, facts)
        demo.add_prompt_text(f'<think> the {relation} of {title} is')
        demo.add_policy_text(f' {value}')
        demo.add_prompt_text('</think>')


def _reordered(text: str, rng: Generator) -> str:
    """Returns the sentences of a passage in random order."""
    # Removed first: the split would leave a full stop at the last sentence only.
    sentences = text.removesuffix('.').split('. ')
    reordered_text = '. '.join(shuffled(rng, sentences))
    return f'{reordered_text}.'


def solver(
    library: Library,
    rng: Generator,
    errors: ErrorRates,
    hops: Sequence[float] = _SOLVER_HOPS,
    redundant: float = 0.0,
) -> Demo:
    """Question → searches → answer; `hops`: shares as in `draw_hops`, `redundant`: as in `_add_solution`."""
    world, chain = draw_chain(library, rng, hops)
    demo = Demo('solver', {'question': question(chain)})
    _add_solution(demo, library, world, chain, rng, errors, redundant)
    return demo


def solver_with_path(
    library: Library,
    rng: Generator,
    errors: ErrorRates,
    hops: Sequence[float] = _SOLVER_HOPS,
    redundant: float = 0.0,
) -> Demo:
    """Question and the path of names to its answer, whole or its beginning → searches → answer; always correct.

    `hops` and `redundant` as in `solver`.
    """
    world, chain = draw_chain(library, rng, hops)
    path = [chain[0].entity]
    path += [step.value for step in chain]
    if rng.random() < 0.3:
        # Paths of self-play can lack steps (`privileged.kind` 'qcp_partial'): the policy learns to search for them.
        path_length = rng.integers(2, len(path) + 1)
        path = path[:path_length]
    fields = {'path': ' > '.join(path), 'question': question(chain)}
    demo = Demo('solver_with_path', fields)
    # Written without errors, because self-play distils this role into the plain solver: it has to be the better one.
    no_errors = ErrorRates()
    _add_solution(demo, library, world, chain, rng, no_errors, redundant)
    return demo


def answer_from_documents(
    library: Library, rng: Generator, errors: ErrorRates, hops: Sequence[float] = _ANSWER_HOPS
) -> Demo:
    """Question, the documents of its chain and up to three random ones → answer without a search."""
    _, chain = draw_chain(library, rng, hops)
    documents = documents_of(library, chain, rng)
    fields = {
        'documents': passages_text([documents], 'search_r1'),
        'question': question(chain),
    }
    demo = Demo('answer_from_documents', fields)
    demo.add_final_turn(statements(chain), answer=chain[-1].value)
    return demo


def documents_of(library: Library, chain: Sequence[Fact], rng: Generator) -> list[Document]:
    """Returns the documents of a chain and up to three random ones, in random order."""
    documents = [library.document(step.entity) for step in chain]
    distractors = rng.integers(0, 4)
    for _ in range(distractors):
        documents.append(pick(rng, library.documents))
    # Shuffled: otherwise the policy could learn positions, because the chain's documents would always come first, in
    # order.
    return shuffled(rng, documents)


def task_solver(
    library: Library, rng: Generator, errors: ErrorRates, hops: Sequence[float] = _DESCRIBED_HOPS
) -> Demo:
    """Open task → searches → the text of the passage that the task asks for."""
    chain, title = _draw_described_entity(library, rng, hops)
    demo = Demo('task_solver', {'task': f'Describe {_subject(chain, title)}.'})
    for i, step in enumerate(chain):
        thought = phrase(chain[i:])
        demo.add_search(library, thought, step.entity)
    # One more search than hops: the passage of the entity itself is the answer.
    demo.add_search(library, title, title)
    answer = library.document(title)['text']
    demo.add_final_turn(title, answer=answer)
    return demo


def _add_solution(
    demo: Demo,
    library: Library,
    world: World,
    chain: Sequence[Fact],
    rng: Generator,
    errors: ErrorRates,
    redundant: float,
) -> None:
    """Adds the searches along a chain and the final turn; each thought is the part of the question still open.

    With the probability `redundant` a search is preceded by one for a random title, which the loss counts as context.

    Errors are made with the probabilities of `errors`: an answer before the last hop, or a value that is misread. After
    a misread value the chain continues from that entity, or ends there if it lacks the next relation.
    """
    remaining = list(chain)
    while True:
        step = remaining[0]
        # The thought states what is still open, because the policy has no other memory of its plan.
        thought = phrase(remaining)
        add_redundant_search(demo, library, world, thought, rng, redundant)
        demo.add_search(library, thought, step.entity)
        value = _read_value(world, step, rng, errors)
        next_relations = [later_step.relation for later_step in remaining[1:]]
        answers_now = True
        # A misread value may be of another kind, which does not have the next relation; then it is the answer.
        if next_relations and world.value(value, next_relations[0]):
            answers_now = rng.random() < errors.early_answer
        if answers_now:
            demo.add_final_turn(f'the {step.relation} of {step.entity} is {value}', answer=value)
            return
        # After an error the question continues from the wrong entity.
        remaining = _follow(world, value, next_relations)


def add_redundant_search(
    demo: Demo, library: Library, world: World, thought: str, rng: Generator, probability: float
) -> None:
    """Adds, with a probability, a search for a random title, which the loss counts as context."""
    # Nothing is drawn at a probability of 0, so that the episodes stay the same.
    if probability and rng.random() < probability:
        query = pick(rng, world.titles)
        demo.add_search(library, thought, query, source=PROMPT)


def _read_value(world: World, step: Fact, rng: Generator, errors: ErrorRates) -> str:
    """Returns the value of a step, or, as a deliberate error, the value of another fact of the same entity."""
    is_weak = step.relation in WEAK_RELATIONS
    if is_weak and rng.random() < errors.wrong_fact:
        facts = world.facts[step.entity]
        values = list(facts.values())
        # The next fact in the order of the relations; after the last one, the first.
        next_index = values.index(step.value) + 1
        return values[next_index % len(values)]
    return step.value


def _follow(world: World, entity: str, relations: Sequence[str]) -> list[Fact]:
    """Returns the steps from an entity along relations; after a missing fact, entities and values are ''."""
    steps = []
    for relation in relations:
        value = world.value(entity, relation) or ''
        steps.append(Fact(entity, relation, value))
        entity = value
    return steps


def proposer(
    library: Library,
    rng: Generator,
    errors: ErrorRates,
    hops: Sequence[float] = _PROPOSER_HOPS,
    counted: bool = False,
    redundant: float = 0.0,
) -> Demo:
    """Hop count and a document → one search fewer than hops → question and answer.

    `hops`: shares as in `draw_hops`; with `counted`, a thought begins with the number of hops that are left;
    `redundant` as in `add_redundant_search`.
    """
    world, chain = draw_chain(library, rng, hops)
    start = chain[0].entity
    requested_hops = len(chain)
    if rng.random() < errors.wrong_hops:
        wrong_hop_counts = [count for count in (1, 2, 3) if count != requested_hops]
        wrong_hops = pick(rng, wrong_hop_counts)
        wrong_chain = world.chain(wrong_hops, rng, start)
        # Where no such chain starts at the document, the episode stays correct.
        chain = wrong_chain or chain
    # Thought i states the first i steps of the chain.
    thoughts = [statement(chain[:i]) for i in range(1, len(chain) + 1)]
    # Drawn once, so that an episode has either all thoughts or none.
    if rng.random() < errors.no_think:
        thoughts = [''] * len(chain)

    if counted:
        thoughts = countdown(thoughts)
    document = prompts.document_text(library.document(start))
    demo = Demo('proposer', {'hops': requested_hops, 'document': document})
    # The document answers the first hop, so the first search is for the second one.
    for thought, step in zip(thoughts, chain[1:]):
        add_redundant_search(demo, library, world, thought, rng, redundant)
        demo.add_search(library, thought, step.entity)
    tags = {'question': question(chain), 'answer': chain[-1].value}
    if rng.random() < errors.malformed:
        # The parser of self-play rejects a proposal without both tags.
        missing_tag = 'answer' if rng.random() < 0.5 else 'question'
        del tags[missing_tag]
    demo.add_final_turn(thoughts[-1], **tags)
    return demo


def proposer_from_answer(
    library: Library, rng: Generator, errors: ErrorRates, hops: Sequence[float] = _BACKWARD_HOPS
) -> Demo:
    """Answer and hop count → searches backwards, from a value to a passage that names it → question and answer."""
    # The search does not always return a passage that names the value; such attempts are discarded.
    while True:
        count = draw_hops(rng, hops)
        world = pick(rng, library.worlds)
        fact = _chain_of(world, 1, rng)[0]
        answer = fact.value
        demo = Demo('proposer_from_answer', {'hops': count, 'answer': answer})
        chain = add_backward_searches(demo, library, world, answer, count, rng)
        if len(chain) < count:
            continue
        text = question(chain)
        # As in `World.chain`, the question must not contain its answer.
        if answer.lower() in text.lower():
            continue
        thought = statement(chain)
        demo.add_final_turn(thought, question=text, answer=answer)
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
        for document in documents:
            title = document['title']
            if title in visited:
                continue
            facts = world.facts.get(title, {})
            for relation, fact_value in facts.items():
                if fact_value == value:
                    steps.append(Fact(title, relation, value))
        if not steps:
            break
        first_step = pick(rng, steps)
        chain = [first_step, *chain]
        value = first_step.entity
        thought = statement(chain)
    return chain


def challenger(
    library: Library, rng: Generator, errors: ErrorRates, hops: Sequence[float] = _DESCRIBED_HOPS
) -> Demo:
    """Hop count and a document → searches → open task."""
    chain, title = _draw_described_entity(library, rng, hops)
    start = title
    if chain:
        start = chain[0].entity
    document = prompts.document_text(library.document(start))
    # Hops are counted in passages, the initial document included.
    demo = Demo('challenger', {'hops': len(chain) + 1, 'document': document})
    for i, step in enumerate(chain, 1):
        thought = statement(chain[:i])
        demo.add_search(library, thought, step.value)
    subject = _subject(chain, title)
    demo.add_final_turn(subject, task=f'Describe {subject}.')
    return demo


def _draw_described_entity(
    library: Library, rng: Generator, shares: Sequence[float]
) -> tuple[list[Fact], str]:
    """Returns a random chain and the title of the entity at its end, which has a passage.

    `shares` are those of 0, 1, … steps.
    """
    # With an empty chain the task names its entity by the title.
    chain_length = rng.choice(len(shares), p=shares)
    while True:
        world = pick(rng, library.worlds)
        if chain_length == 0:
            title = pick(rng, world.titles)
            return [], title
        chain = _chain_of(world, int(chain_length), rng)
        title = chain[-1].value
        # A value such as a metal has no passage.
        if title in world.facts:
            return chain, title


def _subject(chain: Sequence[Fact], title: str) -> str:
    """Returns how a task names its entity: by the chain that leads to it, or by its title."""
    if not chain:
        return title
    return phrase(chain)


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
