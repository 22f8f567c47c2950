"""Results of a graded evaluation: rubrics met, agreement with other judges, as JSON and as Markdown."""

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
    key: str,
    record: GradingRecord,
    samples: int,
) -> dict[str, Any]:
    """Returns the content of results.json; it depends on the tasks and the record only, not on their order in files.

    Args:
      settings: what the evaluation measured (`answering.result_settings`).
      set_name: name of the set of tasks.
      key: name of the judge in the record.
      samples: answers per task.

    Returns:
      {'settings', 'sets': as in `Results`, so that `zeroplay compare` reads the file,
      'tasks', 'rubrics', 'samples': int,
      'answers': {'given', 'missing': int, 'finish': {reason: int}},
      'judge': key, 'rubrics_met': [mean, low, high] or null, 'scored_tasks': int,
      'judgements': {'met', 'not_met', 'unread', 'failed'},
      'agreement': {key of another judge in the record: `agreement` with the number of 'tasks'},
      'task_scores': [{'task': id, 'score': score or null}]}. A task's score is the share of the verdicts on its answers
      that are 'met', meaned over its answers; a missing answer has the score 0, and an answer without any verdict none.
    """
    scores = [_task_score(task, key, record) for task in tasks]
    known = [score for score in scores if score is not None]
    sets: dict[str, SetResults] = {}
    # Without any score there is no mean, and nothing to compare.
    if known:
        answered = []
        for task, score in zip(tasks, scores, strict=True):
            # Answer and searches are those of the first sample.
            first = record.answers[task.id][0]
            answered.append(Answered(_rounded(score), first.searches, first.redundancy, first.text))
        sets[set_name] = SetResults.of([task.question for task in tasks], answered)
    finishes = collections.Counter(one.finish for task in tasks for one in record.answers[task.id])
    given = sum(bool(one.text) for task in tasks for one in record.answers[task.id])
    counts = dict.fromkeys(('met', 'not_met', 'unread', 'failed'), 0)
    # Judgements of missing answers are not asked.
    for grade in filter(None, map(record.grades.get, judgements(tasks, key, samples))):
        counts[grade.lost or ('met' if grade.met else 'not_met')] += 1
    others = sorted({judgement.judge for judgement in record.grades} - {key})
    return {
        **Results(settings, sets).to_json(),
        'tasks': len(tasks),
        'rubrics': sum(len(task.rubrics) for task in tasks),
        'samples': samples,
        'answers': {
            'given': given,
            'missing': finishes.total() - given,
            'finish': dict(sorted(finishes.items())),
        },
        'judge': key,
        'rubrics_met': _rounded(statistics.mean_interval(known)) if known else None,
        'scored_tasks': len(known),
        'judgements': counts,
        'agreement': {other: _agreement(tasks, (key, other), record, samples) for other in others},
        'task_scores': [
            {'task': task.id, 'score': _rounded(score)}
            for task, score in zip(tasks, scores, strict=True)
        ],
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


def _agreement(
    tasks: Sequence[RubricTask], keys: tuple[str, str], record: GradingRecord, samples: int
) -> dict[str, Any]:
    """Returns the agreement of two judges over all rubrics with a verdict of both."""
    verdicts = []
    for key in keys:
        grades = map(record.grades.get, judgements(tasks, key, samples))
        verdicts.append([None if grade is None else grade.met for grade in grades])
    pairs, agreeing = [], set()
    for judgement, *pair in zip(judgements(tasks, '', samples), *verdicts, strict=True):
        # Missing answers are left out: both judges would agree on them without having read anything.
        if None not in pair:
            pairs.append(tuple(pair))
            agreeing.add(judgement.task)
    return agreement(pairs) | {'tasks': len(agreeing)}


def agreement(pairs: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """Returns how far two judges agree on items, of each of which the verdicts of both are given.

    Returns:
      {'items': int, 'table': {cell of `CELLS`: number of items}, 'raw': share of equal verdicts, 'kappa': Cohen's kappa
      (Educational and Psychological Measurement 20:37, 1960), (p_o - p_e) / (1 - p_e): p_o is 'raw', p_e that share for
      two independent judges with the same margins. 1: they always agree, 0: by chance; None if both give one and the
      same verdict everywhere, because then chance alone explains everything, or there is no item}.
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
        'raw': _rounded((both + neither) / items) if items else None,
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
