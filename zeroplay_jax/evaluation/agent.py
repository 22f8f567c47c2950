"""An agent that is asked one question at a time: the engine of a run with a single slot.

    role = build_role(config, open_codec(folder), corpus.source)
    agent = Agent(config, folder, role)
    trajectory = agent.ask('who wrote it', number=0, report=print)

`report` receives the rollout's events while it runs, as (kind, content): the policy's text and its
invalid calls (see `TagStream`); for a valid tool call 'call' with the `ToolCall`; and for every
call, also an invalid one, 'result' with the `ToolCall` and its passages, text or error. Texts are
exactly as the policy and the corpus wrote them: `render.clean` makes them safe to print.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import dataclasses
import io
import pathlib
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from zeroplay_jax.evaluation.question_sets import asked, at_temperature
from zeroplay_jax.evaluation.render import (
    Printer,
    Report,
    TagStream,
    clean,
    one_line_json,
    print_beside,
)
from zeroplay_jax.extras import load_extra
from zeroplay_jax.mini.question_form import QuestionForm
from zeroplay_jax.policy import hf, shape, sharding, transformer
from zeroplay_jax.retrieval import folder as index_folder
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.client import Client, Http, InProcess
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.rollout.environment import Environment, TurnEnd
from zeroplay_jax.rollout.prompts import Prompt, select
from zeroplay_jax.rollout.sampler import Sampler, SamplerConfig
from zeroplay_jax.rollout.scheduler import Scheduler
from zeroplay_jax.rollout.slots import SlotPool
from zeroplay_jax.rollout.tokens import Codec, open_codec, text_spans
from zeroplay_jax.selfplay.answers import final_answer, prompt_and_field
from zeroplay_jax.selfplay.context import Role, RolloutContext
from zeroplay_jax.selfplay.library import PAGE_WORDS, SearchableCorpus
from zeroplay_jax.selfplay.library_builder import held_out_corpus_and_questions
from zeroplay_jax.selfplay.recipe import Recipe, answering_recipe, asks_once, recipe_class
from zeroplay_jax.selfplay.role_environment import print_template_notes, role_environment
from zeroplay_jax.settings.kinds import ENGLISH_CHECKPOINT, is_server
from zeroplay_jax.tools.registry import DocumentSource, build_tools
from zeroplay_jax.types import Question, ToolCall, Trajectory, UserError

# Name of the only slot pool.
_WEIGHTS = 'policy'
# Tokens per device call. They appear on the terminal together: more would look jerky, fewer would cost more calls.
_DECODE_BURST = 4


@dataclasses.dataclass(frozen=True)
class AskedRole:
    """The role of a recipe that answers questions.

    Attributes:
      prompt: its prompt.
      field: the field that the user's question fills.
      env: its tools and limits.
      max_prompt_tokens: length of its longest prompt.
      answerer: the recipe, which answers (`Recipe.answer`).
      players: the roles that it asks, by name, which this policy plays: all, if it does not ask this one once.
      prompts: prompts by name.
    """

    prompt: Prompt
    field: str
    env: Environment
    max_prompt_tokens: int
    answerer: Recipe
    players: Mapping[str, Role]
    prompts: Mapping[str, Prompt]

    def prompt_ids(self, question: str) -> Int32[np.ndarray, ' length']:
        """Returns the token ids of the prompt with a question.

        Raises:
          UserError: the question is too long.
        """
        ids = self.env.prompt_ids(self.prompt, **{self.field: question})
        if len(ids) > self.max_prompt_tokens:
            raise UserError(
                f'the question is too long: {len(ids)} tokens with its prompt, '
                f'{self.max_prompt_tokens} at most; shorten it'
            )
        return ids

    @property
    def call_tags(self) -> dict[str, str]:
        """Returns {tag around a tool call: the tool that it calls}; '' if the tag does not determine the tool."""
        tools = list(self.env.tools)
        tool_of_shared_tag = tools[0] if len(tools) == 1 else ''
        tags = [stop.strip('</>') for stop in self.env.call_stops]
        return {tag: tag if tag in tools else tool_of_shared_tag for tag in tags}


def build_role(config, codec: Codec, source: DocumentSource) -> AskedRole:
    """Returns the role that `config.recipe` evaluates, with the tools of the config on one corpus.

    Raises:
      UserError: the role's prompt needs more than a question, or a tool cannot be used.
    """
    recipe = recipe_class(config.recipe)
    specifications = {role.name: role for role in recipe.roles(config)}
    specification = specifications[recipe.evaluated_role]
    templates = select(config.prompts, recipe.prompts)
    # The user's question goes into the prompt that the role was trained with; like an evaluation's, without rubrics.
    prompt, field = prompt_and_field(templates, specification.prompt, recipe.has_open_tasks)
    for needed in templates[prompt].inputs:
        if needed != field:
            raise UserError(
                f'recipe {config.recipe}: its role {specification.name} cannot be asked, because its prompt '
                f'{prompt!r} needs {{{needed}}}; give it a prompt with {{{field}}} alone'
            )
    tools = build_tools(config, source)
    if is_server(config.policy.path):
        # The request has the schemas of the tools, whatever the prompt says.
        templates = {**templates, prompt: dataclasses.replace(templates[prompt], tools='')}
    answerer = answering_recipe(config)
    # A role that answers alone is the only one that is asked.
    asked_roles = [specification] if asks_once(answerer) else specifications.values()
    players = {}
    for player in asked_roles:
        env, limit = role_environment(config, player, codec, tools)
        # Roles that only check or judge are greedy; that of the others is the user's (`at_temperature`).
        temperature = float(player.is_trained or player is specification)
        players[player.name] = Role(player.name, _WEIGHTS, player.prompt, env, temperature, limit)
    role = players[specification.name]
    return AskedRole(
        templates[prompt], field, role.env, role.prompt_tokens, answerer, players, templates
    )


def _ignore_event(kind: str, content: Any) -> None:
    """Default of `report`: does nothing."""


@dataclasses.dataclass(frozen=True)
class ReportingEnvironment(Environment):
    """An environment that reports the calls of its rollout. It serves one rollout, because `stream` has its state.

    Attributes:
      report: receives 'call' and 'result'.
      stream: reports the policy's text. `Agent` feeds it, this class closes it at the end of every turn. None: no text
        is reported.
    """

    report: Report = _ignore_event
    stream: TagStream | None = None

    def end_turn(self, text: str) -> TurnEnd:
        """Returns how the episode continues, as `Environment` does; reports the end of the text, then the call."""
        end = super().end_turn(text)
        call = end.call
        is_valid_call = call is not None and call.is_valid
        # The stream is closed before the call is reported: it may still hold back the last text of the turn.
        if self.stream is not None:
            self.stream.close(call_was_valid=is_valid_call)
        if is_valid_call:
            self.report('call', call)
        return end

    def observation(self, call: ToolCall, number: int = 0) -> np.ndarray:
        """Reports the result of a call and returns its observation."""
        self.report('result', call)
        return super().observation(call, number)


class Agent:
    """A policy with its weights and a single slot.

    Args:
      config: config of a run, of which policy.dtype, sampler, rollout.tool_timeout and seed are read.
      folder: Hugging Face folder of the weights; not read with a server's address in `policy.path`.
      role: prompt, tools and limits.

    Raises:
      UserError: a folder that cannot be loaded.
    """

    def __init__(self, config, folder: pathlib.Path | str, role: AskedRole):
        self._role = role
        # A `ServedModel`.
        self._model: Any = None
        # Not deterministic: a tool call ends after the timeout, so that a user does not wait without end.
        self._scheduler = Scheduler(
            {}, deterministic=False, tool_timeout=config.rollout.tool_timeout
        )
        if is_server(config.policy.path):
            # Every request that fails is reported.
            served = load_extra('served_policy')
            self._model = served.ServedModel(config, most_failures=1)
        else:
            self._load(config, pathlib.Path(folder))

    def _load(self, config, folder: pathlib.Path) -> None:
        """Loads the weights into a slot of the scheduler."""
        mesh = sharding.make_mesh()
        # CPUs emulate bfloat16 slowly.
        dtype = 'float32' if jax.default_backend() == 'cpu' else config.policy.dtype
        model = hf.read_config(folder, dtype=dtype)
        settings = config.sampler
        warning = shape.check_context(folder, settings.context, 'sampler.context')
        if warning:
            print(f'warning: {warning}', file=sys.stderr)
        sampler_config = SamplerConfig(
            slots=1,
            context=settings.context,
            chunk=min(settings.chunk, settings.context),
            fill_rows=1,
            burst=_DECODE_BURST,
            put_rows=1,
            eos=self._role.env.codec.eos_ids,
        )
        # No progress bar, because the command shows a clock while it loads.
        params = hf.load(folder, model, mesh, progress=False)
        pool = SlotPool(Sampler(model, sampler_config, mesh), config.seed)
        self._scheduler.pools[_WEIGHTS] = pool
        self._scheduler.weights.publish(_WEIGHTS, transformer.published(model, params))

    def ask(
        self,
        question: str,
        number: int,
        temperature: float = 0.0,
        report: Report = _ignore_event,
        stoppable: bool = False,
    ) -> Trajectory | None:
        """Returns the rollout on a question; None if it was stopped. One question at a time.

        Args:
          number: identity of the question, from which the randomness of its sample derives (with the seed).
          temperature: 0 is greedy.
          report: receives the events while the rollout runs, see the module.
          stoppable: whether SIGINT ends this rollout instead of the process (in the main thread only).

        Raises:
          UserError: the question is too long.
        """
        self._role.prompt_ids(question)
        stream = TagStream(report, self._role.call_tags)
        pools = self._scheduler.pools.values()

        async def episode() -> Trajectory:
            with _cancelled_by_interrupt() if stoppable else contextlib.nullcontext():
                return await self._answer(question, (number,), temperature, report, stream)

        for pool in pools:
            pool.on_tokens = _text_feeder(self._role.env.codec, stream)
        if self._model is not None:
            self._model.on_text = stream.feed
        try:
            (trajectory,) = self._scheduler.run([episode()])
            return trajectory
        except asyncio.CancelledError:
            return None
        finally:
            for pool in pools:
                pool.on_tokens = None
            # Reports the end of a turn that no stop string ended, or that was stopped.
            stream.close()

    async def _answer(
        self,
        question: str,
        identity: tuple[int, ...],
        temperature: float,
        report: Report,
        stream: TagStream,
    ) -> Trajectory:
        """Returns the rollout with which the recipe answers; all its rollouts are reported."""
        answerer = self._role.answerer
        roles = at_temperature(self._role.players, temperature)
        for name, role in roles.items():
            # New environments per question, because their stream has the state of one rollout.
            env = ReportingEnvironment(**vars(role.env), report=report, stream=stream)
            roles[name] = dataclasses.replace(role, env=env)
        context = RolloutContext(self._scheduler, roles, self._role.prompts, model=self._model)
        # A user has no rubrics; with one, the recipe sees an open task.
        rubrics = ({'text': question},) if answerer.has_open_tasks else ()
        asked_question = Question(question, rubrics=rubrics)
        with asked(asked_question, 'rollout.prompt_tokens or config.sampler.context'):
            return await answerer.answer(context, asked_question, identity)


def _text_feeder(codec: Codec, stream: TagStream):
    """Returns a listener (`SlotPool.on_tokens`) that feeds the text of newly sampled tokens to a stream."""
    # The decoder is incremental, because a token may end inside a character.
    decoder = codecs.getincrementaldecoder('utf-8')('replace')
    last: tuple[int, ...] = ()

    def feed(identity: tuple[int, ...], ids: list[int]) -> None:
        nonlocal last
        # Rollouts follow one another in the only slot, and one that no stop string ended leaves its turn open.
        if identity != last:
            stream.close()
            decoder.reset()
        last = identity
        # The end-of-turn token is not text of the policy.
        pieces = [codec.token_bytes[token] for token in ids if token not in codec.eos_ids]
        stream.feed(decoder.decode(b''.join(pieces)))

    return feed


@contextlib.contextmanager
def _cancelled_by_interrupt() -> Iterator[None]:
    """Makes SIGINT cancel the running task inside the block; only in the main thread."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    # Restored below by hand: asyncio resets SIGINT to Python's handler, not to the previous one.
    previous_handler = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, previous_handler)


