"""Question files in the forms of others: answers in any of their shapes, files of any kind, composed characters."""

import json
import logging

import pytest

from zeroplay_jax import inputs as command
from zeroplay_jax.data import files
from zeroplay_jax.objectives import answers as scores
from zeroplay_jax.types import UserError

# Name → (fields of a line besides the question, accepted answers).
FORMS = {
    'one text': ({'answer': 'Lomi'}, ['Lomi']),
    'a list': ({'golden_answers': ['Lomi', 'Lomi city']}, ['Lomi', 'Lomi city']),
    'NQ-open': ({'answer': ['Lomi', 'Lomi city']}, ['Lomi', 'Lomi city']),
    'SQuAD': (
        {'answers': {'text': ['Lomi', 'Lomi city'], 'answer_start': [3, 3]}},
        ['Lomi', 'Lomi city'],
    ),
    'SQuAD as objects': ({'answers': [{'text': 'Lomi', 'answer_start': 3}]}, ['Lomi']),
    'TriviaQA': (
        {
            'answer': {
                'value': 'Lomi',
                'aliases': ['LOMI', 'Lomi city'],
                'normalized_aliases': ['lomi', 'lomi town'],
            }
        },
        ['Lomi', 'Lomi city', 'lomi town'],
    ),
    'MuSiQue': (
        {'answer': 'Lomi', 'answer_aliases': ['Lomi city', ''], 'answerable': True},
        ['Lomi', 'Lomi city'],
    ),
    'verl': ({'reward_model': {'ground_truth': {'target': ['Lomi']}}}, ['Lomi']),
    'a JSON list as text': ({'answers': '["Lomi", "Lomi city"]'}, ['Lomi', 'Lomi city']),
    'a Python list as text': (
        {'answer': """['Lomi', "Lomi's", 'a \\'b\\' \\xe9']"""},
        ['Lomi', "Lomi's", "a 'b' é"],
    ),
    'PopQA': ({'possible_answers': '["Lomi", "Lomi city"]', 'obj': 'Lomi'}, ['Lomi', 'Lomi city']),
    'a number': ({'answer': 1912}, ['1912']),
    'a number of a table': ({'answer': 1912.0}, ['1912', '1912.0']),
    'numbers in a list': ({'answers': [3, 4.5]}, ['3', '4.5']),
    'true': ({'answer': True}, ['yes', 'true']),
    'brackets that are no list': ({'answer': '[sic]'}, ['[sic]']),
    'brackets in a list': (
        {'answers': ['[0, 1]', "['Til Tuesday]", '["Weird Al" Yankovic]']},
        ['[0, 1]', "['Til Tuesday]", '["Weird Al" Yankovic]'],
    ),
    'a list as text in a list': ({'answers': ['["Lomi", "Lomi city"]']}, ['Lomi', 'Lomi city']),
    'a number that is the text of a choice': (
        {'answer': '7', 'choices': [{'label': 'A', 'text': '7'}, {'label': 'B', 'text': '9'}]},
        ['7'],
    ),
    'answerable of a table': ({'answer': 'Lomi', 'answerable': 1.0}, ['Lomi']),
    'SQuAD as JSON in a text': (
        {'answers': '{"text": ["Lomi", "Lomi city"], "answer_start": [1, 2]}'},
        ['Lomi', 'Lomi city'],
    ),
    'SQuAD as Python prints it': (
        {'answers': """{'text': ['Lomi', "Lomi's"], 'answer_start': [1, 2], 'id': None}"""},
        ['Lomi', "Lomi's"],
    ),
    'SQuAD as pandas prints it': (
        {
            'answers': "{'text': array(['Lomi', 'Lomi city'], dtype=object), 'answer_start': array([1], dtype=int32)}"
        },
        ['Lomi', 'Lomi city'],
    ),
    'TriviaQA as a text': (
        {'answer': "{'value': 'Lomi', 'aliases': ['Lomi city']}"},
        ['Lomi', 'Lomi city'],
    ),
    'verl as a text': ({'reward_model': "{'ground_truth': {'target': ['Lomi']}}"}, ['Lomi']),
    'an object as text in a list': ({'answers': ["{'text': 'Lomi'}"]}, ['Lomi']),
    'a NumPy array with commas': (
        {'answer': "array(['Lomi', 'Lomi city'],\n      dtype=object)"},
        ['Lomi', 'Lomi city'],
    ),
    'a NumPy array of short texts': ({'answer': "array(['Lomi'], dtype='<U4')"}, ['Lomi']),
    'a tuple': ({'answer': "('Lomi', 'None (city)',)"}, ['Lomi', 'None (city)']),
    'braces and brackets of formulas': (
        {'answers': ['{1, 2}', '(1, 2)', '(sic)', '{x | x > 0}']},
        ['{1, 2}', '(1, 2)', '(sic)', '{x | x > 0}'],
    ),
    'code in a list': ({'answers': ['{"a": 1}', 'x']}, ['{"a": 1}', 'x']),
    'an apostrophe in brackets': ({'answer': "('Til Tuesday)"}, ["('Til Tuesday)"]),
    'one annotator without an answer': ({'answers': ['CANNOTANSWER', 'Lomi']}, ['Lomi']),
    'a pair of numbers': ({'answer': '(1, 2)'}, ['(1, 2)']),
    'True of a table': ({'answer': 'True'}, ['True', 'yes']),
    'FALSE of a table': ({'answer': 'FALSE'}, ['FALSE', 'no']),
    'True among names': ({'answers': ['True', 'Spandau']}, ['True', 'Spandau']),
    'null beside answers': ({'answers': None, 'answer': 'Lomi', 'hops': None}, ['Lomi']),
}


