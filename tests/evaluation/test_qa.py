"""Evaluation on question sets: what is read, what is reported, and which results may be compared."""

import json
import re

import pytest
from python_process import ROOT, config_flags, run_python
from results import result

from zeroplay_jax import compare
from zeroplay_jax.data import files
from zeroplay_jax.evaluation import results
from zeroplay_jax.mini.world import World, evaluation_questions
from zeroplay_jax.types import UserError

inputs = pytest.importorskip('zeroplay_jax.extras.inputs.__main__')

DATA = ROOT.parent / 'shared' / 'data'
SMALL = config_flags('world.train=(0,4) world.evaluation=(0,2) eval.questions=2')


def test_a_limit_draws_the_same_questions_every_time(tmp_path):
    path = tmp_path / 's.jsonl'
    path.write_text('\n'.join(json.dumps({'question': f'q{i}', 'answer': 'a'}) for i in range(50)))
    drawn = [files.load_set(str(path), 10, seed=seed) for seed in (1, 1, 2)]
    assert len(drawn[0]) == 10 and drawn[0] == drawn[1] != drawn[2]
    assert len(files.load_set(str(path), 99)) == 50


@pytest.mark.skipif(not DATA.is_dir(), reason=f'{DATA} is not there')
@pytest.mark.parametrize('name', files.PUBLIC)
def test_the_seven_sets_of_the_papers_are_read(name):
    found = files.load_set(str(DATA / f'{name}.jsonl'))
    assert len(found) > 50 and all(question.text and question.answers for question in found)


@pytest.mark.parametrize('setting', sorted(results.SETTINGS.keys() - results.OF_AGENT))
def test_results_under_other_conditions_are_not_compared(setting):
    line = f'they differ in {setting}: .same. and .other.; evaluate both with the same '
    with pytest.raises(UserError, match=line + re.escape(results.SETTINGS[setting])):
        results.compare(result([1.0]), result([1.0], **{setting: 'other'}))


def test_other_agents_are_compared_and_what_differs_is_said(tmp_path, capsys):
    files = [tmp_path / 'five.json', tmp_path / 'eleven.json']
    for path, turns in zip(files, (5, 11)):
        settings = {'tokens': [turns, 256, 512], 'context': 100 * turns}
        path.write_text(json.dumps(result([1.0, 0.0], **settings).to_json()))
    assert compare.main([str(path) for path in files]) == 0
    captured = capsys.readouterr()
    assert 'difference' in captured.out
    assert captured.err == (
        'note: eleven: not the policy alone differs, but tokens: [5, 256, 512] and [11, 256, 512]; '
        'context: 500 and 1100 (--config.rollout.max_turns, turn_tokens, observation_tokens and response_tokens and '
        '--config.sampler.context)\n'
    )
    both = result([1.0], tokens='other', metric='other')
    with pytest.raises(UserError, match='tokens: .* evaluate both with the same --metric and --co'):
        results.compare(result([1.0]), both)


def evaluate(*arguments):
    words = ['-m', 'zeroplay_jax.evaluate', '--config=configs/quickstart.py', *arguments]
    return run_python(*words, PYTHONPATH=str(ROOT / 'tests' / 'outside_package'))


def test_samples_at_a_temperature_have_a_mean_and_its_deviation(tmp_path):
    worlds = [World(i, 'evaluation', 0.25) for i in range(2)]
    lines = [json.dumps(q) for q in evaluation_questions(worlds, 4, (1, 2))]
    for name, part in (('one', lines[:4]), ('two', lines[4:])):
        (tmp_path / f'{name}.jsonl').write_text('\n'.join(part))
    sets = f'--sets={tmp_path}/one.jsonl,{tmp_path}/two.jsonl'
    flags = ('--samples=3', f'--out={tmp_path}/out.json', '--config.solver.top_k=20')
    done = evaluate(*SMALL, sets, *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    *table, last = done.stdout.splitlines()
    headings = [line.split('  ')[0] for line in table]
    assert headings[1:] == ['em, mean', 'em, best', 'em, vote', 'questions', 'searches', 'repeated']
    assert table[0].split() == ['one', 'two', 'average'] and ' ± ' in table[1]
    figures = json.loads(last)['one']
    written = json.loads((tmp_path / 'out.json').read_text())
    samples = [record['samples'] for record in written['sets']['one']['answered']]
    assert written['settings']['temperature'] == 1.0, 'that of the role'
    assert written['settings']['truncation'] == [1.0, 20]
    assert [len(of) for of in samples] == [3] * 4
    assert figures['samples'] == pytest.approx(sum(map(sum, samples)) / 12, abs=1e-4)
    assert figures['score'] == sum(map(max, samples)) / 4 >= figures['samples']
