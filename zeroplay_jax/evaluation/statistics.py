"""Exact match and rubric scores with 95 % intervals: a proportion, the mean over hop counts, the change on pairs.

Intervals of exact match are built from Wilson's score interval. A normal or bootstrap interval collapses to a point
if all answers are correct or all are wrong, which happens regularly on the miniature world; Wilson's keeps a width.
Intervals of sums of proportions are combined by "square and add" (Newcombe 1998; Zou and Donner 2008).
Rubric scores are not proportions; their intervals are normal (`mean_score`).

Samples are a bool array with one entry per question, or a mapping from hop count to such an array. A mapping means
the unweighted mean over its hop counts, whatever the number of questions of each. Questions without a hop count have 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Num, Shaped

Z95 = 1.959963984540054  # two-sided 95 % quantile of the standard normal distribution
NO_HOPS = 0  # hop count of questions without one
# The hop counts that the headline figure averages, for all recipes alike; SSP and SCOPE propose no more.
HEADLINE = (NO_HOPS, 1, 2, 3)

# Callers may pass 0/1 integers; `_flags_by_hop` checks shape and values and converts to booleans.
Flags = Shaped[np.ndarray, '...']
CheckedFlags = Bool[np.ndarray, 'questions']
Scores = Sequence[float] | Num[np.ndarray, '...']
Samples = Flags | Mapping[int, Flags]
Interval = tuple[float, float, float]


def mean_interval(correct: Samples) -> Interval:
    """Returns the share of correct answers and its 95 % interval.

    Args:
      correct: bool [N], or {hops: bool [N_hops]} for the mean over hop counts.

    Returns:
      (mean, low, high), all within [0, 1]: Wilson's score interval, combined over hop counts for a mapping.

    Raises:
      ValueError: an array is empty, not one-dimensional or contains values other than 0 and 1.
    """
    intervals = []
    for flags in _flags_by_hop(correct).values():
        intervals.append(_wilson(flags))
    return _combine(intervals)


def paired_difference(before: Samples, after: Samples) -> Interval:
    """Returns the change on the same questions, after minus before, and its 95 % interval.

    Args:
      before: bool [N], or {hops: bool [N_hops]}.
      after: the same questions in the same order.

    Returns:
      (difference, low, high), within [-1, 1]: Newcombe's interval for paired proportions (Statistics in
      Medicine 17:2635, 1998, method 10), combined over hop counts for a mapping.

    Raises:
      ValueError: as `mean_interval`, or the numbers of questions differ.
    """
    before_by_hop, after_by_hop = _paired_flags(before, after)
    intervals = []
    for hop, flags_before in before_by_hop.items():
        intervals.append(_newcombe(flags_before, after_by_hop[hop]))
    return _combine(intervals)


def summarise(before: Samples, after: Samples) -> dict[str, Any]:
    """Returns the evaluation fields of `summary.json`; hop counts are string keys.

    The headline is the mean over `HEADLINE`, or over all hop counts if none of those was evaluated.

    Args:
      before: {hops: bool [N_hops]}.
      after: the same questions in the same order.

    Returns:
      {'em_before', 'em_after': float, 'em_by_hop': {'before', 'after': {hop: float}},
      'ci95': {'before', 'after': [low, high]} of the headline, 'questions': int, the questions of the headline,
      'questions_by_hop': {hop: int}, 'ci95_by_hop': {'before', 'after': {hop: [low, high]}},
      'difference': [mean, low, high] of the headline, 'difference_by_hop': {hop: [mean, low, high]}}.

    Raises:
      ValueError: as `paired_difference`.
    """
    before_by_hop, after_by_hop = _paired_flags(before, after)
    em_before_by_hop, ci95_before_by_hop = _summarise_hops(before_by_hop)
    em_after_by_hop, ci95_after_by_hop = _summarise_hops(after_by_hop)
    questions_by_hop = {}
    difference_by_hop = {}
    for hop, flags_before in before_by_hop.items():
        questions_by_hop[str(hop)] = flags_before.size
        # Already paired and checked, so without `paired_difference`.
        difference_by_hop[str(hop)] = list(_newcombe(flags_before, after_by_hop[hop]))

    headline_before = headline(before_by_hop)
    headline_after = headline(after_by_hop)
    em_before, *ci95_before = mean_interval(headline_before)
    em_after, *ci95_after = mean_interval(headline_after)
    return {
        'em_before': em_before,
        'em_after': em_after,
        'em_by_hop': {'before': em_before_by_hop, 'after': em_after_by_hop},
        'ci95': {'before': ci95_before, 'after': ci95_after},
        'questions': sum(flags.size for flags in headline_before.values()),
        'questions_by_hop': questions_by_hop,
        'ci95_by_hop': {'before': ci95_before_by_hop, 'after': ci95_after_by_hop},
        'difference': list(paired_difference(headline_before, headline_after)),
        'difference_by_hop': difference_by_hop,
    }


def _summarise_hops(
    by_hop: dict[int, CheckedFlags],
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Returns exact match and its [low, high], each by hop count as a string."""
    em_by_hop = {}
    ci95_by_hop = {}
    for hop, flags in by_hop.items():
        # JSON objects have string keys: written and re-read summaries are equal.
        em_by_hop[str(hop)], *ci95_by_hop[str(hop)] = _wilson(flags)
    return em_by_hop, ci95_by_hop


