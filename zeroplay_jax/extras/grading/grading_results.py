"""Results of a graded evaluation: rubrics met by each judge, agreement of both, as JSON and as Markdown."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.evaluation.results import Answered, Results, SetResults
from zeroplay_jax.extras.grading.record import GradingRecord, Judgement, RubricTask, judgements
from zeroplay_jax.objectives import rewards
from zeroplay_jax.selfplay import answers
from zeroplay_jax.types import Json

# Cells of a table of pairs → the verdicts of the first and of the second judge.
CELLS = {
    'both_met': (True, True),
    'first_only': (True, False),
    'second_only': (False, True),
    'neither': (False, False),
}
_PAGE = pathlib.Path(__file__).parent / 'results.md.jinja'
# Digits of figures in files.
_DIGITS = 6
# Keys of the settings that say too little on a page.
_SETTING_LABELS = {
    'tools': 'syntax and tools',
    'tokens': 'turns, tokens per turn, tokens per observation',
}


def results(
    settings: Json,
    set_name: str,
    tasks: Sequence[RubricTask],
    judges: Mapping[str, str],
    record: GradingRecord,
    samples: int,
) -> dict[str, Any]:
    """Returns the content of results.json; it depends on the tasks and the record only, not on their order in files.

    Args:
      settings: what the evaluation measured (`answering.result_settings`).
      set_name: name of the set of tasks.
      judges: name of each judge ('judge', 'second_judge') → its key in the record.
      samples: answers per task.

    Returns:
      {'settings', 'sets': as in `Results`, with the scores by the first judge, so that `zeroplay_jax.compare` reads the
      file,
      'tasks', 'rubrics', 'samples': int,
      'answers': {'given', 'missing': int, 'finish': {reason: int}},
      'judges': {name: {'judge': key, 'rubrics_met': [mean, low, high] or null, 'scored_tasks',
      'judgements': {'met', 'not_met', 'unread', 'failed'}}},
      'agreement': `agreement` with the number of 'tasks', or null,
      'task_scores': [{'task': id, name of a judge: score or null}]}. A task's score is the share of the verdicts on its
      answers that are 'met', meaned over its answers; a missing answer has the score 0, and an answer without any
      verdict none.
    """
    scores_of_judge: dict[str, list[float | None]] = {}
    result_of_judge: dict[str, dict[str, Any]] = {}
    for name, key in judges.items():
        scores = [_task_score(task, key, record) for task in tasks]
        scores_of_judge[name] = scores
        result_of_judge[name] = {'judge': key, **_summary(scores)}
        result_of_judge[name]['judgements'] = _count_grades(tasks, key, record, samples)
    task_scores = []
    for number, task in enumerate(tasks):
        entry = {'task': task.id}
        for name, scores in scores_of_judge.items():
            entry[name] = _rounded(scores[number])
        task_scores.append(entry)
    sets: dict[str, SetResults] = {}
    first_scores = next(iter(scores_of_judge.values()))
    # Without any score there is no mean, and nothing to compare.
    if any(score is not None for score in first_scores):
        answered = []
        for task, score in zip(tasks, first_scores, strict=True):
            # Answer and searches are those of the first sample.
            first = record.answers[task.id][0]
            answered.append(Answered(_rounded(score), first.searches, first.redundancy, first.text))
        sets[set_name] = SetResults.of([task.question for task in tasks], answered)
    return {
        **Results(settings, sets).to_json(),
        'tasks': len(tasks),
        'rubrics': sum(len(task.rubrics) for task in tasks),
        'samples': samples,
        'answers': _count_answers(tasks, record),
        'judges': result_of_judge,
        'agreement': _agreement(tasks, list(judges.values()), record, samples),
        'task_scores': task_scores,
    }


def _rounded(value: Any) -> Any:
    """Returns a number, or a list of numbers, with `_DIGITS` digits; None stays None."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(float(value), _DIGITS)


