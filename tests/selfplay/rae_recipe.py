"""Dr. Zero with role-conditioned advantages (SPIRAL, arXiv 2506.24119) against frozen opponents.

Written from docs/recipes.md and docs/recipe-reference.md alone. A phase trains one role on documents; the other one
plays with its weights at the end of the iteration before. The advantage is the reward minus a moving average of what
the role has earned.
"""

from zeroplay_jax.objectives import rewards
from zeroplay_jax.recipes import drzero, proposing, solving
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.settings.kinds import Fraction, Problem, Section
from zeroplay_jax.types import Outcome, TaskDropped

PLAYERS = ('proposer', 'solver')


class Settings(Section):
    """Settings of the game."""

    decay: Fraction = 0.95
    """Weight of the past in the baselines."""


def opponent(role, iteration):
    return f'{role}_before_{iteration}'


class Recipe(drzero.Recipe):
    """Proposer and solver, each trained against the other one's past."""

    settings = {**drzero.Recipe.settings, 'rae': Settings}
    has_pool = False

    def __init__(self, config, library):
        super().__init__(config, library)
        self.baselines = dict.fromkeys(PLAYERS, 0.0)

    @classmethod
    def roles(cls, config):
        frozen = []
        for iteration in range(config.schedule.iterations):
            for role in PLAYERS:
                weights = f'{role}@{iteration}' if iteration else 'initial'
                frozen.append(RoleSpec(opponent(role, iteration), role, weights_from=weights))
        return (*super().roles(config), *frozen)

    @classmethod
    def check(cls, config):
        for role in PLAYERS:
            if config[role].baseline != 'none':
                yield Problem(f'{role}.baseline', 'the game has its own; give none')

    def phases(self):
        return [
            Phase(f'train {role}', self.config[role].steps, (role,), iteration)
            for iteration in range(self.config.schedule.iterations)
            for role in PLAYERS
        ]

    def tasks(self, step, pool, cursor):
        (role,) = step.phase.trains
        return [] if cursor.round else self.documents.tasks(step, self.config[role].batch)

    async def episode(self, context, step, task):
        (role,) = step.phase.trains
        play = self._propose_against if role == 'proposer' else self._solve_against
        rows = await play(context, task, step.phase.iteration)
        for row in rows:
            row.parts['return'] = row.reward
            row.reward -= self.baselines[role]
        return Outcome(rows)

    async def _propose_against(self, context, task, iteration):
        rows = []
        solver = opponent('solver', iteration)
        proposals = await self.proposals(context, task, self.config.proposer.samples)
        for number, proposal in enumerate(proposals):
            row = proposing.proposal_row('proposer', task, proposal)
            rows.append(row)
            if proposal.rejected:
                continue
            question = proposing.question_record(task, proposal)
            identity = (*task.identity, 1, number)
            solves = self.config.reward.solves
            _, scored = await solving.attempts(
                context, self.config, solver, identity, question, solves
            )
            solved, of = solving.solve_count(scored)
            row.info.solve_count = solved
            row.reward = rewards.difficulty(solved, of, self.config.reward.difficulty)
        return rows

    async def _solve_against(self, context, task, iteration):
        proposer = opponent('proposer', iteration)
        (proposal,) = await proposing.propose(context, proposer, task, 1, show_document=True)
        if proposal.rejected:
            raise TaskDropped(proposal.rejected)
        question = proposing.question_record(task, proposal)
        return await solving.solver_rows(context, self.config, 'solver', task, question)

    def after_step(self, step, outcomes):
        (role,) = step.phase.trains
        returns = [row.parts['return'] for outcome in outcomes for row in outcome.rows]
        if returns:
            decay = self.config.rae.decay
            moved = decay * self.baselines[role] + (1 - decay) * sum(returns) / len(returns)
            self.baselines = {**self.baselines, role: moved}

    def state(self):
        return {'baselines': self.baselines}

    def restore(self, state):
        self.baselines = dict(state['baselines'])