def headline(correct: Mapping[int, Flags]) -> dict[int, Flags]:
    """Returns the entries of the headline's hop counts, or all entries if none of those was evaluated."""
    return _select_hops(correct, HEADLINE)


def before_after_table(before: Samples, after: Samples) -> str:
    """Returns exact match with 95 % intervals as plain text: a line per hop count, then the headline mean.

    If no question has a hop count, there is neither a column nor a line of hop counts.

    Args and errors as `summarise`. The lines are joined by newlines, without a final one.
    """
    summary = summarise(before, after)
    em_by_hop = summary['em_by_hop']
    ci95_by_hop = summary['ci95_by_hop']
    headline_hops = []
    rows: list[tuple[str, ...]] = [('hops', 'questions', 'before', 'after', 'change')]
    for hop, questions in summary['questions_by_hop'].items():
        if int(hop) in HEADLINE:
            headline_hops.append(hop if int(hop) else 'no hops')
        row = (
            hop if int(hop) else 'none',
            str(questions),
            _cell([em_by_hop['before'][hop], *ci95_by_hop['before'][hop]]),
            _cell([em_by_hop['after'][hop], *ci95_by_hop['after'][hop]]),
            _cell(summary['difference_by_hop'][hop], sign='+'),
        )
        rows.append(row)

    # Without any hop count of the headline, the figures are the mean over all hop counts.
    label = 'mean'
    if headline_hops:
        label += ' of ' + ', '.join(headline_hops)
    headline_row = (
        label,
        str(summary['questions']),
        _cell([summary['em_before'], *summary['ci95']['before']]),
        _cell([summary['em_after'], *summary['ci95']['after']]),
        _cell(summary['difference'], sign='+'),
    )
    rows.append(headline_row)
    if set(summary['questions_by_hop']) == {str(NO_HOPS)}:
        rows = [rows[0][1:], headline_row[1:]]

    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(map(len, column)))
    lines = []
    for cells in rows:
        padded = map(str.ljust, cells, widths)
        lines.append('  '.join(padded).rstrip())
    rule = '-' * max(map(len, lines))
    if len(lines) > 2:
        lines.insert(-1, rule)
    lines.insert(1, rule)
    return '\n'.join(lines)


def mean_score(scores: Scores) -> Interval:
    """Returns the mean of scores between 0 and 1, or of their differences, and its 95 % interval.

    The interval is the normal one, mean ± 1.96 standard errors, because such scores are not proportions. It
    collapses to a point if all scores are equal, and may exceed [0, 1].

    Args:
      scores: [N], not empty. A single score has no standard error; its interval is mean ± 1.

    Returns:
      (mean, low, high).

    Raises:
      ValueError: `scores` is empty or not one-dimensional.
    """
    values = np.asarray(scores, float)
    if values.ndim != 1 or not values.size:
        raise ValueError(f'scores have shape {values.shape}; pass a non-empty list')
    mean = float(values.mean())
    if values.size == 1:
        # One score has no standard deviation. ± 1 covers every score; for one difference it is a convention.
        return mean, mean - 1.0, mean + 1.0
    deviation = values.std(ddof=1)
    half_width = float(Z95 * deviation / np.sqrt(values.size))
    return mean, mean - half_width, mean + half_width


