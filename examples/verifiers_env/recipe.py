"""An environment of the library verifiers that plays by itself, with a solver as its model.

The environment runs its own loop (its turns, tools, stops and rubric); `Model` is its client. Where another one would
send messages to a server, this one goes on with the rollout, whose ids are never made again.
"""

import asyncio
import dataclasses
import functools
import json
import signal

import verifiers.legacy as vf
from verifiers.legacy.clients import Client
from verifiers.legacy.types import Response, ResponseMessage
from verifiers.legacy.types import ToolCall as ToolRequest

from zeroplay_jax.recipes.datasets import EpochDataset, dataset_tasks
from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.selfplay.answers import group_of
from zeroplay_jax.selfplay.recipe import Recipe as RecipeBase
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.settings.kinds import Section, fail
from zeroplay_jax.tools.base import FailureLog, Tool
from zeroplay_jax.types import Outcome, Question, Row, RowInfo, TaskDropped, UserError


class Settings(Section):
    """Which environment."""

    name: str = ''
    """Its package or module, with a function load_environment."""
    arguments: str = '{}'
    """Arguments of that function, a JSON object."""


class Recipe(RecipeBase):
    """A solver in an environment."""

    settings = {'environment': Settings}
    prompts = {
        'environment': {
            'mini': Prompt('{message}', '{system}'),
            'full': Prompt('{message}', '{system}{tools}'),
        }
    }
    has_pool = False
    filterable_roles = ('solver',)
    evaluated_role = 'reader'

    def __init__(self, config, library):
        super().__init__(config, library)
        self.environment = load(**config.environment)
        self.rows = self.environment.get_dataset()
        numbers = [{'row': number} for number in range(len(self.rows))]
        self.dataset = EpochDataset(numbers, config.seed)
        self.failures = FailureLog(f'environment {config.environment.name}')

    @classmethod
    def roles(cls, config):
        """Returns the solver, whose turns end with an end token or a call, and its weights in evaluations."""
        reader = RoleSpec('reader', 'solver', weights_from='solver', tools=())
        return (RoleSpec('solver', 'environment', terminal_tags=()), reader)

    @classmethod
    def check(cls, config):
        """Refuses turns that the environment would not count."""
        turns = config.rollout.max_turns
        if turns != 1:
            fail('rollout.max_turns', turns, 'the environment counts the turns', 'give 1')

    def phases(self):
        """Returns one phase of solver steps per iteration."""
        iterations = range(self.config.schedule.iterations)
        return [Phase('solver', self.config.solver.steps, ('solver',), i) for i in iterations]

    def tasks(self, step, pool, cursor):
        """Returns tasks on the next rows of the dataset."""
        return dataset_tasks(self.config, self.dataset, step, cursor)

    async def episode(self, context, step, task):
        """Has the environment play one row several times, and returns the rollouts with the rewards of its rubric."""
        row = self.rows[task.payload['row']]
        samples = range(self.config.solver.samples)
        models = [Model(context, (*task.identity, number)) for number in samples]
        states = await asyncio.gather(*[self.play(row, model) for model in models])
        if any(model.rollout is None for model in models):
            raise TaskDropped('environment_failed')
        scored = [state for state in states if state is not None]
        if scored:
            await self.environment.rubric.score_group(scored)
        for state in scored:
            await self.environment.rubric.cleanup(state)
        rows = []
        for state, model in zip(states, models, strict=True):
            answers = (str(row['answer']),) if row.get('answer') else ()
            info = RowInfo(question=Question(model.question, answers, hops=0))
            row_of = functools.partial(Row, 'solver', model.rollout, group=group_of(task.identity))
            if state is None:
                rows.append(row_of(reward=0.0, drop='environment_failed', info=info))
            else:
                rows.append(row_of(reward=state['reward'], parts=state['metrics'], info=info))
        return Outcome(rows)

    async def play(self, row, model):
        """Returns the state in which a rollout of the environment ends; None: the environment failed."""
        try:
            state = await self.environment.rollout(dict(row), model, 'solver')
            error = state['error']
        except (TaskDropped, UserError):
            raise
        except Exception as raised:
            error = raised
        if error is None:
            return state
        self.failures.add(repr(error))
        return None


