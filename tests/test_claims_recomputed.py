"""The table of the papers' claims and the figures of its page, computed again from the stored runs.

Nothing of the project is imported: values of curves, analysis of variance and corrections are written anew here, and a
bootstrap over seeds and questions checks the standard errors by another route.
"""

import json
import pathlib
import re
import tomllib

import numpy as np
import pytest
from scipy import stats

pytestmark = pytest.mark.results

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
REGISTRATION = tomllib.loads((ROOT / 'benchmarks' / 'claims.toml').read_text())
CLAIMS = REGISTRATION['claims']
LOOKS = [(look['seeds'], look['share']) for look in REGISTRATION['looks']]
TABLES = json.loads((RESULTS / 'claims.json').read_text())
ROWS = TABLES['claims']
PAGE = ' '.join((ROOT / 'docs' / 'claims.md').read_text().split())
STEPS, ROLLOUTS, CORRECT, RUBRICS = range(4)
CASES = []
for claim, row in zip(CLAIMS, ROWS, strict=True):
    for measure in row['measures']:
        CASES.append(
            pytest.param(claim, row, measure, id=f'{row["system"]}: {row["claim"]}: {measure}')
        )


def stored_runs(rows):
    """(arm, seed) → curve; of two runs of an arm and seed, the one whose code the rows name."""
    codes = {code for row in rows for code in row['codes']}
    curves = {}
    for path in (RESULTS / 'runs').glob('*.json'):
        run = json.loads(path.read_text())
        if run['code'] in codes:
            assert (run['arm'], run['seed']) not in curves
            curves[run['arm'], run['seed']] = run['curve']
    return curves


CURVES = stored_runs(ROWS + TABLES['ablations'])


def at(curve, axis, position, column):
    """The items of a curve at a position, on the line between two evaluations."""
    for left, right in zip(curve, curve[1:], strict=False):
        if left[axis] <= position <= right[axis]:
            weight = (position - left[axis]) / (right[axis] - left[axis])
            return (1 - weight) * np.array(left[column]) + weight * np.array(right[column])
    raise AssertionError(position)


def area(curve, axis, end, column):
    """The mean height of a curve up to a position, as a sum of trapezia."""
    corners = [(point[axis], np.array(point[column])) for point in curve if point[axis] < end]
    corners.append((end, at(curve, axis, end, column)))
    total = 0.0
    for (start, low), (stop, high) in zip(corners, corners[1:], strict=False):
        total = total + (stop - start) * (low + high) / 2
    return total / (end - corners[0][0])


def fall(curve, end):
    """The largest fall from an earlier maximum, as a share of it."""
    means = [np.mean(point[CORRECT]) for point in curve if point[STEPS] <= end]
    falls = [1 - mean / max(means[: k + 1]) for k, mean in enumerate(means) if max(means[: k + 1])]
    return np.array([max(falls)])


def difference(better, worse, measure, column):
    """Better minus worse by item."""
    ends = [min(better[-1][axis], worse[-1][axis]) for axis in (STEPS, ROLLOUTS)]
    if measure == 'gain':
        return np.subtract(better[-1][column], better[0][column], dtype=float)
    if measure == 'first_iteration':
        return at(better, STEPS, better[-1][STEPS] / 3, column) - np.array(worse[-1][column])
    if measure == 'final':
        return at(better, STEPS, ends[0], column) - at(worse, STEPS, ends[0], column)
    if measure == 'area':
        return area(better, STEPS, ends[0], column) - area(worse, STEPS, ends[0], column)
    if measure == 'area_of_rollouts':
        return area(better, ROLLOUTS, ends[1], column) - area(worse, ROLLOUTS, ends[1], column)
    if measure == 'at_rollouts':
        reached = [
            [point for point in arm if point[ROLLOUTS] >= ends[1]] for arm in (better, worse)
        ]
        return np.subtract(reached[0][0][column], reached[1][0][column], dtype=float)
    assert measure == 'worst_drop'
    return fall(worse, ends[0]) - fall(better, ends[0])


def table_of(better, worse, measure, column, seeds):
    """Differences by seed and item."""
    rows = []
    for seed in range(seeds):
        curves = CURVES[better, seed], CURVES[worse or better, seed]
        rows.append(difference(*curves, measure, column))
    return np.array(rows)


