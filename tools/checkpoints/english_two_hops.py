"""Demonstrations with questions of two hops over English texts (`extras/inputs/chains.py`): solver and proposer.

As in those of one hop, every token of a question, a search or an answer can be copied from a text that the policy sees.
"""

from __future__ import annotations

from numpy.random import Generator

from tools.checkpoints.demo import Demo, spend, think
from tools.checkpoints.english_forms import (
    add_answer,
    add_proposal,
    contains,
    disguise_of,
    marked,
    query_of,
)
from tools.checkpoints.english_texts import Disguise, Link, Texts
from zeroplay_jax.extras.inputs.chains import Chain
from zeroplay_jax.rollout import prompts

# Share of the episodes with a chain that the passages have. The others join two random passages, so that the policy
# sees thousands of bridges instead of dozens.
_REAL_SHARE = 0.3


def _disguise_of_link(texts: Texts, rng: Generator, link: Link) -> Disguise:
    """Returns the disguise of an episode, in which both passages mention the bridge."""
    disguise = disguise_of(texts, rng)
    if link.replaced_name:
        disguise.merge(link.replaced_name, link.chain.first.answer)
    return disguise


def _disguised(disguise: Disguise, chain: Chain) -> Chain:
    """Returns a disguised chain."""
    # Not the question as a whole: the disguise would replace the digit of its mark.
    return Chain(disguise.cloze(chain.first), disguise.cloze(chain.second))


def solver(texts: Texts, rng: Generator, with_path: bool = False) -> Demo:
    """Question → search for its sentence → search for its clause, with the name read → answer.

    With `with_path` the role is `solver_with_path`, which sees how the question was made.
    """
    while True:
        link = texts.draw_link(rng, _REAL_SHARE)
        first, second = link.chain
        first_query = query_of(first)
        spend(rng)
        first_documents = texts.search(first_query)
        second_documents = texts.search(query_of(second))
        written = first._replace(answer=link.replaced_name or first.answer)
        # Drawn again if a passage is not found, because such a demonstration would teach to guess.
        if contains(first_documents, written.sentence) and contains(
            second_documents, second.sentence
        ):
            break
    disguise = _disguise_of_link(texts, rng, link)
    chain = _disguised(disguise, link.chain)
    demo = Demo('solver', {'question': chain.question})
    if with_path:
        path = [disguise(link.first['title']), chain.first.answer, chain.second.answer]
        demo = Demo('solver_with_path', {**demo.fields, 'path': ' > '.join(path)})
    demo.add_policy_text(f'<search> {disguise(first_query)}</search>')
    demo.add_documents(disguise.documents(first_documents))
    bridge_thought = think(marked(chain.first, with_right=False))
    demo.add_policy_text(f'{bridge_thought}<search> {query_of(chain.second)}</search>')
    demo.add_documents(disguise.documents(second_documents))
    spend(rng)
    add_answer(demo, chain.second)
    return demo


def proposer(texts: Texts, rng: Generator) -> Demo:
    """A document → a search for a name in it → a question about this name, and the answer."""
    while True:
        link = texts.draw_link(rng, _REAL_SHARE)
        documents = texts.search(link.chain.first.answer)
        # Drawn again if the search for the name does not return the clause.
        if contains(documents, link.chain.second.sentence):
            break
    disguise = _disguise_of_link(texts, rng, link)
    chain = _disguised(disguise, link.chain)
    document = disguise.document(link.first)
    demo = Demo('proposer', {'hops': 2, 'document': prompts.document_text(document)})
    bridge_thought = think(marked(chain.first, with_right=True))
    demo.add_policy_text(f'{bridge_thought}<search> {chain.first.answer}</search>')
    demo.add_documents(disguise.documents(documents))
    add_proposal(demo, chain.second, rng, question=chain.question)
    return demo
