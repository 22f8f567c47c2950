"""95 % intervals for exact match: one proportion, the mean over hop counts, and before against after.

Everything rests on Wilson's interval, which keeps a width where all answers are right or all are wrong (a
normal or bootstrap interval collapses to a point there, and a solved miniature world is exactly that case).
Sums of proportions combine their intervals by squares (Newcombe 1998, "square and add"; Zou and Donner 2008).

Samples are bool [N], one entry per question, or a mapping from hop count to such an array; a mapping stands
for the plain mean over its hop counts, however many questions each has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Z95 = 1.959963984540054  # two-sided 95 % point of the standard normal
HEADLINE = (1, 2, 3)  # the hop counts that the headline figure is the mean of

Samples = np.ndarray | Mapping[int, np.ndarray]
Interval = tuple[float, float, float]


def mean_interval(correct: Samples) -> Interval:
    """Mean of right answers and its 95 % interval.

    Args:
      correct: bool [N], or {hops: bool [N_hops]} for the mean over hop counts.

    Returns:
      (mean, low, high), all within [0, 1]: Wilson's score interval, combined over hop counts for a mapping.

    Raises:
      ValueError: an array is empty, not one-dimensional or holds something other than 0 and 1.
    """
    return _combine([_wilson(values) for values in _strata(correct).values()])


def paired_difference(before: Samples, after: Samples) -> Interval:
    """Gain on the same questions, after minus before, and its 95 % interval.

    Args:
      before, after: bool [N], or {hops: bool [N_hops]}; entry i of both is the same question.

    Returns:
      (difference, low, high), within [-1, 1]: Newcombe's interval for paired proportions (Statistics in
      Medicine 17:2635, 1998, method 10), combined over hop counts for a mapping.

    Raises:
      ValueError: as `mean_interval`, or the two sides do not hold the same questions.
    """
    first, second = _pairs(before, after)
    return _combine([_newcombe(first[hop], second[hop]) for hop in first])


def summarise(
    before: Samples, after: Samples, headline: tuple[int, ...] = HEADLINE
) -> dict[str, Any]:
    """The evaluation fields of `summary.json`, JSON-able; hop counts are string keys.

    Args:
      before, after: {hops: bool [N_hops]} on the same questions.
      headline: the hop counts that `em_before` and `em_after` average (all of them where none was measured).

    Returns:
      {'em_before', 'em_after': float, 'em_by_hop': {'before', 'after': {hop: float}},
      'ci95': {'before', 'after': [low, high]} of the headline, 'questions': int, those behind the headline,
      'questions_by_hop': {hop: int}, 'ci95_by_hop': {'before', 'after': {hop: [low, high]}},
      'difference': [mean, low, high] of the headline, 'difference_by_hop': {hop: [mean, low, high]}}.

    Raises:
      ValueError: as `paired_difference`.
    """
    sides = dict(zip(('before', 'after'), _pairs(before, after), strict=True))
    measured = sides['before']
    chosen = [hop for hop in measured if hop in headline] or list(measured)
    head = {side: {hop: values[hop] for hop in chosen} for side, values in sides.items()}
    means = {side: mean_interval(values) for side, values in head.items()}
    by_hop = {
        side: {str(hop): _wilson(values[hop]) for hop in values} for side, values in sides.items()
    }
    return {
        'em_before': means['before'][0],
        'em_after': means['after'][0],
        'em_by_hop': {
            side: {hop: x[0] for hop, x in rows.items()} for side, rows in by_hop.items()
        },
        'ci95': {side: list(x[1:]) for side, x in means.items()},
        'questions': sum(measured[hop].size for hop in chosen),
        'questions_by_hop': {str(hop): measured[hop].size for hop in measured},
        'ci95_by_hop': {
            side: {hop: list(x[1:]) for hop, x in rows.items()} for side, rows in by_hop.items()
        },
        'difference': list(paired_difference(head['before'], head['after'])),
        'difference_by_hop': {
            str(hop): list(_newcombe(sides['before'][hop], sides['after'][hop])) for hop in measured
        },
    }


def headline(correct: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The hop counts that the headline figure averages, or all of them where none of those was measured."""
    return {hop: values for hop, values in correct.items() if hop in HEADLINE} or dict(correct)


