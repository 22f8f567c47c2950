"""Demonstrations of SCOPE's roles for the checkpoints in `mini/open`: open tasks along chains, and their answers.

`demos.py` has simpler forms of both roles, in small shares, for the checkpoints of all systems. A policy trained
on those fails at tasks that name their entity by a chain. Two things differ here:

- Before it searches for the described entity, the solver states the fact that names it ('the teacher of Gumu is Lomi'),
  as it does in answers to questions. Without this step it read the value of another relation or repeated the search.
- Chains have up to three steps, as in the held-out tasks. The policy answered longer chains than it was trained on like
  questions, with the name instead of the description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from numpy.random import Generator

from tools.checkpoints import demos
from tools.checkpoints.demo import Demo, Role
from tools.checkpoints.library import Document, Library
from zeroplay_jax.mini.facts import Fact
from zeroplay_jax.mini.names import pick
from zeroplay_jax.mini.world import World, phrase
from zeroplay_jax.rollout import prompts

# Shares of 0, 1, 2 and 3 steps between the first entity and the described one.
_SOLVER_STEPS = (0.15, 0.3, 0.3, 0.25)
_CHALLENGER_STEPS = (0.1, 0.45, 0.45)
# Of ungrounded tasks: as many searches, and one step more.
_UNGROUNDED_STEPS = (0.0, *_CHALLENGER_STEPS)


@dataclasses.dataclass(frozen=True)
class OpenErrors(demos.ErrorRates):
    """Probabilities of deliberate errors; `wrong_fact` also applies to the steps of tasks.

    Attributes:
      early_description: per step but the last, that the solver describes the intermediate entity.
      incomplete: that the solver repeats the first sentence of the passage only.
      verbose: that the solver also describes the second document of its last search.
      nameless: that the task of a challenger lacks the name at the beginning of its chain.
      ungrounded: that the chain of a challenger's task goes one step further than its searches. The rubrics are then
        those of the entity before the described one, so that `early_description` pays.
    """

    early_description: float = 0.0
    incomplete: float = 0.0
    verbose: float = 0.0
    nameless: float = 0.0
    ungrounded: float = 0.0


def task_solver(library: Library, rng: Generator, errors: OpenErrors) -> Demo:
    """Open task → searches along its chain → the text of the passage about the entity at the end."""
    world, chain, title = _draw_described(library, rng, _SOLVER_STEPS)
    demo = Demo('task_solver', {'task': f'Describe {_subject(chain, title)}.'})
    entity = title
    thought = title
    remaining = chain
    while remaining:
        step = remaining[0]
        demo.add_search(library, phrase(remaining), step.entity)
        entity = _read_entity(world, step, rng, errors)
        thought = f'the {step.relation} of {step.entity} is {entity}'
        remaining = _continued(world, entity, remaining[1:])
        if rng.random() < errors.early_description:
            break
    documents = demo.add_search(library, thought, entity)
    answer = library.document(entity)['text']
    # No number is drawn at 0: the committed checkpoint without errors was trained before this error was added.
    if errors.incomplete and rng.random() < errors.incomplete:
        first_sentence, _, _ = answer.partition('. ')
        answer = f'{first_sentence}.'
    if rng.random() < errors.verbose:
        answer = f'{answer} {_other_text(documents, entity)}'
    demo.add_final_turn(entity, answer=answer)
    return demo


def challenger(library: Library, rng: Generator, errors: OpenErrors) -> Demo:
    """Hop count and a document → searches along a chain → open task about the entity at its end."""
    # No number is drawn at 0, for the reason given in `task_solver`.
    is_ungrounded = errors.ungrounded > 0 and rng.random() < errors.ungrounded
    steps = _UNGROUNDED_STEPS if is_ungrounded else _CHALLENGER_STEPS
    _, chain, title = _draw_described(library, rng, steps)
    searched_chain = chain[:-1] if is_ungrounded else chain
    start = chain[0].entity if chain else title
    document = prompts.document_text(library.document(start))
    # Hops are counted in passages, the initial document included.
    hops = len(searched_chain) + 1
    demo = Demo('challenger', {'hops': hops, 'document': document})
    for count, step in enumerate(searched_chain, 1):
        steps_so_far = searched_chain[:count]
        demo.add_search(library, f'{phrase(steps_so_far)} is {step.value}', step.value)
    subject = _subject(chain, title)
    task_subject = subject
    if chain and rng.random() < errors.nameless:
        task_subject = subject.removesuffix(f' of {start}')
    demo.add_final_turn(subject, task=f'Describe {task_subject}.')
    return demo


def _draw_described(
    library: Library, rng: Generator, shares: Sequence[float]
) -> tuple[World, list[Fact], str]:
    """Returns a world, a chain in it and the title at its end; `shares` are those of 0, 1, 2, … steps."""
    step_count = int(rng.choice(len(shares), p=shares))
    while True:
        world = pick(rng, library.worlds)
        if step_count == 0:
            return world, [], pick(rng, world.titles)
        chain = world.chain(step_count, rng)
        # A value such as a metal has no passage.
        if chain is not None and chain[-1].value in world.facts:
            return world, chain, chain[-1].value


def _subject(chain: Sequence[Fact], title: str) -> str:
    """Returns how a task names its entity: by the chain that leads to it, or by its title."""
    if not chain:
        return title
    return phrase(chain)


def _read_entity(world: World, step: Fact, rng: Generator, errors: OpenErrors) -> str:
    """Returns the value of a step or, as a deliberate error, another entity that its passage names."""
    is_weak = step.relation in demos.WEAK_RELATIONS
    if is_weak and rng.random() < errors.wrong_fact:
        values = world.facts[step.entity].values()
        other_entities = [value for value in values if value != step.value and value in world.facts]
        if other_entities:
            return other_entities[0]
    return step.value


def _continued(world: World, entity: str, steps: Sequence[Fact]) -> list[Fact]:
    """Returns the steps with the same relations from `entity` on, or [] if it lacks one of them."""
    continued = []
    for step in steps:
        value = world.value(entity, step.relation)
        # Only entities with a passage can be searched for and described.
        if value not in world.facts:
            return []
        continued.append(Fact(entity, step.relation, value))
        entity = value
    return continued


def _other_text(documents: Sequence[Document], title: str) -> str:
    """Returns the text of the best document with another title."""
    for document in documents:
        if document['title'] != title:
            return document['text']
    raise ValueError(f'a search found nothing but {title!r}')


ROLES = demos.ROLES | {
    'challenger': Role(demos.ROLES['challenger'].share, challenger),
    'task_solver': Role(demos.ROLES['task_solver'].share, task_solver),
}
