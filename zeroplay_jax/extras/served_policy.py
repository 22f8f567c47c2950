"""A model behind an OpenAI-compatible server as the policy of an evaluation.

Its rollouts have the prompts, tools and limits of the role, one call per turn, and turns that end at the first stop
string, as those of slots; but no tokens. Results of tools reach the server as messages of their own.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence

import numpy as np

from zeroplay_jax.rollout.call_syntax import CHARACTERS_PER_TOKEN, arguments_as_json
from zeroplay_jax.rollout.foreign_text import Message, Untrusted
from zeroplay_jax.rollout.requests import Request
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.selfplay.judge import NoReply
from zeroplay_jax.selfplay.judge_endpoint import (
    CUT_OFF,
    WHOLE,
    ChatClient,
    chat_of,
    completion,
    content_text,
    request_fields,
    without_control_tokens,
)
from zeroplay_jax.settings.rollouts import ALL_IDS
from zeroplay_jax.tools.base import FailureLog
from zeroplay_jax.types import Json, Trajectory, Turn, UserError

# Ending of a reply that calls a tool.
_CALLED = 'tool_calls'
# A name of `ServedModel.stats`.
_UNTAGGED = 'of them without tags, which count as no answers'
# What advice in errors names.
_FIELDS = {'model=': 'policy.path=…#', 'tokens': 'rollout.turn_tokens', 'request': 'policy.request'}
# Answers that fail one after the other before a command ends: a server that is down fails all.
MOST_FAILURES = 20


class ServedModel:
    """The model of `config.policy.path`, http(s)://…#MODEL; `config.judge` has timeout, retries and requests at once.

    The key is in OPENAI_API_KEY; in POLICY_API_KEY if that is a judge's at another address, which may belong to others.

    Args:
      most_failures: number of answers that fail one after the other, after the first reply, at which a command ends.

    Attributes:
      stats: what was asked: requests, tokens as far as the server counts them, answers and what became of them.
    """

    def __init__(self, config, most_failures: int = MOST_FAILURES):
        url, _, self._name = config.policy.path.partition('#')
        judge = config.judge
        is_shared = judge.kind != 'endpoint' or judge.url.rstrip('/') == url.rstrip('/')
        key = 'OPENAI_API_KEY' if is_shared else 'POLICY_API_KEY'
        self._client = ChatClient(url, judge, _FIELDS, key, judge.at_once)
        self._prompts = config.prompts
        self._request = config.policy.request
        self._about = f'{config.policy.path} {self._request}'.rstrip()
        self._most_failures = most_failures
        self._failures = most_failures - 1
        self._log = FailureLog('policy')
        self.stats: collections.Counter[str] = collections.Counter()

    def __str__(self) -> str:
        return self._about

    def summary(self) -> str:
        """Returns `stats` in one line; of answers without tags, which prompts ask for them."""
        line = f'{self._name}: {", ".join(f"{n:,} {name}" for name, n in self.stats.items())}'
        if self.stats[_UNTAGGED] and self._prompts != 'full':
            line += f'; --config.prompts={self._prompts} may not ask for <answer>, full does'
        return line

    async def sample(
        self, scheduler: Scheduler, request: Request, messages: Sequence[Message]
    ) -> list[Trajectory]:
        """Returns the rollouts of a request, without tokens; the server draws its own samples.

        `Trajectory.finish` is 'failed', and `weights` '', where the server gave no reply.

        Args:
          scheduler: runs the tools.
          messages: the chat in place of `Request.prompt`.

        Raises:
          UserError: the first request failed, or too many did.
        """
        chat = chat_of(messages)
        rollouts = []
        for sample in range(request.samples):
            one = dataclasses.replace(request, identity=(*request.identity, sample))
            rollouts.append(self._rollout(scheduler, one, list(chat)))
        return await asyncio.gather(*rollouts)

    async def _rollout(
        self, scheduler: Scheduler, request: Request, chat: list[Json]
    ) -> Trajectory:
        """Returns a rollout from the chat that opens it; continues the chat in place."""
        env = request.env
        ids, source, logp = (np.zeros(0, dtype) for dtype in (np.int32, np.int8, np.float32))
        rollout = Trajectory(ids, source, logp, (), '', self._name, 0, request.identity)
        left = env.limits.response_tokens or sys.maxsize
        finish = ''
        while not finish:
            is_last = len(rollout.turns) + 1 >= env.limits.max_turns
            try:
                message, turn, finish = await self._reply(chat, request, left, is_last)
            except NoReply as error:
                self.stats['failed answers'] += 1
                self._failures += 1
                self._log.add(str(error))
                if self._failures >= self._most_failures:
                    raise UserError(
                        f'--policy={self}: the model does not answer ({error}); correct this and run the command again'
                    ) from None
                return dataclasses.replace(rollout, finish='failed', weights='')
            rollout = dataclasses.replace(rollout, turns=(*rollout.turns, turn))
            if finish or turn.call is None:
                break
            before = dataclasses.replace(request, before=rollout)
            done, ids = await scheduler.reply(before, turn.call, turn.call.error is not None)
            states = tuple(done.tool_states)
            rollout = dataclasses.replace(rollout, turns=tuple(done.turns), tool_states=states)
            observation = env.codec.decode(ids)
            chat += _exchange(message, turn.text, observation)
            left -= len(turn.text + observation) // CHARACTERS_PER_TOKEN
            if left <= 0:
                finish = 'response_tokens'
        self.stats['answers'] += 1
        self.stats[_UNTAGGED] += finish == 'eos'
        return dataclasses.replace(rollout, finish=finish)

    async def _reply(
        self, chat: Sequence[Json], request: Request, left: int, is_last: bool
    ) -> tuple[Json, Turn, str]:
        """Returns the message with which the model replies, and turn and `Trajectory.finish`, '' if it goes on.

        Args:
          left: tokens that are left of the response.
          is_last: whether it may not call a tool.

        Raises:
          NoReply: there is no reply that can be read.
        """
        env = request.env
        body = request_fields(self._request, request.temperature, min(env.limits.turn_tokens, left))
        for name, value, off in zip(('top_p', 'top_k'), request.truncation, ALL_IDS):
            # A greedy answer leaves nothing out.
            if request.temperature and value != off:
                body.setdefault(name, value)
        if env.tools:
            body['tools'] = env.schemas
            if is_last:
                body['tool_choice'] = 'none'
        self.stats['requests'] += 1
        message, text, is_whole = await self._client.complete(self._name, chat, body, self._read)
        self._failures = 0
        ends = [text.find(stop) + len(stop) for stop in env.stops if stop in text]
        text = text[: min(ends, default=len(text))]
        call, finish = None, 'eos' if is_whole else 'turn_tokens'
        if ends:
            call, finish = env.read_turn(text).outcome(is_last)
        turn = Turn(text, call, bool(ends) or is_whole, temperature=request.temperature)
        return message, turn, finish

    def _read(self, body: bytes) -> tuple[Json, str, bool]:
        """Returns the message in a reply, its text with its call, and whether it is whole.

        Whatever a reply of another form raises makes it none (`ChatClient.complete`).
        """
        answer = completion(body, 'policy.path')
        usage = answer.get('usage') or {}
        for name in ('prompt', 'completion'):
            self.stats[f'{name} tokens'] += usage.get(f'{name}_tokens') or 0
        choice = answer['choices'][0]
        message = choice['message']
        text = content_text(message)
        ending = str(choice.get('finish_reason') or 'none').lower()
        if ending not in WHOLE | CUT_OFF | {_CALLED}:
            raise NoReply(f'the reply did not end by itself (finish_reason {ending})')
        is_whole = ending not in CUT_OFF
        call = _first_call(message)
        # A call that is cut off has no arguments yet.
        if call and is_whole:
            text += f'<tool_call>\n{arguments_as_json(_content(call))}\n</tool_call>'
        return message, text, is_whole


def _first_call(message: Json) -> Json:
    """Returns the first call of a message, {} without one; a turn has one call, and the others are dropped."""
    return message['tool_calls'][0] if message.get('tool_calls') else {}


def _content(call: Json) -> Json:
    """Returns {'name', 'arguments'} of a call; arguments that are no JSON stay a text, which no tool takes."""
    # Some servers send '' for a tool without parameters.
    arguments = call['function'].get('arguments') or '{}'
    # TypeError: some servers send an object.
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        arguments = json.loads(arguments)
    return {'name': call['function'].get('name'), 'arguments': arguments}


def _exchange(message: Json, text: str, observation: str) -> list[Json]:
    """Returns the messages of a call and its result.

    Args:
      message: that of the server, which gets back what it sent, such as the signature of its thoughts.
      text: the turn as recorded; it has the call if the model wrote one into its text.
      observation: the result, foreign text.
    """
    result = without_control_tokens(Untrusted(observation))
    call = _first_call(message)
    if not call:
        return [{'role': 'assistant', 'content': text}, {'role': 'user', 'content': result}]
    function = dict(call['function'])
    # Chat templates read them as JSON.
    if not function.get('arguments') or not isinstance(_content(call)['arguments'], dict):
        function['arguments'] = '{}'
    sent = {**message, 'tool_calls': [{**call, 'function': function}]}
    return [sent, {'role': 'tool', 'tool_call_id': call.get('id'), 'content': result}]
