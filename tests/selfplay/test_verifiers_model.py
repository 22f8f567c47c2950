"""The client through which an environment of verifiers reads the turns of a rollout."""

import asyncio
import signal
import types

import numpy as np
import pytest

vf = pytest.importorskip('verifiers.legacy', reason='pip install zeroplay-jax[verifiers]')

from datasets import Dataset  # noqa: E402

from examples.verifiers_env import recipe, tasks  # noqa: E402
from zeroplay_jax.rollout.call_syntax import syntax_of  # noqa: E402
from zeroplay_jax.rollout.environment import TurnEnd  # noqa: E402
from zeroplay_jax.types import TaskDropped, Trajectory, Turn, UserError  # noqa: E402

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Rapon"}}\n</tool_call>'


class Solver:
    """A context whose solver says the texts of a script, and that notes how it was asked."""

    def __init__(self, environment, *script):
        self.script = list(script)
        self.asked = []
        syntax = syntax_of('qwen')
        tools = {each.name: recipe.DescribedTool(each) for each in environment.tool_defs or ()}
        env = types.SimpleNamespace(
            syntax=syntax,
            tools=tools,
            call_stops=syntax.stop_strings(tools),
            end_turn=lambda text: TurnEnd(syntax.parse(text, tools)),
        )
        self.roles = {'solver': types.SimpleNamespace(env=env)}

    async def ask(self, role, identity, after=None, **options):
        self.asked.append((identity, after, options))
        text = self.script.pop(0)
        if isinstance(text, Exception):
            raise text
        before = after.turns if after else ()
        empty = np.zeros(0)
        turns = (*before, Turn(text))
        return [Trajectory(empty, empty, empty, turns, 'eos', 'solver', 0, (*identity, 0))]


def play(environment, *script):
    solver = Solver(environment, *script)
    model = recipe.Model(solver, (7,))
    row = environment.get_dataset()[0]
    state = asyncio.run(environment.rollout(dict(row), model, 'solver'))
    return state, model, solver.asked


def test_a_reply_of_the_environment_is_the_result_of_a_call():
    state, model, asked = play(tasks.people(), CALL, 'He was born in Demas.')
    (_, _, first), (identity, after, options) = asked
    assert first['message'] == 'Question: What is the birthplace of Rapon?' and not first['system']
    assert identity == (7, 1) and options == {}
    call = after.turns[-1].call
    assert call.tool == 'search' and call.arguments == {'query': 'Rapon'} and call.error is None
    assert call.text == 'Doc 1(Title: Rapon) Rapon was born in Demas.'
    assert [message.role for message in state['completion']] == ['assistant', 'tool', 'assistant']
    assert len(model.rollout.turns) == 2


@pytest.mark.parametrize(
    ('text', 'error', 'said'),
    [
        ('<tool_call>search(Rapon)</tool_call>', 'malformed', 'Expecting value'),
        ('<tool_call>{"name": "find", "arguments": {}}</tool_call>', 'unknown_tool', 'find'),
        (CALL.replace('query', 'text'), 'invalid_arguments', 'unexpected keyword'),
    ],
)
def test_the_environment_also_answers_calls_that_are_refused(text, error, said):
    _, _, asked = play(tasks.people(), text, 'I do not know.')
    call = asked[1][1].turns[-1].call
    assert call.error == error and call.arguments is None and said in call.text


def test_a_message_of_the_environment_is_a_note():
    state, model, asked = play(tasks.letters(), 'A tree.', 'A stone.', 'A hut.')
    notes = [options.get('note') for _, _, options in asked]
    assert notes[1:] == [f'Now a text about it without the letter {letter}.' for letter in 'ao']
    assert len(model.rollout.turns) == 3 and state['shares'] == [0.5, 0.5, 1.0]


def test_a_full_slot_ends_the_rollout_and_a_long_prompt_drops_the_task():
    state, model, _ = play(tasks.letters(), 'A tree.', TaskDropped('prompt_too_long'))
    assert state['is_truncated'] and len(model.rollout.turns) == 1
    with pytest.raises(TaskDropped, match='prompt_too_long'):
        play(tasks.letters(), TaskDropped('prompt_too_long'))


def test_history_that_changes_is_refused():
    class Forgetful(tasks.Letters):
        async def get_prompt_messages(self, state):
            messages = await super().get_prompt_messages(state)
            return messages if not state['trajectory'] else messages[1:]

    row = {'question': 'Write.', 'answer': ''}
    environment = Forgetful(dataset=Dataset.from_list([row]), rubric=vf.Rubric())
    with pytest.raises(UserError, match='leave MultiTurnEnv.get_prompt_messages as it is'):
        play(environment, 'A tree.', 'A stone.')


def test_examples_of_turns_in_a_prompt_are_refused():
    shown = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    environment = vf.SingleTurnEnv(
        dataset=Dataset.from_list([{'question': 'c', 'answer': ''}]), few_shot=shown
    )
    with pytest.raises(UserError, match='begins with messages of user, assistant, user'):
        play(environment, 'd')


@pytest.mark.parametrize(
    ('name', 'arguments', 'problem'),
    [
        ('no_such_environment', '{}', 'Could not import'),
        ('examples.verifiers_env.tasks', '{"kind": "chess"}', "'chess'"),
        ('examples.verifiers_env.tasks', '{kind: words}', 'Expecting property name'),
        ('examples.verifiers_env.tasks', '[]', 'must be a mapping'),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_named(name, arguments, problem):
    with pytest.raises(UserError, match='install it, or correct them') as refused:
        recipe.load(name, arguments)
    assert f'config.environment.name={name}' in str(refused.value) and problem in str(refused.value)


def test_handlers_of_signals_stay_those_of_the_run():
    before = signal.getsignal(signal.SIGTERM)
    recipe.load.cache_clear()
    environment = recipe.load('examples.verifiers_env.tasks', '{"kind": "words"}')
    assert signal.getsignal(signal.SIGTERM) is before
    assert isinstance(environment, vf.SingleTurnEnv)
