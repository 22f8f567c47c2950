"""Plays a recipe: many episodes at once, then one update from what they yielded. Knows no paper.

tasks → episodes over the slots → rows → advantages → packed batches → update → publish
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.packing import pack
from zeroplay_jax.objectives import advantages, policy_gradient
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.selfplay.roles import Table
from zeroplay_jax.selfplay.task_pool import TaskPool
from zeroplay_jax.types import POLICY, Json, Outcome, Row, Task

Stats = dict[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Phase:
    """A run of like steps. `trains`: the role that is updated after each; None only plays."""

    name: str
    steps: int
    trains: str | None = None
    iteration: int = 0
    clears_pool: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: `index` within its phase, `number` within the run (names it, and seeds its randomness)."""

    phase: Phase
    index: int
    number: int


class Recipe(Protocol):
    """What a paper adds to the engine."""

    def phases(self) -> list[Phase]:
        """The schedule."""
        ...

    def tasks(self, step: Step, pool: TaskPool) -> list[Task]:
        """The items of a step; a function of its arguments alone."""
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
      config: the run's.   table: players.   learners: by role, those that are trained.
      recipe: what is played.
    """

    def __init__(self, config, recipe: Recipe, table: Table, learners: dict[str, Learner]):
        self.config, self.recipe, self.table, self.learners = config, recipe, table, learners
        self.pool = TaskPool()
        self.versions = collections.Counter()
        self.outside_questions = 0  # played questions that no player of this run made
        for name in learners:
            self.publish(name)

    @property
    def scheduler(self) -> Scheduler:
        """Where rollouts run."""
        return self.table.scheduler

    def publish(self, role: str) -> None:
        """Hands a learner's weights to the sampler."""
        self.scheduler.publish(role, self.learners[role].params, self.versions[role])

    def play(self, step: Step, done: Callable[[], None]) -> tuple[dict[str, float], list[Row]]:
        """Plays and learns one step; returns its metrics and rows. `done` is called as each episode ends."""
        started, before = time.perf_counter(), collections.Counter(self.scheduler.stats)
        self.scheduler.search_seconds.clear()
        if step.phase.clears_pool and step.index == 0:
            self.pool.clear()
        tasks = self.recipe.tasks(step, self.pool)
        outcomes = self.scheduler.run([self.recipe.episode(self.table, step, t) for t in tasks], done)
        rows = [row for outcome in outcomes for row in outcome.rows]
        self.outside_questions += sum('question' in t.payload and 'task' not in t.payload for t in tasks)
        stats = _rollout_stats(rows, outcomes)
        played = time.perf_counter()
        for outcome in outcomes:
            if outcome.drop:
                self.pool.drop(outcome.drop)
            for question in outcome.questions:
                self.pool.add(question)
        if role := step.phase.trains:
            stats |= self._learn(role, [r for r in rows if r.role == role])
        else:  # nothing is scored, and the pool may change
            stats = {name: value for name, value in stats.items() if name not in ('reward_mean', 'informative_share')}
            stats |= {f'drop/{reason}': (n, 1) for reason, n in self.pool.drops.items()}
        stats |= {'pool_size': (len(self.pool.questions), 1)}
        work = self.scheduler.stats - before
        seconds = self.scheduler.search_seconds or [0.0]
        metrics = {name: total / count for name, (total, count) in stats.items() if count}
        return metrics | {
            'tokens_per_second': work['generated_tokens'] / max(played - started, 1e-9),
            'seconds/rollout': played - started,
            'seconds/update': time.perf_counter() - played,
            'search_seconds/p50': float(np.percentile(seconds, 50)),
            'search_seconds/p95': float(np.percentile(seconds, 95)),
        }, rows

    def _learn(self, role: str, rows: list[Row]) -> Stats:
        """Advantages, packing and `minibatches` updates of a role; publishes its new weights."""
        c = self.config[role]
        value, stats = advantages.group_advantages(
            np.array([r.reward for r in rows], np.float64),
            np.array([r.group for r in rows], np.int64),
            baseline=c.baseline,
            scale=c.scale,
            ddof=c.std_ddof,
            singleton=c.singleton,
            valid=np.array([r.drop is None for r in rows], bool),
        )
        for row, a in zip(rows, value):
            row.advantage = float(a)
        for part in np.array_split(np.arange(len(rows)), c.minibatches):
            valid = [rows[i] for i in part if rows[i].drop is None]
            lengths = np.array([np.sum(r.trajectory.source == POLICY) for r in valid], np.int64)
            # What has advantage 0 adds nothing without a KL term, but belongs to the mean.
            trained = [r for r in valid if r.advantage or c.kl_coef or not c.skip_uninformative]
            batches = pack(
                trained,
                micro_rows=self.config.micro.rows,
                tokens=self.config.micro.tokens,
                mode=c.aggregation,
                total=policy_gradient.denominator(lengths, c.aggregation),
            )
            stats = _add(stats, self.learners[role].update(batches))
        self.versions[role] += 1
        self.publish(role)
        return stats

    # ---- what a checkpoint holds ---------------------------------------------------------------------------

    def states(self) -> dict[str, Any]:
        """Device state of every trained role."""
        return {name: learner.state for name, learner in self.learners.items()}

    def loop(self) -> Json:
        """Host state."""
        return {
            'pool': self.pool.state(),
            'versions': dict(self.versions),
            'outside_questions': self.outside_questions,
        }

    def restore(self, states: dict[str, Any], loop: Json) -> None:
        """Takes back what `states` and `loop` gave."""
        for name, learner in self.learners.items():
            learner.state = jax.device_put(states[name], learner.shardings)
        self.pool.restore(loop['pool'])
        self.versions.update(loop['versions'])
        self.outside_questions = loop['outside_questions']
        for name in self.learners:
            self.publish(name)


