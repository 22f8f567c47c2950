"""Builds the tools of a run from `config.tools.names`: built-in names and tools from other packages.

A factory takes the run's config and a document source and returns a tool or a list of tools:

    def weather(config: Config, source):
        return WeatherTool(api_key=os.environ['WEATHER_KEY'])

`config.tools.names=('search', 'my_package.weather:weather')` uses it. A training run calls each
factory twice: once with the corpus of training and once with that of evaluations, so that training
never sees held-out documents.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from zeroplay_jax.extras import load_extra
from zeroplay_jax.objectives.registry import did_you_mean
from zeroplay_jax.retrieval.types import CannotOpen, RetrievalError
from zeroplay_jax.settings.schema import Config
from zeroplay_jax.tools.base import Tool
from zeroplay_jax.tools.search import OpenTool, SearchTool
from zeroplay_jax.types import Json, UserError, first_line


class DocumentSource(Protocol):
    """The interface through which tools read one corpus: that of training or that of evaluations."""

    def search(self, queries: Sequence[str]) -> Sequence[Sequence[Json] | None]:
        """Returns per query its passages, best first; None for a query that failed."""
        ...

    def open(self, references: Sequence[str], pages: Sequence[int]) -> Sequence[Json | None]:
        """Returns per reference (an id or a title) the page of that number; None if there is none.

        A page is {'id', 'title', 'text', 'page', 'pages'}; page numbers count from 1.
        """
        ...


Factory = Callable[[Any, DocumentSource], Tool | Sequence[Tool]]


def _search(config: Config, source: DocumentSource) -> Tool:
    return SearchTool(source.search, workers=_workers(source))


def _workers(source: DocumentSource) -> int:
    """Returns how many requests a source answers side by side; 1 for sources of other packages that do not say it."""
    return getattr(source, 'concurrent_requests', 1)


def _open(config: Config, source: DocumentSource) -> Tool:
    """Returns the tool 'open'; raises UserError if the source has no whole documents."""
    try:
        # Search servers of other projects have no whole documents. One request shows that before the run begins.
        source.open(['0'], [1])
    except CannotOpen as error:
        raise UserError(f"config.tools.names has 'open': {error}") from None
    except Exception as error:
        # A server that fails now may answer later; a call that fails in the run becomes an observation.
        logging.warning('open: the first request failed: %r', error)
    return OpenTool(source.open, _workers(source))


def _mcp(config: Config, source: DocumentSource) -> Sequence[Tool]:
    # The source is ignored, because a server decides by itself what its tools read.
    return load_extra('mcp').list_tools(config.tools.mcp_servers, config.tools.mcp_seconds)


BUILT_IN: dict[str, Factory] = {
    'search': _search,
    'open': _open,
    'mcp': _mcp,
}


def check_name(name: str) -> None:
    """Raises UserError for an entry of `config.tools.names` that is neither built in nor 'package.module:attribute'."""
    # Nothing is imported: a config may be checked for another machine.
    module, colon, attribute = name.partition(':')
    if name not in BUILT_IN and not (colon and module and attribute):
        raise UserError(
            f'config.tools.names: {name!r} is not a tool; give {", ".join(BUILT_IN)}, or '
            f'package.module:attribute for a tool of your own{did_you_mean(name, BUILT_IN)}'
        )


def build_tools(config: Config, source: DocumentSource) -> dict[str, Tool]:
    """Builds the tools of `config.tools.names` over one document source; returns them by name.

    Raises:
      UserError: an entry cannot be imported or does not give a tool, two tools share a name, or an MCP server does
        not answer.
    """
    tools: dict[str, Tool] = {}
    for entry in config.tools.names:
        for tool in _tools_of(entry, config, source):
            try:
                tool.check()
            except ValueError as error:
                raise UserError(f'config.tools.names: the tool of {entry!r}: {error}') from None
            # A name is a tag in the text of the policy, so two tools cannot share it.
            if tool.name in tools:
                raise UserError(
                    f'config.tools.names: two tools are called {tool.name!r}; rename one of them (those of MCP '
                    'servers by "rename" or "prefix" in the file of config.tools.mcp_servers)'
                )
            tools[tool.name] = tool
    return tools


def _tools_of(entry: str, config: Config, source: DocumentSource) -> Sequence[Tool]:
    """Returns the tools of one entry of `config.tools.names`.

    An entry is a built-in name, or the import path of a `Tool` object, of a subclass of `Tool` that takes no arguments,
    or of a factory.

    Raises:
      UserError: the entry cannot be imported, its factory fails, or it gives something else than tools.
    """
    check_name(entry)
    provided: Any = BUILT_IN.get(entry) or imported(entry)
    built: Any = provided
    # Classes are tested first, because they are callable too, and would be called like factories, with arguments.
    if isinstance(provided, type) and issubclass(provided, Tool):
        built = _called(entry, provided)
    elif not isinstance(provided, Tool):
        built = _called(entry, provided, config, source)
    if isinstance(built, Tool):
        return [built]
    tools = list(built) if isinstance(built, Iterable) else [built]
    for tool in tools:
        if not isinstance(tool, Tool):
            raise UserError(
                f'config.tools.names: {entry!r} gave a {type(tool).__name__}; it must be a '
                'zeroplay_jax.tools.base.Tool, a subclass of it, or a factory of some'
            )
    return tools


def _called(entry: str, factory: Any, *arguments: Any) -> Any:
    """Returns factory(*arguments); turns its exceptions into UserErrors that name the entry."""
    try:
        return factory(*arguments)
    except Exception as error:
        # Errors of an index that the factory opens do not name the tool.
        if isinstance(error, UserError) and not isinstance(error, RetrievalError):
            raise
        raise UserError(
            f'config.tools.names: {entry!r} could not make a tool ({type(error).__name__}: {error}); a '
            'factory takes the config and a document source'
        ) from error


def imported(entry: str) -> Any:
    """Returns the object that an entry of the form 'package.module:attribute' names; UserError if there is none."""
    module_name, _, attribute_name = entry.partition(':')
    try:
        module = importlib.import_module(module_name)
        return getattr(module, attribute_name)
    # A module may raise anything while it is imported.
    except Exception as error:
        raise UserError(
            f'config.tools.names: {entry!r} cannot be imported ({first_line(error)}); install its package or '
            'correct the name'
        ) from None
