"""summary.json: results before and after training with those of every question, and their table for the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.run.state import RunState
from zeroplay_jax.run.steps import metric_name
from zeroplay_jax.runtime import record as run_record
from zeroplay_jax.selfplay.library import Library
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.types import Json, Question


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
    summary = statistics.summarise(before, after) | {
        'results': results,
        'seconds': round(state.seconds, 1),
        'seed': config.seed,
        'steps': steps,
        'outside_questions': external_items,
    }
    table = 'Exact match on held-out questions, with 95 % intervals:\n\n'
    table += statistics.before_after_table(before, after, demonstrated)
    if demonstrated is not None:
        summary['demonstrated_hops'] = demonstrated
    if state.rubrics:
        rubric_scores = list(state.rubrics.values())
        results['tasks'] = _fingerprint(library.open_tasks)
        results['rubrics'] = state.rubrics
        summary['rubrics'] = statistics.summarise_scores(rubric_scores[0], rubric_scores[-1])
        line = statistics.scores_line(summary['rubrics'])
        table += f'\nrubrics met by answers to open tasks: {line}'
    if state.scores:
        scores = list(state.scores.values())
        name = metric_name(config.eval.metric)
        results['scores'] = {'metric': name, 'evaluations': state.scores}
        hops = [question.hops for question in library.questions]
        first, last = statistics.by_hop(hops, scores[0]), statistics.by_hop(hops, scores[-1])
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
