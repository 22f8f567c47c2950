"""Dr. Zero: a proposer asks about documents, a solver answers by search, and they take turns learning.

An iteration trains the proposer against the frozen solver, lets it write a set of questions, and trains the solver
on them. The proposer is paid for questions that the solver solves sometimes but not always (Dr. Zero eq. 4) and for
their form; its advantages are relative to all proposals of the same hop count (HRPO, eq. 3), the solver's to all
answers to the same question (GRPO, eq. 5).
"""

from __future__ import annotations

import asyncio
import dataclasses

from zeroplay_jax.objectives import rewards
from zeroplay_jax.objectives.advantages import stratify
from zeroplay_jax.rollout import prompts
from zeroplay_jax.selfplay.corpus import Corpus
from zeroplay_jax.selfplay.engine import Phase, Step
from zeroplay_jax.selfplay.roles import Table, TaskDropped
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.types import Outcome, Row, Task, Trajectory, identity_rng

ROLES = ('proposer', 'solver')  # each with its own weights, both begun from config.policy
FINALS = {'proposer': ('answer',), 'solver': ('answer',)}


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a proposer's rollout says, read once."""

    question: str | None
    answer: str | None
    format: dict[str, float]
    grounded: bool
    rejected: str | None  # why it is not asked: unfinished, no_question, no_answer, leaks_answer, ungrounded


