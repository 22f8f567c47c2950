"""Makes a corpus of English passages from a folder of texts or a corpus file; counts the unusable texts by reason."""

from __future__ import annotations

import array
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator

import numpy as np

from zeroplay_jax.extras.inputs.sentences import problem_of, split_text
from zeroplay_jax.extras.inputs.texts import (
    FileTitles,
    Inventory,
    count_other_files,
    files_of,
    read_text,
    split_record,
    text_name,
)
from zeroplay_jax.extras.inputs.titles import without_front_matter
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.command import similar_path
from zeroplay_jax.retrieval.corpus import BadLines, holds_texts, read
from zeroplay_jax.retrieval.json_text import Unusable
from zeroplay_jax.retrieval.types import Record, RetrievalError, contents, short, split


def write_clean(source: pathlib.Path, out: pathlib.Path, passage_words: int) -> Inventory:
    """Writes the usable passages of a source as JSON lines, completely or not at all; returns the counts.

    A file in a folder of texts is left out if it is not English prose. Of a corpus file only empty and binary passages
    are left out, because single passages can be lists of names, which look like another language.

    Args:
      source: see `corpus.read`.
      out: JSON lines {'id', 'contents'}, with the 'document_name' of passages that have one; its folder must exist.
      passage_words: words of a passage at most, see `sentences.split_text`.

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
    return f'{source}: {description}; give English prose in .txt or .md files, or as JSON lines of passages'


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
        count_other_files(source, set(texts), inventory)
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
        return '', re.split(' at byte|;', str(error))[0]
    # Front matter alone is no text.
    return text, problem_of(without_front_matter(text))


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
