"""Corpora in the forms of others: what is read is what the file says, whatever its fields, encoding and line ends."""

import bz2
import gzip
import json
import lzma
import pathlib
import sys

import pytest
import zstandard
from refusals import faults, refused

from zeroplay_jax.retrieval import corpus
from zeroplay_jax.retrieval.command import passage_fields

WIRE = '"Gumu"\nA town.'
FORMS = json.loads((pathlib.Path(__file__).parent / 'forms.json').read_text())
CRLF = 'CRLF behind the title'


def only(path, **arguments):
    ((_, record),) = corpus.read(path, **arguments)
    return record


def json_line(fields):
    return json.dumps(fields, ensure_ascii=False).encode() + b'\n'


@pytest.mark.parametrize(
    'name', [*faults('F7', [name for name in FORMS if name != CRLF]), *faults('third-16', [CRLF])]
)
def test_a_passage_is_read_from_the_fields_of_public_corpora(tmp_path, name):
    path = tmp_path / 'c.jsonl'
    path.write_bytes(json_line(FORMS[name]))
    record = only(path)
    title, text = corpus.split(record.contents)
    assert (record.id, title, text.removeprefix(title)) == ('7', 'Gumu', 'A town.')


def test_a_passage_without_a_title_keeps_its_first_line(tmp_path):
    path = tmp_path / 'c.jsonl'
    for text in ('A town.', '"Gumu"\nA town.', ''):
        path.write_bytes(json_line({'docid': 'd', 'passage': text, 'title': None}))
        if text:
            assert corpus.split(only(path).contents) == ('', text)
    with refused('neither title nor text'):
        only(path)


@pytest.mark.parametrize(
    'row',
    [
        {'contents': '"A  B" \nbody'},
        {'contents': '\nBody'},
        {'contents': 'Evan Morris\nA lobbyist.'},
        {'contents': 'Title line\nBody', 'text': 'Title line'},
        {'contents': '"NULL"\nNone'},
    ],
)
def test_contents_are_read_as_they_are(tmp_path, row):
    path = tmp_path / 'c.jsonl'
    path.write_bytes(json_line({'id': 1} | row))
    assert only(path).contents == row['contents']


@pytest.mark.parametrize('titled', [1, 2])
def test_first_lines_that_could_be_titles_are_said_where_most_passages_have_one(
    tmp_path, titled, caplog
):
    # Neither an empty title nor a first line that is a sentence could be one.
    others = ['"Gumu"\nA town.', '""\nLomi\nA river.', 'A town.\nBy a river.']
    passages = ['Evan Morris\nA lobbyist.'] * 3 + others[: titled + 1]
    lines = [json_line({'id': n, 'contents': text}) for n, text in enumerate(passages)]
    path = tmp_path / 'c.jsonl'
    path.write_bytes(b''.join(lines))
    corpus.write(path, tmp_path)
    messages = [record.message for record in caplog.records]
    assert len(messages) == (titled == 1)
    assert all('first line of 3 of 5 passages could be a title' in line for line in messages)


@pytest.mark.parametrize('mark', ['NULL', r'\N', 'nan', 'NaN', '<NA>', ' NULL '])
def test_marks_of_missing_values_are_no_cells_of_a_tsv(tmp_path, mark):
    path = tmp_path / 'c.tsv'
    path.write_text(f'id\ttitle\ttext\n1\t{mark}\tA town.\n2\tGumu\t{mark}\n3\t{mark}\t{mark}\n')
    bad = corpus.BadLines(path, strict=False)
    records = [record.contents for _, record in corpus.read(path, bad)]
    assert records == ['A town.', '"Gumu"\n']
    assert bad.first == 'line 4: a passage with neither title nor text'


def test_words_like_marks_of_missing_values_are_kept(tmp_path):
    path = tmp_path / 'c.tsv'
    path.write_text('id\ttitle\ttext\n1\tnull\tNone\n')
    assert only(path).contents == '"null"\nNone'
    path = tmp_path / 'c.jsonl'
    path.write_bytes(json_line({'id': 1, 'title': 'NaN', 'text': 'NULL'}))
    assert only(path).contents == '"NaN"\nNULL'


