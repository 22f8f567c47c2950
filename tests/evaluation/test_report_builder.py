"""Reading, comparing and writing runs."""

import json
import shutil

import pytest
import sample_run

from zeroplay_jax.evaluation import report_builder


def page_data(path):
    """Returns the JSON data inside an HTML report."""
    start = '<script id="data" type="application/json">'
    return json.loads(path.read_text().split(start)[1].split('</script>')[0])


def has_note(run, text):
    return any(text in note for note in run['notes'])


def test_data_cannot_close_its_script_element(run):
    html = report_builder.write_report(run).read_text()
    assert html.count('</script>') == 2  # one of the data, one of the program
    assert '<img' not in html and ':NaN' not in html
    assert "default-src 'none'" in html and 'unsafe-inline' not in html
    assert not list(run.glob('.report*'))


def test_damaged_and_missing_files_give_notes(tmp_path):
    valid = json.dumps({'step': 1, 'phase': 'solver', 'entropy': 1.0})
    (tmp_path / 'metrics.jsonl').write_text(f'{valid}\nrubbish\n[1]\n{valid}\n{{"step": 2, "pha')
    (tmp_path / 'run.json').write_text('{')
    run = report_builder.read_run(tmp_path)
    assert [row['step'] for row in run['metrics']] == [1, 1]
    assert run['summary'] == {} and run['config'] == {}
    for text in (
        '3 damaged lines of metrics.jsonl were ignored (line 2, 3, 5)',
        'no summary.json',
        'no trajectories.jsonl',
        'run.json is damaged',
    ):
        assert has_note(run, text)


@pytest.fixture
def compared(run, tmp_path):
    """Returns the data of the page about the run and another one."""

    def compare(other):
        page = report_builder.write_report(run, other, out=tmp_path / 'both.html')
        return page_data(page)

    return compare


@pytest.mark.parametrize(
    ('questions', 'change', 'note'),
    [
        ('these', lambda results: results['after'].pop('4'), 'the hop counts differ'),
        ('those', lambda results: None, 'the held-out questions differ'),
        ('these', lambda results: results.clear(), 'no results per question'),
    ],
)
def test_runs_that_cannot_be_paired_have_no_difference(compared, tmp_path, questions, change, note):
    other = sample_run.write_run(tmp_path / 'other', count=1, questions=questions)
    summary = json.loads((other / 'summary.json').read_text())
    change(summary['results'])
    (other / 'summary.json').write_text(json.dumps(summary))
    data = compared(other)
    assert data['differences'][1] == {}
    assert has_note(data['runs'][1], note)


DEEP = '[' * 100_000
ODD_CONTENT = {
    '100,000 brackets': DEEP,
    '1,000 levels in a field': '{"step": 1, "x": ' + '[' * 1000 + ']' * 1000 + '}',
    'a list': '[1]',
    'numbers of 400 and 5,000 digits': f'{{"step": {"9" * 400}, "em_after": {"9" * 5000}}}',
    'NaN and 1e999': '{"em_after": NaN, "results": {"after": {"1": [NaN, 1e999]}}}',
    'fields of other types': (
        '{"step": 1, "phase": "solver", "role": "solver", "segments": [{"text": {}}], "info": 5, "turns": [[]], '
        '"results": [1], "em_by_hop": [2], "em_after": "x", "name": 3, "level": 4, "text": null}'
    ),
    'figures of other types': (
        '{"results": {"after": {"1": [[1], 0], "x": 2}, "evaluations": 4}, "em_by_hop": {"after": 3}}'
    ),
    'flags that are texts': '{"results": {"after": {"1": ["a"]}}, "em_by_hop": {"after": {"1": "x"}}}',
    'a key twice': '{"step": 1, "step": 2}',
    'half a character': '{"step": 1, "phase": "\\ud800"}',
    'Latin-1': 'caf\xe9',
}
FILES = ('run.json', 'summary.json', 'metrics.jsonl', 'trajectories.jsonl', 'alarms.jsonl')


@pytest.mark.parametrize('kind', ODD_CONTENT)
def test_odd_content_of_any_file_of_a_run_gives_a_report(run, tmp_path, kind):
    content = ODD_CONTENT[kind]
    for number, name in enumerate(FILES):
        folder = tmp_path / f'run{number}'
        shutil.copytree(run, folder)
        (folder / name).write_bytes(content.encode('latin-1') + b'\n')
        report_builder.write_report(folder)
        report_builder.write_report(run, folder, out=tmp_path / 'both.html')
        notes = page_data(folder / 'report.html')['runs'][0]['notes']
        if content == DEEP:
            assert any(name in note for note in notes)
