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
      workers: how many `search`es may be in progress at once; a slow one delays only the calls of its own batch.
    """

    name = 'search'
    description = 'passages of the corpus that match a query'
    purpose = 'To search'
    argument_hint = 'what to look for'
    returns = 'the passages found come'
    note = 'one call may hold several queries'
    # A tag holds one query, as in the checkpoints of Search-R1.
    tag_parameter = 'query_list'
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
        # Additional parameters are allowed and ignored: a call with valid queries can be answered.
    }
    # The built-in checkpoints were trained on exactly these texts.
    errors = {
        'invalid_arguments': 'The call could not be read. Write it again in the required form.',
        'empty_query': 'The query was empty. Name what to look for.',
        'failed': 'The search failed. Try again or answer from what is known.',
        'timeout': 'The search took too long. Try again or answer from what is known.',
    }

    def __init__(self, search: SearchFunction, max_queries: int = 3, workers: int = 1):
        self._search = search
        self._max_queries = max_queries
        self.workers = workers

    def prepare(self, arguments: Json) -> dict[str, Any]:
        """Strips the queries and drops those beyond `max_queries`.

        Raises:
          InvalidArguments: 'empty_query' if one of them is empty.
        """
        queries = [query.strip() for query in arguments['query_list']]
        if not queries or not all(queries):
            raise InvalidArguments('empty_query')
        return {'query_list': queries[: self._max_queries]}

    def run(self, calls: Sequence[Invocation]) -> list[ToolResult]:
        """Returns the passages of all queries of each call; a call fails if one of its queries does."""
        # One request serves the calls of all rollouts, because encoders and ScaNN work on batches.
        queries: list[str] = []
        for call in calls:
            queries += call.arguments['query_list']
        passages_per_query = list(self._search(queries))
        if len(passages_per_query) != len(queries):
            raise ValueError(f'{len(queries)} queries returned {len(passages_per_query)} results')
        results = []
        begin = 0
        for call in calls:
            end = begin + len(call.arguments['query_list'])
            results.append(_search_result(passages_per_query[begin:end]))
            begin = end
        return results


def _search_result(passages_per_query: Sequence[Sequence[Json] | None]) -> ToolResult:
    """Returns the result of one call from the passages of each of its queries, None for a failed query."""
    answered = []
    for passages in passages_per_query:
        # A call fails if one of its queries does: blocks of passages do not name their queries, so the policy
        # could not recognise the missing one.
        if passages is None:
            return ToolResult(error='failed')
        answered.append(tuple(passages))
    return ToolResult(documents=tuple(answered))
