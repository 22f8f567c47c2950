"""The end of a run: trained weights, summary.json, the trajectory log, the report and what to do next."""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zeroplay_jax.evaluation import report_builder, statistics
from zeroplay_jax.retrieval import json_text, progress
from zeroplay_jax.rollout.tokens import text_spans
from zeroplay_jax.runtime import disk
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.engine import Engine
from zeroplay_jax.selfplay.schedule import Step
from zeroplay_jax.settings.kinds import DEMONSTRATIONS
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.training import build, run_folder
from zeroplay_jax.training.outcome import current_stop, learning_summary
from zeroplay_jax.training.policies import (
    export_texts,
    fingerprints,
    merged_folder,
    roles_by_weights,
    write_policy,
)
from zeroplay_jax.types import Json, Question, Row, ToolCall


def finish(
    config: Config,
    workdir: pathlib.Path,
    context: build.RunContext,
    engine: Engine,
    steps: list[Step],
    state: dict[str, Any],
) -> dict[str, Any]:
    """Exports the trained weights and writes summary.json and the report; returns the summary."""
    hosts = context.rollouts.hosts
    demonstrated = _demonstrated_hops(context.folder)
    summary, table = summarise_run(
        config, context.library, engine.external_items, state, len(steps), demonstrated
    )
    origin, first_weights = hosts.run_on_first(_start_of, workdir)
    weights = fingerprints(engine)
    unchanged = [name for name in weights if weights[name] == first_weights[name]]
    stopped = current_stop(config, state['stopped'])
    summary |= learning_summary(engine, steps, unchanged, stopped)
    # Shares of the proposed questions (`ProposalRecord`). Only one process searches, because all have the same sample.
    summary['readable'] = engine.proposals.readable
    summary['answerable'] = hosts.run_on_first(
        engine.proposals.answerable, context.library.training
    )
    summary['best'] = state.get('best')
    summary[run_record.HASH_FIELD] = run_record.hash_of(state[run_record.STATE_FIELD])
    summary['from'] = origin
    shows_progress = config.progress and hosts.is_first
    # Weights that another run trained are exported even if this one did not change them.
    left_out = [] if origin is not None else unchanged
    exporter = run_record.export_texts(state[run_record.STATE_FIELD])
    _export(config, workdir / 'policy', context, engine, shows_progress, left_out, exporter)
    if hosts.is_first:
        disk.write_text(workdir / 'summary.json', summary_json(summary))
        report_path = report_builder.write_report(workdir)
        run_record.update(workdir, reported=state['cursor'])
        print(table)
        if stopped:
            evaluated_steps = sorted(map(int, state['evaluations']))
            figures = (
                f'the figures after training are of step {evaluated_steps[-1]}, the last evaluation'
            )
            if len(evaluated_steps) == 1:
                figures = (
                    'there was no evaluation after training, both columns are the one before it'
                )
            print(f'the run stopped: {figures}')
        print(f'{summary["seconds"]:.0f} s; the report is {report_path}')
        weights_name = context.rollouts.roles[engine.recipe.evaluated_role].weights
        print(advice(workdir, weights_name, summary['em_after'] < summary['em_before']))
    return summary


def _demonstrated_hops(folder: pathlib.Path) -> int | None:
    """Returns the most hops that the policy in a folder was shown; None if its maker does not say so."""
    try:
        hops = json_text.read_object(folder / DEMONSTRATIONS, float).get('hops')
    except (OSError, json_text.Unusable):
        return None
    return hops if type(hops) is int else None


def export_iteration(
    place: run_folder.Place,
    context: build.RunContext,
    engine: Engine,
    step: Step,
    next_step: Step | None,
    state: Mapping[str, Any],
) -> str:
    """Writes the policies after the last step of an iteration, with `checkpoint.iterations`; returns their folder.

    Takes snapshots of the weights, in any case.

    They are WORKDIR/iteration<N>/<name>, in the dtype of the sampler: the parent of a policy's folder lies in the
    workdir, as of those at the end, because its run is looked for there.

    Args:
      step: the one that has ended.
      next_step: the one after it, or None.
      state: the loop's state.

    Returns:
      The folder's name in the workdir; '' if nothing was written.
    """
    config = engine.config
    is_end = next_step is None or next_step.phase.iteration > step.phase.iteration
    if is_end:
        engine.take_snapshots(str(step.phase.iteration + 1))
    if not config.checkpoint.iterations or not is_end:
        return ''
    name = run_folder.iteration_folder(step)
    exporter = run_record.export_texts(state[run_record.STATE_FIELD])
    shows_progress = config.progress and place.hosts.is_first
    parent = place.workdir / name
    _export(config, parent, context, engine, shows_progress, [], exporter, step.number + 1)
    return name