def standard_errors(values):
    """(standard error, degrees of freedom) from the mean squares of seeds, of questions, and of both."""
    seeds, questions = values.shape
    grand = values.mean()
    of_seeds = questions * np.sum((values.mean(1) - grand) ** 2) / (seeds - 1)
    if questions == 1:
        return [(np.sqrt(of_seeds / values.size), seeds - 1)]
    of_questions = seeds * np.sum((values.mean(0) - grand) ** 2) / (questions - 1)
    explained = of_seeds * (seeds - 1) + of_questions * (questions - 1)
    rest = (np.sum((values - grand) ** 2) - explained) / (seeds - 1) / (questions - 1)
    freedom = (of_seeds + of_questions) ** 2
    freedom /= of_seeds**2 / (seeds - 1) + of_questions**2 / (questions - 1)
    variances = [of_seeds, of_questions, of_seeds + of_questions - rest]
    freedoms = [seeds - 1, questions - 1, freedom]
    errors = []
    for variance, count in zip(variances, freedoms, strict=True):
        if variance > 0:
            errors.append((np.sqrt(variance / values.size), count))
    return errors


def judged(values, plays):
    """(p, low, high, upper limit) of all looks for which there are seeds."""
    outcomes = []
    for seeds, share in LOOKS:
        if seeds > len(values):
            break
        level, mean = 0.05 * share / plays, values[:seeds].mean()
        errors = standard_errors(values[:seeds])
        p = max(2 * stats.t.cdf(-abs(mean) / error, count) for error, count in errors)
        half = max(error * stats.t.isf(level / 2, count) for error, count in errors)
        above = max(error * stats.t.isf(level, count) for error, count in errors)
        outcomes.append((p * plays / share, mean - half, mean + half, mean + above))
    p, low, high, upper = np.array(outcomes).T
    assert low.max() <= high.min()
    return min(1.0, p.min()), low.max(), high.min(), upper.min()


def test_every_stored_run_of_the_claims_is_there():
    assert len(stored_runs(ROWS)) == 507


@pytest.mark.parametrize(('claim', 'row', 'measure'), CASES)
def test_differences_intervals_and_p_values(claim, row, measure):
    column = RUBRICS if claim.get('of') == 'rubrics' else CORRECT
    values = table_of(claim['better'], claim.get('worse'), measure, column, row['seeds'])
    result = row['measures'][measure]
    p, low, high, upper = judged(values, 1 + len(claim.get('earlier', ())))
    assert result['difference'] == pytest.approx(values.mean(), abs=6e-5)
    assert result['interval'] == pytest.approx([low, high], abs=1.1e-4)
    assert result['upper'] == pytest.approx(upper, abs=1.1e-4)
    assert result['p'] == pytest.approx(p, rel=0.01)
    rng = np.random.default_rng(0)
    means = []
    for _ in range(300):
        seeds, items = (rng.integers(0, size, size) for size in values.shape)
        means.append(values[np.ix_(seeds, items)].mean())
    error = max(error for error, _ in standard_errors(values))
    assert 0.7 < np.std(means) / error < 1.4


def verdicts(measure):
    """The verdict of each claim if a measure leads where there is one, after Holm's correction, in the table's words.

    'measure' stands for the measure that leads, 'registered' for the registered one.
    """
    results = []
    for row in ROWS:
        chosen = row.get(measure) or measure
        results.append(row['measures'].get(chosen, row['measures'][row['measure']]))
    p_values = np.array([result['p'] for result in results])
    corrected, largest = np.ones(len(ROWS)), 0.0
    for passed, index in enumerate(np.argsort(p_values, kind='stable')):
        largest = max(largest, min(1.0, p_values[index] * (len(ROWS) - passed)))
        corrected[index] = largest
    words = []
    for result, claim, p in zip(results, CLAIMS, corrected, strict=True):
        low, high = result['interval']
        word = 'holds' if low > 0 else 'does not hold' if high < 0 else 'open'
        margin = min(claim.get('paper', [-1])[0], 0.05)
        if word == 'open' and result['upper'] < margin:
            word = 'less than ' + f'{margin:.3f}'.strip('0')
        elif word != 'open' and p >= 0.05:
            word = f'({word})'
        words.append(word)
    return words


