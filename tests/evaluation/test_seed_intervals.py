"""Several runs per side: the interval over runs, checked against scipy, and the command that prints it."""

import csv
import json

import numpy as np
import pytest
from results import result
from scipy import stats

from zeroplay_jax import compare
from zeroplay_jax.evaluation import results, statistics

OTHER = [0.42, 0.39, 0.47]


def test_a_single_result_counts_as_exact():
    interval = stats.ttest_1samp(OTHER, 0.3).confidence_interval(0.95)
    expected = (np.mean(OTHER) - 0.3, interval.low - 0.3, interval.high - 0.3)
    np.testing.assert_allclose(statistics.difference([0.3], OTHER), expected, rtol=1e-12)
    mean, low, high = statistics.difference(OTHER, [0.3])
    np.testing.assert_allclose((-mean, -high, -low), expected, rtol=1e-12)
    # Equal runs have no spread.
    assert statistics.difference([0.5, 0.5], [0.75, 0.75]) == (0.25, 0.25, 0.25)


@pytest.fixture
def write(tmp_path):
    def write(name, scores, **settings):
        path = tmp_path / f'{name}.json'
        path.write_text(json.dumps(result(scores, **settings).to_json()))
        return str(path)

    return write


def of_twenty(correct):
    return [1.0] * correct + [0.0] * (20 - correct)


def test_the_command_says_what_its_interval_covers(write, capsys):
    base = [write(f'base{seed}', of_twenty(n)) for seed, n in enumerate((6, 8, 7))]
    other = [write(f'other{seed}', of_twenty(n)) for seed, n in enumerate((9, 12, 10))]

    def said(*sides):
        assert compare.main([','.join(side) for side in sides]) == 0
        return ''.join(capsys.readouterr())

    out = said(base[:1], other[:1])
    assert '+0.150' in out and 'the choice of questions (Newcombe, paired), not the seed' in out
    out = said(base, other)
    _, low, high = statistics.difference([0.3, 0.4, 0.35], [0.45, 0.6, 0.5])
    assert '0.517 ± ' in out and f'+0.167 [{low:+.3f}, {high:+.3f}]' in out
    assert 'the runs on these questions (Welch' in out


def test_two_results_of_one_run_are_not_two_runs(write, capsys):
    base = write('base', of_twenty(5))
    runs = [
        write(f'run{seed}', of_twenty(6 + seed), run=run)
        for seed, run in enumerate(('1a', '2b', '1a'))
    ]
    assert compare.main([base, ','.join(runs[:2])]) == 0
    assert compare.main([base, ','.join(runs)]) == 2
    assert f'{runs[0]} and {runs[-1]} are of the same run' in capsys.readouterr().err


def test_results_of_questions_with_documents_are_clustered(tmp_path, capsys):
    """Twelve questions of a document have one score: the interval is as wide as that of a question per document."""
    right = np.repeat(np.arange(40) % 2, 12).astype(float)
    names = [f'd{number // 12}' for number in range(480)]
    paths = [tmp_path / 'before.json', tmp_path / 'after.json']
    for path, scores in zip(paths, (np.zeros(480), right), strict=True):
        result(scores.tolist(), names).write(path)
    before, after = map(results.Results.read, paths)
    cell = after.figures()['set']
    (change,) = results.compare(before, after).values()
    width = 2 * 1.96 * np.sqrt(0.25 / 40)
    for low, high in (cell.ends, change[1:]):
        assert abs((high - low) / width - 1) < 0.1
    assert compare.main(list(map(str, paths))) == 0
    assert 'the choice of documents (bootstrap, paired), not the seed' in capsys.readouterr().out
    # The fingerprint is of questions and answers only.
    assert after.sets['set'].questions == result(right.tolist()).sets['set'].questions


def test_iterations_are_rows_with_their_differences_from_the_first(write, capsys):
    sets = {'a': [0.0, 1.0] * 10, 'b': [0.0] * 20}
    base = write('base', sets)
    first = write('first', {'a': [1.0] * 20, 'b': [0.0] * 20})
    last = write('last', {'a': [1.0] * 20, 'b': [1.0] * 20, 'only here': [1.0]})
    assert compare.main([base, first, last, '--format=csv']) == 0
    header, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert header[1::4] == ['a', 'b', 'average']
    means = {row[0]: [float(cell) for cell in row[1::4]] for row in rows}
    assert list(means) == ['base', 'first', 'last', 'first - base', 'last - base']
    assert means['base'] == [0.5, 0.0, 0.25] and means['last'] == [1.0, 1.0, 1.0]
    assert means['first - base'] == [0.5, 0.0, 0.25]
