"""The tool interface: what a policy can call during a rollout.

A tool knows its arguments and its results. It does not know how a policy writes a call or how a
result is written into the context: that is the call syntax (rollout/call_syntax.py).

    class Clock(Tool):
        name = 'clock'
        description = 'the current year of a calendar'
        parameters = string_parameter('calendar', 'name of the calendar')

        def run(self, calls):
            return [ToolResult(text=year_of(call.arguments['calendar'])) for call in calls]
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from zeroplay_jax.tools.argument_schema import (
    ArgumentCheck,
    UnusableSchema,
    check_schema,
)
from zeroplay_jax.tools.example import example_arguments
from zeroplay_jax.types import Json

# Observations for calls without a result, by reason code. Each names the problem and the next step:
# the policy reads it as part of its context. A tool overrides the texts in `Tool.errors`.
ERROR_TEXTS = {
    'malformed': 'The call could not be read. Write it again in the required form.',
    'unknown_tool': 'There is no such tool. Available: {tools}.',
    'invalid_arguments': 'The arguments of {tool} are not valid: {detail}.',
    'failed': 'The call of {tool} failed. Try again or answer from what is known.',
    'timeout': 'The call of {tool} took too long. Try again or answer from what is known.',
}
# The name becomes a tag or a function name in the text of a policy.
_USABLE_NAME = re.compile(r'[A-Za-z_][A-Za-z0-9_-]*')
_MAX_NAME = 64  # characters
# Of a result's text that is kept; a policy reads `rollout.observation_tokens` of it.
MAX_RESULT_CHARACTERS = 100_000


class InvalidArguments(ValueError):
    """Raised by `Tool.prepare`: `code` is the reason code, `detail` fills '{detail}' in the text of the code."""

    def __init__(self, code: str = 'invalid_arguments', detail: str = ''):
        super().__init__(detail)
        self.code = code
        self.detail = detail


@dataclasses.dataclass(frozen=True)
class Invocation:
    """One call as a tool receives it.

    Attributes:
      arguments: JSON values that passed the schema and `Tool.prepare`.
      state: values that this tool stores for the rollout; `run` may change them in place. They last until the
        rollout ends; changes by a call that fails are discarded. Values should be plain data: changes to a value
        that cannot be copied (a connection) are not undone.
      rollout: identity of the rollout, for randomness that is a function of identity.
    """

    arguments: Json
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    rollout: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """Result of one call.

    Attributes:
      text: observation of the policy. None: the text of `error`, or else `documents` in the passage style of the
        call syntax.
      documents: retrieved passages {'id', 'title', 'text', 'score'}, best first, one tuple per query.
      error: reason code of a call without a result, see `Tool.errors`; None after a success.
    """

    text: str | None = None
    documents: tuple[tuple[Json, ...], ...] = ()
    error: str | None = None


class Tool(abc.ABC):
    """A tool. Subclasses set the attributes and implement `run`.

    Attributes:
      name: unique within a run; the tag or the function name that a policy writes.
      description: one line for the prompt, completing 'To use NAME (…)'.
      parameters: JSON schema of the arguments, an object.
      errors: reason code → observation text; extends and overrides `ERROR_TEXTS`.
      timeout: seconds after which a call counts as failed, only with `rollout.deterministic=False`;
        None takes `rollout.tool_timeout`.
      max_batch: largest number of calls handed to one `run`.
      workers: how many `run`s may be in progress at once.
      takes_document_ids: whether a call names a document by the id of a passage. Where a role has such
        a tool, the passages that its other tools return are shown with their ids.
      argument_hint: a text for the example, which says enough: with it the prompt does not show `parameters`.
      purpose, returns, note: phrases of the prompt's explanation; the defaults are derived from `name` and
        `description`.
    """

    name: str
    description: str
    parameters: Json
    errors: Mapping[str, str] = {}
    timeout: float | None = None
    max_batch: int = 1 << 20
    workers: int = 1
    takes_document_ids: bool = False
    purpose: str = ''
    argument_hint: str = ''
    returns: str = 'the result comes'
    note: str = ''

    @property
    def introduction(self) -> str:
        """Begins the prompt's sentence about the tool."""
        return self.purpose or f'To use {self.name} ({self.description})'

    @abc.abstractmethod
    def run(self, calls: Sequence[Invocation]) -> Sequence[ToolResult]:
        """Returns the results in the order of the calls, which may come from many rollouts; no coroutine.

        Called from a worker thread. The result of a call must not depend on the other calls. If the method
        raises, every call is run again alone, so that one bad call fails alone.
        """

    def prepare(self, arguments: Json) -> Json:
        """Returns the arguments as `run` receives them; a subclass may normalise or refuse them.

        Raises:
          InvalidArguments: with a reason code of `errors`.
        """
        return arguments

    def validated(self, arguments: Any) -> Json:
        """Checks arguments against `parameters` and returns them prepared (`prepare`).

        Raises:
          InvalidArguments: they do not fit.
        """
        if not isinstance(arguments, dict):
            raise InvalidArguments(detail=f"{str(arguments)[:_MAX_NAME]!r} is not of type 'object'")
        problem = self._argument_check.problem(arguments)
        if problem:
            raise InvalidArguments(detail=problem)
        return self.prepare(arguments)

    # Cached, because building a validator costs more than validating a call.
    @functools.cached_property
    def _argument_check(self) -> ArgumentCheck:
        return ArgumentCheck(self.parameters)

    # Each tool object has a log of its own: two roles may have different tools of one name.
    @functools.cached_property
    def failure_log(self) -> FailureLog:
        """Log of the calls that failed for other reasons than their arguments."""
        return FailureLog(f'tool {self.name}')

    def error_text(self, code: str, detail: str = '') -> str:
        """Returns the observation for a reason code; an unknown code gets the text of 'failed'."""
        texts = {**ERROR_TEXTS, **self.errors}
        template = texts.get(code, texts['failed'])
        # str.format is not used, because texts of tools may contain other braces, such as a JSON example. The
        # detail is inserted last, so that nothing in it is replaced.
        named = template.replace('{tool}', self.name)
        return named.replace('{detail}', detail)

    @functools.cached_property
    def tag_parameter(self) -> str | None:
        """Name of the parameter that the plain text of a tag fills: the only required one, if it is a text.

        None if several or no parameters are required, or the only one has another type; a tag then holds a JSON object.
        """
        required = list(self.parameters.get('required', []))
        if len(required) != 1:
            return None
        schema = self.parameters.get('properties', {}).get(required[0])
        if isinstance(schema, dict) and schema.get('type') == 'string':
            return required[0]
        return None

    def check(self) -> None:
        """Raises an error for a tool that cannot be called; `tools.registry.build_tools` calls it.

        Raises:
          ValueError: an attribute is missing, the name or the JSON schema cannot be used, or `run` is a coroutine.
        """
        for attribute in ('name', 'description', 'parameters'):
            if not hasattr(self, attribute):
                raise ValueError(f'{type(self).__name__} has no attribute {attribute!r}; set it')
        if len(self.name) > _MAX_NAME or not _USABLE_NAME.fullmatch(self.name):
            raise ValueError(
                f'the name {self.name[:_MAX_NAME]!r} cannot be a tag (letters, digits, _ and -, at most {_MAX_NAME})'
            )
        if inspect.iscoroutinefunction(self.run):
            raise ValueError(
                f'{self.name}: run is async; write `def run`, which returns a list with a ToolResult per call'
            )
        try:
            unchecked = check_schema(self.parameters)
        except UnusableSchema as error:
            raise ValueError(f'{self.name}: its JSON schema {error}') from None
        for pattern in unchecked:
            # Matching it could take hours. The tool may still refuse what does not match.
            note = 'is not checked (look-around, or for JavaScript alone)'
            logging.warning('tool %s: the pattern %r %s', self.name, pattern[:60], note)

    @functools.cached_property
    def example_arguments(self) -> Json | None:
        """Valid arguments for the example in the prompt: the required ones; None if plain values are not valid."""
        # Optional parameters are left out, because a policy tends to copy the whole example.
        return example_arguments(self.parameters, self._argument_check, self.argument_hint)


