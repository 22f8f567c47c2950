"""Reads files of users: questions, open tasks, documents, held-out passages. Every line is checked."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from zeroplay_jax.objectives.answers import normalize_answer
from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.retrieval import downloads, json_text
from zeroplay_jax.retrieval.command import similar_path
from zeroplay_jax.retrieval.json_text import Unusable, type_name
from zeroplay_jax.retrieval.rows import Row, listed_fields, rows, shortest, suffix_of
from zeroplay_jax.retrieval.sources import warn_once
from zeroplay_jax.retrieval.texts import DAMAGE
from zeroplay_jax.retrieval.types import RetrievalError
from zeroplay_jax.rollout import prompts
from zeroplay_jax.runtime.disk import write_text
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
# Public name → the file that its publisher's script writes: the questions are published obfuscated.
WRITTEN = {'browsecomp-plus': 'data/browsecomp_plus_decrypted.jsonl'}
# Provenance fields of a line, which a run writes into its logs: name of the source file or corpus, line number there,
# id of the passage.
PROVENANCE = ('source', 'line', 'document_id')
# Characters of a wrong value that an error quotes.
_QUOTED_CHARACTERS = 60
# Unusable lines that an error names.
_SHOWN_LINES = 3
# Fields that a policy is asked.
_ASKED = ('question', 'task')
# Required field → its name in sets that lack it (BrowseComp-Plus).
_OTHER_NAMES = {'question': 'query'}
# Base64, as in the published form of BrowseComp-Plus.
_OBFUSCATED = re.compile(r'[A-Za-z0-9+/]{40,}={0,2}')


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
      UserError: the file does not exist or has no line; its first lines are unusable; or, behind the last one, some
        are: the message has their count and the numbers of the first ones.
    """
    count = 0
    unanswerable = 0
    unusable = 0
    # All of its cells are texts.
    is_table = suffix_of(pathlib.Path(path)) == '.tsv'
    first: list[tuple[int, str]] = []
    try:
        for number, row in rows(pathlib.Path(path)):
            try:
                record = _checked(row, required)
                if is_table:
                    _read_whole_numbers(record)
                # The answers are read for their errors alone; callers read them themselves.
                if answered and is_unanswerable(record):
                    unanswerable += 1
                    continue
                if answered and any(map(_is_damaged, accepted_answers(record))):
                    warn_once(
                        f'{path}: answers have references of HTML such as &amp;, tags such as <answer>, characters of '
                        'a wrong encoding such as Ã©, or nan for none, which no policy writes; repair them'
                    )
            except ValueError as error:
                unusable += 1
                if unusable <= _SHOWN_LINES:
                    first.append((number, str(error)))
                # A file of another kind is not read to its end.
                if not count and unusable == _SHOWN_LINES:
                    break
                continue
            count += 1
            yield number, record
    except RetrievalError as error:
        raise UserError(str(error)) from None
    requirement = _requirement(required, answered)
    if unusable == 1:
        ((number, problem),) = first
        raise UserError(f'{path}, line {number}: {requirement} ({problem})')
    if unusable:
        lines = [f'line {number}: {problem}' for number, problem in first]
        lines += ['…'] * (unusable > len(first))
        which = f'{unusable} lines' if count else 'its first lines'
        raise UserError(f'{path}: {which} are unusable: {"; ".join(lines)}; {requirement}')
    if not count:
        holds = 'holds no line'
        if unanswerable:
            holds = f'holds {unanswerable} questions without an answer and no other'
        raise UserError(f'{path}: {holds}; {requirement}')
    if unanswerable:
        warn_once(f'{path}: left out questions that have no answer: {unanswerable}')


def _read_whole_numbers(record: dict[str, Any]) -> None:
    """Accepts an answer such as 1912.0, which a table holds as a text, in both forms of the number."""
    for name in (*ANSWER_FIELDS, _ALIASES_BESIDE):
        if whole := _WHOLE.fullmatch(record.get(name, '')):
            record[name] = [whole[1], whole[0].strip()]


