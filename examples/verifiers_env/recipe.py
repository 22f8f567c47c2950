"""An environment of the library verifiers that plays by itself, with a solver as its model.

Taskset and harness run in a process of their own (`player.py`), in a Python of their own: verifiers cannot be installed
beside the project. The harness has its loop, tools and stops, the task its rewards. Where verifiers would send messages
to a server of the model, this one goes on with the rollout, whose ids are never made again.
"""

import asyncio
import dataclasses
import functools
import json
import pathlib
import subprocess

from zeroplay_jax.recipes.datasets import dataset_tasks
from zeroplay_jax.rollout.prompts import Prompt
from zeroplay_jax.selfplay.answers import group_of
from zeroplay_jax.selfplay.recipe import Recipe as RecipeBase
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.settings.kinds import Problem, Section
from zeroplay_jax.tools.base import FailureLog, Tool
from zeroplay_jax.types import Outcome, Question, Row, RowInfo, TaskDropped, UserError

# Reason code of a rollout in which the environment failed.
FAILED = 'environment_failed'


class Settings(Section):
    """Which environment."""

    python: str = 'python3'
    """Python of an environment in which verifiers and the packages of taskset and harness are installed."""
    block: str = '{}'
    """The block [env] of verifiers, a JSON object: taskset, agent with its harness and runtime."""


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
        self.player = load(**config.environment)
        self.numbers = [{'task': number} for number in range(self.player.tasks)]
        self.failures = FailureLog('the environment of verifiers')

    @classmethod
    def roles(cls, config):
        """Returns the solver, whose turns end with an end token or a call, and its weights in evaluations."""
        reader = RoleSpec('reader', 'solver', weights_from='solver', tools=())
        return (RoleSpec('solver', 'environment', terminal_tags=()), reader)

    @classmethod
    def check(cls, config):
        """Refuses turns that the environment would not count."""
        if config.rollout.max_turns != 1:
            yield Problem('rollout.max_turns', 'the environment counts the turns; give 1')

    def phases(self):
        """Returns one phase of solver steps per iteration."""
        iterations = range(self.config.schedule.iterations)
        return [Phase('solver', self.config.solver.steps, ('solver',), i) for i in iterations]

    def tasks(self, step, pool, cursor):
        """Returns tasks on the next rows of the dataset."""
        return dataset_tasks(self.config, self.numbers, step, cursor)

    async def episode(self, context, step, task):
        """Has the environment play one task several times, and returns the rollouts with its rewards."""
        samples = range(self.config.solver.samples)
        models = [Model(context, (*task.identity, number)) for number in samples]
        games = [self.player.play(task.payload['task'], model) for model in models]
        ended = await asyncio.gather(*games)
        rows = []
        for end, model in zip(ended, models, strict=True):
            if 'error' in end:
                self.failures.add(end['error'])
            if model.rollout is None:
                raise TaskDropped(FAILED)
            row = Row(
                'solver',
                model.rollout,
                end.get('reward', 0.0),
                group_of(task.identity),
                parts=end.get('parts', {}),
                drop=FAILED if 'error' in end else None,
                info=RowInfo(question=Question(model.question, hops=0)),
            )
            rows.append(row)
        return Outcome(rows)


