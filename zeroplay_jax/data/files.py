"""Reads files of users: questions, open tasks, documents, held-out passages. Every line is checked."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from zeroplay_jax.data.answer_fields import (
    ALIASES_BESIDE,
    ANSWER_FIELDS,
    WHOLE,
    WRITE_ONE,
    accepted_answers,
    is_damaged,
    is_missing,
    is_text,
    is_unanswerable,
)
from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.retrieval import downloads
from zeroplay_jax.retrieval.command import similar_path, warn_once
from zeroplay_jax.retrieval.json_text import Unusable, type_name
from zeroplay_jax.retrieval.rows import Row, listed_fields, rows, suffix_of
from zeroplay_jax.retrieval.types import short
from zeroplay_jax.rollout import prompts
from zeroplay_jax.runtime.disk import write_text
from zeroplay_jax.types import Json, Question, UserError

T = TypeVar('T')

# Public sets, on which Search-R1 and its successors evaluate (FlashRAG; Jin et al. 2024, arXiv:2405.13576).
COLLECTION = 'hf://RUC-NLPIR/FlashRAG_datasets'
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
# name of the document, id of the passage.
PROVENANCE = ('source', 'line', 'document', 'document_id')
# Characters of the name of a document; files of others have whole articles under `document`.
_LONGEST_NAME = 200
# Fields that a policy is asked.
_ASKED = ('question', 'task')
# Fields with what a question shows besides its text (HLE).
_PICTURES = ('image', 'images')
# Names of a rubric's fields in HealthBench, ResearchRubrics and ResearchQA → ours.
_RUBRIC_FIELDS = {
    'text': 'text',
    'criterion': 'text',
    'rubric_item': 'text',
    'weight': 'weight',
    'points': 'weight',
}
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
      UserError: the file does not exist, has no line, or an unusable one.
    """
    count = unanswerable = 0
    suffix = suffix_of(pathlib.Path(path))
    requirement = _requirement(required, answered, suffix)
    unit = 'row' if suffix == '.parquet' else 'line'
    for number, row in rows(pathlib.Path(path)):
        try:
            record = _checked(row, required)
            # All cells of such a table are texts.
            if suffix == '.tsv':
                _read_whole_numbers(record)
            # The answers are read for their errors alone; callers read them themselves.
            if answered and is_unanswerable(record):
                unanswerable += 1
                continue
            if answered and 'question' in required:
                _check_text_alone(record)
            if answered and any(map(is_damaged, accepted_answers(record))):
                warn_once(
                    f'{path}: answers have references of HTML such as &amp;, tags such as <answer>, characters of '
                    'a wrong encoding such as Ã© or that are not shown, or nan for none, which no policy writes; '
                    'repair them'
                )
        except ValueError as error:
            raise UserError(f'{path}, {unit} {number}: {requirement} ({error})') from None
        count += 1
        yield number, record
    if not count:
        holds = 'holds no line'
        if unanswerable:
            holds = f'holds {unanswerable} questions without an answer and no other'
        raise UserError(f'{path}: {holds}; {requirement}')
    if unanswerable:
        warn_once(f'{path}: left out questions that have no answer: {unanswerable}')


def _check_text_alone(record: Json) -> None:
    """Raises ValueError for a question with a picture, which no policy of texts can answer."""
    for name in _PICTURES:
        if not is_missing(record.get(name)):
            raise ValueError(
                f'"{name}" is not empty, and a policy reads text alone; leave the line out'
            )


def _read_whole_numbers(record: dict[str, Any]) -> None:
    """Accepts an answer such as 1912.0, which a table holds as a text, in both forms of the number."""
    for name in (*ANSWER_FIELDS, *ALIASES_BESIDE):
        if whole := WHOLE.fullmatch(record.get(name, '')):
            record[name] = [whole[1], whole[0].strip()]


