"""A recipe that answers by two rollouts is asked as it answers."""

import json

from zeroplay_jax.recipes import drzero


async def twice(self, context, question, identity):
    (draft,) = await context.ask('solver', (*identity, 0), question=question.text)
    text = f'{question.text} Is it {draft.turns[-1].text[8:-9]}?'
    (answer,) = await context.ask('solver', (*identity, 1), question=text)
    return answer


TURNS = ['<answer>Lomi</answer>', '<answer>Tarva</answer>']


def test_the_second_rollout_is_the_answer(ask_scripted, monkeypatch):
    monkeypatch.setattr(drzero.Recipe, 'answer', twice, raising=False)
    record = json.loads(ask_scripted(TURNS, '--json'))
    assert record['answer'] == 'Tarva'
    assert 'Fretes? Is it Lomi?' in record['segments'][0]['text']
