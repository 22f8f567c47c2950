"""Who says what is right where comparing strings does not: a policy on the same sampler, a server, or a rule.

What a judge writes is parsed strictly (objectives/verdicts.py). A reply that cannot be read, or never came, is None,
is counted, and is never taken for approval: an answer is then wrong, a gate is closed, a check has failed, a rubric
is not met, and a task without rubrics is no task.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import functools
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import openai

from zeroplay_jax.mini.world import rubrics_of
from zeroplay_jax.objectives import rewards, verdicts
from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.tokens import Untrusted
from zeroplay_jax.types import Json, TaskDropped, UserError

Rubric = dict[str, str]


class Judge(abc.ABC):
    """The questions that a recipe may put; `identity` names each within the run.

    Attributes:
      stats: reason code → count: 'asked', 'unread' (could not be parsed), 'failed' (no reply).
    """

    def __init__(self, most_failed: float = 1.0) -> None:
        self.stats: collections.Counter[str] = collections.Counter()
        self._most_failed = most_failed

    def check(self, stats: collections.Counter[str]) -> None:
        """Stops a run whose judge gives too few verdicts, before a batch is learnt from.

        Raises:
          UserError: more than the allowed share of what was asked failed or could not be read.
        """
        lost = stats['failed'] + stats['unread']
        if lost > self._most_failed * stats['asked']:
            raise UserError(
                f'{lost} of {stats["asked"]} judgements failed ({stats["failed"]}) or could not be read '
                f'({stats["unread"]}), more than config.judge.most_failed={self._most_failed}; mend the judge and go on'
            )

    @abc.abstractmethod
    async def correct(
        self, identity, question: str, answers: Sequence[str], given: str
    ) -> bool | None:
        """Whether `given` answers the question as one of the accepted answers does."""

    @abc.abstractmethod
    async def gate(self, identity, name: str, task: str, document: str) -> bool | None:
        """Whether a task passes the gate 'entities' (what it names can be found) or 'relevance' (to its document)."""

    @abc.abstractmethod
    async def rubrics(self, identity, task: str, document: str) -> list[Rubric] | None:
        """What a good answer to the task must do: [{'text', 'priority'}]."""

    @abc.abstractmethod
    async def grade(self, identity, task: str, answer: str, rubric: str) -> bool | None:
        """Whether the answer does what one rubric asks."""


class TextJudge(Judge):
    """A judge that reads prompts and writes text.

    Args:
      write: (identity, prompt name, fields) → the text, or None where none came.
      items: smallest and largest number of rubrics.
    """

    def __init__(
        self,
        write: Callable[..., Awaitable[str | None]],
        items: tuple[int, int],
        most_failed: float = 1.0,
    ):
        super().__init__(most_failed)
        self._write, self._items = write, items

    async def _ask(self, parse, identity, prompt, temperature=None, **fields):
        self.stats['asked'] += 1
        text = await self._write(identity, prompt, fields, temperature)
        if text is None:
            self.stats['failed'] += 1
            return None
        said = parse(text)
        self.stats['unread'] += said is None
        return said

    async def correct(self, identity, question, answers, given):
        fields = dict(question=question, answers=' | '.join(answers), given=given)
        return await self._ask(verdicts.verdict, identity, 'judge_answer', **fields)

    async def gate(self, identity, name, task, document):
        return await self._ask(
            verdicts.yes_no, identity, f'judge_{name}', task=task, document=document
        )

    async def rubrics(self, identity, task, document):
        low, high = self._items
        parse = lambda text: verdicts.rubrics(text, minimum=low, maximum=high)
        fields = dict(task=task, document=document, low=low, high=high)
        return await self._ask(
            parse, identity, 'judge_rubrics', 0.0, **fields
        )  # greedy, as in SCOPE

    async def grade(self, identity, task, answer, rubric):
        fields = dict(task=task, given=answer, rubric=rubric)
        return await self._ask(verdicts.grade, identity, 'judge_grade', **fields)


class RuleJudge(Judge):
    """Rules for worlds whose passages state plain facts, one to a sentence.

    A task is findable if it names a title, relevant if that title stands in its documents; its rubrics are the
    sentences of the last document, where the search for it ended, and an answer meets one that it repeats.
    """

    def __init__(self, titles: Callable[[], Iterable[str]], items: tuple[int, int]):
        super().__init__()
        self._find, self._items = titles, items

    @functools.cached_property
    def _titles(self) -> frozenset[str]:
        return frozenset(self._find())  # when first asked: most games never do

    def _named(self, task: str) -> set[str]:
        return {
            word
            for word in task.replace('.', ' ').replace("'", ' ').split()
            if word in self._titles
        }

    async def correct(self, identity, question, answers, given):
        self.stats['asked'] += 1
        return rewards.exact_match(given, answers)

    async def gate(self, identity, name, task, document):
        self.stats['asked'] += 1
        named = self._named(task)
        return bool(named) if name == 'entities' else any(title in document for title in named)

    async def rubrics(self, identity, task, document):
        self.stats['asked'] += 1
        _, _, text = document.rpartition('\n')[2].rpartition(') ')  # without its title
        low, high = self._items
        items = rubrics_of(text)[-high:]
        return items if len(items) >= low else None

    async def grade(self, identity, task, answer, rubric):
        self.stats['asked'] += 1
        fact = rewards.normalize_answer(rubric.removeprefix('State that '))
        return bool(fact) and fact in rewards.normalize_answer(answer)


def policy_writer(table, temperature: float):
    """Writes with the table's role 'judge', the frozen initial policy."""

    async def write(identity, prompt, fields, heat=None):
        try:
            (trajectory,) = await table.ask(
                'judge', identity, 1, temperature if heat is None else heat, prompt, **fields
            )
        except TaskDropped:  # longer than the judge can read
            return None
        # A verdict that was cut off may have gone on with "but".
        return trajectory.turns[-1].text if trajectory.finish == 'eos' else None

    return write


