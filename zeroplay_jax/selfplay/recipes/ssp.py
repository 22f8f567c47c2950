"""SSP: one policy hides an answer in a question and, as solver, finds it again; every step trains both.

The proposer gets an answer and searches backwards for a question. A rule gate turns bad ones away; a check asks the
policy to answer from what the proposer read, mixed with what others read, without searching: a question that this
does not answer is not unique, or not founded. What passes is solved n times. The proposer earns the share of rollouts
that fail (SSP alg. 1), the solver its answers; where questions fall away, the batch is filled as `config.fill` says.
"""

from __future__ import annotations

from typing import Any

from zeroplay_jax.objectives import rewards
from zeroplay_jax.rollout.tools import passages_text
from zeroplay_jax.selfplay import files, solving
from zeroplay_jax.selfplay.corpus import Corpus
from zeroplay_jax.selfplay.engine import Draw, Phase, Step
from zeroplay_jax.selfplay.inputs import Deck, answers
from zeroplay_jax.selfplay.phases import together
from zeroplay_jax.selfplay.roles import Seat, Table, TaskDropped
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.types import Json, Outcome, Row, Task, Trajectory, identity_rng

SEATS = (
    Seat('proposer', 'proposer_from_answer', finals=('question',)),
    Seat('solver', 'solver'),
    Seat('checker', 'answer_from_documents', plays_as='solver', searches=False),
)
TRAINED = ('proposer', 'solver')
# The thresholds of the released code, which its paper does not have.
_CODE_GATE: dict[str, Any] = dict(
    chars=(10, 1000), words=10, searches=2, distinct=True, whole_words=False
)


