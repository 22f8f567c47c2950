"""Makes a corpus of English passages from a folder of texts or a corpus file; counts the unusable texts by reason."""

from __future__ import annotations

import array
import collections
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Iterator

import numpy as np

from . import progress
from .command import similar_path
from .json_text import Unusable
from .rows import COMPRESSED
from .sources import (
    BadLines,
    FileTitles,
    conversion,
    files_of,
    holds_texts,
    read,
    text_name,
    visible_files,
    without_front_matter,
)
from .texts import problem_of, read_text, split_record, split_text
from .types import Record, RetrievalError, contents, short, split

# Files that are named in the description of those left out.
_NAMED_FILES = 5
# Suffixes that are named one by one in an error; a folder can hold hundreds.
_NAMED_SUFFIXES = 4


@dataclasses.dataclass
class Inventory:
    """Counts the units of a source: the files of a folder of texts, or the passages of a corpus file before any cut.

    Attributes:
      unit: 'files' or 'passages'.
      usable: number of units that are English prose.
      problems: reason → number of units that are not. Files of other formats and bad lines of a corpus file are among
        them. Passages of a corpus file are counted here even where they are kept (see `write_clean`).
      passages: number of passages that were written.
      first_names: of a folder, the names of the first unusable files, in the order of all names.
    """

    unit: str
    usable: int = 0
    problems: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    passages: int = 0
    first_names: list[str] = dataclasses.field(default_factory=list)

    def add(self, problem: str | None, name: str = '') -> None:
        """Counts one unit; `problem` is None for a usable one, `name` that of a file."""
        if problem is None:
            self.usable += 1
            return
        self.problems[problem] += 1
        self.add_name(name)

    def add_name(self, name: str) -> None:
        """Takes the name of an unusable file among the first ones, if it belongs to them."""
        if name:
            self.first_names = sorted([*self.first_names, _printable(name)])[:_NAMED_FILES]

    def names(self) -> str:
        """Returns the names of the first unusable files in words; '' without any."""
        if not self.first_names:
            return ''
        names = ', '.join(self.first_names)
        more = self.unusable - len(self.first_names)
        return f'{names} and {more} more' if more else names

    def left_out(self) -> str:
        """Returns what becomes of the unusable units, in a line; '' without any."""
        if not self.unusable:
            return ''
        # In a file of passages, all but empty ones are indexed (see `write_clean`).
        consequence = 'left out' if self.unit == 'files' else 'not asked about'
        total = self.usable + self.unusable
        line = f'{self.unusable} of {total} {self.unit} are {consequence}: {self}'
        names = self.names()
        return f'{line}; they are {names}' if names else line

    @property
    def unusable(self) -> int:
        """Number of units with a problem."""
        return self.problems.total()

    def __str__(self) -> str:
        # The most frequent problem comes first, ties by name, so that the same source gives the same line.
        ordered = sorted(self.problems.items(), key=_by_count)
        return ', '.join(f'{count} {problem}' for problem, count in ordered)


def _by_count(item: tuple[str, int]) -> tuple[int, str]:
    """Sort key of (name, count): the largest count first, equal ones by name."""
    name, count = item
    return -count, name


def _printable(name: str) -> str:
    """Returns a name with characters that could control a terminal replaced: names of files may hold any bytes."""
    return ''.join(character if character.isprintable() else '\ufffd' for character in name)


def write_clean(source: pathlib.Path, out: pathlib.Path, passage_words: int) -> Inventory:
    """Writes the usable passages of a source as JSON lines, completely or not at all; returns the counts.

    A file in a folder of texts is left out if it is not English prose. Of a corpus file only empty and binary passages
    are left out, because single passages can be lists of names, which look like another language.

    Args:
      source: see `sources.read`.
      out: JSON lines {'id', 'contents'}, with the 'document_name' of passages that have one; its folder must exist.
      passage_words: words of a passage at most, see `texts.split_text`.

    Raises:
      RetrievalError: the source does not exist, has no English prose (the error lists the problems), or repeats an id.
    """
    if not source.exists():
        raise RetrievalError(
            f'{source}: no such file or folder; give texts (.txt, .md) or passages{similar_path(source)}'
        )
    # The draft is renamed when it is complete, so that an interrupted command leaves no partial corpus.
    draft = out.with_name(f'.{os.getpid()}.{out.name}')
    # Hashes take 8 bytes per passage; a set of the ids of a large corpus would not fit into memory.
    id_hashes = array.array('Q')
    try:
        with draft.open('w', encoding='utf-8') as file:
            if holds_texts(source):
                inventory = Inventory('files')
                passages = _text_passages(source, passage_words, inventory)
            else:
                inventory = Inventory('passages')
                passages = _file_passages(source, passage_words, inventory)
            for record in passages:
                line = {'id': record.id, 'contents': record.contents}
                # Files of the same title stay separate documents.
                if record.document:
                    line['document_name'] = record.document
                file.write(json.dumps(line, ensure_ascii=False) + '\n')
                inventory.passages += 1
                id_hashes.append(_key_hash(record.id))
        if not inventory.usable:
            raise RetrievalError(_refusal(source, inventory))
        _refuse_repeated_ids(source, draft, id_hashes)
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
    return inventory


