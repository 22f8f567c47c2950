"""A recipe that answers by two rollouts is asked as it answers; all of them are shown."""

import asyncio
import json

import pytest
from ask_cases import CLEAN, main

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


def test_both_rollouts_are_shown_and_the_second_is_the_answer(ask_scripted):
    shown = ask_scripted(TURNS)
    assert shown.index('Lomi') < shown.index('Tarva')
    record = json.loads(ask_scripted(TURNS, '--json'))
    assert record['answer'] == 'Tarva'
    assert 'Fretes? Is it Lomi?' in record['segments'][0]['text']


def test_a_question_that_grows_too_long_is_refused_in_one_line(monkeypatch, capsys):
    async def grows(self, context, question, identity):
        return await context.ask('solver', identity, question='long ' * 400)

    monkeypatch.setattr(drzero.Recipe, 'answer', grows)
    assert main([f'--policy={CLEAN}', 'q']) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert 'cannot be asked: prompt_too_long' in line


def test_rollouts_that_are_asked_together_are_shown_one_after_the_other(ask_scripted, monkeypatch):
    async def together(self, context, question, identity):
        asks = [context.ask('solver', (*identity, n), question=question.text) for n in range(2)]
        (_, (answer,)) = await asyncio.gather(*asks)
        return answer

    monkeypatch.setattr(drzero.Recipe, 'answer', together)
    # The end of the turn ends the text, without a tag.
    lines = [line.strip() for line in ask_scripted(['one', 'two']).splitlines()]
    assert 'one' in lines and 'two' in lines


def test_turns_of_a_rollout_that_goes_on_or_is_forked_are_shown(ask_scripted, monkeypatch):
    async def goes_on(self, context, question, identity):
        (first,) = await context.ask('solver', (*identity, 0), question=question.text)
        more = await context.go_on('solver', (*identity, 1), first, note='Go on.')
        (answer,) = await context.fork('solver', (*identity, 2), more, note='Once more.')
        return answer

    monkeypatch.setattr(drzero.Recipe, 'answer', goes_on)
    lines = [line.strip() for line in ask_scripted(['one', 'two', 'three']).splitlines()]
    assert [line for line in lines if line in ('one', 'two', 'three')] == ['one', 'two', 'three']
