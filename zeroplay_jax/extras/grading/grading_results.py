"""Results of a graded evaluation: rubrics met by each judge, agreement of both, as JSON and as Markdown."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from jaxtyping import Float, Int

from zeroplay_jax.evaluation import question_sets, statistics
from zeroplay_jax.evaluation.play import GradingRecord, Judgement, judgements
from zeroplay_jax.evaluation.question_sets import RubricTask
from zeroplay_jax.objectives import rewards
from zeroplay_jax.selfplay import answers
from zeroplay_jax.types import Json

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
      settings: what the evaluation measured (`question_sets.result_settings`), copied into the result.
      set_name: name of the set of tasks.
      judges: name of each judge ('judge', 'second_judge') → its key in the record.
      samples: answers per task.

    Returns:
      {'settings', 'sets': as in `question_sets.results`, with the scores by the first judge, so that
      `zeroplay_jax.compare` reads the file,
      'tasks', 'rubrics', 'samples': int,
      'answers': {'given', 'missing': int, 'finish': {reason: int}},
      'judges': {name: {'judge': key, 'rubrics_met': [mean, low, high] or null, 'scored_tasks',
      'judgements': {'met', 'not_met', 'unread', 'failed'}}},
      'agreement': fields of `agreement.Agreement` or null, 'task_scores': [{'task': id, name of a judge: score or
      null}]}. A task's score is the share of the verdicts on its answers that are 'met', meaned over its answers; a
      missing answer has the score 0, and an answer without any verdict none.
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
    sets: dict[str, tuple[Sequence[question_sets.Question], Sequence[question_sets.Answered]]] = {}
    first_scores = next(iter(scores_of_judge.values()))
    # Without any score there is no mean, and nothing to compare.
    if any(score is not None for score in first_scores):
        questions = [task.question for task in tasks]
        sets[set_name] = (questions, _answered(tasks, record, first_scores))
    return question_sets.results(settings, sets) | {
        'tasks': len(tasks),
        'rubrics': sum(len(task.rubrics) for task in tasks),
        'samples': samples,
        'answers': _count_answers(tasks, record),
        'judges': result_of_judge,
        'agreement': _agreement(tasks, list(judges.values()), record, samples),
        'task_scores': task_scores,
    }


def _answered(
    tasks: Sequence[RubricTask], record: GradingRecord, scores: Sequence[float | None]
) -> list[question_sets.Answered]:
    """Returns the result of each task; answer and searches are those of its first sample."""
    answered = []
    for task, score in zip(tasks, scores, strict=True):
        first = record.answers[task.id][0]
        answered.append(
            question_sets.Answered(_rounded(score), first.searches, first.redundancy, first.text)
        )
    return answered


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
    pairs_of_tasks = []
    for task in tasks:
        pairs = []
        for judgement in judgements([task], first_key, samples):
            first = record.grades.get(judgement)
            second = record.grades.get(judgement._replace(judge=second_key))
            # Missing answers are left out: both judges would agree on them without having read anything.
            if first is None or second is None:
                continue
            if first.met is not None and second.met is not None:
                pairs.append((first.met, second.met))
        pairs_of_tasks.append(pairs)
    measured = agreement(count_pairs(pairs_of_tasks))
    if measured is None:
        return None
    fields = dataclasses.asdict(measured)
    for name in ('raw', 'kappa', 'kappa_interval'):
        fields[name] = _rounded(fields[name])
    return fields


def markdown(result: Mapping[str, Any]) -> str:
    """Returns the content of results.md: the result of `results` as tables and sentences."""
    # A misspelt name in the template is an error.
    page = jinja2.Template(
        _PAGE.read_text(encoding='utf-8'),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    functions = {'count': '{:,}'.format, 'interval': statistics.interval_text, 'kappa': kappa_text}
    return page.render(result, labels=_SETTING_LABELS, **functions)


def kappa_text(measured: Mapping[str, Any]) -> str:
    """Returns Cohen's kappa with its interval; in words if it is undefined or has none."""
    if measured['kappa'] is None:
        return 'undefined, both judges give one and the same verdict everywhere'
    if measured['kappa_interval'] is None:
        return f'{measured["kappa"]:.3f}, too few tasks differ for an interval'
    return statistics.interval_text([measured['kappa'], *measured['kappa_interval']])


# ---- agreement of two judges -----------------------------------------------------------------------
#
# Agreement of two judges on the same items: raw agreement and Cohen's kappa, with intervals over tasks.
#
# Cohen's kappa (Educational and Psychological Measurement 20:37, 1960) is (p_o - p_e) / (1 - p_e): p_o is the share of
# items on which both judges give the same verdict, p_e that share for two independent judges with the same margins. It
# is 1 for judges that always agree, 0 for agreement by chance, and undefined if both give one and the same verdict for
# all items, because then chance alone explains everything (p_e = 1).
#
# The rubrics of one task are graded on the same answer and are not independent, so intervals resample whole tasks.