def test_the_table_has_these_verdicts_and_figures():
    lines = [line for line in (RESULTS / 'claims.md').read_text().splitlines() if '[' in line]
    cells = [[cell.strip() for cell in line.split(' | ')] for line in lines[: len(ROWS)]]
    by_measure = {name: verdicts(name) for name in ('measure', 'final', 'area', 'at_rollouts')}
    for number, (row, shown) in enumerate(zip(ROWS, cells, strict=True)):
        assert shown[2] == by_measure['measure'][number], row['claim']
        texts = {row['measure']: shown[3]} | dict(
            zip(('final', 'area', 'at_rollouts'), shown[4:7], strict=True)
        )
        for measure, text in texts.items():
            if not text:
                continue
            result = row['measures'][measure]
            figures = [float(figure) for figure in re.findall(r'[+-]\d\.\d+', text)]
            assert figures == pytest.approx([result['difference'], *result['interval']], abs=6e-4)
            assert measure == row['measure'] or text.endswith(by_measure[measure][number])


def test_the_pages_lead_with_these_verdicts():
    endings = {}
    for name in ('measure', 'registered'):
        words = []
        for word, row in zip(verdicts(name), ROWS, strict=True):
            if not row['afterwards']:
                words.append(word)
        assert 'does not hold' not in words
        small = sum(word.startswith('less') for word in words)
        left = len(words) - words.count('holds') - small
        ending = f'{small} make less of a difference than matters, and {left} are open'
        endings[name] = f'{words.count("holds")} hold', f'none is reversed, {ending}'
    later = [word for word, row in zip(verdicts('measure'), ROWS, strict=True) if row['afterwards']]
    assert sorted(later) == ['holds', 'holds', 'open', 'open']
    (start, ending), (registered, other_ending) = endings.values()
    sentence = f'of 33 claims {start} after correction for their number, {ending}; by the measures that were registered'
    assert f'{sentence} {registered}' in PAGE
    assert f'{registered}, {other_ending}' in PAGE
    # They compare from starts that no longer ship: the page says so at once, and README does not lead with them.
    sentences = re.split(r'(?<=\.) ', PAGE)
    assert (
        'deliberate errors, and that no longer ship' in sentences[1] and 'b4077a4a' in sentences[1]
    )
    assert 'claims hold' not in (ROOT / 'README.md').read_text()


def mean(arm, point, column=CORRECT, seeds=24):
    return np.mean([np.mean(CURVES[arm, seed][point][column]) for seed in range(seeds)])


def share(value):
    return f'{value:.2f}'.lstrip('0')


def interval_of(values):
    """(mean, low, high) of differences, from the larger of the standard errors."""
    half = max(error * stats.t.isf(0.025, count) for error, count in standard_errors(values))
    return [values.mean(), values.mean() - half, values.mean() + half]


def test_the_page_has_these_means_and_intervals():
    for title, arm in {
        'Dr. Zero': 'drzero',
        'SSP': 'ssp',
        'π-Play': 'piplay',
        'DSPO': 'dspo',
    }.items():
        assert f'| {title} | {share(mean(arm, 0))} → {share(mean(arm, -1))} |' in PAGE
    rubrics = f'rubrics {share(mean("scope", 0, RUBRICS))} → {share(mean("scope", -1, RUBRICS))}'
    assert f'{rubrics}, questions {share(mean("scope", 0))} → {share(mean("scope", -1))}' in PAGE
    intervals = [interval_of(table_of('dspo grpo', 'drzero', 'final', CORRECT, 16))]
    for row in ROWS:
        for result in row['measures'].values():
            intervals.append([result['difference'], *result['interval']])
    pattern = r'[−+]?(\.\d{3}) \[[−+]?(\.\d{3}), [−+]?(\.\d{3})\]'
    shown = [sorted(map(float, figures)) for figures in re.findall(pattern, PAGE)]
    assert len(shown) == 3
    computed = np.sort(np.abs(intervals))
    assert all(np.any(np.all(np.abs(computed - figures) < 6e-4, axis=1)) for figures in shown)