def trajectory_record(codec: Codec, question: str, trajectory: Trajectory) -> dict[str, Any]:
    """Returns a rollout as a JSON-able dict.

    Keys: 'question'; 'answer', None without one; 'finish' (`Trajectory.finish`); 'turns', the fields of each `Turn`
    with its call; 'segments', the text of the context by author (`text_spans`).
    """
    return {
        'question': question,
        'answer': final_answer(trajectory),
        'finish': trajectory.finish,
        'turns': [dataclasses.asdict(turn) for turn in trajectory.turns],
        'segments': list(text_spans(codec, trajectory)),
    }


# ---- a session of questions ------------------------------------------------------------------------
#
# A loaded policy answers questions; each rollout is printed or written as JSON.


# Seconds that a search server may take to become ready.
READY_SECONDS = 5.0
# `Trajectory.finish` → reason that is printed if the rollout has no answer. 'answer' is among the keys: a rollout can
# end with the closing tag of an answer that has no opening tag.
ENDINGS = {
    'answer': 'its tags do not match',
    'malformed': 'it is inside a tool call that was never closed',
    'eos': 'the policy ended without one',
    'turn_tokens': 'a turn was longer than the limit',
    'response_tokens': 'turns and results together were longer than the limit of a response',
    'turns': 'the policy called a tool in its last turn too, in which it had to answer (--turns)',
    'context': 'its context is full',
}


