"""Replies of search servers, Search-R1's and those like it; a field that cannot be used is named."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from . import json_text
from .corpus import DocumentPage
from .rows import FIELD_NAMES
from .types import Passage, contents, short, split

_TEXT_FIELDS = FIELD_NAMES['text']
_ID_FIELDS = FIELD_NAMES['id']
# Digits of the id of a passage whose server gives none.
_ID_DIGITS = 16
# Bytes of a reply that are looked at for a quotation.
_QUOTED_BYTES = 400
# Fields in which servers report with status 200 that a search, or a part of it, failed (`_reports_failure`).
_REPORTS = ('error', 'errors', 'success', 'status', 'code', 'status_code', 'timed_out', '_shards')
_NO_ERROR = ('0', 'false', 'none', 'null')
# A server that loads its index is waited for.
_FAILURES = ('error', 'fail', 'failed', 'failure', 'loading', 'starting', 'unavailable', 'timeout')
# Fields that say why.
_WORDS = ('error', 'errors', 'message', 'detail')


class MalformedReply(Exception):
    """A reply is not of the protocol; the message says which part of it."""


class ReportedFailure(MalformedReply):
    """A reply says that the search failed, which may be temporary; the message has the server's words."""


def parse_results(body: bytes, count: int, read: Callable[[Any], Any]) -> list[Any]:
    """Returns the `count` results of a reply, each converted by `read`.

    Args:
      body: of the reply, {"result": […]}.
      count: number of queries or references of the request.
      read: `passages` or `page`.

    Raises:
      ReportedFailure: it says that a part of the search failed, whatever results it has.
      MalformedReply: the body, or a result, has another form.
    """
    try:
        # Numbers that are not finite are refused where they matter.
        reply = json_text.parse_object(body, not_finite=float)
    except json_text.Unusable as error:
        # Without the advice for files.
        reason = str(error).partition(';')[0]
        text = short(body[:_QUOTED_BYTES].decode('utf-8', 'replace'))
        raise MalformedReply(f'{reason}: {text}') from None
    rows = reply.get('result')
    failing = {
        name: reply[name]
        for name in _REPORTS
        if name in reply and _reports_failure(name, reply[name])
    }
    if failing:
        # The reason comes first, because the quotation is cut.
        words = {name: reply[name] for name in _WORDS if reply.get(name)}
        others = {name: value for name, value in reply.items() if name != 'result'}
        text = short(json.dumps(words | failing | others, ensure_ascii=False))
        raise ReportedFailure(f'it reports an error: {text}')
    if not isinstance(rows, list):
        text = short(json.dumps(reply, ensure_ascii=False))
        raise MalformedReply(f'no list "result" in {text}')
    # Results are matched to queries by position.
    if len(rows) != count:
        raise MalformedReply(f'{len(rows)} results for {count} queries')
    return [read(row) for row in rows]


def _reports_failure(field: str, value: Any) -> bool:
    """Returns whether a field of `_REPORTS` says with this value that the search, or a part of it, failed."""
    # Some servers write booleans and numbers as texts.
    word = str(value).lower()
    if field in ('error', 'errors'):
        # There may be one for each query.
        return any(value) if isinstance(value, list) else bool(value) and word not in _NO_ERROR
    if field == 'success':
        return word == 'false'
    if field == 'timed_out':
        return word in ('true', '1')
    if field == '_shards':
        # Of Elasticsearch: {'total', 'successful', 'failed'}.
        return isinstance(value, Mapping) and str(value.get('failed', 0)) != '0'
    # Codes of other kinds are larger: some servers write 20000 for a success.
    return word in _FAILURES or re.match(r'[45]\d\d\b', word) is not None


def passages(row: Any) -> list[Passage]:
    """Returns the passages of one query from its JSON result.

    Args:
      row: [{'document': {…}, 'score'}, …], or only the documents. A document is a text in wire form, or
        has one under 'contents' or a similar name, and may have 'title' and 'id'. Without an id the passage gets one
        made from its title and text; without a score 0. Passages without any text are left out.

    Raises:
      MalformedReply: names the field that is missing or of another type.
    """
    if not isinstance(row, list):
        raise MalformedReply(f'the result of a query is {_kind(row)}, not a list')
    read_passages = []
    for number, item in enumerate(row, 1):
        try:
            passage = _passage_of(item)
        except MalformedReply as error:
            raise MalformedReply(f'passage {number} of a query: {error}') from None
        if passage['title'].strip() or passage['text'].strip():
            read_passages.append(passage)
    return read_passages