def string_parameter(name: str, description: str) -> dict[str, Any]:
    """Returns the JSON schema of arguments that consist of one required string; use it for `Tool.parameters`."""
    return {
        'type': 'object',
        'properties': {name: {'type': 'string', 'description': description}},
        'required': [name],
        # A misspelt parameter becomes an error that the policy reads; otherwise its value would be ignored.
        'additionalProperties': False,
    }


# Logged so that a broken tool cannot flood the log.
class FailureLog:
    """Logs the first failed call of a tool or judge, and again whenever the number of failed calls has doubled.

    A broken tool fails in every rollout, thousands of times per step with the same cause. Safe to
    use from several threads.

    Args:
      caller: begins every line, such as 'tool search'.
    """

    def __init__(self, caller: str):
        self._caller = caller
        self._lock = threading.Lock()
        self._count = 0
        self._next_logged = 1
        self._failed_before_run = 0

    def take_failed_before_run(self) -> int:
        """Returns how many calls failed before they were run since this method was last called."""
        with self._lock:
            count = self._failed_before_run
            self._failed_before_run = 0
        return count

    def add(self, cause: str, before_run: bool = False) -> None:
        """Counts one failed call; logs it if it is the first, or if the number has doubled since the last line.

        Args:
          cause: reason of the failure.
          before_run: whether the call failed while its arguments were checked, so that `Tool.run` never got it.
        """
        with self._lock:
            self._failed_before_run += before_run
            self._count += 1
            count = self._count
            if count < self._next_logged:
                return
            self._next_logged = 2 * count
        if count == 1:
            logging.warning('%s: a call failed: %s', self._caller, cause)
        else:
            # The cause is logged again, because it may differ from that of the first failure.
            logging.warning('%s: %d calls failed, the last: %s', self._caller, count, cause)
