"""Corpus files: every form read alike, bad lines named with their number, passages read back by number."""

import bz2
import gzip
import itertools
import json
import logging
import lzma
import pathlib

import pytest
import zstandard
from refusals import refused
from refused_calls import check_table

from zeroplay_jax.retrieval import corpus, rows
from zeroplay_jax.retrieval.command import passage_fields
from zeroplay_jax.retrieval.types import RetrievalError

FOLDER = pathlib.Path(__file__).parent
PASSAGES = [
    ('Gumu', 'A town.\nBy a river.'),
    ('Ünï "x"', '漢字 …'),
    ('', 'no title'),
    ('Only a title', ''),
]


def json_line(fields):
    return json.dumps(fields, ensure_ascii=False).encode() + b'\n'


def lines(passages=PASSAGES):
    text = b''
    for number, passage in enumerate(passages):
        text += json_line({'id': f'p{number}', 'contents': corpus.contents(*passage), 'more': 1})
    return text


def written(path, data, tmp_path, strict=True):
    path.write_bytes(data)
    folder = tmp_path / 'out'
    folder.mkdir(exist_ok=True)
    return corpus.write(path, folder, strict), corpus.Corpus(folder)


PACK = {
    '': bytes,
    '.gz': gzip.compress,
    # Several frames, as parallel compressors write them.
    '.zst': lambda data: zstandard.compress(data[:50]) + zstandard.compress(data[50:]),
    '.bz2': bz2.compress,
    '.xz': lzma.compress,
    '.GZ': gzip.compress,
}


def test_marks_line_ends_and_compression_lose_no_passage(tmp_path):
    hashes = set()
    for suffix, mark in itertools.product(PACK, (b'', b'\xef\xbb\xbf')):
        for end in (b'\n', b'\r\n', b'\n\n'):
            data = PACK[suffix](mark + lines().replace(b'\n', end))
            about, stored = written(tmp_path / f'c.jsonl{suffix}', data, tmp_path)
            hashes.add(about['sha256'])
            assert (about['passages'], about['skipped'], len(stored)) == (4, 0, 4)
            for row, (title, text) in enumerate(PASSAGES):
                assert stored.passage(row) == {'id': row, 'title': title, 'text': text}
            assert stored.record(1) == corpus.Record('p1', '"Ünï "x""\n漢字 …')
    assert len(hashes) == 1


def test_bad_lines_and_files_have_the_reasons_of_the_table(tmp_path, caplog):
    def line(content):
        """The reason why the third line of a file is bad."""
        data = lines(PASSAGES[:2]) + content + b'\n' + b'{"id": "last", "contents": "z"}\n'
        caplog.clear()
        about, found = written(tmp_path / 'c.jsonl', data, tmp_path, strict=False)
        assert (about['passages'], about['skipped'], found.record(2).id) == (3, 1, 'last')
        assert 'c.jsonl:3' in caplog.text
        assert 'bad lines skipped: 1, passages kept: 3' in caplog.text
        return file('c.jsonl', data)

    def file(name, data):
        return written(tmp_path / name, data, tmp_path)

    def flushed():
        """A zstd frame without its end, as a compressor leaves it that was stopped."""
        packer = zstandard.ZstdCompressor().compressobj()
        return packer.compress(lines()) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)

    with caplog.at_level(logging.WARNING):
        check_table(FOLDER / 'bad_corpora.txt', globals() | locals(), tmp_path, RetrievalError)


def test_corpora_of_others_are_read_as_the_table_says(tmp_path, capsys, caplog):
    def read(name, *parts, strict=True, fields=''):
        """(id, contents) of the passages of a file, or its folder, and what is said; rows are JSON lines."""
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b''.join(x if isinstance(x, bytes) else json_line(x) for x in parts))
        source = tmp_path / name.partition('/')[0]
        options = {'fields': passage_fields(fields) if fields else None}
        records = corpus.read(source, corpus.BadLines(source, strict), **options)
        found = [(record.id, record.contents) for _, record in records]
        return found + capsys.readouterr().err.splitlines()

    def said(*texts, **options):
        """The warnings of a corpus of these passages."""
        path = tmp_path / 'c.jsonl'
        path.write_bytes(b''.join(json_line({'id': n, 'contents': x}) for n, x in enumerate(texts)))
        caplog.clear()
        corpus.write(path, tmp_path, **options)
        return [record.message for record in caplog.records]

    names = globals() | locals()
    check_table(FOLDER / 'foreign_corpora.txt', names, tmp_path, RetrievalError)


def test_parquet(tmp_path):
    parquet = pytest.importorskip('pyarrow.parquet')
    pyarrow = pytest.importorskip('pyarrow')
    path = tmp_path / 'c.parquet'
    rows = [{'_id': name, 'title': 'Gumu', 'text': 'A town.'} for name in '78']
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    expected = [(n, corpus.Record(name, '"Gumu"\nA town.')) for n, name in ((1, '7'), (2, '8'))]
    assert list(corpus.read(path)) == expected
    path.write_bytes(path.read_bytes()[:-20])
    with refused('c.parquet: cannot be read'):
        list(corpus.read(path))


def test_what_has_no_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, 'LONGEST_LINE', 1 << 12)
    data = b'{"id": "0", "contents": "' + b'x' * 10_000 + b'"}\n{"id": "1", "contents": "y"}\n'
    about, found = written(tmp_path / 'c.jsonl', data, tmp_path, strict=False)
    assert (about['passages'], about['skipped'], found.record(0).id) == (1, 1, '1')
    monkeypatch.setattr(rows, 'LONGEST_LIST', 1 << 20)
    with refused('a list longer than 1 MiB'):
        written(tmp_path / 'c.jsonl', b'[' + b' ' * (1 << 20) + b']', tmp_path)


def test_a_torn_folder_is_named(tmp_path):
    written(tmp_path / 'c.jsonl', lines(), tmp_path)
    (tmp_path / 'out' / 'passages.sqlite').write_bytes(b'x' * 5000)
    with refused('no corpus can be read .*not a database'):
        corpus.Corpus(tmp_path / 'out')
    with refused('no corpus can be read'):
        corpus.Corpus(tmp_path)
