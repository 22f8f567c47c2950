"""Corpus files: every form read alike, bad lines named with their number, passages read back by number."""

import gzip
import json
import logging

import pytest
import zstandard
from refusals import refused

from zeroplay_jax.retrieval import corpus, rows

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
        assert (about.passages, about.skipped, len(stored)) == (4, 0, 4)
        for row, (title, text) in enumerate(PASSAGES):
            assert stored.passage(row) == {'id': row, 'title': title, 'text': text}
        assert stored.record(1) == corpus.Record('p1', '"Ünï "x""\n漢字 …')
    assert reports[0].sha256 == reports[1].sha256


def test_wikipedia_tsv(tmp_path):
    rows = b'id\ttext\ttitle\n1\t"Aaron is ""a prophet""."\tAaron\n2\tplain\tB\n'
    about, stored = written(tmp_path / 'psgs_w100.tsv.gz', gzip.compress(rows), tmp_path)
    assert about.passages == 2
    assert stored.record(0) == corpus.Record('1', '"Aaron"\nAaron is "a prophet".')


def test_whole_numbers_are_ids_and_a_last_line_needs_no_end(tmp_path):
    _, found = written(tmp_path / 'c.jsonl', b'{"id": 7, "contents": "text"}', tmp_path)
    assert found.record(0) == corpus.Record('7', 'text') and found.passage(0)['title'] == ''


BAD = [
    (b'{"id": "0", "contents": ', 'not JSON'),
    (b'["id"]', 'a JSON list; write one object per line .jq'),
    (b'"id"', 'a JSON text, not an object'),
    (
        b'{"id": "0"}',
        'no text: none of contents, text, .* among its fields "id"; name it with --fields text=NAME',
    ),
    (b'{"contents": "x"}', 'no id: none of id, _id, '),
    (b'{"id": 1.5, "contents": "x"}', '"id" is a JSON number; give a text or a whole number'),
    (b'{"id": true, "contents": "x"}', '"id" is a JSON truth value'),
    (b'{"id": "0", "contents": ["x"]}', '"contents" is a JSON list; give a text'),
    (b'{"id": "0", "title": ["x"], "text": "y"}', '"title" is a JSON list; give a text'),
    (b'{"id": "0", "title": "x", "text": null}', '"text" is null'),
    (b'{"id": "0", "id": "1", "contents": "x"}', "the key 'id' occurs twice"),
    (b'{"id": "0", "contents": "x", "score": NaN}', 'NaN is no number'),
    (b'{"id": "0", "contents": "x", "score": 1e999}', '1e999 is no number'),
    (b'{"id": ' + b'9' * 400 + b', "contents": "x"}', 'a number with too many digits'),
    (b'{"id": ' + b'9' * 5000 + b', "contents": "x"}', 'a number with too many digits'),
    (b'{"id": "0", "contents": "x"}\r{"id": "1", "contents": "y"}', 'carriage returns alone'),
    (b'{', 'write one object per line'),
    (b'{"id": "", "contents": "x"}', 'the id'),
    (b'{"id": "a\\nb", "contents": "x"}', 'the id'),
    (b'{"id": "0", "contents": " \\n"}', 'neither title nor text'),
    (b'{"id": "0", "contents": "\\"\\"\\n"}', 'neither title nor text'),
    (b'{"id": "0", "contents": "\\ud800"}', 'without its other half'),
    (b'{"id": "0", "contents": "\xff"}', 'not UTF-8 at byte 25, probably Latin-1'),
    (b'[' * 100_000, 'nested too deeply'),
    (b'{"id": "0", "contents": "x", "y": ' + b'[' * 300 + b']' * 300 + b'}', 'nested too deeply'),
]


@pytest.mark.parametrize(('line', 'reason'), BAD)
def test_a_bad_line_is_named_or_skipped(tmp_path, caplog, line, reason):
    data = lines(PASSAGES[:2]) + line + b'\n' + b'{"id": "last", "contents": "z"}\n'
    with refused(f'c.jsonl:3: .*{reason}.*--skip-bad-lines'):
        written(tmp_path / 'c.jsonl', data, tmp_path)
    with caplog.at_level(logging.WARNING):
        about, found = written(tmp_path / 'c.jsonl', data, tmp_path, strict=False)
    assert (about.passages, about.skipped, found.record(2).id) == (3, 1, 'last')
    assert 'c.jsonl:3' in caplog.text and 'bad lines skipped: 1, passages kept: 3' in caplog.text


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, 'LONGEST_LINE', 1 << 12)
    data = b'{"id": "0", "contents": "' + b'x' * 10_000 + b'"}\n{"id": "1", "contents": "y"}\n'
    about, found = written(tmp_path / 'c.jsonl', data, tmp_path, strict=False)
    assert (about.passages, about.skipped, found.record(0).id) == (1, 1, '1')


@pytest.mark.parametrize(
    ('name', 'data', 'reason'),
    [
        ('c.jsonl', b'', 'no passage in it'),
        ('c.jsonl.gz', b'x', 'cannot be read'),
        ('c.jsonl.gz', gzip.compress(lines())[:-20], 'cannot be read'),
        ('c.jsonl.zst', b'x' * 20, 'cannot be read'),
        ('c.tsv', b'0\tA passage.\n1\tAnother.\n', 'c.tsv:2: no id: .* fields "0", "A passage'),
        ('c.tsv', b'id\ttext\ttitle\n1\ttwo\n', 'c.tsv:2: 2 columns'),
        ('c.jsonl', lines(PASSAGES[:3]) + lines(PASSAGES[3:]), "passages 0 and 3 .* same id 'p0'"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, data, reason):
    with refused(reason):
        written(tmp_path / name, data, tmp_path)


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


def test_a_folder_of_texts(tmp_path, caplog):
    texts, out = tmp_path / 'texts', tmp_path / 'out'
    texts.mkdir()
    out.mkdir()
    (texts / 'b.md').write_text('# Gumu\n\nA town.\nBy a river.\n', encoding='utf-8')
    (texts / 'picture.png').write_bytes(b'\xff')
    assert corpus.write(texts, out).passages == 1
    record = corpus.Corpus(out).record(0)
    assert record.id == 'b.md#0'
    assert corpus.split(record.contents) == ('Gumu', 'A town. By a river.')

    (texts / 'bad.txt').write_bytes(b'caf\xe9')
    (texts / 'empty.txt').write_text('  \n')
    with refused('bad.txt: cannot be read as a text .*Latin-1.*; correct the file or'):
        corpus.write(texts, out)
    with caplog.at_level(logging.WARNING):
        assert corpus.write(texts, out, strict=False).skipped == 2
    assert 'empty.txt: a passage with neither title nor text' in caplog.text
    with refused('no .txt or .md file in it'):
        corpus.write(out, out)
