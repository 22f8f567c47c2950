"""Dr. Zero with composed questions: one that needs three facts or more is made of two shorter ones.

The proposer asks for the first half of the facts about a document, and for the others about the document of its own
answer. In the second question that answer is replaced by what the first one asks for, as the start restates it:
'What is the owner of Gumu?' and 'What is the author of Tira?', whose answer is Gumu, become 'What is the owner of the
author of Tira?'. No role asks for more facts at once than its demonstrations had. Questions of one hop that share an
entity are composed in the same way in MuSiQue (arXiv 2108.00573), from questions of annotators.
"""

import asyncio
import dataclasses

from zeroplay_jax.objectives.rewards import extract_last
from zeroplay_jax.recipes import drzero, proposing
from zeroplay_jax.recipes.datasets import SeedDocument
from zeroplay_jax.selfplay.recipe import RoleSpec

RESTATED = 'Restate.\nQuestion: {question}'


class Recipe(drzero.Recipe):
    """Proposer and solver with separate weights, and the start, which restates questions."""

    prompts = {**drzero.Recipe.prompts, 'restate': RESTATED}

    def __init__(self, config, library):
        super().__init__(config, library)
        self.corpus = library.training

    @classmethod
    def roles(cls, config):
        """Adds the role that turns a question into the phrase of what it asks for; it is not trained."""
        restater = RoleSpec('restater', 'restate', (), weights_from='initial', tools=())
        return (*super().roles(config), restater)

    async def proposals(self, context, task, samples):
        """Returns proposals of up to two hops as they are, longer ones composed."""
        if task.payload.hops < 3:
            return await super().proposals(context, task, samples)
        pending = [self._composed(context, task, number) for number in range(samples)]
        return await asyncio.gather(*pending)

    async def _composed(self, context, task, number):
        """Returns one proposal: the rollout of the second question, with the composed question in it."""
        seed = task.payload
        first_hops = seed.hops // 2
        identity = (*task.identity, number)
        first = await self._asked(context, task, (*identity, 2), seed, first_hops)
        if first.rejected:
            return first
        document = await self._document(first.answer)
        if document is None:
            return dataclasses.replace(first, rejected='no_document')
        second = await self._asked(context, task, (*identity, 3), document, seed.hops - first_hops)
        if second.rejected:
            return second
        (rollout,) = await context.ask('restater', (*identity, 4), question=first.question)
        phrase = extract_last(rollout.turns[-1].text, 'think') or rollout.turns[-1].text
        question = second.question.replace(first.answer, phrase.strip())
        rejected = None
        if question == second.question:
            rejected = 'not_composed'
        elif first.answer in question or second.answer in question:
            rejected = 'leaks_answer'
        return dataclasses.replace(second, question=question, rejected=rejected)

    async def _asked(self, context, task, identity, seed, hops):
        """Returns a proposal about the document `seed`."""
        part = dataclasses.replace(
            task, identity=identity, payload=dataclasses.replace(seed, hops=hops)
        )
        (proposal,) = await proposing.propose(
            context, 'proposer', part, 1, show_document=self.config.schedule.initial_document
        )
        return proposal

    async def _document(self, title):
        """Returns the document with this title as a start; None if a search does not find it."""
        (passages,) = await asyncio.to_thread(self.corpus.search, [title])
        for passage in passages or ():
            if passage['title'] == title:
                return SeedDocument(title, passage['text'], 1)
        return None
