"""Corpora: files of passages and folders of texts, read as a stream and validated."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from .command import similar_path
from .json_text import Unusable
from .rows import record_of, rows, suffix_of, title_like
from .texts import read_text, split_record, split_text
from .types import Record, RetrievalError, contents, short, split

# Words of a passage that is cut from a longer text, as in Wikipedia-18.
WORDS = 100
# Bad lines that are logged one by one where nothing else is said; the total is logged at the end.
_LOGGED_LINES = 10

_TEXT_SUFFIXES = ('.txt', '.md')
_PASSAGE_SUFFIXES = ('.jsonl', '.json', '.tsv', '.parquet')
# What databases and pandas write into a cell for a missing value; JSON and Parquet have null.
MISSING = ('NULL', r'\N', 'nan', 'NaN', '<NA>')
# Formats that hold texts → a program that writes them as plain text.
_CONVERTERS = {
    '.pdf': 'pdftotext',
    '.html': 'pandoc -t plain',
    '.htm': 'pandoc -t plain',
    '.docx': 'pandoc -t plain',
    '.odt': 'pandoc -t plain',
    '.epub': 'pandoc -t plain',
    '.rst': 'pandoc -t plain',
    '.tex': 'pandoc -t plain',
    '.arrow': 'datasets, load_from_disk(FOLDER).to_parquet(FILE)',
}


@dataclasses.dataclass
class BadLines:
    """Counts the bad lines of a source, or its unusable files if it is a folder of texts.

    Args:
      source: the file or folder, for messages.
      strict: True: the first bad line raises an error. False: the first ones are logged and all are counted.
      otherwise: end of the error line: what else the user of the command can do than correct the line.
      logged: how many are logged one by one.

    Attributes:
      count: number of bad lines.
      first: the first one and its reason; '' without any.
    """

    source: pathlib.Path
    strict: bool
    otherwise: str = ''
    logged: int = _LOGGED_LINES
    count: int = 0
    first: str = ''

    def add(self, number: int, reason: str, text: pathlib.Path | None = None) -> None:
        """Counts a bad line (or file) and logs it or raises an error, as the constructor says.

        Args:
          number: number of the line, from 1.
          reason: why it is bad.
          text: the file, if it is a text; it has no lines that count.

        Raises:
          RetrievalError: `strict` is set.
        """
        self.count += 1
        self.first = self.first or f'line {number}: {reason}'
        place = f'{self.source}:{number}' if text is None else text
        if self.strict:
            unit = 'line' if text is None else 'file'
            raise RetrievalError(f'{place}: {reason}; correct the {unit}{self.otherwise}')
        if self.count <= self.logged:
            logging.warning('%s: %s; skipped', place, reason)


def read(
    source: pathlib.Path,
    skipped: BadLines | None = None,
    passage_words: int = 0,
    fields: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, Record]]:
    """Yields (line number from 1, passage) of a corpus file, in order.

    A file of passages has JSON lines, a TSV with headings (as Wikipedia-18, Karpukhin et al. 2020, arXiv:2004.04906) or
    Parquet, read by `rows.rows`; `rows.record_of` says which of their fields are a passage.

    In a folder, all .txt and .md files are read in the order of their paths, without front matter, and the number
    counts files instead of lines; `split_title` says what their titles are. A single .txt or .md file is read as a
    folder with one file.

    Args:
      source: a file (.jsonl, .json, .tsv or .parquet, texts also .gz, .zst, .bz2 and .xz) or a folder.
      skipped: receives the bad lines, which are then skipped unless it is strict; None makes the first one an error.
      passage_words: long passages and texts are cut into passages of whole sentences with this many words at most
        (see `texts.split_text`); 0: passages are as they are in a file, and 100 words of a text.
      fields: names of the fields of a passage, see `rows.record_of`.

    Raises:
      RetrievalError: a bad line (if `skipped` is None or strict), or a file that cannot be read.
    """
    if skipped is None:
        skipped = BadLines(source, strict=True)
    # The suffix of a folder does not matter, so folders are handled before the suffix is read.
    if holds_texts(source) or not source.exists():
        if fields and source.exists():
            raise RetrievalError(f'{source}: texts have no fields; take --fields away')
        yield from _read_texts(source, skipped, passage_words)
        return
    suffix = suffix_of(source)
    if suffix in _TEXT_SUFFIXES:
        raise RetrievalError(
            f'{source}: a text is read only as it is; decompress it, with gunzip, unzstd, bunzip2 or unxz'
        )
    # `rows` names what is wrong with CSV.
    if suffix not in (*_PASSAGE_SUFFIXES, '.csv'):
        raise RetrievalError(
            f'{source}: unknown format; name the file .jsonl or .tsv (followed by .gz or .zst if compressed), or '
            f'.parquet{conversion([suffix])}'
        )
    for number, row in rows(source):
        try:
            if isinstance(row, Unusable):
                raise row
            if suffix == '.tsv':
                row = {name: '' if cell.strip() in MISSING else cell for name, cell in row.items()}
            record = _validated(record_of(row, fields or {}))
            _warn_of_lost_title(source, row, record, fields or {})
        except Unusable as error:
            skipped.add(number, str(error))
            continue
        for passage in split_record(record, passage_words):
            yield number, passage


def _warn_of_lost_title(
    source: pathlib.Path, row: Mapping[str, Any], record: Record, fields: Mapping[str, str]
) -> None:
    """Warns once per file of a passage without a title in a row that seems to have one under another name."""
    # With a field for it, this passage alone has no title.
    if 'title' in fields or 'title' in row or split(record.contents)[0]:
        return
    name = title_like(row)
    if name:
        warn_once(
            f'{source}: passages have no title, and their field "{name}" is not read; if it is the title, rename it to '
            f'"title", or pass --fields title={name} to retrieval.build or inputs'
        )


@functools.lru_cache
def warn_once(line: str) -> None:
    """Warns once of a line that is true of many passages, and of files that are read twice."""
    logging.warning(line)


def conversion(suffixes: Iterable[str]) -> str:
    """Returns '; …' with what to do about files of these suffixes, which are no texts; '' if nothing is known."""
    found = list(suffixes)
    programs = [f'{suffix} with {_CONVERTERS[suffix]}' for suffix in found if suffix in _CONVERTERS]
    ways = f'; convert {", ".join(programs)}' if programs else ''
    # The .json files of `save_to_disk` hold no passages.
    if '.arrow' not in found and any(suffix in _PASSAGE_SUFFIXES for suffix in found):
        ways += '; of passages give one file, not its folder (cat joins files of JSON lines)'
    if any(suffix in _TEXT_SUFFIXES for suffix in found):
        ways += '; decompress texts'
    return ways


def holds_texts(source: pathlib.Path) -> bool:
    """Returns whether a source is a folder of texts, or one text."""
    return source.is_dir() or source.suffix.lower() in _TEXT_SUFFIXES


def files_of(source: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that `read` opens: the source itself, or the texts in a folder."""
    if not source.is_dir():
        return [source]
    return [path for path in visible_files(source) if path.suffix.lower() in _TEXT_SUFFIXES]


