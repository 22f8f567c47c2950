"""Whether a text is English prose, its paragraphs and sentences by punctuation alone, and passages cut of them."""

from __future__ import annotations

import re

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


# A full stop, the quotes or brackets that close the sentence, white space, and the start of another sentence.
_SENTENCE_END = re.compile(r'(?<=[.!?])["\')\]”’]{0,2}\s+(?=["\'(\[“‘]?[A-Z0-9])')
# A full stop after one of these, or after an initial, does not end a sentence.
_ABBREVIATION = re.compile(
    r'(?:\b(?:Mr|Mrs|Ms|Dr|St|Jr|Sr|Prof|Rev|Gen|Col|Capt|Lt|Sgt|No|Nos|vs|ca|c|b|d|r|ft|approx|est|cf|e\.g|i\.e|U\.S'
    r'|Ltd|Inc|Co|Corp|Bros|Mt|Ave|Vol|pp|p)|\b[A-Z])\.$'
)
# The longest abbreviation with its full stop, and the character before it.
_ABBREVIATION_LENGTH = 8
# Headings, list items, table rows and quotations of Markdown start a paragraph of their own.
_BLOCK_MARKS = ('#', '-', '*', '+', '|', '>', '```', '•', '◦', '‣')
# Numbers of list items have at most two digits: a year with a full stop may begin a wrapped line.
_LIST_MARK = re.compile(r'(?:[-*+•◦‣]|\d{1,2}[.)]) +')
# The line below or above a heading (reStructuredText, AsciiDoc, Markdown), or between two sections.
_RULING = re.compile(r'([=~^"*+#_-])\1{2,}')
# Text that is wrapped by hand has lines of about 70 characters; shorter lines are headings, items and verses.
_WRAPPED_LINE = 40


def split_sentences(text: str) -> list[str]:
    """Returns the sentences of a paragraph in order; the words after the last full stop count as one.

    Args:
      text: a paragraph, its words separated by single spaces (`split_paragraphs`); '' gives [''].
    """
    sentences = []
    start = 0
    for boundary in _SENTENCE_END.finditer(text):
        end_of_words = boundary.start()
        # Only the last characters are searched: a text full of initials would take quadratic time otherwise.
        tail = text[max(start, end_of_words - _ABBREVIATION_LENGTH) : end_of_words]
        if _ABBREVIATION.search(tail):
            continue
        # The closing quotes belong to the sentence that they close.
        end = end_of_words + len(boundary.group().rstrip())
        sentences.append(text[start:end])
        start = boundary.end()
    sentences.append(text[start:])
    return sentences


def starts_block(line: str) -> bool:
    """Returns whether a line starts a paragraph of its own: a heading, list item, table row or quotation."""
    return line.startswith(_BLOCK_MARKS) or _LIST_MARK.match(line) is not None


def without_list_mark(paragraph: str) -> str:
    """Returns a list item without the mark or number in front of it, and any other paragraph unchanged."""
    mark = _LIST_MARK.match(paragraph)
    if mark is None:
        return paragraph
    return paragraph[mark.end() :]


def ends_sentence(paragraph: str) -> bool:
    """Returns whether a text ends like a sentence, apart from quotes and brackets behind the full stop."""
    return paragraph.rstrip('"\')]”’').endswith(('.', '!', '?'))


def split_paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of a text, each with single spaces between its words; empty ones are left out.

    A paragraph ends with every line, except where the text was wrapped by hand: the line is no heading and ends without
    a full stop or colon; it is long, or the next line begins with a small letter; and the next line is neither empty
    nor a heading, list item, table row or quotation of Markdown. Lines of one repeated mark end a paragraph, too, and
    are left out.
    """
    paragraphs: list[list[str]] = []
    # Whether the next line belongs to the last paragraph: any line, or only one that begins with a small letter.
    continues = False
    continues_in_lower_case = False
    for line in text.splitlines():
        words = line.split()
        if not words or _RULING.fullmatch(line.strip()):
            continues = continues_in_lower_case = False
            continue
        is_continuation = continues or (continues_in_lower_case and words[0][0].islower())
        if is_continuation and not starts_block(' '.join(words[:2])):
            paragraphs[-1].extend(words)
        else:
            paragraphs.append(words)
        # A heading takes one line, however long.
        is_heading = words[0].startswith('#')
        is_open = not is_heading and not ends_sentence(words[-1]) and not words[-1].endswith(':')
        continues = is_open and len(line) >= _WRAPPED_LINE
        continues_in_lower_case = is_open
    return [' '.join(words) for words in paragraphs]


def split_text(text: str, max_words: int) -> list[str]:
    """Returns passages of whole sentences that together have all words of a text in order, without its rulings.

    A sentence that is longer than a passage is cut between words. Words are separated by single spaces. A line feed
    separates a list item or heading from what is before it, an empty line from what follows it; without them
    `split_paragraphs` would take both for one sentence.

    Args:
      text: any text; without words it gives no passage.
      max_words: words of a passage at most.
    """
    passages = []
    # Sentences of the passage in progress, with the separators between them, and the number of their words.
    parts: list[str] = []
    num_words = 0
    previous_paragraph = ''
    for paragraph in split_paragraphs(text):
        separator = _separator(previous_paragraph, paragraph)
        previous_paragraph = paragraph
        for sentence in split_sentences(paragraph):
            sentence_words = sentence.split()
            # A passage ends before a sentence that would exceed the limit, so passages differ in length.
            if parts and num_words + len(sentence_words) > max_words:
                passages.append(''.join(parts))
                parts = []
                num_words = 0
            # A sentence longer than a passage is cut; its last words can share a passage with the next sentence.
            # `last_start` is the position of these last words, 0 for a shorter sentence.
            last_start = (len(sentence_words) - 1) // max_words * max_words
            for start in range(0, last_start, max_words):
                passages.append(' '.join(sentence_words[start : start + max_words]))
            last_words = sentence_words[last_start:]
            if parts:
                parts.append(separator)
            parts.append(' '.join(last_words))
            num_words += len(last_words)
            separator = ' '
    if parts:
        passages.append(''.join(parts))
    return passages


def _separator(previous_paragraph: str, paragraph: str) -> str:
    """Returns what separates two paragraphs in a passage, so that they are not read as one sentence."""
    if starts_block(paragraph):
        return '\n'
    return ' ' if ends_sentence(previous_paragraph) else '\n\n'
