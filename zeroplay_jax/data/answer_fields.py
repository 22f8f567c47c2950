"""Reads the accepted answers in a line of a question file, in the forms that public sets and trainers give them."""

from __future__ import annotations

import contextlib
import json
import math
import re
from typing import Any

from zeroplay_jax.objectives.answers import normalize_answer
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.retrieval.json_text import type_name
from zeroplay_jax.retrieval.rows import DAMAGE, MISSING, shortest
from zeroplay_jax.types import Json

ANSWER_FIELDS = (
    'answers',
    'golden_answers',
    'answer',
    'target',
    'ground_truth',
    'reward_model',
    'possible_answers',
)
# Further accepted answers beside those of one of `ANSWER_FIELDS` (MuSiQue; CRAG).
_ANSWER_ALIASES = 'answer_aliases'
# Other sets have other things under these names.
_POSSIBLE_ALIASES = ('aliases', 'alt_ans')
ALIASES_BESIDE = (_ANSWER_ALIASES, *_POSSIBLE_ALIASES)
# Fields of an answer that is an object: verl nests it, SQuAD has lists of texts, TriviaQA a value with other spellings.
_INNER_FIELDS = ('target', 'ground_truth', 'value', 'text', 'answer')
_INNER_ALIASES = ('aliases', 'normalized_aliases')
# Fields of an answer that is an object which say whether it is right.
_RIGHT_MARKS = ('correct', 'is_correct', 'selected', 'is_selected')
# Fields that say whether a question has an answer → the value of one that has none (MuSiQue, SQuAD 2).
_ANSWERABLE_FIELDS = {
    'answerable': False,
    'is_answerable': False,
    'is_impossible': True,
    'unanswerable': True,
}
# Texts that stand for the answer of a question that has none (MS MARCO, QuAC), in small letters.
_NO_ANSWER = ('no answer present.', 'cannotanswer')
# Texts that are no alias: CRAG has the last one for questions of a false premise.
_NO_ALIAS = (*_NO_ANSWER, 'invalid question')
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
# What to do about a field that has no text.
WRITE_ONE = 'write one, or leave out the rows without one (dropna in pandas)'
# Tags and boxes of prompts; what pandas writes where nothing was.
# Of the characters that are not shown, without those that join letters.
_DAMAGED = re.compile(
    rf'{DAMAGE}|</?answer>|\\boxed\{{|^nan$|[\u00ad\u200b\u200e\u200f\u2060\ufeff]'
)
# What a program of tables makes of whole numbers.
WHOLE = re.compile(r'\s*(-?\d+)\.0\s*')
# First and last characters of a list or object that is written as a text.
_ENCLOSED = re.compile(r'\[.*\]|\{.*\}|(?:array)?\(.*\)', re.DOTALL)
# What Python and NumPy print otherwise than JSON. Nothing of it is executed.
# Without its end a text is the rest, so that it is read once.
_PYTHON_TEXT = r"""'(?:[^'\\]|\\.)*+(?:'|\Z)|"(?:[^"\\]|\\.)*+(?:"|\Z)"""
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


class _MarkedWrong(ValueError):
    """All answers of a field are marked wrong."""


def is_text(value: Any) -> bool:
    """Returns whether a value is a text with a character that can be seen."""
    return isinstance(value, str) and bool(''.join(filter(str.isprintable, value)).strip())


