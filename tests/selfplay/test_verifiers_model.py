"""The model that an environment of verifiers asks: a rollout of the solver, which only grows."""

import asyncio
import json
import types

from trajectories import make_trajectory

from examples.verifiers_env import recipe
from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.rollout.environment import Environment, Limits
from zeroplay_jax.tools.base import string_parameter
from zeroplay_jax.types import TaskDropped, Turn

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Rapon"}}\n</tool_call>'
SEARCH = {'name': 'search', 'parameters': string_parameter('query', 'any text')}
QUESTION = {'role': 'user', 'content': 'Where was Rapon born?'}


class Solver:
    """A context whose solver says the texts of a script, and that notes how it was asked."""

    def __init__(self, *script):
        self.script, self.asked = list(script), []
        tools = {'search': recipe.DescribedTool(SEARCH)}
        env = Environment(None, syntax_of('qwen'), Limits(4, 64, 64), tools)
        self.roles = {'solver': types.SimpleNamespace(env=env)}

    async def ask(self, role, identity, **fields):
        return [await self.go_on(role, identity, make_trajectory(), fields)]

    async def go_on(self, role, identity, rollout, note):
        self.asked.append((identity, rollout, note))
        text = self.script.pop(0)
        if isinstance(text, Exception):
            raise text
        return make_trajectory(*rollout.turns, Turn(text), identity=(*identity, 0))


def play(script, *added):
    """(replies, model, requests of the solver) of a harness that adds one message after each turn."""
    solver = Solver(*script)
    model = recipe.Model(solver, (7,))

    async def converse():
        messages = [QUESTION]
        replies = [await model.complete(messages)]
        for new in added:
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
    assert request['function']['name'] == 'search'
    assert json.loads(request['function']['arguments']) == {'query': 'Rapon'}
    assert identity == (7, 1) and note == ''
    call = after.turns[-1].call
    assert (call.tool, call.arguments, call.error) == ('search', {'query': 'Rapon'}, None)
    assert call.text == 'Rapon was born in Demas.'
    last = {'role': 'assistant', 'content': 'In Demas.'}
    assert replies[1] == {'message': last, 'finish_reason': 'stop'}
    assert len(model.rollout.turns) == 2


def test_a_message_behind_a_turn_without_a_call_is_a_note_and_a_full_slot_an_error():
    note = {'role': 'user', 'content': 'Without a t.'}
    replies, model, asked = play(['A tree.', TaskDropped('context_full')], note)
    assert asked[1][2] == 'Without a t.' and asked[1][1].turns == (Turn('A tree.'),)
    assert replies[1] == {'error': 'maximum context length: context_full'}
    assert len(model.rollout.turns) == 1