@dataclasses.dataclass(eq=False)
class Session:
    """An agent, its corpus and the printer of its answers.

    Args:
      config: config of a run, with which the policy is asked; see `open_ask_corpus` for what is overwritten.
      folder: Hugging Face folder of the policy, or a server's address as a text.
      printer: prints the rollouts.
      temperature: 0 is greedy.
      as_json: write one JSON object per question to stdout instead of printing the rollout.
      first_question: a question whose length is checked before the weights are loaded; None: no check.
      form: the only questions that the policy reads, if it is a small one; another question, or one without an
        answer, gives a note.

    Raises:
      UserError: a file or server that cannot be used, or a first question that is too long.
    """

    config: Any
    folder: pathlib.Path | str
    printer: Printer
    _: dataclasses.KW_ONLY
    temperature: float = 0.0
    as_json: bool = False
    first_question: str | None = None
    form: QuestionForm | None = None

    def __post_init__(self) -> None:
        self._form_was_noted = False
        # Texts for a server pass through that tokenizer.
        folder = ENGLISH_CHECKPOINT if isinstance(self.folder, str) else self.folder
        self._codec = open_codec(folder)
        print_template_notes(self.config, self._codec, 'zeroplay_jax.ask: ')
        self._corpus = open_ask_corpus(self.config)
        self._role = build_role(self.config, self._codec, self._corpus.source)
        # The question is checked before the weights are loaded, which takes longest.
        if self.first_question is not None:
            self._role.prompt_ids(self.first_question)
        self._agent = Agent(self.config, self.folder, self._role)
        self._question_count = 0

    def answer(self, question: str, stoppable: bool = False) -> None:
        """Asks the policy and prints the rollout, or its JSON record with `as_json`.

        A stopped rollout gives a note and no record. Failed searches give a warning on stderr.

        Args:
          stoppable: whether Ctrl-C ends this answer instead of the command.

        Raises:
          UserError: the question is too long.
        """
        # A question that is too long is refused before it gets a number, so that later samples do not depend on it.
        self._role.prompt_ids(question)
        number = self._question_count
        self._question_count += 1
        has_other_form = self.form is not None and not self.form.pattern.search(question)
        if has_other_form:
            self._note_form()
        with contextlib.ExitStack() as clock:
            # The first answer waits for XLA to compile.
            clock.enter_context(progress.clock('thinking'))

            def report(kind: str, content: Any) -> None:
                """Prints an event, unless the rollout is written as JSON."""
                if not self.as_json:
                    # The clock would overwrite the answer on the same terminal.
                    clock.close()
                    self.printer.report(kind, content)

            trajectory = self._agent.ask(
                question, number, self.temperature, report, stoppable=stoppable
            )
        # None: the user stopped the answer.
        if trajectory is None:
            self.printer.line('note', 'stopped', label='')
            return
        record = trajectory_record(self._codec, question, trajectory)
        if self.as_json:
            record['policy'] = str(self.folder)
            record['search'] = self._corpus.description
            record['temperature'] = self.temperature
            record['seed'] = self.config.seed
            print(one_line_json(record), flush=True)
        elif record['answer'] is None:
            reason = ENDINGS[trajectory.finish]
            if has_other_form:
                reason += '; the question has another form than those that this policy reads'
            self.printer.line('note', f'no answer: {reason}', label='')
            self._note_form()
        warning = self._corpus.warning()
        if warning:
            print(f'zeroplay_jax.ask: {clean(warning)}', file=sys.stderr)

    def _note_form(self) -> None:
        """Prints once which questions a small policy reads; on stderr where stdout has JSON."""
        if self.form is None or self._form_was_noted:
            return
        self._form_was_noted = True
        if self.as_json:
            print(f'zeroplay_jax.ask: {self.form.hint}', file=sys.stderr, flush=True)
        else:
            self.printer.line('note', self.form.hint)

    def try_to_answer(self, question: str, stoppable: bool = False) -> bool:
        """Calls `answer`; prints a user error as one line on stderr. Returns False after such an error, else True."""
        try:
            self.answer(question, stoppable)
        except UserError as error:
            print(f'zeroplay_jax.ask: {error}', file=sys.stderr, flush=True)
            return False
        return True

    def greet(self, remark: str = '') -> None:
        """Prints what is asked (policy, corpus, example questions, keys), above the first prompt of the terminal.

        Args:
          remark: text after the folder of the policy.
        """
        self.printer.line('note', f'{self.folder}{remark}', label='policy')
        self.printer.line('note', self._corpus.description, label='search')
        if self.form is not None:
            self.printer.line('note', self.form.hint, label='asks')
            self._form_was_noted = True
        for question in self._corpus.examples:
            self.printer.line('note', question, label='try')
        self.printer.line('note', 'Ctrl-C stops an answer, Ctrl-D ends', label='')


