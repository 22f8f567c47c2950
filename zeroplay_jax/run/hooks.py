"""What follows the steps of a run and changes nothing about it: its log, the terminal, traces of jax.profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.retrieval import progress
from zeroplay_jax.rollout.tokens import text_spans
from zeroplay_jax.run.outcome import Alarm, EndedStep, RunState
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.runtime.log import MetricsWriter
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.records import step_name
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.selfplay.update import RolePlan
from zeroplay_jax.settings.kinds import warn
from zeroplay_jax.types import Json, Row, ToolCall

# Number of rollouts per step whose text `rendering_check` tokenises again.
_RENDERING_SAMPLE = 16


class Log:
    """The log of a run, which the first process writes: metrics, rollouts, alarms and tasks.

    It is opened at the next step; a warning names steps before it that are missing. All processes must
    create it.

    Raises:
      UserError: a service among the writers cannot be opened, or the log is of another run; on all processes.
    """

    def __init__(
        self, rollouts: RolloutContext, engine: Engine, workdir: pathlib.Path, state: RunState
    ):
        self._rollouts = rollouts
        self._engine = engine
        self._writer: MetricsWriter | None = rollouts.hosts.run_on_all(self._open, workdir, state)

    def _open(self, workdir: pathlib.Path, state: RunState) -> MetricsWriter | None:
        """Returns the writer of the first process; the others get None."""
        if not self._rollouts.hosts.is_first:
            return None
        # The writer removes records of this and later steps, which a crash may have left behind.
        first_step = state.cursor
        writers, run = self._engine.config.log.writers, run_record.hash_of(state.identity)
        has_rows = bool(self._engine.config.log.rows)
        writer = MetricsWriter(workdir, first_step, writers, run, has_rows)
        if writer.missing_steps:
            warn(
                f'{workdir / "metrics.jsonl"} lacks {len(writer.missing_steps)} of {first_step} steps, the first is '
                f'{writer.missing_steps[0]}; curves and report will lack them, too'
            )
        if first_step == 0:
            learners = self._engine.learners
            writer.write_parameters({name: learner.params for name, learner in learners.items()})
        return writer

    def after(self, ended: EndedStep, alarms: Sequence[Alarm]) -> None:
        """Writes what a step has left."""
        if self._writer is None:
            return
        config, step, phase = self._engine.config, ended.step, ended.step.phase
        self._writer.write_scalars(step.number, phase.iteration, phase.name, ended.metrics)
        limit = config.log_trajectories
        records = trajectory_records(config.recipe, self._rollouts, step, ended.rows, limit)
        self._writer.write('trajectories', records)
        if ended.is_evaluation:
            return
        step_fields = {
            'system': config.recipe,
            'step': step.number,
            'iteration': phase.iteration,
            'phase': phase.name,
        }
        tasks = (step_fields | dict(record) for record in self._engine.task_log)
        self._writer.write('tasks', tasks)
        self._writer.write('alarms', (step_fields | dataclasses.asdict(alarm) for alarm in alarms))
        for plan in self._engine.plans.values():
            self._writer.write('rows', row_records(config.recipe, self._rollouts, step, plan))

    def close(self) -> None:
        """Flushes and closes all files."""
        if self._writer is not None:
            self._writer.close()


class Screen:
    """The terminal: a bar over the steps, results of evaluations, what the engine notes, and alarms."""

    def __init__(self, hosts: Hosts, engine: Engine, bar: progress.Bar):
        self._hosts = hosts
        self._engine = engine
        self._bar = bar

    def after(self, ended: EndedStep, alarms: Sequence[Alarm]) -> None:
        """Moves the bar, and prints lines about a step."""
        self._bar.update()
        self._bar.note = _rewards_text(ended.metrics) or self._bar.note
        lines = list(self._engine.learning.notices)
        if ended.is_evaluation:
            lines = [evaluation_text(ended.step, ended.metrics)]
        lines += [f'alarm: {alarm.text}' for alarm in alarms]
        for line in lines if self._hosts.is_first else ():
            print(line, file=sys.stderr)


def _rewards_text(metrics: Mapping[str, float]) -> str:
    """Returns the mean reward of each trained role, such as 'solver/reward 0.31'; '' without one."""
    texts = []
    for name, value in metrics.items():
        if name.endswith('/reward_mean'):
            texts.append(f'{name.removesuffix("_mean")} {value:.2f}')
    return ', '.join(texts)


def evaluation_text(step: Step, metrics: Mapping[str, float]) -> str:
    """Returns one line with an evaluation's exact match, also by hops where there are several, and rubric score."""
    line = f'{step_name(step)}: exact match {metrics["em/mean"]:.3f}'
    by_hops = {}
    for name, share in metrics.items():
        if name.startswith('em/hop'):
            by_hops[int(name.removeprefix('em/hop'))] = share
    if len(by_hops) > 1:
        texts = ', '.join(f'{hops}: {share:.3f}' for hops, share in sorted(by_hops.items()))
        averaged = statistics.averaged(by_hops)
        mean_of = ''
        if len(averaged) < len(by_hops):
            mean_of = f'mean of {", ".join(map(str, averaged))}; '
        line += f' ({mean_of}by hops {texts})'
    if 'rubrics/mean' in metrics:
        line += f', rubrics {metrics["rubrics/mean"]:.3f}'
    return line


