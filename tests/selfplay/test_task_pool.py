"""The pool: no repeats, every drop counted, batches that are a function of their number, a state that survives JSON."""

import collections
import json

from zeroplay_jax.selfplay.schedule import TaskPool
from zeroplay_jax.types import Question


def filled(n=10):
    pool = TaskPool()
    for i in range(n):
        assert pool.add(Question(f'What is number {i}?', (str(i),))) is None
    return pool


def test_repeats_are_turned_away_and_counted():
    pool = filled(3)
    assert pool.add(Question('what is   NUMBER 1', ('x',))) == 'duplicate'
    pool.drop('unparsable')
    assert len(pool.questions) == 3 and pool.drops == {'duplicate': 1, 'unparsable': 1}


def test_of_one_document_the_first_task_is_taken():
    pool = TaskPool()
    ask = lambda text, document: pool.add(Question(text, unique_key=document))
    assert [
        ask('Describe Rome.', 'a'),
        ask('Describe its founder.', 'a'),
        ask('Describe Paris.', 'b'),
    ] == [
        None,
        'document_taken',
        None,
    ]
    assert pool.drops == {'document_taken': 1}
    again = TaskPool()
    again.restore(json.loads(json.dumps(pool.state())))
    assert again.add(Question('Plan a visit.', unique_key='b')) == 'document_taken'


def test_every_question_comes_once_per_round():
    pool = filled(10)
    seen = [q.text for step in range(5) for q in pool.batch(0, 0, 4 * step, 4)]
    for start in (0, 10):
        assert len(set(seen[start : start + 10])) == 10
    assert seen[:10] != seen[10:]


def test_a_batch_is_a_function_of_where_it_begins():
    pool = filled(10)
    later = pool.batch(1, 2, 12, 4)
    assert later == filled(10).batch(1, 2, 12, 4) != pool.batch(1, 2, 16, 4)
    assert collections.Counter(q.text for q in pool.batch(0, 0, 0, 20)).most_common(1)[0][1] == 2


def test_an_empty_pool_gives_nothing():
    assert TaskPool().batch(0, 0, 0, 4) == []


def test_state_survives_json():
    pool = filled(4)
    pool.drop('ungrounded')
    again = TaskPool()
    again.restore(json.loads(json.dumps(pool.state())))
    assert again.state() == pool.state() and again.batch(0, 0, 3, 3) == pool.batch(0, 0, 3, 3)
    assert again.add(pool.questions[0]) == 'duplicate'
