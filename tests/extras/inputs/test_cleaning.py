"""Any folder or file as a corpus: what is unusable is counted, and a source with nothing usable is refused."""

import contextlib
import gzip
import itertools
import json
import os
import pathlib
import re

import pytest
from docutils.parsers.rst import directives, roles
from refused_calls import check_table

from zeroplay_jax.extras.inputs import cleaning, markup
from zeroplay_jax.extras.inputs.sentences import problem_of
from zeroplay_jax.retrieval import corpus
from zeroplay_jax.retrieval.json_text import Unusable
from zeroplay_jax.retrieval.types import RetrievalError

ENGLISH = 'The town of Lomi lies on the river Gumu and was founded by monks in the year 1203. It has a bridge.'
GERMAN = (
    'Die Stadt liegt am Ufer des Flusses und wurde im Jahr 1203 von Mönchen gegründet. Heute leben dort vierzigtausend '
    'Menschen, die vor allem in der Industrie und im Handel arbeiten. Das alte Rathaus war bis 1890 in Gebrauch.'
)


MANUAL = (
    'https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/ upstream: lomi-2.1.4-1 https://lomi.example/ '
    'files: debian/* copyright: 2007-2009, 2012, 2014 <uno@lomi.example> GPL-2+ '
    + ' '.join(f'--option-{number}, -{number}' for number in range(30))
    + ' /usr/share/common-licenses/GPL-2 holds the full text of this license. Lomi is run by hand.\n'
)


@pytest.mark.fault('user-5', 'a manual of addresses and options, code, a list of names')
def test_manuals_are_english_and_code_and_lists_are_not():
    assert problem_of(MANUAL) is None
    code = 'for x in range(10):\n    print(x)\nclass A:\n    def f(self, a=None): return self\n'
    assert problem_of(code * 10) == problem_of('Ann Lee 1952, Bob Ray 1953\n' * 20) == 'not English'


def mixed_folder(folder):
    """One usable text of nine files."""
    (folder / 'deeper').mkdir(parents=True)
    (folder / 'deeper' / 'lomi.txt').write_text(f'Lomi\n{ENGLISH}')
    (folder / 'a.txt').write_bytes(b'\xff\x00\x00\x01')
    (folder / 'b.md').write_text('')
    (folder / 'c.txt').write_bytes('Größe und Maß'.encode('latin-1'))
    (folder / 'd.txt').write_text(GERMAN)
    (folder / 'e.txt').write_text('Short.')
    for number in range(3):
        (folder / f'{number}.pdf').write_bytes(b'%PDF')


def test_unusable_files_are_counted_and_left_out(tmp_path):
    mixed_folder(tmp_path / 'texts')
    out = tmp_path / 'out.jsonl'
    inventory = cleaning.write_clean(tmp_path / 'texts', out, 80)
    assert (inventory.usable, inventory.unusable, inventory.passages) == (1, 8, 1)
    assert str(inventory) == (
        '3 .pdf (0.pdf, 1.pdf, 2.pdf), 2 not UTF-8 (a.txt, c.txt), 1 empty (b.md), 1 not English (d.txt), '
        '1 too short (e.txt)'
    )
    line = json.loads(out.read_text())
    assert line == {
        'id': 'deeper/lomi.txt#0',
        'contents': corpus.contents('Lomi', ENGLISH),
        'document_name': 'deeper/lomi.txt',
    }


def test_files_of_one_title_stay_documents(source, tmp_path):
    for name in 'abc':
        (source / f'{name}.md').write_text(f'# Notes\n{ENGLISH} {ENGLISH}')
    cleaning.write_clean(source, tmp_path / 'out.jsonl', 20)
    corpus.write(tmp_path / 'out.jsonl', tmp_path)
    built = corpus.Corpus(tmp_path)
    ids = [built.record(row).id for row in range(len(built))]
    ids_of_b = [built.record(row).id for row in built.document_rows(ids.index('b.md#0'))]
    assert ids_of_b == [passage_id for passage_id in ids if passage_id.startswith('b.md')]


FRONT_MATTER = '---\ntitle: Lomi\ntags:\n  - town\n---\n'


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

    names = {'title': title, 'FRONT_MATTER': FRONT_MATTER}
    check_table(pathlib.Path(__file__).parent / 'titles.txt', names, tmp_path)


# Texts of two million characters for which a search from every mark to the end would take hours.
ENDLESS = {
    'images': '![',
    'links': '[a](',
    'references': '![][',
    'tags': '<a',
    'comments': '<!--<b>\n',
    'badges': '<b>\n',
    'underscores': '_',
    'TOML': ('+++\ntitle = ', '[', '\n+++'),
    'YAML': ('---\ntitle: ', '[', '\n---'),
    'YAML with names': ('---\ntitle: x\nb: ', 'a: &a [*a', '\n---'),
}