def before_after_table(
    before: Samples, after: Samples, headline: tuple[int, ...] = HEADLINE
) -> str:
    """Plain-text table of exact match with 95 % intervals: a line per hop count, then the headline mean.

    Args and errors as `summarise`. Returns lines joined by newlines, without a final one.
    """
    figures = summarise(before, after, headline)
    chosen = [int(hop) for hop in figures['questions_by_hop'] if int(hop) in headline]
    rows: list[tuple[str, ...]] = [('hops', 'questions', 'before', 'after', 'change')]
    for hop, count in figures['questions_by_hop'].items():
        sides = [
            _cell([figures['em_by_hop'][side][hop], *figures['ci95_by_hop'][side][hop]])
            for side in ('before', 'after')
        ]
        rows.append((hop, str(count), *sides, _cell(figures['difference_by_hop'][hop], '+')))
    label = 'mean of ' + ', '.join(map(str, chosen)) if chosen else 'mean'
    sides = [_cell([figures[f'em_{side}'], *figures['ci95'][side]]) for side in ('before', 'after')]
    rows.append((label, str(figures['questions']), *sides, _cell(figures['difference'], '+')))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        '  '.join(f'{cell:<{width}}' for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    rule = '-' * max(map(len, lines))
    return '\n'.join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def mean_score(scores: Sequence[float] | np.ndarray) -> Interval:
    """Mean of scores that lie between 0 and 1, or of their differences, and its 95 % interval.

    A normal one, mean ± 1.96 standard errors, for such scores are no proportions; of a single score it is everything.
    """
    values = np.asarray(scores, float)
    if values.ndim != 1 or not values.size:
        raise ValueError(f'scores of shape {values.shape}; give a non-empty list')
    mean = float(values.mean())
    half = float(Z95 * values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else 1.0
    return mean, mean - half, mean + half


def summarise_scores(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """`mean_score` of the same items, JSON-able: {'before', 'after', 'difference': [mean, low, high], 'items': int}."""
    first, second = np.asarray(before, float), np.asarray(after, float)
    if first.shape != second.shape or not first.size:
        raise ValueError(
            f'{first.size} scores before, {second.size} after; give both of the same items'
        )
    sides = {'before': first, 'after': second, 'difference': second - first}
    return {side: list(mean_score(values)) for side, values in sides.items()} | {
        'items': first.size
    }


def scores_line(figures: Mapping[str, Any]) -> str:
    """`summarise_scores` as text."""
    sides = f'{_cell(figures["before"])} before, {_cell(figures["after"])} after'
    return f'{sides}, change {_cell(figures["difference"], "+")}, {figures["items"]} tasks'


def _cell(interval: Sequence[float], sign: str = '') -> str:
    mean, low, high = interval
    return f'{mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]'


def _strata(samples: Samples) -> dict[int, np.ndarray]:
    """{hops: bool [N]} in ascending order; one array counts as hop count 0."""
    named = dict(samples) if isinstance(samples, Mapping) else {0: samples}
    if not named:
        raise ValueError('no hop count was measured: give at least one')
    strata = {hop: np.asarray(named[hop]) for hop in sorted(named)}
    for hop, values in strata.items():
        if values.ndim != 1 or not values.size or not np.isin(values, (0, 1)).all():
            raise ValueError(
                f'hop count {hop}: got shape {values.shape}, need a non-empty list of 0 and 1'
            )
    return {hop: values.astype(bool) for hop, values in strata.items()}


def _pairs(before: Samples, after: Samples) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    first, second = _strata(before), _strata(after)
    sizes = [{hop: values.size for hop, values in side.items()} for side in (first, second)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f'questions per hop count differ: {sizes[0]} before, {sizes[1]} after; ask the same ones'
        )
    return first, second


def _wilson(correct: np.ndarray) -> Interval:
    """Wilson's score interval (1927) of the share of True in bool [N]."""
    n, mean = correct.size, float(correct.mean())
    centre = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * float(np.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n * n)))
    # min and max: rounding must not put the mean outside its own interval at 0 and 1
    return mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half))


def _newcombe(before: np.ndarray, after: np.ndarray) -> Interval:
    """Interval of mean(after) - mean(before), bool [N] each; correlated pairs narrow it."""
    (b, b_low, b_high), (a, a_low, a_high) = _wilson(before), _wilson(after)
    both, neither = int((before & after).sum()), int((~before & ~after).sum())
    gained, lost = int((~before & after).sum()), int((before & ~after).sum())
    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    excess: float = both * neither - gained * lost
    if excess > 0:  # Newcombe's continuity correction: claim less correlation than the counts show
        excess = max(excess - before.size / 2, 0)
    phi = excess / float(np.sqrt(float(margins))) if margins else 0.0
    below, above = (a - a_low, b_high - b), (a_high - a, b - b_low)
    low, high = (float(np.sqrt(x * x - 2 * phi * x * y + y * y)) for x, y in (below, above))
    return a - b, max(-1.0, a - b - low), min(1.0, a - b + high)


def _combine(intervals: list[Interval]) -> Interval:
    """Interval of the plain mean of independent figures: half-widths on each side add by squares."""
    mean, low, high = np.mean(intervals, axis=0)
    distances = np.array([(x - lower, upper - x) for x, lower, upper in intervals])
    below, above = np.sqrt((distances**2).sum(0)) / len(intervals)
    if len(intervals) == 1:
        return float(mean), float(low), float(high)  # exactly the single interval, free of rounding
    return float(mean), float(mean - below), float(mean + above)
