"""A recipe that answers by two rollouts is asked as it answers; all of them are shown."""

import asyncio
import json

import pytest
from ask_cases import BASE, main

from zeroplay_jax.recipes import drzero


async def twice(self, context, question, identity):
    (draft,) = await context.ask('solver', (*identity, 0), question=question.text)
    text = f'{question.text} Is it {draft.turns[-1].text[8:-9]}?'
    (answer,) = await context.ask('solver', (*identity, 1), question=text)
    return answer


@pytest.fixture(autouse=True)
def answers_twice(monkeypatch):
    monkeypatch.setattr(drzero.Recipe, 'answer', twice, raising=False)


TURNS = ['<answer>Lomi</answer>', '<answer>Tarva</answer>']


def test_the_second_rollout_is_the_answer(ask_scripted):
    record = json.loads(ask_scripted(TURNS, '--json'))
    assert record['answer'] == 'Tarva'
    assert 'Fretes? Is it Lomi?' in record['segments'][0]['text']


def test_a_question_that_grows_too_long_is_refused_in_one_line(monkeypatch, capsys):
    async def grows(self, context, question, identity):
        return await context.ask('solver', identity, question='long ' * 400)

    monkeypatch.setattr(drzero.Recipe, 'answer', grows)
    assert main([f'--policy={BASE}', 'q']) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert 'cannot be asked: prompt_too_long' in line


async def together(self, context, question, identity):
    asks = [context.ask('solver', (*identity, n), question=question.text) for n in range(2)]
    (_, (answer,)) = await asyncio.gather(*asks)
    return answer


async def goes_on(self, context, question, identity):
    (first,) = await context.ask('solver', (*identity, 0), question=question.text)
    more = await context.go_on('solver', (*identity, 1), first, note='Go on.')
    (answer,) = await context.fork('solver', (*identity, 2), more, note='Once more.')
    return answer


@pytest.mark.parametrize(
    'answer, turns', [(together, ['one', 'two']), (goes_on, ['one', 'two', 'three'])]
)
def test_all_turns_of_several_rollouts_are_shown(ask_scripted, monkeypatch, answer, turns):
    monkeypatch.setattr(drzero.Recipe, 'answer', answer)
    # The end of the turn ends the text, without a tag.
    lines = [line.strip() for line in ask_scripted(turns).splitlines()]
    assert sorted(line for line in lines if line in turns) == sorted(turns)
