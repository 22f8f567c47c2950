"""The tables of `evaluate` and `compare`: figures, their four forms, and what stands in the papers' last column."""

import csv
import json
import pathlib
import shutil

import numpy as np
import pytest
from run_records import write_record

from zeroplay_jax import compare
from zeroplay_jax.evaluation import results, statistics, tables
from zeroplay_jax.evaluation.tables import Figure
from zeroplay_jax.types import Question

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


def result(sets, **settings):
    """A result of sets whose questions have these scores; a list of scores is that of several samples."""
    base = dict.fromkeys(results.SETTINGS, 'same') | settings
    of_sets = {}
    for name, scores in sets.items():
        questions = [Question(f'{name} {i}', ('a',)) for i in range(len(scores))]
        answered = []
        for score in scores:
            one = results.Answered(score, 1, 0.0, 'a')
            if isinstance(score, tuple):
                one = results.Answered(max(score), 1, 0.0, 'a', score, score[0])
            answered.append(one)
        of_sets[name] = results.SetResults.of(questions, answered)
    return results.Results(base, of_sets)


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


@pytest.fixture
def write(tmp_path):
    def write(name, sets, **settings):
        path = tmp_path / f'{name}.json'
        path.write_text(json.dumps(result(sets, **settings).to_json()))
        return str(path)

    return write


def test_iterations_are_rows_with_their_differences_from_the_first(write, tmp_path, capsys):
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
    (tmp_path / 'other').mkdir()
    other = shutil.copy(base, tmp_path / 'other')
    assert compare.main([base, str(other), '--format=latex']) == 0
    latex = capsys.readouterr().out
    assert '\nbase & ' in latex and '\nother, base & ' in latex
    assert compare.main([base]) == 0 and 'average' in capsys.readouterr().out


def test_results_of_several_samples_are_compared_by_mean_best_and_vote(write, capsys):
    base = write('base', {'a': [(0.0, 1.0)] * 8}, temperature=1.0)
    other = write('other', {'a': [(1.0, 1.0)] * 8}, temperature=1.0)
    assert compare.main([base, other]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = {line.split('  ')[0]: line for line in lines}
    assert '+0.500 [' in headings['difference, mean'] and '0.500 ± 0.707' in headings['base, mean']
    assert '+0.000 [' in headings['difference, best']
    greedy = write('greedy', {'a': [1.0] * 8})
    assert compare.main([base, greedy]) == 2
    assert "temperature: 1.0 and 'same'" in capsys.readouterr().err


@pytest.fixture
def runs(tmp_path):
    """The workdirs of a run that has ended and of one that has not, as arguments."""
    ended, running = tmp_path / 'ended', tmp_path / 'running'
    write_record(ended, {'seed': 0, 'solver': {'name': r'a_b|\\c', 'steps': 4}})
    write_record(running, {'seed': 0, 'solver': {'name': '', 'steps': [8, 4]}})
    for workdir, score in ((ended, 0.5), (running, 0.25)):
        lines = [{'step': 0, 'iteration': 0, 'phase': 'evaluation', 'em/mean': 0.0}]
        lines.append(lines[0] | {'step': 9, 'em/mean': score, 'f1/nq/mean': 0.75})
        lines.append({'step': 10, 'iteration': 0, 'phase': 'solver'})
        (workdir / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    summary = {'em_after': 0.5, 'ci95': {'after': [0.4, 0.6]}, 'difference': [0.5, 0.3, 0.7]}
    (ended / 'summary.json').write_text(json.dumps(summary))
    return [str(ended), str(running)]


def test_runs_are_rows_with_what_differs_and_their_last_evaluation(runs, capsys):
    assert compare.main([*runs, '--format=csv']) == 0
    captured = capsys.readouterr()
    header, ended, running = csv.reader(captured.out.splitlines())
    assert header[:5] == ['', 'solver.name', 'solver.steps', 'step', 'em/mean']
    assert ended[:7] == ['ended', r'a_b|\\c', '4', '9', '0.5', '0.4', '0.6']
    assert running[:7] == ['running', '', '[8, 4]', '9', '0.25', '', '']
    names = dict(zip(header, zip(ended, running, strict=True), strict=True))
    assert names['f1/nq/mean'] == ('0.75', '0.75') and names['difference'] == ('0.5', '')
    assert 'note: running: There is no summary.json' in captured.err
    # The run that has ended goes on: its summary speaks of an earlier evaluation.
    metrics = pathlib.Path(runs[0], 'metrics.jsonl')
    before = metrics.read_text()
    metrics.write_text(
        before + '\n' + json.dumps({'step': 20, 'phase': 'evaluation', 'em/mean': 0.9})
    )
    assert compare.main([*runs, '--format=csv']) == 0
    assert '0.9' in capsys.readouterr().out.splitlines()[1].split(',')
    metrics.write_text(before)
    forms = {}
    for form in tables.FORMATS:
        assert compare.main([*runs, f'--format={form}']) == 0
        forms[form] = capsys.readouterr().out.splitlines()
    assert forms['text'][1].split()[-3:] == ['+0.500', '[+0.300,', '+0.700]']
    assert r'| a_b\|\\c | 4 |' in forms['markdown'][2]
    assert r'ended & a\_b|\textbackslash{}\textbackslash{}c & 4 & 9 & 0.500' in forms['latex'][3]


def test_what_cannot_be_a_table_of_runs_is_one_line(runs, write, capsys):
    base = write('base', {'a': [1.0]})
    cases = {
        (*runs, base): 'base.json: is no workdir; give workdirs alone, or results alone',
        (*runs, '--protocol=ssp'): '--protocol: is for results of evaluations',
        (runs[0], runs[0]): 'ended is listed twice',
        (str(pathlib.Path(runs[0]).parent),): 'contains none of summary.json, metrics.jsonl',
    }
    for arguments, problem in cases.items():
        assert compare.main(list(arguments)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert problem in line
