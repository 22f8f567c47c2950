"""What games start from: hop counts in the exact ratio, endless decks, files in any of the usual forms."""

import collections
import json

import pytest

from configs import common
from zeroplay_jax.selfplay import files, inputs
from zeroplay_jax.selfplay.corpus import Corpus
from zeroplay_jax.types import UserError


def test_a_deck_deals_every_item_once_a_round_and_is_a_function_of_the_place():
    deck = inputs.Deck([{'n': i} for i in range(7)], seed=3)
    dealt = [item['n'] for item in deck.deal(0, 21)]
    assert all(sorted(dealt[i : i + 7]) == list(range(7)) for i in (0, 7, 14)) and dealt[:7] != dealt[7:14]
    assert [item['n'] for item in inputs.Deck([{'n': i} for i in range(7)], seed=3).deal(5, 6)] == dealt[5:11]


@pytest.mark.parametrize(
    'record',
    [
        {'answers': ['Lomi', 'Lomi city']},
        {'golden_answers': ['Lomi', 'Lomi city']},
        {'answer': 'Lomi'},
        {'target': ['Lomi']},
        {'answers': {'target': ['Lomi']}},
    ],
)
def test_gold_answers_become_a_list_of_texts(record):
    assert files.gold(record)[0] == 'Lomi' and isinstance(files.gold(record), list)


@pytest.mark.parametrize('record', [{}, {'answer': ''}, {'answers': []}, {'answers': [1]}, {'answer': None}])
def test_a_line_without_an_answer_is_refused(record):
    with pytest.raises(ValueError, match='no answers'):
        files.gold(record)


def write(path, *lines):
    path.write_text('\n'.join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_questions_of_a_file(tmp_path):
    config = common.get_config()
    lines = [{'question': 'Who?', 'golden_answers': ['A']}, {'question': 'Where?', 'answer': 'B', 'hops': 2}]
    config.inputs.questions = write(tmp_path / 'q.jsonl', *lines, '')
    assert inputs.questions(config, None) == [
        {'question': 'Who?', 'answers': ['A'], 'hops': 1},
        {'question': 'Where?', 'answers': ['B'], 'hops': 2},
    ]


@pytest.mark.parametrize(
    'line', ['{"question": "x"', '[1]', '{"answer": "x"}', '{"question": 3, "answer": "x"}', '"x"']
)
def test_a_bad_line_is_named(tmp_path, line):
    path = write(tmp_path / 'q.jsonl', {'question': 'Who?', 'answer': 'A'}, line)
    with pytest.raises(UserError, match=r'q\.jsonl, line 2: every line must be'):
        files.read_lines(path, 'question')


def test_an_empty_or_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match='holds no line'):
        files.read_lines(write(tmp_path / 'q.jsonl', ''), 'question')
    with pytest.raises(UserError, match='cannot be read'):
        files.read_lines(str(tmp_path / 'none.jsonl'))


def test_answers_get_hop_counts_in_the_exact_ratio():
    config = common.get_config()
    config.schedule.hop_ratio = (4, 3, 2)
    corpus = Corpus(None, None, (), (), 3, answers=tuple(f'a{i}' for i in range(18)))
    dealt = inputs.answers(config, corpus)
    assert collections.Counter(item['hops'] for item in dealt) == {1: 8, 2: 6, 3: 4}
    assert [item['answer'] for item in dealt] == list(corpus.answers)


def test_given_tasks_have_rubrics(tmp_path):
    path = write(tmp_path / 't.jsonl', {'task': 'Describe Lomi.', 'rubrics': ['Name the river.', 'Name the mayor.']})
    (item,) = inputs.given_tasks(path)
    assert item['question'] == 'Describe Lomi.' and [r['text'] for r in item['rubrics']][1] == 'Name the mayor.'
    for bad in ({'task': 'x'}, {'task': 'x', 'rubrics': []}, {'task': 'x', 'rubrics': ['']}, {'rubrics': ['a']}):
        with pytest.raises(UserError, match=r't\.jsonl'):
            inputs.given_tasks(write(tmp_path / 't.jsonl', bad))


def test_documents_come_in_the_exact_ratio_and_each_once():
    from zeroplay_jax.selfplay.corpus import Document
    from zeroplay_jax.selfplay.engine import Phase, Step

    config = common.get_config()
    documents = tuple(Document(f'd{i}', 'text', 1 + i % 4) for i in range(80))
    drawn = inputs.Documents(config, Corpus(None, None, documents, (), 3)).tasks(Step(Phase('proposer', 1), 0, 5), 20)
    assert collections.Counter(t.payload['hops'] for t in drawn) == {1: 8, 2: 6, 3: 4, 4: 2}
    assert len({t.payload['title'] for t in drawn}) == 20