def _checked(row: Row, required: tuple[str, ...]) -> dict[str, Any]:
    """Returns a row with the required texts at its top; ValueError if it has not all of them."""
    if isinstance(row, Unusable):
        raise row
    extra = row.get('extra_info')
    for name in required:
        if name not in row and isinstance(extra, dict) and name in extra:
            row[name] = extra[name]
        # As in BrowseComp-Plus.
        if name == 'question' and 'query' in row:
            row.setdefault(name, row['query'])
        if name not in row:
            fix = 'write it into a field of that name'
            if isinstance(row.get('data'), list):
                fix = "jq -c '.data[].paragraphs[].qas[]' FILE writes the questions of SQuAD, one per line"
            raise ValueError(
                f'"{name}" is missing among {listed_fields(row) or "no fields"}; {fix}'
            )
        value = row[name]
        if not isinstance(value, str):
            # A text with other fields beside it, or a column of a table.
            fix = WRITE_ONE
            if isinstance(value, dict):
                fix = "give its text alone; in pandas to_json(FILE, orient='records', lines=True) writes rows"
            raise ValueError(f'"{name}" is no text ({type_name(value)}); {fix}')
        if name in _ASKED and not is_text(value):
            raise ValueError(f'"{name}" is empty')
        if 'query_id' in row and _OBFUSCATED.fullmatch(value):
            raise ValueError(
                f'"{name}" is obfuscated; decrypt the file with its publisher\'s script'
            )
    return row


def _requirement(required: tuple[str, ...], answered: bool, suffix: str) -> str:
    """Returns a sentence about what every line must contain, for error texts."""
    fields = [f'"{name}"' for name in required]
    if answered:
        fields.append('"answers" (a text or list of texts)')
    listed = ' and '.join(fields)
    if suffix == '.tsv':
        return f'line 1 must name the columns, and every line must have {listed}'
    if suffix == '.parquet':
        return f'every row must have {listed}'
    return f'every line must be a JSON object with {listed}'


