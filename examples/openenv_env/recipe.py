"""A server of OpenEnv that plays with a solver: its observations are messages, the solver's turns are actions.

A rollout has a session of its own (the WebSocket of the server; its plain HTTP requests keep no session). A task is a
seed of `reset`, and the reward is the sum of what the steps earned.
"""

import asyncio
import functools
import json
import urllib.request

from openenv.core import GenericEnvClient
from websockets.exceptions import WebSocketException

from zeroplay_jax.recipes.datasets import dataset_tasks
from zeroplay_jax.selfplay.answers import group_of
from zeroplay_jax.selfplay.recipe import Recipe as RecipeBase
from zeroplay_jax.selfplay.recipe import RoleSpec
from zeroplay_jax.selfplay.schedule import Phase
from zeroplay_jax.settings.kinds import PositiveInt, Section
from zeroplay_jax.tools.base import FailureLog
from zeroplay_jax.types import Outcome, Question, Row, TaskDropped, UserError

# Reason code of a rollout during which the server failed.
FAILED = 'environment_failed'


class Settings(Section):
    """The server, and how its actions and observations are texts."""

    url: str = 'http://127.0.0.1:8000'
    """Its address."""
    tasks: PositiveInt = 1000
    """Number of tasks: seeds from 0."""
    turns: PositiveInt = 8
    """Most steps of a rollout."""
    action: str = 'message'
    """Field of an action that holds the text of a turn."""
    observation: str = ''
    """Field of an observation that is shown; '': all of it as JSON."""
    sessions: PositiveInt = 64
    """Most sessions at once: those of the server."""


class Recipe(RecipeBase):
    """A solver at a server."""

    settings = {'openenv': Settings}
    prompts = {'openenv': '{message}'}
    has_pool = False
    filterable_roles = ('solver',)
    evaluated_role = 'reader'

    def __init__(self, config, library):
        super().__init__(config, library)
        url = config.openenv.url
        try:
            urllib.request.urlopen(f'{url}/health', timeout=10).close()
        except (OSError, ValueError) as error:
            raise UserError(
                f'config.openenv.url={url}: no server answers ({error}); start it'
            ) from None
        self.seeds = [{'seed': number} for number in range(config.openenv.tasks)]
        self.failures = FailureLog(f'server {url}')

    @classmethod
    def roles(cls, config):
        """Returns the solver, whose turns end with an end token, and its weights in evaluations."""
        reader = RoleSpec('reader', 'solver', weights_from='solver')
        return (RoleSpec('solver', 'openenv', terminal_tags=(), tools=()), reader)

    def phases(self):
        """Returns one phase of solver steps per iteration."""
        iterations = range(self.config.schedule.iterations)
        return [Phase('solver', self.config.solver.steps, ('solver',), i) for i in iterations]

    def tasks(self, step, pool, cursor):
        """Returns tasks on the next seeds."""
        return dataset_tasks(self.config, self.seeds, step, cursor)

    async def episode(self, context, step, task):
        """Plays one seed several times; returns the rollouts as rows."""
        samples = range(self.config.solver.samples)
        games = [self.play(context, (*task.identity, number), task) for number in samples]
        return Outcome(await asyncio.gather(*games))

    async def play(self, context, identity, task):
        """Returns one rollout as a row, which is dropped if the server fails."""
        settings = self.config.openenv
        row = Row('solver', None, 0.0, group_of(task.identity))
        server = GenericEnvClient(settings.url)
        async with sessions(asyncio.get_running_loop(), settings.sessions):
            try:
                result = await self.answered(server.reset(**task.payload))
                row.info.question = Question(self.text_of(result), hops=0)
                for turn in range(settings.turns):
                    text = self.text_of(result)
                    asked = 'solver', (*identity, turn)
                    if turn:
                        row.trajectory = await context.go_on(*asked, row.trajectory, note=text)
                    else:
                        (row.trajectory,) = await context.ask(*asked, message=text)
                    action = {settings.action: row.trajectory.turns[-1].text}
                    result = await self.answered(server.step(action))
                    row.reward += float(result.reward or 0.0)
                    if result.done:
                        break
            except TaskDropped as drop:
                if row.trajectory is None:
                    raise
                # A full slot ends a rollout as it is.
                row.drop = FAILED if drop.reason == FAILED else None
            finally:
                await server.close()
        row.parts = {'environment': row.reward}
        return row

    async def answered(self, call):
        """Returns the answer of the server to a call; raises TaskDropped if it fails."""
        try:
            return await call
        except (OSError, RuntimeError, WebSocketException) as error:
            self.failures.add(repr(error))
            raise TaskDropped(FAILED) from None

    def text_of(self, result):
        """Returns the text of an observation."""
        name, observation = self.config.openenv.observation, result.observation
        if not name:
            return json.dumps(observation, ensure_ascii=False)
        if name not in observation:
            raise UserError(
                f'config.openenv.observation={name}: the server gave {", ".join(observation)}; name one of these'
            )
        return str(observation[name])


# The last loop alone: each step has one of its own.
@functools.lru_cache(maxsize=1)
def sessions(loop, count):
    """Returns what limits the sessions at once within an event loop."""
    return asyncio.Semaphore(count)
