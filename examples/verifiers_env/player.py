"""Plays an environment of verifiers for `recipe.py`, in a Python where verifiers is installed and the project is not.

The model that verifiers asks, at an OpenAI-compatible address, is the recipe: each rollout is a connection of it, on
which lines of JSON go both ways. The name of the model is that of the rollout.
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.env import RunSlot

# Of a taskset without end these tasks are played.
MOST_TASKS = 10_000
MOST_BYTES = 2**30


class Player:
    """The rollouts of an environment.

    Attributes:
      env: the environment.
      tasks: its tasks.
      url: where verifiers reaches the model.
      rollouts: name → reader and writer of its connection.
      tools: those of the first request of all, which is played for them alone; None before it.
    """

    def __init__(self, env):
        self.env = env
        self.tasks = list(env.taskset.take(MOST_TASKS))
        self.url = ''
        self.rollouts = {}
        self.tools = None

    async def complete(self, request):
        """Answers a request of verifiers with a turn of the recipe."""
        body = await request.json()
        if self.tools is None:
            self.tools = body.get('tools') or []
            return refusal('this rollout was played for its tools')
        reader, writer = self.rollouts[body['model']]
        writer.write(line({'messages': body['messages']}))
        reply = json.loads(await reader.readline() or '{"error": "the run left this rollout"}')
        if 'error' in reply:
            return refusal(reply['error'])
        head = {'id': 'turn', 'object': 'chat.completion', 'created': 0, 'model': body['model']}
        completion = head | {'choices': [{'index': 0} | reply]}
        if body.get('stream'):
            events = b''.join(ChatDialect().stream_events(completion))
            return web.Response(body=events, content_type='text/event-stream')
        return web.json_response(completion)

    async def play(self, name, task):
        """Plays a rollout of a task; returns its rewards or an error."""
        client = vf.EvalClientConfig(base_url=self.url, api_key_var='NO_KEY')
        episode = await self.env.run_slot(RunSlot(task), vf.ModelContext(name, client))
        if not episode.ok:
            return {'error': str(episode.errors or episode.traces[-1].errors)}
        # Of several agents the last one.
        trace = episode.traces[-1]
        parts = {reward: each.value for reward, each in trace.rewards.items()}
        return {'reward': trace.reward, 'parts': trace.metrics | parts}

    async def serve(self, reader, writer):
        """Plays the rollout of a connection, which begins with the number of its task."""
        name = str(id(writer))
        self.rollouts[name] = reader, writer
        number = json.loads(await reader.readline())
        writer.write(line(await self.play(name, self.tasks[number])))
        writer.close()
        del self.rollouts[name]

    async def run(self, out):
        """Writes what there is to play, and plays it until the recipe closes its end."""
        model = web.Application(client_max_size=MOST_BYTES)
        model.router.add_post('/v1/chat/completions', self.complete)
        runner = web.AppRunner(model)
        await runner.setup()
        await web.TCPSite(runner, '127.0.0.1', 0).start()
        self.url = f'http://127.0.0.1:{runner.addresses[0][1]}/v1'
        server = await asyncio.start_server(self.serve, '127.0.0.1', 0, limit=MOST_BYTES)
        port = server.sockets[0].getsockname()[1]
        async with self.env.serving():
            ended = await self.play('', self.tasks[0])
            if self.tools is None:
                sys.exit(f'its harness asked for nothing: {ended.get("error")}')
            out.write(line({'port': port, 'tasks': len(self.tasks), 'tools': self.tools}))
            await asyncio.to_thread(sys.stdin.read)


def line(record):
    """Returns a record as a line."""
    return json.dumps(record).encode() + b'\n'


def refusal(reason):
    """Returns an answer that no client tries again."""
    return web.json_response({'error': {'message': reason}}, status=400)


def main():
    """Plays the environment of the first argument, the block [env] of verifiers as JSON."""
    # What libraries print goes to stderr.
    out = os.fdopen(os.dup(1), 'wb', buffering=0)
    os.dup2(2, 1)
    env = vf.load_environment(vf.resolve_env_config(json.loads(sys.argv[1])))
    asyncio.run(Player(env).run(out))


if __name__ == '__main__':
    main()
