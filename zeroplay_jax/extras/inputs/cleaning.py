"""Makes a corpus of English passages from a folder of texts or a corpus file; counts the unusable texts by reason."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from zeroplay_jax.data import files
from zeroplay_jax.extras.inputs.sentences import problem_of
from zeroplay_jax.extras.inputs.texts import Inventory, passages_of, split_record
from zeroplay_jax.retrieval import progress
from zeroplay_jax.retrieval.corpus import BadLines, holds_texts, read
from zeroplay_jax.retrieval.types import Record, RetrievalError, split
from zeroplay_jax.types import Json


def write_clean(source: pathlib.Path, out: pathlib.Path, passage_words: int) -> Inventory:
    """Writes the usable passages of a source as JSON lines, completely or not at all; returns the counts.

    A file in a folder of texts is left out if it is not English prose. Of a corpus file only empty and binary passages
    are left out, because single passages can be lists of names, which look like another language.

    Args:
      source: see `corpus.read`.
      out: JSON lines {'id', 'contents'}, with the 'document_name' of passages that have one.
      passage_words: words of a passage at most, see `sentences.split_text`.

    Raises:
      RetrievalError: the source does not exist or has no English prose (the error lists the problems).
    """
    inventory = Inventory('files' if holds_texts(source) else 'passages')
    files.write_lines(out, _lines(source, passage_words, inventory))
    return inventory


def _lines(source: pathlib.Path, passage_words: int, inventory: Inventory) -> Iterator[Json]:
    """Yields the lines of `write_clean` and counts them; raises RetrievalError at the end if there are none."""
    passages = _passages_of_file(source, passage_words, inventory)
    if holds_texts(source):
        texts = passages_of(source, inventory, passage_words, problem_of)
        passages = (record for _, record in texts)
    with progress.Bar(None, 'passages', 'read texts') as bar:
        for record in passages:
            # Files of the same title stay separate documents.
            document = {'document_name': record.document} if record.document else {}
            yield {'id': record.id, 'contents': record.contents} | document
            inventory.passages += 1
            bar.update()
    if not inventory.usable:
        total = inventory.unusable
        description = f'none of its {total} {inventory.unit} can be used ({inventory})'
        if not total:
            description = f'there are no {inventory.unit} in it'
        fix = '; convert PDF with pdftotext' if '.pdf' in inventory.problems else ''
        raise RetrievalError(
            f'{source}: {description}; give English prose (.txt, .md, .html, .rst), or JSON lines of passages{fix}'
        )


def _passages_of_file(
    source: pathlib.Path, passage_words: int, inventory: Inventory
) -> Iterator[Record]:
    """Yields the passages of a corpus file, long ones cut, and counts the passages before the cut in `inventory`."""
    bad_lines = BadLines(source, strict=False, logged=0)
    for number, record in read(source, bad_lines):
        problem = problem_of(split(record.contents)[1])
        if problem is None:
            inventory.usable += 1
        else:
            inventory.add(number, problem)
        # Passages that are short or look like another language are kept, because a search can still find them.
        if problem not in ('empty', 'binary'):
            yield from split_record(record, passage_words)
    if bad_lines.count:
        inventory.problems[f'unreadable (the first: {bad_lines.first})'] += bad_lines.count
