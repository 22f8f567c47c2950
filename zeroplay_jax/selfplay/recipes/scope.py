"""SCOPE: a challenger sets open tasks, a solver does them, and the frozen beginner judges both by rubrics.

A task comes from a document and what the challenger found from there. The judge checks two gates (what the task names
can be found; it is about its document), writes rubrics, and grades every answer item by item. The challenger earns
form plus, past the gates, how near the solver's mean score comes to a target (SCOPE eqs. 4 and 5); the solver earns
its score, discounted by length, plus form and searching (eqs. 6 and 7). Roles take turns, as in Dr. Zero.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib

from zeroplay_jax.objectives import rewards
from zeroplay_jax.rollout import prompts
from zeroplay_jax.selfplay import files, solving
from zeroplay_jax.selfplay.corpus import Corpus
from zeroplay_jax.selfplay.engine import Draw, Phase, Step
from zeroplay_jax.selfplay.inputs import Deck, Documents, deck_tasks, pool_tasks
from zeroplay_jax.selfplay.judge import document_of
from zeroplay_jax.selfplay.phases import alternate
from zeroplay_jax.selfplay.roles import Seat, Table, TaskDropped
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.types import Json, Outcome, Row, Task, Trajectory

SEATS = (
    Seat('proposer', 'challenger', finals=('task',)),
    Seat('solver', 'task_solver'),
)
TRAINED = ('proposer', 'solver')


@dataclasses.dataclass
class Challenge:
    """A challenger's rollout and what the judge and the solver made of it."""

    trajectory: Trajectory
    task: str | None
    format: dict[str, float]
    rejected: str | None = None
    rubrics: list[dict[str, str]] = dataclasses.field(default_factory=list)
    graded: list[float] = dataclasses.field(
        default_factory=list
    )  # scores of the solver's answers that have one

    @property
    def score(self) -> float | None:
        """Their mean."""
        return solving.mean(self.graded) if self.graded else None


