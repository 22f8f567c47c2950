"""Exact match and other scores with 95 % intervals: a mean, the mean over hop counts, the change on pairs.

One method for a run, `compare` and the report: Wilson's score interval, inside [0, 1], and Newcombe's for a change. A
normal or bootstrap interval collapses to a point if all answers are correct or all are wrong, which happens regularly
on the miniature world; these keep a width. Intervals of sums are combined by "square and add" (Newcombe 1998; Zou and
Donner 2008). They cover the choice of questions or documents, and no other seed of the training.

Samples are an array with one score between 0 and 1 per question, or a mapping from hop count to such an array. A
mapping means the unweighted mean over its hop counts, whatever the number of questions of each. Questions without a hop
count have 0.

Questions about the same document are not independent. Where every question has a document, the interval also covers the
choice of documents: it is that of a cluster bootstrap over them, and nowhere narrower than those above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Shaped

from zeroplay_jax.evaluation.tables import Figure, aligned

Z95 = 1.959963984540054  # two-sided 95 % quantile of the standard normal distribution
# Products of margins below it are rounding errors of sums of equal scores.
_ROUNDING = 1e-9
NO_HOPS = 0  # hop count of questions without one
# The hop counts that the headline figure averages, for all recipes alike; SSP and SCOPE propose no more.
HEADLINE = (NO_HOPS, 1, 2, 3)

# Callers may pass booleans and integers; `_scores_by_hop` checks shape and values.
Scores = Sequence[float] | Shaped[np.ndarray, '...']
CheckedScores = Float64[np.ndarray, 'questions']
Samples = Scores | Mapping[int, Scores]
Interval = tuple[float, float, float]
# Names of documents, one of each question.
Documents = Sequence[str] | Mapping[int, Sequence[str]] | None
# Draws of a bootstrap.
_DRAWS = 2_000


def mean_interval(scores: Samples, documents: Documents = None) -> Interval:
    """Returns the mean score, such as the share of correct answers, and its 95 % interval.

    Args:
      scores: [N], or {hops: [N_hops]} for the mean over hop counts.
      documents: the document of each question, in the same form; None or '' in it: the questions are independent.

    Returns:
      (mean, low, high), all within [0, 1]: Wilson's score interval, combined over hop counts for a mapping.

    Raises:
      ValueError: an array is empty, not one-dimensional or contains values that are not between 0 and 1.
    """
    by_hop = _scores_by_hop(scores)
    return _over_documents(_combine(list(map(_wilson, by_hop.values()))), by_hop, documents)


def paired_difference(before: Samples, after: Samples, documents: Documents = None) -> Interval:
    """Returns the change on the same questions, after minus before, and its 95 % interval.

    Args:
      before: [N], or {hops: [N_hops]}.
      after: the same questions in the same order.
      documents: as of `mean_interval`.

    Returns:
      (difference, low, high), within [-1, 1]: Newcombe's interval for pairs (Statistics in Medicine 17:2635, 1998,
      method 10), combined over hop counts for a mapping.

    Raises:
      ValueError: as `mean_interval`, or the numbers of questions differ.
    """
    before_by_hop, after_by_hop = _paired_scores(before, after)
    pairs = _combine(list(map(_newcombe, before_by_hop.values(), after_by_hop.values())))
    changes = {hop: after_by_hop[hop] - scores for hop, scores in before_by_hop.items()}
    return _over_documents(pairs, changes, documents)


def _over_documents(
    interval: Interval, scores: Mapping[int, CheckedScores], documents: Documents
) -> Interval:
    """Returns an interval of independent questions, widened to that of a cluster bootstrap over their documents."""
    names: Any = documents if isinstance(documents, Mapping) else {NO_HOPS: documents}
    of_hops = [names.get(hop) for hop in scores]
    if not all(one is not None and len(one) and all(one) for one in of_hops):
        return interval
    _, places = np.unique(np.concatenate([np.asarray(one) for one in of_hops]), return_inverse=True)
    count = places.max() + 1
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), _DRAWS)
    means = []
    for values in scores.values():
        mine, places = places[: values.size], places[values.size :]
        sums, sizes = np.bincount(mine, values, count), np.bincount(mine, minlength=count)
        # A draw without a question of this hop count has its mean.
        sizes_drawn = draws @ sizes
        means.append(
            np.where(sizes_drawn, draws @ sums / np.maximum(sizes_drawn, 1), values.mean())
        )
    low, high = np.quantile(np.mean(means, 0), (0.025, 0.975))
    return interval[0], min(interval[1], float(low)), max(interval[2], float(high))


def summarise(
    before: Samples, after: Samples, documents: Mapping[int, Sequence[str]] | None = None
) -> dict[str, Any]:
    """Returns the evaluation fields of `summary.json`; hop counts are string keys.

    The headline is the mean over `HEADLINE`, or over all hop counts if none of those was evaluated.

    Args:
      before: {hops: bool [N_hops]}.
      after: the same questions in the same order.
      documents: {hops: document of each question}; see `mean_interval`.

    Returns:
      {'em_before', 'em_after': float, 'hops': [int], those that the headline averages,
      'em_by_hop': {'before', 'after': {hop: float}},
      'ci95': {'before', 'after': [low, high]} of the headline, 'questions': int, the questions of the headline,
      'documents': int, the documents of those questions, 0 where some have none,
      'questions_by_hop': {hop: int}, 'ci95_by_hop': {'before', 'after': {hop: [low, high]}},
      'difference': [mean, low, high] of the headline, 'difference_by_hop': {hop: [mean, low, high]}}.

    Raises:
      ValueError: as `paired_difference`.
    """
    before_by_hop, after_by_hop = _paired_scores(before, after)
    of_headline = summarise_scores(before_by_hop, after_by_hop, documents)
    # JSON objects have string keys: written and re-read summaries are equal.
    of_hops = {
        str(hop): summarise_scores(scores, after_by_hop[hop], (documents or {}).get(hop))
        for hop, scores in before_by_hop.items()
    }
    sides = ('before', 'after')
    means = {side: {hop: of_hop[side][0] for hop, of_hop in of_hops.items()} for side in sides}
    ends = {side: {hop: of_hop[side][1:] for hop, of_hop in of_hops.items()} for side in sides}
    return {
        'em_before': of_headline['before'][0],
        'em_after': of_headline['after'][0],
        'hops': averaged(before_by_hop),
        'em_by_hop': means,
        'ci95': {side: of_headline[side][1:] for side in sides},
        'questions': of_headline['items'],
        'documents': of_headline.get('documents', 0),
        'questions_by_hop': {hop: of_hop['items'] for hop, of_hop in of_hops.items()},
        'ci95_by_hop': ends,
        'difference': of_headline['difference'],
        'difference_by_hop': {hop: of_hop['difference'] for hop, of_hop in of_hops.items()},
    }


def by_hop(hops: Sequence[int], scores: Sequence[float]) -> dict[int, np.ndarray]:
    """Returns hop count → scores or truth values, ascending, of one of them and a hop count per question."""
    scores_of_hops: dict[int, list[float]] = {}
    for hop, score in zip(hops, scores, strict=True):
        scores_of_hops.setdefault(hop, []).append(score)
    return {hop: np.array(scores_of_hops[hop]) for hop in sorted(scores_of_hops)}


def flags_of(results: Any) -> dict[int, np.ndarray]:
    """Returns hop count → 1 or 0 per question, float64 [questions], of results in summary.json.

    {} if there are none, or if they are damaged, as in a file that was edited by hand.
    """
    flags: dict[int, np.ndarray] = {}
    try:
        # Keys of JSON objects are texts.
        for hops, correct in results.items():
            flags[int(hops)] = np.array(correct, float)
        _scores_by_hop(flags)
    except (AttributeError, TypeError, ValueError):
        return {}
    return flags


def headline(correct: Mapping[int, Scores]) -> dict[int, Scores]:
    """Returns the entries of the headline's hop counts, or all entries if none of those was evaluated."""
    selected = {hop: scores for hop, scores in correct.items() if hop in HEADLINE}
    # An evaluation of other hop counts still needs a headline.
    return selected or dict(correct)


