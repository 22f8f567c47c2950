"""Reads files of users: questions, open tasks, documents, held-out passages. Every line is checked."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from zeroplay_jax.data import answer_fields
from zeroplay_jax.data.answer_fields import accepted_answers as accepted_answers
from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.retrieval.command import similar_path
from zeroplay_jax.retrieval.json_text import Unusable, type_name
from zeroplay_jax.retrieval.rows import Row, rows
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.rollout import prompts
from zeroplay_jax.types import Json, Question, UserError

T = TypeVar('T')

# Public name → the split that papers report. MuSiQue, HotpotQA and 2Wiki have no public test answers.
PUBLIC = {
    'nq': 'test',
    'triviaqa': 'test',
    'popqa': 'test',
    'hotpotqa': 'dev',
    '2wikimultihopqa': 'dev',
    'musique': 'dev',
    'bamboogle': 'test',
}
# Provenance fields of a line, which a run writes into its logs: name of the source file or corpus, line number there,
# id of the passage.
PROVENANCE = ('source', 'line', 'document_id')
# Characters of a wrong value that an error quotes.
_QUOTED_CHARACTERS = 60
# Fields that a policy is asked.
_ASKED = ('question', 'task')


@dataclasses.dataclass(frozen=True)
class HeldOutPassages:
    """The passages of the documents that held-out questions are about.

    Attributes:
      ids: ids of the passages.
      titles: titles of their documents, without the empty one.
    """

    ids: frozenset[str] = frozenset()
    titles: frozenset[str] = frozenset()


def read_lines(path: str, *required: str, answered: bool = True) -> list[Json]:
    """Returns the objects of a file of lines; arguments and errors are those of `numbered_lines`."""
    lines = numbered_lines(path, *required, answered=answered)
    return [record for _, record in lines]


def numbered_lines(path: str, *required: str, answered: bool = True) -> Iterator[tuple[int, Json]]:
    """Yields (line number from 1, object) of a file of JSON lines, or of another form that `retrieval.rows` reads.

    Args:
      required: text fields that every line must have. A field inside 'extra_info', where verl's
        files keep it, is moved to the top.
      answered: whether every line must also have answers. Lines that say that their question has none are left out,
        with a warning that counts them.

    Raises:
      UserError: the file does not exist or has no line, or a line is unusable; the message has its number.
    """
    count = 0
    unanswerable = 0
    try:
        for number, row in rows(pathlib.Path(path)):
            try:
                record = _checked(row, required)
                # The answers are read for their errors alone; callers read them themselves.
                if answered and answer_fields.is_unanswerable(record):
                    unanswerable += 1
                    continue
                if answered:
                    accepted_answers(record)
            except ValueError as error:
                problem = _requirement(required, answered)
                raise UserError(f'{path}, line {number}: {problem} ({error})') from None
            count += 1
            yield number, record
    except RetrievalError as error:
        raise UserError(str(error)) from None
    if not count:
        holds = 'holds no line'
        if unanswerable:
            holds = f'holds {unanswerable} questions without an answer and no other'
        raise UserError(f'{path}: {holds}; {_requirement(required, answered)}')
    if unanswerable:
        _warn_once(f'{path}: left out questions that have no answer: {unanswerable}')


@functools.lru_cache
def _warn_once(line: str) -> None:
    """Warns of what is read twice: when a config is checked, and by the run."""
    logging.warning(line)


def _checked(row: Row, required: tuple[str, ...]) -> Json:
    """Returns a row with the required texts at its top; ValueError if it has not all of them."""
    if isinstance(row, Unusable):
        raise row
    extra = row.get('extra_info')
    for name in required:
        if name not in row and isinstance(extra, dict) and name in extra:
            row[name] = extra[name]
        if name not in row:
            raise ValueError(f'"{name}" is missing')
        if not isinstance(row[name], str):
            raise ValueError(f'"{name}" is a JSON {type_name(row[name])}, not a text')
        if name in _ASKED and not row[name].strip():
            raise ValueError(f'"{name}" is empty')
    return row


def _requirement(required: tuple[str, ...], answered: bool) -> str:
    """Returns a sentence about what every line must contain, for error texts."""
    fields = [f'"{name}"' for name in required]
    if answered:
        fields.append('"answers" (a text or list of texts)')
    return f'every line must be a JSON object with {" and ".join(fields)}'


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def provenance(record: Json) -> dict[str, Any]:
    """Returns the provenance fields of a line; {} in files that `zeroplay_jax.inputs` did not write."""
    fields = {}
    for name in PROVENANCE:
        if name in record:
            fields[name] = record[name]
    return fields


def questions(path: str) -> list[Question]:
    """Returns the questions of a file; the hops of a line without 'hops' are unknown (0).

    Raises:
      UserError: an unusable line.
    """
    loaded = []
    for number, record in numbered_lines(path, 'question'):
        loaded.append(
            Question(
                text=record['question'],
                answers=tuple(accepted_answers(record)),
                hops=hops(path, number, record) if record.get('hops') is not None else 0,
                origin=provenance(record),
            )
        )
    return loaded


def open_tasks(path: str) -> list[Question]:
    """Returns the open tasks of a file, as SCOPE's solver takes them; errors are those of `numbered_open_tasks`."""
    return [question for _, question, _ in numbered_open_tasks(path)]