def _passage_of(item: Any) -> Passage:
    """Returns one passage of a result; raises MalformedReply."""
    # Without scores a server returns the documents themselves.
    document = item.get('document', item) if isinstance(item, Mapping) else item
    if isinstance(document, str):
        # Beside a text the document is a reference, such as an id.
        has_text = document is not item and _first_field(item, _TEXT_FIELDS) is not None
        document = item if has_text else _object_in(document) or {'contents': document}
    if not isinstance(document, Mapping):
        raise MalformedReply(f'it is {_kind(document)}, not an object')
    if isinstance(item, Mapping):
        document = _with_id_and_title(document, item)
    text_field = _first_field(document, _TEXT_FIELDS)
    if text_field is None:
        names = ', '.join(map(repr, document)) or 'none'
        raise MalformedReply(
            f'"document" has no "contents" (nor "title" and "text"); its fields: {short(names)}'
        )
    title, text = _title_and_text(document, text_field)
    score = None
    if isinstance(item, Mapping):
        score = item.get('score')
    return {
        'id': _id(document, title, text),
        'title': title,
        'text': text,
        'score': _score(score),
    }


def _object_in(text: str) -> dict[str, Any] | None:
    """Returns the document in a JSON text, as some servers send it; None for any other text."""
    if not text.startswith('{'):
        return None
    try:
        document = json_text.parse_object(text, not_finite=float)
    except json_text.Unusable:
        return None
    # A text of its own may be JSON, too; a document has an id or a title beside its text.
    is_named = _first_field(document, (*_ID_FIELDS, 'title')) is not None
    return document if is_named and _first_field(document, _TEXT_FIELDS) else None


def _with_id_and_title(document: Mapping[str, Any], item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a document with the id and title that stand in its metadata, as LangChain has them, or beside it."""
    result = dict(document)
    metadata = document.get('metadata')
    for other in (metadata if isinstance(metadata, Mapping) else {}, item):
        for fields in (_ID_FIELDS, ('title',)):
            field = _first_field(other, fields)
            if field is not None and _first_field(result, fields) is None:
                result[field] = other[field]
    return result


def _title_and_text(document: Mapping[str, Any], text_field: str) -> tuple[str, str]:
    """Returns title and text of a document whose text is under `text_field`."""
    whole_text = _text(document[text_field], text_field)
    title_in_contents, text = split(whole_text)
    title = ''
    if document.get('title') is not None:
        title = _text(document['title'], 'title')
    # Beside a title of another text, a first line in quotes is a quotation.
    if title_in_contents and title in ('', title_in_contents):
        return title_in_contents, text
    # The title may be repeated without quotes.
    return title, whole_text.removeprefix(f'{title}\n') if title else whole_text


def _id(document: Mapping[str, Any], title: str, text: str) -> str:
    """Returns the id of a document as a text."""
    field = _first_field(document, _ID_FIELDS)
    if field is None:
        # Passages are told apart by their ids, also those of different searches.
        return hashlib.sha256(contents(title, text).encode()).hexdigest()[:_ID_DIGITS]
    value = document[field]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise MalformedReply(f'"{field}" is {_kind(value)}, not a text or a number')
    return _text(str(value), field)


def _score(value: Any) -> float:
    """Returns a score as a number; 0 for none."""
    if value is None:
        return 0.0
    try:
        if isinstance(value, bool):
            raise TypeError
        # Some servers write numbers as texts.
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        raise MalformedReply(f'"score" is {_kind(value)}, not a number') from None
    # Neither can be written into a log, which is JSON.
    if not math.isfinite(score):
        raise MalformedReply(f'"score" is {score}, which is not finite')
    return score


def page(result: Any) -> DocumentPage | None:
    """Returns the page of one reference from its JSON result, None for null; raises MalformedReply."""
    if result is None:
        return None
    if not isinstance(result, Mapping):
        raise MalformedReply(f'a page is {_kind(result)}, not an object')
    # The types are checked here, so that a policy never sees a value of another type.
    numbers = {}
    for field in ('page', 'pages'):
        number = result.get(field)
        if not isinstance(number, int):
            raise MalformedReply(f'"{field}" of a page is {_kind(number)}, not a number')
        numbers[field] = number
    return DocumentPage(
        title=_text(result.get('title'), 'title'),
        text=_text(result.get('text'), 'text'),
        page=numbers['page'],
        pages=numbers['pages'],
        id=_text(result.get('id'), 'id'),
    )


def _first_field(document: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Returns the first of these fields that a document has with a value, if possible not ''."""
    stated = [name for name in names if document.get(name) is not None]
    return next((name for name in stated if document[name] != ''), next(iter(stated), None))


def _text(value: Any, field: str) -> str:
    """Returns a text of a reply with unpaired surrogates replaced by U+FFFD; raises MalformedReply for another type."""
    if not isinstance(value, str):
        raise MalformedReply(f'"{field}" is {_kind(value)}, not a text')
    # JSON escapes can write half of a surrogate pair, which no file and no request can hold.
    return value.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def _kind(value: Any) -> str:
    """Returns the type of a value in words."""
    return f'a JSON {json_text.type_name(value)}'
