"""Evaluations: greedy answers to held-out questions, and open tasks whose answers judges grade.

Both play through the same sampler and tools as training.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Bool

from zeroplay_jax.evaluation import statistics
from zeroplay_jax.evaluation.question_sets import (
    Answer,
    RubricTask,
    answer_of,
    ask_question,
    do_nothing,
)
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.selfplay.answers import final_answer, prompt_fields, score
from zeroplay_jax.selfplay.context import RolloutContext
from zeroplay_jax.selfplay.judge import Judge, RuleJudge
from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.types import (
    Json,
    Outcome,
    Question,
    Row,
    RowInfo,
    Trajectory,
    UserError,
)


def evaluate(
    context: RolloutContext,
    questions: Sequence[Question],
    number: int,
    recipe: Recipe,
    on_answer: Callable[[], None] = do_nothing,
    metric: str = 'none',
) -> tuple[dict[int, Bool[np.ndarray, ' questions']], list[Row]]:
    """Returns the exact match of a greedy answer per question, and the rollouts; open tasks are graded by a judge.

    With several processes all must call this.

    Args:
      context: roles, scheduler, prompts and, for open tasks, the judge.
      questions: questions and open tasks.
      number: number of this evaluation in the run; (number, index of the question) is the identity of a rollout.
      recipe: answers (`recipe.answering_recipe`).
      on_answer: called after every answer, for a progress bar.
      metric: `config.eval.metric`, a further score of the answers to questions; 'none': no other.

    Returns:
      correct: hop count (0: unknown) → bool [N], in the order of the questions; without the open tasks.
      rows: one rollout per entry of `questions`, in their order. The reward is 1 or 0; of an open task the share
        of its rubrics that are met (SCOPE eq. 1), or 0 with drop 'ungraded' where the judge graded too few. `parts`
        has the score by `metric` under the name of the metric.

    Raises:
      UserError: a question is longer than `rollout.prompt_tokens`.
    """
    episodes: dict[tuple[int, ...], Callable[[], Coroutine[Any, Any, Outcome]]] = {}
    for index, question in enumerate(questions):
        identity = (number, index)
        episodes[identity] = functools.partial(
            _answer_of, context, recipe, identity, question, metric
        )
    outcomes = context.run_episodes(episodes, on_answer)
    # Each question has one rollout, so each outcome has one row; all processes have them in the order of the questions.
    rows = [outcome.rows[0] for outcome in outcomes]
    # Open tasks have grades between 0 and 1, which must not enter the exact match.
    answers = [
        row for row, question in zip(rows, questions, strict=True) if not question.is_open_task
    ]
    # Metrics and tables list the hop counts in ascending order, whatever the order of a file.
    correct = statistics.by_hop([row.group for row in answers], [row.reward > 0 for row in answers])
    return correct, rows


async def _answer_of(
    context: RolloutContext,
    recipe: Recipe,
    identity: tuple[int, int],
    question: Question,
    further_metric: str,
) -> Outcome:
    """Returns the outcome of one question or open task, with one row; the randomness derives from `identity`."""
    # Exact match is used whatever `reward.answer` is, so that results of all recipes are compared by one metric.
    is_open = question.is_open_task
    metric, part_name = ('rubrics', 'rubrics') if is_open else ('em', 'exact_match')
    (trajectory,) = await ask_question(context, recipe, identity, question)
    answer = final_answer(trajectory)
    value = await score(context, metric, identity, question, answer)
    reward = value or 0.0
    parts = {part_name: reward}
    if further_metric != 'none' and not is_open:
        # An answer without a verdict of the judge scores 0.
        parts[further_metric] = (
            await score(context, further_metric, identity, question, answer) or 0.0
        )
    # Evaluation rows are never trained on; the reason is recorded so that ungraded answers can be counted.
    drop_reason = 'ungraded' if value is None else None
    # Of a question that was dropped.
    if not trajectory.weights:
        drop_reason = trajectory.finish
    row = Row(
        role=recipe.evaluated_role,
        trajectory=trajectory,
        reward=reward,
        group=question.hops,
        parts=parts,
        drop=drop_reason,
        info=RowInfo(question=question, answer=answer),
    )
    return Outcome([row])


# ---- open tasks ------------------------------------------------------------------------------------
#
# Every answer is graded, rubric by rubric, by one judge or two; both are recorded at once.


# Judgements before the share of lost ones is looked at: fewer say little, and a server that is down fails at once.
_FIRST_LOOK = 20
# All rollouts of an evaluation begin their identity with this number; a second evaluation in a process would need
# another one.
_NUMBER = 0


class NamedJudge(NamedTuple):
    """A judge of a graded evaluation.

    Attributes:
      name: its section of the config, 'judge' or 'second_judge'.
      key: its name in the record of grades, which changes with its model, limits, temperature and prompt.
      judge: the judge.
    """

    name: str
    key: str
    judge: Judge


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
    recipe: Recipe,
    tasks: Sequence[RubricTask],
    judges: Sequence[NamedJudge],
    record: GradingRecord,
    *,
    at_once: int,
    samples: int = 1,
    temperature: float | None = None,
    check_tools: Callable[[], None] = do_nothing,
    on_grades: Callable[[int], None] = do_nothing,
) -> None:
    """Plays the tasks without recorded answers, and asks the judgements without a recorded reply; records both.

    Args:
      context: roles, scheduler and prompts.
      recipe: answers.
      at_once: largest number of judgements of one judge in progress.
      samples, temperature: of the answers to a task, as of `question_sets.ask_question`.
      check_tools: raises if too many tool calls failed, or no search found a passage, since its last call.
      on_grades: called with the number of judgements that are done, or that a missing answer makes superfluous.

    Raises:
      UserError: too many judgements of a judge have no verdict, or too many tool calls failed. What was recorded until
        then stays.
    """
    graders = [_Grader(judge, record, tasks, samples, at_once) for judge in judges]
    # Answers after a failed tool call, or after searches that found nothing, which measure the policy only if these are
    # rare. They are recorded when this is known, so that a search server that is down or empty leaves nothing behind
    # that would be resumed.
    held: dict[str, tuple[Answer, ...]] = {}

    async def play(task: RubricTask) -> None:
        """Plays and grades one task."""
        if task.id not in record.answers:
            identity = (_NUMBER, task.index)
            trajectories = await ask_question(
                context, recipe, identity, task.question, samples, temperature
            )
            answers = tuple(map(answer_of, trajectories))
            if any(map(_is_doubtful, trajectories)):
                held[task.id] = answers
                return
            record.add_answers(task.id, answers)
        await grade_answers(task)

    async def grade_answers(task: RubricTask) -> None:
        """Has the recorded answers to one task graded by all judges."""
        # Judges do not wait for each other.
        answers = record.answers[task.id]
        await asyncio.gather(*(grader.grade(task, answers, on_grades) for grader in graders))

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
    rows = [row for call in trajectory.calls for row in call.documents]
    has_found_nothing = bool(rows) and not any(rows)
    return has_found_nothing or trajectory.has_tool_failure


class _Grader:
    """Asks one judge for its grades, and stops if too many of them have no verdict."""

    def __init__(
        self,
        judge: NamedJudge,
        record: GradingRecord,
        tasks: Sequence[RubricTask],
        samples: int,
        at_once: int,
    ):
        self._name, self._key, self._judge = judge
        self._record = record
        self._at_once = at_once
        self.begin()
        # Replies without a verdict of an earlier start count, too: they are not asked again.
        for judgement in judgements(tasks, self._key, samples):
            if record.is_graded(judgement):
                grade = record.grades[judgement]
                self._judge.stats['asked'] += 1
                if grade.lost:
                    self._judge.stats[grade.lost] += 1

    def begin(self) -> None:
        """Prepares for another event loop."""
        # A semaphore belongs to the loop in which somebody first waited for it.
        self._limit = asyncio.Semaphore(self._at_once)

    async def grade(
        self, task: RubricTask, answers: Sequence[Answer], on_grades: Callable[[int], None]
    ) -> None:
        """Has all answers to a task graded by all rubrics that are not graded yet."""
        pending = []
        for judgement in judgements([task], self._key, len(answers)):
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
        judge = self._judge
        identity = (_NUMBER, task.index, judgement.sample, judgement.rubric)
        rubric = task.rubrics[judgement.rubric]
        async with self._limit:
            met = await judge.grade(identity, task.question.text, answer, rubric)
            grade = Grade(met)
            if met is None:
                # These are of this very judgement: no other coroutine runs between the judge's return and this line.
                grade = Grade(None, judge.last_lost, judge.last_failure)
        self._record.add_grade(judgement, grade)
        if judge.stats['asked'] >= _FIRST_LOOK:
            self.check_lost()
        on_grades(1)

    def check_lost(self) -> None:
        """Raises UserError if too many judgements have no verdict."""
        stats = self._judge.stats
        try:
            self._judge.check_failure_rate(stats)
        except UserError as error:
            fix = 'that repeats failed requests'
            if stats['unread']:
                fix += '; to repeat those whose replies could not be read, remove their lines from grades.jsonl'
            raise UserError(f'config.{self._name}: {error}; {fix}') from None


# ---- record of a graded evaluation -----------------------------------------------------------------
#
# Answers and grades of a graded evaluation on disk: appended one by one, and read again when it is resumed.
#
# `answers.jsonl` has a line per task with all its answers, `grades.jsonl` a line per judgement. A line is written by
# one call as soon as its content is there, so that a killed evaluation loses only what was in progress. An incomplete
# last line, of a write that was cut off, is removed at the next start.


ANSWERS = 'answers.jsonl'
GRADES = 'grades.jsonl'


class Judgement(NamedTuple):
    """Names one judgement: which judge grades which answer by which rubric.

    Attributes:
      judge: `NamedJudge.key`.
      task: id of the task.
      sample: number of the answer, from 0.
      rubric: number of the rubric, from 0.
    """

    judge: str
    task: str
    sample: int
    rubric: int


@dataclasses.dataclass(frozen=True)
class Grade:
    """Result of one judgement.

    Attributes:
      met: whether the answer meets the rubric; None without a verdict.
      lost: why there is no verdict: 'failed' (no reply) or 'unread' (no verdict in the reply); '' with a verdict.
      reason: the failure, or the end of the reply without a verdict.
    """

    met: bool | None
    lost: str = ''
    reason: str = ''


class GradingRecord:
    """The answers and grades in a folder. Use it as a context manager.

    Args:
      folder: an existing folder.

    Attributes:
      answers: id of a task → its answers.
      grades: judgement → its latest grade.

    Raises:
      UserError: a line of a file cannot be read.
    """

    def __init__(self, folder: pathlib.Path):
        self.answers: dict[str, tuple[Answer, ...]] = {}
        self.grades: dict[Judgement, Grade] = {}
        for record in _read_lines(folder / ANSWERS, _parse_answers):
            self.answers.update(record)
        # A judgement that failed is asked again later: the last of its lines counts.
        for record in _read_lines(folder / GRADES, _parse_grade):
            self.grades.update(record)
        self._folder = folder
        # Opened by the first line, so that an evaluation that does not begin leaves no files.
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> GradingRecord:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add_answers(self, task: str, answers: tuple[Answer, ...]) -> None:
        """Appends the answers to a task."""
        fields = [dataclasses.asdict(answer) for answer in answers]
        self._append(ANSWERS, {'task': task, 'answers': fields})
        self.answers[task] = answers

    def add_grade(self, judgement: Judgement, grade: Grade) -> None:
        """Appends the grade of a judgement."""
        record = judgement._asdict() | {'met': grade.met}
        if grade.lost:
            record |= {'lost': grade.lost, 'reason': grade.reason}
        self._append(GRADES, record)
        self.grades[judgement] = grade

    def is_graded(self, judgement: Judgement) -> bool:
        """Returns whether a judgement need not be asked (again): a reply came, with a verdict or without."""
        grade = self.grades.get(judgement)
        # A reply without a verdict is final: asking until a reply can be read would favour verdicts that are easy to
        # write. A request without a reply says nothing about the judge's verdict, and is repeated.
        return grade is not None and grade.lost != 'failed'

    def _append(self, name: str, record: Json) -> None:
        if name not in self._files:
            # Unbuffered, so that a line reaches the operating system by one write.
            self._files[name] = (self._folder / name).open('ab', buffering=0)
        # ASCII, because a reason may quote half of a surrogate pair, which UTF-8 cannot encode.
        self._files[name].write(json.dumps(record).encode() + b'\n')


def _read_lines(path: pathlib.Path, parse: Any) -> Iterator[Any]:
    """Yields `parse` of the object of every line; removes an incomplete last line; nothing for a missing file.

    Raises:
      UserError: a line that cannot be parsed.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    complete, _, _ = content.rpartition(b'\n')
    complete_length = len(complete) + 1 if complete else 0
    if complete_length < len(content):
        with path.open('r+b') as file:
            file.truncate(complete_length)
    for number, line in enumerate(complete.split(b'\n'), 1):
        if not line:
            continue
        try:
            yield parse(json_text.parse_object(line))
        # Damage may give fields of other types.
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f'{path}, line {number}: cannot be read; remove this line, so that its content is made again'
            ) from None


def _parse_answers(record: Json) -> dict[str, tuple[Answer, ...]]:
    """Returns {id: answers} of a line of `ANSWERS`."""
    return {str(record['task']): tuple(Answer(**fields) for fields in record['answers'])}


def _parse_grade(record: Json) -> dict[Judgement, Grade]:
    """Returns {judgement: grade} of a line of `GRADES`."""
    judgement = Judgement(**{name: record[name] for name in Judgement._fields})
    met = record['met']
    if met is not None and not isinstance(met, bool):
        raise ValueError(met)
    return {judgement: Grade(met, record.get('lost', ''), record.get('reason', ''))}