def _checked(row: Row, required: tuple[str, ...]) -> dict[str, Any]:
    """Returns a row with the required texts at its top; ValueError if it has not all of them."""
    if isinstance(row, Unusable):
        raise row
    extra = row.get('extra_info')
    for name in required:
        if name not in row and isinstance(extra, dict) and name in extra:
            row[name] = extra[name]
        if name not in row and _OTHER_NAMES.get(name) in row:
            row[name] = row[_OTHER_NAMES[name]]
        if name not in row:
            raise ValueError(
                f'"{name}" is missing among {listed_fields(row) or "no fields"}; write it into a field of that name'
            )
        if not isinstance(row[name], str):
            raise ValueError(f'"{name}" is a JSON {type_name(row[name])}, not a text')
        if name in _ASKED and not _is_text(row[name]):
            raise ValueError(f'"{name}" is empty')
        if 'query_id' in row and _OBFUSCATED.fullmatch(row[name]):
            raise ValueError(
                f'"{name}" is obfuscated; decrypt the file with its publisher\'s script'
            )
    return row


def _requirement(required: tuple[str, ...], answered: bool) -> str:
    """Returns a sentence about what every line must contain, for error texts."""
    fields = [f'"{name}"' for name in required]
    if answered:
        fields.append('"answers" (a text or list of texts)')
    return f'every line must be a JSON object with {" and ".join(fields)}'


def _is_text(value: Any) -> bool:
    """Returns whether a value is a text with a character that can be seen."""
    return isinstance(value, str) and bool(''.join(filter(str.isprintable, value)).strip())


def write_lines(path: pathlib.Path, lines: Iterable[Json]) -> None:
    """Writes a file of JSON lines, completely or not at all; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, (json.dumps(line, ensure_ascii=False) + '\n' for line in lines))


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
        has_hops = record.get('hops') not in (None, '')
        loaded.append(
            Question(
                text=record['question'],
                answers=tuple(accepted_answers(record)),
                hops=hops(path, number, record) if has_hops else 0,
                origin=provenance(record),
            )
        )
    if repeated := len(loaded) - len({question.text for question in loaded}):
        warn_once(
            f'{path}: {repeated} lines repeat an earlier question; each is scored by its own answers; '
            'join them if they are one question'
        )
    return loaded


def open_tasks(path: str) -> list[Question]:
    """Returns the open tasks of a file, as SCOPE's solver takes them; errors are those of `numbered_open_tasks`."""
    return [question for _, question, _ in numbered_open_tasks(path)]


def numbered_open_tasks(path: str) -> Iterator[tuple[int, Question, Json]]:
    """Yields (line number from 1, open task, object of the line) of a file of open tasks.

    Raises:
      UserError: a line has no task, or its "rubrics" are not a list of different texts, some of them with weights; the
        message has its number.
    """
    for number, record in numbered_lines(path, 'task', answered=False):
        items = record.get('rubrics')
        rubrics = list(map(_rubric, items)) if isinstance(items, list) else []
        if not rubrics or not all(rubrics):
            item = f'; item {rubrics.index({}) + 1} is neither' if rubrics else ''
            raise UserError(
                f'{path}, line {number}: "rubrics" must be a list of texts, one per criterion to grade, or of '
                f'{{"text", "weight"}}{item}'
            )
        if len({rubric['text'] for rubric in rubrics}) < len(rubrics):
            raise UserError(
                f'{path}, line {number}: a rubric occurs twice and would count twice; remove one of them'
            )
        if not any(rubric.get('weight', 1) > 0 for rubric in rubrics):
            raise UserError(
                f'{path}, line {number}: no rubric has a weight above 0, and no answer could earn anything; give one'
            )
        yield number, Question(record['task'], rubrics=tuple(rubrics)), record


