"""Random draws from sequences of any values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from numpy.random import Generator

T = TypeVar('T')


def pick(rng: Generator, values: Sequence[T]) -> T:
    """Returns one of the values with equal probability."""
    # Generator.choice would convert the values into a NumPy array and return NumPy strings.
    index = int(rng.integers(len(values)))
    return values[index]


def shuffled(rng: Generator, values: Sequence[T]) -> list[T]:
    """Returns the values in random order."""
    order = rng.permutation(len(values))
    return [values[i] for i in order]
