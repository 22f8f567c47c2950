"""Evaluation on question sets: what is read, what is reported, and which results may be compared."""

import json
import re

import pytest
from python_process import config_flags, run_python
from results import result

from zeroplay_jax import compare
from zeroplay_jax.data import files
from zeroplay_jax.evaluation import results
from zeroplay_jax.mini.world import World, evaluation_questions
from zeroplay_jax.types import UserError

SMALL = config_flags('world.train=(0,4) world.evaluation=(0,2) eval.questions=2')


@pytest.mark.parametrize('setting', sorted(results.SETTINGS.keys() - results.OF_AGENT))
def test_results_under_other_conditions_are_not_compared(setting):
    line = f'they differ in {setting}: .same. and .other.; evaluate both with the same '
    with pytest.raises(UserError, match=line + re.escape(results.SETTINGS[setting])):
        results.compare(result([1.0]), result([1.0], **{setting: 'other'}))


def test_other_agents_are_compared_and_what_differs_is_said(tmp_path, capsys):
    paths = [tmp_path / 'five.json', tmp_path / 'eleven.json']
    for path, turns in zip(paths, (5, 11)):
        settings = {'tokens': [turns, 256, 512], 'context': 100 * turns}
        path.write_text(json.dumps(result([1.0, 0.0], **settings).to_json()))
    assert compare.main([str(path) for path in paths]) == 0
    captured = capsys.readouterr()
    assert 'difference' in captured.out
    said = 'not the policy alone differs, but tokens: [5, 256, 512] and [11, 256, 512]; context: 500 and 1100'
    assert said in captured.err


def evaluate(folder, *flags):
    """Lines of the table, figures and stderr of a command that answers four questions and five, one of another form."""
    worlds = [World(i, 'evaluation', 0.25) for i in range(2)]
    lines = [json.dumps(question) for question in evaluation_questions(worlds, 4, (1, 2))]
    lines.append('{"question": "Who wrote Faust?", "answer": "Goethe"}')
    for name, part in (('one', lines[:4]), ('two', lines[4:])):
        (folder / f'{name}.jsonl').write_text('\n'.join(part))
    files = (f'--sets={folder}/one.jsonl,{folder}/two.jsonl', f'--out={folder}/out.json')
    words = ('-m', 'zeroplay_jax.evaluate', '--config=configs/quickstart.py', *SMALL)
    done = run_python(*words, *files, *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    *table, last = done.stdout.splitlines()
    return table, json.loads(last), done.stderr


def test_samples_at_a_temperature_have_a_mean_and_its_deviation(tmp_path):
    table, figures, errors = evaluate(tmp_path, '--samples=3', '--config.solver.top_k=20')
    assert 'warning: two: 1 of 5 questions are of another form' in errors
    written = json.loads((tmp_path / 'out.json').read_text())
    headings = [line.split('  ')[0] for line in table]
    assert headings[1:] == ['em, mean', 'em, best', 'em, vote', 'questions', 'searches', 'repeated']
    assert table[0].split() == ['one', 'two', 'average'] and ' ± ' in table[1]
    samples = [record['samples'] for record in written['sets']['one']['answered']]
    assert written['settings']['temperature'] == 1.0, 'that of the role'
    assert written['settings']['truncation'] == [1.0, 20]
    assert [len(of) for of in samples] == [3] * 4
    assert figures['one']['samples'] == pytest.approx(sum(map(sum, samples)) / 12, abs=1e-4)
    assert figures['one']['score'] == sum(map(max, samples)) / 4 >= figures['one']['samples']


def test_every_way_answers_on_the_miniature(tmp_path):
    ways = '--answering=direct,retrieve,interleave,search'
    # The context of the paper is longer than this model knows.
    flags = ('--config.sampler.context=1024', '--policy=zeroplay_jax/mini/base')
    forms = ('--protocol=piplay', '--limit=2', '--format=markdown')
    table, figures, _ = evaluate(tmp_path, *flags, *forms, ways)
    rows = {}
    for line in table:
        name, *cells = [cell.strip() for cell in line.split('|')[1:-1]]
        rows[name] = cells
    assert rows[''] == ['one', 'two', 'total'] and rows['questions'][:2] == ['2', '2']
    searches = [float(rows[f'{way}: searches'][0]) for way in ('direct', 'retrieve', 'search')]
    assert searches[:2] == [0.0, 1.0] and searches[2] >= 1
    total = 100 * (figures['search']['one']['score'] + figures['search']['two']['score'])
    assert rows['search: em'][2].startswith(f'{total:.1f} [')


def test_a_limit_draws_the_same_questions_every_time(tmp_path):
    path = tmp_path / 's.jsonl'
    path.write_text(''.join(f'{{"question": "q{i}", "answer": "a"}}\n' for i in range(50)))
    drawn = [files.load_set(str(path), 10, seed=seed) for seed in (1, 1, 2)]
    assert len(drawn[0]) == 10 and drawn[0] == drawn[1] != drawn[2]
