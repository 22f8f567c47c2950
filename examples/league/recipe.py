"""A solver that plays against its own past, with one baseline per hop count that is a state of the run.

An answer earns its score minus the mean score of the rivals, two snapshots of the solver's weights. As in SPIRAL's
role-conditioned advantages (arXiv 2506.24119) the baseline is a moving average of what such questions have earned: the
advantage is A = R − b, b ← γ b + (1 − γ) R̄ after every step.
"""

import asyncio
import collections

from zeroplay_jax.recipes import dspo
from zeroplay_jax.selfplay.answers import final_answer, score
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.settings.kinds import Fraction, Section

RIVALS = ('past', 'best')


class Settings(Section):
    """Settings of the league."""

    decay: Fraction = 0.9
    """γ of the baselines; 0: the mean of the last step."""


class Recipe(dspo.Recipe):
    """A solver on given questions that has to be better than it was."""

    settings = {**dspo.Recipe.settings, 'league': Settings}

    def __init__(self, config, library):
        super().__init__(config, library)
        # Number of hops, as a text for the checkpoint → baseline.
        self.baselines = {}

    @classmethod
    def roles(cls, config):
        """Returns the solver, its weights at the end of the first iteration, and its best ones so far."""
        past = RoleSpec('past', 'solver', weights_from='solver@1')
        best = RoleSpec('best', 'solver', weights_from='solver@best')
        return (*super().roles(config), past, best)

    async def episode(self, context, step, task):
        """Runs the solver and its rivals on one question; returns the solver's rollouts as rows."""
        outcome = await super().episode(context, step, task)
        question = task.payload
        games = []
        for number, rival in enumerate(RIVALS, start=1):
            games.append(self._rival_score(context, rival, (*task.identity, number), question))
        rival_score = sum(await asyncio.gather(*games)) / len(RIVALS)
        for row in outcome.rows:
            row.parts['beats'] = row.reward - rival_score
            row.reward = row.parts['beats'] - self.baselines.get(str(question.hops), 0.0)
        return outcome

    async def _rival_score(self, context, rival, identity, question):
        (rollout,) = await context.ask(rival, identity, question=question.text)
        metric = self.config.reward.answer
        return await score(context, metric, identity, question, final_answer(rollout)) or 0.0

    def after_step(self, step, outcomes):
        """Moves the baselines towards what the questions of this step have earned."""
        earned = collections.defaultdict(list)
        for outcome in outcomes:
            for row in outcome.rows:
                earned[str(row.info.question.hops)].append(row.parts['beats'])
        moved = dict(self.baselines)
        for hops, values in sorted(earned.items()):
            decay = self.config.league.decay if hops in moved else 0.0
            moved[hops] = decay * moved.get(hops, 0.0) + (1 - decay) * sum(values) / len(values)
        self.baselines = moved

    def state(self):
        """Returns the baselines."""
        return {'baselines': self.baselines}

    def restore(self, state):
        """Sets the baselines."""
        self.baselines = dict(state['baselines'])
