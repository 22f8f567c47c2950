"""Plain texts: reading, paragraphs and sentences, passages, and whether a text is English prose."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Set

from . import json_text
from .types import Record, contents, split

# Shorter texts hold no sentence that could be asked about.
MIN_WORDS = 8

# What a conversion leaves in a text: references of HTML; UTF-8 read as Latin-1 or as something else.
DAMAGE = r'&(?:[a-z]{2,8}|#\d+|#x[0-9a-f]+);|[ÂÃ][\x80-\xbf]|â€|\ufffd'
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


# ---- sentences -------------------------------------------------------------------------------------
#
# Paragraphs and sentences of plain English text, found by punctuation alone.


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
    nor a heading, list item, table row or quotation of Markdown.
    """
    paragraphs: list[list[str]] = []
    # Whether the next line belongs to the last paragraph: any line, or only one that begins with a small letter.
    continues = False
    continues_in_lower_case = False
    for line in text.splitlines():
        words = line.split()
        if not words:
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


# ---- passages --------------------------------------------------------------------------------------
#
# Long texts are cut into passages of whole sentences.


# A passage that is longer by up to this factor is not cut: half a passage of Wikipedia-18 contains too few facts.
TOLERANCE = 1.5


def split_text(text: str, max_words: int) -> list[str]:
    """Returns passages of whole sentences that together have all words of a text in order.

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


def split_record(record: Record, max_words: int) -> Iterator[Record]:
    """Yields a passage unchanged, or if it is too long the passages that it is cut into.

    The new passages keep the title; their ids are that of the old passage with '#' and a number from 0. Consecutive
    passages with the same title are one document, so the tool `open` shows all of them. Those of a passage without a
    title get its id as the name of their document.

    Args:
      record: a passage of a corpus file.
      max_words: words of a passage at most; a text of up to `TOLERANCE` times as many is not cut; 0 cuts nothing.
    """
    title, text = split(record.contents)
    if not max_words or len(text.split()) <= TOLERANCE * max_words:
        yield record
        return
    document = record.document
    if not document and not title:
        document = record.id
    for number, passage_text in enumerate(split_text(text, max_words)):
        yield Record(f'{record.id}#{number}', contents(title, passage_text), document)


# ---- files -----------------------------------------------------------------------------------------
#
# As people keep them: any line ends, words divided at the end of a line.


_SOFT_HYPHEN = '\u00ad'
# A word divided at the end of a line, by the hyphen of ASCII or the one that typesetters write.
_DIVIDED = re.compile(r'(?<![^\W_])([^\W_]+)[-\u2010][ \t]*\n[ \t]*([^\W_]+)')
_WORD = re.compile(r'[^\W_]+(?:-[^\W_]+)*')
# A character that the next one is printed over, for bold or underlined words (pages of man).
_OVERSTRUCK = re.compile(r'[^\n]\x08')
# Behind these the hyphen stands for the end of a later word: 'pre- and postfix'.
_SUSPENDED = ('and', 'or', 'to')
# By how many the compounds among divided words must outnumber the others before undecided ones count as compounds.
_MORE_COMPOUNDS = 3


def read_text(path: pathlib.Path) -> str:
    """Returns the content of a text file, its lines ended by line feeds, its divided words joined, nothing overstruck.

    Raises:
      OSError: it cannot be read.
      Unusable: it is no UTF-8 text, or markup that only a converter makes into one.
    """
    data = path.read_bytes()
    json_text.refuse_foreign(data)
    text = json_text.decode(data).replace('\r\n', '\n').replace('\r', '\n')
    text = _OVERSTRUCK.sub('', text)
    return join_divided_words(text)


def join_divided_words(text: str) -> str:
    """Returns a text without soft hyphens, and with words joined that the end of a line divides.

    The hyphen is kept where the text has the word with it elsewhere, or has its second half as a word of its own. Of
    words about which the text says nothing it is kept if compounds clearly outnumber the others.
    """
    text = re.sub(rf'{_SOFT_HYPHEN}(?:\n[ \t]*)?', '', text)
    if _DIVIDED.search(text) is None:
        return text
    undivided = _DIVIDED.sub(' ', text).replace('\u2010', '-')
    words = {word.lower() for word in _WORD.findall(undivided)}
    wholes = compounds = 0
    for first, second in _DIVIDED.findall(text):
        if _is_undecided(first, second):
            wholes += f'{first}{second}'.lower() in words
            compounds += _is_compound(first, second, words)
    keeps_hyphens = compounds >= wholes + _MORE_COMPOUNDS

    def joined(divided: re.Match[str]) -> str:
        first, second = divided.groups()
        hyphenated = f'{first}-{second}'
        if first[-1].isdigit():
            # Years and pages; a smaller number begins a line of its own.
            is_range = second.isdigit() and (len(first), first) < (len(second), second)
            return hyphenated if is_range else divided.group()
        if second in _SUSPENDED:
            return divided.group()
        if f'{first}{second}'.lower() in words:
            return first + second
        # As in 'state-of-the-art'.
        is_inner_part = text[divided.start() - 1 : divided.start()] == '-'
        if is_inner_part or not _is_undecided(first, second):
            return hyphenated
        return hyphenated if keeps_hyphens or _is_compound(first, second, words) else first + second

    return _DIVIDED.sub(joined, text)


def _is_undecided(first: str, second: str) -> bool:
    """Returns whether a divided word can be written with or without its hyphen, unlike 'GPT-4' and 'Anglo-Saxon'."""
    is_word = first.isalpha() and second.isalpha() and second.islower()
    # Nor 'x-axis' and 'COVID-related'.
    return is_word and len(first) > 1 and not first.isupper()


def _is_compound(first: str, second: str, words: Set[str]) -> bool:
    """Returns whether the words of a text show that a divided word is written with its hyphen."""
    if f'{first}{second}'.lower() in words or second in _SUSPENDED:
        return False
    return f'{first}-{second}'.lower() in words or second in words
