"""A run, read top to bottom: build, restore, then step by step play, learn, log and save; at the end, show."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zeroplay_jax import setup
from zeroplay_jax.evaluation import report_builder, statistics
from zeroplay_jax.evaluation.evaluate import evaluate
from zeroplay_jax.learner.checkpoint import Checkpointer, claim
from zeroplay_jax.policy import hf
from zeroplay_jax.retrieval import progress
from zeroplay_jax.rollout.tokens import Codec, segments
from zeroplay_jax.runtime.atomic import write_whole
from zeroplay_jax.runtime.hosts import Hosts, sums
from zeroplay_jax.runtime.metrics import Metrics
from zeroplay_jax.selfplay.engine import Engine, Phase, Step, schedule
from zeroplay_jax.types import Json, Row

# What may differ between a run and its continuation: nothing that the result depends on.
FREE_FIELDS = ('progress', 'checkpoint.every', 'checkpoint.keep', 'offload') + tuple(
    f'distributed.{name}' for name in ('mode', 'coordinator', 'processes', 'process', 'heartbeat')
)


def run(config, workdir) -> dict:
    """Runs `config` in `workdir` to its end, from wherever it was; returns the summary.

    Raises:
      UserError: the workdir belongs to another config or another process, or the parts do not fit together.
    """
    workdir = pathlib.Path(workdir)
    free = FREE_FIELDS + (() if not config.rollout.deterministic else ('rollout.tool_timeout',))
    hosts = Hosts()
    shown = config.progress and hosts.first
    with _held(hosts, workdir, config.to_dict(), free) as write_config:
        # ---- build ------------------------------------------------------------------------------------------
        parts = _built(hosts, config)
        engine = setup.engine(config, parts)
        parts = dataclasses.replace(parts, params={})  # learners and samplers have their own
        steps = _with_evaluations(config, schedule(engine.recipe.phases()))
        write_config()

        # ---- restore ----------------------------------------------------------------------------------------
        # Initial weights: the last whole checkpoint of this workdir, else config.policy.path.
        checkpoints = Checkpointer(workdir, config.checkpoint.keep)
        loop: dict[str, Any] = {'cursor': 0, 'evaluations': {}, 'rubrics': {}, 'seconds': 0.0}
        if checkpoints.latest() is not None:
            with progress.clock('restore', shown):
                states, found = checkpoints.restore(engine.states())
            loop |= found
            engine.restore(states, loop['engine'])
            del states
            if hosts.first:
                print(f'goes on at step {loop["cursor"]} of {len(steps)}', file=sys.stderr)
        spent = loop['seconds']

        # ---- play -------------------------------------------------------------------------------------------
        if loop['cursor'] < len(steps):
            metrics = Metrics(workdir, loop['cursor']) if hosts.first else None
            with checkpoints.saved_on_interrupt(), _Bar(shown, steps, loop['cursor']) as bar:
                for step in steps[loop['cursor'] :]:
                    bar.begin(step)
                    values, rows = _play(parts, engine, step, loop, bar.tick)
                    if metrics:
                        metrics.write(step.number, step.phase.iteration, step.phase.name, values)
                        metrics.write_trajectories(_records(config, parts.table, step, rows))
                        about = {
                            'system': config.recipe,
                            'step': step.number,
                            'iteration': step.phase.iteration,
                        }
                        if step.phase.name != 'evaluation':
                            metrics.write_tasks(
                                {**about, 'phase': step.phase.name, **fate} for fate in engine.fates
                            )
                    bar.end(values)
                    done = step.number + 1
                    if done % config.checkpoint.every == 0 or done == len(steps):
                        loop |= {
                            'engine': engine.loop(),
                            'cursor': done,
                            'seconds': spent + _process_age(),
                        }
                        checkpoints.save(done, engine.states(), loop)
            if metrics:
                metrics.close()
        checkpoints.close()

        # ---- show -------------------------------------------------------------------------------------------
        summary, table = _summary(config, parts, engine, loop, len(steps))
        for name, learner in engine.learners.items():
            if not hosts.gather((workdir / 'policy' / name).exists())[0]:
                with progress.clock(f'export {name}', shown):
                    hf.save(
                        workdir / 'policy' / name, parts.model, learner.params, like=parts.folder
                    )
        if not hosts.first:
            return summary
        write_whole(workdir / 'summary.json', json.dumps(summary, indent=2) + '\n')
        page = report_builder.write_report(workdir)
    print(table)
    print(f'{summary["seconds"]:.0f} s; read the run in {page}')
    return summary


def _summary(config, parts, engine: Engine, loop: dict, steps: int) -> tuple[dict[str, Any], str]:
    """What `summary.json` holds, and the same as text."""
    marked = lambda asked: hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[
        :16
    ]
    flags, grades = list(loop['evaluations'].values()), list(loop['rubrics'].values())
    before, after = ({int(h): np.array(c, bool) for h, c in flags[i].items()} for i in (0, -1))
    # Per question, and which questions: what a comparison of runs is paired by.
    results = {'questions': marked(parts.corpus.questions), 'before': flags[0], 'after': flags[-1]}
    results |= {'evaluations': loop['evaluations']}
    summary = statistics.summarise(before, after) | {
        'results': results,
        'seconds': round(loop['seconds'], 1),
        'seed': config.seed,
        'steps': steps,
        'outside_questions': engine.outside_questions,
    }
    told = (
        'Exact match on held-out questions, with 95 % intervals:\n\n'
        + statistics.before_after_table(before, after)
    )
    if grades:
        results |= {'tasks': marked(parts.corpus.tasks), 'rubrics': loop['rubrics']}
        summary['rubrics'] = statistics.summarise_scores(grades[0], grades[-1])
        told += (
            f'\nrubrics met by answers to open tasks: {statistics.scores_line(summary["rubrics"])}'
        )
    return summary, told


def _built(hosts: Hosts, config) -> setup.Parts:
    """`setup.build` in every process, or the reason why one of them could not."""
    built: list[setup.Parts] = []
    hosts.together(lambda: built.append(setup.build(config)))
    return built[0]


@contextlib.contextmanager
def _held(
    hosts: Hosts, workdir: pathlib.Path, config: Json, free: tuple[str, ...]
) -> Iterator[Callable[[], None]]:
    """`claim`, by the first process for all of them."""
    with contextlib.ExitStack() as stack:
        writers: list[Callable[[], None]] = []

        def hold() -> None:
            if hosts.first:
                writers.append(stack.enter_context(claim(workdir, config, free)))

        hosts.together(hold)
        yield writers[0] if writers else lambda: None


def _play(
    parts, engine: Engine, step: Step, loop: dict, done
) -> tuple[dict[str, float], list[Row]]:
    """One step of any kind: its metrics and rollouts; an evaluation's results also enter `loop`."""
    if step.phase.name != 'evaluation':
        values, rows = engine.play(step, done)
        return values | (
            _rendering_check(parts.table.roles[rows[0].role].env.codec, rows) if rows else {}
        ), rows
    hosts, judged = parts.table.hosts, collections.Counter(parts.table.judge_stats)
    correct, rows = evaluate(
        parts.exam, parts.corpus.questions + parts.corpus.tasks, step.number, done=done
    )
    hosts.together(parts.corpus.check)
    judged = sums(hosts.gather(parts.table.judge_stats - judged))
    if parts.table.judge:
        parts.table.judge.check(judged)
    loop['evaluations'][str(step.number)] = {
        str(h): c.astype(int).tolist() for h, c in correct.items()
    }
    values = {f'em/hop{h}': float(c.mean()) for h, c in correct.items()}
    values['em/mean'] = statistics.mean_interval(statistics.headline(correct))[0]
    if tasks := [row for row in rows if 'rubrics' in row.parts]:
        loop['rubrics'][str(step.number)] = [row.reward for row in tasks]
        values['rubrics/mean'] = float(np.mean([row.reward for row in tasks]))
        values['rubrics/ungraded'] = float(np.mean([row.drop is not None for row in tasks]))
        values |= {f'judge/{name}': float(n) for name, n in judged.items()}
    return values, rows