class Model:
    """The model of one rollout of an environment: its turns are those of one rollout of the solver.

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

    async def complete(self, messages):
        """Returns the next turn of the solver: a message as of a chat completion, and why it ended."""
        said = [(message['role'], text_of(message)) for message in messages]
        env = self.context.roles['solver'].env
        turns = len(self.rollout.turns) if self.rollout else 0
        asked = 'solver', (*self.identity, turns)
        try:
            if self.rollout is None:
                fields = opening(said, bool(env.tools))
                self.question = fields['message']
                (self.rollout,) = await self.context.ask(*asked, **fields)
            else:
                rollout, note = self.reply(said, env)
                self.rollout = await self.context.go_on(*asked, rollout, note=note)
        except TaskDropped as full:
            if self.rollout is None:
                raise
            # Harnesses know a full context by these words.
            return {'error': f'maximum context length: {full.reason}'}
        turn = self.rollout.turns[-1]
        self.said = [*said, ('assistant', turn.text)]
        message = {'role': 'assistant', 'content': turn.text}
        finish = 'stop' if turn.closed else 'length'
        if ends_with_call(turn, env):
            name, arguments, error = env.syntax.read_call(turn.text, env.tools)
            # The environment answers what cannot be read as well.
            body = turn.text if error == 'malformed' else json.dumps(arguments)
            call = {'id': f'call_{turns}', 'type': 'function'}
            message['tool_calls'] = [call | {'function': {'name': name, 'arguments': body}}]
            finish = 'tool_calls'
        return {'message': message, 'finish_reason': finish}

    def reply(self, messages, env):
        """Returns the rollout that goes on, and a note; what the environment has added is a result or the note."""
        known = len(self.said)
        text = '\n'.join(text for _, text in messages[known:])
        if messages[:known] != self.said or not text:
            raise UserError(
                'the harness changed or did not answer what was said before; a rollout goes on only with a message '
                'behind it, so choose one that keeps its history'
            )
        turn = self.rollout.turns[-1]
        if not ends_with_call(turn, env):
            return self.rollout, text
        call = dataclasses.replace(env.read_turn(turn.text).call, text=text)
        turns = (*self.rollout.turns[:-1], dataclasses.replace(turn, call=call))
        return dataclasses.replace(self.rollout, turns=turns), ''


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
    content = message.get('content') or ''
    if not isinstance(content, str):
        raise UserError('the harness wrote a message of several parts; only plain text can be read')
    return content


class Player:
    """The process in which verifiers plays (`player.py`).

    Attributes:
      port: where it plays, a rollout per connection.
      tasks: number of tasks.
      tools: those of the first request, as servers list them.
    """

    def __init__(self, python, block):
        script = pathlib.Path(__file__).with_name('player.py')
        # In a session of its own, so that Ctrl-C interrupts the run alone. It ends when its input is closed.
        self.process = subprocess.Popen(
            [python, str(script), block],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        first = self.process.stdout.readline()
        if not first:
            raise UserError(
                f'config.environment: verifiers cannot play {block} (see the lines above); correct it, or install what '
                f'is missing for {python}'
            )
        first = json.loads(first)
        self.port, self.tasks, self.tools = first['port'], first['tasks'], first['tools']

    async def play(self, task, model):
        """Returns how a rollout ended: {'reward', 'parts'} or {'error'}."""
        try:
            reader, writer = await asyncio.open_connection('127.0.0.1', self.port, limit=2**30)
        except OSError as error:
            raise UserError(
                f'the process of verifiers ended ({error}); see its lines above'
            ) from None
        record = task
        try:
            while True:
                writer.write(json.dumps(record).encode() + b'\n')
                record = json.loads(await reader.readline() or '{"error": "its process ended"}')
                if 'messages' not in record:
                    return record
                record = await model.complete(record['messages'])
        finally:
            writer.close()


@functools.cache
def load(python, block):
    """Returns the process of an environment, always the same one for the same settings."""
    try:
        return Player(python, block)
    except OSError as error:
        raise UserError(
            f'config.environment.python={python}: {error}; give the Python in which verifiers is installed'
        ) from None


class DescribedTool(Tool):
    """A tool of which the environment runs the calls, and the prompt knows name and schema."""

    def __init__(self, function):
        self.name = function['name']
        self.description = function.get('description', '')
        self.parameters = function['parameters']

    def run(self, calls):
        """Never called: `Model.reply` has the results."""
        raise RuntimeError('a call of the environment has its result already')


def tools(config, source):
    """Returns the tools of the environment, for `config.tools.names`."""
    return [DescribedTool(tool['function']) for tool in load(**config.environment).tools]
