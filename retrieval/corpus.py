"""Corpora: passages read as a stream, written to disk, and read back by number without loading them into memory.

On disk a corpus is a folder with one SQLite file, `passages.sqlite`:

    passages    row (from 0), id, contents (in wire form)
    documents   start (first row), title ('' where it has none)

Consecutive passages that were cut from one text are a document (see `Corpus.document_rows`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import logging
import pathlib
import re
import sqlite3
import unicodedata
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from . import progress
from .command import similar_path, warn_once
from .json_text import Unusable
from .rows import record_of, rows, suffix_of, title_like
from .types import Passage, RetrievalError, short
from .types import Record as Record
from .types import contents as contents
from .types import split as split

# Cuts folders of texts and long passages into passages. It stands beside this package, which works without it.
_TEXTS = 'zeroplay_jax.extras.inputs.texts'
TEXT_SUFFIXES = ('.txt', '.md', '.mdx', '.markdown', '.rst', '.html', '.htm', '.xhtml')
_PASSAGE_SUFFIXES = ('.jsonl', '.json', '.tsv', '.parquet', '.csv')
# Bad lines that are logged one by one; the total is logged at the end.
_LOGGED_LINES = 10
_FILE = 'passages.sqlite'
# Words; the 256 tokens that text encoders read have fewer.
_LONG_PASSAGE = 250
# Passages, from the first one on, whose length and unread titles are counted, and the shares above which they are said.
_INSPECTED = 10_000
_MANY = 0.01
_MOST = 0.5
# A first line as titles are, without quotes or a full stop, and text below it.
_FIRST_LINE = re.compile(r'(?!")[^\n]{0,99}[^\n.]\n\s*\S')
_TABLES = """
create table passages (row integer primary key, id text not null, contents text not null);
create table documents (start integer primary key, title text not null);
"""
# Made when the tables are full: sorting once is faster than inserting in random order.
_INDEXES = """
create index ids on passages (id);
create index titles on documents (title);
"""


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

    def add(self, number: int, reason: str, text: str = '') -> None:
        """Counts a bad line (or file) and logs it or raises an error, as the constructor says.

        Args:
          number: number of the line, from 1.
          reason: why it is bad.
          text: name of the file in the source, if it is a text; it has no lines that count.

        Raises:
          RetrievalError: `strict` is set.
        """
        self.count += 1
        self.first = self.first or f'line {number}: {reason}'
        place = f'{self.source}:{number}'
        if text:
            place = str(self.source / text if self.source.is_dir() else self.source)
            reason = f'cannot be read as a text ({reason})'
        if self.strict:
            unit = 'file' if text else 'line'
            raise RetrievalError(f'{place}: {reason}; correct the {unit}{self.otherwise}')
        if self.count <= self.logged:
            logging.warning('%s: %s; skipped', place, reason)


def read(
    source: pathlib.Path,
    skipped: BadLines | None = None,
    passage_words: int = 0,
    fields: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, Record]]:
    """Yields (line number from 1, passage) of a corpus, in order.

    A file of passages has JSON lines, a TSV with headings (as Wikipedia-18, Karpukhin et al. 2020, arXiv:2004.04906) or
    Parquet, read by `rows.rows`; `rows.record_of` says which of their fields are a passage. Folders of texts, and
    single texts, are cut by `extras.inputs.texts`; the number counts files instead of lines.

    Args:
      source: a file (.jsonl, .json, .tsv or .parquet, texts also .gz, .zst, .bz2 and .xz) or a folder.
      skipped: receives the bad lines, which are then skipped unless it is strict; None makes the first one an error.
      passage_words: long passages and texts are cut into passages of whole sentences with this many words at most;
        0: passages are as they are in a file, and 100 words of a text.
      fields: names of the fields of a passage, see `rows.record_of`.

    Raises:
      RetrievalError: a bad line (if `skipped` is None or strict), or a file that cannot be read.
    """
    skipped = skipped or BadLines(source, strict=True)
    is_text = holds_texts(source)
    if is_text and fields:
        raise RetrievalError(f'{source}: texts have no fields; take --fields away')
    if not source.exists():
        raise RetrievalError(
            f'{source}: no such file or folder; give texts (.txt, .md, .html, .rst) or passages (.jsonl)'
            f'{similar_path(source)}'
        )
    if is_text and not files_of(source):
        raise RetrievalError(
            f'{source}: no text in it (.txt, .md, .html, .rst, also .gz); give one, or one file of passages; convert '
            f'PDF with pdftotext and other documents with pandoc -t plain{similar_path(source)}'
        )
    if is_text:
        passages = _texts().passages_of(source, skipped, passage_words)
    else:
        passages = _passages_of_file(source, skipped, fields or {})
    for number, passage in passages:
        try:
            record = _validated(passage)
        except Unusable as error:
            skipped.add(number, str(error))
            continue
        parts = [record]
        if passage_words and not is_text:
            parts = _texts().split_record(record, passage_words)
        for part in parts:
            yield number, part


def _passages_of_file(
    source: pathlib.Path, skipped: BadLines, fields: Mapping[str, str]
) -> Iterator[tuple[int, Record]]:
    """Yields (line number, passage) of a file of passages."""
    suffix = suffix_of(source)
    if suffix not in _PASSAGE_SUFFIXES and source.exists():
        raise RetrievalError(
            f'{source}: unknown format; give .jsonl, .tsv or .parquet, or texts (.txt, .md, .html, .rst): PDF is '
            'converted by pdftotext, documents of other kinds by pandoc -t plain'
        )
    for number, row in rows(source):
        try:
            if isinstance(row, Unusable):
                raise row
            record = record_of(row, fields)
        except Unusable as error:
            skipped.add(number, str(error))
            continue
        # With a field for it, this passage alone has no title.
        has_title = 'title' in fields or 'title' in row or split(record.contents)[0]
        name = '' if has_title else title_like(row)
        if name:
            warn_once(
                f'{source}: passages have no title, and their field "{name}" is not read; if it is the title, rename '
                f'it to "title", or pass --fields title={name} to zeroplay index or zeroplay inputs'
            )
        yield number, record


def _texts() -> ModuleType:
    """Returns the module that cuts texts into passages."""
    try:
        return importlib.import_module(_TEXTS)
    except ImportError:
        raise RetrievalError(
            f'texts and long passages are cut by {_TEXTS}, which is not installed; give a file of passages'
        ) from None


def holds_texts(source: pathlib.Path) -> bool:
    """Returns whether a source is a folder of texts, or one text."""
    return source.is_dir() or suffix_of(source) in TEXT_SUFFIXES


def files_of(source: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that `read` opens: the source itself, or the texts in a folder."""
    return _texts().files_of(source) if source.is_dir() else [source]


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