def averaged(hops: Iterable[int]) -> list[int]:
    """Returns those of the evaluated hop counts that the headline averages, ascending."""
    return sorted(headline(dict.fromkeys(hops, ())))


def before_after_table(
    before: Samples,
    after: Samples,
    demonstrated: int | None = None,
    documents: Mapping[int, Sequence[str]] | None = None,
) -> str:
    """Returns exact match with 95 % intervals as plain text: a line per hop count, then the headline mean.

    If no question has a hop count, there is neither a column nor a line of hop counts.

    Args and errors as `summarise`. The lines are joined by newlines, without a final one.

    Args:
      demonstrated: most hops that the policy was shown before training; None: not known.
      documents: {hops: document of each question}; see `mean_interval`.
    """
    before_by_hop, after_by_hop = _paired_scores(before, after)
    samples: dict[str, tuple[Samples, Samples, Documents]] = {}
    for hop, flags in before_by_hop.items():
        label = str(hop or 'none')
        if demonstrated is not None and hop > demonstrated:
            label += ' (not demonstrated)'
        samples[label] = flags, after_by_hop[hop], (documents or {}).get(hop)
    names = ', '.join(str(hop or 'no hops') for hop in averaged(before_by_hop))
    samples[f'mean of {names}'] = before_by_hop, after_by_hop, documents
    rows = [['hops', 'questions', 'before', 'after', 'change']]
    for label, sides in samples.items():
        one = summarise_scores(*sides)
        change = interval_text(one['difference'], sign='+')
        means = map(interval_text, (one['before'], one['after']))
        items = str(one['items'])
        if 'documents' in one:
            items += f' of {one["documents"]} documents'
        rows.append([label, items, *means, change])
    if set(before_by_hop) == {NO_HOPS}:
        rows = [rows[0][1:], rows[-1][1:]]

    lines = aligned(rows)
    rule = '-' * max(map(len, lines))
    if len(lines) > 2:
        lines.insert(-1, rule)
    lines.insert(1, rule)
    return '\n'.join(lines)


