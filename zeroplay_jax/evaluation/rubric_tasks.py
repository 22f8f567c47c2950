"""Open tasks of a file, as a graded evaluation records them: with an id and the place in the file."""

from __future__ import annotations

import dataclasses

from zeroplay_jax.selfplay import files
from zeroplay_jax.types import Question, UserError

# Characters of a wrong value that an error quotes.
_QUOTED_CHARACTERS = 60


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


def load(path: str) -> list[RubricTask]:
    """Returns the tasks of a file of JSON lines {"task", "rubrics": list of texts, "id": text or number, optional}.

    Raises:
      UserError: an unusable line, or two lines with one id; the message has the numbers of the lines.
    """
    line_of_id: dict[str, int] = {}
    tasks = []
    for number, question, record in files.numbered_open_tasks(path):
        task_id = _task_id(path, number, record.get('id'))
        if task_id in line_of_id:
            raise UserError(
                f'{path}, line {number}: the id {task_id!r} is also that of line {line_of_id[task_id]}; give each '
                'task an id of its own, or leave all "id" out'
            )
        line_of_id[task_id] = number
        tasks.append(RubricTask(task_id, len(tasks), number, question))
    return tasks


def _task_id(path: str, number: int, value: object) -> str:
    """Returns the id of a task as a text; raises UserError for one that is neither a text nor a whole number."""
    if value is None:
        return str(number)
    # isinstance would accept true, because bool is a subclass of int.
    if type(value) is int:
        return str(value)
    if isinstance(value, str) and value.strip():
        return value
    raise UserError(
        f'{path}, line {number}: "id" is {repr(value)[:_QUOTED_CHARACTERS]}; give a text or a whole number, or leave '
        'it out'
    )
