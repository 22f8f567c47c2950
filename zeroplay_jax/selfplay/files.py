"""Files of JSON lines that users bring: every line checked, answers under any of the names that public sets use."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from zeroplay_jax.types import Json, UserError

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
# Where a line of a built file comes from; it goes with the item into the log of a run.
PROVENANCE = ('source', 'line', 'document_id')


def read_lines(path: str, *required: str, answered: bool = True) -> list[Json]:
    """The objects that `numbered` finds."""
    return [record for _, record in numbered(path, *required, answered=answered)]


def numbered(path: str, *required: str, answered: bool = True) -> Iterator[tuple[int, Json]]:
    """(line number from 1, object) of a JSON-lines file, as a stream; empty lines are passed over.

    A required text that a line keeps under 'extra_info', as verl's files do, is brought up.

    Raises:
      UserError: no such file, no line in it, or a line that is not an object with the required texts and, where
        `answered`, an answer; names the line.
    """
    number = 0
    try:
        # Only '\n' ends a line: texts may hold what Python takes for an end as well.
        with pathlib.Path(path).open(encoding='utf-8', newline='\n') as lines:
            found = ((i, line) for i, line in enumerate(lines, 1) if line.strip())
            for number, line in found:
                yield number, _record(line, required, answered)
    except FileNotFoundError:
        raise UserError(
            f'{path}: cannot be read, no such file; give a file of JSON lines'
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{path}: cannot be read ({error})') from None
    except _Unusable as error:
        reason = f' ({error})' if str(error) else ''
        raise UserError(f'{path}, line {number}: {_wanted(required, answered)}{reason}') from None
    if not number:
        raise UserError(f'{path}: holds no line; {_wanted(required, answered)}')


class _Unusable(Exception):
    """What is wrong with a line."""


def _record(line: str, required: tuple[str, ...], answered: bool) -> Json:
    try:
        record = json.loads(line)
        more = record.get('extra_info')
        for name in required:
            if name not in record and isinstance(more, dict) and name in more:
                record[name] = more[name]
        _ = answered and gold(record)
        missing = [name for name in required if not isinstance(record[name], str)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Unusable(error) from None
    if missing:
        raise _Unusable
    return record


def _wanted(required, answered):
    fields = [f'"{name}"' for name in required] + ['"answers" (a text or list of texts)'] * answered
    return f'every line must be a JSON object with {" and ".join(fields)}'


def gold(record: Json) -> list[str]:
    """Accepted answers of a line as a list of texts.

    Raises:
      ValueError: none, an empty one, or something that is no text.
    """
    field = next((name for name in ANSWER_FIELDS if name in record), None)
    value = record[field] if field else None
    while isinstance(value, dict):  # verl: {'reward_model': {'ground_truth': {'target': […]}}}
        value = value.get('target', value.get('ground_truth'))
    listed = [value] if isinstance(value, str) else value
    if (
        not isinstance(listed, list)
        or not listed
        or not all(isinstance(a, str) and a.strip() for a in listed)
    ):
        raise ValueError(f'no answers among the fields {", ".join(ANSWER_FIELDS)}')
    return list(listed)


def provenance(record: Json) -> dict[str, Any]:
    """What a line says of where it comes from; {} of files that no builder wrote."""
    return {name: record[name] for name in PROVENANCE if name in record}


def questions(path: str) -> list[Json]:
    """Questions {'question', 'answers', 'hops', …provenance} of a file; hops are 1 where a line says nothing."""
    return [
        dict(question=r['question'], answers=gold(r), hops=hops(path, number, r, 1)) | provenance(r)
        for number, r in numbered(path, 'question')
    ]


def open_tasks(path: str) -> list[Json]:
    """Open tasks of a file, as SCOPE's solver takes them: {'question', 'rubrics', 'answers', 'hops'}.

    Raises:
      UserError: a line without a task, or whose "rubrics" are no list of texts; names it.
    """
    found: list[Json] = []
    for number, record in numbered(path, 'task', answered=False):
        texts = record.get('rubrics')
        if (
            not isinstance(texts, list)
            or not texts
            or not all(isinstance(t, str) and t.strip() for t in texts)
        ):
            raise UserError(
                f'{path}, line {number}: "rubrics" must be a list of texts, one per thing to be graded'
            )
        rubrics = [{'text': text, 'priority': 'important'} for text in texts]
        found.append(dict(question=record['task'], rubrics=rubrics, answers=[], hops=1))
    return found


def check_set(name: str, fetched: bool = True) -> None:
    """Refuses a set of questions that is neither a file nor, where such are `fetched`, a public name."""
    if not pathlib.Path(name).is_file() and not (fetched and name in PUBLIC):
        public = f' nor one of {", ".join(PUBLIC)}' if fetched else ''
        raise UserError(f'{name} is not a file{public}; give a file of JSON lines')


def drawn(items: list[Json], count: int, seed: int) -> list[Json]:
    """So many of all, evenly over the whole list (a file may be sorted by topic), in their order; all if there are
    fewer."""
    if count >= len(items):
        return items
    return [items[i] for i in np.sort(np.random.default_rng(seed).permutation(len(items))[:count])]


def documents(path: str) -> list[Json]:
    """Documents {'title', 'text', 'hops', …provenance} of a file, with the 'type' of task where a line has one."""
    found: list[Json] = []
    for number, r in numbered(path, 'title', 'text', answered=False):
        kind = r.get('type', '')
        if not isinstance(kind, str):
            raise UserError(
                f'{path}, line {number}: "type" is {kind!r}; give the name of a kind of task'
            )
        item = dict(title=r['title'], text=r['text'], hops=hops(path, number, r)) | provenance(r)
        found.append(item | (dict(type=kind) if kind else {}))
    return found


def hops(path: str, number: int, record: Json, default: int | None = None) -> int:
    """Number of hops of a line.

    Raises:
      UserError: none, or no whole number from 1 on; names the line.
    """
    value = record.get('hops', default)
    if type(value) is not int or value < 1:
        shown = 'missing' if value is None else repr(value)
        raise UserError(f'{path}, line {number}: "hops" is {shown}; give a whole number, 1 or more')
    return value
