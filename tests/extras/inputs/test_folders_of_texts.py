"""Folders of texts as people keep them: which files are read, and what is in them."""

import pathlib

import pytest
from refused_calls import check_table

from zeroplay_jax.extras.inputs import texts
from zeroplay_jax.retrieval import build, corpus


def test_a_build_counts_the_files_that_it_does_not_read(tmp_path, capsys):
    folder = tmp_path / 'texts'
    folder.mkdir()
    for name in 'a.txt b.1 c.pdf d e.docx g.jsonl .f.txt'.split():
        (folder / name).write_text('Gumu\nA town.')
    arguments = ['--corpus', str(folder), '--kind=bm25', '--stage=corpus']
    build.main([*arguments, '--out', str(tmp_path / 'index')])
    said = capsys.readouterr().err
    left_out = (
        '1 .docx (e.docx), 1 .jsonl (g.jsonl), 1 .pdf (c.pdf), 1 hidden (.f.txt), 1 manual page'
    )
    assert f'{folder}: 6 of 7 files are left out: {left_out}' in said


def test_linked_folders_are_read_once_under_their_own_name(tmp_path):
    texts = tmp_path / 'texts'
    folders = [texts, texts / '.venv', texts / 'v2', tmp_path / 'elsewhere', tmp_path / 'beside']
    for folder in folders:
        folder.mkdir()
        (folder / 'a.txt').write_text('Gumu\nA town.')
    links = 'b=elsewhere c=elsewhere up= current=texts/v2 lib=texts/.venv'
    for name, target in (link.split('=') for link in links.split()):
        (texts / name).symlink_to(tmp_path / target)
    (tmp_path / 'elsewhere' / 'circle').symlink_to(texts)
    (texts / 'itself.txt').symlink_to(texts / 'itself.txt')
    (texts / 'z.txt').symlink_to(texts / '.hidden.txt')
    (texts / '.hidden.txt').write_text('Lomi\nA river.')
    ids = [record.id for _, record in corpus.read(texts)]
    assert ids == ['a.txt#0', 'b/a.txt#0', 'v2/a.txt#0', 'z.txt#0']


def test_words_divided_at_the_end_of_a_line_are_joined(tmp_path):
    check_table(pathlib.Path(__file__).parent / 'divided_words.txt', vars(texts), tmp_path)


# A page about web archives; what man prints over itself; carriage returns.
TEXTS = {
    b'WARC/1.0 is a file format\n\nIt holds pages.': (
        'WARC/1.0 is a file format',
        'It holds pages.',
    ),
    b'L\bLO\bOM\bMI\bI\n_\bA _\ba_\bb town.\n': ('LOMI', 'A ab town.'),
    b'\xef\xbb\xbfGumu\r\rA sim-\rple town.\r': ('Gumu', 'A simple town.'),
    b'Gumu\r\n\r\nA sim-\r\nple town.\r\n': ('Gumu', 'A simple town.'),
}


@pytest.mark.parametrize('content', TEXTS)
def test_a_text_has_the_title_and_the_passage_of_the_table(content, tmp_path):
    (tmp_path / 'a.txt').write_bytes(content)
    ((_, record),) = corpus.read(tmp_path / 'a.txt')
    assert corpus.split(record.contents) == TEXTS[content]