class Model:
    """The client of one rollout of an environment: its turns are those of one rollout of the solver.

    Attributes:
      rollout: the solver's rollout so far; None before its first turn.
      question: the last message before its first turn.
      said: (role, text) of all messages of prompt and turns.
    """

    def __init__(self, context, identity):
        self.context = context
        self.identity = identity
        self.rollout = None
        self.question = ''
        self.said = []

    async def get_response(self, prompt, *_, **__):
        """Returns the next turn of the solver as a message, of which the environment reads text and call."""
        messages = [(message.role, text_of(message)) for message in prompt]
        env = self.context.roles['solver'].env
        if self.rollout is None:
            ask = opening(messages, bool(env.tools))
            self.question = ask['message']
        else:
            ask = self.reply(messages, env)
        turns = len(self.rollout.turns) if self.rollout else 0
        try:
            (self.rollout,) = await self.context.ask('solver', (*self.identity, turns), **ask)
        except TaskDropped as full:
            if self.rollout is None:
                raise
            raise vf.OverlongPromptError(full.reason) from None
        turn = self.rollout.turns[-1]
        self.said = [*messages, ('assistant', turn.text)]
        requests = None
        if ends_with_call(turn, env):
            name, arguments, error = env.syntax.read_call(turn.text, env.tools)
            # The environment answers what cannot be read as well.
            body = turn.text if error == 'malformed' else json.dumps(arguments)
            requests = [ToolRequest(id=f'call_{turns}', name=name, arguments=body)]
        message = ResponseMessage(
            content=turn.text,
            tool_calls=requests,
            finish_reason='tool_calls' if requests else 'stop' if turn.closed else 'length',
            is_truncated=not turn.closed,
        )
        return Response(id=str(turns), created=0, model='solver', message=message)

    def reply(self, messages, env):
        """Returns the arguments with which the rollout goes on: what the environment has added, as result or note."""
        known = len(self.said)
        text = '\n'.join(text for _, text in messages[known:])
        if messages[:known] != self.said or not text:
            raise UserError(
                'the environment changed or did not answer what was said before; a rollout goes on only with a '
                'message behind it, so leave MultiTurnEnv.get_prompt_messages as it is'
            )
        turn = self.rollout.turns[-1]
        if not ends_with_call(turn, env):
            return {'after': self.rollout, 'note': text}
        call = dataclasses.replace(env.end_turn(turn.text).call, text=text)
        turns = (*self.rollout.turns[:-1], dataclasses.replace(turn, call=call))
        return {'after': dataclasses.replace(self.rollout, turns=turns)}


# An environment asks whether it got a client.
Client.register(Model)


def ends_with_call(turn, env):
    """Returns whether a turn asks for a tool."""
    return turn.closed and turn.text.endswith(env.call_stops)


def opening(messages, has_tools):
    """Returns the arguments of the first request: the prompt's fields."""
    roles = [role for role, _ in messages]
    if roles not in (['user'], ['text'], ['system', 'user']):
        raise UserError(
            f'the environment begins with messages of {", ".join(roles)}; give one of the user, behind one of the '
            'system or none'
        )
    system = messages[0][1] if len(messages) == 2 else ''
    if system and has_tools:
        system += '\n\n'
    return {'prompt': 'environment', 'system': system, 'message': messages[-1][1]}


def text_of(message):
    """Returns the text of a message."""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content or ():
        if part['type'] != 'text':
            raise UserError(f'the environment wrote {part["type"]}; only text can be read')
        texts.append(part['text'])
    return '\n'.join(texts)


# ---- loading ---------------------------------------------------------------------------------------


@functools.cache
def load(name, arguments):
    """Returns an environment, always the same one for the same arguments, a JSON object."""
    # An environment sets handlers of its own; those of the run save it.
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        return vf.load_environment(name, **json.loads(arguments))
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(
            f'config.environment.name={name}, arguments={arguments}: {error}; install it, or correct them'
        ) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class DescribedTool(Tool):
    """A tool of which the environment runs the calls, and the prompt knows name and schema."""

    def __init__(self, definition):
        self.name = definition.name
        self.description = definition.description
        self.parameters = definition.parameters

    def run(self, calls):
        """Never called: `Model.reply` has the results."""
        raise RuntimeError('a call of the environment has its result already')


def tools(config, source):
    """Returns the tools of the environment, for `config.tools.names`."""
    return [DescribedTool(each) for each in load(**config.environment).tool_defs or ()]
