"""Dr. Zero with grounded questions: what the proposer read answers them, and they are as long as was asked for.

The check reads the sentences of the miniature world and does not know its facts. It takes the place of a judge that
decides whether the passages support every step. On other texts such a judge makes errors, which this one does not.
"""

import dataclasses

from zeroplay_jax.mini import facts
from zeroplay_jax.objectives.answers import normalize_answer
from zeroplay_jax.recipes import drzero
from zeroplay_jax.selfplay.answers import retrieved_passages


class Recipe(drzero.Recipe):
    """Proposer and solver with separate weights; ungrounded proposals earn nothing and are not asked."""

    async def proposals(self, context, task, samples):
        """Returns the proposals on a document, the ungrounded ones rejected."""
        proposals = await super().proposals(context, task, samples)
        return [checked(proposal, task.payload) for proposal in proposals]


def checked(proposal, seed):
    """Returns the proposal, rejected if it is ungrounded."""
    if proposal.rejected or is_grounded(proposal, seed):
        return proposal
    return dataclasses.replace(proposal, rejected='ungrounded', earns_form=False)


def is_grounded(proposal, seed):
    """Returns whether the answer follows from the passages read, in `seed.hops` steps or more."""
    passages = [(seed.title, seed.text)]
    for passage in retrieved_passages(proposal.trajectory):
        passages.append((passage['title'], passage['text']))
    chain = proposal.question.removeprefix('What is ').removesuffix('?')
    entity = facts.described_entity(f'Describe {chain}.', passages)
    return chain.count(' of ') >= seed.hops and entity == normalize_answer(proposal.answer)
