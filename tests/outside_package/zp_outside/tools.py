"""`search` without repeats: passages that a rollout has seen are left out."""

from zeroplay_jax.tools.base import Tool, ToolResult, string_parameter


class FreshSearch(Tool):
    """Passages that this rollout has not seen yet.

    It has the name of the built-in search, so that a policy that has learnt to search uses it.

    Args:
      search: queries → passages per query.
    """

    name = 'search'
    description = 'passages of the corpus that match a query and were not shown before'
    purpose = 'To search'
    parameters = string_parameter('query', 'what to look for')
    errors = {'nothing_new': 'Nothing new was found.'}

    def __init__(self, search):
        self._search = search

    def run(self, calls):
        """One search for the calls of many rollouts; each is filtered by its rollout's state."""
        # One request for all rollouts: searches are cheaper in batches.
        passages_per_call = self._search([call.arguments['query'] for call in calls])
        return [self._result(call, passages) for call, passages in zip(calls, passages_per_call)]

    def _result(self, call, passages):
        # The state is the rollout's own, so the order of rollouts cannot change the result.
        seen = call.state.setdefault('seen', [])
        new = tuple(passage for passage in passages or () if passage['id'] not in seen)
        seen += [passage['id'] for passage in new]
        return ToolResult(documents=(new,)) if new else ToolResult(error='nothing_new')


def fresh_search(config, source):
    """The factory that `config.tools.names` refers to."""
    return FreshSearch(source.search)
