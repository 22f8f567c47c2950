"""Dr. Zero: a proposer asks about documents, a solver answers by search, and they take turns learning.

An iteration trains the proposer against the frozen solver, lets it write a set of questions, and trains the solver
on them. The proposer is paid for questions that the solver solves sometimes but not always (Dr. Zero eq. 4) and for
their form; its advantages are relative to all proposals of the same hop count (HRPO, eq. 3), the solver's to all
answers to the same question (GRPO, eq. 5).
"""

from __future__ import annotations

import asyncio

from zeroplay_jax.objectives import rewards
from zeroplay_jax.selfplay import proposals, solving
from zeroplay_jax.selfplay.corpus import Corpus
from zeroplay_jax.selfplay.engine import Draw, Phase, Step
from zeroplay_jax.selfplay.inputs import Documents, pool_tasks
from zeroplay_jax.selfplay.phases import alternate
from zeroplay_jax.selfplay.roles import Seat, Table, TaskDropped
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.types import Outcome, Task

SEATS = (Seat('proposer', 'proposer'), Seat('solver', 'solver'))
TRAINED = ('proposer', 'solver')


class Recipe:
    """The game; `config` is the run's, `corpus` what it plays with."""

    def __init__(self, config, corpus: Corpus):
        self.config, self.documents = config, Documents(config, corpus)

    def phases(self) -> list[Phase]:
        """iterations × (proposer, generate, solver)."""
        return alternate(self.config)

    def tasks(self, step: Step, pool: TaskPool, draw: Draw) -> list[Task]:
        """The items of a step: documents with hop counts in the exact ratio, or questions of the pool."""
        if step.phase.name == 'solver':
            return pool_tasks(self.config, step, pool, draw)
        size = (
            self.config.pool.batch if step.phase.name == 'generate' else self.config.proposer.batch
        )
        return self.documents.tasks(step, size) if draw.round == 0 else []

    async def episode(self, table: Table, step: Step, task: Task) -> Outcome:
        """Plays one item of any phase."""
        play = {'proposer': self._propose, 'generate': self._generate, 'solver': self._solve}[
            step.phase.name
        ]
        try:
            return await play(table, task)
        except TaskDropped as drop:
            return Outcome(drop=drop.reason)

    async def _propose(self, table: Table, task: Task) -> Outcome:
        c = self.config
        made = await proposals.propose(table, c, task, c.proposer.samples)
        solved = await asyncio.gather(
            *(
                self._solved(table, (*task.identity, i), p, c.reward.solves)
                for i, p in enumerate(made)
            )
        )
        rows = []
        for proposal, k in zip(made, solved):
            row = proposals.row(task, proposal)
            row.parts['format'] = (
                c.reward.format_weight * proposal.format['raw'] * (proposal.rejected is None)
            )
            row.parts['difficulty'] = 0.0
            if k is None and proposal.rejected is None:
                row.info['rejected'] = 'prompt_too_long'
            if k is not None:
                row.info['solved'] = k
                row.parts['difficulty'] = rewards.difficulty(
                    k, c.reward.solves, c.reward.difficulty, c.reward.target
                )
            row.reward = row.parts['format'] + row.parts['difficulty']
            if c.schedule.group == 'hop':
                row.group = task.payload['hops']
            rows.append(row)
        return Outcome(rows)

    async def _solved(self, table, identity, proposal, samples) -> int | None:
        """How many solver rollouts reach the proposer's answer; None where the question is not asked."""
        if proposal.rejected or not samples:
            return None
        item = {'question': proposal.question, 'answers': [proposal.answer]}
        try:
            return await solving.solve_rate(
                table, self.config.reward.answer, (*identity, 1), item, samples
            )
        except TaskDropped:  # too long to be asked: its form is paid, its siblings stay
            return None

    async def _generate(self, table: Table, task: Task) -> Outcome:
        c = self.config.pool
        made = await proposals.propose(table, self.config, task, c.samples)
        rows = [proposals.row(task, p) for p in made]
        best = max(made, key=lambda p: (p.rejected is None, p.format['raw']))  # the first of equals
        if best.rejected:
            return Outcome(rows, drop=best.rejected)
        question = ' '.join(str(best.question).split()[: c.question_words])
        record = self.record(task, best) | {'question': question}
        solved = await self._solved(table, task.identity, best, c.measure)
        if c.measure and solved is None:
            return Outcome(rows, drop='prompt_too_long')
        if solved is not None:
            record['solve_rate'] = solved / c.measure
            if not c.window[0] <= record['solve_rate'] <= c.window[1]:
                return Outcome(rows, drop='outside_window')
        return Outcome(rows, questions=[record])

    def record(self, task: Task, proposal: proposals.Proposal) -> dict:
        """What the pool keeps of a question, with the way it was made where a teacher will read that."""
        record = proposals.record(task, proposal)
        if self.config.solver.distill_top_k:
            record['path'] = proposals.path(task, proposal)
        return record

    async def _solve(self, table: Table, task: Task) -> Outcome:
        return Outcome(await solving.rows(table, self.config, task, task.payload))
