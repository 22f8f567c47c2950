"""Long texts are cut into passages of whole sentences: no word is lost, and none is in two passages."""

import json
import pathlib
import random
import time

import pytest
from refused_calls import check_table

from zeroplay_jax.extras.inputs import sentences
from zeroplay_jax.retrieval import build, corpus, folder
from zeroplay_jax.retrieval.corpus import document_page

WORDS = ('# Lomi was born in 1903. Dr. "Why?" 漢字。 - U.S. A. \x00 ' + 'ß' * 90).split()
SPACES = (' ', ' ', ' ', '\n', '\n\n', '\t', '\u2028', '\x0b', '\r\n')
LONG = ' '.join(f'Sentence number {number} is about the river of Lomi.' for number in range(60))


@pytest.mark.parametrize('max_words', [20, 80])
@pytest.mark.parametrize('count', [0, 1, 7, 300])
def test_passages_have_all_words_in_order_and_none_is_too_long(count, max_words):
    rng = random.Random(0)
    for _ in range(8):
        text = ''.join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(count))
        passages = sentences.split_text(text, max_words)
        assert ' '.join(passages).split() == text.split()
        assert all(0 < len(passage.split()) <= max_words for passage in passages)
        assert sentences.split_text(text, max_words) == passages


def test_a_long_text_of_initials_or_without_blanks_takes_little_time():
    started = time.monotonic()
    for part in ('A. ' * 100_000, 'x' * 1_000_000, 'word ' * 300_000, '.' * 300_000):
        sentences.split_text(part, 80)
    assert time.monotonic() - started < 20


def test_texts_are_cut_as_the_table_says(tmp_path):
    """What is a text, sentences, paragraphs, passages, and words that a line divides."""
    names = vars(sentences) | {
        'sentence': 'The founder of Lomi was born in Gumu in the year 1903.',
        'words': [f'w{number}' for number in range(205)],
    }
    check_table(pathlib.Path(__file__).parent / 'texts.txt', names, tmp_path)


def lines_file(path, *records):
    path.write_text(''.join(json.dumps({'id': i, 'contents': c}) + '\n' for i, c in records))
    return path


def test_only_long_passages_of_a_file_are_cut(tmp_path):
    passages = [('a', '"Gumu"\n' + 'word ' * 120), ('b', f'"Lomi"\n{LONG}'), ('c', '"T"\n')]
    source = lines_file(tmp_path / 'c.jsonl', *passages)
    whole = [record for _, record in corpus.read(source)]
    first, *parts, last = [record for _, record in corpus.read(source, passage_words=80)]
    assert (first, last) == (whole[0], whole[2])
    assert [part.id for part in parts] == [f'b#{number}' for number in range(len(parts))]
    titles, texts = zip(*(corpus.split(part.contents) for part in parts))
    assert set(titles) == {'Lomi'} and ' '.join(texts) == LONG


def test_cut_passages_are_one_document_with_and_without_a_title(tmp_path):
    passages = ('a', LONG), ('b', f'"Lomi"\n{LONG}'), ('c', 'untitled')
    source = lines_file(tmp_path / 'c.jsonl', *passages)
    corpus.write(source, tmp_path, passage_words=80)
    stored = corpus.Corpus(tmp_path)
    for reference in ('a#3', 'b#2', 'Lomi'):
        page = document_page(stored, reference, words_per_page=10_000)
        assert page.text == LONG


def test_the_build_command_cuts_passages(tmp_path):
    source = lines_file(tmp_path / 'c.jsonl', ('a', LONG))
    build.main(f'--corpus={source} --kind=bm25 --out={tmp_path}/index --passage-words=80'.split())
    assert folder.read_manifest(tmp_path / 'index')['corpus']['passages'] > 6


@pytest.mark.parametrize('passage_words', [0, 80])
# Chinese has no blanks between words, so that the line counts as one word.
@pytest.mark.parametrize('line', [LONG, '山' * 201])
def test_a_long_first_line_is_no_title(passage_words, line, tmp_path):
    (tmp_path / 'a.txt').write_text(f'{line}\na last line')
    (_, record), *_ = corpus.read(tmp_path, passage_words=passage_words)
    title, text = corpus.split(record.contents)
    assert title == 'a' and line.startswith(text.split()[0])
