"""One policy, asked one question at a time: the engine of a run with a single slot, and its rollout as it comes.

    agent = Agent(config, folder, Codec(folder), search)
    trajectory = agent.ask('who wrote it', 0, tell=print)

What happens is told as (kind, content): the policy's text part by part (see `Parts`), then 'queries' of a call that
could be read, their 'passages' or an 'error'. Texts are as policy and pages wrote them: `clean` what a terminal shows.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import dataclasses
import importlib
import json
import pathlib
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from zeroplay_jax.policy import hf, sharding, transformer
from zeroplay_jax.retrieval import folder as index_folder
from zeroplay_jax.retrieval.client import Client, Http, InProcess
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.sampler import Sampler
from zeroplay_jax.rollout.scheduler import Lane, Scheduler
from zeroplay_jax.rollout.search import Ending, Limits, Search, SearchEnv
from zeroplay_jax.rollout.slot_programs import SamplerConfig
from zeroplay_jax.rollout.tokens import Codec, segments
from zeroplay_jax.rollout.tools import ERROR_TEXTS, Tools, family
from zeroplay_jax.selfplay import corpus as corpora
from zeroplay_jax.selfplay.roles import Role, Table
from zeroplay_jax.selfplay.solving import answer as answer_of
from zeroplay_jax.types import Json, Trajectory, UserError

Tell = Callable[[str, Any], None]

# What moves a cursor, rings, ends a line or turns the direction of writing; line feed and tab may stay.
_CONTROLS = re.compile(
    '[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]'
)


def clean(text: str) -> str:
    """Text that cannot steer a terminal: control characters as Python writes them, `\\x1b` for escape."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line_json(value: Json) -> str:
    """JSON on one line, letters readable, control characters escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return _CONTROLS.sub(lambda found: f'\\u{ord(found[0]):04x}', text)


class Parts:
    """Tells a policy's text, which comes in pieces, by the tags around it.

    Kinds: 'think', 'answer', 'text' (outside of tags), as it comes, and 'end' with None after each; 'call', whole, is
    a call that nothing could read.
    """

    def __init__(self, tell: Tell, tools: Tools):
        self._tell, self._call = tell, tools.call_stop.strip('</>')
        names = ('think', 'answer', self._call)
        self._tag = re.compile(f'<(/?)({"|".join(names)})>')
        self._tags = [f'<{slash}{name}>' for name in names for slash in ('', '/')]
        self._kind, self._rest, self._asked = 'text', '', ''

    def feed(self, text: str) -> None:
        """More text. What may be the beginning of a tag waits for its end."""
        self._rest += text
        while found := self._tag.search(self._rest):
            self._say(self._rest[: found.start()])
            closes, name = found.groups()
            if not (
                closes and name == self._call
            ):  # the environment knows first what such a call asked for
                self._end()
            self._kind = 'text' if closes else name
            self._rest = self._rest[found.end() :]
        at = self._rest.rfind('<')
        waits = at >= 0 and any(tag.startswith(self._rest[at:]) for tag in self._tags)
        keep = at if waits else len(self._rest)
        self._say(self._rest[:keep])
        self._rest = self._rest[keep:]

    def close(self, understood: bool = False) -> None:
        """The turn is over; `understood`: its call is told otherwise."""
        if understood:
            self._asked = ''
        self._say(self._rest)
        self._end()
        self._kind, self._rest = 'text', ''

    def _say(self, text: str) -> None:
        if self._kind == self._call:
            self._asked += text
        elif text:
            self._tell(self._kind, text)

    def _end(self) -> None:
        if self._asked:
            self._tell('call', self._asked)
        self._asked = ''
        self._tell('end', None)


def _silent(kind: str, content: Any) -> None:
    """Hears and says nothing."""


@dataclasses.dataclass(frozen=True)
class _Told(SearchEnv):
    """A search environment that tells what goes through it."""

    tell: Tell = _silent
    parts: Parts | None = None

    def end_turn(self, text: str) -> Ending:
        ending = super().end_turn(text)
        assert self.parts is not None
        self.parts.close(understood=bool(ending.queries))
        if ending.queries:
            self.tell('queries', ending.queries)
        return ending

    def observation(self, documents: Sequence[Sequence[Json]]) -> np.ndarray:
        self.tell('passages', documents)
        return super().observation(documents)

    def error(self, code: str) -> np.ndarray:
        self.tell('error', ERROR_TEXTS[code])
        return super().error(code)


class Searcher:
    """What a policy searches.

    Attributes:
      about: names it.
      examples: questions that it knows the answers to; none of a corpus of the user's.
    """

    def __init__(self, client: Client, top_k: int, about: str, examples: Sequence[str] = ()):
        self._client, self._top_k, self.about, self.examples = client, top_k, about, tuple(examples)

    def search(self, queries: Sequence[str]) -> list:
        """Per query its passages, best first; None for one that failed."""
        return self._client.retrieve(queries, self._top_k)

    def warning(self) -> str:
        """Why searches since the last call failed; '' where they did not."""
        try:
            self._client.check()
        except RetrievalError as error:
            return str(error)
        finally:
            self._client.metrics()  # counts anew
        return ''


def open_searcher(config, ready_seconds: float) -> Searcher:
    """Opens what `config.retrieval` names; of the miniature world the held-out passages and those of training.

    Raises:
      UserError: a folder that is no index, or a server that does not answer within `ready_seconds`.
    """
    c = config.retrieval
    try:
        if c.kind == 'http':
            client = Client(
                Http(c.url, timeout=config.rollout.tool_timeout / 2, retries=1), most_failed=0.0
            )
            client.wait_until_ready(ready_seconds)
            return Searcher(client, config.tools.top_k, c.url)
        if c.kind == 'folder':
            path = pathlib.Path(c.path)
            index = index_folder.open_index(path, encoder_folder=c.encoder or None)
            client = Client(InProcess(index, index_folder.fingerprint(path)), most_failed=0.0)
            return Searcher(
                client, min(config.tools.top_k, len(index)), f'{path}, {len(index)} passages'
            )
    except RetrievalError as error:
        raise UserError(str(error)) from None
    config.eval.update(questions=1, hops=(1, 2))
    client, questions = corpora.exam(config)
    about = f'the miniature world: worlds {config.world.train} and {config.world.evaluation}'
    return Searcher(client, config.tools.top_k, about, [item['question'] for item in questions])


def open_codec(folder: pathlib.Path) -> Codec:
    """The tokenizer and chat template of a folder; UserError where they cannot be used."""
    try:
        codec = Codec(folder)
        codec.render([{'role': 'user', 'content': 'x'}])
    except Exception as error:  # of many kinds, from several libraries
        said = str(error).strip().splitlines() or ['']
        raise UserError(
            f'{folder}: its tokenizer cannot be used ({said[0][:200]}); copy the folder again'
        ) from None
    return codec


def solver_prompt(recipe: str) -> str:
    """What the solver of a recipe reads: 'solver', or 'task_solver' where tasks are open."""
    seats = importlib.import_module(f'zeroplay_jax.selfplay.recipes.{recipe}').SEATS
    return next(seat.prompt for seat in seats if seat.role == 'solver')


def _fields(prompt: str, question: str) -> dict[str, str]:
    return {'task' if prompt == 'task_solver' else 'question': question}


def check_question(config, codec: Codec, prompt: str, question: str) -> None:
    """Raises UserError for a question that is longer than its prompt may be."""
    chat = prompts.messages(
        config.prompts,
        prompt,
        family(config.tools.family).instructions,
        **_fields(prompt, question),
    )
    found, most = len(codec.render(chat)), config.rollout.prompt_tokens
    if found > most:
        raise UserError(
            f'the question is too long: {found} tokens with its prompt, {most} at most; shorten it'
        )


class Agent:
    """A solver with its weights in a single slot.

    Args:
      config: fields of configs/common.py; read are policy.dtype, sampler, rollout, tools, prompts and seed.
      folder: Hugging Face folder of the weights.
      codec: of that folder.
      search: what answers its queries.
      prompt: which prompt it reads (see `solver_prompt`).

    Raises:
      UserError: a folder that cannot be loaded.
    """

    def __init__(
        self, config, folder: pathlib.Path, codec: Codec, search: Search, prompt: str = 'solver'
    ):
        c, s = config.rollout, config.sampler
        dtype = 'float32' if jax.default_backend() == 'cpu' else config.policy.dtype
        model = hf.read_config(folder, dtype=dtype)
        mesh = sharding.make_mesh()
        sampler = SamplerConfig(
            slots=1,
            context=s.context,
            chunk=min(s.chunk, s.context),
            fill_rows=1,
            burst=4,  # tokens that a reader sees at a time
            put_rows=1,
            put_tokens=s.put_tokens,
            eos=codec.eos_ids,
        )
        params = transformer.published(model, hf.load(folder, model, mesh, progress=False))
        self._lane = Lane(Sampler(model, sampler, mesh), config.seed)
        self._scheduler = Scheduler(
            {'solver': self._lane}, deterministic=False, tool_timeout=c.tool_timeout
        )
        self._scheduler.publish('solver', params, 0)
        limits = Limits(c.max_turns, c.turn_tokens, c.observation_tokens)
        tools = family(config.tools.family)
        self._env = _Told(
            codec,
            tools,
            limits,
            search,
            max_queries=config.tools.max_queries,
            drop_thinking=c.drop_thinking,
        )
        self._config, self._prompt = config, prompt

    def ask(
        self,
        question: str,
        number: int,
        temperature: float = 0.0,
        tell: Tell = _silent,
        stoppable: bool = False,
    ) -> Trajectory | None:
        """The rollout on a question; None where it was stopped.

        Args:
          number: names the question: another number, another sample.
          temperature: 0 is greedy.
          tell: hears what happens while it happens.
          stoppable: SIGINT ends the rollout and nothing else (in the main thread only).

        Raises:
          UserError: the question is too long.
        """
        codec = self._env.codec
        check_question(self._config, codec, self._prompt, question)
        parts = Parts(tell, self._env.tools)
        env = dataclasses.replace(self._env, tell=tell, parts=parts)
        table = Table(
            self._scheduler,
            {'solver': Role('solver', 'solver', self._prompt, env)},
            self._config.prompts,
        )
        decoder = codecs.getincrementaldecoder('utf-8')('replace')

        def watch(identity: tuple[int, ...], ids: list[int]) -> None:
            parts.feed(
                decoder.decode(
                    b''.join(codec.token_bytes[i] for i in ids if i not in codec.eos_ids)
                )
            )

        async def episode() -> Trajectory:
            with _stopping() if stoppable else contextlib.nullcontext():
                (found,) = await table.ask(
                    'solver', (number,), 1, temperature, **_fields(self._prompt, question)
                )
            return found

        self._lane.watch = watch
        try:
            (found,) = self._scheduler.run([episode()])
            return found
        except asyncio.CancelledError:
            return None
        finally:
            self._lane.watch = None
            parts.close()


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """Inside, SIGINT cancels the running task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


def record(codec: Codec, question: str, trajectory: Trajectory) -> dict[str, Any]:
    """A rollout as JSON: question, answer (None without one), finish, turns and segments."""
    return {
        'question': question,
        'answer': answer_of(trajectory),
        'finish': trajectory.finish,
        'turns': [dataclasses.asdict(turn) for turn in trajectory.turns],
        'segments': list(segments(codec, trajectory)),
    }