def _add(a: Stats, b: Stats) -> Stats:
    return a | {k: (a[k][0] + v[0], a[k][1] + v[1]) if k in a else v for k, v in b.items()}


def _rollout_stats(rows: list[Row], outcomes: list[Outcome]) -> Stats:
    """Averages over rows as (sum, count): rewards, parts, turns, tools, endings, lengths, solve counts."""
    stats: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])

    def add(name, value, weight=1.0):
        stats[name][0] += float(value)
        stats[name][1] += weight

    for row in rows:
        t = row.trajectory
        add('reward_mean', row.reward)
        for name, value in row.parts.items():
            add(f'reward/{name}', value)
        if 'format_raw' in row.parts:
            add('valid_rate', row.parts['format_raw'] > 0)
        add('turns', len(t.turns))
        add('tool_calls', t.calls)
        add('tool_error_rate', t.errors, sum(bool(u.queries) or u.error is not None for u in t.turns))
        add('truncated_rate', t.finish in ('context', 'turn_tokens', 'turns'))
        add('policy_tokens', np.sum(t.source == POLICY))
        if row.info.get('answer_given'):
            add('answer_words', len(row.info['answer_given'].split()))
        if reason := row.info.get('rejected'):
            add(f'rejected/{reason}', 1, 0)
        if 'solved' in row.info:
            add(f'k_histogram/{row.info["solved"]}', 1, 0)
    asked = sum(v[0] for k, v in stats.items() if k.startswith('k_histogram'))
    for name in [n for n in stats if n.startswith(('k_histogram', 'rejected'))]:
        stats[name][1] = asked if name.startswith('k_histogram') else len(rows)
    groups = collections.defaultdict(set)
    for row in rows:
        groups[row.role, row.group].add(row.reward)
    for values in groups.values():
        add('informative_share', len(values) > 1)
    add('dropped_episodes', sum(o.drop is not None for o in outcomes), len(outcomes) or 1)
    return {k: (v[0], v[1]) for k, v in stats.items()}
