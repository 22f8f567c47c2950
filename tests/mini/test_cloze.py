"""Cloze questions of any text: the parts make up the sentence, and the question does not contain its answer."""

import itertools
import json
import pathlib
import time

import pytest
from example_texts import example_passages

from zeroplay_jax.data import cloze
from zeroplay_jax.retrieval.texts import split_text

SHARED = pathlib.Path(__file__).parents[3] / 'shared' / 'data' / 'corpus.jsonl'


def check(text):
    """Properties of all questions of a text; returns their number."""
    count = 0
    for sentence in cloze.sentences(text):
        low, high = cloze.SENTENCE_WORDS
        assert low <= len(sentence.split()) <= high and sentence.isprintable()
        assert sentence in ' '.join(text.split())
        for case in cloze.clozes(sentence):
            assert case.sentence == sentence and case.kind in ('number', 'name', 'word')
            assert case.question.count(cloze.BLANK) == 1
            assert case.answer == case.answer.strip() and case.answer
            assert case.answer.lower() not in case.question.lower()
            assert len(case.answer.split()) <= cloze.ANSWER_WORDS
            assert len(case.left.split()) >= cloze.LEFT_WORDS
            count += 1
    return count


def test_questions_of_the_example_texts():
    passages = example_passages()
    assert len(passages) == 15
    for _, text in passages:
        assert 120 <= len(text.split()) <= 250 and check(text) > 30


def test_questions_of_real_passages():
    if not SHARED.is_file():
        pytest.skip('the shared corpus is not here')
    with SHARED.open() as lines:
        passages = [json.loads(line)['contents'] for line in itertools.islice(lines, 0, None, 11)]
    counts = [check(passage.partition('\n')[2]) for passage in passages]
    # Lists and disambiguation pages have no sentences.
    assert sum(map(bool, counts)) > 0.85 * len(counts)


@pytest.mark.parametrize(
    'text',
    [
        '',
        'no sentence at all',
        'Control \x00 characters are in the \x07 middle of this sentence of Lomi.',
        'A table | of | some | numbers | and | names | like | Lomi.',
        'A sentence with a ____ blank in it is not usable for Lomi.',
        '这座城市位于河边。这座城市位于河边。',
        'The word ' + 'x' * 100_000 + ' is too long for any sentence of Lomi.',
    ],
)
def test_texts_without_usable_sentences(text):
    assert check(text) == 0 and not cloze.sentences(text)


def test_a_date_is_left_out_whole():
    sentence = 'The town was founded by the monk Gumu on 7 November 1867 in Lomi.'
    assert cloze.sentences(sentence) == [sentence]
    answers = [case.answer for case in cloze.clozes(sentence)]
    assert '7 November 1867' in answers and 'November' not in answers
    assert {'Gumu', 'Lomi'} < set(answers)


def test_a_list_item_is_a_sentence_of_its_own():
    items = [
        'Bring two eggs and a bowl',
        'The first bridge over the river was built by Gumu in 1203.',
        'A second bridge was added by the monks of the old abbey.',
    ]
    sentence = 'The town beside it was called Lomi by all of its people.'
    text = f'- {items[0]}\n- {items[1]}\n2. {items[2]}\n\n{sentence}'
    assert cloze.sentences(text) == [*items[1:], sentence]
    # In one line a dash is no list mark: passages cut out of an article begin with one.
    assert cloze.sentences(f'- {items[1]} {sentence}') == [sentence]
    (passage,) = split_text(text, 100)
    assert cloze.sentences(passage) == cloze.sentences(text)


def test_hostile_texts_take_little_time():
    started = time.process_time()
    for part in ('A. ', 'Aa ', '1.1.', 'Aa-', "A'", 'The ', '("', 'Aa of the ', '1 May '):
        check(f'The start {part * 50_000}end of it.')
        for case in cloze.clozes(f'The start of this {part * 2_000}x'):
            assert case.answer
    assert time.process_time() - started < 20
