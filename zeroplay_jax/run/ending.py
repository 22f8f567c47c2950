"""The end of a run: trained weights, summary.json, the report and what to do next."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shlex
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from zeroplay_jax.commands import to_copy
from zeroplay_jax.evaluation import report_builder, statistics
from zeroplay_jax.mini.question_form import start_line
from zeroplay_jax.retrieval import json_text, progress
from zeroplay_jax.run import run_folder
from zeroplay_jax.run.build import RunContext
from zeroplay_jax.run.outcome import RunState, current_stop, learning_summary
from zeroplay_jax.run.policies import fingerprints, merged_folder, write_policy
from zeroplay_jax.runtime import disk
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.library import Library
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.settings.kinds import DEMONSTRATIONS
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Json, Question


def finish(
    workdir: pathlib.Path, context: RunContext, engine: Engine, steps: list[Step], state: RunState
) -> dict[str, Any]:
    """Exports the trained weights and writes summary.json and the report; returns the summary."""
    config, hosts = engine.config, context.rollouts.hosts
    demonstrated = _demonstrated_hops(context.folder)
    summary, table = summarise_run(
        config, context.library, engine.external_items, state, len(steps), demonstrated
    )
    start = hosts.run_on_first(lambda: dataclasses.asdict(run_record.recorded(workdir)))
    origin, first_weights = start['origin'], start['weights']
    weights = fingerprints(engine)
    unchanged = [name for name in weights if weights[name] == first_weights[name]]
    stopped = current_stop(config, state.stopped)
    summary |= learning_summary(engine, steps, unchanged, stopped)
    summary['start'] = start_line(context.folder)
    table += f'\n\n{summary["start"]}'
    # Shares of the proposed questions (`ProposalRecord`). Only one process searches, because all have the same sample.
    summary['readable'] = engine.proposals.readable
    summary['answerable'] = hosts.run_on_first(
        engine.proposals.answerable, context.library.training
    )
    summary['best'] = state.best
    summary[run_record.HASH_FIELD] = run_record.hash_of(state.identity)
    summary['from'] = origin
    # Weights that another run trained are exported even if this one did not change them.
    left_out = [] if origin is not None else unchanged
    _export(workdir, 'policy', context, engine, state, left_out)
    if hosts.is_first:
        disk.write_text(workdir / 'summary.json', summary_json(summary))
        report_path = report_builder.write_report(workdir)
        run_record.update(workdir, reported=state.cursor)
        print(table)
        if stopped:
            print(f'the run stopped: {_evaluations_text(state)}')
        print(f'{summary["seconds"]:.0f} s; the report is {report_path}')
        weights_name = context.rollouts.roles[engine.recipe.evaluated_role].weights
        print(advice(workdir, weights_name, summary['em_after'] < summary['em_before']))
    return summary


def _evaluations_text(state: RunState) -> str:
    """Returns which evaluations the figures of a run that stopped are of."""
    if len(state.evaluations) == 1:
        return 'there was no evaluation after training, both columns are the one before it'
    newest = max(map(int, state.evaluations))
    return f'the figures after training are of step {newest}, the last evaluation'


def _demonstrated_hops(folder: pathlib.Path) -> int | None:
    """Returns the most hops that the policy in a folder was shown; None if its maker does not say so."""
    try:
        hops = json_text.read_object(folder / DEMONSTRATIONS, float).get('hops')
    except (OSError, json_text.Unusable):
        return None
    return hops if type(hops) is int else None


def export_iteration(
    workdir: pathlib.Path,
    context: RunContext,
    engine: Engine,
    step: Step,
    next_step: Step | None,
    state: RunState,
) -> None:
    """Takes snapshots of the weights after the last step of an iteration; with `checkpoint.iterations` writes policies.

    They are WORKDIR/iteration<N>/<name>, in the dtype of the sampler: the parent of a policy's folder lies in the
    workdir, as of those at the end, because its run is looked for there.

    Args:
      step: the one that has ended.
      next_step: the one after it, or None.
      state: of the run.
    """
    if next_step is not None and next_step.phase.iteration == step.phase.iteration:
        return
    engine.take_snapshots(str(step.phase.iteration + 1))
    if engine.config.checkpoint.iterations:
        name, dtype = run_folder.iteration_folder(step), str(engine.config.policy.dtype)
        _export(workdir, name, context, engine, state, [], dtype)


def export_step(
    workdir: pathlib.Path, context: RunContext, engine: Engine, number: int, state: RunState
) -> None:
    """Writes the policies before step `number`, float32, if `config.log.rows` has this step or the one before it."""
    if {number - 1, number} & {*engine.config.log.rows}:
        _export(workdir, f'step{number}', context, engine, state, [])


def _export(
    workdir: pathlib.Path,
    parent: str,
    context: RunContext,
    engine: Engine,
    state: RunState,
    unchanged: Container[str],
    dtype: str = '',
) -> None:
    """Writes the weights of each policy to the folder workdir/parent/<name>, if that does not exist.

    Args:
      unchanged: policies that are not exported, because their weights are those of the start.
      dtype: of whole weights; '': float32.
    """
    config, hosts = engine.config, context.rollouts.hosts
    texts = hosts.run_on_first(
        lambda: run_record.recorded(workdir).texts_of_policies(state.identity)
    )
    for name, learner in engine.learners.items():
        if name in unchanged:
            if hosts.is_first:
                print(f'policy {name} has the weights of the start and is not exported')
            continue
        folder = workdir / parent / name
        # The first process decides for all, because `save` is a collective call. A folder that exists is complete
        # (`hf.save` renames it) and current (`run_folder.remove_exports`), as are merged weights.
        if hosts.gather(folder.exists())[0]:
            continue
        is_merged_there = hosts.gather(merged_folder(folder).exists())[0]
        with progress.clock(f'export {name}', config.progress and hosts.is_first):
            is_merged = config.policy.adapters.merge and not is_merged_there
            base = context.base if is_merged else None
            start, model = context.folder, context.model
            write_policy(config, start, model, base, learner.params, texts[name], folder, dtype)


def advice(workdir: pathlib.Path, weights: str, has_fallen: bool = False) -> str:
    """Returns the line about the next step: a command, or why there is no trained policy to ask.

    Args:
      workdir: of a finished run.
      weights: name of the evaluated ones.
      has_fallen: whether exact match fell: one question that was learnt would then tell the wrong story.
    """
    policies = workdir / 'policy'
    # Shared weights are not exported under the name of a role.
    policy = next(
        (policies / name for name in (weights, 'policy') if (policies / name).is_dir()), None
    )
    if policy is None:
        return f'there is no trained policy to ask: the weights {weights} are those of the start'
    question, is_learnt = taught_question(_evaluated(workdir / 'trajectories.jsonl'))
    command = [*to_copy('ask'), '--policy', str(policy)]
    if question:
        command.append(question)
    about = ', which answered this one wrong before' if is_learnt and not has_fallen else ''
    return f'ask the trained policy{about}: {shlex.join(command)}'


def taught_question(rows: Iterable[Json]) -> tuple[str, bool]:
    """Returns a question of the logged evaluations, and whether it was answered better after training than before.

    The one with the greatest gain, of equals the one with most hops, then the greatest reward at last, then the first;
    ('', False) if no evaluation was logged.

    Args:
      rows: logged rollouts of evaluations.
    """
    rewards: dict[int, dict[str, float]] = {}
    hops: dict[str, int] = {}
    for row in rows:
        question = row['info'].get('question')
        if question and row['reward'] is not None:
            rewards.setdefault(row['step'], {})[question] = row['reward']
            hops[question] = row['info'].get('hops') or 0
    if not rewards:
        return '', False
    before, after = rewards[min(rewards)], rewards[max(rewards)]
    gains = {question: reward - before.get(question, reward) for question, reward in after.items()}
    question = max(after, key=lambda text: (gains[text], hops[text], after[text]))
    return question, gains[question] > 0


def _evaluated(path: pathlib.Path) -> Iterator[Json]:
    """Yields the logged rollouts of evaluations, one at a time: the file of a long run is large."""
    with path.open(encoding='utf-8') as file:
        for line in file:
            row = json.loads(line)
            if row['phase'] == 'evaluation':
                yield row


def summarise_run(
    config: Config,
    library: Library,
    external_items: int,
    state: RunState,
    steps: int,
    demonstrated: int | None,
) -> tuple[dict[str, Any], str]:
    """Returns the summary of a run and its table for the terminal.

    Args:
      config: of the run.
      library: the run's library, for its evaluation questions.
      external_items: items of the run with a question or answer from outside.
      state: of the run.
      steps: number of steps of the schedule, evaluations included.
      demonstrated: most hops that the start was shown; None: not known.
    """
    # Ordered by step. The schedule begins with an evaluation, so there is at least one.
    evaluations = list(state.evaluations.values())
    before = statistics.flags_of(evaluations[0])
    after = statistics.flags_of(evaluations[-1])
    # Results are stored per question, with a fingerprint of the questions, for paired comparisons of runs.
    results: dict[str, Any] = {
        'questions': _fingerprint(library.questions),
        'before': evaluations[0],
        'after': evaluations[-1],
        'evaluations': state.evaluations,
    }
    documents: dict[int, list[str]] = {}
    for question in library.questions:
        documents.setdefault(question.hops, []).append(str(question.origin.get('document', '')))
    # The questions of a schedule may be some of them, and those of a world have no document.
    sizes = {hop: len(names) for hop, names in documents.items() if all(names)}
    if sizes == {hop: len(flags) for hop, flags in before.items()}:
        results['documents'] = documents
    documents = results.get('documents', {})
    summary = statistics.summarise(before, after, documents) | {
        'results': results,
        'seconds': round(state.seconds, 1),
        'seed': config.seed,
        'steps': steps,
        'outside_questions': external_items,
    }
    table = 'Exact match on held-out questions, with 95 % intervals:\n\n'
    table += statistics.before_after_table(before, after, demonstrated, documents)
    if demonstrated is not None:
        summary['demonstrated_hops'] = demonstrated
    if state.rubrics:
        rubric_scores = list(state.rubrics.values())
        results['tasks'] = _fingerprint(library.open_tasks)
        results['rubrics'] = state.rubrics
        names = [str(task.origin.get('document', '')) for task in library.open_tasks]
        # A task whose rollout failed has no score.
        of_tasks = names if len(names) == len(rubric_scores[0]) else None
        summary['rubrics'] = statistics.summarise_scores(
            rubric_scores[0], rubric_scores[-1], of_tasks
        )
        line = statistics.scores_line(summary['rubrics'])
        table += f'\nrubrics met by answers to open tasks: {line}'
    if state.scores:
        scores = list(state.scores.values())
        name = metric_name(config.eval.metric)
        results['scores'] = {'metric': name, 'evaluations': state.scores}
        hops = [question.hops for question in library.questions]
        first, last = statistics.by_hop(hops, scores[0]), statistics.by_hop(hops, scores[-1])
        summary['scores'] = statistics.summarise_scores(first, last, documents)
        line = statistics.scores_line(summary['scores'], 'questions')
        table += f'\n{name} of the answers: {line}'
    return summary, table


def metric_name(metric: str) -> str:
    """Returns the name of a metric in logs: of 'package.module:function' the function."""
    return metric.rpartition(':')[2]


def summary_json(summary: Json) -> str:
    """Returns the text of summary.json: indented, every list of numbers on one line."""
    text = json.dumps(summary, indent=2)
    number_list = re.compile(r'\[[-+\d.eE,\s]+\]')
    return number_list.sub(lambda match: ' '.join(match[0].split()), text) + '\n'


def _fingerprint(questions: Sequence[Question]) -> str:
    """Returns a hash of the questions with all fields, by which paired comparisons recognise equal sets."""
    return run_record.digest([question.to_json() for question in questions])