def summarise_scores(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """Returns `mean_score` before, after and of the change on the same items.

    Args:
      before: a score per item.
      after: scores of the same items in the same order.

    Returns:
      {'before', 'after', 'difference': [mean, low, high], 'items': int}.

    Raises:
      ValueError: the numbers of scores differ or are zero.
    """
    scores_before = np.asarray(before, float)
    scores_after = np.asarray(after, float)
    if scores_before.shape != scores_after.shape or not scores_before.size:
        raise ValueError(
            f'{scores_before.size} scores before, {scores_after.size} after; pass a score per item in both'
        )
    return {
        'before': list(mean_score(scores_before)),
        'after': list(mean_score(scores_after)),
        'difference': list(mean_score(scores_after - scores_before)),
        'items': scores_before.size,
    }


def scores_line(summary: Mapping[str, Any], items: str = 'tasks') -> str:
    """Returns the result of `summarise_scores` as one line of text; `items`: what was scored."""
    before = _cell(summary['before'])
    after = _cell(summary['after'])
    change = _cell(summary['difference'], sign='+')
    return f'{before} before, {after} after, change {change}, {summary["items"]} {items}'


def _cell(interval: Sequence[float], sign: str = '') -> str:
    """Formats 'mean [low, high]'; with sign '+' positive numbers are written with their sign."""
    mean, low, high = interval
    return f'{mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]'


def _select_hops(by_hop: Mapping[int, Flags], hops: tuple[int, ...]) -> dict[int, Flags]:
    """Returns the entries of the hop counts, or all entries if there is none of them."""
    selected = {}
    for hop, flags in by_hop.items():
        if hop in hops:
            selected[hop] = flags
    # An evaluation of other hop counts still needs a headline.
    return selected or dict(by_hop)


def _flags_by_hop(samples: Samples) -> dict[int, CheckedFlags]:
    """Returns checked {hops: bool [N]} in ascending order; a single array gets hop count 0."""
    if not isinstance(samples, Mapping):
        # One key for plain arrays, so that both kinds of samples share the code.
        return _flags_by_hop({NO_HOPS: samples})
    if not samples:
        raise ValueError('no hop count was evaluated: pass the results of at least one')
    checked = {}
    for hop in sorted(samples):
        flags = np.asarray(samples[hop])
        is_list = flags.ndim == 1 and flags.size > 0
        if not is_list or not np.isin(flags, (0, 1)).all():
            raise ValueError(
                f'hop count {hop}: got shape {flags.shape}, need a non-empty list of 0 and 1'
            )
        checked[hop] = flags.astype(bool)
    return checked


def _paired_flags(
    before: Samples, after: Samples
) -> tuple[dict[int, CheckedFlags], dict[int, CheckedFlags]]:
    """Returns both sides as `_flags_by_hop`; raises ValueError if their sizes differ."""
    before_by_hop = _flags_by_hop(before)
    after_by_hop = _flags_by_hop(after)
    # Equal sizes are necessary for pairs; that entry i is the same question on both sides cannot be checked here.
    sizes_before = {hop: flags.size for hop, flags in before_by_hop.items()}
    sizes_after = {hop: flags.size for hop, flags in after_by_hop.items()}
    if sizes_before != sizes_after:
        raise ValueError(
            f'questions per hop count differ: {sizes_before} before, {sizes_after} after; '
            'ask the same questions on both sides'
        )
    return before_by_hop, after_by_hop


def _wilson(correct: CheckedFlags) -> Interval:
    """Returns the share of True in bool [N] and Wilson's score interval (1927)."""
    n = correct.size
    mean = float(correct.mean())
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


def _newcombe(before: CheckedFlags, after: CheckedFlags) -> Interval:
    """Returns mean(after) - mean(before) of paired bool [N] and its interval (Newcombe 1998, method 10)."""
    mean_before, low_before, high_before = _wilson(before)
    mean_after, low_after, high_after = _wilson(after)

    # Counts of the 2x2 table of questions: answered correctly on both sides, on none, only after, only before. phi is
    # the correlation of the two sides: a positive one narrows the interval.
    both = int((before & after).sum())
    neither = int((~before & ~after).sum())
    gained = int((~before & after).sum())
    lost = int((before & ~after).sum())
    after_margins = (both + gained) * (lost + neither)
    before_margins = (both + lost) * (gained + neither)
    # Python integers: the product of four counts is exact, and cannot overflow.
    margins = after_margins * before_margins
    numerator: float = both * neither - gained * lost
    if numerator > 0:
        # Newcombe's continuity correction: a smaller correlation gives a wider interval.
        numerator = max(numerator - before.size / 2, 0)
    # If all answers of a side are equal, a margin is 0 and the correlation is undefined; 0 assumes independence.
    phi = 0.0
    if margins:
        phi = numerator / float(np.sqrt(float(margins)))

    difference = mean_after - mean_before
    # The lower end of the difference comes from the lower end of `after` and the upper end of `before`.
    below = _correlated_width(mean_after - low_after, high_before - mean_before, phi)
    above = _correlated_width(high_after - mean_after, mean_before - low_before, phi)
    return difference, max(-1.0, difference - below), min(1.0, difference + above)


def _correlated_width(width_after: float, width_before: float, phi: float) -> float:
    """Returns the half-width, on one side, of a difference of two proportions with correlation phi.

    Args:
      width_after: distance from the mean to the end of the interval of `after` on this side.
      width_before: that of `before` on the opposite side.
    """
    # The products are in the order of the formula sqrt(a² - 2 phi a b + b²).
    interaction = 2 * phi * width_after * width_before
    squared = width_after * width_after - interaction + width_before * width_before
    return float(np.sqrt(squared))


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
