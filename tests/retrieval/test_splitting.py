"""Long texts are cut into passages of whole sentences: no word is lost, and none is in two passages."""

import json
import random
import time

import pytest

from zeroplay_jax.retrieval import build, corpus, folder, sources, texts
from zeroplay_jax.retrieval.corpus import document_page
from zeroplay_jax.retrieval.texts import split_paragraphs, split_sentences
from zeroplay_jax.retrieval.types import RetrievalError

WORDS = (
    'Lomi',
    'was',
    'born',
    'in',
    '1903.',
    'Dr.',
    '"Why?"',
    '漢字。',
    '-',
    '#',
    'U.S.',
    'A.',
    '\x00',
    'ß' * 90,
)
SPACES = (' ', ' ', ' ', '\n', '\n\n', '\t', '\u2028', '\x0b', '\r\n')


def hostile_text(seed):
    """Any words with any white space between them."""
    rng = random.Random(seed)
    count = rng.choice([0, 1, 7, 300])
    return ''.join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(count))


@pytest.mark.parametrize('max_words', [20, 80])
@pytest.mark.parametrize('seed', range(30))
def test_passages_have_all_words_in_order_and_none_is_too_long(seed, max_words):
    text = hostile_text(seed)
    passages = texts.split_text(text, max_words)
    assert ' '.join(passages).split() == text.split()
    assert all(0 < len(passage.split()) <= max_words for passage in passages)
    assert texts.split_text(text, max_words) == passages


def test_a_passage_ends_where_a_sentence_ends():
    sentence = 'The founder of Lomi was born in Gumu in the year 1903.'
    passages = texts.split_text(' '.join([sentence] * 20), 80)
    assert passages == [' '.join([sentence] * count) for count in (6, 6, 6, 2)]


def test_a_sentence_that_is_longer_than_a_passage_is_cut_between_words():
    words = [f'w{number}' for number in range(205)]
    passages = texts.split_text('A short one. Start ' + ' '.join(words) + '. Another one.', 80)
    assert [len(passage.split()) for passage in passages] == [3, 80, 80, 48]
    assert passages[0] == 'A short one.'


def test_a_long_text_of_initials_or_without_blanks_takes_little_time():
    started = time.monotonic()
    for part in ('A. ' * 100_000, 'x' * 1_000_000, 'word ' * 300_000, '.' * 300_000):
        texts.split_text(part, 80)
    assert time.monotonic() - started < 20


def test_sentences_keep_their_quotes_and_do_not_end_at_abbreviations():
    text = (
        'Dr. J. Smith met Mr. Jones. "Is it No. 5?" (He asked.) It was e.g. in St. Gallen. 12 came'
    )
    parts = split_sentences(text)
    assert parts == [
        'Dr. J. Smith met Mr. Jones.',
        '"Is it No. 5?"',
        '(He asked.)',
        'It was e.g. in St. Gallen.',
        '12 came',
    ]


def test_lines_wrapped_by_hand_are_one_paragraph_and_headings_are_not():
    wrapped = (
        'The founder of the town was born in Gumu and\nmoved to Lomi when he was ten years old.'
    )
    text = f'# A heading\n{wrapped}\nShort line\n\nNext one.\n- item one of a list that is rather long, longer\n- two'
    assert split_paragraphs(text) == [
        '# A heading',
        wrapped.replace('\n', ' '),
        'Short line',
        'Next one.',
        '- item one of a list that is rather long, longer',
        '- two',
    ]


def test_a_list_item_or_heading_is_not_joined_to_the_next_sentence():
    text = (
        '# The garden\nIt has three parts:\n- an orchard\n- a pond with two small islands and a wooden bridge\n'
        '• a lawn\n\nThe orchard was planted by the monks.\n1. Buy flour.\n2) Wait\nHistory\nThe town grew.'
    )
    (passage,) = texts.split_text(text, 80)
    assert passage.split() == text.split()
    assert split_paragraphs(passage) == [
        '# The garden',
        'It has three parts:',
        '- an orchard',
        '- a pond with two small islands and a wooden bridge',
        '• a lawn',
        'The orchard was planted by the monks.',
        '1. Buy flour.',
        '2) Wait',
        'History',
        'The town grew.',
    ]
    # Sentences of prose stay on one line, and so do short lines that go on with a small letter.
    assert texts.split_text('One came.\nTwo came.\n\nThree came by', 80) == [
        'One came. Two came. Three came by'
    ]
    assert texts.split_text('The town of\nthe monks grew.', 80) == ['The town of the monks grew.']


LONG = ' '.join(f'Sentence number {number} is about the river of Lomi.' for number in range(60))