def _key_hash(record_id: str) -> int:
    digest = hashlib.blake2b(record_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'little')


def _refusal(source: pathlib.Path, inventory: Inventory) -> str:
    """Returns the error line for a source without English prose."""
    total = inventory.unusable
    description = f'none of its {total} {inventory.unit} can be used ({inventory})'
    if not total:
        description = f'there are no {inventory.unit} in it'
    return (
        f'{source}: {description}; give English prose in .txt or .md files, or as JSON lines of passages'
        f'{conversion(inventory.problems)}'
    )


def _refuse_repeated_ids(source: pathlib.Path, draft: pathlib.Path, id_hashes: array.array) -> None:
    """Raises RetrievalError if two of the passages in `draft` have the same id; the error names `source`.

    Args:
      source: where the passages come from.
      draft: the JSON lines that were written from it.
      id_hashes: `_key_hash` of the id of each passage in `draft`, unsigned 64-bit integers.
    """
    hashes, counts = np.unique(np.array(id_hashes, np.uint64), return_counts=True)
    if counts.max() == 1:
        return
    repeated_hash = int(hashes[counts.argmax()])
    for _, record in read(draft):
        if _key_hash(record.id) == repeated_hash:
            raise RetrievalError(
                f'{source}: {counts.max()} passages have the id {short(record.id)}; give every passage its own id'
            )


def _text_passages(
    source: pathlib.Path, passage_words: int, inventory: Inventory
) -> Iterator[Record]:
    """Yields the passages of the English texts of a folder, or of one text, and counts its files in `inventory`."""
    texts = files_of(source)
    if source.is_dir():
        _count_other_files(source, set(texts), inventory)
    titles = FileTitles(source)
    with progress.Bar(len(texts), 'files', 'read texts') as bar:
        for path in texts:
            name = text_name(source, path)
            whole_text, problem = _read_text(path)
            inventory.add(problem, name)
            bar.update()
            if problem is not None:
                continue
            title, text = titles.split(whole_text, name)
            for number, passage in enumerate(split_text(text, passage_words)):
                yield Record(f'{name}#{number}', contents(title, passage), document=name)
    titles.warn()


def _read_text(path: pathlib.Path) -> tuple[str, str | None]:
    """Returns (content, problem) of a text file.

    The problem is None for English prose. The content is '' if the file cannot be read or decoded.
    """
    try:
        text = read_text(path)
    except OSError:
        return '', 'unreadable'
    except Unusable as error:
        return '', error.kind
    # Front matter alone is no text.
    return text, problem_of(without_front_matter(text))


def warn_of_other_files(source: pathlib.Path) -> None:
    """Warns of the files of a folder that are not read, if others are."""
    if not source.is_dir():
        return
    texts = files_of(source)
    inventory = Inventory('files', usable=len(texts))
    _count_other_files(source, set(texts), inventory)
    line = inventory.left_out()
    if texts and line:
        logging.warning('%s: %s', source, line)


def _count_other_files(
    source: pathlib.Path, texts: set[pathlib.Path], inventory: Inventory
) -> None:
    """Counts the files of a folder that are not texts as problems of `inventory`.

    The reason is the suffix, or 'of other formats' for all but the most frequent suffixes.
    """
    suffixes: collections.Counter[str] = collections.Counter()
    for path in visible_files(source):
        if path not in texts:
            suffixes[_printable(path.suffix.lower()) or 'without suffix'] += 1
            inventory.add_name(text_name(source, path))
    # The most frequent ones are named; equally frequent ones in the order of their names.
    ordered = sorted(suffixes.items(), key=_by_count)
    for number, (suffix, count) in enumerate(ordered):
        name = suffix if number < _NAMED_SUFFIXES else 'of other formats'
        if suffix in COMPRESSED:
            name = f'{suffix} (unpack them)'
        inventory.problems[name] += count


def _file_passages(
    source: pathlib.Path, passage_words: int, inventory: Inventory
) -> Iterator[Record]:
    """Yields the passages of a corpus file, long ones cut, and counts the passages before the cut in `inventory`."""
    bad_lines = BadLines(source, strict=False, logged=0)
    with progress.Bar(None, 'passages', 'read passages') as bar:
        for _, record in read(source, bad_lines):
            title, text = split(record.contents)
            problem = problem_of(text)
            inventory.add(problem)
            bar.update()
            # Passages that are short or look like another language are kept, because a search can still find them.
            if problem not in ('empty', 'binary'):
                yield from split_record(record, passage_words)
    if bad_lines.count:
        inventory.problems[f'unreadable (the first: {bad_lines.first})'] += bad_lines.count