class Corpus:
    """Passages on disk, opened from a folder that `write` filled. Safe to use from several threads."""

    def __init__(self, folder: pathlib.Path):
        """Opens the file; nothing is read into memory.

        Raises:
          RetrievalError: the file is missing or damaged.
        """
        try:
            self._open(_connect(folder / _FILE, 'mode=ro&immutable=1'))
        except sqlite3.Error as error:
            raise RetrievalError(
                f'{folder}: no corpus can be read there ({error}); build the index again'
            ) from error

    def _open(self, database: sqlite3.Connection) -> None:
        """Reads from a database from now on; sqlite3.Error if it has no passage."""
        self._database = database
        (last_row,) = self._one('select max(row) from passages')
        if last_row is None:
            raise sqlite3.DatabaseError('it has no passage')
        self._count = last_row + 1

    def __len__(self) -> int:
        return self._count

    def _one(self, query: str, *values: int | str) -> Any:
        """Returns the first row of an answer; None without any."""
        return self._database.execute(query, values).fetchone()

    def record(self, number: int) -> Record:
        """Returns the passage in wire form, with the id of its source."""
        return Record(*self._one('select id, contents from passages where row = ?', number))

    def passage(self, number: int) -> Passage:
        """Returns {'id': number, 'title', 'text'}."""
        title, text = split(self.record(number).contents)
        return {'id': number, 'title': title, 'text': text}

    def document_rows(self, row: int | np.integer) -> range:
        """Returns the rows of the document which a passage belongs to.

        A document is a run of consecutive passages with the same document name (in a folder of texts: of one file);
        without names, with the same non-empty title; without either, that were cut from one line.

        Raises:
          RetrievalError: no such row.
        """
        if not 0 <= row < len(self):
            raise RetrievalError(f'corpus: no row {row}; rows lie between 0 and {len(self) - 1}')
        number = int(row)
        (first,) = self._one('select max(start) from documents where start <= ?', number)
        (end,) = self._one('select min(start) from documents where start > ?', number)
        # The last document ends with the corpus.
        return range(first, len(self) if end is None else end)

    def find_document(self, reference: str) -> range | None:
        """Returns the rows of the document with a passage id or an exact title; None if there is none.

        The reference is tried as the source's own id, which searches return; then as a title, of which the first
        document counts.
        """
        # Ids before titles: an id was copied from a search result, whereas a title may be a policy's guess.
        row = self._row_of('select row from passages where id = ?', reference)
        if row is None and reference:
            row = self._row_of('select min(start) from documents where title = ?', reference)
        return None if row is None else self.document_rows(row)

    def has_id(self, reference: str) -> bool:
        """Returns whether a passage has exactly this id."""
        return self._row_of('select row from passages where id = ?', reference) is not None

    def _row_of(self, query: str, text: str) -> int | None:
        """Returns the row that a query about a text gives, or None."""
        try:
            answer = self._one(query, text)
        except UnicodeEncodeError:
            # Half of a surrogate pair, which a policy can write, occurs in no passage.
            return None
        return None if answer is None else answer[0]


