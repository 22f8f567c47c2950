"""Reads JSON-lines files of users. Every line is checked; answers may have any field name that public sets use."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.retrieval import hub
from zeroplay_jax.retrieval.suggestions import similar_path
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.rollout import prompts
from zeroplay_jax.selfplay.library import HeldOutPassages
from zeroplay_jax.types import Json, Question, UserError

T = TypeVar('T')

ANSWER_FIELDS = ('answers', 'golden_answers', 'answer', 'target', 'ground_truth', 'reward_model')
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
# How error texts call the values that `json.loads` returns.
_JSON_TYPES: dict[type, str] = {
    dict: 'object',
    list: 'list',
    str: 'text',
    int: 'number',
    float: 'number',
    bool: 'truth value',
    type(None): 'null',
}
# Fields that a policy is asked.
_ASKED = ('question', 'task')
_TOO_DEEP = 'its brackets are nested too deeply'


class _UnusableLine(Exception):
    """A line that cannot be used; the message says why."""


def read_lines(path: str, *required: str, answered: bool = True) -> list[Json]:
    """Returns the objects of a JSON-lines file; arguments and errors are those of `numbered_lines`."""
    lines = numbered_lines(path, *required, answered=answered)
    return [record for _, record in lines]


def numbered_lines(path: str, *required: str, answered: bool = True) -> Iterator[tuple[int, Json]]:
    """Yields (line number from 1, object) of a JSON-lines file; empty lines are skipped.

    Args:
      required: text fields that every line must have. A field inside 'extra_info', where verl's
        files keep it, is moved to the top.
      answered: whether every line must also have answers.

    Raises:
      UserError: the file does not exist or has no line, or a line is unusable; the message has its number.
    """
    # Set before the loop, because the error handlers name the line that was read last.
    number = 0
    has_lines = False
    try:
        # Some editors begin a UTF-8 file with a byte order mark, which 'utf-8-sig' skips. With newline='\n' only line
        # feeds end a line: carriage returns may be white space inside an object.
        with pathlib.Path(path).open(encoding='utf-8-sig', newline='\n') as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                has_lines = True
                yield number, _parse_line(line, required, answered)
    except FileNotFoundError:
        raise UserError(
            f'{path}: cannot be read, no such file; give a file of JSON lines{similar_path(path)}'
        ) from None
    except UnicodeDecodeError:
        # Text is decoded in blocks, so that the line is not known.
        raise UserError(f'{path}: its text is not UTF-8; save the file as UTF-8') from None
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({error})') from None
    except _UnusableLine as error:
        problem = _requirement(required, answered)
        if str(error):
            problem += f' ({error})'
        raise UserError(f'{path}, line {number}: {problem}') from None
    if not has_lines:
        raise UserError(f'{path}: holds no line; {_requirement(required, answered)}')


def _parse_line(line: str, required: tuple[str, ...], answered: bool) -> Json:
    """Returns the object of a line, checked as in `numbered_lines`; raises _UnusableLine."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        # Not the whole error: it counts lines within this line.
        raise _UnusableLine(f'{error.msg} at character {error.pos + 1}') from None
    except RecursionError:
        raise _UnusableLine(_TOO_DEEP) from None
    except ValueError:
        # Python reads no number of more than some thousand digits.
        raise _UnusableLine('it has a number with too many digits') from None
    if not isinstance(record, dict):
        raise _UnusableLine(f'this one is a JSON {_JSON_TYPES[type(record)]}')
    extra = record.get('extra_info')
    for name in required:
        if name not in record and isinstance(extra, dict) and name in extra:
            record[name] = extra[name]
        if name not in record:
            raise _UnusableLine(f'"{name}" is missing')
        if not isinstance(record[name], str):
            raise _UnusableLine(f'"{name}" is a JSON {_JSON_TYPES[type(record[name])]}, not a text')
        if name in _ASKED and not record[name].strip():
            raise _UnusableLine(f'"{name}" is empty')
    try:
        # The file is UTF-8, so half of a surrogate pair can only come from an escape. Refused here, before a run
        # has begun: it could be written neither into a prompt nor into a log.
        if '\\ud' in line.lower():
            json.dumps(record, ensure_ascii=False).encode()
        # Called for its errors alone; callers read the answers themselves.
        if answered:
            accepted_answers(record)
    except UnicodeEncodeError:
        raise _UnusableLine('it has an escape \\ud… without its other half') from None
    except RecursionError:
        raise _UnusableLine(_TOO_DEEP) from None
    except ValueError as error:
        raise _UnusableLine(error) from None
    return record


def _requirement(required: tuple[str, ...], answered: bool) -> str:
    """Returns a sentence about what every line must contain, for error texts."""
    fields = [f'"{name}"' for name in required]
    if answered:
        fields.append('"answers" (a text or list of texts)')
    return f'every line must be a JSON object with {" and ".join(fields)}'


def accepted_answers(record: Json) -> list[str]:
    """Returns the accepted answers of a line as a list of texts.

    Raises:
      ValueError: there is no answer, or one is empty or not a text.
    """
    names = [name for name in ANSWER_FIELDS if name in record]
    if not names:
        raise ValueError(
            f'no answers; write them into one of the fields {", ".join(ANSWER_FIELDS)}'
        )
    name = names[0]
    value = record[name]
    while isinstance(value, dict):
        # verl nests the answers: {'reward_model': {'ground_truth': {'target': […]}}}
        value = value.get('target', value.get('ground_truth'))
    # A single text becomes a list, because iterating a text would yield its letters.
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list):
        raise ValueError(
            f'"{name}" is a JSON {_JSON_TYPES[type(answers)]}, not a text or a list of texts'
        )
    if not answers:
        raise ValueError(f'"{name}" has no answer')
    for answer in answers:
        if not isinstance(answer, str):
            raise ValueError(
                f'an answer of "{name}" is a JSON {_JSON_TYPES[type(answer)]}, not a text'
            )
        if not answer.strip():
            raise ValueError(f'an answer of "{name}" is empty')
    return list(answers)


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
                hops=hops(path, number, record) if 'hops' in record else 0,
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
    if hub.is_name(name):
        try:
            hub.check_name(name, is_file=True)
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