def is_missing(value: Any) -> bool:
    """Returns whether a value is empty, false or a mark such as nan, or a list or object of such values alone."""
    value = _read(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return all(map(is_missing, value))
    # Python and JSON write the first two into texts.
    return not value or str(value).strip() in ('', 'None', 'null', *MISSING)


def is_damaged(text: str) -> bool:
    """Returns whether a conversion has left its marks in an answer."""
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
        truth = _truth(value)
        if truth is None:
            raise ValueError(f'"{name}" is {str(value)[:60]!r}, not true or false')
        if truth == value_without:
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
    # Logs of other policies. "correct" may be the answer itself.
    if _truth(record.get('is_correct')) is False:
        raise ValueError('"is_correct" says that its answer is wrong; leave the line out')
    # Columns of a table have null where a line has nothing.
    stated = [name for name in ANSWER_FIELDS if record.get(name) is not None]
    # Some sets have an empty field beside the one in use.
    names = [name for name in stated if record[name] not in ('', [])] or stated
    if not names:
        present = [name for name in ANSWER_FIELDS if name in record]
        if present:
            raise ValueError(f'"{present[0]}" has no value; {WRITE_ONE}')
        raise ValueError(
            f'no answers; write them into one of the fields {", ".join(ANSWER_FIELDS)}'
        )
    name = names[0]
    answers = _texts_of(record[name], name)
    # Of several annotators some may have found none.
    answers = [answer for answer in answers if not _says_no_answer(answer)] or answers
    if not answers:
        raise ValueError(f'"{name}" has no answer')
    if not all(map(is_text, answers)):
        raise ValueError(f'an answer of "{name}" is empty')
    for other in names[1:]:
        _check_agreement(record, answers, name, other)
    _check_choices(record, answers, name)
    if any(_RESULT_MARK in answer for answer in answers):
        raise ValueError(
            f'"{name}" is a worked solution; write only the result behind {_RESULT_MARK}'
        )
    answers += _new_aliases(record.get(_ANSWER_ALIASES), _ANSWER_ALIASES, answers)
    for field in _POSSIBLE_ALIASES:
        with contextlib.suppress(ValueError):
            answers += _new_aliases(_possible_aliases(record.get(field)), field, answers)
    return answers


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
    further_fields = [_read(record.get(field)) for field in _FURTHER_FIELDS]
    for fields in (record, *further_fields):
        if not isinstance(fields, dict):
            continue
        choices_of = {field: _read(fields[field]) for field in _CHOICES if fields.get(field)}
        single = [field for field in fields if _ONE_CHOICE.fullmatch(field)]
        if len(single) > 1:
            choices_of[', '.join(single)] = [fields[field] for field in single]
        for field, choices in choices_of.items():
            if isinstance(choices, dict):
                # ARC has {"text": […], "label": […]}, others {"A": …, "B": …}.
                choices = choices.get('text', list(choices.values()))
            # Of choices that are objects the label alone is a name.
            texts = {
                str(item.get('text') if isinstance(item, dict) else item).strip()
                for item in _listed(choices)
            }
            for answer in map(str.strip, answers):
                if _NAME_OF_CHOICE.fullmatch(answer) and answer not in texts:
                    raise ValueError(
                        f'"{name}" is {answer!r}, which names one of "{field}"; write the text of that choice'
                    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _texts_of(value: Any, name: str) -> list[str]:
    """Returns the texts in the value of a field; `name` is for errors."""
    if isinstance(value, list):
        answers = []
        wrong = None
        for item in value:
            if isinstance(item, list) or item is None:
                raise ValueError(f'an answer of "{name}" is a {type_name(item)}, not a text')
            try:
                if isinstance(item, str):
                    answers += _texts_in(item, name, is_item=True)
                else:
                    answers += _texts_of(item, name)
            except _MarkedWrong as error:
                wrong = error
        if wrong and not answers:
            raise wrong
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
    raise ValueError(
        f'"{name}" is the {type_name(value)} {str(value)[:60]}, not a text or a list of texts'
    )


def _texts_of_object(value: Json, name: str) -> list[str]:
    """Returns the texts of an answer that is an object."""
    inner = _inner_fields(value)
    if not inner:
        raise ValueError(f'"{name}" is an object without {", ".join(_INNER_FIELDS)}')
    answers = _texts_of(_marked_right(value, inner[0]), name)
    for field in _INNER_ALIASES:
        answers += _new_aliases(value.get(field), name, answers)
    return answers


def _marked_right(value: Json, field: str) -> Any:
    """Returns the value of a field; of a list, beside which a list of marks stands, only the items not marked wrong.

    Raises:
      _MarkedWrong: nothing is left.
    """
    read = _read(value[field])
    is_list = isinstance(read, list)
    items = read if is_list else [value[field]]
    for mark in _RIGHT_MARKS:
        # A single number beside a list says which item is meant.
        marks = value.get(mark) if is_list else [value.get(mark)]
        if not isinstance(marks, list) or len(marks) != len(items):
            continue
        right = [item for item, is_right in zip(items, marks) if _truth(is_right) is not False]
        if items and not right:
            raise _MarkedWrong('all answers are marked wrong; leave the line out')
        if len(right) < len(items):
            return right
    return value[field]


def _truth(mark: Any) -> bool | None:
    """Returns the truth value in a field, also as a text or number; None for null and other values."""
    return _TRUTH_VALUES.get(str(mark).strip().lower())


def _inner_fields(value: Json) -> list[str]:
    """Returns the fields of an answer that is an object which may have its text, the first one first."""
    return [field for field in _INNER_FIELDS if value.get(field) is not None]


def _possible_aliases(value: Any) -> list[str]:
    """Returns the texts of a field that may have aliases; other values in it are left out."""
    value = _read(value)
    aliases = []
    for item in _listed(value):
        is_alias = is_text(item) and not is_missing(item) and _RESULT_MARK not in item
        if is_alias and item.strip().lower() not in _NO_ALIAS:
            aliases.append(item)
    return aliases


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
