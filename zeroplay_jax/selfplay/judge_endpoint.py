"""A judge on an OpenAI-compatible server: its requests, the forms of its replies, and one line for what goes wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zeroplay_jax.retrieval import json_text, web
from zeroplay_jax.retrieval.masking import hide
from zeroplay_jax.retrieval.types import short
from zeroplay_jax.rollout.foreign_text import Message, Untrusted, without_surrogates
from zeroplay_jax.rollout.prompts import Prompt, fill
from zeroplay_jax.selfplay.judge import (
    GRADE_PROMPT,
    RUBRICS_PROMPT,
    Judge,
    NoReply,
    Outage,
    Writer,
)
from zeroplay_jax.types import Json, UserError

if TYPE_CHECKING:
    from zeroplay_jax.selfplay.context import RolloutContext

# Environment variable with the key of the server.
_KEY = 'OPENAI_API_KEY'
# Header → environment variable with its value, for a server that gets OPENAI_API_KEY.
_ACCOUNT = {'OpenAI-Organization': 'OPENAI_ORG_ID', 'OpenAI-Project': 'OPENAI_PROJECT_ID'}
# Values of finish_reason of a whole reply, in lower case; some servers give none.
WHOLE = frozenset('stop eos eos_token end_turn stop_sequence complete none'.split())
CUT_OFF = frozenset('length max_tokens max_output_tokens model_length'.split())
# Why a server does not give the model's reply. To ask again would favour verdicts that are easy to give.
_REFUSED = frozenset('content_filter refusal safety recitation guardrail_intervened'.split())
# Types of parts of a content that is a list.
_TEXT_PARTS = frozenset(('text', 'output_text'))
# How often an example is judged until a reply can be read.
_EXAMPLE_TRIES = 3
# Bytes of a reply that are looked at for a quotation.
_QUOTED_BYTES = 400
# Requests in progress, each with a descriptor; most systems allow a process 1,024 of them.
_AT_ONCE = 512


@dataclasses.dataclass(eq=False)
class ChatClient:
    """Sends chats to an OpenAI-compatible server.

    The key is read from the environment, never from the config, which every run writes to its workdir.

    Args:
      url: the server's address, with or without the name of the endpoint.
      config: `config.judge`, or settings with the same fields: timeout and retries.
      fields: which fields of the config advice in errors names for 'tokens', 'request' and 'model='.
      key: environment variable with the key.
      at_once: largest number of requests in progress.

    Raises:
      UserError: the key cannot be sent.
    """

    url: str
    config: Any
    fields: Mapping[str, str]
    key: str
    at_once: int = _AT_ONCE

    def __post_init__(self) -> None:
        # A line feed, as of a file, would not be a header; nor would an empty key.
        key = os.environ.get(self.key, '').strip() or 'none'
        if not key.isascii() or not key.isprintable():
            raise UserError(
                f'{self.key}: has a character that no key has, such as a line feed; correct this environment variable'
            )
        headers = {'Authorization': f'Bearer {key}'}
        for name, variable in _ACCOUNT.items():
            if self.key == 'OPENAI_API_KEY' and os.environ.get(variable):
                headers[name] = os.environ[variable]
        self._address = self.url.rstrip('/').removesuffix('/chat/completions') + '/chat/completions'
        self._exchange = web.Exchange(
            self.url, self.config.timeout, self.config.retries, self.at_once, headers=headers
        )

    async def complete(
        self, model: str, chat: Sequence[Json], body: Json, parse: Callable[[bytes], Any]
    ) -> Any:
        """Returns `parse` of the reply to a chat; one that is not whole JSON is asked for again, `retries` times.

        Args:
          body: fields of the request beside model and messages.
          parse: reads the body of a reply; raises NoReply.

        Raises:
          NoReply: there is no reply, or `parse` refuses it.
        """

        def read(reply: web.Reply) -> Any:
            if reply.status_code >= 300:
                raise self._refusal(reply, model)
            return parse(reply.content)

        request = {'model': model, 'messages': chat, **body}
        try:
            reply = web.start(self._exchange.post(self._address, request, read))
            return await asyncio.wrap_future(reply)
        except NoReply:
            raise
        except web.NoReply as error:
            raise Outage(str(error)) from None
        except Exception as error:
            raise Outage(f'{type(error).__name__}: {error}') from None

    def _refusal(self, reply: web.Reply, model: str) -> Exception:
        """Returns what to raise for a status; the advice comes first, because long lines are cut."""
        status, request = reply.status_code, self.fields['request']
        advice = {
            400: f'lower config.{self.fields["tokens"]}, or change the request by config.{request}, as it says',
            401: f'check the key in {self.key}',
            403: f'check the key in {self.key}',
            404: f'check config.{self.fields["model="]}{model}, and whether the address must end with /v1',
            422: f'config.{request} adds fields to the request or takes some away',
            503: 'it may still be loading',
        }.get(status, 'the server failed')
        kind: type[Exception] = web.NoReply if web.is_temporary(reply) else Outage
        # These are about what was sent, for example a text that is too long.
        if status in (400, 413, 422):
            kind = NoReply
        return kind(f'status {status}, {advice}: {hide(reply.text)}')


def endpoint_writer(config, templates: Mapping[str, Prompt]) -> Writer:
    """Returns a writer whose replies come from an OpenAI-compatible server.

    Args:
      config: `config.judge`, or settings with the same fields.
      templates: prompts by name.
    """
    names = {name: f'judge.{name}' for name in ('request', 'model=', 'tokens')}
    client = ChatClient(config.url, config, names, _KEY)
    # SCOPE's ablation varies the rubric writer and the grader separately; '' selects `config.model`.
    model_of_prompt = {RUBRICS_PROMPT: config.rubric_model, GRADE_PROMPT: config.grade_model}

    async def write(context, identity, prompt, fields, temperature=None) -> str:
        """A `Writer`; the server draws its own samples, so `context` and `identity` are not used."""
        chat = chat_of(fill(templates[prompt], **fields))
        if temperature is None:
            temperature = config.temperature
        tokens = config.tokens
        if prompt == GRADE_PROMPT and config.grade_tokens:
            tokens = config.grade_tokens
        model = model_of_prompt.get(prompt) or config.model
        body = request_fields(config.request, temperature, tokens)
        return await client.complete(model, chat, body, completion_text)

    return write


def chat_of(messages: Iterable[Message]) -> list[Json]:
    """Returns messages as a server reads them."""
    return [
        {
            'role': message['role'],
            'content': ''.join(map(without_control_tokens, message['content'])),
        }
        for message in messages
    ]


def request_fields(request: str, temperature: float, tokens: int) -> dict[str, Any]:
    """Returns the fields of a request beside model and messages.

    Args:
      request: `judge.request`: a JSON object with further fields; null takes a field away. 'max_completion_tokens'
        takes the place of 'max_tokens', which servers of reasoning models refuse.
    """
    further = json_text.parse_object(request) if request else {}
    fields = {'temperature': temperature, 'max_tokens': tokens}
    if 'max_completion_tokens' in further:
        del fields['max_tokens']
    return {name: value for name, value in (fields | further).items() if value is not None}


def completion_text(body: bytes) -> str:
    """Returns the text of a chat completion.

    Args:
      body: of a reply with status 200.

    Raises:
      NoReply: the reply has none; names the reason.
    """
    choice = completion(body, 'judge.url')['choices'][0]
    message = choice['message']
    _check_ending(choice)
    if message.get('refusal'):
        raise NoReply(f'the model refused: {_json(message["refusal"])}', is_final=True)
    text = content_text(message)
    if not text.strip():
        reason = 'the reply has no text'
        if message.get('reasoning_content') or message.get('reasoning'):
            reason = 'the reply has thoughts but no text; raise config.judge.tokens'
        raise NoReply(reason, is_final=isinstance(message.get('content'), str))
    return text


def completion(body: bytes, url: str) -> Json:
    """Returns a chat completion whose first choice has a message.

    Args:
      body: of a reply with status 200.
      url: field of the config with the server's address, for advice.

    Raises:
      NoReply: the reply is none; names the reason.
    """
    if body.lstrip().startswith((b'data:', b'event:')):
        raise Outage(
            'the server sends its reply in pieces (a stream); take one that answers at once'
        )
    try:
        # Numbers that are not finite occur in statistics, which are not read.
        reply = json_text.parse_object(body, not_finite=float)
    except json_text.Unusable as error:
        # Without the advice for files.
        reason = str(error).partition(';')[0]
        if body.lstrip().startswith(b'<'):
            reason = f'a web page in HTML; config.{url} names the API and often ends with /v1'
        text = short(body[:_QUOTED_BYTES].decode('utf-8', 'replace'))
        # Another attempt may bring a whole one.
        raise web.NoReply(f'no chat completion ({reason}): {text}') from None
    # Some servers report errors with status 200.
    if reply.get('error'):
        raise Outage(f'the server sent an error: {_json(reply["error"])}')
    try:
        is_message = isinstance(reply['choices'][0]['message'], dict)
    except (LookupError, TypeError):
        is_message = False
    if not is_message:
        raise Outage(f'the reply has no message: {_json(reply)}')
    return reply


def _check_ending(choice: Mapping[str, Any]) -> None:
    """Raises NoReply unless a reply ended by itself."""
    ending = str(choice.get('finish_reason') or 'none')
    if ending.lower() in WHOLE:
        return
    # A reply that was cut off could have continued with "but".
    if ending.lower() in CUT_OFF:
        raise NoReply(
            f'the reply was cut off (finish_reason {ending}); raise config.judge.tokens (of grades: '
            'judge.grade_tokens)'
        )
    raise NoReply(
        f'the reply did not end by itself (finish_reason {short(ending)})',
        is_final=ending.lower() in _REFUSED,
    )


def content_text(message: Json) -> str:
    """Returns the text of a message, whose content is a text, or a list with parts that are texts."""
    content = message.get('content') or ''
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        texts = [part.get('text') for part in parts if part.get('type') in _TEXT_PARTS]
        content = ''.join(text for text in texts if isinstance(text, str))
    # Logs cannot hold half of a surrogate pair.
    return without_surrogates(content)


def _json(value: Any) -> str:
    return short(hide(json.dumps(value, ensure_ascii=False)))


class _Probe(Judge):
    """A judge that raises what others count."""

    def _add_failure(self, count: str, reason: str) -> None:
        raise NoReply(reason, is_final=count == 'unread')


_TASK = 'Name the capital of France and the river that flows through it.'
_DOCUMENT = '(Title: France) The capital of France is Paris. The Seine flows through Paris.'
# Name of a judgement (method of `Judge`) → arguments of an example that every judge can decide.
_EXAMPLES: Mapping[str, tuple[Any, ...]] = {
    'correct': ('What is the capital of France?', ['Paris'], 'Paris'),
    'answer': ('What is the capital of France?', _DOCUMENT),
    'gate': ('relevance', _TASK, _DOCUMENT),
    'rubrics': (_TASK, _DOCUMENT),
    'grade': (_TASK, 'Paris, on the Seine.', 'Names Paris.'),
}


def check_judge(context: RolloutContext, config, judgements: Sequence[str]) -> None:
    """Asks a server for one example of each judgement, before rollouts are sampled that it has no verdict for.

    Args:
      context: its scheduler runs the requests; its prompts are the judge's.
      config: as of `endpoint_writer`.
      judgements: names of `_EXAMPLES`.

    Raises:
      UserError: the server does not answer, or its replies have no verdict that can be read.
    """
    probe = _Probe(endpoint_writer(config, context.prompts), config.rubrics)
    server = f'config.judge.url={config.url}'
    for name in judgements:
        (verdict,) = context.scheduler.run([_example_verdict(probe, name, server)])
        if verdict is False:
            print(
                f'warning: config.judge: model {config.model} refuses what is right in an example ({name})',
                file=sys.stderr,
            )


async def _example_verdict(probe: _Probe, name: str, server: str) -> Any:
    """Returns the verdict on an example; `server` names it in errors."""
    # A small judge may now and then write a reply that cannot be read.
    for _ in range(_EXAMPLE_TRIES):
        try:
            return await getattr(probe, name)((0,), *_EXAMPLES[name])
        except NoReply as lost:
            if not lost.is_final:
                raise UserError(f'{server}: the judge does not answer ({lost})') from None
            reason = str(lost)
    raise UserError(
        f'{server}: none of {_EXAMPLE_TRIES} replies to an example has a verdict that can be read ({reason}); take '
        'another model, or allow longer replies'
    )


def without_control_tokens(part: str) -> str:
    """Returns a part of a prompt; in untrusted text a zero-width space follows every '<'."""
    # The server tokenises the prompt itself and would turn a tag in untrusted text into a control token.
    if isinstance(part, Untrusted):
        return part.replace('<', '<\u200b')
    return part