def _task_score(task: RubricTask, key: str, record: GradingRecord) -> float | None:
    """Returns the mean share of rubrics met over the answers to a task; None if no answer has a verdict.

    Rubrics count by their weights (`rewards.rubric_score`).
    """
    shares = []
    for sample, answer in enumerate(record.answers[task.id]):
        if not answer.text:
            shares.append(0.0)
            continue
        met, weights = [], []
        for number, rubric in enumerate(task.question.rubrics):
            grade = record.grades.get(Judgement(key, task.id, sample, number))
            # A verdict that was not given is neither met nor not met.
            if grade is not None and grade.met is not None:
                met.append(grade.met)
                weights.append(answers.weight(rubric))
        if any(weight > 0 for weight in weights):
            # All have a verdict, so that there is a score.
            shares.append(rewards.rubric_score(met, weights) or 0.0)
    return float(np.mean(shares)) if shares else None


def _summary(scores: Sequence[float | None]) -> dict[str, Any]:
    """Returns the mean score with its 95 % interval over tasks, and the number of tasks with a score."""
    known_scores = [score for score in scores if score is not None]
    interval = _rounded(statistics.mean_interval(known_scores)) if known_scores else None
    return {'rubrics_met': interval, 'scored_tasks': len(known_scores)}


def _count_grades(
    tasks: Sequence[RubricTask], key: str, record: GradingRecord, samples: int
) -> dict[str, int]:
    """Returns the number of judgements per result."""
    counts = dict.fromkeys(('met', 'not_met', 'unread', 'failed'), 0)
    for judgement in judgements(tasks, key, samples):
        grade = record.grades.get(judgement)
        # Judgements of missing answers are not asked.
        if grade is None:
            continue
        counts[grade.lost or ('met' if grade.met else 'not_met')] += 1
    return counts


def _count_answers(tasks: Sequence[RubricTask], record: GradingRecord) -> dict[str, Any]:
    """Returns how many answers there are, how many are missing, and how their rollouts ended."""
    finishes: collections.Counter[str] = collections.Counter()
    given = 0
    for task in tasks:
        for answer in record.answers[task.id]:
            finishes[answer.finish] += 1
            given += bool(answer.text)
    return {
        'given': given,
        'missing': finishes.total() - given,
        'finish': dict(sorted(finishes.items())),
    }


def _agreement(
    tasks: Sequence[RubricTask], keys: Sequence[str], record: GradingRecord, samples: int
) -> dict[str, Any] | None:
    """Returns the agreement of two judges over all rubrics with a verdict of both; None with one judge."""
    if len(keys) < 2:
        return None
    first_key, second_key = keys
    pairs = []
    agreeing = set()
    for judgement in judgements(tasks, first_key, samples):
        first = record.grades.get(judgement)
        second = record.grades.get(judgement._replace(judge=second_key))
        # Missing answers are left out: both judges would agree on them without having read anything.
        if first is None or second is None:
            continue
        if first.met is not None and second.met is not None:
            pairs.append((first.met, second.met))
            agreeing.add(judgement.task)
    return agreement(pairs) | {'tasks': len(agreeing)} if pairs else None


def agreement(pairs: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """Returns how far two judges agree on items, of each of which the verdicts of both are given.

    Returns:
      {'items': int, 'table': {cell of `CELLS`: number of items}, 'raw': share of equal verdicts, 'kappa': Cohen's kappa
      (Educational and Psychological Measurement 20:37, 1960), (p_o - p_e) / (1 - p_e): p_o is 'raw', p_e that share for
      two independent judges with the same margins. 1: they always agree, 0: by chance; None if both give one and the
      same verdict everywhere, because then chance alone explains everything}.
    """
    counts = [pairs.count(cell) for cell in CELLS.values()]
    both, first_only, second_only, neither = counts
    items = len(pairs)
    met_by_chance = (both + first_only) * (both + second_only)
    unmet_by_chance = (second_only + neither) * (first_only + neither)
    # All is multiplied by items², so that the subtractions are exact.
    beyond_chance = items * items - met_by_chance - unmet_by_chance
    observed = items * (both + neither) - met_by_chance - unmet_by_chance
    return {
        'items': items,
        'table': dict(zip(CELLS, counts, strict=True)),
        'raw': _rounded((both + neither) / items),
        'kappa': _rounded(observed / beyond_chance) if beyond_chance else None,
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Returns the content of results.md: the result of `results` as tables and sentences."""
    # A misspelt name in the template is an error.
    page = jinja2.Template(
        _PAGE.read_text(encoding='utf-8'),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    functions = {'count': '{:,}'.format, 'interval': statistics.interval_text}
    return page.render(result, labels=_SETTING_LABELS, **functions)
