"""Plays a recipe: many episodes at once, then one update per trained role from what they yielded. Knows no paper.

tasks → episodes over the slots → rows → groups that say something → advantages → packed batches → update → publish
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.packing import pack
from zeroplay_jax.objectives import advantages, aggregation, schedules
from zeroplay_jax.objectives.types import Stats
from zeroplay_jax.policy import sharding
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.runtime.hosts import sums
from zeroplay_jax.selfplay import rows as row_tools
from zeroplay_jax.selfplay.roles import Table
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.types import POLICY, Json, Outcome, Row, Task


@dataclasses.dataclass(frozen=True)
class Phase:
    """A run of like steps.

    Attributes:
      trains: the roles that are updated after each step, in this order; none: only plays.
      clears_pool: the pool is emptied before every so many steps of the phase; 0: never.
    """

    name: str
    steps: int
    trains: tuple[str, ...] = ()
    iteration: int = 0
    clears_pool: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: `index` within its phase, `number` within the run (names it, and seeds its randomness)."""

    phase: Phase
    index: int
    number: int


@dataclasses.dataclass(frozen=True)
class Draw:
    """What a step asks its recipe for.

    Attributes:
      phase: items drawn in this phase before.   step: of those, the ones of this step.
      outside: of those of the phase, the ones from outside: a deck goes on there, whatever was replayed.
      round: 0 for the first items of a step; later ones fill up what fell away.
      missing: groups that the batch still lacks; at first all that no surplus of the step before provides.
    """

    phase: int = 0
    step: int = 0
    round: int = 0
    missing: int = 0
    outside: int = 0


class Recipe(Protocol):
    """What a paper adds to the engine."""

    def phases(self) -> list[Phase]:
        """The schedule."""
        ...

    def tasks(self, step: Step, pool: TaskPool, draw: Draw) -> list[Task]:
        """The next items of a step, a function of the arguments alone; an empty answer ends the step."""
        ...

    async def episode(self, table: Table, step: Step, task: Task) -> Outcome:
        """Plays one item."""
        ...


def schedule(phases: list[Phase]) -> list[Step]:
    """All steps of a run in order."""
    pairs = [(phase, i) for phase in phases for i in range(phase.steps)]
    return [Step(phase, index, number) for number, (phase, index) in enumerate(pairs)]