def write(path, *records):
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))
    return str(path)


@pytest.mark.parametrize(
    'name', [pytest.param(form, marks=pytest.mark.fault('third-14', form)) for form in FORMS]
)
def test_answers_of_public_sets(tmp_path, name, user_reads):
    fields, expected = FORMS[name]
    (question,) = files.questions(write(tmp_path / 'q.jsonl', {'question': 'Which town?'} | fields))
    assert list(question.answers) == expected
    user_reads(f'right: {expected}')


REFUSED = {
    'a list of numbers as text': ({'answer': '[1912, 1913]'}, 'may be meant as a list'),
    'a NumPy array in a list': ({'answers': ["['a' 'b']"]}, 'may be meant as a list'),
    'a NumPy array as text': ({'answer': "['a' 'b']"}, 'may be meant as a list'),
    'a set of Python': ({'answer': "{'a', 'b'}"}, 'may be meant as a list'),
    'a NumPy array of one text': ({'answer': "array('a', dtype='<U1')"}, 'may be meant as a list'),
    'a broken object as text': ({'answer': "{'text': ['a' 'b']}"}, 'may be meant as a list'),
    'a broken object in a list': ({'answers': ["{'text': ['a' 'b']}"]}, 'may be meant as a list'),
    'an object of another form as text': (
        {'answer': "{'name': 'Lomi'}"},
        'an object without target, ground_truth, value',
    ),
    'an empty list as text': ({'answer': '[]'}, '"answer" has no answer'),
    'an object of another form': (
        {'answer': {'name': 'Lomi'}},
        'an object without target, ground_truth, value',
    ),
    'an empty list of SQuAD': ({'answers': {'text': []}}, '"answers" has no answer'),
    'a text as answerable': (
        {'answer': 'Lomi', 'answerable': 'maybe'},
        '"answerable" is .maybe., not true or false',
    ),
}


@pytest.mark.parametrize(
    'name', [pytest.param(form, marks=pytest.mark.fault('third-14', form)) for form in REFUSED]
)
def test_what_may_mean_two_things_is_refused(tmp_path, name, user_reads):
    fields, problem = REFUSED[name]
    with pytest.raises(UserError, match=rf'q.jsonl, line 1: .*{problem}') as refusal:
        files.questions(write(tmp_path / 'q.jsonl', {'question': 'Which town?'} | fields))
    user_reads(refusal.value)


@pytest.mark.parametrize(
    'fields',
    [
        {'answer': 'Lomi', 'answerable': False},
        {'answers': [], 'is_impossible': True},
        {'answers': {'text': [], 'answer_start': []}},
        {'answer': 'Lomi', 'answerable': 'False'},
        {'answers': "{'text': array([], dtype=object), 'answer_start': array([], dtype=int32)}"},
        {'answers': ['No Answer Present.']},
        {'answers': "['No Answer Present.']"},
        {'answer': 'CANNOTANSWER'},
        {'answer': {'text': 'CANNOTANSWER', 'answer_start': 9}},
        {'answer': {'value': 'CANNOTANSWER'}},
        {'answer': {'target': ['No Answer Present.']}},
        {'reward_model': "{'ground_truth': {'target': ['No Answer Present.']}}"},
    ],
)
@pytest.mark.fault('third-14', 'questions without an answer')
def test_questions_without_an_answer_are_left_out_and_counted(
    tmp_path, fields, caplog, user_reads, capsys
):
    unanswerable = {'question': 'Which town not?'} | fields
    path = write(
        tmp_path / 'q.jsonl',
        unanswerable,
        {'question': 'Which town?', 'answer': 'Lomi'},
        unanswerable,
    )
    with caplog.at_level(logging.WARNING):
        assert [question.text for question in files.questions(path)] == ['Which town?']
        files.questions(path)
    (record,) = caplog.records
    assert record.message == f'{path}: left out 2 questions that have no answer'
    user_reads(record.message)
    # Their texts count where questions are held out.
    out = tmp_path / 'out.jsonl'
    held_out = write(tmp_path / 'h.jsonl', {'question': 'Which town?'} | fields)
    assert command.main(['questions', '--sets', path, '--not-in', held_out, '--out', str(out)]) == 2
    assert '1 held_out' in capsys.readouterr().err
    with pytest.raises(UserError, match='holds 1 questions without an answer and no other'):
        files.questions(write(tmp_path / 'none.jsonl', unanswerable))


