"""Texts in which a regular expression occurs, for examples of arguments."""

from __future__ import annotations

import dataclasses
import importlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

# The parser of Python's regular expressions; it has no public name.
_parser: Any = importlib.import_module('re._parser')
# Characters that are tried for 'any' and 'none of these'.
_CHARACTERS = 'a1A_- .,/:@#x2é'
_OF_CATEGORY = {
    'CATEGORY_DIGIT': '1234567890',
    'CATEGORY_SPACE': ' ',
    'CATEGORY_WORD': 'abcdefghijkl',
    'CATEGORY_NOT_DIGIT': 'a',
    'CATEGORY_NOT_SPACE': 'a',
    'CATEGORY_NOT_WORD': '-',
}
_MAX_REPEATS = 200


def samples(pattern: str) -> Iterator[str]:
    """Yields texts in which a pattern may occur: with few repeats first. They must be checked.

    None at all for patterns that Python does not read.
    """
    # JSON schemas write named groups as JavaScript does.
    in_python = re.sub(r'\(\?<(?=[A-Za-z_])', '(?P<', pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            tree = _parser.parse(in_python)
    except (re.error, RecursionError, OverflowError):
        return
    for further_repeats in (0, 1, 3, 7):
        yield _Sample(further_repeats, 0).text(tree)
    for variant in range(1, 12):
        yield _Sample(0, variant).text(tree)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """The choices of one sample.

    Attributes:
      further_repeats: how much more often repeats occur than they must.
      variant: which characters and alternatives are taken, counted around.
    """

    further_repeats: int
    variant: int

    def text(self, tree: Any) -> str:
        """Returns the text of a parsed pattern."""
        return ''.join(self._part(str(operation), value) for operation, value in tree)

    def _part(self, operation: str, value: Any) -> str:
        """Returns the text of one operation; '' for those that match a place, such as '^'."""
        if operation == 'LITERAL':
            return chr(value)
        if operation == 'ANY':
            return _CHARACTERS[0]
        if operation == 'NOT_LITERAL':
            return _other_character([('LITERAL', value)])
        if operation == 'IN':
            return self._character(value)
        if operation == 'BRANCH':
            return self.text(self._one_of(value[1]))
        if operation == 'SUBPATTERN':
            return self.text(value[-1])
        if operation == 'ATOMIC_GROUP':
            return self.text(value)
        if operation in ('MAX_REPEAT', 'MIN_REPEAT', 'POSSESSIVE_REPEAT'):
            fewest, most, repeated = value
            count = min(fewest + self.further_repeats, int(most), _MAX_REPEATS)
            return self.text(repeated) * count
        return ''

    def _character(self, choices: Any) -> str:
        """Returns a character of a set in brackets."""
        if str(choices[0][0]) == 'NEGATE':
            return _other_character(choices[1:])
        operation, value = self._one_of(choices)
        if str(operation) == 'RANGE':
            return chr(value[0] + self.variant % (value[1] - value[0] + 1))
        if str(operation) == 'CATEGORY':
            return self._one_of(_OF_CATEGORY.get(str(value), 'a'))
        return chr(value)

    def _one_of(self, choices: Any) -> Any:
        return choices[self.variant % len(choices)]


def _other_character(choices: Any) -> str:
    for character in _CHARACTERS:
        if not any(_holds(str(operation), value, character) for operation, value in choices):
            return character
    return ''


def _holds(operation: str, value: Any, character: str) -> bool:
    """Returns whether an entry of a set in brackets has this character."""
    if operation == 'RANGE':
        return value[0] <= ord(character) <= value[1]
    if operation == 'LITERAL':
        return value == ord(character)
    name = str(value)
    by_kind = {
        'DIGIT': character.isdigit(),
        'SPACE': character.isspace(),
        'WORD': character.isalnum() or character == '_',
    }
    is_of_kind = by_kind.get(name.rpartition('_')[2], False)
    return is_of_kind != ('_NOT_' in name)