@pytest.mark.fault('F7', '--fields id=key,text=paragraph')
def test_any_other_fields_are_named(tmp_path):
    path = tmp_path / 'c.jsonl'
    path.write_bytes(json_line({'key': 3, 'paragraph': 'A town.', 'name': 'Gumu', 'id': 'other'}))
    fields = passage_fields('id=key,text=paragraph,title=name')
    assert only(path, fields=fields) == corpus.Record('3', WIRE)
    with refused('no title: none of nam among'):
        only(path, fields=fields | {'title': 'nam'})
    with refused('c.jsonl:1: no text: .* "paragraph", .*--fields text=NAME'):
        only(path)


PACK = {
    '': bytes,
    '.gz': gzip.compress,
    '.zst': zstandard.compress,
    '.bz2': bz2.compress,
    '.xz': lzma.compress,
    '.GZ': gzip.compress,
}


@pytest.mark.parametrize('suffix', PACK)
@pytest.mark.parametrize('mark', [b'', b'\xef\xbb\xbf'])
@pytest.mark.parametrize('end', [b'\n', b'\r\n', b'\n\n'])
@pytest.mark.fault('I', 'byte order mark, line ends, compression')
def test_marks_line_ends_and_compression_lose_no_passage(tmp_path, suffix, mark, end):
    lines = [json.dumps({'id': n, 'contents': WIRE}).encode() for n in range(3)]
    path = tmp_path / f'c.jsonl{suffix}'
    path.write_bytes(PACK[suffix](mark + end.join(lines) + end))
    for strict in (True, False):
        records = [record for _, record in corpus.read(path, corpus.BadLines(path, strict))]
        assert records == [corpus.Record(str(n), WIRE) for n in range(3)]
    rows = b'title\tid\ttext' + end + b'Gumu\t0\tA town.' + end
    path = tmp_path / f'c.tsv{suffix}'
    path.write_bytes(PACK[suffix](mark + rows))
    assert only(path) == corpus.Record('0', WIRE)


BEIR = json_line(FORMS['BEIR']).decode()


def kinds_of_files():
    """The table of foreign_files.txt: fault, what was sent, the name of a file, its content, and what the line says."""
    text = (pathlib.Path(__file__).parent / 'foreign_files.txt').read_text(encoding='utf-8')
    for row in text.splitlines():
        key, sent, *case = row.split(' | ')
        yield pytest.param(*case, marks=pytest.mark.fault(key, sent), id=sent)


@pytest.mark.parametrize(('name', 'content', 'line'), list(kinds_of_files()))
def test_another_kind_of_file_is_named(tmp_path, name, content, line):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(eval(content))
    with refused(line):
        list(corpus.read(path.parent if 'folder' in name else path))


def test_a_missing_text_is_not_the_index_of_pandas(tmp_path):
    path = tmp_path / 'c.tsv'
    path.write_text('\tid\n0\t7\n')
    with refused('--fields text=NAME; correct'):
        only(path)


@pytest.mark.parametrize('field', ['wikipedia_title', 'Title', 'headline'])
@pytest.mark.fault('kin-files', 'a title under another name')
def test_a_title_under_another_name_is_named_once(tmp_path, field, capsys):
    path = tmp_path / 'c.jsonl'
    lines = [json_line({'id': n, field: 'Gumu', 'text': 'A town.'}) for n in range(3)]
    path.write_bytes(b''.join(lines))
    assert len(list(corpus.read(path))) == 3
    assert list(corpus.read(path, fields={'title': field}))[0][1].contents == WIRE
    (line,) = capsys.readouterr().err.splitlines()
    assert f'"{field}" is not read' in line and f'--fields title={field}' in line


def test_fields_beside_a_title_are_not_named(tmp_path, capsys):
    path = tmp_path / 'c.jsonl'
    titled = {'id': 1, 'title': 'Gumu', 'text': 'A town.', 'subtitle': 'Its river'}
    untitled = {'id': 2, 'text': 'A town.', 'jobtitle': 'Mayor', 'headline': 3}
    empty = {'id': 3, 'title': '', 'text': 'A town.', 'page_title': 'Gumu'}
    path.write_bytes(json_line(titled) + json_line(untitled) + json_line(empty))
    assert len(list(corpus.read(path))) == 3
    assert not capsys.readouterr().err


