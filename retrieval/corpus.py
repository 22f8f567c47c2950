"""Corpora: passages written to disk as a stream, and read back by number without loading them into memory.

On disk a corpus is a folder of memory-mapped files; 21 million passages take 168 MB of offsets, 0.4 GB of lookup
tables and whatever the operating system caches:

    passages.bin    the records one after another: id, line feed, contents (UTF-8)
    offsets.npy     uint64 [N + 1], where each record starts
    documents.npy   uint64 [D], first passage of each document
    titles.npy      lookup table (below) from titles to the first passages of documents
    ids.npy         lookup table from ids to passages

Consecutive passages that were cut from one text are a document (see `Corpus.document_rows`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped, UInt64

from . import progress
from .sources import BadLines
from .sources import files_of as files_of
from .sources import read as read
from .types import Passage, RetrievalError, short
from .types import Record as Record
from .types import contents as contents
from .types import split as split

# Passages on each side that are compared in an index built before documents were recorded. No article of
# Wikipedia-18 has more; it bounds the time of a lookup in a corpus with equal titles throughout.
_WINDOW = 4_096


class MemoryCorpus:
    """Passages in memory, with the interface of `Corpus`; the id of each is its row number."""

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
        # Copied, because the caller may change its lists.
        self._titles = list(titles)
        self._texts = list(texts)

    def __len__(self) -> int:
        return len(self._titles)

    def record(self, number: int) -> Record:
        """Returns the passage in wire form."""
        return Record(str(number), contents(self._titles[number], self._texts[number]))

    def passage(self, number: int) -> Passage:
        """Returns {'id': number, 'title', 'text'}."""
        return {'id': number, 'title': self._titles[number], 'text': self._texts[number]}

    def document_rows(self, row: int | np.integer) -> range:
        """Returns the rows of the document of a passage: the run of neighbours with the same non-empty title.

        Raises:
          RetrievalError: no such row.
        """
        number = _checked_row(row, len(self))
        # Comparing strings in memory is fast, so the window has no limit here.
        return title_run(self._titles.__getitem__, number, len(self), window=len(self))

    def find_document(self, reference: str) -> range | None:
        """Returns the rows of the document with a passage id or an exact title; None if there is none.

        Of several documents with the title the first is returned. An id is preferred to a title.
        """
        # A number is the id of a passage here, because ids are row numbers.
        row = row_number(reference)
        if row is None or row >= len(self):
            row = self._first_rows.get(reference)
        if row is None:
            return None
        return self.document_rows(row)

    @functools.cached_property
    def _first_rows(self) -> dict[str, int]:
        """First passage of each non-empty title."""
        first_rows: dict[str, int] = {}
        for row, title in enumerate(self._titles):
            if title:
                first_rows.setdefault(title, row)
        return first_rows


class Corpus:
    """Passages on disk, opened from a folder that `write` filled."""

    def __init__(self, folder: pathlib.Path):
        """Maps the files into memory.

        Raises:
          RetrievalError: a file cannot be read, or does not match the other files.
        """
        self._folder = folder
        try:
            # Memory-mapped: opening 21 million passages takes a millisecond.
            self._offsets = np.load(folder / 'offsets.npy', mmap_mode='r')
            self._bytes = np.memmap(folder / 'passages.bin', np.uint8, 'r')
        except (OSError, ValueError) as error:
            raise RetrievalError(
                f'{folder}: no corpus can be read there ({error}); build the index again'
            ) from error
        # One more offset than passages: the last one is the end of the file.
        valid_shape = self._offsets.ndim == 1 and len(self._offsets) >= 2
        if not valid_shape or self._offsets[-1] != len(self._bytes):
            raise RetrievalError(
                f'{folder}: offsets.npy does not fit passages.bin; build the index again'
            )
        # An index built before documents were recorded lacks these three files.
        self._document_starts = _load_starts(folder / 'documents.npy', len(self))
        self._title_table = _load_table(folder / 'titles.npy')
        self._id_table = _load_table(folder / 'ids.npy')

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def record(self, number: int) -> Record:
        """Returns the passage in wire form, with the id of its source."""
        start = int(self._offsets[number])
        end = int(self._offsets[number + 1])
        # Copies the bytes of this passage only.
        line = self._bytes[start:end].tobytes().decode('utf-8')
        record_id, _, body = line.partition('\n')
        return Record(record_id, body)

    def passage(self, number: int) -> Passage:
        """Returns {'id': number, 'title', 'text'}."""
        title, text = split(self.record(number).contents)
        return {'id': number, 'title': title, 'text': text}

    def document_rows(self, row: int | np.integer) -> range:
        """Returns the rows of the document which a passage belongs to.

        A document is a run of consecutive passages with the same document name (in a folder of texts: of one file);
        without names, with the same non-empty title; without either, that were cut from one line. In an index built
        before documents were recorded only titles count, up to 4,096 rows on each side.

        Raises:
          RetrievalError: no such row.
        """
        number = _checked_row(row, len(self))
        if self._document_starts is None:
            return title_run(self._title, number, len(self), _WINDOW)
        # `after` is the number of the next document: the number of documents that start at this row or before.
        # Converted to uint64, because a Python integer would make NumPy convert the whole file to float64.
        after = int(np.searchsorted(self._document_starts, np.uint64(number), side='right'))
        first = int(self._document_starts[after - 1])
        # The last document ends with the corpus.
        if after == len(self._document_starts):
            return range(first, len(self))
        return range(first, int(self._document_starts[after]))

    def find_document(self, reference: str) -> range | None:
        """Returns the rows of the document with a passage id or an exact title; None if there is none.

        The reference is tried as the source's own id, which searches return; then as a row number; then as a title, of
        which the first document counts. (`passage` returns row numbers as ids, so they are accepted as well.)

        Raises:
          RetrievalError: the reference is not an id, and the index was built before titles could be looked up.
        """
        # Ids before titles: an id was copied from a search result, whereas a title may be a policy's guess.
        row = self._row_of_id(reference)
        if row is None:
            row = self._row_of_title(reference)
        if row is None:
            return None
        return self.document_rows(row)

    def has_id(self, reference: str) -> bool:
        """Returns whether a passage has exactly this id."""
        row = self._row_of_id(reference)
        return row is not None and self.record(row).id == reference

    def _row_of_id(self, reference: str) -> int | None:
        """Returns the row of the passage with this id or this row number as text; None if there is none."""
        number = row_number(reference)
        candidates: list[int] = []
        if self._id_table is not None:
            candidates = self._id_table.candidates(reference)
        elif number is not None:
            # An old index without the table: in Wikipedia-18 the JSON lines count their ids from 0, the TSV from 1.
            candidates = [number, number - 1]
        # The table compares hashes only, so the ids are compared here.
        for row in candidates:
            if 0 <= row < len(self) and self.record(row).id == reference:
                return row
        # No passage has this id, but the reference can still be a row number.
        if number is not None and number < len(self):
            return number
        return None

    def _row_of_title(self, title: str) -> int | None:
        """Returns the first row of the first document with this title; None if there is none."""
        if not title:
            return None
        if self._title_table is None:
            raise RetrievalError(
                f'{self._folder}: the index cannot look up the title {short(title)}; build the index again '
                'to open documents by title, or give the id of a passage'
            )
        # Rows ascend, so the first document with the title is found first.
        for row in self._title_table.candidates(title):
            if self._title(row) == title:
                return row
        return None

    def _title(self, row: int) -> str:
        """Returns the title of a row."""
        title, _ = split(self.record(row).contents)
        return title


@dataclasses.dataclass(frozen=True)
class Written:
    """Result of `write`: passages written, lines skipped, SHA-256 over all records in order."""

    passages: int
    skipped: int
    sha256: str


def write(
    source: pathlib.Path,
    folder: pathlib.Path,
    strict: bool = True,
    passage_words: int = 0,
    fields: Mapping[str, str] | None = None,
) -> Written:
    """Validates a corpus file as a stream and writes it for random access.

    Per passage only a few numbers are held in memory, so that 21 million passages fit. Ids are compared by hashes.

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
    # Repeated ids are found by hashes of 8 bytes. Two different ids out of 21 million have the same hash, and would be
    # refused by mistake, in one of 80,000 corpora.
    id_hashes = _Column(np.uint64)
    ends = _Column(np.uint64)
    ends.append(0)
    documents = _DocumentColumns()
    with (
        (folder / 'passages.bin').open('wb') as out,
        progress.bar(None, 'passages', 'read') as bar,
    ):
        for row, (number, record) in enumerate(read(source, skipped, passage_words, fields)):
            line = f'{record.id}\n{record.contents}'.encode()
            # The length is hashed too, so that moving a character between two passages changes the digest.
            digest.update(len(line).to_bytes(8, 'little') + line)
            id_hashes.append(key_hash(record.id))
            documents.add(row, number, record)
            ends.append(out.tell() + len(line))
            out.write(line)
            bar.update()
    hashes = id_hashes.array()
    # The file is empty or has bad lines only.
    if not len(hashes):
        raise RetrievalError(
            f'{source}: no passage in it ({skipped.count} lines skipped); give a corpus with some'
        )
    np.save(folder / 'offsets.npy', ends.array())
    documents.save(folder)
    write_table(folder / 'ids.npy', hashes, np.arange(len(hashes), dtype=np.uint64))
    # Checked last, because the error reads the repeated id from the written corpus.
    _refuse_repeated_ids(source, Corpus(folder), hashes)
    if skipped.count:
        logging.warning(
            '%s: bad lines skipped: %d, passages kept: %d', source, skipped.count, len(hashes)
        )
    return Written(len(hashes), skipped.count, digest.hexdigest())


