"""A solver whose searches are paid for what they add to the evidence for the answer, beside the answer itself.

After IGPO (arXiv 2510.14967): turn t earns p_t − p_{t−1}, with p the policy's probability of the accepted answer. Here
p is what was read instead: 1 once a passage contains the answer, 0 before.
"""

import numpy as np

from zeroplay_jax.objectives.answers import sub_exact_match
from zeroplay_jax.recipes import dspo
from zeroplay_jax.settings.kinds import NonNegativeFloat, Section


class Settings(Section):
    """Settings of the credit."""

    weight: NonNegativeFloat = 0.5
    """Reward of the turn that reads the answer first; a right answer earns 1."""


class Recipe(dspo.Recipe):
    """A solver on given questions, with a reward for every search."""

    settings = {**dspo.Recipe.settings, 'turn_credit': Settings}
    turn_reward_roles = ('solver',)

    async def episode(self, context, step, task):
        """Runs the solver on one question and adds the rewards of its turns."""
        outcome = await super().episode(context, step, task)
        for row in outcome.rows:
            # The accepted answers; those of a proposer would be pseudo answers.
            gains = evidence_gains(row.trajectory, row.info.question.answers)
            row.turn_rewards = self.config.turn_credit.weight * gains
        return outcome


def evidence_gains(trajectory, answers):
    """Returns, float64 [U], by how much each turn raised the evidence for the answer; NaN for turns without a search.

    The gains of a rollout sum to 1 if it has read the answer, and to 0 if not: reading it again earns nothing.
    """
    gains = np.full(len(trajectory.turns), np.nan)
    evidence = 0.0
    for number, turn in enumerate(trajectory.turns):
        if turn.call is None or not turn.call.documents:
            continue
        texts = [passage['text'] for passages in turn.call.documents for passage in passages]
        now = max(evidence, float(any(sub_exact_match(text, answers) for text in texts)))
        gains[number] = now - evidence
        evidence = now
    return gains