def summarise_scores(
    before: Samples, after: Samples, documents: Documents = None
) -> dict[str, Any]:
    """Returns `mean_interval` before and after, and `paired_difference`, of the headline's hop counts.

    Args:
      before: a score per item, or {hops: scores}.
      after: scores of the same items in the same order.
      documents: as of `mean_interval`.

    Returns:
      {'before', 'after', 'difference': [mean, low, high], 'items': int}, and 'documents': int, if every item has one.

    Raises:
      ValueError: as `paired_difference`.
    """
    before_by_hop, after_by_hop = map(headline, _paired_scores(before, after))
    names: Any = documents if isinstance(documents, Mapping) else {NO_HOPS: documents}
    asked = {str(one) for hop in before_by_hop for one in names.get(hop) or ['']}
    count = {} if '' in asked else {'documents': len(asked)}
    return {
        'before': list(mean_interval(before_by_hop, documents)),
        'after': list(mean_interval(after_by_hop, documents)),
        'difference': list(paired_difference(before_by_hop, after_by_hop, documents)),
        'items': sum(np.size(scores) for scores in before_by_hop.values()),
    } | count


def scores_line(summary: Mapping[str, Any], items: str = 'tasks') -> str:
    """Returns the result of `summarise_scores` as one line of text; `items`: what was scored."""
    before = interval_text(summary['before'])
    after = interval_text(summary['after'])
    change = interval_text(summary['difference'], sign='+')
    return f'{before} before, {after} after, change {change}, {summary["items"]} {items}'


def interval_text(interval: Sequence[float] | None, sign: str = '') -> str:
    """Returns 'mean [low, high]', 'none' without an interval; with sign '+' positive numbers have their sign."""
    if interval is None:
        return 'none'
    return str(Figure.of(interval, sign=sign))


def _scores_by_hop(samples: Samples) -> dict[int, CheckedScores]:
    """Returns checked {hops: float64 [N]} in ascending order; a single array gets hop count 0."""
    # One key for plain arrays, so that both kinds of samples share the code.
    by_hop = samples if isinstance(samples, Mapping) else {NO_HOPS: samples}
    if not by_hop:
        raise ValueError('no hop count was evaluated: pass the results of at least one')
    checked = {}
    for hop in sorted(by_hop):
        scores = np.asarray(by_hop[hop])
        is_list = scores.ndim == 1 and scores.size > 0
        if not is_list or not ((scores >= 0) & (scores <= 1)).all():
            raise ValueError(
                f'hop count {hop}: got shape {scores.shape}, need a non-empty list of scores between 0 and 1'
            )
        checked[hop] = scores.astype(np.float64)
    return checked


def _paired_scores(
    before: Samples, after: Samples
) -> tuple[dict[int, CheckedScores], dict[int, CheckedScores]]:
    """Returns both sides as `_scores_by_hop`; raises ValueError if their sizes differ."""
    before_by_hop = _scores_by_hop(before)
    after_by_hop = _scores_by_hop(after)
    # Equal sizes are necessary for pairs; that entry i is the same question on both sides cannot be checked here.
    sizes_before = {hop: flags.size for hop, flags in before_by_hop.items()}
    sizes_after = {hop: flags.size for hop, flags in after_by_hop.items()}
    if sizes_before != sizes_after:
        raise ValueError(
            f'questions per hop count differ: {sizes_before} before, {sizes_after} after; '
            'ask the same questions on both sides'
        )
    return before_by_hop, after_by_hop


def _wilson(scores: CheckedScores) -> Interval:
    """Returns the mean of scores and Wilson's score interval (1927) for as many answers as tell the same."""
    mean = float(scores.mean())
    n = _answers(scores, mean)
    # The centre is pulled from the mean towards 1/2, the more so the fewer questions there are.
    shrinkage = 1 + Z95**2 / n
    centre = (mean + Z95**2 / (2 * n)) / shrinkage
    # The second term keeps the width above 0 at a mean of 0 or 1.
    variance = mean * (1 - mean) / n + Z95**2 / (4 * n * n)
    half_width = Z95 / shrinkage * float(np.sqrt(variance))
    # Rounding could place the mean outside its own interval at 0 and 1.
    low = min(mean, max(0.0, centre - half_width))
    high = max(mean, min(1.0, centre + half_width))
    return mean, low, high


