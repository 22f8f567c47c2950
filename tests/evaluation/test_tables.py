"""The tables of `evaluate` and `compare`: figures, their four forms, and what stands in the papers' last column."""

import csv
import json

import numpy as np
import pytest
from results import result

from zeroplay_jax import compare
from zeroplay_jax.evaluation import results, statistics, tables
from zeroplay_jax.evaluation.tables import Figure

ROWS = [
    ['', 'nq_open', 'average'],
    ['base', Figure(0.25, (0.2, 0.31)), Figure(0.5)],
    ['difference', Figure(0.1, (-0.02, 0.2), 0.0123, '+'), '12'],
]


def test_the_four_forms_hold_the_same_numbers():
    text = tables.write(ROWS)
    assert 'base        0.250 [0.200, 0.310]' in text
    assert '+0.100 ± 0.012 [-0.020, +0.200]  12' in text
    markdown = tables.write(ROWS, 'markdown').splitlines()
    assert markdown[1] == '| --- | --- | --- |' and markdown[2].startswith('| base | 0.250 [0.200')
    latex = tables.write(ROWS, 'latex').splitlines()
    assert latex[0] == r'\begin{tabular}{lrr}' and latex[1] == r' & nq\_open & average \\'
    assert latex[4] == r'difference & +0.100 $\pm$ 0.012 [$-$0.020, +0.200] & 12 \\'
    header, base, difference = csv.reader(tables.write(ROWS, 'csv').splitlines())
    assert header[1:5] == ['nq_open', 'nq_open low', 'nq_open high', 'nq_open deviation']
    assert base[1:] == ['0.25', '0.2', '0.31', '', '0.5', '', '', '']
    assert difference[4:6] == ['0.0123', '12'] and len(difference) == len(header)


def test_the_average_gives_every_set_the_same_weight():
    figures = result({'a': [1.0] * 10, 'b': [0.0] * 30 + [1.0] * 10}).figures()
    assert figures['average'].mean == pytest.approx((1 + 0.25) / 2), 'not 20 of 50 questions'
    ends = statistics.mean_interval({1: [1.0] * 10, 2: [0.0] * 30 + [1.0] * 10})[1:]
    assert figures['average'].ends == ends
    assert list(result({'a': [1.0]}).figures()) == ['a'], 'one set has no average'


def test_several_samples_have_mean_best_and_vote():
    one = result({'a': [(1.0, 0.0), (1.0, 1.0)], 'b': [(0.0, 0.0), (0.0, 1.0)]})
    assert one.kinds() == ['mean', 'best', 'vote']
    mean, best, vote = (one.figures(kind) for kind in one.kinds())
    # Samples 0 and 1 of set a answer 1 and 0.5 of the questions, of set b 0 and 0.5.
    assert mean['a'].mean == 0.75 and mean['a'].deviation == pytest.approx(np.std([1, 0.5], ddof=1))
    assert mean['average'].deviation == pytest.approx(np.std([0.5, 0.5], ddof=1))
    assert (best['a'].mean, best['b'].mean, best['average'].mean) == (1.0, 0.5, 0.75)
    assert (vote['a'].mean, vote['b'].mean) == (1.0, 0.0) and best['a'].deviation is None
    means = one.to_json()['sets']['a']['mean']
    assert (means['samples'], means['vote']) == (0.75, 1.0)
    assert means['deviation'] == pytest.approx(mean['a'].deviation)
    assert result({'a': [1.0]}).kinds() == ['score']
    # A server that did not answer the first question says nothing about the others.
    failed = result({'a': [None, (1.0, 0.0)], 'b': [(0.0, 0.0), (0.0, 1.0)]})
    assert failed.kinds() == one.kinds() and failed.figures('mean')['a'].mean == 0.5
    assert results.compare(failed, one, 'mean')['a'][0] == 0.5 == means['samples'] - 0.25


@pytest.fixture
def write(tmp_path):
    def write(name, sets, **settings):
        path = tmp_path / f'{name}.json'
        path.write_text(json.dumps(result(sets, **settings).to_json()))
        return str(path)

    return write


def test_iterations_are_rows_with_their_differences_from_the_first(write, capsys):
    sets = {'a': [0.0, 1.0] * 10, 'b': [0.0] * 20}
    base = write('base', sets)
    first = write('iteration1', {'a': [1.0] * 20, 'b': [0.0] * 20})
    last = write('iteration2', {'a': [1.0] * 20, 'b': [1.0] * 20, 'only here': [1.0]})
    assert compare.main([base, first, last, '--format=csv']) == 0
    captured = capsys.readouterr()
    header, *rows = csv.reader(captured.out.splitlines())
    assert header[1::4] == ['a', 'b', 'average'] and 'Newcombe' in captured.err
    means = {row[0]: [float(cell) for cell in row[1::4]] for row in rows}
    assert means == {
        'base': [0.5, 0.0, 0.25],
        'iteration1': [1.0, 0.0, 0.5],
        'iteration2': [1.0, 1.0, 1.0],
        'iteration1 - base': [0.5, 0.0, 0.25],
        'iteration2 - base': [0.5, 1.0, 0.75],
    }