class Recipe:
    """The game; `config` is the run's, `corpus` what it plays with."""

    def __init__(self, config, corpus: Corpus):
        self.config, self.documents = config, Documents(config, corpus)
        self._deck = (
            Deck(files.open_tasks(config.inputs.tasks), config.seed)
            if config.inputs.tasks
            else None
        )

    def phases(self) -> list[Phase]:
        """iterations × (challenger, tasks, solver); only a solver where the tasks are given."""
        if self._deck:
            return [Phase('solver', self.config.solver.steps, ('solver',))]
        return alternate(self.config)

    def tasks(self, step: Step, pool: TaskPool, draw: Draw) -> list[Task]:
        """Documents with a number of searches in the exact ratio, or tasks of the pool."""
        if self._deck:
            return deck_tasks(self.config, self._deck, step, draw)
        if step.phase.name == 'solver':
            return pool_tasks(self.config, step, pool, draw)
        size = (
            self.config.pool.batch if step.phase.name == 'generate' else self.config.proposer.batch
        )
        return self.documents.tasks(step, size) if draw.round == 0 else []

    async def episode(self, table: Table, step: Step, task: Task) -> Outcome:
        """Plays one item of any phase."""
        play = {'proposer': self._challenge, 'generate': self._generate, 'solver': self._solve}[
            step.phase.name
        ]
        try:
            return await play(table, task)
        except TaskDropped as drop:
            return Outcome(drop=drop.reason)

    # ---- the challenger -------------------------------------------------------------------------------------

    async def _challenge(self, table: Table, task: Task) -> Outcome:
        made = await self._challenges(table, task, self.config.proposer.samples)
        return Outcome([self._row(task, challenge) for challenge in made])

    async def _generate(self, table: Table, task: Task) -> Outcome:
        """At most one task per document: the first whose measured score lies in the window."""
        made = await self._challenges(table, task, self.config.pool.samples)
        low, high = self.config.pool.window
        kept = next(
            (m for m in made if m.rejected is None and low <= (m.score or 0.0) <= high), None
        )
        rows = [self._row(task, challenge) for challenge in made]
        if kept is None:
            return Outcome(rows, drop=made[0].rejected or 'outside_window')
        return Outcome(rows, questions=[self._record(task, kept) | {'score': kept.score}])

    async def _challenges(self, table, task, samples) -> list[Challenge]:
        item = task.payload
        document = prompts.document_text(item) if self.config.schedule.initial_document else ''
        kind = prompts.KINDS.get(item.get('type', ''), item.get('type', ''))
        fields = dict(hops=item['hops'], document=document, kind=kind)
        out = await table.ask('proposer', (*task.identity, 0), samples, **fields)
        found = [self._read(t, item) for t in out]

        async def judged(i, m):
            try:
                await self._try(table, (*task.identity, i), item, m)
            except TaskDropped as drop:
                m.rejected = drop.reason

        await asyncio.gather(*(judged(i, m) for i, m in enumerate(found)))
        return found

    def _read(self, t: Trajectory, item: Json) -> Challenge:
        final = t.turns[-1].text if t.finish == 'answer' else ''
        named = rewards.extract_last(final, 'task')
        form = rewards.scope_challenger_format(
            [turn.text for turn in t.turns],
            searches=t.calls,
            malformed=t.errors,
            expected=max(item['hops'] - self.config.schedule.searches_below_hops, 1),
            task=named,
            code=self.config.reward.code_format,
        )
        return Challenge(t, named, form, None if named else 'no_task')

    async def _try(self, table: Table, identity, item: Json, m: Challenge) -> None:
        """Gates, rubrics and trial answers of one task, in the order in which they can turn it away."""
        if m.rejected:
            return
        assert table.judge is not None
        task, known = str(m.task), document_of([item, *solving.shown(m.trajectory)])
        if self.config.check.on:
            for i, gate in enumerate(('entities', 'relevance')):
                if not await table.judge.gate((*identity, 1, i), gate, task, known):
                    m.rejected = f'gate_{gate}'
                    return
        m.rubrics = await table.judge.rubrics((*identity, 2), task, known) or []
        if not m.rubrics:
            m.rejected = 'no_rubrics'
            return
        tries = await table.ask('solver', (*identity, 3), self.config.reward.solves, task=task)
        graded = await asyncio.gather(
            *(
                solving.grade(table, (*identity, 4, i), task, m.rubrics, solving.answer(t))
                for i, t in enumerate(tries)
            )
        )
        # An answer that could not be graded says nothing about the task; one without an answer is worth nothing.
        m.graded = [g for g in graded if g is not None]
        m.rejected = None if m.graded else 'ungraded'

    def _row(self, task: Task, m: Challenge) -> Row:
        c = self.config.reward
        parts = {f'format_{name}': value for name, value in m.format.items()}
        parts['format'] = c.format_weight * m.format['raw']
        passed = m.rejected is None and m.score is not None
        parts['difficulty'] = 0.0
        if passed:
            parts['difficulty'] = rewards.difficulty(
                sum(m.graded), len(m.graded), c.difficulty, c.target
            )
        info = self._record(task, m) | {'valid': passed, 'score': m.score}
        if m.rejected:
            info['rejected'] = m.rejected
        reward = parts['format'] + parts['difficulty']
        drop = (
            'ungraded' if m.rejected == 'ungraded' else None
        )  # nobody knows what the task is worth
        return Row(
            'proposer', m.trajectory, reward, solving.group_of(task.identity), parts, drop, info
        )

    @staticmethod
    def _record(task: Task, m: Challenge) -> dict:
        item = task.payload
        known = dict(
            hops=item['hops'],
            document=item['title'],
            task=list(task.identity),
            version=m.trajectory.version,
        )
        known |= {name: item[name] for name in ('type', *files.PROVENANCE) if name in item}
        known['only'] = hashlib.sha256(prompts.document_text(item).encode()).hexdigest()[
            :16
        ]  # one task per document
        return dict(question=m.task, rubrics=m.rubrics, answers=[], **known)

    # ---- the solver -----------------------------------------------------------------------------------------

    async def _solve(self, table: Table, task: Task) -> Outcome:
        c, item = self.config, task.payload
        tries = await table.ask('solver', task.identity, c.solver.samples, task=item['question'])
        scores = await asyncio.gather(
            *(
                solving.grade(
                    table,
                    (*task.identity, 4, i),
                    item['question'],
                    item['rubrics'],
                    solving.answer(t),
                )
                for i, t in enumerate(tries)
            )
        )
        return Outcome([self._answered(table, task, t, score) for t, score in zip(tries, scores)])

    def _answered(self, table: Table, task: Task, t: Trajectory, score: float | None) -> Row:
        c, given = self.config.reward, solving.answer(t)
        length = len(table.roles['solver'].env.codec.encode_plain(given or ''))
        limits = dict(soft=c.soft_length, hard=c.hard_length)
        factor = rewards.length_factor(length, **limits) if c.length_factor else 1.0
        form = rewards.scope_solver_format(
            [turn.text for turn in t.turns],
            searches=sum(bool(turn.queries) for turn in t.turns[:-1]),
            answer=given,
            code=c.code_format,
        )
        parts = {f'format_{name}': value for name, value in form.items()}
        parts |= {
            'rubrics': factor * (score or 0.0),
            'length_factor': factor,
            'format': c.format_weight * form['raw'],
            'search': c.search_weight * rewards.search_bonus(t.calls),
        }
        if c.overlong_buffer:
            parts['overlong'] = solving.overlong(self.config, t)
        reward = parts['rubrics'] + parts['format'] + parts['search'] + parts.get('overlong', 0.0)
        info = {**task.payload, 'answer_given': given, 'score': score}
        drop = 'ungraded' if score is None else None
        return Row(
            'solver', t, reward, solving.group_of(task.identity), parts, drop=drop, info=info
        )
