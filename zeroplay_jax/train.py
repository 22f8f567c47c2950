"""A run, read top to bottom: build, restore, then step by step play, learn, log and save; at the end, show."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

import numpy as np
import tqdm

from zeroplay_jax import setup
from zeroplay_jax.evaluation import report, statistics
from zeroplay_jax.evaluation.evaluate import evaluate
from zeroplay_jax.learner.checkpoint import Checkpointer, claim
from zeroplay_jax.metrics import Metrics
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.selfplay.engine import Engine, Phase, Step, schedule
from zeroplay_jax.types import Row

# What may differ between a run and its continuation: nothing that the result depends on.
FREE_FIELDS = ('progress', 'checkpoint.every', 'checkpoint.keep', 'rollout.tool_timeout')
SOURCES = ('prompt', 'policy', 'env')


def run(config, workdir) -> dict:
    """Runs `config` in `workdir` to its end, from wherever it was; returns the summary.

    Raises:
      WorkdirError: the workdir belongs to another config.
    """
    started = time.monotonic()
    workdir = pathlib.Path(workdir)
    claim(workdir, config.to_dict(), FREE_FIELDS)

    # ---- build ----------------------------------------------------------------------------------------------
    parts = setup.build(config)
    engine = Engine(
        config,
        setup.recipe_module(config).Recipe(config, parts.corpus),
        parts.table,
        setup.learners(config, parts),
    )
    steps = _with_evaluations(config, schedule(engine.recipe.phases()))

    # ---- restore --------------------------------------------------------------------------------------------
    # Initial weights: the last whole checkpoint of this workdir, else config.policy.path.
    checkpoints = Checkpointer(workdir, config.checkpoint.keep)
    cursor, evaluations, spent = 0, {}, 0.0
    if checkpoints.latest() is not None:
        states, loop = checkpoints.restore(engine.states())
        engine.restore(states, loop['engine'])
        cursor, evaluations, spent = loop['cursor'], loop['evaluations'], loop['seconds']
        print(f'goes on at step {cursor} of {len(steps)}', file=sys.stderr)
    metrics = Metrics(workdir, cursor)

    # ---- play -----------------------------------------------------------------------------------------------
    seconds = lambda: spent + time.monotonic() - started
    bar = _Bar(config, steps, cursor)
    for step in steps[cursor:]:
        bar.begin(step)
        if step.phase.name == 'evaluation':
            correct, rows = evaluate(parts.table, parts.corpus.questions, step.number, done=bar.tick)
            evaluations[str(step.number)] = {str(h): c.astype(int).tolist() for h, c in correct.items()}
            values = {f'em/hop{h}': float(c.mean()) for h, c in correct.items()}
            values['em/mean'] = statistics.mean_interval(statistics.headline(correct))[0]
        else:
            values, rows = engine.play(step, bar.tick)
            values |= _rendering_check(parts.table.roles[rows[0].role].env.codec, rows) if rows else {}
        metrics.write(step.number, step.phase.iteration, step.phase.name, values)
        metrics.write_trajectories(_records(parts.table, step, rows, config.log_trajectories))
        bar.end(values)
        if (step.number + 1) % config.checkpoint.every == 0 or step.number + 1 == len(steps):
            loop = {
                'engine': engine.loop(),
                'cursor': step.number + 1,
                'evaluations': evaluations,
                'seconds': seconds(),
            }
            checkpoints.save(step.number + 1, engine.states(), loop)
    checkpoints.close()
    metrics.close()
    bar.close()

    # ---- show -----------------------------------------------------------------------------------------------
    sides = [{int(h): np.array(c, bool) for h, c in e.items()} for e in evaluations.values()]
    summary = statistics.summarise(sides[0], sides[-1]) | {
        'seconds': round(seconds(), 1),
        'seed': config.seed,
        'steps': len(steps),
        'outside_questions': 0,  # no recipe here reads a question or an answer that was not made in play
    }
    _write(workdir / 'summary.json', json.dumps(summary, indent=2))
    page = report.write_report(workdir)
    print(statistics.before_after_table(sides[0], sides[-1]))
    print(f'{summary["seconds"]:.0f} s; read the run in {page}')
    return summary


def _with_evaluations(config, steps: list[Step]) -> list[Step]:
    """The schedule with an evaluation before, after, and every `eval.every` solver steps; numbered anew."""
    evaluation = Step(Phase('evaluation', 1), 0, 0)
    out, solver_steps = [evaluation], 0
    for step in steps:
        out.append(step)
        if step.phase.name == 'solver':
            solver_steps += 1
            if config.eval.every and solver_steps % config.eval.every == 0 and step is not steps[-1]:
                out.append(evaluation)
    out.append(evaluation)
    return [Step(s.phase, s.index, number) for number, s in enumerate(out)]


def _rendering_check(codec: Codec, rows: list[Row]) -> dict[str, float]:
    """Share of rollouts whose ids come out the same when their text is tokenised again: how much re-tokenising
    trainers would have changed."""
    same = [codec.encode(codec.decode(r.trajectory.tokens)) == r.trajectory.tokens.tolist() for r in rows[:16]]
    return {'same_ids_when_rendered_again': float(np.mean(same))}


def _records(table, step: Step, rows: list[Row], limit: int):
    """The first rollouts of a step, whole groups at a time, as the report reads them."""
    groups = {(r.role, r.group) for r in rows[:limit]}
    for row in [r for r in rows if (r.role, r.group) in groups][: 2 * limit]:
        t, codec = row.trajectory, table.roles[row.role].env.codec
        cuts = [0, *(np.flatnonzero(np.diff(t.source)) + 1), len(t.tokens)]
        yield {
            'step': step.number,
            'iteration': step.phase.iteration,
            'phase': step.phase.name,
            'role': row.role,
            'group': row.group,
            'reward': row.reward,
            'parts': row.parts,
            'advantage': row.advantage,
            'drop': row.drop,
            'finish': t.finish,
            'info': row.info,
            'segments': [
                {'source': SOURCES[t.source[a]], 'text': codec.decode(t.tokens[a:b])} for a, b in zip(cuts, cuts[1:])
            ],
        }


def _write(path: pathlib.Path, text: str) -> None:
    staged = path.with_name(f'.{path.name}')
    staged.write_text(text + '\n')
    os.replace(staged, path)


class _Bar:
    """One line of progress over the whole run; silent where nobody watches."""

    def __init__(self, config, steps: list[Step], cursor: int):
        hidden = not (config.progress and sys.stderr.isatty())
        self._bar = tqdm.tqdm(total=len(steps), initial=cursor, disable=hidden, unit='step', dynamic_ncols=True)
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
        names = {'em/mean': 'EM', 'reward_mean': 'reward', 'tokens_per_second': 'tok/s'}
        forms = {'tok/s': '{:.0f}'}
        self._bar.update()
        self._show(**{short: forms.get(short, '{:.2f}').format(values[n]) for n, short in names.items() if n in values})

    def _show(self, **values):
        self._shown |= values
        self._bar.set_postfix(self._shown)

    def close(self) -> None:
        self._bar.close()
