"""Parses and validates the bodies of HTTP requests; an invalid one raises `Refused` with status 400 or 413."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import documents, json_text
from .batching import Limits, Refused

# Characters of a wrong value that an error quotes.
_QUOTED_CHARACTERS = 20


@dataclasses.dataclass(frozen=True)
class SearchRequest:
    """Body of /retrieve."""

    queries: list[str]
    k: int
    with_scores: bool


@dataclasses.dataclass(frozen=True)
class OpenRequest:
    """Body of /open; `references` and `pages` have the same length."""

    references: list[str]
    pages: list[int]
    words_per_page: int


def parse_search(body: bytes, limits: Limits, passages: int) -> SearchRequest:
    """Returns the request of a /retrieve body; raises Refused.

    Args:
      body: bytes of the HTTP request.
      limits: limits and defaults.
      passages: number of passages of the index.
    """
    fields = _json_object(body, 'queries')
    queries = _texts(fields, 'queries', 'query', limits)
    # An index cannot return more passages than it has.
    k = _number(fields, 'topk', limits.default_k, min(limits.k, passages))
    with_scores = fields.get('return_scores', False)
    # The string 'false' would count as true.
    if not isinstance(with_scores, bool):
        raise Refused(400, '"return_scores" is neither true nor false')
    return SearchRequest(queries, k, with_scores)


def parse_open(body: bytes, limits: Limits) -> OpenRequest:
    """Returns the request of an /open body; raises Refused."""
    fields = _json_object(body, 'references')
    references = _texts(fields, 'references', 'reference', limits)
    # Most requests open the first page.
    pages = fields.get('page')
    if pages is None:
        pages = [1] * len(references)
    if not isinstance(pages, list) or not all(_is_whole(page) for page in pages):
        raise Refused(400, '"page" is not a list of whole numbers')
    if len(pages) != len(references):
        raise Refused(400, f'"page" has {len(pages)} numbers for {len(references)} references')
    for row, page in enumerate(pages):
        if page < 1:
            raise Refused(400, f'page {row} is {_quoted(page)}; pages count from 1')
    words_per_page = _number(fields, 'words_per_page', documents.WORDS_PER_PAGE, limits.page_words)
    return OpenRequest(references, pages, words_per_page)


def _json_object(body: bytes, key: str) -> dict[str, Any]:
    """Returns the JSON object of a body; errors name the key that it must have."""
    try:
        return json_text.parse_object(body)
    except json_text.Unusable as error:
        raise Refused(400, f'the body is no JSON object with "{key}": {error}') from error


def _texts(fields: dict[str, Any], key: str, noun: str, limits: Limits) -> list[str]:
    """Returns the list of texts under a key of the body; `noun` names one text in errors. Raises Refused."""
    texts = fields.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Refused(400, f'"{key}" is not a list of strings')
    # 413 tells a client to send smaller requests.
    if len(texts) > limits.queries:
        raise Refused(413, f'{len(texts)} {key}; at most {limits.queries} at a time')
    for row, text in enumerate(texts):
        if len(text) > limits.query_characters:
            raise Refused(400, f'{noun} {row} is longer than {limits.query_characters} characters')
        # JSON can contain lone surrogates, but encoders cannot convert them to UTF-8.
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refused(400, f'{noun} {row} has a lone surrogate (half a character)') from None
    return texts


def _number(fields: dict[str, Any], key: str, default: int, maximum: int) -> int:
    """Returns the whole number from 1 to `maximum` under a key of the body; `default` if it is absent or null.

    Raises:
      Refused: the value is something else, or the default exceeds the maximum.
    """
    number = fields.get(key)
    if number is None:
        number = default
    if not _is_whole(number) or not 1 <= number <= maximum:
        raise Refused(
            400, f'"{key}" is {_quoted(number)}; it must be a whole number from 1 to {maximum}'
        )
    return number


def _is_whole(value: Any) -> bool:
    """Returns whether a JSON value is a whole number; `true` is not one, although bool is a subclass of int."""
    return isinstance(value, int) and not isinstance(value, bool)


def _quoted(value: Any) -> str:
    """Returns the beginning of a wrong value, in ASCII; of a list or an object the type."""
    if isinstance(value, list | dict):
        return f'of type {type(value).__name__}'
    # A number can have thousands of digits, and a text half of a surrogate pair, which no reply can hold.
    return ascii(value)[:_QUOTED_CHARACTERS]
