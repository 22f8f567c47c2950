"""Demonstrations of the start that was shown at most two hops: parts of the roles' work, and the roles.

A part has a prompt of its own, which no role has, and chains of one to six hops: to restate a question, to walk along a
phrase or from a document, to ask what a statement says. No part both reads a question and answers it, or both walks and
asks. The roles are those of `demos.py`, with chains of one or two hops only: what they do with longer ones, self-play
has to find.

Some searches of the solver are redundant, and count as context in the loss, as passages do. Without them the second
turn of a demonstration would always be the last one, and a policy that counts turns explains all of them.
"""

from __future__ import annotations

import functools

from numpy.random import Generator

from tools.checkpoints import demos
from tools.checkpoints.demo import Demo, Role, think
from tools.checkpoints.library import Library
from zeroplay_jax.mini.world import phrase, question
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.foreign_text import passages_text

# Shares of 1 to 6 hops in the episodes of a part, and of 1 and 2 in those of a role.
_PART_HOPS = (1 / 6,) * 6
ROLE_HOPS = (0.5, 0.5)
# Shares of 0 and 1 step between the initial document and the entity of an open task.
_DESCRIBED_HOPS = (0.5, 0.5)
# Probability of a redundant search before each search of a solver.
REDUNDANT_SEARCHES = 0.3


def restate(library: Library, rng: Generator) -> Demo:
    """Question → the phrase that it asks for."""
    _, chain = demos.draw_chain(library, rng, _PART_HOPS)
    demo = Demo('restate', {'question': question(chain)})
    demo.add_final_turn(phrase(chain))
    return demo


def resolve(library: Library, rng: Generator) -> Demo:
    """A phrase and the value of its innermost part → the phrase with this value."""
    _, chain = demos.draw_chain(library, rng, _PART_HOPS)
    first, rest = chain[0], chain[1:]
    demo = Demo()
    statement = demos.statement([first])
    demo.add_prompt_text(f'{think(phrase(chain))}{think(statement)}')
    remaining = phrase(rest) if rest else first.value
    demo.add_policy_text(think(remaining))
    return demo


def ask(library: Library, rng: Generator) -> Demo:
    """Statement → the question that it answers, and the answer."""
    _, chain = demos.draw_chain(library, rng, _PART_HOPS)
    demo = Demo('ask')
    demo.add_prompt_text(think(demos.statement(chain)))
    demo.add_final_turn('', question=question(chain), answer=chain[-1].value)
    return demo


def ask_at_end(library: Library, rng: Generator) -> Demo:
    """Documents of the ends of a chain, and what it states → the question that it answers, and the answer."""
    _, chain = demos.draw_chain(library, rng, _PART_HOPS)
    document = prompts.document_text(library.document(chain[0].entity))
    demo = Demo('ask_at_end', {'document': document})
    demo.add_documents(library.search(chain[-1].entity))
    (thought,) = demos.countdown([demos.statement(chain)])
    demo.add_prompt_text(think(thought))
    demo.add_final_turn('', question=question(chain), answer=chain[-1].value)
    return demo


def walk_to_goal(library: Library, rng: Generator) -> Demo:
    """Phrase → searches along it, each after the phrase that is still open; no question and no answer."""
    _, chain = demos.draw_chain(library, rng, _PART_HOPS)
    demo = Demo('walk_to_goal')
    # The first thought is given: to find it in a question is the part `restate`.
    demo.add_prompt_text(think(phrase(chain)))
    demo.add_search(library, '', chain[0].entity)
    for i, step in enumerate(chain[1:], 1):
        demo.add_search(library, phrase(chain[i:]), step.entity)
    demo.add_final_turn(demos.statement(chain[-1:]))
    return demo


def walk(library: Library, rng: Generator) -> Demo:
    """Number and document → as many facts, each of the passage of the last one's value; no question."""
    _, chain = demos.draw_chain(library, rng, _PART_HOPS)
    document = prompts.document_text(library.document(chain[0].entity))
    demo = Demo('walk', {'hops': len(chain), 'document': document})
    thoughts = demos.countdown(demos.statements_so_far(chain))
    for thought, step in zip(thoughts, chain[1:]):
        demo.add_search(library, thought, step.entity)
    demo.add_final_turn(thoughts[-1])
    return demo


def walk_back(library: Library, rng: Generator) -> Demo:
    """Number and value → as many searches backwards, from a value to a passage that names it; no question."""
    while True:
        hops = demos.draw_hops(rng, _PART_HOPS)
        world, (fact,) = demos.draw_chain(library, rng, (1.0,))
        demo = Demo('walk_back', {'hops': hops, 'answer': fact.value})
        chain = demos.add_backward_searches(demo, library, world, fact.value, hops, rng)
        if len(chain) == hops:
            demo.add_final_turn(demos.statement(chain))
            return demo


def trace(library: Library, rng: Generator) -> Demo:
    """Documents and a phrase → the facts along it; no question and no answer."""
    _, chain = demos.draw_chain(library, rng, _PART_HOPS)
    documents = demos.documents_of(library, chain, rng)
    fields = {'documents': passages_text([documents], 'search_r1'), 'phrase': phrase(chain)}
    demo = Demo('trace', fields)
    demo.add_final_turn(demos.statements(chain))
    return demo


_solver = functools.partial(demos.solver, hops=ROLE_HOPS, redundant=REDUNDANT_SEARCHES)
_solver_with_path = functools.partial(
    demos.solver_with_path, hops=ROLE_HOPS, redundant=REDUNDANT_SEARCHES
)

_proposer = functools.partial(
    demos.proposer, hops=ROLE_HOPS, counted=True, redundant=REDUNDANT_SEARCHES
)

ROLES = {
    'copy': Role(0.0, demos.copy),
    'passage': Role(0.0, demos.passage),
    'reading': Role(0.03, demos.reading),
    'retelling': Role(0.03, demos.retelling),
    'restate': Role(0.0004, restate),
    'resolve': Role(0.0002, resolve),
    'ask': Role(0.01, ask),
    'ask_at_end': Role(0.045, ask_at_end),
    'walk_to_goal': Role(0.0006, walk_to_goal),
    'walk': Role(0.03, walk),
    'walk_back': Role(0.005, walk_back),
    'trace': Role(0.005, trace),
    'solver': Role(0.36, _solver),
    'solver_with_path': Role(0.08, _solver_with_path),
    'proposer': Role(0.28, _proposer),
    'proposer_from_answer': Role(
        0.08, functools.partial(demos.proposer_from_answer, hops=ROLE_HOPS)
    ),
    'answer_from_documents': Role(
        0.06, functools.partial(demos.answer_from_documents, hops=ROLE_HOPS)
    ),
    'challenger': Role(0.04, functools.partial(demos.challenger, hops=_DESCRIBED_HOPS)),
    'task_solver': Role(0.04, functools.partial(demos.task_solver, hops=_DESCRIBED_HOPS)),
}