# Narrowest column of a rollout beside another one, in characters.
_NARROWEST = 60


@dataclasses.dataclass(frozen=True)
class SeveralSessions:
    """Two policies or more, asked the same questions: beside each other on a wide terminal, else one below the other.

    Attributes:
      sessions: of the policies. Methods are those of `Session`.
    """

    sessions: Sequence[Session]

    @property
    def as_json(self) -> bool:
        return self.sessions[0].as_json

    @property
    def printer(self) -> Printer:
        return self.sessions[0].printer

    def greet(self, remark: str = '') -> None:
        for session in self.sessions:
            session.greet(remark)

    def try_to_answer(self, question: str, stoppable: bool = False) -> bool:
        columns = shutil.get_terminal_size().columns
        is_wide = columns >= _NARROWEST * len(self.sessions) and sys.stdout.isatty()
        is_beside = is_wide and not self.as_json
        texts = []
        is_asked = True
        for session in self.sessions:
            text = io.StringIO()
            texts.append(text)
            with contextlib.redirect_stdout(text) if is_beside else contextlib.nullcontext():
                if not self.as_json:
                    session.printer.line('note', str(session.folder), label='policy')
                is_asked &= session.try_to_answer(question, stoppable)
        if is_beside:
            print_beside([text.getvalue() for text in texts], columns)
        return is_asked


