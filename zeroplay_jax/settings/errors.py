"""Errors about a config: one line with the field, its value, the problem and the fix."""

from __future__ import annotations

import contextvars
import re
from collections.abc import Callable
from typing import Any, NoReturn

from zeroplay_jax.types import UserError


class ConfigError(UserError):
    """A config that cannot run."""


class Mistakes:
    """Collects all mistakes of a config, where a run stops at the first.

    Attributes:
      lines: the mistakes, in the order of the checks.
      fields: dotted names of the fields about which there is a line, and of those that are not to be judged.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.fields: set[str] = set()

    def note(self, line: str, field: str = '') -> None:
        """Adds a line, unless there is one about the field: a later one is a consequence of the first."""
        is_consequence = bool(field) and field in self.fields
        if not is_consequence and line not in self.lines:
            self.lines.append(line)
            self.fields.add(field)

    def of(self, check: Callable[..., object], *arguments: Any) -> None:
        """Calls a check and notes what it refuses.

        Behind a mistake that `fail` reports the check goes on with the refused value, so it may also crash: that is
        ignored.
        """
        token = _collector.set(self)
        count = len(self.lines)
        try:
            check(*arguments)
        except UserError as error:
            field = re.match(r'config\.([\w.]+)[=:]', str(error))
            self.note(str(error), field[1] if field else '')
        except Exception:
            if len(self.lines) == count:
                raise
        finally:
            _collector.reset(token)


_collector: contextvars.ContextVar[Mistakes | None] = contextvars.ContextVar(
    'mistakes', default=None
)


def fail(field: str, value: Any, problem: str, fix: str) -> NoReturn:  # type: ignore[misc]
    """Raises ConfigError for `config.{field}`. Under `Mistakes.of` the line is noted and the function returns."""
    # Texts are written without quotes, as on a command line; an empty one would be invisible and keeps them.
    value_text = repr(value)
    if isinstance(value, str) and value:
        value_text = value
    line = f'config.{field}={value_text}: {problem}; {fix}'
    collector = _collector.get()
    if collector is None:
        raise ConfigError(line)
    # The checks are written for a function that does not return; `Mistakes.of` says what happens behind it.
    collector.note(line, field)
