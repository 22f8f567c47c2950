"""Decides whether a text is English prose by its letters and frequent words, without a model or a dictionary."""

from __future__ import annotations

# Shorter texts hold no sentence that could be asked about.
MIN_WORDS = 8

# Only the beginning of a text is judged: reading all of a long book would take longer than indexing it.
_SAMPLE_CHARACTERS = 20_000
_MIN_ASCII_SHARE = 0.8
_MAX_CONTROL_SHARE = 0.01
# Frequent words of English that are rare or absent in other languages of the Latin script: neither 'in' (German,
# Dutch, Italian) nor 'on' (French) nor 'a' (Spanish) is listed. These words are about a quarter of English prose.
_COMMON_WORDS = frozenset(
    'the of and to for with by from that which are were its this be it have has been their is was they or as at'.split()
)
_MIN_COMMON_SHARE = 0.1
# (different frequent words, their share of the words of letters alone): addresses, commands and numbers between the
# sentences of a manual lower the share of all words, but no other language has so many different ones.
_MANUALS = ((9, 0.05), (3, 0.1))
_MARKS = '.,;:()"\''
# One frequent word is enough in a text of a sentence or two.
_FEW_WORDS = 30


def problem_of(text: str) -> str | None:
    """Returns why a text is not English prose; None if it is.

    Returns:
      'empty', 'binary', 'not English', 'too short' or None.
    """
    sample = text[:_SAMPLE_CHARACTERS]
    words = sample.lower().split()
    if not words:
        return 'empty'
    if _is_binary(sample):
        return 'binary'
    letters = [character for character in sample if character.isalpha()]
    ascii_letters = [character for character in letters if character.isascii()]
    # Checked before the length, because other scripts do not separate words by blanks.
    if len(ascii_letters) < _MIN_ASCII_SHARE * len(letters):
        return 'not English'
    if len(words) < MIN_WORDS:
        return 'too short'
    bare_words = [word.strip(_MARKS) for word in words]
    common_words = [word for word in bare_words if word in _COMMON_WORDS]
    # Lists of English names fail this test as well, which is intended: they have no sentences.
    min_common_words = 1 if len(words) < _FEW_WORDS else _MIN_COMMON_SHARE * len(words)
    if len(common_words) >= min_common_words:
        return None
    num_spoken = sum(map(str.isalpha, bare_words))
    for different, share in _MANUALS:
        if len(set(common_words)) >= different and len(common_words) >= share * num_spoken:
            return None
    return 'not English'


def _is_binary(sample: str) -> bool:
    """Returns whether a text contains NUL, or other control characters as more than 1 % of its characters."""
    if '\0' in sample:
        return True
    control_characters = 0
    for character in sample:
        if not character.isprintable() and not character.isspace() and ord(character) < 0xA0:
            control_characters += 1
    return control_characters > _MAX_CONTROL_SHARE * len(sample)
