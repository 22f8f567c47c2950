"""Any folder or file as a corpus: what is unusable is counted, and a source with nothing usable is refused."""

import json
import os

import pytest

from zeroplay_jax.retrieval import cleaning, corpus
from zeroplay_jax.retrieval.texts import problem_of
from zeroplay_jax.retrieval.types import RetrievalError

ENGLISH = 'The town of Lomi lies on the river Gumu and was founded by monks in the year 1203. It has a bridge.'
GERMAN = (
    'Die Stadt liegt am Ufer des Flusses und wurde im Jahr 1203 von Mönchen gegründet. Heute leben dort vierzigtausend '
    'Menschen, die vor allem in der Industrie und im Handel arbeiten. Das alte Rathaus war bis 1890 in Gebrauch.'
)
OTHER_LANGUAGES = (
    GERMAN,
    "La ville est située sur la rive du fleuve et fut fondée en 1203 par des moines. Aujourd'hui, quarante mille "
    "personnes y vivent, qui travaillent surtout dans l'industrie et le commerce.",
    'La ciudad se encuentra a la orilla del río y fue fundada en 1203 por unos monjes. Hoy viven allí cuarenta mil '
    'personas, que trabajan sobre todo en la industria y el comercio.',
    'De stad ligt aan de oever van de rivier en werd in 1203 gesticht door monniken. Tegenwoordig is het een stad met '
    'veertigduizend inwoners, die vooral in de industrie of de handel werken.',
    'Byen ligger ved bredden af floden og blev grundlagt i 1203 af munke. I dag bor der fyrre tusind mennesker, som '
    'for det meste arbejder i industrien og handelen, og mange have er anlagt. Det er let at komme til byen med toget, '
    'og der var engang et slot ved havnen, som blev bygget for kongen og hans familie, før de rejste mod syd.',
    'Город стоит на берегу реки и был основан монахами.',
    '这座城市位于河边。' * 20,
    'المدينة تقع على ضفة النهر',
)


@pytest.mark.parametrize('text', OTHER_LANGUAGES)
def test_other_languages_are_recognised(text):
    assert problem_of(text) == 'not English'


MANUAL = (
    'https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/ upstream: lomi-2.1.4-1 https://lomi.example/ '
    'files: debian/* copyright: 2007-2009, 2012, 2014 <uno@lomi.example> GPL-2+ '
    + ' '.join(f'--option-{number}, -{number}' for number in range(30))
    + ' /usr/share/common-licenses/GPL-2 holds the full text of this license. Lomi is run by hand.\n'
)


@pytest.mark.fault('user-5', 'a manual of addresses and options, code, a list of names')
def test_manuals_are_english_and_code_and_lists_are_not(user_reads):
    assert problem_of(MANUAL) is None
    code = 'for x in range(10):\n    print(x)\nclass A:\n    def f(self, a=None): return self\n'
    assert problem_of(code * 10) == problem_of('Ann Lee 1952, Bob Ray 1953\n' * 20) == 'not English'
    user_reads('right: None, not English, not English')


@pytest.mark.parametrize(
    ('text', 'problem'),
    [
        (ENGLISH, None),
        (' \n', 'empty'),
        ('Lomi is a town.', 'too short'),
        ('\0ELF' * 30, 'binary'),
        ('The \x01\x02\x03 of ' * 30, 'binary'),
        ('1234 5678 ' * 30, 'not English'),
    ],
)
def test_texts_are_judged(text, problem):
    assert problem_of(text) == problem


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
    assert str(inventory) == '3 .pdf, 1 binary, 1 empty, 1 not English, 1 not UTF-8, 1 too short'
    assert inventory.names() == '0.pdf, 1.pdf, 2.pdf, a.txt, b.md and 3 more'
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


@pytest.mark.parametrize(
    ('text', 'title'),
    [
        (f'{FRONT_MATTER}# Lomi\n{ENGLISH}', 'Lomi'),
        (f'{FRONT_MATTER}\n{ENGLISH}', 'Lomi'),
        (f'---\ntags: [a]\n---\n{ENGLISH}', 'file'),
        # A horizontal rule is no front matter.
        (f'---\n\n{ENGLISH}\n\n---\n{ENGLISH}', 'file'),
        (f'***\n{ENGLISH}', 'file'),
    ],
)
def test_the_title_of_the_front_matter_is_taken_and_rules_are_none(tmp_path, text, title):
    (tmp_path / 'file.md').write_text(text)
    cleaning.write_clean(tmp_path / 'file.md', tmp_path / 'out.jsonl', 80)
    records = [record for _, record in corpus.read(tmp_path / 'out.jsonl')]
    assert {corpus.split(record.contents)[0] for record in records} == {title}
    assert 'tags' not in records[0].contents
    read_directly = [record for _, record in corpus.read(tmp_path / 'file.md', passage_words=80)]
    assert read_directly == records


BADGE = '[![Build](https://ci.example/b.svg)](https://ci.example)'


@pytest.mark.parametrize(
    ('beginning', 'title'),
    [
        (f'{BADGE}\n{BADGE} ![logo](a.png)\n\n# **Lomi** [town](https://a.example)\n', 'Lomi town'),
        (
            '<p align="center">\n<img src="logo.png">\n</p>\n<!-- a\ncomment -->\nLomi\n====\n',
            'Lomi',
        ),
        ('[English](a.md) | [Deutsch](b.md)\n## History\n', 'History'),
        ('## Contents\n- The first\n# Lomi\n', 'Lomi'),
        (f'{BADGE}\n\n', 'file'),
        ('## Usage\n```\n# a comment\n```\n', 'Usage'),
        ('Lomi\n', 'Lomi'),
    ],
)
def test_badges_and_markup_are_no_titles(tmp_path, beginning, title):
    (tmp_path / 'file.md').write_text(beginning + ENGLISH)
    (record,) = [record for _, record in corpus.read(tmp_path / 'file.md', passage_words=80)]
    own_title, text = corpus.split(record.contents)
    assert own_title == title and text.endswith(ENGLISH[-30:])
    assert 'ci.example' not in text and 'logo' not in text
    # Other texts have no such markup.
    (tmp_path / 'file.txt').write_text(f'[Lomi]\n# {ENGLISH}')
    (record,) = [record for _, record in corpus.read(tmp_path / 'file.txt', passage_words=80)]
    assert corpus.split(record.contents)[0] == '[Lomi]'


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
    assert 'none of its 8 files can be used (3 .pdf, 1 binary, ' in text


def test_the_most_frequent_suffixes_are_named_without_control_characters(source, tmp_path):
    suffixes = ('a', 'b', 'c', 'd', 'x\x1b[31m', 'x\x1b[31m', 'zip', 'zip', 'zip')
    for number, suffix in enumerate(suffixes):
        (source / f'{number}.{suffix}').write_bytes(b'')
    text = refused(source, tmp_path)
    assert '(3 .zip, 2 .x\ufffd[31m, 2 of other formats, 1 .a, 1 .b)' in text


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


def test_repeated_ids_are_refused_by_name(tmp_path):
    lines = [json.dumps({'id': i, 'contents': f'"T"\n{ENGLISH} {i}'}) for i in ('a', 'b', 'c', 'b')]
    (tmp_path / 'c.jsonl').write_text('\n'.join(lines))
    assert "2 passages have the id 'b'" in refused(tmp_path / 'c.jsonl', tmp_path)


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
    assert str(cleaning.write_clean(source, tmp_path / 'o', 80)) == '1 unreadable'