class _DocumentColumns:
    """Collects the first rows and titles of documents from passages that are added in order, one by one."""

    def __init__(self) -> None:
        # What the previous passage shares with the others of its document: ('document', name), ('title', title) or
        # ('line', number).
        self._previous_mark: tuple[str, int | str] | None = None
        self._starts = _Column(np.uint64)
        self._title_hashes = _Column(np.uint64)
        self._title_rows = _Column(np.uint64)

    def add(self, row: int, number: int, record: Record) -> None:
        """Adds the next passage.

        Args:
          row: row number of the passage.
          number: number of the line that it was cut from; in a folder of texts, of the file.
          record: the passage.
        """
        title, _ = split(record.contents)
        mark: tuple[str, int | str]
        # Neighbouring files can have the same title, so the name of the document has precedence. Passages with neither
        # belong together only if they were cut from one line.
        if record.document:
            mark = ('document', record.document)
        elif title:
            mark = ('title', title)
        else:
            mark = ('line', number)
        is_same_document = mark == self._previous_mark
        self._previous_mark = mark
        if is_same_document:
            return
        self._starts.append(row)
        if title:
            self._title_hashes.append(key_hash(title))
            self._title_rows.append(row)

    def save(self, folder: pathlib.Path) -> None:
        """Writes documents.npy and titles.npy."""
        np.save(folder / 'documents.npy', self._starts.array())
        write_table(folder / 'titles.npy', self._title_hashes.array(), self._title_rows.array())