# Both verdicts of an item, in this order: of the first and of the second judge.
Pair = tuple[bool, bool]
# Columns of a table of pairs.
CELLS = ('both_met', 'first_only', 'second_only', 'neither')
_CELL_OF_PAIR = {(True, True): 0, (True, False): 1, (False, True): 2, (False, False): 3}
_QUANTILES = (0.025, 0.975)
# Bootstrap draws computed at once: a draw has a weight per task, and thousands of tasks times all draws fill a memory.
_DRAWS_AT_ONCE = 250
# With more draws without a kappa than this share the remaining ones would be a selection, not an interval.
_MAX_UNDEFINED = 0.05


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Agreement of two judges.

    Attributes:
      items: items with a verdict of both.
      tasks: tasks with such items.
      table: number of items per cell of `CELLS`.
      raw: share of items with equal verdicts, and its 95 % interval (mean, low, high).
      kappa: Cohen's kappa; None if it is undefined.
      kappa_interval: its 95 % interval (low, high); None if more than 5 % of the bootstrap draws have no kappa.
    """

    items: int
    tasks: int
    table: dict[str, int]
    raw: statistics.Interval
    kappa: float | None
    kappa_interval: tuple[float, float] | None


def count_pairs(pairs_of_tasks: Sequence[Sequence[Pair]]) -> Int[np.ndarray, 'tasks 4']:
    """Returns the number of items per task and cell of `CELLS`; tasks without items are left out."""
    rows = []
    for pairs in pairs_of_tasks:
        row = [0] * len(CELLS)
        for pair in pairs:
            row[_CELL_OF_PAIR[pair]] += 1
        if pairs:
            rows.append(row)
    return np.array(rows, np.int64).reshape(-1, len(CELLS))


def kappa(tables: Int[np.ndarray, '*batch 4']) -> Float[np.ndarray, '*batch']:
    """Returns Cohen's kappa of tables of counts in the order of `CELLS`; NaN where it is undefined."""
    both, first_only, second_only, neither = np.moveaxis(np.asarray(tables, np.int64), -1, 0)
    items = both + first_only + second_only + neither
    # Everything is multiplied by items², so that the subtractions are exact and 1 - p_e is 0 only where it should be.
    observed = items * (both + neither)
    met_by_chance = (both + first_only) * (both + second_only)
    unmet_by_chance = (second_only + neither) * (first_only + neither)
    expected = met_by_chance + unmet_by_chance
    beyond_chance = np.asarray(items * items - expected, float)
    values = np.full(beyond_chance.shape, np.nan)
    np.divide(observed - expected, beyond_chance, out=values, where=beyond_chance > 0)
    return values


def agreement(
    counts: Int[np.ndarray, 'tasks 4'], draws: int = 10_000, seed: int = 0
) -> Agreement | None:
    """Returns the agreement of two judges with percentile intervals of a bootstrap over tasks; None without items.

    Args:
      counts: result of `count_pairs`.
      draws: number of bootstrap samples.
      seed: seed of the bootstrap.
    """
    num_tasks = len(counts)
    if not num_tasks:
        return None
    table = counts.sum(0)
    num_items = int(table.sum())
    rng = np.random.default_rng(seed)
    equal_weights = np.full(num_tasks, 1 / num_tasks)
    raw_draws = []
    kappa_draws = []
    for start in range(0, draws, _DRAWS_AT_ONCE):
        size = min(_DRAWS_AT_ONCE, draws - start)
        # How often each task occurs in a sample of as many tasks with replacement.
        occurrences = rng.multinomial(num_tasks, equal_weights, size=size)
        drawn_tables = occurrences @ counts
        raw_draws.append(_share_equal(drawn_tables))
        kappa_draws.append(kappa(drawn_tables))
    raw_low, raw_high = np.quantile(np.concatenate(raw_draws), _QUANTILES)
    value = float(kappa(table))
    return Agreement(
        items=num_items,
        tasks=num_tasks,
        table=dict(zip(CELLS, table.tolist(), strict=True)),
        raw=(float(_share_equal(table)), float(raw_low), float(raw_high)),
        kappa=None if np.isnan(value) else value,
        kappa_interval=_kappa_interval(np.concatenate(kappa_draws)),
    )


def _share_equal(tables: Int[np.ndarray, '*batch 4']) -> Float[np.ndarray, '*batch']:
    """Returns the share of items with equal verdicts."""
    # Always floating, also for a single table.
    return np.asarray((tables[..., 0] + tables[..., 3]) / tables.sum(-1))


def _kappa_interval(draws: Float[np.ndarray, ' draws']) -> tuple[float, float] | None:
    """Returns the 95 % interval of the draws that have a kappa; None if too few have one."""
    defined = draws[~np.isnan(draws)]
    if len(defined) < (1 - _MAX_UNDEFINED) * len(draws):
        return None
    low, high = np.quantile(defined, _QUANTILES)
    return float(low), float(high)