def _export(
    config: Config,
    parent: pathlib.Path,
    context: build.RunContext,
    engine: Engine,
    shows_progress: bool,
    unchanged: list[str],
    exporter: dict[str, str],
    checkpoint: int | None = None,
) -> None:
    """Writes the weights of each policy to the folder parent/<name>, if that does not exist.

    Args:
      checkpoint: number of the checkpoint of an iteration, whose weights get the dtype of the sampler.
      unchanged: policies that are not exported, because their weights are those of the start.
      exporter: a file that names the run (`run_record.export_texts`).
    """
    hosts = context.rollouts.hosts
    trained = [context.rollouts.roles[role] for role in engine.weights_of]
    players = roles_by_weights(trained, engine.recipe.evaluated_role)
    for name, learner in engine.learners.items():
        if name in unchanged:
            if hosts.is_first:
                print(f'policy {name} has the weights of the start and is not exported')
            continue
        folder = parent / name
        # The first process decides for all, because `save` is a collective call. A folder that exists is complete
        # (`hf.save` renames it) and current (`run_folder.remove_exports`).
        if hosts.gather(folder.exists())[0]:
            continue
        with progress.clock(f'export {name}', shows_progress):
            start, prompts = context.folder, context.rollouts.prompts
            texts = export_texts(config, start, players[name], prompts, name, exporter, checkpoint)
            base = context.base if config.policy.adapters.merge else None
            # Merged weights that exist stay. The first process decides for all.
            if base is not None and hosts.gather(merged_folder(folder).exists())[0]:
                base = None
            dtype = '' if checkpoint is None else str(config.policy.dtype)
            write_policy(config, start, context.model, base, learner.params, texts, folder, dtype)


def _start_of(workdir: pathlib.Path) -> tuple[Json | None, dict[str, list[int]]]:
    """Returns origin and first weights in the record of a run."""
    recorded = run_record.read(workdir)
    assert recorded is not None
    return recorded.origin, recorded.weights


# ---- summary.json ----------------------------------------------------------------------------------
#
# Results before and after training with those of every question.


def record_scores(
    state: dict[str, Any], number: str, rows: Sequence[Row], metric: str
) -> dict[str, float]:
    """Adds the scores of an evaluation other than exact match to the loop's state; returns their metrics.

    Those of each of several files of questions are metrics, too, with exact match.

    Args:
      state: gets `state['rubrics'][number]`, the score of each open task, and `state['scores'][number]`, that of each
        question by `metric`; nothing where there is none.
      number: number of the evaluation.
      rows: its rollouts, in the order of questions and tasks.
      metric: `config.eval.metric`.
    """
    metrics = {}
    drops = collections.Counter(row.drop for row in rows)
    for reason in drops.keys() - {None, 'ungraded'}:
        metrics[f'{rows[0].role}/row_drop/{reason}'] = drops[reason] / len(rows)
    graded_rows = [row for row in rows if 'rubrics' in row.parts]
    if graded_rows:
        rubric_scores = [row.reward for row in graded_rows]
        ungraded = [row.drop == 'ungraded' for row in graded_rows]
        state['rubrics'][number] = rubric_scores
        # An ungraded answer counts as 0 in the mean, so its share is shown beside it.
        metrics['rubrics/mean'] = float(np.mean(rubric_scores))
        metrics['rubrics/ungraded'] = float(np.mean(ungraded))
    of_files: dict[str, list[float]] = collections.defaultdict(list)
    for row in rows:
        origin = row.info.question.origin if row.info.question else {}
        for part, name in (('exact_match', 'em'), (metric, _metric_name(metric))):
            if 'set' in origin and part in row.parts:
                of_files[f'{name}/{origin["set"]}/mean'].append(row.parts[part])
    metrics |= {name: float(np.mean(scores)) for name, scores in of_files.items()}
    scored_rows = [row for row in rows if metric in row.parts]
    if scored_rows:
        scores = [row.parts[metric] for row in scored_rows]
        # Absent in a run without another metric than exact match.
        state.setdefault('scores', {})[number] = scores
        # The mean over hop counts, as of exact match. The group of an evaluation's row is its hop count.
        by_hop = statistics.by_hop([row.group for row in scored_rows], scores)
        mean, _, _ = statistics.mean_interval(statistics.headline(by_hop))
        metrics[f'{_metric_name(metric)}/mean'] = mean
    return metrics


