"""Finds attributes of a recipe that change while a run plays: a checkpoint does not hold them."""

from __future__ import annotations

import collections
import functools
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

# Larger containers are taken for data: only their length is compared, so that a checkpoint costs no time.
_COMPARED_ITEMS = 1_000
# Objects within objects that are followed.
_DEPTH = 4
_PACKAGE = __package__.partition('.')[0]
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)


class RecipeAttributes:
    """The attributes of a recipe at one moment; what they are compared with later.

    Objects of this package (datasets, the library) count as the same object or another one: they hold no state of a run
    that a checkpoint lacks.
    """

    def __init__(self, recipe: Any):
        self._recipe = recipe
        self._values = _comparable_attributes(recipe)

    def changed(self) -> list[str]:
        """Returns the sorted names of the attributes that were set, changed or deleted since."""
        now = _comparable_attributes(self._recipe)
        names = now.keys() | self._values.keys()
        return sorted(name for name in names if now.get(name) != self._values.get(name))

    def warning(self) -> str:
        """Returns a line about the attributes that changed; '' without any."""
        names = self.changed()
        if not names:
            return ''
        shown = ', '.join(f'self.{name}' for name in names)
        return (
            f'the recipe changed {shown} while it ran; a checkpoint does not hold attributes of a recipe, so that a '
            'resumed run begins with those of its constructor. Derive them from the step, the task and config.seed '
            '(docs/recipes.md); a cache may stay'
        )


def _comparable_attributes(recipe: Any) -> dict[str, Any]:
    """Returns name → comparable value (`_comparable`); computed properties are left out, as they are caches."""
    values = {}
    for name, value in vars(recipe).items():
        if not isinstance(getattr(type(recipe), name, None), functools.cached_property):
            values[name] = _comparable(value, _DEPTH)
    return values


def _comparable(value: Any, depth: int) -> Any:
    """Returns a copy of a value that compares equal as long as the value is unchanged."""
    kind = type(value)
    if kind.__module__.partition('.')[0] == _PACKAGE or depth == 0:
        return (kind, id(value))
    if isinstance(value, Mapping):
        if len(value) > _COMPARED_ITEMS:
            return (kind, len(value))
        return (kind, [(repr(key), _comparable(item, depth - 1)) for key, item in value.items()])
    if isinstance(value, _CONTAINERS):
        if len(value) > _COMPARED_ITEMS:
            return (kind, len(value))
        return (kind, [_comparable(item, depth - 1) for item in value])
    if isinstance(value, np.ndarray):
        return (value.shape, value.tobytes() if value.size <= _COMPARED_ITEMS else id(value))
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    # Objects of the standard library, such as locks, change while a run plays, and hold no state of it.
    if hasattr(value, '__dict__') and not _is_standard(kind):
        return (kind, _comparable(vars(value), depth - 1))
    # Numbers and texts; an iterator such as itertools.count shows its position.
    return (kind, repr(value)[:_COMPARED_ITEMS])


def _is_standard(kind: type) -> bool:
    return kind.__module__.partition('.')[0] in sys.stdlib_module_names
