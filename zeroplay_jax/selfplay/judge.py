"""Judges: they give verdicts by a policy on the same sampler, by a server, or by a rule.

Replies are parsed strictly. An unparsable or missing verdict is `None`, is counted, and never means approval; each
caller decides how to treat it.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from zeroplay_jax.mini import facts
from zeroplay_jax.objectives.answers import exact_match, extract_last, normalize_answer
from zeroplay_jax.selfplay import verdicts
from zeroplay_jax.tools.base import FailureLog
from zeroplay_jax.types import TaskDropped, Trajectory, UserError

Identity = tuple[int, ...]
Rubric = dict[str, str]
# (`Judge.context`, identity, prompt name, fields, temperature; None: the judge's) → the reply, or a `Judgement` without
# verdicts. Raises NoReply.
Writer = Callable[[Any, Identity, str, Mapping[str, Any], float | None], Awaitable[Any]]
# Characters of a failure or of an unreadable reply that are logged.
_QUOTED_CHARACTERS = 160
# Names of the prompts that grade an answer by one rubric, and that write rubrics.
GRADE_PROMPT = 'judge.grade'
RUBRICS_PROMPT = 'judge.rubrics'
# Name of every prompt of a judgement → the method of `Judge` that asks with it.
PROMPTS = {
    'judge.answer': 'correct',
    'checker': 'answer',
    'judge.entities': 'gate',
    'judge.relevance': 'gate',
    RUBRICS_PROMPT: 'rubrics',
    GRADE_PROMPT: 'grade',
}


class NoReply(Exception):
    """Raised by a `Writer` that has no whole reply; the message is the reason.

    Args:
      is_final: whether the judge did reply, without a verdict: a refusal, which counts as unread.
    """

    def __init__(self, reason: str, is_final: bool = False):
        super().__init__(reason)
        self.is_final = is_final


class Outage(NoReply):
    """The server of a judge was down, too slow or broken, which says nothing about what was to be judged."""


@dataclasses.dataclass
class Judgement:
    """A judgement by a role that the step trains (`Recipe.judge_roles`).

    Attributes:
      role: the role.
      identity: names it within the run.
      prompt, fields: name of the prompt, and values of its fields: 'question', 'answers' and 'given' of 'judge.answer',
        'question' and 'documents' of 'checker', 'task', 'given' and 'rubric' of 'judge.grade'.
      rollouts: its replies, `config.<role>.samples` of them.
      verdicts: per reply its verdict; None: it could not be read.
      verdict: the most frequent one, which counts; None without any.
    """

    role: str
    identity: Identity
    prompt: str
    fields: Mapping[str, Any]
    rollouts: Sequence[Trajectory]
    verdicts: Sequence[Any] = ()
    verdict: Any = None


# Those that the episode to which the running task belongs has asked for.
judgements_of_episode: contextvars.ContextVar[list[Judgement]] = contextvars.ContextVar(
    'judgements'
)


class Judge:
    """Judgements that a recipe may request, read from replies to prompts; `identity` names each of them within the run.

    Every method returns None if the judge gave no verdict that could be parsed. Every judgement is counted in `stats`.

    Args:
      write: returns the reply to a prompt (`policy_writer`, `endpoint_writer`).
      rubric_count: smallest and largest number of rubrics of a task.
      max_failure_rate: `config.judge.max_failure_rate`.
      drops_failed: whether an `Outage` raises TaskDropped('judge_failed'), as in training.

    Attributes:
      context: the `RolloutContext` that the judge is bound to; None before. Not annotated, because its module imports
        this one.
      stats: counts of this process since then: 'asked' (all), 'unread' (reply could not be parsed), 'failed' (no
        reply), 'rubrics_…' (what was repaired in lists of rubrics, by kind: `verdicts.rubrics`).
      remedy: what the error of a run with too few verdicts advises.
      last_failure: why this process got no verdict the last time; '' if it always got one.
      last_lost: the count of `stats` for that judgement, 'failed' or 'unread'; '' if there was none.
    """

    remedy = 'repair the judge and run the same command again'

    def __init__(
        self,
        write: Writer,
        rubric_count: tuple[int, int],
        max_failure_rate: float = 1.0,
        drops_failed: bool = False,
    ):
        self.context: Any = None
        self.stats: collections.Counter[str] = collections.Counter()
        self.last_failure = ''
        self.last_lost = ''
        self._write = write
        self._rubric_count = rubric_count
        self._max_failure_rate = max_failure_rate
        self._drops_failed = drops_failed
        self._failure_log = FailureLog('judge')

    def bound(self, context: Any) -> Self:
        """Returns a judge that asks for its rollouts in a context, and counts the judgements for it."""
        judge = copy.copy(self)
        judge.context = context
        judge.stats = collections.Counter()
        return judge

    def _add_failure(self, count: str, reason: str) -> None:
        """Counts a judgement without a verdict ('failed' or 'unread'), logs its reason and remembers it."""
        self.stats[count] += 1
        # Logs and error lines are UTF-8, which has no half of a surrogate pair.
        readable = reason.encode(errors='backslashreplace').decode()
        # One line, also of a reply that is an HTML page.
        self.last_failure = ' '.join(readable.split())[:_QUOTED_CHARACTERS]
        self.last_lost = count
        self._failure_log.add(self.last_failure)

    def check_failure_rate(self, stats: collections.Counter[str]) -> None:
        """Stops a run whose judge gives too few verdicts; called before an update or an evaluation's results are used.

        Args:
          stats: counts of the judgements to check, summed over processes.

        Raises:
          UserError: more than `judge.max_failure_rate` of the judgements failed or could not be parsed.
        """
        # Single failures are normal, and their rows are left out. At a high rate the remaining rows would be
        # a biased sample.
        lost = stats['failed'] + stats['unread']
        if lost > self._max_failure_rate * stats['asked']:
            # Other processes may have had the failures.
            reason = f' (the last: {self.last_failure})' if self.last_failure else ''
            raise UserError(
                f'{lost} of {stats["asked"]} judgements failed ({stats["failed"]}) or could not be '
                f'read ({stats["unread"]}), more than '
                f'config.judge.max_failure_rate={self._max_failure_rate}{reason}; {self.remedy}'
            )

    async def _ask(
        self,
        parse: Callable[[str], Any],
        identity: Identity,
        prompt: str,
        temperature: float | None = None,
        **fields: Any,
    ) -> Any:
        """Returns `parse` of the reply to a prompt; None if there is no reply or `parse` returns None. Counts it.

        Args:
          prompt: name of the prompt; `fields` are the values of its fields.
          temperature: None: that of the writer.
        """
        self.stats['asked'] += 1
        try:
            reply = await self._write(self.context, identity, prompt, fields, temperature)
        except NoReply as error:
            self._add_failure('unread' if error.is_final else 'failed', str(error))
            if self._drops_failed and isinstance(error, Outage):
                raise TaskDropped('judge_failed') from None
            return None
        # The request is not repeated: sampling until a reply parses would favour verdicts that are easy to write.
        texts = [reply]
        if isinstance(reply, Judgement):
            # One that was cut off has no verdict.
            texts = [one.turns[-1].text if one.finish == 'eos' else '' for one in reply.rollouts]
        parsed = [parse(text) for text in texts]
        readable = [verdict for verdict in parsed if verdict is not None]
        # The first of equally frequent ones.
        verdict = max(readable, key=readable.count, default=None)
        if verdict is None:
            self._add_failure(
                'unread', f'{prompt}: no verdict in {texts[-1][-_QUOTED_CHARACTERS:]!r}'
            )
        if isinstance(reply, Judgement):
            reply.verdicts, reply.verdict = parsed, verdict
            judgements_of_episode.get().append(reply)
        return verdict

    async def correct(
        self, identity: Identity, question: str, answers: Sequence[str], given: str
    ) -> bool | None:
        """Returns whether the answer `given` means the same as one of the accepted `answers`."""
        joined = ' | '.join(answers)
        return await self._ask(
            verdicts.verdict,
            identity,
            'judge.answer',
            question=question,
            answers=joined,
            given=given,
        )

    async def answer(self, identity: Identity, question: str, documents: str) -> str | None:
        """Returns the judge's own answer to a question from the documents (SSP's answerability check)."""
        parse = functools.partial(extract_last, tag='answer')
        # Greedy, because acceptance must not depend on a lucky sample.
        return await self._ask(
            parse, identity, 'checker', 0.0, question=question, documents=documents
        )

    async def gate(self, identity: Identity, name: str, task: str, document: str) -> bool | None:
        """Returns whether a task passes a gate.

        Args:
          name: 'entities' (searching can find the entities of the task) or 'relevance' (it is about `document`).
          document: the source document, or that and the passages that the proposer found, one per line
            (`scope.relevant_to`).
        """
        return await self._ask(
            verdicts.yes_no, identity, f'judge.{name}', task=task, document=document
        )

    async def rubrics(
        self, identity: Identity, task: str, document: str, kind: str = ''
    ) -> list[Rubric] | None:
        """Returns grading criteria for answers to the task: [{'text', 'priority'}].

        Args:
          document: as in `gate`.
          kind: kind of task, as its challenger read it.
        """
        low, high = self._rubric_count
        parse = functools.partial(verdicts.rubrics, minimum=low, maximum=high)
        fields = dict(task=task, document=document, kind=kind, low=low, high=high)
        # Temperature 0, as in SCOPE: the criteria of a task must not depend on a sample.
        parsed = await self._ask(parse, identity, RUBRICS_PROMPT, 0.0, **fields)
        if parsed is None:
            return None
        items, repairs = parsed
        for kind, number in repairs.items():
            self.stats[f'rubrics_{kind}'] += number
        return items

    async def grade(self, identity: Identity, task: str, answer: str, rubric: str) -> bool | None:
        """Returns whether the answer meets one rubric."""
        return await self._ask(
            verdicts.grade, identity, GRADE_PROMPT, task=task, given=answer, rubric=rubric
        )


async def _no_reply(*_: Any) -> Any:
    # `Recipe.check` refuses a rule where answers are needed.
    raise NoReply('a rule cannot answer questions')


class RuleJudge(Judge):
    """Rules for worlds whose passages state plain facts, one to a sentence.

    A task's entities can be found if it names a title. Its rubrics are the facts of the last document, where the search
    for it ended. It is relevant if the facts in its documents lead from the entity that it names to that last document
    (`mini.facts.described_entity`); a task that is not worded like those of a miniature world is not. An answer meets a
    rubric if it states that fact (`mini.facts.meets_rubric`). The rules read nothing but the wording of these worlds.

    Args:
      titles: returns all titles of the corpus.
      rubric_count: smallest and largest number of rubrics.
      max_failure_rate: `config.judge.max_failure_rate`.
    """

    def __init__(
        self,
        titles: Callable[[], Iterable[str]],
        rubric_count: tuple[int, int],
        max_failure_rate: float = 1.0,
    ):
        super().__init__(_no_reply, rubric_count, max_failure_rate)
        # Titles are read at the first judgement, because most recipes never ask for one. Bound judges share them.
        self._titles = functools.cache(lambda: frozenset(titles()))

    async def correct(self, identity, question, answers, given):
        self.stats['asked'] += 1
        return exact_match(given, answers)

    @staticmethod
    def can_read(rubric: str) -> bool:
        """Returns whether a rubric states a fact of the miniature worlds, so that answers can be graded by it."""
        return facts.meets_rubric('', rubric) is not None

    async def gate(self, identity, name, task, document):
        self.stats['asked'] += 1
        if name == 'entities':
            # Titles of the miniature worlds are single words; a possessive ends with an apostrophe.
            words = task.replace('.', ' ').replace("'", ' ').split()
            return not self._titles().isdisjoint(words)
        passages = [_titled_text(line) for line in document.split('\n')]
        last_title, _ = passages[-1]
        return facts.described_entity(task, passages) == normalize_answer(last_title)

    async def rubrics(self, identity, task, document, kind=''):
        self.stats['asked'] += 1
        # The last document is the best of the last search. Its last sentences are used if it has more than the largest
        # number of rubrics.
        _, text = _titled_text(document.rpartition('\n')[2])
        low, high = self._rubric_count
        rubrics = facts.rubrics_of(text)[-high:]
        if len(rubrics) < low:
            return None
        return rubrics

    async def grade(self, identity, task, answer, rubric):
        self.stats['asked'] += 1
        is_met = facts.meets_rubric(answer, rubric, task)
        if is_met is None:
            self._add_failure('unread', f'{rubric!r} states no fact of the miniature worlds')
        return is_met


def _titled_text(line: str) -> tuple[str, str]:
    """Returns title and text of a line of evidence '(Title: …) text' (`prompts.document_text`)."""
    title, _, text = line.removeprefix('(Title: ').rpartition(') ')
    return title, text


def policy_writer(
    temperature: float, roles: Mapping[str, str] = {}, samples: Mapping[str, int] = {}
) -> Writer:
    """Returns a writer whose replies are rollouts of the context's role 'judge', the frozen initial policy.

    Args:
      temperature: temperature of requests that do not set one.
      roles: prompt → another role that replies to it.
      samples: role → number of its replies in steps that train it; of the roles in training alone.
    """

    async def write(context, identity, prompt, fields, asked_temperature=None):
        """A `Writer`."""
        role = roles.get(prompt, 'judge')
        is_trained = role in samples and role in context.episodes.step.phase.trains
        if is_trained:
            # That of the role.
            asked_temperature = None
        elif asked_temperature is None:
            asked_temperature = temperature
        # A prompt may leave out what a judgement could show it.
        inputs = context.prompts[prompt].inputs
        shown = {name: value for name, value in fields.items() if name in inputs}
        try:
            count = samples[role] if is_trained else 1
            rollouts = await context.ask(role, identity, count, asked_temperature, prompt, **shown)
        except TaskDropped as error:
            # The prompt is longer than a slot of the judge.
            raise NoReply(f'{prompt}: {error.reason}') from None
        if is_trained:
            return Judgement(role, identity, prompt, fields, rollouts)
        # A reply that was cut off could have continued with "but".
        if rollouts[0].finish != 'eos':
            raise NoReply(f'{prompt}: the reply did not end by itself ({rollouts[0].finish})')
        return rollouts[0].turns[-1].text

    return write
