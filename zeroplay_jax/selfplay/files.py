"""Files of JSON lines that users bring: every line checked, answers under any of the names that public sets use."""

from __future__ import annotations

import json
import pathlib

from zeroplay_jax.types import Json, UserError

ANSWER_FIELDS = ('answers', 'golden_answers', 'answer', 'target')


def read_lines(path: str, *required: str, answered: bool = True) -> list[Json]:
    """Objects of a JSON-lines file.

    Raises:
      UserError: no such file, or a line that is not an object with the required texts and, where `answered`, an
        answer; names the line.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding='utf-8').split('\n')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{path}: cannot be read ({error})') from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            missing = [name for name in required if not isinstance(record[name], str)]
            _ = answered and gold(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f'{path}, line {number}: {_wanted(required, answered)} ({error})') from None
        if missing:
            raise UserError(f'{path}, line {number}: {_wanted(required, answered)}')
        found.append(record)
    if not found:
        raise UserError(f'{path}: holds no line; {_wanted(required, answered)}')
    return found


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
    if isinstance(value, dict):  # {'target': [...]} in verl's reward_model form
        value = value.get('target')
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(a, str) and a.strip() for a in listed):
        raise ValueError(f'no answers among the fields {", ".join(ANSWER_FIELDS)}')
    return list(listed)


def questions(path: str) -> list[Json]:
    """Questions {'question', 'answers', 'hops'} of a file; hops are 1 where a line says nothing."""
    found = read_lines(path, 'question')
    return [dict(question=r['question'], answers=gold(r), hops=int(r.get('hops', 1))) for r in found]
