"""Cloze questions of any text: the parts make up the sentence, and the question does not contain its answer."""

import pathlib
import time

from example_texts import example_passages
from refused_calls import check_table

from zeroplay_jax.extras.inputs import cloze
from zeroplay_jax.extras.inputs.sentences import split_text


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


LIST = """- Bring two eggs and a bowl
- The first bridge over the river was built by Gumu in 1203.
2. A second bridge was added by the monks of the old abbey.

The town beside it was called Lomi by all of its people."""


def sentences(text):
    check(text)
    usable = list(cloze.sentences(text))
    # So they are in a passage of the text.
    for passage in split_text(text, 100)[:1]:
        assert list(cloze.sentences(passage)) == usable
    return usable


def answers(sentence):
    assert sentences(sentence) == [sentence]
    return [case.answer for case in cloze.clozes(sentence)]


def test_sentences_and_answers():
    check_table(pathlib.Path(__file__).parent / 'cloze.txt', globals())


def test_hostile_texts_take_little_time():
    started = time.process_time()
    for part in ('A. ', 'Aa ', '1.1.', 'Aa-', "A'", 'The ', '("', 'Aa of the ', '1 May '):
        check(f'The start {part * 50_000}end of it.')
        for case in cloze.clozes(f'The start of this {part * 2_000}x'):
            assert case.answer
    assert time.process_time() - started < 20
