"""A policy that is asked one question after the other: roles and corpus of a run, with a single slot.

Every turn is printed as soon as it ends, or the whole rollout written as JSON. Texts are exactly as the policy and the
corpus wrote them until `render` makes them safe to print.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from zeroplay_jax import api
from zeroplay_jax.configuration import fields
from zeroplay_jax.evaluation.answering import asked, at_temperature, check_prompt
from zeroplay_jax.evaluation.render import Printer, clean, one_line_json
from zeroplay_jax.extras import load_extra
from zeroplay_jax.mini.question_form import QuestionForm
from zeroplay_jax.policy import hf, sharding, transformer
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.rollout.environment import Environment, TurnEnd
from zeroplay_jax.rollout.prompts import select
from zeroplay_jax.rollout.tokens import open_codec, text_spans
from zeroplay_jax.run import build
from zeroplay_jax.selfplay.answers import final_answer
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.recipe import answering_recipe, asks_once
from zeroplay_jax.settings.kinds import ENGLISH_CHECKPOINT, is_server
from zeroplay_jax.tools.registry import build_tools
from zeroplay_jax.types import Json, Question, ToolCall, Trajectory, UserError

# Name of the weights of all roles, and of their only slot.
_WEIGHTS = 'policy'
# One question of each of these hop counts is shown as an example.
_EXAMPLE_HOPS = (1, 2)
# `Trajectory.finish` → reason that is printed if the rollout has no answer. 'answer' is among the keys: a rollout can
# end with the closing tag of an answer that has no opening tag.
ENDINGS = {
    'answer': 'its tags do not match',
    'malformed': 'it is inside a tool call that was never closed',
    'eos': 'the policy ended without one',
    'turn_tokens': 'a turn was longer than the limit',
    'response_tokens': 'turns and results together were longer than the limit of a response',
    'turns': 'the policy called a tool in its last turn too, in which it had to answer (rollout.max_turns)',
    'context': 'its context is full',
}


def _settings(config: Any) -> Any:
    """Returns a copy of a run's config for one question at a time on this machine."""
    config = api.on_this_machine(config.copy_and_resolve_references())
    sampler = {'slots': 1, 'fill_rows': 1, 'put_rows': 1}
    sampler['context'] = config.sampler.context
    sampler['chunk'] = min(config.sampler.chunk, config.sampler.context)
    config.sampler = fields.default_config().sampler
    config.sampler.update(sampler)
    # A tool call ends after the timeout, so that a user does not wait without end.
    config.rollout.deterministic = False
    config.rollout.failed = 'keep'
    # Of the user's corpora every failed search is told.
    if config.retrieval.kind != 'world':
        config.retrieval.max_failure_rate = 0.0
    config.eval.update(questions=1, hops=_EXAMPLE_HOPS)
    # A clock runs while the policy is loaded.
    config.progress = False
    if jax.default_backend() == 'cpu':
        # CPUs emulate bfloat16 slowly.
        config.policy.dtype = 'float32'
    return config


def open_roles(config: Any, opened: build.PolicyFolder, corpus: Any) -> RolloutContext:
    """Returns the roles that answer a question, all sampled by one policy in one slot, without weights.

    Args:
      config: as `_settings` returns it.
      opened: the policy.
      corpus: what the tools read.
    """
    recipe = answering_recipe(config)
    specifications, weights = [], {}
    for role in recipe.roles(config):
        if role.name == recipe.evaluated_role or not asks_once(recipe):
            # A trained role stays one: it has its own limit of prompts, and a temperature.
            weights[role.name] = _WEIGHTS
            if not role.is_trained:
                role = dataclasses.replace(role, weights_from=_WEIGHTS)
            specifications.append(role)
    templates = select(config.prompts, recipe.prompts)
    context = build.rollout_context(
        config, specifications, opened, build_tools(config, corpus), templates, weights
    )
    if context.model is not None:
        # Every request that fails is reported.
        model = load_extra('served_policy').ServedModel(config, most_failures=1)
        # The request has the schemas of the tools, whatever the prompts say.
        templates = {name: dataclasses.replace(one, tools='') for name, one in templates.items()}
        context = dataclasses.replace(context, model=model, prompts=templates)
    # Roles that only check or judge are greedy; the user's temperature is that of the others.
    asked = {one.name for one in specifications if one.is_trained} | {recipe.evaluated_role}
    roles = dict(context.roles)
    for name in asked:
        roles[name] = dataclasses.replace(roles[name], temperature=1.0)
    return dataclasses.replace(context, roles=roles)


