"""A passage in wire form: the title in double quotes on the first line, the text after it (Search-R1, verl)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .json_text import Unusable, type_name

# Names that public corpora and search servers give the fields of a passage, in the order in which they are looked for.
# `contents` has the wire form; the others are plain.
FIELD_NAMES = {
    'id': ('id', '_id', 'docid', 'doc_id', 'pid', 'passage_id'),
    'text': ('contents', 'text', 'passage', 'content', 'body', 'page_content', 'snippet'),
    'title': ('title',),
}
_WIRE = 'contents'
# Names of fields that an error lists.
_LISTED_FIELDS = 8


@dataclasses.dataclass(frozen=True)
class Record:
    """One passage as its source file has it.

    Attributes:
      id: unique in the corpus.
      contents: the wire form.
      document: name of the document of the passage, such as a file of a folder; '' where the source has none. Passages
        without it belong to one document if they have the same title.
    """

    id: str
    contents: str
    document: str = ''


def contents(title: str, text: str) -> str:
    """Returns the wire form of a passage."""
    return f'"{title}"\n{text}'


def split(contents: str) -> tuple[str, str]:
    """Returns (title, text) of a passage in wire form; no title where the first line is not in quotes."""
    # `splitlines` would split at other characters as well; only a line feed ends the title.
    first_line, _, text = contents.partition('\n')
    # A carriage return belongs to the end of the line.
    first_line = first_line.rstrip()
    if len(first_line) >= 2 and first_line[0] == first_line[-1] == '"':
        return first_line[1:-1], text
    return '', contents


def record_of(row: Mapping[str, Any], fields: Mapping[str, str]) -> Record:
    """Returns the passage in a row of a corpus file.

    The id is a text or whole number under `id`, `_id`, `docid`, `doc_id`, `pid` or `passage_id`. The text is under
    `contents`, in wire form, or else under another name of `FIELD_NAMES`; `title` may be missing. A
    `document_name` separates documents of the same title. Other fields are ignored.

    Args:
      row: the fields by name.
      fields: names of the fields for any of 'id', 'text' and 'title', instead of those above.

    Raises:
      Unusable: a field is missing or of another type.
    """
    id_name = _name_of('id', row, fields)
    text_name = _name_of('text', row, fields)
    title_name = _name_of('title', row, fields)
    record_id = row[id_name]
    # In Python a bool is an int, but `true` is not an id.
    if not isinstance(record_id, str | int) or isinstance(record_id, bool):
        raise Unusable(
            f'"{id_name}" is a JSON {type_name(record_id)}; give a text or a whole number'
        )
    if row[text_name] is None:
        raise Unusable(f'"{text_name}" is null; give a text')
    text = _text_in(row, text_name)
    # Blanks and line feeds of a title would break its line.
    title = ' '.join(_text_in(row, title_name).split())
    document = _text_in(row, 'document_name')
    if text_name == _WIRE:
        own_title, body = split(text)
        if own_title or not title:
            return Record(str(record_id), text, document)
        # Some files repeat the title as a first line without quotes.
        text = body.removeprefix(f'{title}\n')
    # Without a title a text stands alone, unless its own first line would be taken for one.
    has_title = bool(title or split(text)[0])
    return Record(str(record_id), contents(title, text) if has_title else text, document)


def title_like(row: Mapping[str, Any]) -> str:
    """Returns the name of a field of a row that may be a title under another name; '' without one."""
    for name, value in row.items():
        lower_name = name.lower()
        is_named_so = lower_name in ('title', 'headline') or lower_name.endswith('_title')
        if is_named_so and isinstance(value, str) and value.strip():
            return name
    return ''


def _name_of(field: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    """Returns the name under which a row has a field; '' for a missing title."""
    names = (fields[field],) if field in fields else FIELD_NAMES[field]
    stated = [name for name in names if name in row]
    if stated:
        # Some files have empty fields beside the one in use.
        return next((name for name in stated if row[name] not in (None, '')), stated[0])
    if field == 'title' and field not in fields:
        return ''
    listed = ', '.join(f'"{name}"' for name in list(row)[:_LISTED_FIELDS])
    raise Unusable(
        f'no {field}: none of {", ".join(names)} among its fields {listed[:200]}; name it with --fields {field}=NAME'
    )


def _text_in(row: Mapping[str, Any], name: str) -> str:
    """Returns the text under a name; '' for a missing one or null."""
    value = row.get(name)
    if value is None:
        return ''
    if not isinstance(value, str):
        raise Unusable(f'"{name}" is a JSON {type_name(value)}; give a text')
    return value
