"""A taskset and a harness as verifiers has them today; the environment of `config.py`."""

import functools

import verifiers.v1 as vf
from openai import AsyncOpenAI, BadRequestError

BORN = {'Rapon': 'Demas', 'Memon': 'Tromon', 'Reson': 'Troles', 'Ferus': 'Bitas'}
MOST_TURNS = 3
SEARCH = {
    'name': 'search',
    'description': 'Finds what is known about somebody.',
    'parameters': {
        'type': 'object',
        'properties': {'query': {'type': 'string', 'description': 'a question or a name'}},
        'required': ['query'],
    },
}

__all__ = ['Birthplaces', 'SearchLoop']


class Person(vf.TaskData):
    """Somebody, and where they were born."""

    answer: str


class Birthplace(vf.Task[Person]):
    """Find where somebody was born."""

    @vf.reward
    async def is_named(self, trace):
        """Whether the last turn names the town."""
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.1)
    async def is_short(self, trace):
        """Whether there was one search and one answer."""
        return float(trace.num_turns == 2)


class Birthplaces(vf.Taskset[Birthplace]):
    """A task per person."""

    def load(self):
        for name, town in BORN.items():
            prompt = f'Question: What is the birthplace of {name}?'
            yield Birthplace(Person(prompt=prompt, answer=town), self.config.task)


class SearchLoop(vf.Harness):
    """A loop with one tool, until a turn without a call."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Plays one rollout in this process."""
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{'role': 'user', 'content': data.prompt}]
        tools = [{'type': 'function', 'function': SEARCH}]
        ask = functools.partial(client.chat.completions.create, model=ctx.model, tools=tools)
        for _ in range(MOST_TURNS):
            try:
                completion = await ask(messages=messages)
            except BadRequestError as refusal:
                # A full context ends the rollout as it is.
                if 'context length' not in str(refusal):
                    raise
                break
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                result = found(call.function.arguments)
                messages.append({'role': 'tool', 'tool_call_id': call.id, 'content': result})
            if not message.tool_calls:
                break
        await client.close()
        return vf.ProgramResult(exit_code=0, stdout='', stderr='')


def found(arguments):
    """Returns what is known about the people that the arguments of a call name."""
    for name, town in BORN.items():
        if name in arguments:
            return f'Doc 1(Title: {name}) {name} was born in {town}.'
    return 'No passage found.'
