"""`search`: passages for one or several queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zeroplay_jax.tools.base import InvalidArguments, Invocation, Tool, ToolResult
from zeroplay_jax.types import Json

# Queries → per query its passages {'id', 'title', 'text', 'score'}, best first; None for a failed query.
SearchFunction = Callable[[Sequence[str]], Sequence[Sequence[Json] | None]]


class SearchTool(Tool):
    """Passages from a corpus.

    Args:
      search: answers the queries of many rollouts in one call.
      max_queries: queries per call that are run; later ones are ignored.
    """

    name = 'search'
    description = 'passages of the corpus that match a query'
    purpose = 'To search'
    argument_hint = 'what to look for'
    returns = 'the passages found come'
    note = 'one call may hold several queries'
    parameters = {
        'type': 'object',
        'properties': {
            'query_list': {
                'type': 'array',
                'items': {'type': 'string'},
                'description': argument_hint,
            }
        },
        'required': ['query_list'],
    }
    # Exactly these texts are part of what the built-in checkpoints were trained on.
    errors = {
        'invalid_arguments': 'The call could not be read. Write it again in the required form.',
        'empty_query': 'The query was empty. Name what to look for.',
        'failed': 'The search failed. Try again or answer from what is known.',
        'timeout': 'The search took too long. Try again or answer from what is known.',
    }

    def __init__(self, search: SearchFunction, max_queries: int = 3, show_ids: bool = False):
        self._search = search
        self._max_queries = max_queries
        self.show_document_ids = show_ids

    def prepare(self, arguments: Json) -> dict[str, Any]:
        """Strips the queries and drops those beyond `max_queries`."""
        queries = [query.strip() for query in arguments['query_list']]
        if not queries or not all(queries):
            raise InvalidArguments('empty_query')
        return {'query_list': queries[: self._max_queries]}

    def run(self, calls: Sequence[Invocation]) -> list[ToolResult]:
        # One request for all rollouts of the batch: encoders and ScaNN work on batches.
        queries = [query for call in calls for query in call.arguments['query_list']]
        passages_per_query = list(self._search(queries))
        if len(passages_per_query) != len(queries):
            raise ValueError(f'{len(queries)} queries brought {len(passages_per_query)} results')
        results = []
        remaining = iter(passages_per_query)
        for call in calls:
            documents = [next(remaining) for _ in call.arguments['query_list']]
            results.append(_search_result(documents))
        return results


def _search_result(documents: Sequence[Sequence[Json] | None]) -> ToolResult:
    answered = [tuple(passages) for passages in documents if passages is not None]
    if len(answered) < len(documents):
        return ToolResult(error='failed')
    return ToolResult(documents=tuple(answered))