def lines_file(path, *records):
    path.write_text(''.join(json.dumps({'id': i, 'contents': c}) + '\n' for i, c in records))
    return path


def test_only_long_passages_of_a_file_are_cut(tmp_path):
    short = '"Gumu"\n' + ' '.join(['word'] * 120)
    passages = [('a', short), ('b', f'"Lomi"\n{LONG}'), ('c', '"T"\n')]
    source = lines_file(tmp_path / 'c.jsonl', *passages)
    whole = [record for _, record in sources.read(source)]
    assert [(record.id, record.contents) for record in whole] == passages
    first, *parts, last = [record for _, record in sources.read(source, passage_words=80)]
    assert (first, last) == (whole[0], whole[2])
    assert [part.id for part in parts] == [f'b#{number}' for number in range(len(parts))]
    titles, texts = zip(*(corpus.split(part.contents) for part in parts))
    assert set(titles) == {'Lomi'} and ' '.join(texts) == LONG


def test_cut_passages_are_one_document_with_and_without_a_title(tmp_path):
    source = lines_file(
        tmp_path / 'c.jsonl', ('a', LONG), ('b', f'"Lomi"\n{LONG}'), ('c', 'untitled')
    )
    out = tmp_path / 'out'
    out.mkdir()
    corpus.write(source, out, passage_words=80)
    stored = corpus.Corpus(out)
    for reference in ('a#0', 'a#3', 'b#2', 'Lomi'):
        page = document_page(stored, reference, words_per_page=10_000)
        assert page.text == LONG
    assert len(stored.find_document('c')) == 1


def test_texts_get_the_title_of_their_first_line_or_of_their_file(tmp_path):
    contents = {'a.md': f'# Lomi\n\n{LONG}', 'b.txt': LONG, 'c.txt': '', 'd.txt': 'Only one line.'}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    skipped = sources.BadLines(tmp_path, strict=False)
    records = [record for _, record in sources.read(tmp_path, skipped, passage_words=80)]
    texts = {}
    for record in records:
        title, text = corpus.split(record.contents)
        texts[title] = f'{texts.get(title, "")} {text}'.strip()
    assert texts == {'Lomi': LONG, 'b': LONG, 'd': 'Only one line.'}
    assert skipped.count == 1 and records[0].id == 'a.md#0'


@pytest.mark.parametrize('passage_words', [0, 80])
@pytest.mark.parametrize('end', ['', 'a last line'])
@pytest.mark.fault('kin-files', 'a text with a long first line')
def test_a_long_first_line_is_no_title(passage_words, end, tmp_path, user_reads):
    # Chinese has no blanks between words, so that the line counts as one word.
    for line in (LONG.replace('\n', ' '), '山' * 201):
        (tmp_path / 'a.txt').write_text(f'{line}\n{end}')
        (_, record), *_ = sources.read(tmp_path, passage_words=passage_words)
        title, text = corpus.split(record.contents)
        assert title == 'a' and line.startswith(text.split()[0])
    user_reads(f'right: {record.contents[:20]!r}')


def test_the_build_command_cuts_passages(tmp_path, capsys):
    source = lines_file(tmp_path / 'c.jsonl', ('a', f'"Lomi"\n{LONG}'), ('b', '"Gumu"\nA town.'))
    arguments = ['--corpus', str(source), '--kind', 'bm25', '--out', str(tmp_path / 'index')]
    for words in ('5', '-1', 'x'):
        with pytest.raises(SystemExit) as caught:
            build.main([*arguments, '--passage-words', words])
        assert caught.value.code == 2 and capsys.readouterr().err.count('\n') == 1
    build.main([*arguments, '--passage-words', '80'])
    assert folder.read_manifest(tmp_path / 'index')['corpus']['passages'] > 6


def test_an_unfinished_build_with_other_passages_is_refused(tmp_path):
    source = lines_file(tmp_path / 'c.jsonl', ('a', f'"Lomi"\n{LONG}'))
    folder.build(source, tmp_path / 'i', 'bm25', None, passage_words=80, stages=('corpus',))
    with pytest.raises(RetrievalError, match='passage_words was 80'):
        folder.build(source, tmp_path / 'i', 'bm25', None)


def test_a_long_title_of_front_matter_leaves_the_heading(tmp_path):
    title = 'word ' * 60
    (tmp_path / 'a.md').write_text(
        f'---\ntitle: {title}\n---\nAn introduction.\n\n# Gumu\n\nA town.'
    )
    ((_, record), *_) = corpus.read(tmp_path / 'a.md', passage_words=50)
    assert corpus.split(record.contents)[0] == 'Gumu'
