"""Corpus files: every form read alike, bad lines named with their number, passages read back by number."""

import gzip
import json
import logging
import pathlib

import zstandard
from refusals import refused
from refused_calls import check_table

from zeroplay_jax.retrieval import corpus, rows
from zeroplay_jax.retrieval.types import RetrievalError

TABLE = pathlib.Path(__file__).parent / 'bad_corpora.txt'
PASSAGES = [
    ('Gumu', 'A town.\nBy a river.'),
    ('Ünï "x"', '漢字 …'),
    ('', 'no title'),
    ('Only a title', ''),
]


def lines(passages=PASSAGES):
    text = ''
    for number, passage in enumerate(passages):
        fields = {'id': f'p{number}', 'contents': corpus.contents(*passage), 'more': 1}
        text += json.dumps(fields, ensure_ascii=False) + '\n'
    return text.encode()


def written(path, data, tmp_path, strict=True):
    path.write_bytes(data)
    folder = tmp_path / 'out'
    folder.mkdir(exist_ok=True)
    return corpus.write(path, folder, strict), corpus.Corpus(folder)


def test_json_lines_plain_and_packed(tmp_path):
    # Several frames, as parallel compressors write them.
    packed = zstandard.compress(lines()[:50]) + zstandard.compress(lines()[50:])
    reports = []
    for name, data in (('c.jsonl', lines()), ('c.jsonl.zst', packed)):
        about, stored = written(tmp_path / name, data, tmp_path)
        reports.append(about)
        assert (about['passages'], about['skipped'], len(stored)) == (4, 0, 4)
        for row, (title, text) in enumerate(PASSAGES):
            assert stored.passage(row) == {'id': row, 'title': title, 'text': text}
        assert stored.record(1) == corpus.Record('p1', '"Ünï "x""\n漢字 …')
    assert reports[0]['sha256'] == reports[1]['sha256']


def test_wikipedia_tsv(tmp_path):
    rows = b'id\ttext\ttitle\n1\t"Aaron is ""a prophet""."\tAaron\n2\tplain\tB\n'
    about, stored = written(tmp_path / 'psgs_w100.tsv.gz', gzip.compress(rows), tmp_path)
    assert about['passages'] == 2
    assert stored.record(0) == corpus.Record('1', '"Aaron"\nAaron is "a prophet".')


def test_whole_numbers_are_ids_and_a_last_line_needs_no_end(tmp_path):
    _, found = written(tmp_path / 'c.jsonl', b'{"id": 7, "contents": "text"}', tmp_path)
    assert found.record(0) == corpus.Record('7', 'text') and found.passage(0)['title'] == ''


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

    def texts(strict=True, **contents):
        """(id, contents) of the passages of a folder with these .txt files and a picture."""
        folder = tmp_path / f'texts{len(list(tmp_path.iterdir()))}'
        folder.mkdir()
        (folder / 'picture.png').write_bytes(b'\xff')
        for name, content in contents.items():
            (folder / f'{name}.txt').write_bytes(content)
        records = corpus.read(folder, corpus.BadLines(folder, strict))
        return [(record.id, record.contents) for _, record in records]

    def flushed():
        """A zstd frame without its end, as a compressor leaves it that was stopped."""
        packer = zstandard.ZstdCompressor().compressobj()
        return packer.compress(lines()) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)

    names = {
        'flushed': flushed,
        'line': line,
        'file': file,
        'texts': texts,
        'lines': lines,
        'gzip': gzip,
        'zstandard': zstandard,
    }
    with caplog.at_level(logging.WARNING):
        check_table(TABLE, names | {'PASSAGES': PASSAGES}, tmp_path, RetrievalError)


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, 'LONGEST_LINE', 1 << 12)
    data = b'{"id": "0", "contents": "' + b'x' * 10_000 + b'"}\n{"id": "1", "contents": "y"}\n'
    about, found = written(tmp_path / 'c.jsonl', data, tmp_path, strict=False)
    assert (about['passages'], about['skipped'], found.record(0).id) == (1, 1, '1')


def test_a_list_that_is_damaged_or_too_long_is_refused_for_that(tmp_path, monkeypatch):
    damaged = b'[{"id": "0", "text": "x"},\n{"id": "1" "text": "y"}]'
    with refused("not JSON: Expecting ',' delimiter: line 2, column 12; write one object per line"):
        written(tmp_path / 'c.jsonl', damaged, tmp_path)
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


def test_memory_corpus_speaks_the_same():
    memory = corpus.MemoryCorpus(['Gumu'], ['A town.'])
    assert memory.record(0) == corpus.Record('0', '"Gumu"\nA town.')
    assert memory.passage(0) == {'id': 0, 'title': 'Gumu', 'text': 'A town.'}
    with refused('1 titles and 2 texts'):
        corpus.MemoryCorpus(['a'], ['b', 'c'])