def visible_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files below a folder but hidden ones, such as those in `.git` and `.venv`.

    Linked folders are read, each folder once: under its own name if that is below `folder`. A link to a folder above or
    to a hidden one is not followed.
    """
    paths = []
    visited = set(folder.resolve().parents)
    real = [folder]
    linked: list[pathlib.Path] = []
    while real or linked:
        place = real.pop() if real else linked.pop(0)
        target = place.resolve()
        if target in visited:
            continue
        visited.add(target)
        for child in sorted(_children(place)):
            if child.is_file():
                paths.append(child)
            elif child.is_dir() and not child.is_symlink():
                real.append(child)
            elif child.is_dir() and not child.resolve().name.startswith('.'):
                linked.append(child)
    return sorted(paths)


def _children(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns what is in a folder and not hidden; nothing for a folder that cannot be read."""
    with contextlib.suppress(OSError):
        return [child for child in folder.iterdir() if not child.name.startswith('.')]
    return []


def text_name(source: pathlib.Path, path: pathlib.Path) -> str:
    """Returns the name of a text file: its path relative to the source folder. Ids of passages begin with it."""
    name = path.name
    if path != source:
        name = path.relative_to(source).as_posix()
    # Linux allows any bytes in names; ids are UTF-8 without line feeds.
    return os.fsencode(name).decode('utf-8', 'replace').replace('\n', ' ')


