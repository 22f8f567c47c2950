"""The report: what is read, compared and written, and its command."""

import json

import numpy as np
import pytest
import sample_run

from zeroplay_jax import report as command
from zeroplay_jax.evaluation import report, statistics
from zeroplay_jax.types import UserError


def test_data_cannot_close_its_script_element(run):
    page = report.write_report(run).read_text()
    assert page.count('</script>') == 2  # the data's own end and the program's
    assert '<img' not in page and 'NaN' not in page
    assert "default-src 'none'" in page and 'unsafe-inline' not in page
    assert not list(run.glob('.report*'))


def test_texts_are_kept_once_and_whole(tmp_path):
    rows = [sample_run.trajectory(0), sample_run.trajectory(0) | {'step': 2}]
    sample_run.write_lines(tmp_path / 'trajectories.jsonl', rows)
    read = report.read_run(tmp_path)
    assert len(read['texts']) == 4
    for row in read['trajectories']:
        restored = [{'source': source, 'text': read['texts'][i]} for source, i in row['segments']]
        assert restored == rows[0]['segments']


def test_torn_and_missing_files_are_told_not_fatal(tmp_path):
    good = json.dumps({'step': 1, 'phase': 'solver', 'entropy': 1.0})
    (tmp_path / 'metrics.jsonl').write_text(f'{good}\n{{"step": 2, "pha')
    (tmp_path / 'config.json').write_text('{')
    read = report.read_run(tmp_path)
    assert (
        [row['step'] for row in read['metrics']] == [1]
        and read['summary'] == {}
        and read['config'] == {}
    )
    for sentence in (
        'last line of metrics.jsonl (line 2)',
        'no summary.json',
        'no trajectories.jsonl',
        'config.json is damaged',
    ):
        assert any(sentence in note for note in read['notes'])
    (tmp_path / 'metrics.jsonl').write_text(f'{good}\nrubbish\n[1]\n{good}\n')
    assert any(
        '2 damaged lines of metrics.jsonl were left out (line 2, 3)' in x
        for x in report.read_run(tmp_path)['notes']
    )


def test_a_trajectory_whose_segments_are_none_is_damaged(tmp_path):
    rows = [sample_run.trajectory(0) | {'segments': segments} for segments in (['a'], [{}, 1], [])]
    sample_run.write_lines(tmp_path / 'trajectories.jsonl', rows)
    read = report.read_run(tmp_path)
    assert [row['segments'] for row in read['trajectories']] == [[]]
    assert any(
        '2 damaged lines of trajectories.jsonl were left out (line 1, 2)' in note
        for note in read['notes']
    )


def test_a_failed_write_leaves_the_old_page(run, monkeypatch):
    before = report.write_report(run).read_bytes()

    def full_disk(*_):
        raise OSError('no space left')

    monkeypatch.setattr(report.os, 'replace', full_disk)
    with pytest.raises(OSError, match='no space'):
        report.write_report(run)
    assert (run / 'report.html').read_bytes() == before and not list(run.glob('.report*'))


def _data(page):
    return json.loads(
        page.read_text()
        .split('<script id="data" type="application/json">')[1]
        .split('</script>')[0]
    )


def test_differences_between_runs_are_paired_by_question(run, other, tmp_path):
    (_, against) = _data(report.write_report(run, other, out=tmp_path / 'both.html'))['against']
    flags = np.array(sample_run.AFTER), np.array(sample_run.BETTER)
    assert against['4'] == list(statistics.paired_difference(*flags))
    # the headline leaves four hops out
    assert against['mean'] == list(
        statistics.paired_difference(*({h: f for h in (1, 2, 3)} for f in flags))
    )


def test_other_questions_give_no_interval(run, tmp_path):
    strange = sample_run.write_run(
        tmp_path / 'strange', count=1, after=sample_run.BETTER, questions='those'
    )
    data = _data(report.write_report(run, strange, out=tmp_path / 'both.html'))
    assert data['against'][1]['mean'] == pytest.approx([0.05])
    assert any('the held-out questions are others' in note for note in data['runs'][1]['notes'])
    summary = json.loads((strange / 'summary.json').read_text())
    for results in (None, [1], {'after': {'one': [1]}}):
        (strange / 'summary.json').write_text(json.dumps(summary | {'results': results}))
        data = _data(report.write_report(run, strange, out=tmp_path / 'both.html'))
        assert data['against'][1]['4'] == pytest.approx([0.05])
        assert any('result of every question' in note for note in data['runs'][1]['notes'])


def test_runs_of_one_name_are_told_apart(run, tmp_path):
    (tmp_path / 'later').mkdir()
    again = sample_run.write_run(tmp_path / 'later' / 'one', count=1)
    names = [
        one['name']
        for one in _data(report.write_report(run, again, out=tmp_path / 'both.html'))['runs']
    ]
    assert names == [f'{run.parent.name}/one', 'later/one']


# ----------------------------------------------------------------------------- command


def test_the_command_writes_where_it_says(run, other, tmp_path, capsys):
    assert command.main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / 'report.html')
    assert command.main([str(run), str(other), '--out', str(tmp_path / 'both.html')]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / 'both.html')
    assert [one['name'] for one in _data(tmp_path / 'both.html')['runs']] == ['one', 'two']


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        (['{empty}'], 'none of summary.json, metrics.jsonl, trajectories.jsonl is there'),
        (['{empty}/nowhere'], 'there is no such folder; give the workdir of a run'),
        (['{run}', '{run}/../one'], 'is named twice'),
        (['{run}', '--out', '{empty}'], 'is a folder; name the file to write'),
        (['{run}', '--out', '{empty}/no/page.html'], 'make it first'),
        ([], 'the following arguments are required: WORKDIR; python -m zeroplay_jax.report --help'),
        (['{run}', '{run}', '--picture', '{empty}/curve.svg'], 'give one WORKDIR and no --out'),
        (
            ['{run}', '--picture', '{empty}/curve.svg', '--out', '{empty}/page.html'],
            'give one WORKDIR and no --out',
        ),
    ],
)
def test_mistakes_are_one_line_and_code_2(run, tmp_path, capsys, arguments, said):
    assert command.main([text.format(run=run, empty=tmp_path) for text in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('zeroplay_jax.report: ') and said in line
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match='metrics.jsonl'):
        report.write_report(tmp_path)