def write_lines(path: pathlib.Path, lines: Iterable[Json]) -> None:
    """Writes a file of JSON lines, completely or not at all; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, (json.dumps(line, ensure_ascii=False) + '\n' for line in lines))


def provenance(record: Json) -> dict[str, Any]:
    """Returns the provenance fields of a line; {} in files that `zeroplay_jax.extras.inputs` did not write."""
    fields = {name: record[name] for name in PROVENANCE if name in record}
    if len(str(fields.get('document', ''))) > _LONGEST_NAME:
        del fields['document']
    return fields


def questions(path: str) -> list[Question]:
    """Returns the questions of a file; the hops of a line without 'hops' are unknown (0).

    Raises:
      UserError: an unusable line.
    """
    loaded = []
    keys = set()
    repeated = []
    for number, record in numbered_lines(path, 'question'):
        key = question_key(record['question'])
        if key in keys:
            repeated.append(f'line {number}, {short(record["question"])}')
        keys.add(key)
        has_hops = record.get('hops') not in (None, '')
        loaded.append(
            Question(
                text=record['question'],
                answers=tuple(accepted_answers(record)),
                hops=hops(path, number, record) if has_hops else 0,
                origin=provenance(record),
            )
        )
    if repeated:
        warn_once(
            f'{path}: {len(repeated)} lines repeat an earlier question (the first: {repeated[0]}); each is scored by '
            'its own answers; join them if they are one question'
        )
    return loaded


_STRAIGHT_QUOTES = str.maketrans(dict.fromkeys('“”„«»', '"') | dict.fromkeys('‘’‚', "'"))
# Quotes around words, unlike the marks of 5'3" and f'(x). Both patterns have a limit, because a search from every mark
# to the end would take hours for a long text.
_QUOTED = re.compile(r'(?<!\w)(["\'])(.{1,300}?)\1(?!\w)')
# Marks at the end of a word. Those inside of one (3.5) or alone (';') tell questions apart.
_PROSE_MARKS = re.compile(r'(?<=\S)[.,;:?…？]{1,100}(?= |$)')


def question_key(text: str) -> str:
    """Returns what is equal for questions that differ only in case, blanks, Unicode form and the marks of prose.

    References of HTML are equal to their characters. Characters that are not shown do not count: zero-width ones, soft
    hyphens, marks of direction. Marks of prose are quotes around words, and marks at the end of a word or of the
    question. All others stay: C, C++ and C# are different, and so are 3.5 and 35. '' for a text of marks alone.
    """
    # Some pages are escaped twice: &amp;uuml;.
    decoded = html.unescape(html.unescape(text))
    shown = ''.join(mark for mark in decoded if unicodedata.category(mark) != 'Cf')
    straight = unicodedata.normalize('NFC', shown).casefold().translate(_STRAIGHT_QUOTES)
    unquoted = _QUOTED.sub(r'\2', ' '.join(straight.split()))
    return _PROSE_MARKS.sub('', unquoted).rstrip('.?…？ ')


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
            item = f'; item {rubrics.index({}) + 1} is none of these' if rubrics else ''
            raise UserError(
                f'{path}, line {number}: "rubrics" must be a list of texts, one per criterion to grade, or of '
                '{"text"}, {"text", "weight"}, {"criterion", "points"}, {"criterion", "weight"} or {"rubric_item"}'
                f'{item}'
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
    if 'criterion' in rubric or 'rubric_item' in rubric:
        # Other fields are of the statistics of such sets. Columns of a table have null where a line has nothing.
        names = [name for name in _RUBRIC_FIELDS if rubric.get(name) is not None]
        renamed = {_RUBRIC_FIELDS[name]: rubric[name] for name in names}
        # Two names of one thing may contradict each other; all criteria have weights.
        if len(renamed) < len(names) or ('criterion' in names and 'weight' not in renamed):
            return {}
        rubric = renamed
    weight = rubric.get('weight', 1)
    # Not isinstance, because bool is a subclass of int.
    has_weight = type(weight) in (int, float) and math.isfinite(weight)
    has_text = is_text(rubric.get('text'))
    if not has_weight or not has_text or rubric.keys() - {'text', 'priority', 'weight'}:
        return {}
    # Nothing depends on the priority: SCOPE's weights are 1 for all. tasks.jsonl of a run has it.
    return {'text': rubric['text'], 'priority': 'important'} | rubric


def load_set(name: str, limit: int = 0, seed: int = 0, rubrics: bool = False) -> list[Question]:
    """Returns the questions of a file or a public set, which is downloaded; with `rubrics` the open tasks of a file.

    Args:
      name: path of a file, or a key of `PUBLIC` or `WRITTEN`.
      limit: number of questions drawn from the set; 0: all.
      seed: seed of the draw.
      rubrics: whether the file holds open tasks.

    Raises:
      UserError: neither a file nor a public name; an unusable line; no connection.
    """
    read = open_tasks if rubrics else questions
    items = read(path_of_set(name))
    return sample(items, limit or len(items), seed)


def path_of_set(name: str) -> str:
    """Returns the path of a set's file: `name` itself, or the downloaded file of a public name.

    Raises:
      UserError: neither a file nor a public name; no connection.
    """
    if pathlib.Path(name).is_file():
        return name
    check_set(name)
    if name in WRITTEN:
        return WRITTEN[name]
    if not downloads.is_name(name):
        name = f'{COLLECTION}/{name}/{PUBLIC[name]}.jsonl'
    return downloads.fetch_file(name)


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
        downloads.check_name(name, is_file=True)
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
    raise UserError(
        f'{path}, line {number}: "link" is {repr(link)[:60]}; give a name that occurs in "text" as whole words, letter '
        'for letter, or leave "link" out'
    )


def held_out_passages(path: str) -> HeldOutPassages:
    """Returns the passages of a file with lines {'document_id', 'title'}; the title may be missing.

    Raises:
      UserError: an unusable line.
    """
    records = read_lines(path, 'document_id', answered=False)
    ids = frozenset(record['document_id'] for record in records)
    titles = [record.get('title') for record in records]
    return HeldOutPassages(ids, frozenset(one for one in titles if one and isinstance(one, str)))


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