# ---- the corpus of `ask` ---------------------------------------------------------------------------


# One question of each of these hop counts is shown as an example.
_EXAMPLE_HOPS = (1, 2)


@dataclasses.dataclass(frozen=True)
class OpenCorpus:
    """A corpus that was opened.

    Attributes:
      source: searches and opens the documents.
      description: names the corpus in one line.
      examples: questions that the corpus answers; none for a corpus of the user.
    """

    source: SearchableCorpus
    description: str
    examples: tuple[str, ...] = ()

    def warning(self) -> str:
        """Returns an error text if too many searches failed, or none found a passage, since the last call; else ''.

        Resets the client's counters.

        The limit is 0 for a folder or a server (any failure counts) and `retrieval.max_failure_rate` for the worlds.
        """
        client = self.source.client
        failure = ''
        try:
            client.check_failure_rate()
        except RetrievalError as error:
            failure = str(error)
        # Resets the counters, so that a failure is reported once.
        counts = client.metrics()
        answered = counts['search/answered']
        if not failure and answered and answered == counts['search/empty']:
            failure = (
                f'none of the {answered:.0f} searches found a passage in {self.description}; check that its index has '
                'passages, in the language of the question'
            )
        return failure


def open_ask_corpus(config) -> OpenCorpus:
    """Opens the corpus of `config.retrieval`.

    For 'world': one corpus of all training and held-out worlds, with examples.

    Args:
      config: config of the run; for 'world', eval.questions and eval.hops are overwritten.

    Raises:
      UserError: the folder is not an index, or the server does not answer in time.
    """
    retrieval = config.retrieval
    if retrieval.kind == 'world':
        config.eval.update(questions=1, hops=_EXAMPLE_HOPS)
        source, questions = held_out_corpus_and_questions(config)
        description = (
            f'the miniature world: worlds {config.world.train} and {config.world.evaluation}'
        )
        return OpenCorpus(source, description, tuple(question.text for question in questions))
    backend: Http | InProcess
    top_k = config.tools.top_k
    if retrieval.kind == 'http':
        description = retrieval.url
        # A rollout abandons a tool call after `tool_timeout`, so two attempts have to fit into it.
        backend = Http(
            retrieval.url, timeout=config.rollout.tool_timeout / 2, retries=1, patience=0
        )
    else:
        path = pathlib.Path(retrieval.path)
        index = index_folder.open_index(path, encoder_folder=retrieval.encoder or None)
        description = f'{path}, {len(index)} passages'
        backend = InProcess(index, index_folder.fingerprint(path))
        # An index cannot return more passages than it has.
        top_k = min(top_k, len(index))
    # With a limit of 0, every failed search is reported to the user.
    client = Client(backend, max_failure_rate=0.0)
    client.wait_until_ready(READY_SECONDS)
    return OpenCorpus(SearchableCorpus(client, top_k, PAGE_WORDS), description)
