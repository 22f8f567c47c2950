"""The command after a run asks what training taught; the text of summary.json."""

import json

import pytest

from zeroplay_jax.run import ending
from zeroplay_jax.run.ending import summary_json


def test_lists_of_numbers_in_the_summary_take_one_line():
    summary = {
        'difference': [0.69, -1e-05, 3],
        'results': {'before': {'1': [1, 0, 1]}},
        'names': ['one, 2', '[3, 4]'],
        'empty': [],
    }
    text = summary_json(summary)
    assert json.loads(text) == summary and text.endswith('}\n')
    assert '"difference": [ 0.69, -1e-05, 3 ]' in text and '"1": [ 1, 0, 1 ]' in text


def rows(step, **rewards):
    return [
        {'phase': 'evaluation', 'step': step, 'reward': reward, 'info': {'question': f'{name}?'}}
        for name, reward in rewards.items()
    ]


@pytest.mark.fault('user-11', 'the command printed after training')
def test_the_question_is_one_that_only_the_trained_policy_answers(tmp_path):
    logged = [
        *rows(0, known=1, lost=1, gained=0, other=0),
        *rows(5, known=0, lost=1, gained=0, other=1),
        *rows(9, known=1, lost=0, gained=1, other=1),
    ]
    logged.insert(4, {'phase': 'solver', 'step': 3, 'reward': 1, 'info': {'question': 'trained?'}})
    (tmp_path / 'trajectories.jsonl').write_text('\n'.join(map(json.dumps, logged)))
    (tmp_path / 'policy' / 'solver').mkdir(parents=True)
    line = ending.advice(tmp_path, 'solver')
    assert line.startswith('ask the trained policy, which answered this one wrong before: ')
    assert line.endswith(f"--policy {tmp_path}/policy/solver 'gained?'")
    worse = ending.advice(tmp_path, 'solver', has_fallen=True)
    assert worse == line.replace(', which answered this one wrong before', '')


@pytest.mark.parametrize(
    ('logged', 'question'),
    [
        ([*rows(0, a=0, b=1), *rows(9, a=0, b=1)], ('b?', False)),
        ([*rows(0, a=0.25, b=0.5), *rows(9, a=0.5, b=0.5)], ('a?', True)),
        (rows(0, a=0, b=0), ('a?', False)),
        ([], ('', False)),
    ],
)
def test_without_a_gain_the_best_answer_is_shown(logged, question):
    assert ending.taught_question(logged) == question