def endpoint_writer(config, prompt_set: str):
    """Writes through an OpenAI-compatible server (fields of `config.judge`); what fails for good, or is cut, is None.

    The key is read from OPENAI_API_KEY, never from the config, which every run writes to its workdir.
    """
    clients: dict[asyncio.AbstractEventLoop, openai.AsyncOpenAI] = {}

    def client() -> openai.AsyncOpenAI:
        loop = asyncio.get_running_loop()
        if loop not in clients:  # connections belong to the loop of a step
            clients.clear()
            key = os.environ.get('OPENAI_API_KEY', 'none')
            limits = dict(timeout=config.timeout, max_retries=config.retries)
            clients[loop] = openai.AsyncOpenAI(base_url=config.url, api_key=key, **limits)
        return clients[loop]

    async def write(identity, prompt, fields, heat=None) -> str | None:
        (message,) = prompts.messages(prompt_set, prompt, **fields)
        chat: list[Any] = [{'role': 'user', 'content': ''.join(map(_plain, message['content']))}]
        settings = dict(
            temperature=config.temperature if heat is None else heat, max_tokens=config.tokens
        )
        model = {'judge_rubrics': config.rubric_model, 'judge_grade': config.grade_model}.get(
            prompt
        ) or config.model
        try:
            reply = await client().chat.completions.create(model=model, messages=chat, **settings)
        except openai.OpenAIError:
            return None
        # A verdict that was cut off may have gone on with "but".
        whole = bool(reply.choices) and reply.choices[0].finish_reason != 'length'
        return reply.choices[0].message.content if whole else None

    return write


def _plain(part: str) -> str:
    """A part of a prompt for a server that tokenises it itself: foreign text must not become a control token there."""
    return part.replace('<', '<\u200b') if isinstance(part, Untrusted) else part


def document_of(facts: Sequence[Json]) -> str:
    """Passages as one text for a judge."""
    return '\n'.join(prompts.document_text(d) for d in facts)