class Recipe:
    """The game; `config` is the run's, `corpus` what it plays with."""

    def __init__(self, config, corpus: Corpus):
        self.config, self._deck = config, Deck(answers(config, corpus), config.seed)

    def phases(self) -> list[Phase]:
        """Both roles learn in every step."""
        c = self.config
        order = ('solver', 'proposer') if c.schedule.first == 'solver' else ('proposer', 'solver')
        return together(c, c.solver.steps, order)

    def tasks(self, step: Step, pool: TaskPool, draw: Draw) -> list[Task]:
        """A batch of answers; then, by `config.fill`, more answers or old questions in place of what fell away."""
        c, kind = self.config, self.config.fill.kind
        if draw.round == 0:
            return self._hide(step, draw, c.proposer.batch)
        if kind == 'resample' and draw.missing and draw.round <= c.fill.rounds:
            return self._hide(step, draw, draw.missing)
        if kind.startswith('replay') and draw.missing and draw.round == 1:
            old = pool.batch(c.seed, step.number, 0, draw.missing)
            return [Task((step.number, draw.step + i), item) for i, item in enumerate(old)]
        return []

    def _hide(self, step, draw, count) -> list[Task]:
        """`count` answers; beside each, whose passages are mixed in: the next ones of the step, in a circle."""
        total = draw.step + count
        beside = min(self.config.check.noise, total - 1)
        tasks = []
        for i, item in zip(
            range(draw.step, total), self._deck.deal(draw.outside, count), strict=True
        ):
            near = [[step.number, (i + 1 + j) % total] for j in range(beside)]
            tasks.append(Task((step.number, i), dict(item, beside=near), outside=True))
        return tasks

    async def episode(self, table: Table, step: Step, task: Task) -> Outcome:
        """An answer hidden, checked and looked for; or an old question solved again."""
        try:
            if 'question' in task.payload:
                return Outcome(await solving.rows(table, self.config, task, task.payload))
            return await self._hidden(table, task)
        except TaskDropped as drop:
            return Outcome(drop=drop.reason)
        finally:  # whoever waits for this one's passages must not wait for ever
            table.hosts.publish(task.identity, [])

    async def _hidden(self, table: Table, task: Task) -> Outcome:
        c, item = self.config, task.payload
        made = await table.ask(
            'proposer',
            (*task.identity, 0),
            c.proposer.samples,
            hops=item['hops'],
            answer=item['answer'],
        )
        # What a proposer has read is noise for the checks of the others.
        table.hosts.publish(task.identity, [d for t in made for d in solving.shown(t)])
        group = solving.group_of(task.identity)
        rows, solved_rows, questions, reasons = [], [], [], []
        for i, trajectory in enumerate(made):
            question = self._question(trajectory)
            record = dict(
                question=question,
                answers=[item['answer']],
                hops=item['hops'],
                task=list(task.identity),
            )
            record |= files.provenance(item)
            reason, tries = self._gate(trajectory, question, item), []
            try:
                if reason is None and c.check.on:
                    reason = await self._check(table, task, i, trajectory, str(question))
                if reason is None:
                    tries = await solving.rows(table, c, Task((*task.identity, 1, i), {}), record)
            except TaskDropped as drop:
                reason = drop.reason
            for row in tries if i else []:  # each question of an answer is a group of its own
                row.group = -(group * c.proposer.samples + i)
            known = [row.info['score'] for row in tries if row.drop is None]
            info, reward = record | {'valid': reason is None}, c.reward.invalid
            if reason is None:
                questions.append(record)
                solved_rows += tries
                if known:
                    reward = rewards.difficulty(
                        sum(known), len(known), c.reward.difficulty, c.reward.target
                    )
                info['solved'] = sum(score >= 0.5 for score in known)
            else:
                info['rejected'] = reason
                reasons.append(reason)
            # Where no attempt could be judged, nobody knows what the question is worth.
            unknown = 'ungraded' if reason is None and not known else None
            rows.append(Row('proposer', trajectory, reward, group, {'hard': reward}, unknown, info))
        return Outcome(rows + solved_rows, questions, drop=None if questions else reasons[0])

    @staticmethod
    def _question(trajectory: Trajectory) -> str | None:
        return (
            rewards.extract_last(trajectory.turns[-1].text, 'question')
            if trajectory.finish == 'answer'
            else None
        )

    def _gate(self, trajectory: Trajectory, question: str | None, item: Json) -> str | None:
        """Why a question is turned away by rule, or None."""
        if trajectory.finish != 'answer':
            return 'unfinished'
        queries = [
            query for turn in trajectory.turns if turn.error is None for query in turn.queries
        ]
        return rewards.ssp_gate(
            question, [item['answer']], queries, **(_CODE_GATE if self.config.check.code else {})
        )

    async def _check(
        self, table: Table, task: Task, sample: int, trajectory: Trajectory, question: str
    ) -> str | None:
        """'unanswerable' unless the question is answered from the passages read, among those that others read."""
        own = solving.shown(trajectory)
        others = [await table.hosts.await_published(tuple(name)) for name in task.payload['beside']]
        if self.config.check.unit == 'document':
            others = [found[:1] for found in others]
        read = {d['id'] for d in own}
        noise = [d for found in others for d in found if d['id'] not in read]
        rng = identity_rng(self.config.seed, *task.identity, 2)
        limit = table.roles['checker'].prompt_tokens
        while True:  # noise goes first where the prompt gets too long
            shown = own + noise
            order = rng.permutation(len(shown))
            fields = dict(
                documents=passages_text([[shown[i] for i in order]], 'search_r1'), question=question
            )
            if not noise or len(table.prompt('checker', **fields)) <= limit:
                break
            noise = noise[:-1]
        (reply,) = await table.ask('checker', (*task.identity, 2, sample), 1, 0.0, **fields)
        item = dict(question=question, answers=[task.payload['answer']])
        metric = self.config.reward.answer
        given = solving.answer(reply)
        right = await solving.score(table, metric, (*task.identity, 3, sample), item, given)
        return None if right is not None and right >= 0.5 else 'unanswerable'
