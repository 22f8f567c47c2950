"""What a search returns, as a policy reads it."""

from zeroplay_jax.rollout.call_syntax import syntax_of
from zeroplay_jax.tools.base import ToolResult
from zeroplay_jax.tools.search import SearchTool

SEARCH = SearchTool(search=None)
TOOLS = {'search': SEARCH}


def added_ids(codec):
    return {token['id'] for token in codec._added.values()}


def observation(codec, syntax, documents, limit):
    syntax = syntax_of(syntax)
    result = ToolResult(documents=tuple(map(tuple, documents)))
    return syntax.wrap(codec, syntax.result_text(SEARCH, result), limit)