@contextlib.contextmanager
def traced(steps: Container[int], step: int, workdir: pathlib.Path) -> Iterator[None]:
    """Writes a trace of the block to workdir/profile/step_<number> if its step is one of `steps`.

    Every process writes its own files there; TensorBoard's profile plugin and Perfetto show them.

    Args:
      steps: `config.profile.steps`.
      step: number of the step that the block runs.
      workdir: folder of the run.
    """
    if step not in steps:
        yield
        return
    with jax.profiler.trace(str(workdir / 'profile' / f'step_{step}')):
        yield


def trajectory_records(
    recipe: str, context: RolloutContext, step: Step, rows: Sequence[Row], limit: int
) -> list[Json]:
    """Returns the records of about `limit` rollouts of a step: all rollouts of a question, of each kind in turn.

    The kind of a question is its hop count, and whether it is an open task.
    """
    return [trajectory_record(recipe, context, step, row) for row in _selected(rows, limit)]


def _selected(rows: Sequence[Row], limit: int) -> list[Row]:
    """Returns whole questions, of alternating kinds, until there are at least `limit` rollouts or no more questions.

    All rollouts of a question are logged, so that they can be compared.
    """
    rollouts_of_question: dict[tuple, list[Row]] = {}
    for row in rows:
        # The last integer of an identity is the index of the sample.
        key = (row.role, row.trajectory.identity[:-1])
        rollouts_of_question.setdefault(key, []).append(row)
    questions_of_kind: dict[tuple, list[list[Row]]] = {}
    for rollouts in rollouts_of_question.values():
        question = rollouts[0].info.question
        hops = question.hops if question else None
        # The kind distinguishes questions from open tasks, and hop counts; an evaluation may have all of them.
        kind = ('rubrics' in rollouts[0].parts, hops)
        questions_of_kind.setdefault(kind, []).append(rollouts)
    # One question of each kind in turn, until there are enough rollouts.
    selected: list[Row] = []
    for round_of_kinds in itertools.zip_longest(*questions_of_kind.values()):
        for rollouts in round_of_kinds:
            if rollouts and len(selected) < limit:
                selected += rollouts
    return selected


def trajectory_record(recipe: str, context: RolloutContext, step: Step, row: Row) -> Json:
    """Returns the record of one rollout, with its text in segments of one author each."""
    trajectory = row.trajectory
    codec = context.roles[row.role].env.codec
    question = row.info.question
    teacher_prompt = None
    if row.teacher_prompt is not None:
        teacher_prompt = codec.decode(row.teacher_prompt)
    # The identity of the task in which the question was made, by which its proposal can be found in the log; None for
    # questions from outside the run.
    parent = question and question.origin.get('task')
    # The report distinguishes the authors: prompt, policy and environment.
    segments = list(text_spans(codec, trajectory))
    for segment in segments:
        del segment['tokens']
    record = {
        'system': recipe,
        'step': step.number,
        'iteration': step.phase.iteration,
        'phase': step.phase.name,
        'role': row.role,
        'is_proposal': row.info.is_proposal,
        'weights': trajectory.weights,
        'version': trajectory.version,
        'rollout': list(trajectory.identity),
        'parent': parent,
        'group': row.group,
        'reward': row.reward,
        'parts': row.parts,
        'advantage': np.asarray(row.advantage).tolist(),
        'drop': row.drop,
        'finish': trajectory.finish,
        'info': row.info.to_json(),
        'teacher': teacher_prompt,
        'turns': [_call_record(turn.call) for turn in trajectory.turns],
        'segments': segments,
    }
    if row.turn_rewards is not None:
        earned = row.turn_rewards.tolist()
        record['turn_rewards'] = [None if np.isnan(reward) else reward for reward in earned]
    return record


def row_records(recipe: str, context: RolloutContext, step: Step, plan: RolePlan) -> Iterator[Json]:
    """Yields the records of all rollouts of a role's updates: that of the trajectory log, and what a loss reads."""
    for number, rows in enumerate(plan.minibatches):
        for row in rows:
            contexts = []
            for part in row.trajectory.contexts:
                arrays = {'tokens': part.tokens, 'source': part.source, 'logp': part.logp}
                if part.kept is not None:
                    arrays['kept'] = part.kept
                contexts.append({name: array.tolist() for name, array in arrays.items()})
            yield {
                **trajectory_record(recipe, context, step, row),
                'minibatch': number,
                'distill_coef': plan.distill_coef,
                'contexts': contexts,
                'teacher_prompt': np.asarray(row.teacher_prompt).tolist(),
            }


def _call_record(call: ToolCall | None) -> dict[str, Any] | None:
    """Returns a call with its result as JSON; None for a turn without a call."""
    if call is None:
        return None
    return {
        'tool': call.tool,
        'arguments': call.arguments,
        'error': call.error,
        'documents': call.documents,
        'text': call.text,
    }


def rendering_check(context: RolloutContext, rows: Sequence[Row]) -> dict[str, float]:
    """Returns a metric: the share of rollouts whose decoded text (the whole context) tokenises to the same ids again.

    Args:
      rows: at least one; the first `_RENDERING_SAMPLE` are measured.
    """
    # Training uses the sampled ids. The metric shows how often a system that tokenises the text again between
    # turns would train on other ids, which users of such systems report as a drift in long runs.
    codec = context.roles[rows[0].role].env.codec
    measured = rows[:_RENDERING_SAMPLE]
    same = 0
    for row in measured:
        ids = row.trajectory.tokens
        same += codec.encode(codec.decode(ids)) == ids.tolist()
    return {'same_ids_when_rendered_again': same / len(measured)}