class _Column:
    """A growing array of numbers of one dtype: full blocks as arrays, and the last numbers in a list."""

    def __init__(self, dtype: type[np.generic]):
        self._blocks: list[np.ndarray] = []
        self._tail: list[int] = []
        self._dtype = dtype

    def append(self, value: int) -> None:
        """Adds a number at the end."""
        self._tail.append(value)
        # An array takes 8 bytes per number, a list of Python integers about 40.
        if len(self._tail) == 1 << 16:
            self._blocks.append(np.array(self._tail, self._dtype))
            self._tail = []

    def array(self) -> Shaped[np.ndarray, ' values']:
        """Returns all numbers in the order they were appended."""
        return np.concatenate([*self._blocks, np.array(self._tail, self._dtype)])


def _checked_row(row: int | np.integer, total: int) -> int:
    """Returns the row as a Python integer; RetrievalError if it is outside 0 … total − 1."""
    if not 0 <= row < total:
        raise RetrievalError(f'corpus: no row {row}; rows lie between 0 and {total - 1}')
    return int(row)


def _load_starts(path: pathlib.Path, total: int) -> UInt64[np.ndarray, ' documents'] | None:
    """Returns the mapped file of document starts; None if there is no such file."""
    if not path.exists():
        return None
    try:
        starts = np.load(path, mmap_mode='r')
    except (OSError, ValueError) as error:
        raise RetrievalError(f'{path}: cannot be read ({error}); build the index again') from error
    valid_type = starts.ndim == 1 and len(starts) >= 1 and starts.dtype == np.uint64
    if not valid_type or starts[0] != 0 or starts[-1] >= total:
        raise RetrievalError(f'{path}: does not fit offsets.npy; build the index again')
    return starts