# Called with a turn's text, and the call with which it ended.
_OnTurn = Callable[[str, ToolCall | None], None]


@dataclasses.dataclass(frozen=True)
class _ShownEnvironment(Environment):
    """An environment that shows the turns that a stop string ends, and the results of calls."""

    _: dataclasses.KW_ONLY
    on_turn: _OnTurn
    on_result: Callable[[ToolCall], None]

    def read_turn(self, text: str) -> TurnEnd:
        end = super().read_turn(text)
        self.on_turn(text, end.call)
        return end

    def observation(self, call: ToolCall, number: int = 0) -> np.ndarray:
        self.on_result(call)
        return super().observation(call, number)


def _showing(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a way of asking a role that shows the last turns of its rollouts that no stop string ended."""

    async def shown(context: _ShownContext, role: str, *arguments: Any, **named: Any) -> Any:
        rollouts = await sample(context, role, *arguments, **named)
        for rollout in rollouts if isinstance(rollouts, list) else [rollouts]:
            text = rollout.turns[-1].text if rollout.turns else ''
            if not text.endswith(context.roles[role].env.stops):
                context.on_turn(text, None)
        return rollouts

    return shown


@dataclasses.dataclass(frozen=True)
class _ShownContext(RolloutContext):
    """A context that shows the last turns of rollouts that no stop string ended."""

    _: dataclasses.KW_ONLY
    on_turn: _OnTurn

    ask = _showing(RolloutContext.ask)
    go_on = _showing(RolloutContext.go_on)
    fork = _showing(RolloutContext.fork)


class Session:
    """A loaded policy and its corpus, and what is printed of its answers.

    Args:
      config: config of a run, with which the policy is asked.
      folder: Hugging Face folder of the policy, or a server's address as a text.
      printer: prints the rollouts.
      temperature: 0 is greedy.
      as_json: write one JSON object per question to stdout instead of printing the rollout.
      first_question: a question whose length is checked before the weights are loaded; None: no check.
      form: the only questions that the policy reads, if it is a small one; the first other question gives a note.

    Raises:
      UserError: a file or server that cannot be used, or a first question that is too long.
    """

    def __init__(
        self,
        config: Any,
        folder: pathlib.Path | str,
        printer: Printer,
        *,
        temperature: float = 0.0,
        as_json: bool = False,
        first_question: str | None = None,
        form: QuestionForm | None = None,
    ):
        self.folder, self.printer, self.as_json = folder, printer, as_json
        self._form = form
        self._temperature, self._seed = temperature, config.seed
        config = _settings(config)
        config.policy.path = str(folder)
        self._recipe = answering_recipe(config)
        if is_server(config.policy.path):
            # Texts pass through that tokenizer.
            place = ENGLISH_CHECKPOINT
            opened = build.PolicyFolder(
                place, hf.read_config(place), sharding.make_mesh(), open_codec(place)
            )
        else:
            opened = build.open_policy(config)
        index = api.open_corpus(config, api.READY_SECONDS)
        # As the user named it, not by its fingerprint.
        places = {'http': config.retrieval.url, 'folder': config.retrieval.path}
        about = places.get(config.retrieval.kind, index.about)
        self._index = dataclasses.replace(index, about=about)
        self._context = open_roles(config, opened, self._index.corpus)
        self._codec = opened.codec
        # The question is checked before the weights are loaded, which takes longest.
        if first_question is not None:
            self._checked(first_question)
        if self._context.model is None:
            params = hf.load(opened.folder, opened.model, opened.mesh, progress=False)
            published = transformer.published(opened.model, params)
            self._context.scheduler.weights.publish(_WEIGHTS, published)
        self._question_count = 0

    def _checked(self, text: str) -> Question:
        """Returns what the recipe is asked; raises UserError if it is too long."""
        # A user has no rubrics; with one, the recipe sees an open task.
        rubrics = ({'text': text},) if self._recipe.has_open_tasks else ()
        question = Question(text, rubrics=rubrics)
        check_prompt(self._context, self._recipe.evaluated_role, question)
        return question

    def answer(self, text: str, stoppable: bool = False) -> None:
        """Asks the policy and prints the rollout, or its JSON record with `as_json`.

        A stopped rollout gives a note and no record. Failed searches give a warning on stderr.

        Args:
          stoppable: whether Ctrl-C ends this answer instead of the command.

        Raises:
          UserError: the question is too long.
        """
        # A question that is too long is refused before it gets a number, so that later samples do not depend on it.
        question = self._checked(text)
        number = self._question_count
        self._question_count += 1
        if self._form is not None and not self._form.pattern.search(text):
            # Its answer would be nonsense.
            raise UserError(self._form.hint)
        trajectory = self._ask(question, number, stoppable)
        if trajectory is None:
            self.printer.line('note', 'stopped', label='')
            return
        answer = final_answer(trajectory)
        if self.as_json:
            print(one_line_json(self._record(text, trajectory)), flush=True)
        elif answer is None:
            reason = ENDINGS[trajectory.finish]
            self.printer.line('note', f'no answer: {reason}', label='')
        warning = search_warning(self._index)
        if warning:
            print(f'zeroplay ask: {clean(warning)}', file=sys.stderr)

    def _ask(self, question: Question, number: int, stoppable: bool) -> Trajectory | None:
        """Returns the rollout with which the recipe answers, showing all of its rollouts; None if it was stopped.

        `number` is the identity of the question, from which, with the seed, the randomness of its sample derives.
        """
        context, role = self._context, self._context.roles[self._recipe.evaluated_role]
        tools = list(role.env.tools)
        # '' where the tag around a call does not determine the tool.
        tool_of_shared_tag = tools[0] if len(tools) == 1 else ''
        tags = [stop.strip('</>') for stop in role.env.call_stops]
        call_tags = {tag: tag if tag in tools else tool_of_shared_tag for tag in tags}

        with contextlib.ExitStack() as clock:

            def show(print_it: Callable[[], None]) -> None:
                """Prints something, unless the rollout is written as JSON."""
                if not self.as_json:
                    # The clock would overwrite it on the same terminal.
                    clock.close()
                    print_it()
                    clock.enter_context(progress.clock('thinking'))

            def on_turn(text: str, call: ToolCall | None) -> None:
                show(lambda: self.printer.turn(text, call, call_tags))

            def on_result(call: ToolCall) -> None:
                show(lambda: self.printer.result(call))

            roles = at_temperature(context.roles, self._temperature)
            for name, one in roles.items():
                env = _ShownEnvironment(**vars(one.env), on_turn=on_turn, on_result=on_result)
                roles[name] = dataclasses.replace(one, env=env)
            shown = _ShownContext(**(vars(context) | {'roles': roles}), on_turn=on_turn)

            async def episode() -> Trajectory:
                with _cancelled_by_interrupt() if stoppable else contextlib.nullcontext():
                    with asked(question, 'rollout.prompt_tokens or config.sampler.context'):
                        return await self._recipe.answer(shown, question, (number,))

            # The first answer waits for XLA to compile.
            clock.enter_context(progress.clock('thinking'))
            try:
                (trajectory,) = context.scheduler.run([episode()])
                return trajectory
            except asyncio.CancelledError:
                return None

    def _record(self, question: str, trajectory: Trajectory) -> Json:
        """Returns a rollout as JSON: turns with their calls, and the text of the context by author (`text_spans`)."""
        return {
            'question': question,
            'answer': final_answer(trajectory),
            'finish': trajectory.finish,
            'turns': [dataclasses.asdict(turn) for turn in trajectory.turns],
            'segments': list(text_spans(self._codec, trajectory)),
            'policy': str(self.folder),
            'search': self._index.about,
            'temperature': self._temperature,
            'seed': self._seed,
        }

    def greet(self) -> None:
        """Prints what is asked: policy, corpus, example questions, keys."""
        lines = [('policy', str(self.folder)), ('search', self._index.about)]
        if self._form is not None:
            lines.append(('asks', self._form.hint))
        lines += [('try', question.text) for question in self._index.questions]
        lines.append(('', 'Ctrl-C stops an answer, Ctrl-D ends'))
        for label, text in lines:
            self.printer.line('note', text, label=label)


def search_warning(index: api.Index) -> str:
    """Returns an error text if too many searches failed, or none found a passage, since the last call; else ''.

    The limit is `retrieval.max_failure_rate`. Resets the counters, so that a failure is reported once.
    """
    client = index.corpus.client
    failure = ''
    try:
        client.check_failure_rate()
    except RetrievalError as error:
        failure = str(error)
    counts = client.metrics()
    answered = counts['search/answered']
    if not failure and answered and answered == counts['search/empty']:
        failure = (
            f'no search found a passage in {index.about} (0 of {answered:.0f}); check that its index has '
            'passages, in the language of the question'
        )
    return failure


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