def _read_texts(
    source: pathlib.Path, skipped: BadLines, passage_words: int
) -> Iterator[tuple[int, Record]]:
    """Yields (file number from 1, passage) of a folder of texts or of one text; see `read`."""
    files = files_of(source)
    if not source.exists():
        raise RetrievalError(
            f'{source}: cannot be read (no such file); give passages, a text or a folder{similar_path(source)}'
        )
    if not files:
        suffixes = sorted({suffix_of(path) for path in visible_files(source)})
        raise RetrievalError(
            f'{source}: no .txt or .md file in it; give a folder of texts{conversion(suffixes)}'
        )
    titles = FileTitles(source)
    for number, path in enumerate(files, 1):
        try:
            whole_text = read_text(path)
        except (OSError, Unusable) as error:
            skipped.add(number, f'cannot be read as a text ({error})', path)
            continue
        name = text_name(source, path)
        title, text = titles.split(whole_text, name)
        passage_texts = split_text(text, passage_words) if passage_words else _blocks_of_words(text)
        if not passage_texts:
            skipped.add(number, 'the file is empty', path)
        for passage_number, passage_text in enumerate(passage_texts):
            passage_id = f'{name}#{passage_number}'
            record = Record(passage_id, contents(title, passage_text), document=name)
            try:
                yield number, _validated(record)
            except Unusable as error:
                skipped.add(number, str(error), path)
    titles.warn()


def _blocks_of_words(text: str) -> list[str]:
    """Returns a text in blocks of `WORDS` words."""
    words = text.split()
    return [' '.join(words[start : start + WORDS]) for start in range(0, len(words), WORDS)]


def _validated(record: Record) -> Record:
    """Returns a passage with the line feeds and composed characters that queries have; Unusable if it is bad."""
    # The line feed separates id and contents on disk.
    if not record.id or '\n' in record.id:
        raise Unusable(f'the id {short(record.id)} is empty or has a line feed')
    original = body = record.contents
    if '\r' in body:
        body = body.replace('\r\n', '\n').replace('\r', '\n')
    # Most tokenizers compose what a policy reads and writes: a word with accents of their own would never be found.
    if not unicodedata.is_normalized('NFC', body):
        body = unicodedata.normalize('NFC', body)
    title, text = split(body)
    # An empty text has no meaningful embedding.
    if not title.strip() and not text.strip():
        raise Unusable('a passage with neither title nor text')
    return record if body is original else dataclasses.replace(record, contents=body)


# ---- titles ----------------------------------------------------------------------------------------
#
# The first line of a text, or of Markdown the title in its front matter or its main heading.


