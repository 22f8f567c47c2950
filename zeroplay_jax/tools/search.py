"""`search`, passages for one or several queries, and `open`, a whole document page by page."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from zeroplay_jax.tools.base import InvalidArguments, Invocation, Tool, ToolResult
from zeroplay_jax.types import Json

# Queries → per query its passages {'id', 'title', 'text', 'score'}, best first; None for a failed query.
SearchFunction = Callable[[Sequence[str]], Sequence[Sequence[Json] | None]]
# Queries of a call that are run; later ones are ignored.
MAX_QUERIES = 3


class SearchTool(Tool):
    """Passages from a corpus.

    Args:
      search: answers the queries of many rollouts in one call.
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

    def __init__(self, search: SearchFunction, workers: int = 1):
        self._search = search
        self.workers = workers

    def prepare(self, arguments: Json) -> dict[str, Any]:
        """Strips the queries and drops those beyond `MAX_QUERIES`.

        Raises:
          InvalidArguments: 'empty_query' if one of them is empty.
        """
        queries = [query.strip() for query in arguments['query_list']]
        if not queries or not all(queries):
            raise InvalidArguments('empty_query')
        return {'query_list': queries[:MAX_QUERIES]}

    def run(self, calls: Sequence[Invocation]) -> list[ToolResult]:
        """Returns the passages of all queries of each call; a call fails if one of its queries does."""
        # One request serves the calls of all rollouts, because encoders and ScaNN work on batches.
        queries = []
        for call in calls:
            queries += call.arguments['query_list']
        passages_per_query = self._search(queries)
        if len(passages_per_query) != len(queries):
            raise ValueError(f'{len(queries)} queries returned {len(passages_per_query)} results')
        remaining = iter(passages_per_query)
        results = []
        for call in calls:
            num_queries = len(call.arguments['query_list'])
            results.append(_search_result(list(itertools.islice(remaining, num_queries))))
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


# By an id or title that a search showed.
# (references, page numbers from 1) → per pair {'id', 'title', 'text', 'page', 'pages'}, or None if not found.
OpenFunction = Callable[[Sequence[str], Sequence[int]], Sequence[Json | None]]


class OpenTool(Tool):
    """Shows documents of a corpus page by page.

    Without a page number the first call shows page 1, and the next call for the same document shows the page
    after the one shown last. The last document and page are stored in `Invocation.state`.

    Args:
      open_documents: reads the requested pages of many rollouts in one call.
      workers: how many calls of `open_documents` may be in progress at once.
    """

    name = 'open'
    description = 'the document that a passage belongs to, page by page'
    purpose = 'To read a whole document'
    argument_hint = 'id or title of a passage'
    takes_document_ids = True
    returns = 'its first page, and at the next call the following one, comes'
    parameters = {
        'type': 'object',
        'properties': {
            'document': {'type': 'string', 'description': argument_hint},
            'page': {'type': 'integer', 'minimum': 1},
        },
        'required': ['document'],
        'additionalProperties': False,
    }
    errors = {
        'not_found': 'There is no such document. Give an id or a title that a search showed.',
        'no_such_page': 'The document has no further page.',
    }

    def __init__(self, open_documents: OpenFunction, workers: int = 1):
        self._open_documents = open_documents
        self.workers = workers

    def prepare(self, arguments: Json) -> dict[str, Any]:
        """Strips the reference.

        Raises:
          InvalidArguments: 'not_found' for an empty one.
        """
        reference = arguments['document'].strip()
        if not reference:
            raise InvalidArguments('not_found')
        return {**arguments, 'document': reference}

    def run(self, calls: Sequence[Invocation]) -> list[ToolResult]:
        """Returns one page per call, and stores in each call's state which document and page it showed."""
        # One request serves the calls of all rollouts, because the documents may be on a server.
        references = [call.arguments['document'] for call in calls]
        pages = [self._requested_page(call) for call in calls]
        documents = self._open_documents(references, pages)
        results = []
        for call, page, document in zip(calls, pages, documents, strict=True):
            results.append(self._result(call, page, document))
        return results

    @staticmethod
    def _requested_page(call: Invocation) -> int:
        """Returns the page number of the call, or else the page after the one shown last."""
        if 'page' in call.arguments:
            return call.arguments['page']
        # References are compared as written: a title and an id of the same document count as different.
        is_same_document = call.state.get('document') == call.arguments['document']
        if not is_same_document:
            return 1
        return call.state['page'] + 1

    @staticmethod
    def _result(call: Invocation, page: int, document: Json | None) -> ToolResult:
        """Returns the result of a call, and stores document and page in the call's state after a success.

        Args:
          page: number of the page that was requested.
          document: that page, {'id', 'title', 'text', 'page', 'pages'}; None if it was not found.
        """
        # Every document has a page 1, so only a wrong reference can fail there.
        if document is None and page == 1:
            return ToolResult(error='not_found')
        if document is None:
            return ToolResult(error='no_such_page')
        call.state['document'] = call.arguments['document']
        call.state['page'] = page
        # The number of pages tells the policy whether another call is worth its tokens.
        heading = f'{document["title"]} (page {page} of {document["pages"]})'
        # The page is recorded like a passage of a search, because answer checks and teachers read `documents`
        # alone. Without a query it has no score.
        passage = {
            'id': document['id'],
            'title': document['title'],
            'text': document['text'],
            'score': 0.0,
        }
        return ToolResult(text=f'{heading}\n{document["text"]}', documents=((passage,),))