@pytest.mark.parametrize(
    'kind', [pytest.param(name, marks=pytest.mark.fault('nov29-C8', name)) for name in ENDLESS]
)
def test_marks_without_end_are_read_once(kind):
    before, mark, behind = ('# a', ENDLESS[kind], 'b')
    if isinstance(mark, tuple):
        before, mark, behind = mark
    for beginning, form in itertools.product((before, ''), ('markdown', 'html')):
        whole_text = f'{beginning}{mark * (2_000_000 // len(mark))}{behind}\n{ENGLISH}'
        # Markdown is refused, and what follows a comment or tag without an end is not shown.
        with contextlib.suppress(Unusable):
            markup.read(form, whole_text)


MARKED = {
    'markdown': '# The `lomi` [command](a.md)\n\nIt **prints** the [list](b) of\n*all* towns.[^1]\n\n'
    '[^1]: Of the *north*.\n\n- An item.\n\n| a | b |\n|---|---|\n| c | d |\n\n```\nlomi -a  x\n```\n',
    'rst': 'The ``lomi`` `command <a>`_\n===========================\n\nIt **prints** the :ref:`list <b>` of\n'
    '*all* towns. [1]_\n\n.. [1] Of the *north*.\n\n.. function:: lomi(x)\n\n   An item.\n\n::\n\n  lomi -a  x\n',
    'html': '<html><head><title>x - Lomi</title><style>p {}</style></head><body><nav><a>Home</a></nav><main>'
    '<h1>The <code>lomi</code> command<a class="headerlink">¶</a></h1><p>It <b>prints</b> the <a>list</a> of\n<i>all'
    '</i> towns.<sup class="footnote-ref">1</sup><p>Of the <i>north</i>.<ul><li>An item.</ul><pre>lomi -a  x</pre>'
    '</main><footer>2026</footer>',
}


@pytest.mark.parametrize('form', MARKED)
def test_markup_is_read_as_a_reader_sees_it(form):
    title, text = markup.read(form, MARKED[form])
    assert title == 'The lomi command'
    blocks = text.split('\n\n')
    shown = ['It prints the list of all towns.', 'Of the north.', 'An item.', 'lomi -a  x']
    assert [line for line in blocks if line in shown] == sorted(shown, key=blocks.index)
    assert not {'¶', 'Home', '2026', '*', '`'} & set(text.replace('.', ' ').split())


