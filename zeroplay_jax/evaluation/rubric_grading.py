"""Plays open tasks and has every answer graded, rubric by rubric, by one judge or two; records both at once."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence

from zeroplay_jax.evaluation import question_sets
from zeroplay_jax.evaluation.grading_record import Answer, Grade, GradingRecord, Judgement
from zeroplay_jax.evaluation.rubric_tasks import RubricTask
from zeroplay_jax.selfplay.answers import final_answer, prompt_fields
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.judge import Judge, RuleJudge
from zeroplay_jax.types import Trajectory, UserError

# Judgements before the share of lost ones is looked at: fewer say little, and a server that is down fails at once.
_FIRST_LOOK = 20
# All rollouts of an evaluation begin their identity with this number; a second evaluation in a process would need
# another one.
_NUMBER = 0
# Reason codes of tool calls that the policy is not to blame for (`ToolCall.error`).
_TOOL_FAILURES = ('failed', 'timeout')


@dataclasses.dataclass(frozen=True)
class NamedJudge:
    """A judge of a graded evaluation.

    Attributes:
      name: its section of the config, 'judge' or 'second_judge'.
      key: its name in the record of grades, which changes with its model, limits, temperature and prompt.
      judge: the judge.
      at_once: largest number of its judgements in progress.
      max_lost: largest share of judgements without a verdict.
    """

    name: str
    key: str
    judge: Judge
    at_once: int
    max_lost: float


def _nothing(_: int) -> None:
    """Default of `on_grades`: does nothing."""


def _no_check() -> None:
    """Default of `check_tools`: refuses nothing."""


def check_prompts(
    context: RolloutContext, role: str, tasks: Sequence[RubricTask], path: str
) -> None:
    """Refuses tasks whose prompt is longer than the role's limit.

    Args:
      path: file of the tasks, for the error.

    Raises:
      UserError: the first such task.
    """
    limit = context.roles[role].prompt_tokens
    for task in tasks:
        tokens = len(context.prompt_ids(role, **prompt_fields(context, role, task.question)))
        if tokens > limit:
            raise UserError(
                f'{path}, line {task.line}: the prompt of this task has {tokens} tokens, at most {limit} are allowed; '
                'shorten it, or raise config.rollout.prompt_tokens'
            )


def check_rubrics_of_rule(tasks: Sequence[RubricTask], path: str) -> None:
    """Refuses rubrics that the rule judge cannot read.

    Args:
      path: file of the tasks, for the error.

    Raises:
      UserError: the first such rubric.
    """
    for task in tasks:
        for number, rubric in enumerate(task.rubrics, 1):
            if not RuleJudge.can_read(rubric):
                raise UserError(
                    f'{path}, line {task.line}: rubric {number} states no fact of the miniature worlds, and the rule '
                    'judge reads no other; give --config.judge.kind=endpoint or policy'
                )


def judgements(tasks: Sequence[RubricTask], key: str, samples: int) -> list[Judgement]:
    """Returns all judgements of one judge, in the order of tasks, samples and rubrics."""
    named = []
    for task in tasks:
        for sample in range(samples):
            for rubric in range(len(task.rubrics)):
                named.append(Judgement(key, task.id, sample, rubric))
    return named


def is_needed(record: GradingRecord, judgement: Judgement) -> bool:
    """Returns whether a judgement is still to be asked, as far as is known: a missing answer needs none."""
    answers = record.answers.get(judgement.task)
    if answers is not None and not answers[judgement.sample].text:
        return False
    return not record.is_graded(judgement)


def grade_tasks(
    context: RolloutContext,
    role: str,
    tasks: Sequence[RubricTask],
    judges: Sequence[NamedJudge],
    record: GradingRecord,
    *,
    samples: int = 1,
    check_tools: Callable[[], None] = _no_check,
    on_grades: Callable[[int], None] = _nothing,
) -> None:
    """Plays the tasks without recorded answers, and asks the judgements without a recorded reply; records both.

    Args:
      context: roles, scheduler and prompts.
      role: the evaluated role.
      samples: answers per task; 1: a greedy one, otherwise at the role's temperature.
      check_tools: raises if too many tool calls failed, or no search found a passage, since its last call.
      on_grades: called with the number of judgements that are done, or that a missing answer makes superfluous.

    Raises:
      UserError: too many judgements of a judge have no verdict, or too many tool calls failed. What was recorded until
        then stays.
    """
    graders = [_Grader(judge, record, tasks, samples) for judge in judges]
    # Answers after a failed tool call, or after searches that found nothing, which measure the policy only if these are
    # rare. They are recorded when this is known, so that a search server that is down or empty leaves nothing behind
    # that would be resumed.
    held: dict[str, tuple[Answer, ...]] = {}

    async def play(task: RubricTask) -> None:
        """Plays and grades one task."""
        if task.id not in record.answers:
            # None selects the role's temperature: several greedy samples would be equal.
            temperature = 0.0 if samples == 1 else None
            fields = prompt_fields(context, role, task.question)
            trajectories = await context.ask(
                role, (_NUMBER, task.index), samples, temperature, **fields
            )
            answers = tuple(map(_answer, trajectories))
            if any(map(_is_doubtful, trajectories)):
                held[task.id] = answers
                return
            record.add_answers(task.id, answers)
        await grade_answers(task)

    async def grade_answers(task: RubricTask) -> None:
        """Has the recorded answers to one task graded by all judges."""
        pending = []
        for grader in graders:
            pending.append(grader.grade(task, record.answers[task.id], on_grades))
        # Judges do not wait for each other.
        await asyncio.gather(*pending)

    _run(context, graders, [play(task) for task in tasks])
    check_tools()
    for task_id, answers in held.items():
        record.add_answers(task_id, answers)
    _run(context, graders, [grade_answers(task) for task in tasks if task.id in held])
    # A small evaluation ends before the first look.
    for grader in graders:
        grader.check_lost()


def _run(
    context: RolloutContext, graders: Sequence[_Grader], episodes: Sequence[Coroutine]
) -> None:
    """Runs episodes in an event loop of their own."""
    for grader in graders:
        grader.begin()
    context.scheduler.run(episodes)


def _is_doubtful(trajectory: Trajectory) -> bool:
    """Returns whether a tool call failed other than by a mistake of the policy, or no search found a passage."""
    calls = [turn.call for turn in trajectory.turns if turn.call is not None]
    rows = [row for call in calls for row in call.documents]
    has_found_nothing = bool(rows) and not any(rows)
    return has_found_nothing or any(call.error in _TOOL_FAILURES for call in calls)


def _answer(trajectory: Trajectory) -> Answer:
    """Returns what is recorded of a rollout."""
    queries = question_sets.search_queries(trajectory)
    return Answer(
        text=final_answer(trajectory),
        finish=trajectory.finish,
        searches=len(queries),
        redundancy=question_sets.redundancy(queries),
        tokens=trajectory.policy_tokens,
    )


class _Grader:
    """Asks one judge for its grades, and stops if too many of them have no verdict."""

    def __init__(
        self,
        judge: NamedJudge,
        record: GradingRecord,
        tasks: Sequence[RubricTask],
        samples: int,
    ):
        self._judge = judge
        self._record = record
        self.begin()
        # Replies without a verdict of an earlier start count, too: they are not asked again.
        self._counts = {'asked': 0, 'failed': 0, 'unread': 0}
        for judgement in judgements(tasks, judge.key, samples):
            if record.is_graded(judgement):
                self._count(record.grades[judgement])

    def begin(self) -> None:
        """Prepares for another event loop."""
        # A semaphore belongs to the loop in which somebody first waited for it.
        self._limit = asyncio.Semaphore(self._judge.at_once)

    def _count(self, grade: Grade) -> None:
        self._counts['asked'] += 1
        if grade.lost:
            self._counts[grade.lost] += 1

    async def grade(
        self, task: RubricTask, answers: Sequence[Answer], on_grades: Callable[[int], None]
    ) -> None:
        """Has all answers to a task graded by all rubrics that are not graded yet."""
        pending = []
        for judgement in judgements([task], self._judge.key, len(answers)):
            answer = answers[judgement.sample].text
            if self._record.is_graded(judgement):
                continue
            # A missing answer meets no rubric without doubt, so no judgement is spent on it.
            if answer:
                pending.append(self._ask(task, answer, judgement, on_grades))
            else:
                on_grades(1)
        await asyncio.gather(*pending)

    async def _ask(
        self,
        task: RubricTask,
        answer: str,
        judgement: Judgement,
        on_grades: Callable[[int], None],
    ) -> None:
        """Asks for one grade and records it."""
        judge = self._judge.judge
        identity = (_NUMBER, task.index, judgement.sample, judgement.rubric)
        rubric = task.rubrics[judgement.rubric]
        async with self._limit:
            met = await judge.grade(identity, task.question.text, answer, rubric)
            grade = Grade(met)
            if met is None:
                # These are of this very judgement: no other coroutine runs between the judge's return and this line.
                grade = Grade(None, judge.last_lost, judge.last_failure)
        self._record.add_grade(judgement, grade)
        self._count(grade)
        if self._counts['asked'] >= _FIRST_LOOK:
            self.check_lost()
        on_grades(1)

    def check_lost(self) -> None:
        """Raises UserError if too many judgements have no verdict."""
        lost = self._counts['failed'] + self._counts['unread']
        if lost <= self._judge.max_lost * self._counts['asked']:
            return
        last = self._judge.judge.last_failure
        reason = f' (the last: {last})' if last else ''
        fix = 'repair the judge and run the same command again, which repeats failed requests'
        if self._counts['unread']:
            fix += '; to repeat those whose replies could not be read, remove their lines from grades.jsonl'
        raise UserError(
            f'config.{self._judge.name}: {lost} of {self._counts["asked"]} judgements failed '
            f'({self._counts["failed"]}) or could not be read ({self._counts["unread"]}), more than '
            f'config.judge.max_failure_rate={self._judge.max_lost}{reason}; {fix}'
        )