def _load_table(path: pathlib.Path) -> KeyTable | None:
    """Returns an opened lookup table; None if there is no such file."""
    if not path.exists():
        return None
    return KeyTable(path)


def _refuse_repeated_ids(
    source: pathlib.Path, corpus: Corpus, hashes: UInt64[np.ndarray, ' passages']
) -> None:
    """Raises RetrievalError if two passages have the same id, recognised by its hash; the error names `source`."""
    # Equal hashes become neighbours; the stable sort keeps their rows ascending.
    order = np.argsort(hashes, kind='stable')
    repeated = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    if not repeated.size:
        return
    first = order[repeated[0]]
    second = order[repeated[0] + 1]
    repeated_id = corpus.record(int(first)).id
    raise RetrievalError(
        f'{source}: passages {first} and {second} (counted from 0) have the same id {short(repeated_id)}, and '
        f'{repeated.size - 1} more ids repeat; give every passage its own id'
    )


# ---- lookup tables ---------------------------------------------------------------------------------
#
# Lookup of passages by a text key (an id or a title) through a sorted table of hashes on disk.
#
# A table is one file: uint64 [2, K], where row 0 holds the hashes of the keys in ascending order and row 1 the passage
# number of each key. It is memory-mapped and searched by bisection, so a lookup reads a few pages of the file however
# many passages there are.


def key_hash(key: str) -> int:
    """Returns the first 8 bytes of BLAKE2b of a key, as an unsigned integer."""
    # A policy can produce a lone surrogate, which plain UTF-8 refuses to encode.
    encoded = key.encode('utf-8', 'surrogatepass')
    digest = hashlib.blake2b(encoded, digest_size=8).digest()
    return int.from_bytes(digest, 'little')


def write_table(
    path: pathlib.Path, hashes: UInt64[np.ndarray, ' keys'], rows: UInt64[np.ndarray, ' keys']
) -> None:
    """Writes the table of `hashes` and the passage number that belongs to each."""
    # The stable sort keeps the rows of equal hashes ascending, so that the first passage is found first.
    order = np.argsort(hashes, kind='stable')
    np.save(path, np.stack([hashes[order], rows[order]]))


class KeyTable:
    """A table written by `write_table`, opened for lookups."""

    def __init__(self, path: pathlib.Path):
        """Opens the file.

        Raises:
          RetrievalError: the file cannot be read or has another shape or dtype.
        """
        try:
            # Not read into memory: the table of 21 million ids takes 0.3 GB.
            table = np.load(path, mmap_mode='r')
        except (OSError, ValueError) as error:
            raise RetrievalError(
                f'{path}: cannot be read ({error}); build the index again'
            ) from error
        if table.ndim != 2 or len(table) != 2 or table.dtype != np.uint64:
            raise RetrievalError(
                f'{path}: {table.dtype} {table.shape} is not a table of hashes; build the index again'
            )
        self._hashes = table[0]
        self._rows = table[1]

    def candidates(self, key: str) -> list[int]:
        """Returns the ascending numbers of the passages whose key has the hash of `key`.

        Different keys can share a hash: the caller compares the real key of each candidate.
        """
        # A Python integer would make NumPy convert the whole table to float64.
        wanted_hash = np.uint64(key_hash(key))
        first = np.searchsorted(self._hashes, wanted_hash, side='left')
        last = np.searchsorted(self._hashes, wanted_hash, side='right')
        return [int(row) for row in self._rows[first:last]]