# A longer first line of a text is not its title but its first paragraph.
_TITLE_WORDS = 15
# The same in languages without blanks between words, and for texts that have no other line.
TITLE_CHARACTERS = 200
# Characters of a file in which its title is looked for, where that takes longer for each further line; and brackets of
# front matter, because parsers take quadratic time for nested ones.
_HEAD_CHARACTERS = 20_000
_MOST_BRACKETS = 100
# Lines of a Markdown file in which its main heading is looked for; later ones are sections.
_HEADING_LINES = 10
# YAML between two lines of dashes at the start of a Markdown file, as Jekyll and Obsidian write it, or TOML between two
# lines of plus signs (Hugo). The key in the first line of YAML tells it from a text that begins with a horizontal rule.
_FRONT_MATTER = re.compile(
    r'\s*(?:---[ \t]*\r?\n(?=[\w-]+[ \t]*:).*?^(?:---|\.\.\.)|\+\+\+[ \t]*\r?\n.*?^\+\+\+)[ \t]*$',
    re.DOTALL | re.MULTILINE,
)
_FRONT_TITLE = re.compile(r'^title[ \t]*[:=][ \t]*(\S.*)$', re.MULTILINE)
# A text with one quotation mark at each end and none of its kind between them.
_ONCE_QUOTED = re.compile(r"""(['"])((?:(?!\1).)*)\1""")
_COMMENT = re.compile(r'<!--.*?-->', re.DOTALL)
# No pattern reads past a mark that may begin another match: without ends, that would take quadratic time.
_TARGET = r'\](?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\[[^][]*\])'
_IMAGE = re.compile(r'!\[[^][]*' + _TARGET)
# The text of a link is its first group.
_LINK = re.compile(r'\[([^][]*)' + _TARGET)
_TAG = re.compile(r'</?[a-zA-Z][^<>]*>')
_REFERENCE = re.compile(r'\s*\[[^\]]+\]:\s')
_FENCE = re.compile(r'\s*(?:```|~~~)')
_MAIN_HEADING = re.compile(r'#[ \t]+(.+)')
_UNDERLINE = re.compile(r'=+\s*')
# A first line that is underlined, and maybe overlined (reStructuredText). The title is the second group.
_UNDERLINED_TITLE = re.compile(
    r'(?:([=~^#*+_-])\1{2,}[ \t]*\n)?[ \t]*(\S[^\n]*)\n([=~^#*+_-])\3{2,}[ \t]*(?:\n|\Z)'
)
# Between the columns of a table, whose head is between two rulers, too.
_COLUMNS = re.compile(r'\S(?: {2,}|\t)\S')
_EMPHASIS = re.compile(r'\*+|`+|(?<!\w)_+|(?<!_)_++(?!\w)')


def without_front_matter(whole_text: str) -> str:
    """Returns a text without the front matter (YAML, TOML) at its start, which is no prose."""
    front_matter = _FRONT_MATTER.match(whole_text)
    if front_matter is None:
        return whole_text
    return whole_text[front_matter.end() :]


def split_title(whole_text: str, name: str) -> tuple[str, str]:
    """Returns (title, text) of a text file, without front matter; ('', text) if it has no title.

    The title is the first of these that exists and has at most `TITLE_CHARACTERS`. The lines that it is taken from are
    no part of the text.

    1. Of Markdown: `title` of the front matter.
    2. Of Markdown: the first heading of level one, if it is among the first lines.
    3. The first line, if it is short, contains a letter, has no full stop at its end and is followed by text. Lines of
       marks above and below it (reStructuredText) are left out. Of Markdown it is the first one behind images, badges,
       tags, comments and lines of links only, which are left out, too.

    Args:
      whole_text: content of a file.
      name: name of the file, with any folders in front.
    """
    text = without_front_matter(whole_text)
    if pathlib.PurePath(name).suffix.lower() != '.md':
        return first_line_title(text)
    front_title = _front_title(whole_text)
    text = _without_decoration(text)
    heading, text_below = _main_heading(text)
    # Most files repeat the title of their front matter as a heading.
    for title in (front_title, heading):
        if title and len(title) <= TITLE_CHARACTERS and text_below.strip():
            return title, text_below
    return first_line_title(text)


def _front_title(whole_text: str) -> str:
    """Returns the title in the front matter; '' if there is none."""
    match = _FRONT_MATTER.match(whole_text)
    if match is None:
        return ''
    # Without the lines that enclose it.
    front_matter = match[0].strip().partition('\n')[2].rpartition('\n')[0]
    line = _FRONT_TITLE.search(front_matter)
    is_toml = match[0].lstrip().startswith('+')
    # A field with an error does not take the title with it.
    for text in (front_matter, line[0] if line else ''):
        title = _title_field(text[:_HEAD_CHARACTERS], is_toml)
        if title is not None:
            return _plain(title)
    if line is None:
        return ''
    # Neither YAML nor TOML, by a colon or a quotation mark.
    quoted = _ONCE_QUOTED.fullmatch(line[1].strip())
    return _plain(quoted[2] if quoted else line[1])


