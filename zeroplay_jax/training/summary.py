"""Makes `summary.json`, results before and after training with those of every question, and its table."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.types import Json, Question, Row


def record_scores(
    state: dict[str, Any], number: str, rows: Sequence[Row], metric: str
) -> dict[str, float]:
    """Adds the scores of an evaluation other than exact match to the loop's state; returns their metrics.

    Args:
      state: gets `state['rubrics'][number]`, the score of each open task, and `state['scores'][number]`, that of each
        question by `metric`; nothing where there is none.
      number: number of the evaluation.
      rows: its rollouts, in the order of questions and tasks.
      metric: `config.eval.metric`.
    """
    metrics: dict[str, float] = {}
    graded_rows = [row for row in rows if 'rubrics' in row.parts]
    if graded_rows:
        rubric_scores = [row.reward for row in graded_rows]
        ungraded = [row.drop is not None for row in graded_rows]
        state['rubrics'][number] = rubric_scores
        # An ungraded answer counts as 0 in the mean, so its share is shown beside it.
        metrics['rubrics/mean'] = float(np.mean(rubric_scores))
        metrics['rubrics/ungraded'] = float(np.mean(ungraded))
    scored_rows = [row for row in rows if metric in row.parts]
    if scored_rows:
        scores = [row.parts[metric] for row in scored_rows]
        # A checkpoint of an earlier version has no such entry.
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
    config, library, external_items: int, state: Mapping[str, Any], steps: int
) -> tuple[dict[str, Any], str]:
    """Returns the summary of a run and its table for the terminal.

    Args:
      library: the run's library, for its evaluation questions.
      external_items: items of the run with a question or answer from outside.
      state: the loop's state; 'evaluations', 'rubrics', 'scores' and 'seconds' are read.
      steps: number of steps of the schedule, evaluations included.
    """
    # Ordered by step. The schedule begins with an evaluation, so there is at least one.
    evaluations = list(state['evaluations'].values())
    before = _by_hops(evaluations[0])
    after = _by_hops(evaluations[-1])
    # Results are stored per question, with a fingerprint of the questions, for paired comparisons of runs.
    results: dict[str, Any] = {
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
    table += statistics.before_after_table(before, after)
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


def _by_hops(results: Json) -> dict[int, np.ndarray]:
    """Returns hop count → whether each question was answered, bool [questions], from its JSON form."""
    # Keys of JSON objects are texts.
    return {int(hops): np.array(correct, bool) for hops, correct in results.items()}


def summary_json(summary: Json) -> str:
    """Returns the text of summary.json: indented, every list of numbers on one line."""
    text = json.dumps(summary, indent=2)
    number_list = re.compile(r'\[[-+\d.eE,\s]+\]')
    return number_list.sub(lambda match: ' '.join(match[0].split()), text) + '\n'


def _fingerprint(questions: Sequence[Question]) -> str:
    """Returns a hash of the questions with all fields, by which paired comparisons recognise equal sets."""
    records = [question.to_json() for question in questions]
    # Keys are sorted, so that the order of the fields does not matter.
    text = json.dumps(records, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
