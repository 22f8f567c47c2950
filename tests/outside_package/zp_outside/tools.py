"""`search` without repeats: passages that a rollout has seen are left out, and searches have a budget."""

from zeroplay_jax.tools.base import InvalidArguments, Tool, ToolResult


class FreshSearch(Tool):
    """Passages that this rollout has not seen yet.

    It has the name of the built-in search, so that a policy that has learnt to search uses it.

    Args:
      search: queries → passages per query.   budget: searches per rollout.
    """

    name = 'search'
    description = 'passages of the corpus that match a query and were not shown before'
    purpose = 'To search'
    parameters = {
        'type': 'object',
        'properties': {
            'query': {'type': 'string', 'maxLength': 200, 'description': 'what to look for'}
        },
        'required': ['query'],
        'additionalProperties': False,
    }
    errors = {
        'empty_query': 'The query was empty.',
        'over_budget': 'No search is left. Answer from what is known.',
        'nothing_new': 'Nothing new was found.',
    }

    def __init__(self, search, budget):
        self._search = search
        self._budget = budget

    def prepare(self, arguments):
        """Strips the query."""
        query = arguments['query'].strip()
        if not query:
            raise InvalidArguments('empty_query')
        return {'query': query}

    def run(self, calls):
        """One search for the calls of many rollouts; each is filtered by its rollout's state."""
        passages_per_call = self._search([call.arguments['query'] for call in calls])
        return [self._result(call, passages) for call, passages in zip(calls, passages_per_call)]

    def _result(self, call, passages):
        searches = call.state.get('searches', 0) + 1
        seen = call.state.get('seen', ())
        if passages is None:
            return ToolResult(error='failed')
        if searches > self._budget:
            return ToolResult(error='over_budget')
        new = tuple(passage for passage in passages if passage['id'] not in seen)
        if not new:
            return ToolResult(error='nothing_new')
        call.state['searches'] = searches
        call.state['seen'] = (*seen, *(passage['id'] for passage in new))
        return ToolResult(documents=(new,))


def fresh_search(config, source):
    """The factory that `config.tools.names` refers to."""
    return FreshSearch(source.search, config.critic_game.search_budget)