class MemoryCorpus(Corpus):
    """Passages in memory; the id of each is its row number."""

    def __init__(self, titles: Sequence[str], texts: Sequence[str]):
        """Takes one title and one text for each passage.

        Raises:
          RetrievalError: no passage, or another number of titles than of texts.
        """
        # `len`, because an array of titles has no truth value.
        if not len(titles) or len(titles) != len(texts):
            raise RetrievalError(
                f'corpus: {len(titles)} titles and {len(texts)} texts; give at least one passage'
            )
        records = []
        for row, passage in enumerate(zip(titles, texts)):
            records.append(Record(str(row), contents(*passage)))
        database = sqlite3.connect(':memory:', check_same_thread=False)
        database.executescript(_TABLES)
        for _ in _added(database, enumerate(records)):
            pass
        database.executescript(_INDEXES)
        self._open(database)


def write(
    source: pathlib.Path,
    folder: pathlib.Path,
    strict: bool = True,
    passage_words: int = 0,
    fields: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Validates a corpus file as a stream and writes it for random access.

    Returns {'sha256': over all records in order, 'passages': written, 'skipped': lines}.

    Passages pass through memory one at a time, so that 21 million of them fit.

    Args:
      source: a file of passages or a folder of texts (see `read`).
      folder: an existing folder that gets the files of a corpus.
      strict: stop at the first bad line (False: skip, log and count bad lines).
      passage_words, fields: see `read`.

    Raises:
      RetrievalError: a bad line (strict), a repeated id, no passage at all, a file that cannot be read.
    """
    # `read` counts the bad lines in this object.
    skipped = BadLines(source, strict, otherwise=' or pass --skip-bad-lines')
    digest = hashlib.sha256()
    count = long = untitled = 0
    with _database(folder) as database, progress.Bar(None, 'passages', 'read') as bar:
        for record in _added(database, read(source, skipped, passage_words, fields)):
            line = f'{record.id}\n{record.contents}'.encode()
            # The length is hashed too, so that moving a character between two passages changes the digest.
            digest.update(len(line).to_bytes(8, 'little') + line)
            count += 1
            if count <= _INSPECTED:
                long += len(record.contents.split()) > _LONG_PASSAGE
                untitled += _FIRST_LINE.match(record.contents) is not None
            bar.update()
        # The file is empty or has bad lines only.
        if not count:
            raise RetrievalError(
                f'{source}: no passage in it ({skipped.count} lines skipped); give a corpus with some'
            )
        database.executescript(_INDEXES)
        _refuse_repeated_ids(source, database)
    if skipped.count:
        logging.warning(
            '%s: bad lines skipped: %d, passages kept: %d', source, skipped.count, count
        )
    inspected = min(count, _INSPECTED)
    if untitled > _MOST * inspected:
        logging.warning(
            f'{source}: the first line of {untitled} of {inspected} passages could be a title and is read as text; '
            'write it in double quotes, or as a field "title" (docs/corpus.md)'
        )
    if long > _MANY * inspected and not passage_words:
        logging.warning(
            f'{source}: {long} of {inspected} passages have more than {_LONG_PASSAGE} words; text encoders and '
            'policies may read only their beginning, so cut them with --passage-words=100'
        )
    return {'sha256': digest.hexdigest(), 'passages': count, 'skipped': skipped.count}


def _connect(path: pathlib.Path, options: str) -> sqlite3.Connection:
    # Without locks, which some file systems lack: one process writes a corpus, and then nobody does.
    address = f'file:{urllib.parse.quote(str(path.resolve()))}?{options}'
    return sqlite3.connect(address, uri=True, check_same_thread=False)


@contextlib.contextmanager
def _database(folder: pathlib.Path) -> Iterator[sqlite3.Connection]:
    """Gives an empty database, which is complete when the block ends; RetrievalError if it cannot be written."""
    path = folder / _FILE
    path.unlink(missing_ok=True)
    try:
        with contextlib.closing(_connect(path, 'nolock=1')) as database:
            # Without a journal: an incomplete file is written again from the beginning.
            database.execute('pragma journal_mode = off')
            database.execute('pragma synchronous = off')
            database.executescript(_TABLES)
            yield database
            database.commit()
    except sqlite3.Error as error:
        raise RetrievalError(
            f'{path}: cannot be written ({error}); free space or choose another --out'
        ) from error


def _added(
    database: sqlite3.Connection, passages: Iterable[tuple[int, Record]]
) -> Iterator[Record]:
    """Adds passages, each with the number of its line, to an empty database; yields those that were added."""
    previous_mark: tuple[str, int | str] | None = None
    for row, (number, record) in enumerate(passages):
        database.execute('insert into passages values (?, ?, ?)', (row, record.id, record.contents))
        title, _ = split(record.contents)
        # What a passage has in common with its neighbours of the same document. Neighbouring files can have the same
        # title, so the name of the document has precedence. Passages with neither belong together only if they were cut
        # from one line.
        mark: tuple[str, int | str] = ('line', number)
        if record.document:
            mark = ('document', record.document)
        elif title:
            mark = ('title', title)
        if mark != previous_mark:
            database.execute('insert into documents values (?, ?)', (row, title))
        previous_mark = mark
        yield record


def _refuse_repeated_ids(source: pathlib.Path, database: sqlite3.Connection) -> None:
    """Raises RetrievalError if two passages have the same id; the error names `source`."""
    query = 'select id, min(row) from passages group by id having count(*) > 1 order by min(row)'
    repeated = database.execute(query).fetchall()
    if not repeated:
        return
    repeated_id, first = repeated[0]
    query = 'select min(row) from passages where id = ? and row > ?'
    (second,) = database.execute(query, (repeated_id, first)).fetchone()
    raise RetrievalError(
        f'{source}: passages {first} and {second} (counted from 0) have the same id {short(repeated_id)}, and '
        f'{len(repeated) - 1} more ids repeat; give every passage its own id'
    )


# Whole documents: the passages of one document joined and cut into pages of a fixed number of words.
# Words of a page where the caller does not choose: five passages of Wikipedia-18.
WORDS_PER_PAGE = 500

_WORD = re.compile(r'\S+')


@dataclasses.dataclass(frozen=True)
class DocumentPage:
    """One page of a document.

    Attributes:
      title: title of the document's first passage.
      text: words of this page, with the white space between them as in the source.
      page: number of this page, from 1.
      pages: number of pages of the document, at least 1.
      id: id of the document's first passage; opening it gives the same document.
      passages: {'id', 'title', 'text'} of each passage with words on this page; 'text' is what the page has of it.
    """

    title: str
    text: str
    page: int
    pages: int
    id: str
    passages: Sequence[Mapping[str, str]]


def document_page(
    corpus: Corpus, reference: str, page: int = 1, words_per_page: int = WORDS_PER_PAGE
) -> DocumentPage | None:
    """Returns one page of a document.

    Args:
      corpus: where the document is looked up.
      reference: id of any of its passages, or its exact title.
      page: number of the page, from 1.
      words_per_page: words of every page but the last one, at least 1.

    Returns:
      The page; None where no document has this id or title, or the document has fewer pages.

    Raises:
      RetrievalError: `page` or `words_per_page` below 1.
    """
    if page < 1 or words_per_page < 1:
        raise RetrievalError(
            f'open: page {page} with {words_per_page} words per page; both must be at least 1'
        )
    # The lookup gives row numbers; the texts of these rows are read below.
    rows = corpus.find_document(reference)
    if rows is None:
        return None
    passages = [_with_own_id(corpus, row) for row in rows]
    text = ' '.join(passage['text'] for passage in passages)
    # Matches instead of `split`: with their positions the text is cut without changing the white space between words.
    words = list(_WORD.finditer(text))
    # A document without any words still has one (empty) page.
    pages = max(1, -(-len(words) // words_per_page))
    if page > pages:
        return None
    page_words = words[(page - 1) * words_per_page : page * words_per_page]
    start, end = (page_words[0].start(), page_words[-1].end()) if page_words else (0, 0)
    # All pages have the id and title of the first passage, whichever passage was named.
    first = passages[0]
    shown = _between(passages, start, end)
    return DocumentPage(first['title'], text[start:end], page, pages, first['id'], shown)


def _with_own_id(corpus: Corpus, row: int) -> dict[str, str]:
    """Returns {'id', 'title', 'text'} of a passage, with the id of its source."""
    record = corpus.record(row)
    title, text = split(record.contents)
    return {'id': record.id, 'title': title, 'text': text}


def _between(passages: list[dict[str, str]], start: int, end: int) -> list[dict[str, str]]:
    """Returns the passages with words between two characters of their texts joined by spaces, cut to these words."""
    shown = []
    offset = 0
    for passage in passages:
        text = passage['text']
        part = text[max(0, start - offset) : max(0, end - offset)].strip()
        # A document without words has one page, which shows the title.
        if part or not end:
            shown.append(passage | {'text': part})
        offset += len(text) + len(' ')
    return shown
