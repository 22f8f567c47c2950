"""The pool: no repeats, every drop counted, batches that are a function of their number, a state that survives JSON."""

import json
import pathlib

from refused_calls import check_table

from zeroplay_jax.selfplay.schedule import QuestionPool
from zeroplay_jax.types import Question


def restored(pool):
    """The pool after a checkpoint."""
    again = QuestionPool()
    again.restore(json.loads(json.dumps(pool.state())))
    assert again.state() == pool.state() and again.batch(0, 0, 3, 3) == pool.batch(0, 0, 3, 3)
    return again


def pooled(*entries, drops=()):
    """Why each question is turned away, and what the pool then holds; a restored pool turns all of them away."""
    pool = QuestionPool()
    questions = [
        Question(entry) if isinstance(entry, str) else Question(entry[0], unique_key=entry[1])
        for entry in entries
    ]
    reasons = [pool.add(question) for question in questions]
    for reason in drops:
        pool.drop(reason)
    again = restored(pool)
    assert all(again.add(question) for question in questions)
    texts = [question.text for question in pool.questions]
    # As it was when tasks of a step that begins early were drawn.
    earlier = pool.earlier(1, {})
    assert [question.text for question in earlier.questions] == texts[:1] and not earlier.drops
    batch = [question.text for question in pool.batch(0, 0, 0, 4)]
    return f'{reasons}; {texts}, {dict(pool.drops)}; batch of four: {batch}'


def test_what_is_taken_and_turned_away():
    check_table(pathlib.Path(__file__).parent / 'question_pool.txt', {'pooled': pooled})


def test_a_batch_is_a_function_of_where_it_begins():
    """How epochs follow each other is tested in test_inputs.py."""
    pool, again = QuestionPool(), QuestionPool()
    for number in range(10):
        pool.add(Question(f'What is number {number}?'))
        again.add(Question(f'What is number {number}?'))
    later = pool.batch(1, 2, 12, 4)
    assert later == again.batch(1, 2, 12, 4) != pool.batch(1, 2, 16, 4)