# ---- documents -------------------------------------------------------------------------------------
#
# Whole documents: the passages of one document joined and cut into pages of a fixed number of words.
#
# A corpus holds passages. A source that cuts long texts (an encyclopedia article, a file) into passages puts those of
# one document in consecutive rows; `Corpus.document_rows` returns them and `Corpus.find_document` looks them up.


# Words of a page where the caller does not choose: five passages of Wikipedia-18.
WORDS_PER_PAGE = 500

_WORD = re.compile(r'\S+')


@runtime_checkable
class DocumentCorpus(Protocol):
    """A corpus that knows which passages make up a document (`MemoryCorpus`, `Corpus`)."""

    def record(self, number: int) -> Record:
        """Returns a passage in wire form."""
        ...

    def passage(self, number: int) -> Passage:
        """Returns a passage as {'id', 'title', 'text'}."""
        ...

    def find_document(self, reference: str) -> range | None:
        """Returns the rows of the document with this passage id or title, None if there is none."""
        ...


@dataclasses.dataclass(frozen=True)
class DocumentPage:
    """One page of a document.

    Attributes:
      title: title of the document's first passage.
      text: words of this page, with the white space between them as in the source.
      page: number of this page, from 1.
      pages: number of pages of the document, at least 1.
      id: id of the document's first passage; opening it gives the same document.
    """

    title: str
    text: str
    page: int
    pages: int
    id: str


def document_page(
    corpus: DocumentCorpus, reference: str, page: int = 1, words_per_page: int = WORDS_PER_PAGE
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
      RetrievalError: `page` or `words_per_page` below 1, or a title where the index cannot look titles up.
    """
    if page < 1 or words_per_page < 1:
        raise RetrievalError(
            f'open: page {page} with {words_per_page} words per page; both must be at least 1'
        )
    # The lookup gives row numbers; the texts of these rows are read below.
    rows = corpus.find_document(reference)
    if rows is None:
        return None
    text = ' '.join(corpus.passage(row)['text'] for row in rows)
    # Matches instead of `split`: with their positions the text is cut without changing the white space between words.
    words = list(_WORD.finditer(text))
    # A document without any words still has one (empty) page.
    pages = max(1, -(-len(words) // words_per_page))
    if page > pages:
        return None
    page_words = words[(page - 1) * words_per_page : page * words_per_page]
    page_text = ''
    if page_words:
        page_text = text[page_words[0].start() : page_words[-1].end()]
    # All pages have the id and title of the first passage, whichever passage was named.
    first_row = rows[0]
    title = corpus.passage(first_row)['title']
    return DocumentPage(title, page_text, page, pages, corpus.record(first_row).id)


def title_run(title_of: Callable[[int], str], row: int, total: int, window: int) -> range:
    """Returns the run of consecutive rows around `row` with the same title; only `row` itself if the title is empty.

    Args:
      title_of: function from a row number to the title of that passage.
      row: row number of a passage.
      total: number of passages in the corpus.
      window: largest number of rows looked at on each side of `row`.
    """
    title = title_of(row)
    first = row
    end = row + 1
    # Passages without a title do not belong together.
    if not title:
        return range(first, end)
    # The window bounds the number of passages read if a corpus has one title throughout.
    lowest_row = max(0, row - window)
    while first > lowest_row and title_of(first - 1) == title:
        first -= 1
    highest_end = min(total, row + 1 + window)
    while end < highest_end and title_of(end) == title:
        end += 1
    return range(first, end)


def row_number(reference: str) -> int | None:
    """Returns the row number that a reference like '17' denotes; None for any other text, '017' included."""
    # The length is checked first: converting a hostile text of a million digits takes seconds.
    if len(reference) > 20 or not reference.isascii() or not reference.isdigit():
        return None
    number = int(reference)
    # Leading zeros: '017' can be an id or a title, but never a row number as text.
    if str(number) != reference:
        return None
    return number
