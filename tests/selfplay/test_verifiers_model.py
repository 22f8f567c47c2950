"""The model that an environment of verifiers asks: a rollout of the solver, which only grows."""

import asyncio
import json
import types

import numpy as np
import pytest

from examples.verifiers_env import recipe
from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.environment import TurnEnd
from zeroplay_jax.types import TaskDropped, Trajectory, Turn, UserError

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Rapon"}}\n</tool_call>'
SEARCH = {
    'name': 'search',
    'parameters': {
        'type': 'object',
        'properties': {'query': {'type': 'string'}},
        'required': ['query'],
    },
}
QUESTION = {'role': 'user', 'content': 'Where was Rapon born?'}


class Solver:
    """A context whose solver says the texts of a script, and that notes how it was asked."""

    def __init__(self, *script):
        self.script = list(script)
        self.asked = []
        syntax = syntax_of('qwen')
        tools = {'search': recipe.DescribedTool(SEARCH)}
        env = types.SimpleNamespace(
            syntax=syntax,
            tools=tools,
            call_stops=syntax.stop_strings(tools),
            read_turn=lambda text: TurnEnd(syntax.parse(text, tools)),
        )
        self.roles = {'solver': types.SimpleNamespace(env=env)}

    async def ask(self, role, identity, **fields):
        return [self.turn(identity, None, fields)]

    async def go_on(self, role, identity, rollout, note):
        return self.turn(identity, rollout, note)

    def turn(self, identity, before, asked):
        self.asked.append((identity, before, asked))
        text = self.script.pop(0)
        if isinstance(text, Exception):
            raise text
        empty = np.zeros(0)
        turns = (*(before.turns if before else ()), Turn(text))
        return Trajectory(empty, empty, empty, turns, 'eos', 'solver', 0, (*identity, 0))


def play(script, *added, opening=(QUESTION,)):
    """(replies, model, requests of the solver) of a harness that adds one message after each turn."""
    solver = Solver(*script)
    model = recipe.Model(solver, (7,))

    async def converse():
        messages, replies = list(opening), []
        for new in (None, *added):
            if new is not None:
                messages += [replies[-1]['message'], new]
            replies.append(await model.complete(messages))
        return replies

    return asyncio.run(converse()), model, solver.asked


def result(text):
    return {'role': 'tool', 'tool_call_id': 'call_0', 'content': text}


def test_a_message_of_the_harness_is_the_result_of_a_call():
    replies, model, asked = play([CALL, 'In Demas.'], result('Rapon was born in Demas.'))
    (_, _, first), (identity, after, note) = asked
    assert first == {'prompt': 'environment', 'system': '', 'message': QUESTION['content']}
    (request,) = replies[0]['message']['tool_calls']
    assert replies[0]['finish_reason'] == 'tool_calls' and request['function']['name'] == 'search'
    assert json.loads(request['function']['arguments']) == {'query': 'Rapon'}
    assert identity == (7, 1) and note == ''
    call = after.turns[-1].call
    assert call.tool == 'search' and call.arguments == {'query': 'Rapon'} and call.error is None
    assert call.text == 'Rapon was born in Demas.'
    last = {'role': 'assistant', 'content': 'In Demas.'}
    assert replies[1] == {'message': last, 'finish_reason': 'stop'}
    assert len(model.rollout.turns) == 2


@pytest.mark.parametrize(
    ('text', 'error'),
    [
        ('<tool_call>search(Rapon)</tool_call>', 'malformed'),
        ('<tool_call>{"name": "find", "arguments": {}}</tool_call>', 'unknown_tool'),
        (CALL.replace('query', 'text'), 'invalid_arguments'),
    ],
)
def test_the_harness_also_answers_calls_that_are_refused(text, error):
    _, _, asked = play([text, 'I do not know.'], result('no such call'))
    call = asked[1][1].turns[-1].call
    assert call.error == error and call.arguments is None and call.text == 'no such call'


def test_a_message_behind_a_turn_without_a_call_is_a_note():
    _, model, asked = play(['A tree.', 'A hut.'], {'role': 'user', 'content': 'Without a t.'})
    assert asked[1][2] == 'Without a t.' and asked[1][1].turns == (Turn('A tree.'),)
    assert len(model.rollout.turns) == 2


def test_a_full_slot_is_told_to_the_harness_and_a_long_prompt_drops_the_task():
    full = TaskDropped('context_full')
    replies, model, _ = play(['A tree.', full], {'role': 'user', 'content': 'And?'})
    assert replies[1] == {'error': 'maximum context length: context_full'}
    assert len(model.rollout.turns) == 1
    with pytest.raises(TaskDropped, match='prompt_too_long'):
        play([TaskDropped('prompt_too_long')])


def test_history_that_changes_is_refused():
    model = recipe.Model(Solver('A tree.', 'A stone.'), (7,))
    asyncio.run(model.complete([QUESTION]))
    summary = {'role': 'user', 'content': 'So far: a tree.'}
    with pytest.raises(UserError, match='choose one that keeps its history'):
        asyncio.run(model.complete([summary]))