class Engine:
    """Players, learners and pool of a run.

    Args:
      config: the run's.   recipe: what is played.   table: players.
      learners: by the name of the weights; `trained`: role → name of its weights, for those that are trained.
      check_search: called before a batch is learnt from; returns numbers for the log, or stops the run.
    """

    def __init__(
        self,
        config,
        recipe: Recipe,
        table: Table,
        learners: dict[str, Learner],
        trained: Mapping[str, str],
        check_search: Callable[[], dict[str, float]] = dict,
    ):
        self.config, self.recipe, self.table = config, recipe, table
        self.learners, self.trained, self.check_search = learners, trained, check_search
        self.pool = TaskPool()
        self.versions: collections.Counter[str] = collections.Counter()
        self.outside_questions = (
            0  # played items with a question or answer that no player of this run made
        )
        self.drawn = self.drawn_outside = (
            0  # items drawn in this phase, and of those the ones from outside
        )
        self.fates: list[Json] = []  # of the last step's items, see `rows.fates`
        self.surplus: dict[
            str, list[Row]
        ] = {}  # by role: groups beyond a full batch, kept for the next step
        for name in learners:
            self.publish(name)

    @property
    def scheduler(self) -> Scheduler:
        """Where rollouts run."""
        return self.table.scheduler

    def publish(self, weights: str) -> None:
        """Hands a learner's weights to the sampler."""
        self.scheduler.publish(weights, self.learners[weights].published(), self.versions[weights])

    def play(self, step: Step, done: Callable[[], None]) -> tuple[dict[str, float], list[Row]]:
        """Plays and learns one step; returns its metrics and rows. `done` is called as each episode ends."""
        started, before = time.perf_counter(), collections.Counter(self.scheduler.stats)
        judged = collections.Counter(self.table.judge_stats)
        self.scheduler.search_seconds.clear()
        late: list[Row] = []
        if step.index == 0:  # what waited for a batch of the phase before comes too late
            late = [row for rows in self.surplus.values() for row in rows]
            self.drawn, self.drawn_outside, self.surplus = 0, 0, {}
        period = step.phase.clears_pool
        if period and (step.index == 0 or schedules.closes_window(step.index, period)):
            self.pool.clear()
        self.table.hosts.clear()
        tasks, outcomes = self._collect(step, done)
        searched = dict(sums(self.table.hosts.together(self.check_search)))
        judged = sums(self.table.hosts.gather(self.table.judge_stats - judged))
        if self.table.judge:
            self.table.judge.check(judged)
        rows = [row for outcome in outcomes for row in outcome.rows]
        stats = row_tools.rollout_stats(rows, outcomes)
        played = time.perf_counter()
        refused = []
        for outcome in outcomes:
            if outcome.drop:
                self.pool.drop(outcome.drop)
            refused.append([self.pool.add(question) for question in outcome.questions])
        self.fates = row_tools.fates(tasks, outcomes, refused)
        self.fates += row_tools.let_go(late, surplus={row.group for row in late})
        for role in step.phase.trains:
            prefix = f'{role}/' if len(step.phase.trains) > 1 else ''
            learnt = self._learn(step, role, [r for r in rows if r.role == role])
            stats |= {prefix + name: value for name, value in learnt.items()}
        if not step.phase.trains:  # nothing is scored
            stats = {
                name: value
                for name, value in stats.items()
                if name not in ('reward_mean', 'informative_share')
            }
        if any(outcome.questions or outcome.drop for outcome in outcomes):
            stats |= {f'drop/{reason}': (n, 1) for reason, n in self.pool.drops.items()}
        stats |= {'pool_size': (len(self.pool.questions), 1)}
        stats |= {f'judge/{name}': (n, 1) for name, n in judged.items()}
        own = {
            name: self.scheduler.stats[name] - before[name]
            for name in ('rollouts', 'generated_tokens')
        }
        sampled = sums(self.table.hosts.gather(own))
        seconds = self.scheduler.search_seconds or [0.0]
        metrics = {name: total / count for name, (total, count) in stats.items() if count}
        return metrics | searched | {
            'rollouts': float(
                sampled['rollouts']
            ),  # proposals, attempts, checks and verdicts alike: what a step costs
            'tokens_per_second': sampled['generated_tokens'] / max(played - started, 1e-9),
            'seconds/rollout': played - started,
            'seconds/update': time.perf_counter() - played,
            'search_seconds/p50': float(np.percentile(seconds, 50)),
            'search_seconds/p95': float(np.percentile(seconds, 95)),
        }, rows

    def _collect(self, step: Step, done) -> tuple[list[Task], list[Outcome]]:
        """Plays items until the batch is full or the recipe has no more; items and outcomes in the order of issue."""
        played: list[Task] = []
        outcomes: list[Outcome] = []
        draw = Draw(self.drawn, missing=self._lacks(step, []), outside=self.drawn_outside)
        while tasks := self.recipe.tasks(step, self.pool, draw):
            outside = sum(task.outside for task in tasks)
            self.outside_questions += outside
            play = functools.partial(self.recipe.episode, self.table, step)
            found = self.table.play({t.identity: functools.partial(play, t) for t in tasks}, done)
            for row in (
                row for outcome in found for row in outcome.rows
            ):  # before it is counted whether they suffice
                row.drop = row.drop or row_tools.unfit(row, self.config.rollout.truncated)
            outcomes += found
            played += tasks
            rows = [row for outcome in outcomes for row in outcome.rows]
            taken = len(tasks)
            lacks = self._lacks(step, rows)
            draw = Draw(
                draw.phase + taken, draw.step + taken, draw.round + 1, lacks, draw.outside + outside
            )
        self.drawn, self.drawn_outside = draw.phase, draw.outside
        return played, outcomes

    def _lacks(self, step: Step, rows: list[Row]) -> int:
        """Groups that the batch of some trained role still lacks."""
        return max((self._missing(role, rows) for role in step.phase.trains), default=0)

    def _missing(self, role: str, rows: list[Row]) -> int:
        c = self.config[role]
        own = [
            *self.surplus.get(role, []),
            *(row for row in rows if row.role == role and row.drop is None),
        ]
        if c.filter_groups:
            own = [row for row, keep in zip(own, self._informative(own)) if keep]
        return max(c.batch - len({row.group for row in own}), 0)

    @staticmethod
    def _informative(rows: list[Row]) -> np.ndarray:
        return advantages.informative_groups(
            np.array([r.reward for r in rows], np.float64),
            np.array([r.group for r in rows], np.int64),
            np.array([r.drop is None for r in rows], bool),
        )

    def _filter(self, role: str, rows: list[Row]) -> tuple[list[Row], Stats]:
        """The first `batch` informative groups in order of issue (DSPO eq. 9); the others wait, or are let go."""
        c = self.config[role]
        rows = [*self.surplus.pop(role, []), *rows]
        keep = self._informative(rows)
        groups = list(dict.fromkeys(row.group for row, informs in zip(rows, keep) if informs))
        now, later = set(groups[: c.batch]), set(groups[c.batch :])
        if c.surplus == 'carry' and later:
            self.surplus[role] = [row for row in rows if row.group in later]
        kept = now | later if c.surplus == 'carry' else now
        self.fates += row_tools.let_go(
            [row for row in rows if row.group not in kept], surplus=later
        )
        trained = [row for row in rows if row.group in now]
        age = [self.versions[self.trained[role]] - row.trajectory.version for row in trained]
        asked = len({row.group for row in rows})
        return trained, {
            'filter/kept': (len(groups), asked),
            'filter/surplus': (len(later), 1),
            'filter/full': (len(now), c.batch),
            'filter/age': (sum(age), len(age)),
        }

    def _learn(self, step: Step, role: str, rows: list[Row]) -> Stats:
        """Advantages, packing and `minibatches` updates of a role; publishes its new weights."""
        c, weights = self.config[role], self.trained[role]
        learner, stats = self.learners[weights], {}
        if c.filter_groups:
            rows, stats = self._filter(role, rows)
        value, more = advantages.group_advantages(
            np.array([r.reward for r in rows], np.float64),
            np.array([r.group for r in rows], np.int64),
            baseline=c.baseline,
            scale=c.scale,
            ddof=c.std_ddof,
            singleton=c.singleton,
            valid=np.array([r.drop is None for r in rows], bool),
            lengths=np.array([r.trajectory.policy_tokens for r in rows], np.int64),
            group_size=None
            if role == 'proposer' and self.config.schedule.group == 'hop'
            else c.samples,
        )
        stats |= more
        for row, a in zip(rows, value):
            row.advantage = float(a)
        distill = (
            schedules.alpha_at(c.distill_coef, step.phase.iteration) if c.distill_top_k else 0.0
        )
        parts = [
            [rows[i] for i in part] for part in np.array_split(range(len(rows)), c.minibatches)
        ]
        batches = [self._pack(role, part, distill) for part in parts]
        with self._room(weights):
            if c.old_logp == 'trainer':  # before the first update of the batch
                batches = [learner.recompute_old_logp(role, batch) for batch in batches]
            for part, batch in zip(parts, batches, strict=True):
                more = learner.update(role, batch, distill)
                stats = _add(stats, more)
                if not more.get('gradient_norm', (0.0, 1.0))[1]:
                    culprits = [list(row.trajectory.identity) for row in part]
                    self.fates.append(
                        {'role': role, 'drop': 'nonfinite_gradient', 'rollouts': culprits}
                    )
            learner.update_ema_teacher()
        self.versions[weights] += 1
        self.publish(weights)
        return stats

    @contextlib.contextmanager
    def _room(self, weights: str) -> Iterator[None]:
        """With `config.offload`, clears the devices of what rollouts need, while these weights are updated."""
        if self.config.offload:
            for name, lane in self.scheduler.lanes.items():
                lane.sampler.rest()
                # Those in training will be published anew.
                lane.params = {} if name == weights else sharding.to_host(lane.params)
        yield
        if self.config.offload:
            for lane in self.scheduler.lanes.values():
                lane.params = sharding.to_device(lane.params)

    def _pack(self, role: str, rows: list[Row], distill: float):
        """One optimiser step's rows as micro-batches."""
        c = self.config[role]
        valid = row_tools.segments([row for row in rows if row.drop is None])
        lengths = np.array([np.sum(row.trajectory.source == POLICY) for row in valid], np.int64)
        # What has advantage 0 adds nothing by itself, but belongs to the mean.
        every = c.kl_coef or c.entropy_coef or distill or not c.skip_uninformative
        trained = [row for row in valid if every or row.advantage]
        taught = sum(n for n, row in zip(lengths, valid) if row.teacher_prompt is not None)
        constant = c.aggregation == 'constant'
        return pack(
            trained,
            micro_rows=self.config.micro.rows,
            tokens=self.config.micro.tokens,
            mode=c.aggregation,
            total=c.constant_norm * len(valid)
            if constant
            else aggregation.denominator(lengths, c.aggregation),
            teacher_tokens=self.config.privileged.tokens if c.distill_top_k else 0,
            teacher_total=float(taught),
        )

    # ---- what a checkpoint holds ---------------------------------------------------------------------------

    def states(self) -> dict[str, Any]:
        """Device state of every set of trained weights."""
        return {name: learner.state for name, learner in self.learners.items()}

    def loop(self) -> Json:
        """Host state."""
        return {
            'pool': self.pool.state(),
            'versions': dict(self.versions),
            'outside_questions': self.outside_questions,
            'drawn': [self.drawn, self.drawn_outside],
            'surplus': {
                role: [row_tools.state(row) for row in rows] for role, rows in self.surplus.items()
            },
        }

    def restore(self, states: dict[str, Any], loop: Json) -> None:
        """Takes back what `states` and `loop` gave."""
        for name, learner in self.learners.items():
            learner.restore(states[name])
        self.pool.restore(loop['pool'])
        self.versions.update(loop['versions'])
        self.outside_questions, (self.drawn, self.drawn_outside) = (
            loop['outside_questions'],
            loop['drawn'],
        )
        self.surplus = {
            role: [row_tools.restore(s) for s in saved] for role, saved in loop['surplus'].items()
        }
        for name in self.learners:
            self.publish(name)


def _add(a: Stats, b: Stats) -> Stats:
    return a | {k: (a[k][0] + v[0], a[k][1] + v[1]) if k in a else v for k, v in b.items()}