def _answers(scores: CheckedScores, mean: float) -> float:
    """Returns the number of right or wrong answers whose mean is as uncertain as that of these scores.

    Scores between 0 and 1 vary less than right and wrong ones of the same mean. One observation of that larger variance
    is added to theirs, so that equal scores do not look certain.
    """
    n = scores.size
    if np.isin(scores, (0, 1)).all():
        return n
    binomial = mean * (1 - mean)
    variance = (float(np.square(scores - mean).sum()) + binomial) / (n + 1)
    return n * binomial / variance


def _newcombe(before: CheckedScores, after: CheckedScores) -> Interval:
    """Returns mean(after) - mean(before) of pairs and its interval (Newcombe 1998, method 10)."""
    mean_before, low_before, high_before = _wilson(before)
    mean_after, low_after, high_after = _wilson(after)

    # phi is the correlation of the two sides: a positive one narrows the interval. For right and wrong answers these
    # sums are the counts of Newcombe's 2x2 table.
    n = before.size
    sum_before, sum_after = float(before.sum()), float(after.sum())
    numerator = n * float(before @ after) - sum_before * sum_after
    before_margins = n * float(before @ before) - sum_before**2
    after_margins = n * float(after @ after) - sum_after**2
    if numerator > 0:
        # Newcombe's continuity correction: a smaller correlation gives a wider interval.
        numerator = max(numerator - n / 2, 0)
    # If all answers of a side are equal, a margin is 0 and the correlation is undefined; 0 assumes independence. Sums
    # of fractions are rounded.
    phi = 0.0
    margins = after_margins * before_margins
    if margins > _ROUNDING:
        phi = max(-1.0, min(1.0, numerator / float(np.sqrt(margins))))

    difference = mean_after - mean_before
    # The lower end of the difference comes from the lower end of `after` and the upper end of `before`; half-widths a
    # and b of two correlated sides give sqrt(a² - 2 phi a b + b²).
    ends = []
    for a, b in (
        (mean_after - low_after, high_before - mean_before),
        (high_after - mean_after, mean_before - low_before),
    ):
        # The products are in the order of the formula.
        ends.append(float(np.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))))
    return difference, max(-1.0, difference - ends[0]), min(1.0, difference + ends[1])


def _combine(intervals: list[Interval]) -> Interval:
    """Returns the interval of the mean of independent figures, each (mean, low, high).

    Half-widths are added as squares ("square and add"), those below the mean and those above it separately.
    """
    # A single interval is returned unchanged: adding and subtracting its mean would round its ends.
    if len(intervals) == 1:
        return intervals[0]
    bounds = np.array(intervals)  # [N, 3]: mean, low, high
    mean = float(bounds.mean(0)[0])
    below = bounds[:, 0] - bounds[:, 1]
    above = bounds[:, 2] - bounds[:, 0]
    squares = np.stack([below, above], axis=1) ** 2
    below_mean, above_mean = np.sqrt(squares.sum(0)) / len(intervals)
    return mean, float(mean - below_mean), float(mean + above_mean)


def difference(baseline: Sequence[float], candidate: Sequence[float]) -> Interval:
    """Returns the mean score of the candidate's runs minus that of the baseline's, and its 95 % interval over runs.

    The interval of one pair of runs (`results.compare`) covers the choice of questions only. Two seeds of one config
    can differ by more than it says, so a claim about a method needs several runs of each side.

    Args:
      baseline: mean score per run.
      candidate: mean score per run.

    Returns:
      (difference, low, high): Welch's t interval (Biometrika 34:28, 1947), for sides of different variances. A side of
      one run, such as the policy before training, counts as exact, and the interval is Student's of the other's runs.

    Raises:
      ValueError: two runs are needed to compute a variance from.
    """
    # Its import takes a second, and only this function needs it.
    from scipy import stats

    before, after = np.asarray(baseline, float), np.asarray(candidate, float)
    if before.size == after.size == 1:
        raise ValueError('an interval over runs needs two runs of a side or more')
    mean = float(after.mean() - before.mean())
    # Equal runs have no spread.
    if not before.var() + after.var():
        return mean, mean, mean
    if 1 in (before.size, after.size):
        interval = stats.ttest_1samp(after - before, 0).confidence_interval()
    else:
        interval = stats.ttest_ind(after, before, equal_var=False).confidence_interval()
    return mean, float(interval.low), float(interval.high)