def numbered_open_tasks(path: str) -> Iterator[tuple[int, Question, Json]]:
    """Yields (line number from 1, open task, object of the line) of a file of open tasks.

    Raises:
      UserError: a line has no task, or its "rubrics" are not a list of different texts; the message has its number.
    """
    for number, record in numbered_lines(path, 'task', answered=False):
        texts = record.get('rubrics')
        if not isinstance(texts, list) or not texts or not all(map(_is_text, texts)):
            raise UserError(
                f'{path}, line {number}: "rubrics" must be a list of texts, one per criterion to grade'
            )
        if len(set(texts)) < len(texts):
            raise UserError(
                f'{path}, line {number}: a rubric occurs twice and would count twice; remove one of them'
            )
        # All rubrics get the middle priority: SCOPE's weights are 1 for any priority.
        rubrics = [{'text': text, 'priority': 'important'} for text in texts]
        yield number, Question(record['task'], rubrics=tuple(rubrics)), record


def check_set(name: str, allow_public: bool = True) -> None:
    """Raises UserError (one line) for a question set that is neither a file nor, if allowed, a public name."""
    # A file takes precedence over a public set of the same name.
    if pathlib.Path(name).is_file():
        return
    if downloads.is_name(name):
        try:
            downloads.check_name(name, is_file=True)
        except RetrievalError as error:
            raise UserError(str(error)) from None
        return
    if not allow_public:
        raise UserError(f'{name} is not a file; give a file of JSON lines{similar_path(name)}')
    if name not in PUBLIC:
        public_names = ', '.join(PUBLIC)
        raise UserError(
            f'{name} is not a file nor one of {public_names}; give a file of JSON lines'
            f'{similar_path(name) or did_you_mean(name, PUBLIC)}'
        )


def sample(items: Sequence[T], count: int, seed: int) -> list[T]:
    """Returns `count` items drawn uniformly, in their original order; all items if there are fewer."""
    if count >= len(items):
        return list(items)
    # The sample is a prefix of one permutation: a larger sample of the same seed contains the smaller ones.
    permutation = np.random.default_rng(seed).permutation(len(items))
    return [items[index] for index in np.sort(permutation[:count])]


def documents(path: str) -> list[Json]:
    """Returns the documents of a file: 'title', 'text', 'hops', the provenance fields, and 'type' and 'link' if given.

    Raises:
      UserError: an unusable line.
    """
    loaded: list[Json] = []
    for number, record in numbered_lines(path, 'title', 'text', answered=False):
        task_type = record.get('type', '')
        if not isinstance(task_type, str):
            raise UserError(
                f'{path}, line {number}: "type" is {task_type!r}; give the name of a task type'
            )
        document = {'title': record['title'], 'text': record['text']}
        document['hops'] = hops(path, number, record)
        if task_type:
            document['type'] = task_type
        link = record.get('link')
        # null and '' mean that there is none.
        if link is not None and link != '':
            _check_link(path, number, link, record['text'])
            document['link'] = link
        loaded.append(document | provenance(record))
    return loaded


def _check_link(path: str, number: int, link: Any, text: str) -> None:
    """Raises UserError unless a link is a name in the text of its document."""
    if isinstance(link, str) and prompts.has_link(text, link):
        return
    value = repr(link)
    if len(value) > _QUOTED_CHARACTERS:
        value = value[:_QUOTED_CHARACTERS] + '…'
    raise UserError(
        f'{path}, line {number}: "link" is {value}; give a name that occurs in "text" as whole words, letter for '
        'letter, or leave "link" out'
    )


def held_out_passages(path: str) -> HeldOutPassages:
    """Returns the passages of a file with lines {'document_id', 'title'}; the title may be missing.

    Raises:
      UserError: an unusable line.
    """
    ids: set[str] = set()
    titles: set[str] = set()
    for _, record in numbered_lines(path, 'document_id', answered=False):
        ids.add(record['document_id'])
        title = record.get('title')
        if isinstance(title, str) and title:
            titles.add(title)
    return HeldOutPassages(frozenset(ids), frozenset(titles))


def hops(path: str, number: int, record: Json) -> int:
    """Returns the number of hops of a line.

    Args:
      path, number: file and line number, for the error.

    Raises:
      UserError: the number is missing or not a whole number from 1 on.
    """
    value = record.get('hops')
    # isinstance would accept true, because bool is a subclass of int.
    if type(value) is not int or value < 1:
        description = 'missing' if value is None else repr(value)
        raise UserError(
            f'{path}, line {number}: "hops" is {description}; give a whole number, 1 or more'
        )
    return value