def test_long_passages_are_said_once(tmp_path, caplog):
    path = tmp_path / 'c.jsonl'
    texts = ['A town.', 'A town. ' * 200, 'A river. ' * 126]
    lines = [json_line({'id': number, 'text': text}) for number, text in enumerate(texts)]
    path.write_bytes(b''.join(lines))
    for folder in ('long', 'cut'):
        (tmp_path / folder).mkdir()
    corpus.write(path, tmp_path / 'long')
    (record,) = caplog.records
    assert '2 of 3 passages have more than 250 words' in record.message
    corpus.write(path, tmp_path / 'cut', passage_words=100)
    assert len(caplog.records) == 1


@pytest.fixture(scope='module')
def parquet():
    return pytest.importorskip('pyarrow.parquet')


@pytest.fixture(scope='module')
def pyarrow():
    return pytest.importorskip('pyarrow')


@pytest.mark.fault('F7', 'a corpus in Parquet')
def test_parquet(tmp_path, pyarrow, parquet):
    path = tmp_path / 'c.parquet'
    rows = [FORMS['BEIR'], FORMS['BEIR'] | {'_id': '8'}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    first, second = corpus.read(path)
    assert first == (1, corpus.Record('7', WIRE)) and second == (2, corpus.Record('8', WIRE))
    path.write_bytes(path.read_bytes()[:-20])
    with refused('c.parquet: cannot be read'):
        only(path)


@pytest.mark.fault('kin-files', 'a TSV with two columns of one name')
def test_a_column_that_occurs_twice_is_refused(tmp_path):
    path = tmp_path / 'c.tsv'
    path.write_text('id\ttext\ttext\n1\tA town.\tA river.\n')
    # Without headings no row can be read, so it is no bad line that could be skipped.
    for strict in (True, False):
        with refused("c.tsv:1: the column 'text' occurs twice"):
            only(path, skipped=corpus.BadLines(path, strict))


def test_empty_columns_behind_the_last_one_are_read_over(tmp_path):
    path = tmp_path / 'c.tsv'
    path.write_text('id\ttext\t\t\n1\tA town.\t\t\n')
    assert only(path).contents.endswith('A town.')


@pytest.mark.parametrize('is_nested', [False, True])
@pytest.mark.fault('kin-files', 'Parquet with two columns of one name')
def test_a_column_of_parquet_that_occurs_twice_is_refused(tmp_path, pyarrow, parquet, is_nested):
    columns = [pyarrow.array([text]) for text in ('1', 'A town.', 'A river.')]
    names = ['id', 'text', 'text']
    table = pyarrow.table(columns, names=names)
    if is_nested:
        table = pyarrow.table({'inner': pyarrow.StructArray.from_arrays(columns, names=names)})
    path = tmp_path / 'c.parquet'
    parquet.write_table(table, path)
    with refused('c.parquet: cannot be read .*(the column|duplicate field)'):
        only(path)


@pytest.mark.fault('F7', 'Parquet with a text that is no UTF-8')
def test_a_column_that_is_no_text_is_one_line(tmp_path, pyarrow, parquet):
    data = pyarrow.array([b'\xff\xfeab']).view(pyarrow.string())
    path = tmp_path / 'c.parquet'
    parquet.write_table(pyarrow.table({'id': ['1'], 'contents': data}), path)
    with refused('c.parquet: cannot be read'):
        only(path)


@pytest.mark.fault('F7', 'Parquet without pyarrow')
def test_without_pyarrow_a_line_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    (tmp_path / 'c.parquet').write_bytes(b'PAR1')
    with refused('c.parquet: Parquet .* pip install pyarrow'):
        only(tmp_path / 'c.parquet')


@pytest.mark.fault('third-24', 'a corpus with decomposed characters')
def test_characters_are_composed_as_in_queries(tmp_path):
    path = tmp_path / 'c.jsonl'
    path.write_bytes(json_line({'id': 'e\u0301', 'title': 'Cafe\u0301', 'text': 'Ein Cafe\u0301.'}))
    assert only(path) == corpus.Record('e\u0301', '"Café"\nEin Café.')