def _rubric(item: Any) -> Json:
    """Returns an item of "rubrics" as {'text', 'priority'} and, where it has one, 'weight'; {} for another value."""
    rubric = item if isinstance(item, dict) else {'text': item}
    if rubric.keys() >= {'criterion', 'points'}:
        # HealthBench's names; its other fields are of its statistics.
        rubric = {'text': rubric['criterion'], 'weight': rubric['points']}
    weight = rubric.get('weight', 1)
    # Not isinstance, because bool is a subclass of int.
    has_weight = type(weight) in (int, float) and math.isfinite(weight)
    has_text = _is_text(rubric.get('text'))
    if not has_weight or not has_text or rubric.keys() - {'text', 'priority', 'weight'}:
        return {}
    # Nothing depends on the priority: SCOPE's weights are 1 for all. tasks.jsonl of a run has it.
    return {'text': rubric['text'], 'priority': 'important'} | rubric


def check_set(name: str, allow_public: bool = True) -> None:
    """Raises UserError (one line) for a question set that is neither a file nor, if allowed, a public name."""
    # A file takes precedence over a public set of the same name.
    if pathlib.Path(name).is_file():
        return
    if allow_public and name in WRITTEN:
        if not pathlib.Path(WRITTEN[name]).is_file():
            raise UserError(
                f'{name}: there is no {WRITTEN[name]}; write it with the decryption script of the set, or give the '
                'path of the file'
            )
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
        public_names = ', '.join((*PUBLIC, *WRITTEN))
        raise UserError(
            f'{name} is not a file nor one of {public_names}; give a file of JSON lines'
            f'{similar_path(name) or did_you_mean(name, [*PUBLIC, *WRITTEN])}'
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
    ids = set()
    titles = set()
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
    # A TSV has texts only; pandas writes 2.0 for whole numbers beside an empty cell.
    digits = str(value).removesuffix('.0')
    if digits.isdecimal():
        value = int(digits)
    # isinstance would accept true, because bool is a subclass of int.
    if type(value) is not int or value < 1:
        description = 'missing' if value is None else repr(value)
        raise UserError(
            f'{path}, line {number}: "hops" is {description}; give a whole number, 1 or more'
        )
    return value


# ---- answers ---------------------------------------------------------------------------------------
#
# Accepted answers in a line of a question file, in the forms that public sets and trainers give them.


ANSWER_FIELDS = (
    'answers',
    'golden_answers',
    'answer',
    'target',
    'ground_truth',
    'reward_model',
    'possible_answers',
)
# Further accepted answers beside those of one of `ANSWER_FIELDS` (MuSiQue).
_ALIASES_BESIDE = 'answer_aliases'
# Fields of an answer that is an object: verl nests it, SQuAD has lists of texts, TriviaQA a value with other spellings.
_INNER_FIELDS = ('target', 'ground_truth', 'value', 'text', 'answer')
_INNER_ALIASES = ('aliases', 'normalized_aliases')
# Fields that say whether a question has an answer → the value of one that has none (MuSiQue, SQuAD 2).
_ANSWERABLE_FIELDS = {
    'answerable': False,
    'is_answerable': False,
    'is_impossible': True,
    'unanswerable': True,
}
# Texts that stand for the answer of a question that has none (MS MARCO, QuAC), in small letters.
_NO_ANSWER = ('no answer present.', 'cannotanswer')
# Fields with the choices of a question, one of which its answer may name by number or letter (MMLU, RACE).
_CHOICES = ('choices', 'options', 'answer_choices', 'endings')
# Fields with one choice each (MedMCQA, SWAG, tables of MMLU).
_ONE_CHOICE = re.compile(r'(?:op|[Oo]ption|[Cc]hoice|ending)[ _]?(?:\d|[A-Ea-e])|[A-E]')
# Objects in which sets keep further fields of a question (FlashRAG, verl).
_FURTHER_FIELDS = ('metadata', 'extra_info')
_NAME_OF_CHOICE = re.compile(r'\(?(?:\d{1,2}|[A-Za-z])[).]?')
# What stands between a worked solution and its result (GSM8K).
_RESULT_MARK = '####'
_TRUTH_VALUES = {'true': True, 'false': False, '1': True, '0': False, '1.0': True, '0.0': False}
_YES_OR_NO = {'true': 'yes', 'false': 'no'}
# Tags and boxes of prompts; what pandas writes where nothing was.
_DAMAGED = re.compile(rf'{DAMAGE}|</?answer>|\\boxed\{{|^nan$')
# What a program of tables makes of whole numbers.
_WHOLE = re.compile(r'\s*(-?\d+)\.0\s*')
# First and last characters of a list or object that is written as a text.
_ENCLOSED = re.compile(r'\[.*\]|\{.*\}|(?:array)?\(.*\)', re.DOTALL)
# What Python and NumPy print otherwise than JSON. Nothing of it is executed.
_PYTHON_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_PYTHON_PART = re.compile(
    rf'(?P<text>{_PYTHON_TEXT})'
    r'|(?P<array>array\((?=\[)|(?<=\])\s*(?:,\s*dtype=[^()\s]+\s*)?\))'
    r'|(?P<last_comma>,(?=\s*[\])}]))'
    r'|(?P<other>[()]|\b(?:None|True|False)\b)',
    re.DOTALL,
)
_IN_JSON = {'(': '[', ')': ']', 'None': 'null', 'True': 'true', 'False': 'false'}
_PYTHON_ESCAPE = re.compile(r'\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[\'"\\nt])')
_ESCAPED = {'n': '\n', 't': '\t'}


def _is_damaged(text: str) -> bool:
    if _DAMAGED.search(text):
        return True
    try:
        # UTF-8 that was read as Windows-1252.
        return text.encode('cp1252').decode() != text
    except UnicodeError:
        return False


def is_unanswerable(record: Json) -> bool:
    """Returns whether a line says that its question has no answer.

    Raises:
      ValueError: a field that should say so has another type.
    """
    for name, value_without in _ANSWERABLE_FIELDS.items():
        value = record.get(name)
        if value is None:
            continue
        truth_value = _TRUTH_VALUES.get(str(value).strip().lower())
        if truth_value is None:
            raise ValueError(f'"{name}" is {str(value)[:60]!r}, not true or false')
        if truth_value == value_without:
            return True
    name = next((name for name in ANSWER_FIELDS if record.get(name) is not None), '')
    answers = _read(record.get(name))
    # SQuAD 2 as its columns: the lists of texts and of places are empty.
    if isinstance(answers, dict) and answers.get('text') == answers.get('answer_start') == []:
        return True
    return _says_no_answer(answers)


def _says_no_answer(value: Any) -> bool:
    """Returns whether an answer is a text that stands for none, or has nothing but such texts in it."""
    value = _read(value)
    if isinstance(value, list):
        return bool(value) and all(map(_says_no_answer, value))
    if isinstance(value, dict):
        inner = _inner_fields(value)
        return bool(inner) and _says_no_answer(value[inner[0]])
    return str(value).strip().lower() in _NO_ANSWER


def accepted_answers(record: Json) -> list[str]:
    """Returns the accepted answers of a line as a list of texts, the main one first.

    A field of `ANSWER_FIELDS` has them as a text, number or truth value, as a list of these, as an object of SQuAD,
    TriviaQA or verl, or as a text with such a list or object in it. Of several fields the first is read.

    The number 4.0, or that cell of a TSV, is accepted as '4' and '4.0'; the text "4.0" of JSON only as it is written:
    SQuAD's normal form is another.

    Raises:
      ValueError: there is no answer, one is empty or of another type, or another field has other answers.
    """
    # Columns of a table have null where a line has nothing.
    stated = [name for name in ANSWER_FIELDS if record.get(name) is not None]
    # Some sets have an empty field beside the one in use.
    names = [name for name in stated if record[name] not in ('', [])] or stated
    if not names:
        present = [name for name in ANSWER_FIELDS if name in record]
        if present:
            raise ValueError(f'"{present[0]}" is a JSON null, not a text or a list of texts')
        raise ValueError(
            f'no answers; write them into one of the fields {", ".join(ANSWER_FIELDS)}'
        )
    name = names[0]
    answers = _texts_of(record[name], name)
    # Of several annotators some may have found none.
    answers = [answer for answer in answers if not _says_no_answer(answer)] or answers
    if not answers:
        raise ValueError(f'"{name}" has no answer')
    if not all(map(_is_text, answers)):
        raise ValueError(f'an answer of "{name}" is empty')
    for other in names[1:]:
        _check_agreement(record, answers, name, other)
    _check_choices(record, answers, name)
    if any(_RESULT_MARK in answer for answer in answers):
        raise ValueError(
            f'"{name}" is a worked solution; write only the result behind {_RESULT_MARK}'
        )
    return answers + _new_aliases(record.get(_ALIASES_BESIDE), _ALIASES_BESIDE, answers)


def _check_agreement(record: Json, answers: list[str], name: str, other: str) -> None:
    """Raises ValueError if the answers of another field can be read and none of them is among those of the first."""
    others = []
    # The objects of some sets have no answer in such a field.
    with contextlib.suppress(ValueError):
        others = _texts_of(record[other], other)
    forms = set(map(normalize_answer, answers))
    if others and forms.isdisjoint(map(normalize_answer, others)):
        raise ValueError(f'"{name}" and "{other}" have no answer in common; leave one of them out')


def _check_choices(record: Json, answers: list[str], name: str) -> None:
    """Raises ValueError if an answer names one of the question's choices by number or letter and is not its text."""
    for field, choices in _choices_of(record):
        if isinstance(choices, dict):
            # ARC has {"text": […], "label": […]}, others {"A": …, "B": …}.
            choices = choices.get('text', list(choices.values()))
        items = choices if isinstance(choices, list) else [choices]
        # Of choices that are objects the label alone is a name.
        texts = [
            str(item.get('text') if isinstance(item, dict) else item).strip() for item in items
        ]
        for answer in answers:
            if _NAME_OF_CHOICE.fullmatch(answer.strip()) and answer.strip() not in texts:
                raise ValueError(
                    f'"{name}" is {answer!r}, which names one of "{field}"; write the text of that choice'
                )


def _choices_of(record: Json) -> Iterator[tuple[str, Any]]:
    """Yields (name of the field or fields, choices) of a question."""
    further_fields = [_read(record.get(name)) for name in _FURTHER_FIELDS]
    for fields in (record, *further_fields):
        if not isinstance(fields, dict):
            continue
        for name in _CHOICES:
            if fields.get(name):
                yield name, _read(fields[name])
        names = [name for name in fields if _ONE_CHOICE.fullmatch(name)]
        if len(names) > 1:
            yield ', '.join(names), [fields[name] for name in names]


def _texts_of(value: Any, name: str) -> list[str]:
    """Returns the texts in the value of a field; `name` is for errors."""
    if isinstance(value, list):
        answers = []
        for item in value:
            if isinstance(item, list) or item is None:
                raise ValueError(f'an answer of "{name}" is a JSON {type_name(item)}, not a text')
            if isinstance(item, str):
                answers += _texts_in(item, name, is_item=True)
            else:
                answers += _texts_of(item, name)
        return answers
    if isinstance(value, dict):
        return _texts_of_object(value, name)
    if isinstance(value, str):
        return _texts_in(value, name)
    if isinstance(value, bool):
        # Sets of yes-or-no questions write either pair.
        return ['yes', 'true'] if value else ['no', 'false']
    if isinstance(value, int):
        return [str(value)]
    if isinstance(value, float) and math.isfinite(value):
        value = shortest(value)
        return [str(int(value)), str(value)] if value.is_integer() else [str(value)]
    # Tables have dates, decimals and NaN.
    kind = 'a JSON null' if value is None else f'the {type_name(value)} {str(value)[:60]}'
    raise ValueError(f'"{name}" is {kind}, not a text or a list of texts')


def _texts_of_object(value: Json, name: str) -> list[str]:
    """Returns the texts of an answer that is an object."""
    inner = _inner_fields(value)
    if not inner:
        raise ValueError(f'"{name}" is an object without {", ".join(_INNER_FIELDS)}')
    answers = _texts_of(value[inner[0]], name)
    for field in _INNER_ALIASES:
        answers += _new_aliases(value.get(field), name, answers)
    return answers


def _inner_fields(value: Json) -> list[str]:
    """Returns the fields of an answer that is an object which may have its text, the first one first."""
    return [field for field in _INNER_FIELDS if value.get(field) is not None]


def _new_aliases(value: Any, name: str, answers: list[str]) -> list[str]:
    """Returns the texts of a field of aliases that no text of `answers` equals in normal form."""
    if value is None or value == '':
        return []
    used = {normalize_answer(answer) for answer in answers}
    aliases = []
    for alias in _texts_of(value, name):
        normal_form = normalize_answer(alias)
        if normal_form and normal_form not in used:
            aliases.append(alias)
            used.add(normal_form)
    return aliases


def _texts_in(text: str, name: str, is_item: bool = False) -> list[str]:
    """Returns the texts of a list or object that is written as a text; [text] for any other text.

    Args:
      is_item: whether the text stands in a list, where '[0, 1]', '{"a": 1}' and "['Til Tuesday]" are answers.

    Raises:
      ValueError: the text may be meant as a list or object and cannot be read as one, as a NumPy array without commas.
    """
    stripped = text.strip()
    yes_or_no = _YES_OR_NO.get(stripped.lower())
    if yes_or_no and not is_item:
        # A table has truth values as texts. The text is the main answer, since it may be a name.
        return [text, yes_or_no]
    if not _ENCLOSED.fullmatch(stripped):
        return [text]
    value = _read(stripped)
    if isinstance(value, dict):
        is_answer = is_item and not _inner_fields(value)
        return [text] if is_answer else _texts_of_object(value, name)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    inner = stripped[1:-1].strip()
    # '(1, 2)', '{1, 2}' and "('Til Tuesday)" are answers.
    has_texts = inner.startswith(('"', "'"))
    if stripped.startswith('(') or (is_item and not stripped.startswith('{')):
        has_texts = has_texts and inner.endswith(('"', "'"))
    is_list = isinstance(value, list) and stripped.startswith('[') and not is_item
    if has_texts or is_list or stripped.startswith('array'):
        raise ValueError(
            f'an answer of "{name}" is the text {stripped[:60]!r}, which may be meant as a list or an object; write it '
            'as JSON'
        )
    return [text]


def _read(value: Any) -> Any:
    """Returns the list or object in a text, as JSON, Python or NumPy print it; any other value as it is."""
    if not isinstance(value, str) or not _ENCLOSED.fullmatch(value.strip()):
        return value
    for text in (value, _PYTHON_PART.sub(_json_part, value)):
        with contextlib.suppress(json_text.Unusable):
            written = json_text.parse(text)
            if isinstance(written, list | dict):
                return written
    return value


def _json_part(part: re.Match[str]) -> str:
    """Returns a part of a value that Python printed as JSON has it."""
    if part['text']:
        return json.dumps(_PYTHON_ESCAPE.sub(_unescaped, part['text'][1:-1]))
    return _IN_JSON[part['other']] if part['other'] else ''


def _unescaped(escape: re.Match[str]) -> str:
    """Returns the character of an escape in a Python text."""
    code = escape[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, code)