@pytest.mark.fault('F7', 'questions in Parquet')
def test_questions_in_parquet(tmp_path, user_reads):
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    rows = [
        {'question': 'Which town?', 'answers': {'text': ['Lomi'], 'answer_start': [3]}, 'hops': 2},
        {
            'question': 'Which river?',
            'answers': {'text': ['Gumu'], 'answer_start': [4]},
            'hops': None,
        },
        {'question': 'Which hill?', 'answers': {'text': [], 'answer_start': []}, 'hops': None},
    ]
    path = tmp_path / 'q.parquet'
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    questions = files.questions(str(path))
    assert [(q.text, q.answers, q.hops) for q in questions] == [
        ('Which town?', ('Lomi',), 2),
        ('Which river?', ('Gumu',), 0),
    ]
    renamed = path.rename(tmp_path / 'q.jsonl')
    with pytest.raises(
        UserError, match=r'q.jsonl: it is Parquet, not .*; end its name with .parquet'
    ) as refusal:
        files.questions(str(renamed))
    user_reads(refusal.value)


def test_questions_in_a_table(tmp_path):
    (tmp_path / 'q.tsv').write_bytes(
        b'question\tanswers\r\nWhich town?\t"[""Lomi"", ""Lomi city""]"\r\n'
    )
    (question,) = files.questions(str(tmp_path / 'q.tsv'))
    assert question.answers == ('Lomi', 'Lomi city')


@pytest.mark.fault('third-24', 'the answer é as two characters')
def test_composed_and_decomposed_characters_are_equal(user_reads):
    composed, decomposed = 'Café Zoë', 'Cafe\u0301 Zoe\u0308'
    for one, other in ((composed, decomposed), (decomposed, composed)):
        assert scores.exact_match(one, [other]) and scores.sub_exact_match(
            f'in the {one}.', [other]
        )
        assert scores.f1(one, [other]) == 1
    # Marks that no letter is composed with stay, as do other forms of compatible characters.
    assert not scores.exact_match('Cafe', [composed]) and not scores.exact_match('ﬁ', ['fi'])
    assert scores.exact_match('\u0301', ['\u0301']) and not scores.exact_match('\u0301', ['?'])
    user_reads('right: EM, subEM and F1 are 1')


@pytest.mark.fault('third-24', '--not-in and duplicates in another Unicode form')
def test_questions_in_another_unicode_form_are_the_same(tmp_path, capsys, user_reads):
    texts = ('Where is the Café?', 'Where is the Cafe\u0301?', 'Who is Zoe\u0308?', 'Who is Ann?')
    path = write(tmp_path / 'q.jsonl', *({'question': text, 'answer': 'x'} for text in texts))
    held_out = write(tmp_path / 'h.jsonl', {'question': 'Who is Zoë?'})
    out = str(tmp_path / 'out.jsonl')
    assert command.main(['questions', '--sets', path, '--not-in', held_out, '--out', out]) == 0
    report = capsys.readouterr().out
    assert '1 duplicate, 1 held_out' in report
    user_reads(f'right: {report.strip()}')


@pytest.mark.parametrize(
    ('fields', 'problem'),
    [
        ({'answer': 1, 'choices': ['Lomi', 'Puto']}, '\'1\', which names one of "choices"'),
        ({'answer': 'B', 'options': {'A': 'Lomi', 'B': 'Puto'}}, "'B', which names one of"),
        ({'answer': 'A', 'choices': {'label': ['A', 'B'], 'text': ['Lomi', 'Puto']}}, "'A'"),
        ({'answer': '(b)', 'options': 'A) Lomi B) Puto'}, 'write the text of that choice'),
        ({'golden_answers': ['B'], 'metadata': {'choices': ['Lomi', 'Puto']}}, "'B', which names"),
        (
            {'golden_answers': ['B'], 'metadata': '{"choices": ["Lomi", "Puto"]}'},
            "'B', which names",
        ),
        ({'answer': 'B', 'choices': "['Lomi', 'Puto']"}, "'B', which names one of"),
        ({'answer': 'b', 'opa': 'Lomi', 'opb': 'Puto', 'cop': 1}, 'one of "opa, opb"; write'),
        ({'answer': 'B', 'A': 'Lomi', 'B': 'Puto'}, 'one of "A, B"; write'),
        ({'opa': 'Lomi', 'opb': 'Puto', 'cop': 1}, 'no answers; write them into one of'),
        ({'answer': 'Two and one.\n#### 3'}, 'write only the result behind ####'),
    ],
)
@pytest.mark.fault(
    'kin-answers', 'an answer that names a choice (MMLU, RACE, ARC), or a worked solution'
)
def test_answers_that_no_policy_could_give_are_refused(fields, problem, tmp_path, user_reads):
    path = write(tmp_path / 'set.jsonl', {'question': 'Who?', **fields})
    with pytest.raises(UserError) as refusal:
        files.questions(path)
    assert problem in str(refusal.value)
    user_reads(refusal.value)


@pytest.mark.parametrize('answer', ['Puto', '3', 'A'])
def test_the_text_of_a_choice_is_an_answer(answer, tmp_path):
    path = write(
        tmp_path / 'set.jsonl', {'question': 'Q', 'answer': answer, 'choices': ['Puto', '3', 'A']}
    )
    assert files.questions(path)[0].answers == (answer,)
