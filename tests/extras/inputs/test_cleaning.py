"""Any folder or file as a corpus: what is unusable is counted, and a source with nothing usable is refused."""

import contextlib
import itertools
import json
import pathlib
import re

import pytest
from refused_calls import check_table

from zeroplay_jax.extras.inputs import cleaning, markup
from zeroplay_jax.retrieval import corpus
from zeroplay_jax.retrieval.json_text import Unusable
from zeroplay_jax.retrieval.types import RetrievalError

FOLDER = pathlib.Path(__file__).parent
ENGLISH = 'The town of Lomi lies on the river Gumu and was founded by monks in the year 1203. It has a bridge.'
GERMAN = (
    'Die Stadt liegt am Ufer des Flusses und wurde im Jahr 1203 von Mönchen gegründet. Heute leben dort vierzigtausend '
    'Menschen, die vor allem in der Industrie und im Handel arbeiten. Das alte Rathaus war bis 1890 in Gebrauch.'
)


@pytest.fixture
def source(tmp_path):
    """A folder for texts."""
    (tmp_path / 'texts').mkdir()
    return tmp_path / 'texts'


def refused(source, tmp_path):
    """The line that refuses a source; nothing may be written."""
    before = sorted(tmp_path.rglob('*'))
    with pytest.raises(RetrievalError) as caught:
        cleaning.write_clean(source, tmp_path / 'out.jsonl', 80)
    assert sorted(tmp_path.rglob('*')) == before
    text = str(caught.value)
    assert '\n' not in text and str(source) in text
    return text


def test_unusable_files_are_counted_and_left_out(source, tmp_path):
    (source / 'deeper').mkdir()
    (source / 'deeper' / 'lomi.txt').write_text(f'Lomi\n{ENGLISH}')
    (source / 'a.txt').write_bytes(b'\xff\x00\x00\x01')
    (source / 'b.md').write_text('---\ntitle: Lomi\n---\n')
    (source / 'c.txt').write_bytes('Größe und Maß'.encode('latin-1'))
    (source / 'd.txt').write_text(GERMAN)
    (source / 'e.txt').write_text('Short.')
    for number in range(3):
        (source / f'{number}.pdf').write_bytes(b'%PDF')
    out = tmp_path / 'out.jsonl'
    inventory = cleaning.write_clean(source, out, 80)
    assert (inventory.usable, inventory.unusable, inventory.passages) == (1, 8, 1)
    listed = (
        '3 .pdf (0.pdf, 1.pdf, 2.pdf), 2 not UTF-8 (a.txt, c.txt), 1 empty (b.md), 1 not English (d.txt), '
        '1 too short (e.txt)'
    )
    assert str(inventory) == listed
    line = json.loads(out.read_text())
    assert line == {
        'id': 'deeper/lomi.txt#0',
        'contents': corpus.contents('Lomi', ENGLISH),
        'document_name': 'deeper/lomi.txt',
    }
    out.unlink()
    (source / 'deeper' / 'lomi.txt').unlink()
    line = refused(source, tmp_path)
    assert f'none of its 8 files can be used ({listed})' in line and 'pdftotext' in line


def test_titles_are_those_of_the_table(tmp_path):
    """Of front matter, headings and first lines; rules, badges and markup are none."""

    def title(beginning, name='file.md'):
        path = tmp_path / name
        path.write_text(f'{beginning}{ENGLISH}')
        ((_, record),) = corpus.read(path, passage_words=80)
        own_title, text = corpus.split(record.contents)
        assert text.endswith(ENGLISH[-30:]) and 'tags' not in record.contents
        assert name == 'file.txt' or not {'ci.example', 'logo'} & set(re.findall(r'[\w.]+', text))
        cleaning.write_clean(path, tmp_path / 'out.jsonl', 80)
        assert [cleaned for _, cleaned in corpus.read(tmp_path / 'out.jsonl')] == [record]
        return own_title

    names = {'title': title, 'FRONT_MATTER': '---\ntitle: Lomi\ntags:\n  - town\n---\n'}
    check_table(FOLDER / 'titles.txt', names, tmp_path)


# Texts of two million characters for which a search from every mark to the end would take hours.
ENDLESS = (
    ('# a', '![', 'b'),
    ('# a', '<a', 'b'),
    ('# a', '<!--<b>\n', 'b'),
    ('# a', '_', 'b'),
    ('+++\ntitle = ', '[', '\n+++'),
    ('---\ntitle: ', '[', '\n---'),
    ('---\ntitle: x\nb: ', 'a: &a [*a', '\n---'),
)


@pytest.mark.parametrize(('before', 'mark', 'behind'), ENDLESS)
def test_marks_without_end_are_read_once(before, mark, behind):
    for beginning, form in itertools.product((before, ''), ('markdown', 'html')):
        whole_text = f'{beginning}{mark * (2_000_000 // len(mark))}{behind}\n{ENGLISH}'
        # Markdown is refused, and what follows a comment or tag without an end is not shown.
        with contextlib.suppress(Unusable):
            markup.read(form, whole_text)


def test_markup_is_read_as_a_reader_sees_it():
    check_table(FOLDER / 'markup.txt', {'read': markup.read})


@pytest.mark.parametrize('directive', ['image', 'figure', '|x| image'])
def test_no_image_that_a_text_names_is_read(directive, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(pathlib.Path, 'read_text', lambda path, **_: read.append(path.name) or '')
    text = f'Lomi\n====\n\nA |x|\n\n.. {directive}:: {tmp_path}/a.svg\n   :loading: embed\n\nB\n'
    assert markup.read('rst', text)[1].endswith('B')
    assert 'a.svg' not in read


def test_lists_inside_of_each_other_end():
    with pytest.raises(Unusable, match='too many parts inside of each other'):
        markup.read('rst', '\n\n'.join('  ' * depth + '- a' for depth in range(2_000)))


@pytest.mark.parametrize(
    ('name', 'content', 'words'),
    [
        ('texts', None, 'there are no files in it'),
        ('c.jsonl', '{}\n[1]\n', '2 unreadable (the first: line 1: no id: '),
        ('c.jsonl', '', 'there are no passages in it'),
        ('c.pdf', '%PDF', 'unknown format'),
    ],
)
def test_other_sources_with_nothing_usable_are_refused(source, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert words in refused(tmp_path / name, tmp_path)


def test_a_corpus_file_keeps_lists_and_loses_empty_passages_and_bad_lines(tmp_path):
    texts = [ENGLISH, 'Nat Lofthouse 1952 Ted Drake 1955', '', GERMAN]
    lines = [json.dumps({'id': str(i), 'contents': f'"T{i}"\n{t}'}) for i, t in enumerate(texts)]
    source = tmp_path / 'c.jsonl'
    source.write_text('\n'.join([*lines, 'no JSON']))
    inventory = cleaning.write_clean(source, tmp_path / 'out.jsonl', 80)
    assert (inventory.usable, inventory.passages) == (1, 3)
    assert inventory.problems.total() == 4 and '1 unreadable (the first' in str(inventory)
