"""The command after a run asks what training taught; the text of summary.json."""

import pytest

from zeroplay_jax.run import ending


def rows(step, **rewards):
    return [
        {'phase': 'evaluation', 'step': step, 'reward': reward, 'info': {'question': f'{name}?'}}
        for name, reward in rewards.items()
    ]


@pytest.mark.fault('user-11', 'the command printed after training')
@pytest.mark.parametrize(
    ('logged', 'question'),
    [
        # One that only the trained policy answers, at the end of the run; else the best answer.
        ([*rows(0, a=1, b=0, c=0), *rows(5, c=1), *rows(9, a=1, b=1, c=0)], ('b?', True)),
        ([*rows(0, a=0, b=1), *rows(9, a=0, b=1)], ('b?', False)),
        ([], ('', False)),
    ],
)
def test_the_question_to_ask_after_training(logged, question):
    assert ending.taught_question(logged) == question
