"""Dr. Zero with composed questions: one that needs three facts or more is made of parts of one or two.

The proposer asks about a document, and goes on with the document of its own answer. In the next question that answer
is replaced by what the question before it asks for, as the start restates it: 'What is the author of Tira?', whose
answer is Gumu, and 'What is the owner of Gumu?' become 'What is the owner of the author of Tira?'. No role asks for
more facts at once than its demonstrations had, and the solver confirms every part. MuSiQue (arXiv 2108.00573) composes
questions of annotators like this.
"""

import asyncio
import dataclasses
import re

from zeroplay_jax.objectives.answers import extract_last, normalize_answer
from zeroplay_jax.recipes import drzero, proposing, solving
from zeroplay_jax.recipes.datasets import SeedDocument
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.types import Question

RESTATE = {
    # An exercise of the start of the quickstart, which thinks the phrase and writes nothing.
    'mini': 'Restate.\nQuestion: {question}',
    'full': 'Turn the question into a noun phrase for what it asks, in <phrase> </phrase>. Question: {question}',
}


class Recipe(drzero.Recipe):
    """Proposer and solver with separate weights, and the start, which restates questions."""

    prompts = {**drzero.Recipe.prompts, 'restate': RESTATE}

    def __init__(self, config, library):
        super().__init__(config, library)
        self.corpus = library.training

    @classmethod
    def roles(cls, config):
        """Adds the role that turns a question into the phrase of what it asks for; it is not trained."""
        restater = RoleSpec('restater', 'restate', ('phrase',), weights_from='initial', tools=())
        return (*super().roles(config), restater)

    async def proposals(self, context, task, samples):
        """Returns proposals of up to two hops as they are, longer ones composed."""
        if task.payload.hops < 3:
            return await super().proposals(context, task, samples)
        pending = [self._composed(context, task, number) for number in range(samples)]
        return await asyncio.gather(*pending)

    async def _composed(self, context, task, number):
        """Returns one proposal: the rollout of the last part, with the composed question in it."""
        identity = (*task.identity, number)
        first, *others = _lengths(task.payload.hops)
        proposal = await self._asked(context, task, (*identity, 2), task.payload, first)
        for part, hops in enumerate(others, 3):
            if proposal.rejected:
                break
            document = await self._document(proposal.answer)
            if document is None:
                return dataclasses.replace(proposal, rejected='no_document')
            phrase = await self._phrase(context, (*identity, part), proposal.question)
            following = await self._asked(context, task, (*identity, part), document, hops)
            proposal = _replaced(following, proposal.answer, phrase)
        return proposal

    async def _phrase(self, context, identity, question):
        """Returns what a question asks for as a phrase, '' if the reply has none."""
        (rollout,) = await context.ask('restater', identity, question=question)
        reply = rollout.turns[-1].text
        return (extract_last(reply, 'phrase') or extract_last(reply, 'think') or '').strip()

    async def _asked(self, context, task, identity, seed, hops):
        """Returns a proposal about the document `seed`, rejected unless the solver gives the same answer."""
        part = dataclasses.replace(
            task, identity=identity, payload=dataclasses.replace(seed, hops=hops)
        )
        (proposal,) = await proposing.propose(
            context, 'proposer', part, 1, show_document=self.config.schedule.initial_document
        )
        if proposal.rejected:
            return proposal
        # A part asks for no more facts than the solver was shown, so it mostly knows; a composed question may be beyond
        # it.
        question = Question(proposal.question, (proposal.answer,))
        _, (attempt,) = await solving.attempts(
            context, self.config, 'solver', identity, question, 1
        )
        if attempt.value < 0.5:
            return dataclasses.replace(proposal, rejected='unconfirmed')
        return proposal

    async def _document(self, title):
        """Returns the document with this title as a start; None if a search does not find it."""
        (passages,) = await asyncio.to_thread(self.corpus.search, [title])
        for passage in passages or ():
            if normalize_answer(passage['title']) == normalize_answer(title):
                return SeedDocument(passage['title'], passage['text'], 1)
        return None


def _lengths(hops):
    """Returns the hops of the parts: twos, behind a one where the number is odd."""
    return [1] * (hops % 2) + [2] * (hops // 2)


def _replaced(proposal, answer, phrase):
    """Returns a proposal with `phrase` in place of the answer before it; rejected where that leaves no question."""
    if proposal.rejected:
        return proposal
    # Not within a longer name.
    name = rf'(?<!\w){re.escape(answer)}(?!\w)'
    question = re.sub(name, lambda match: phrase, proposal.question)
    if not phrase or question == proposal.question:
        return dataclasses.replace(proposal, rejected='not_composed')
    if answer in question or proposal.answer in question:
        return dataclasses.replace(proposal, rejected='leaks_answer')
    return dataclasses.replace(proposal, question=question)