def _process_age() -> float:
    """Seconds since this process began, imports included."""
    started = int(pathlib.Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf('SC_CLK_TCK')


def _with_evaluations(config, steps: list[Step]) -> list[Step]:
    """The schedule with an evaluation before, after, and every `eval.every` solver steps; numbered anew."""

    def evaluation(iteration: int) -> Step:
        return Step(Phase('evaluation', 1, iteration=iteration), 0, 0)

    out, solver_steps = [evaluation(0)], 0
    for step in steps:
        out.append(step)
        if 'solver' in step.phase.trains:
            solver_steps += 1
            if (
                config.eval.every
                and solver_steps % config.eval.every == 0
                and step is not steps[-1]
            ):
                out.append(evaluation(step.phase.iteration))
    out.append(evaluation(out[-1].phase.iteration))
    return [Step(s.phase, s.index, number) for number, s in enumerate(out)]


def _rendering_check(codec: Codec, rows: list[Row]) -> dict[str, float]:
    """Share of rollouts whose ids come out the same when their text is tokenised again: how much re-tokenising
    trainers would have changed."""
    same = [
        codec.encode(codec.decode(r.trajectory.tokens)) == r.trajectory.tokens.tolist()
        for r in rows[:16]
    ]
    return {'same_ids_when_rendered_again': float(np.mean(same))}


def _records(config, table, step: Step, rows: list[Row]):
    """About `log_trajectories` rollouts of a step, as the report reads them: whole items, over hops and kinds."""
    questions: dict[tuple, list[Row]] = {}
    for row in rows:
        questions.setdefault((row.role, row.trajectory.identity[:-1]), []).append(row)
    by_hops: dict[object, list[list[Row]]] = {}
    for group in questions.values():
        kind = (
            'rubrics' in group[0].parts,
            group[0].info.get('hops'),
        )  # an evaluation asks questions and open tasks
        by_hops.setdefault(kind, []).append(group)
    picked: list[Row] = []
    for turn in itertools.zip_longest(*by_hops.values()):
        picked += [
            row
            for group in turn
            if group and len(picked) < config.log_trajectories
            for row in group
        ]
    for row in picked:
        t, codec = row.trajectory, table.roles[row.role].env.codec
        yield {
            'system': config.recipe,
            'step': step.number,
            'iteration': step.phase.iteration,
            'phase': step.phase.name,
            'role': row.role,
            'weights': t.weights,
            'version': t.version,
            'rollout': list(t.identity),
            'parent': row.info.get('task'),  # the item whose rollout made the question
            'group': row.group,
            'reward': row.reward,
            'parts': row.parts,
            'advantage': row.advantage,
            'drop': row.drop,
            'finish': t.finish,
            'info': row.info,
            'teacher': None if row.teacher_prompt is None else codec.decode(row.teacher_prompt),
            'segments': [
                {name: piece[name] for name in ('source', 'text')} for piece in segments(codec, t)
            ],
        }


class _Bar:
    """One line of progress over the whole run; silent where nobody watches."""

    def __init__(self, shown: bool, steps: list[Step], cursor: int):
        self._bar = progress.bar(len(steps), 'steps', initial=cursor, shown=shown, leave=True)
        self._shown: dict[str, str] = {}
        self._ended = 0

    def begin(self, step: Step) -> None:
        name = step.phase.name
        where = '' if name == 'evaluation' else f' {step.phase.iteration + 1}.{step.index + 1}'
        self._bar.set_description_str(name + where)
        self._ended = 0

    def tick(self) -> None:
        """An episode ended."""
        self._ended += 1
        if self._ended % 8 == 0:
            self._show(episodes=str(self._ended))

    def end(self, values) -> None:
        names = {'em/mean': 'EM', 'reward_mean': 'reward'}
        self._bar.update()
        self._show(
            **{short: f'{values[name]:.2f}' for name, short in names.items() if name in values}
        )

    def _show(self, **values):
        self._shown |= values
        self._bar.set_postfix(self._shown)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()