def _metric_name(metric: str) -> str:
    """Returns the name of a metric in logs: of 'package.module:function' the function."""
    return metric.rpartition(':')[2]


def summarise_run(
    config,
    library,
    external_items: int,
    state: Mapping[str, Any],
    steps: int,
    demonstrated: int | None,
) -> tuple[dict[str, Any], str]:
    """Returns the summary of a run and its table for the terminal.

    Args:
      library: the run's library, for its evaluation questions.
      external_items: items of the run with a question or answer from outside.
      state: the loop's state; 'evaluations', 'rubrics', 'scores' and 'seconds' are read.
      steps: number of steps of the schedule, evaluations included.
      demonstrated: most hops that the start was shown; None: not known.
    """
    # Ordered by step. The schedule begins with an evaluation, so there is at least one.
    evaluations = list(state['evaluations'].values())
    before = statistics.flags_of(evaluations[0])
    after = statistics.flags_of(evaluations[-1])
    # Results are stored per question, with a fingerprint of the questions, for paired comparisons of runs.
    results = {
        'questions': _fingerprint(library.questions),
        'before': evaluations[0],
        'after': evaluations[-1],
        'evaluations': state['evaluations'],
    }
    summary = statistics.summarise(before, after)
    summary |= {
        'results': results,
        'seconds': round(state['seconds'], 1),
        'seed': config.seed,
        'steps': steps,
        'outside_questions': external_items,
    }
    table = 'Exact match on held-out questions, with 95 % intervals:\n\n'
    table += statistics.before_after_table(before, after, demonstrated)
    if demonstrated is not None:
        summary['demonstrated_hops'] = demonstrated
    rubric_scores = list(state['rubrics'].values())
    if rubric_scores:
        results['tasks'] = _fingerprint(library.open_tasks)
        results['rubrics'] = state['rubrics']
        summary['rubrics'] = statistics.summarise_scores(rubric_scores[0], rubric_scores[-1])
        line = statistics.scores_line(summary['rubrics'])
        table += f'\nrubrics met by answers to open tasks: {line}'
    further_scores = list(state.get('scores', {}).values())
    if further_scores:
        name = _metric_name(config.eval.metric)
        results['scores'] = {'metric': name, 'evaluations': state['scores']}
        hops = [question.hops for question in library.questions]
        first = statistics.by_hop(hops, further_scores[0])
        last = statistics.by_hop(hops, further_scores[-1])
        summary['scores'] = statistics.summarise_scores(first, last)
        line = statistics.scores_line(summary['scores'], 'questions')
        table += f'\n{name} of the answers: {line}'
    return summary, table


def summary_json(summary: Json) -> str:
    """Returns the text of summary.json: indented, every list of numbers on one line."""
    text = json.dumps(summary, indent=2)
    number_list = re.compile(r'\[[-+\d.eE,\s]+\]')
    return number_list.sub(lambda match: ' '.join(match[0].split()), text) + '\n'


def _fingerprint(questions: Sequence[Question]) -> str:
    """Returns a hash of the questions with all fields, by which paired comparisons recognise equal sets."""
    return run_record.digest([question.to_json() for question in questions])


# ---- trajectories.jsonl ----------------------------------------------------------------------------
#
# Whole rollouts of a step, as the report shows them.


# Number of rollouts per step whose text `rendering_check` tokenises again.
_RENDERING_SAMPLE = 16


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
    """Returns the record of one rollout, with its text in segments of one author each.

    The result of a call that is a message of the chat template also stands without the template's text, as 'message'.
    """
    trajectory = row.trajectory
    env = context.roles[row.role].env
    codec = env.codec
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
        if env.tools and env.syntax.writes_messages and segment['source'] == 'env':
            roles = ('user', 'assistant', codec.template.tool_role)
            *_, before, behind = codec.template.layout(roles).between
            segment['message'] = segment['text'].removeprefix(before).removesuffix(behind)
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
    notes = [turn.note for turn in trajectory.turns]
    if any(notes):
        record['notes'] = notes
    if row.turn_rewards is not None:
        earned = row.turn_rewards.tolist()
        record['turn_rewards'] = [None if np.isnan(reward) else reward for reward in earned]
    return record


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


# ---- the next command ------------------------------------------------------------------------------
#
# It asks the trained policy a question which training taught it to answer.


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
    python = pathlib.Path(sys.executable)
    # A relative path is easier to read if the environment lies in the current folder.
    if python.is_relative_to(pathlib.Path.cwd()):
        python = python.relative_to(pathlib.Path.cwd())
    command = [str(python), '-m', 'zeroplay_jax.ask', '--policy', str(policy)]
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