def _title_field(front_matter: str, is_toml: bool) -> str | None:
    """Returns the title in YAML or TOML, '' if there is none; None if it cannot be read, or is not a text."""
    try:
        if len(re.findall(r'[{\[]', front_matter)) > _MOST_BRACKETS:
            return None
        # Of this loader every scalar is a text.
        fields = (
            tomllib.loads(front_matter) if is_toml else yaml.load(front_matter, yaml.BaseLoader)
        )
        title = fields.get('title', '')
        # Escapes for two halves of one character (JSON).
        return title.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    # The last three: a number that is too large, another value than a text, nesting without end.
    except (yaml.YAMLError, ValueError, OverflowError, AttributeError, RecursionError):
        return None


def first_line_title(text: str) -> tuple[str, str]:
    """Returns (title, text) by the rule 3 of `split_title`, ('', text) without a title."""
    first_line, _, text_below = text.strip().partition('\n')
    underlined = _UNDERLINED_TITLE.match(text.lstrip())
    if underlined and not _COLUMNS.search(underlined[2]):
        first_line, text_below = underlined[2], text.lstrip()[underlined.end() :]
    # Markdown headings start with '#'.
    title = ' '.join(first_line.lstrip('# ').split())
    is_short = len(title.split()) <= _TITLE_WORDS and len(title) <= TITLE_CHARACTERS
    # A horizontal rule or a date does not name a text.
    has_letter = any(character.isalpha() for character in title)
    if is_short and has_letter and not title.endswith('.') and text_below.strip():
        return title, text_below
    return '', text


class FileTitles:
    """Titles for texts without one: the names of their files. Counts them for a warning.

    Args:
      source: folder of the texts, or one text.
    """

    def __init__(self, source: pathlib.Path):
        self._source = source
        self._count = 0
        self._first = ''

    def split(self, whole_text: str, name: str) -> tuple[str, str]:
        """Returns `split_title`, with the name of the file without its suffix if the text has no title."""
        title, text = split_title(whole_text, name)
        if not title and text.strip():
            title = pathlib.PurePath(name).stem
            self._count += 1
            self._first = self._first or name
        return title, text

    def warn(self) -> None:
        """Warns of the texts so far that have no title."""
        if self._count:
            warn_once(
                f'{self._source}: texts without a title: {self._count}, the first is {short(self._first)}; each has '
                'the name of its file instead'
            )


def _main_heading(text: str) -> tuple[str, str]:
    """Returns (first heading of level one, text without it if it is the first line); ('', text) without one."""
    lines = text.split('\n', _HEADING_LINES)
    is_code = False
    for number, line in enumerate(lines[:_HEADING_LINES]):
        # A comment in a block of code looks like a heading.
        if _FENCE.match(line):
            is_code = not is_code
        if is_code:
            continue
        below = lines[number + 1 :]
        title = ''
        heading = _MAIN_HEADING.match(line)
        if heading:
            title = _plain(heading[1].rstrip('# \t\r'))
        elif below and line.strip() and _UNDERLINE.fullmatch(below[0]):
            title = _plain(line)
            below = below[1:]
        if any(character.isalpha() for character in title):
            return title, '\n'.join(below) if number == 0 else text
    return '', text


def _without_decoration(text: str) -> str:
    """Returns a Markdown text from its first line with words on: without badges, images, tags, comments, link lists."""
    text = text.lstrip()
    text, rest = text[:_HEAD_CHARACTERS], text[_HEAD_CHARACTERS:]
    while text:
        comment = _COMMENT.match(text)
        line, _, below = text.partition('\n')
        if comment:
            text = text[comment.end() :].lstrip()
            continue
        words = _LINK.sub('', _IMAGE.sub('', _TAG.sub('', line)))
        has_words = any(character.isalnum() for character in words)
        # A line without any markup, such as a horizontal rule, is left as it is.
        if words == line or (has_words and not _REFERENCE.match(line)):
            break
        text = below.lstrip()
    return text + rest


def _plain(line: str) -> str:
    """Returns a line of Markdown without images, tags, emphasis and the addresses of links."""
    text = _TAG.sub('', _IMAGE.sub('', line))
    return ' '.join(_EMPHASIS.sub('', _LINK.sub(r'\1', text)).split())