class Recipe:
    """The game; `config` is the run's, `corpus` what it plays with."""

    def __init__(self, config, corpus: Corpus):
        self.config, self.corpus = config, corpus
        self._by_hops = [
            [d for d in corpus.documents if d.depth >= hops] for hops in range(1, len(config.schedule.hop_ratio) + 1)
        ]

    def phases(self) -> list[Phase]:
        """iterations × (proposer, generate, solver)."""
        c = self.config
        batches = c.pool.batches or -(-c.solver.steps * c.solver.batch // c.pool.batch)
        round_ = [
            Phase('proposer', c.proposer.steps, trains='proposer'),
            Phase('generate', batches, clears_pool=True),
            Phase('solver', c.solver.steps, trains='solver'),
        ]
        return [dataclasses.replace(p, iteration=i) for i in range(c.schedule.iterations) for p in round_]

    def tasks(self, step: Step, pool: TaskPool) -> list[Task]:
        """The items of a step: documents with hop counts in the exact ratio, or questions of the pool."""
        c = self.config
        if step.phase.name == 'solver':
            items = pool.batch(c.seed, step.phase.iteration, step.index, c.solver.batch)
            return [Task((step.number, i), item) for i, item in enumerate(items)]
        size = c.pool.batch if step.phase.name == 'generate' else c.proposer.batch
        rng = identity_rng(c.seed, step.number)
        items = []
        for hops, count in enumerate(stratify(c.schedule.hop_ratio, size), 1):
            documents = self._by_hops[hops - 1]
            if count and not documents:
                raise ValueError(f'no document can open a question of {hops} hops: lower schedule.hop_ratio there')
            picked = rng.choice(len(documents), count, replace=count > len(documents))
            items += [dict(title=documents[d].title, text=documents[d].text, hops=hops) for d in picked]
        return [Task((step.number, i), item) for i, item in enumerate(items)]

    async def episode(self, table: Table, step: Step, task: Task) -> Outcome:
        """One item from its task to its rewards."""
        play = {'proposer': self._propose, 'generate': self._generate, 'solver': self._solve}[step.phase.name]
        try:
            return await play(table, task)
        except TaskDropped as drop:
            return Outcome(drop=drop.reason)

    # ---- proposer phase -------------------------------------------------------------------------------------

    async def _propose(self, table: Table, task: Task) -> Outcome:
        c, item = self.config, task.payload
        proposals = await self._proposals(table, task, c.proposer.samples)
        solved = await asyncio.gather(
            *(self._solve_rate(table, (*task.identity, i), p) for i, (_, p) in enumerate(proposals))
        )
        rows = []
        for (trajectory, proposal), k in zip(proposals, solved):
            row = self._row(task, trajectory, proposal)
            row.parts['format'] = c.reward.format_weight * proposal.format['raw'] * (proposal.rejected is None)
            row.parts['difficulty'] = 0.0
            if k is not None:
                row.info['solved'] = k
                row.parts['difficulty'] = rewards.difficulty(k, c.reward.solves, c.reward.difficulty)
            row.reward = row.parts['format'] + row.parts['difficulty']
            row.group = item['hops'] if c.schedule.group == 'hop' else task.identity[-1]
            rows.append(row)
        return Outcome(rows)

    def _row(self, task, trajectory, proposal) -> Row:
        parts = {f'format_{name}': value for name, value in proposal.format.items()}
        return Row('proposer', trajectory, 0.0, task.identity[-1], parts=parts, info=self._info(task, proposal))

    async def _proposals(self, table, task, samples) -> list[tuple[Trajectory, Proposal]]:
        item = task.payload
        fields = dict(hops=item['hops'], document=prompts.document_text(item))
        out = await table.ask('proposer', (*task.identity, 0), samples, **fields)
        return [(t, self.read(t, item)) for t in out]

    def read(self, trajectory: Trajectory, item) -> Proposal:
        """Question, answer and format score of a proposer's rollout about the document `item`."""
        final = trajectory.turns[-1].text if trajectory.finish == 'answer' else ''
        question, answer = rewards.extract_last(final, 'question'), rewards.extract_last(final, 'answer')
        shown = [d for turn in trajectory.turns for found in turn.documents for d in found]
        score = rewards.drzero_format(
            [turn.text for turn in trajectory.turns],
            calls=sum(bool(t.queries) and t.error is None for t in trajectory.turns),
            responses=sum(bool(t.documents) or t.error is not None for t in trajectory.turns),
            hops=item['hops'],
            question=question,
            answer=answer,
            source=f'{item["title"]} {item["text"]}',
            retrieved=' '.join(f'{d["title"]} {d["text"]}' for d in shown),
        )
        last = next((t.documents for t in reversed(trajectory.turns) if t.documents), None)
        text = ' '.join(d['text'] for found in last for d in found) if last else item['text']
        grounded = bool(question and answer and answer in text and item['title'] in question)
        rejected: str | None
        if trajectory.finish != 'answer':
            rejected = 'unfinished'
        elif score['raw'] == 0:
            rejected = 'no_question' if not question else 'no_answer' if not answer else 'leaks_answer'
        else:
            rejected = 'ungrounded' if self.config.reward.grounding and not grounded else None
        return Proposal(question, answer, score, grounded, rejected)

    async def _solve_rate(self, table, identity, proposal) -> int | None:
        """How many solver rollouts reach the proposer's answer; None where the question is not asked."""
        if proposal.rejected:
            return None
        tries = await table.ask('solver', (*identity, 1), self.config.reward.solves, question=proposal.question)
        return sum(self.correct(t, [proposal.answer]) for t in tries)

    # ---- generation -----------------------------------------------------------------------------------------

    async def _generate(self, table: Table, task: Task) -> Outcome:
        c = self.config.pool
        proposals = await self._proposals(table, task, c.samples)
        rows = [self._row(task, t, p) for t, p in proposals]
        best = max((p for _, p in proposals), key=lambda p: (p.rejected is None, p.format['raw']))  # first of equals
        if best.rejected:
            return Outcome(rows, drop=best.rejected)
        question = ' '.join(str(best.question).split()[: c.question_words])
        record = self._info(task, best) | {'question': question}
        if c.measure:
            tries = await table.ask('solver', (*task.identity, 1), c.measure, question=question)
            record['solve_rate'] = sum(self.correct(t, [best.answer]) for t in tries) / c.measure
            if not c.window[0] <= record['solve_rate'] <= c.window[1]:
                return Outcome(rows, drop='outside_window')
        return Outcome(rows, questions=[record])

    # ---- solver phase ---------------------------------------------------------------------------------------

    async def _solve(self, table: Table, task: Task) -> Outcome:
        item = task.payload
        tries = await table.ask('solver', task.identity, self.config.solver.samples, question=item['question'])
        rows = []
        for t in tries:
            hit = float(self.correct(t, item['answers']))
            info = {**item, 'answer_given': self.answer(t)}
            rows.append(Row('solver', t, reward=hit, group=task.identity[-1], parts={'exact_match': hit}, info=info))
        return Outcome(rows)

    @staticmethod
    def answer(trajectory: Trajectory) -> str | None:
        """The answer a solver ended with; None without one, or where the last call was never closed."""
        if trajectory.finish != 'answer':
            return None
        return rewards.extract_last(trajectory.turns[-1].text, 'answer')

    @classmethod
    def correct(cls, trajectory: Trajectory, answers) -> bool:
        """Exact match of the final answer."""
        return rewards.exact_match(cls.answer(trajectory), answers)

    @staticmethod
    def _info(task: Task, proposal: Proposal) -> dict:
        item = task.payload
        return {
            'question': proposal.question,
            'answers': [] if proposal.answer is None else [proposal.answer],
            'hops': item['hops'],
            'document': item['title'],
            'task': list(task.identity),
            **({'rejected': proposal.rejected} if proposal.rejected else {}),
        }
