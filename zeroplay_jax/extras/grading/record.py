"""Tasks, answers and grades of a graded evaluation; answers and grades are appended to files one by one.

`answers.jsonl` has a line per task with all its answers, `grades.jsonl` a line per judgement. A line is written by
one call as soon as its content is there, so that a killed evaluation loses only what was in progress. An incomplete
last line, of a write that was cut off, is removed at the next start.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from zeroplay_jax.data import files
from zeroplay_jax.evaluation.answering import Answer
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.types import Json, Question, UserError

ANSWERS = 'answers.jsonl'
GRADES = 'grades.jsonl'


@dataclasses.dataclass(frozen=True)
class RubricTask:
    """One line of a file of open tasks.

    Attributes:
      id: its "id", or the number of the line as a text; unique in the file.
      index: position among the tasks of the file, from 0. The randomness of its rollouts derives from it.
      line: number of the line, from 1.
      question: the task and its rubrics.
    """

    id: str
    index: int
    line: int
    question: Question

    @property
    def rubrics(self) -> list[str]:
        """The texts of the rubrics, in the order of the file."""
        return [rubric['text'] for rubric in self.question.rubrics]


def load_tasks(path: str) -> list[RubricTask]:
    """Returns the tasks of a file of JSON lines {"task", "rubrics": list of texts, "id": text or number, optional}.

    Raises:
      UserError: an unusable line, or two lines with one id; the message has the numbers of the lines.
    """
    tasks: dict[str, RubricTask] = {}
    for number, question, record in files.numbered_open_tasks(path):
        task_id = number if record.get('id') is None else record['id']
        # isinstance would accept true, because bool is a subclass of int.
        if type(task_id) not in (int, str) or not str(task_id).strip():
            raise UserError(f'{path}, line {number}: "id" is no text or whole number; leave it out')
        if str(task_id) in tasks:
            line = tasks[str(task_id)].line
            raise UserError(
                f'{path}, line {number}: the id {task_id!r} is also that of line {line}; give each task its own'
            )
        tasks[str(task_id)] = RubricTask(str(task_id), len(tasks), number, question)
    return list(tasks.values())


class Judgement(NamedTuple):
    """Names one judgement: which judge grades which answer by which rubric.

    Attributes:
      judge: its name in the record (`graded._key`).
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


def judgements(tasks: Sequence[RubricTask], key: str, samples: int) -> list[Judgement]:
    """Returns all judgements of one judge, in the order of tasks, samples and rubrics."""
    named = []
    for task in tasks:
        for sample in range(samples):
            for rubric in range(len(task.rubrics)):
                named.append(Judgement(key, task.id, sample, rubric))
    return named


class GradingRecord:
    """The answers and grades in a folder.

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
        # Unbuffered, so that a line reaches the operating system by one write.
        with (self._folder / name).open('ab', buffering=0) as file:
            # ASCII, because a reason may quote half of a surrogate pair, which UTF-8 cannot encode.
            file.write(json.dumps(record).encode() + b'\n')


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
