"""Replies of search servers, Search-R1's and those like it; a field that cannot be used is named."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from . import json_text
from .corpus import DocumentPage
from .json_text import Unusable, type_name
from .rows import FIELD_NAMES, record_of
from .types import Passage, contents, short, split

# Digits of the id of a passage whose server gives none.
_ID_DIGITS = 16
# Bytes of a reply that are looked at for a quotation.
_QUOTED_BYTES = 400
# Field with which servers report at status 200 that a search, or a part of it, failed → values that say so, as texts in
# small letters: some servers write booleans and numbers as texts. One that loads its index is waited for. Codes of
# other kinds are larger: some servers write 20000 for a success.
_CODE = r'error|fail|failed|failure|loading|starting|unavailable|timeout|[45]\d\d\b.*'
_REPORTS = {
    # There may be one for each query.
    'error': r'(?!(?:0|false|none|null|\{\}|)$).*',
    'errors': r'(?!(?:0|false|none|null|\{\}|\[\]|)$).*',
    'success': 'false',
    'timed_out': 'true|1',
    'status': _CODE,
    'code': _CODE,
    'status_code': _CODE,
    # Of Elasticsearch: {'total', 'successful', 'failed'}.
    '_shards': r".*'failed': (?!'?0'?\b).*",
}
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
    except Unusable as error:
        text = short(body[:_QUOTED_BYTES].decode('utf-8', 'replace'))
        raise MalformedReply(f'{_reason(error)}: {text}') from None
    failing = {name: reply[name] for name in _REPORTS if _reports_failure(name, reply.get(name))}
    rows = reply.pop('result', None)
    if failing:
        # The reason comes first, because the quotation is cut.
        words = {name: reply[name] for name in _WORDS if reply.get(name)}
        text = short(json.dumps(words | failing | reply, ensure_ascii=False))
        raise ReportedFailure(f'it reports an error: {text}')
    if not isinstance(rows, list):
        text = short(json.dumps(reply, ensure_ascii=False))
        raise MalformedReply(f'no list "result" in {text}')
    # Results are matched to queries by position.
    if len(rows) != count:
        raise MalformedReply(f'{len(rows)} results for {count} queries')
    try:
        return [read(row) for row in rows]
    except Unusable as error:
        raise MalformedReply(_reason(error)) from None


def _reason(error: Unusable) -> str:
    """Returns an error of JSON without the advice for files."""
    return str(error).partition(';')[0]


def _reports_failure(field: str, value: Any) -> bool:
    """Returns whether a field of `_REPORTS` says with this value that the search, or a part of it, failed."""
    values = value if isinstance(value, list) else [value]
    pattern = re.compile(_REPORTS[field], re.DOTALL)
    return any(pattern.fullmatch(str(each).lower()) for each in values)


def passages(row: Any) -> list[Passage]:
    """Returns the passages of one query from its JSON result.

    Args:
      row: [{'document': {…}, 'score'}, …], or only the documents. A document is a text in wire form, or has the fields
        that `rows.record_of` reads. Without an id the passage gets one made from its title and text; without a score 0.
        Passages without any text are left out.

    Raises:
      Unusable: names the field that is missing or of another type.
    """
    if not isinstance(row, list):
        raise Unusable(f'the result of a query is a JSON {type_name(row)}, not a list')
    read_passages = []
    for number, item in enumerate(row, 1):
        try:
            passage = _passage_of(item)
        except Unusable as error:
            raise Unusable(f'passage {number} of a query: {error}') from None
        if passage['title'].strip() or passage['text'].strip():
            read_passages.append(passage)
    return read_passages


def _passage_of(item: Any) -> Passage:
    """Returns one passage of a result; raises Unusable."""
    row = {'contents': item} if isinstance(item, str) else item
    if not isinstance(row, Mapping):
        raise Unusable(f'it is a JSON {type_name(row)}, not an object')
    # Without scores a server returns the documents themselves.
    document = row.get('document')
    if isinstance(document, Mapping):
        # What is null inside does not hide what stands beside it.
        missing = {name for name, value in document.items() if value is None and name in row}
        row = {**row, **{name: document[name] for name in document if name not in missing}}
    # Beside a text the document is a reference, such as an id.
    elif isinstance(document, str) and not any(row.get(name) for name in FIELD_NAMES['text']):
        row = {**row, 'contents': document}
    has_id = any(row.get(name) is not None for name in FIELD_NAMES['id'])
    record = record_of(row if has_id else {**row, 'id': ''}, {})
    title, text = split(_unicode(record.contents))
    passage_id = _unicode(record.id)
    if not has_id:
        # Passages are told apart by their ids, also those of different searches.
        passage_id = hashlib.sha256(contents(title, text).encode()).hexdigest()[:_ID_DIGITS]
    score = row.get('score')
    return {'id': passage_id, 'title': title, 'text': text, 'score': _score(score)}


def _score(value: Any) -> float:
    """Returns a score as a number; 0 for none."""
    try:
        # Some servers write numbers as texts.
        score = 0.0 if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        raise Unusable(f'"score" is a JSON {type_name(value)}, not a number') from None
    # Neither can be written into a log, which is JSON.
    if not math.isfinite(score):
        raise Unusable(f'"score" is {score}, which is not finite')
    return score


def page(result: Any) -> DocumentPage | None:
    """Returns the page of one reference from its JSON result, None for null; raises Unusable."""
    if result is None:
        return None
    if not isinstance(result, Mapping):
        raise Unusable(f'a page is a JSON {type_name(result)}, not an object')
    # The types are checked here, so that a policy never sees a value of another type.
    values: dict[str, Any] = {}
    kinds = {'page': int, 'pages': int, 'passages': list}
    for field in dataclasses.fields(DocumentPage):
        value = result.get(field.name)
        if not isinstance(value, kinds.get(field.name, str)):
            raise Unusable(f'"{field.name}" of a page is a JSON {type_name(value)}')
        values[field.name] = _unicode(value) if isinstance(value, str) else value
    values['passages'] = [_part(passage) for passage in values['passages']]
    return DocumentPage(**values)


def _part(passage: Any) -> dict[str, str]:
    """Returns what a page has of a passage from its JSON object; raises Unusable."""
    part = {}
    for name in ('id', 'title', 'text'):
        value = passage.get(name) if isinstance(passage, Mapping) else None
        if not isinstance(value, str):
            raise Unusable(f'"{name}" of a passage of a page is a JSON {type_name(value)}')
        part[name] = _unicode(value)
    return part


def _unicode(text: str) -> str:
    """Returns a text with U+FFFD for each half of a surrogate pair, which no file and no request can hold."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