@pytest.mark.parametrize('directive', ['image', 'figure', '|x| image'])
def test_no_image_that_a_text_names_is_read(directive, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(pathlib.Path, 'read_text', lambda path, **_: read.append(path.name) or '')
    text = f'Lomi\n====\n\nA |x|\n\n.. {directive}:: {tmp_path}/a.svg\n   :loading: embed\n\nB\n'
    assert markup.read('rst', text)[1].endswith('B')
    assert 'a.svg' not in read


def test_names_unknown_to_docutils_stay_unknown_to_it():
    before = (directives.directive, roles.role)
    with pytest.raises(Unusable, match='too many parts inside of each other'):
        markup.read('rst', '\n\n'.join('  ' * depth + '- a' for depth in range(2_000)))
    assert (directives.directive, roles.role) == before


SKIPPED = {
    'a form': ('<form><p>Shown.</p></form>', 'Shown.'),
    'no end': ('<ul><li class="toc">a<li>b</ul><p>Shown.', 'Shown.'),
    'no end inside of a line': ('<p>Shown. <a class="headerlink">x</p><p>Too.', 'Shown.\n\nToo.'),
    'nested': ('<div><div class="toc">a<div>b</div>c</div>Shown.</div>', 'Shown.'),
}


@pytest.mark.parametrize('case', SKIPPED)
def test_a_part_beside_the_text_ends_with_what_is_around_it(case):
    page, shown = SKIPPED[case]
    assert markup.read('html', page) == ('', shown)


def test_packed_texts_are_read_and_forms_are_known_by_their_names(source, tmp_path):
    for name in ('a.md.gz', 'b.txt.gz', 'c.rst.txt.gz'):
        (source / name).write_bytes(gzip.compress(f'# *Lomi*\n\n{ENGLISH}'.encode()))
    (source / 'd.html').write_text(f'<p>{ENGLISH}')
    (source / 'e.7.gz').write_bytes(b'')
    inventory = cleaning.write_clean(source, tmp_path / 'o.jsonl', 80)
    assert (inventory.usable, inventory.unusable) == (4, 1)
    assert 'man -P cat -l FILE > FILE.txt' in inventory.left_out()
    titles = [corpus.split(record.contents)[0] for _, record in corpus.read(tmp_path / 'o.jsonl')]
    assert titles == ['Lomi', '*Lomi*', 'Lomi', 'd']


@pytest.fixture
def source(tmp_path):
    """A folder for texts."""
    (tmp_path / 'texts').mkdir()
    return tmp_path / 'texts'


def test_front_matter_alone_is_an_empty_file(source, tmp_path):
    (source / 'a.md').write_text(FRONT_MATTER)
    assert '1 empty' in refused(source, tmp_path)


def refused(source, tmp_path):
    """The line that refuses a source; nothing may be written."""
    before = sorted(tmp_path.rglob('*'))
    with pytest.raises(RetrievalError) as caught:
        cleaning.write_clean(source, tmp_path / 'out.jsonl', 80)
    assert sorted(tmp_path.rglob('*')) == before
    text = str(caught.value)
    assert '\n' not in text and str(source) in text
    return text


def test_a_folder_with_nothing_usable_is_refused_with_what_is_in_it(tmp_path):
    mixed_folder(tmp_path / 'texts')
    (tmp_path / 'texts' / 'deeper' / 'lomi.txt').unlink()
    text = refused(tmp_path / 'texts', tmp_path)
    assert 'none of its 8 files can be used (3 .pdf (0.pdf, 1.pdf, 2.pdf), 2 not UTF-8' in text


def test_the_most_frequent_suffixes_are_named_without_control_characters(source, tmp_path):
    suffixes = (*'abcdefgh', 'x\x1b[31m', 'x\x1b[31m', 'zip', 'zip', 'zip')
    for number, suffix in enumerate(suffixes):
        (source / f'{number}.{suffix}').write_bytes(b'')
    text = refused(source, tmp_path)
    assert (
        '(3 .zip (10.zip, 11.zip, 12.zip), 2 .x\ufffd[31m (8.' in text
        and '1 .f (5.f), 2 others)' in text
    )


GERMAN_PASSAGE = json.dumps({'id': '1', 'contents': corpus.contents('Lomi', GERMAN)})


@pytest.mark.parametrize(
    ('name', 'content', 'words'),
    [
        ('texts', None, 'there are no files in it'),
        ('none', None, 'no such file or folder'),
        ('c.jsonl', '{}\n[1]\n', '2 unreadable (the first: line 1: no id: '),
        ('c.jsonl', '', 'there are no passages in it'),
        ('c.pdf', '%PDF', 'unknown format'),
        ('c.jsonl', GERMAN_PASSAGE, 'none of its 1 passages can be used (1 not English)'),
    ],
)
def test_other_sources_with_nothing_usable_are_refused(source, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert words in refused(tmp_path / name, tmp_path)


def test_names_of_files_may_be_any_bytes(source, tmp_path):
    for name in (b'\xff.txt', b'line\nfeed.md', 'größe.TXT'.encode()):
        with open(os.fsencode(source) + b'/' + name, 'w') as file:
            file.write(ENGLISH)
    assert cleaning.write_clean(source, tmp_path / 'o.jsonl', 80).passages == 3
    ids = {record.id for _, record in corpus.read(tmp_path / 'o.jsonl')}
    assert ids == {'\ufffd.txt#0', 'line feed.md#0', 'größe.TXT#0'}


def test_a_corpus_file_keeps_lists_and_loses_empty_passages_and_bad_lines(tmp_path):
    texts = [ENGLISH, 'Nat Lofthouse 1952 Ted Drake 1955', '', GERMAN]
    lines = [json.dumps({'id': str(i), 'contents': f'"T{i}"\n{t}'}) for i, t in enumerate(texts)]
    source = tmp_path / 'c.jsonl'
    source.write_text('\n'.join([*lines, 'no JSON']))
    inventory = cleaning.write_clean(source, tmp_path / 'out.jsonl', 80)
    assert (inventory.usable, inventory.passages) == (1, 3)
    assert inventory.problems.total() == 4 and '1 unreadable (the first' in str(inventory)


def test_a_file_without_permission_is_counted(source, tmp_path):
    (source / 'lomi.txt').write_text(f'Lomi\n{ENGLISH}')
    locked = source / 'locked.txt'
    locked.write_text(ENGLISH)
    locked.chmod(0)
    if os.access(locked, os.R_OK):
        pytest.skip('root reads every file')
    assert str(cleaning.write_clean(source, tmp_path / 'o', 80)) == '1 Permission denied'
