"""Question files in the forms of others: answers in any of their shapes, files of any kind, composed characters."""

import datetime
import decimal
import json
import math
import pathlib

import pytest
from input_files import write

from zeroplay_jax.data import files
from zeroplay_jax.extras.inputs import __main__ as command
from zeroplay_jax.objectives import answers as scores
from zeroplay_jax.types import UserError

# Name, fields of a line besides the question, and the accepted answers or what is said.
FORMS = json.loads((pathlib.Path(__file__).parent / 'question_forms.json').read_text('utf-8'))


def third_14(form):
    name, *case = form
    return pytest.param(*case, id=name, marks=pytest.mark.fault('third-14', name))


@pytest.mark.parametrize(('fields', 'expected'), list(map(third_14, FORMS['right'])))
def test_answers_of_public_sets(tmp_path, fields, expected):
    (question,) = files.questions(write(tmp_path / 'q.jsonl', {'question': 'Which town?'} | fields))
    assert list(question.answers) == expected


@pytest.mark.parametrize(('document', 'kept'), [('Lomi', {'document': 'Lomi'}), ('Lomi ' * 99, {})])
def test_an_article_in_the_field_document_is_no_provenance(tmp_path, document, kept):
    line = {'question': 'Which town?', 'answer': 'Lomi', 'document': document}
    (question,) = files.questions(write(tmp_path / 'q.jsonl', line))
    assert question.origin == kept


@pytest.mark.parametrize('indent', [None, 1])
def test_one_list_is_read_as_lines_are(tmp_path, indent):
    """HotpotQA and 2WikiMultihopQA are published so."""
    beside = {'supporting_facts': [['Ada', 0]], 'context': [['Ada', ['A sentence. 😀']]]}
    records = [
        {'_id': str(n), 'question': f'Which {n}?', 'answer': str(n)} | beside for n in (1, 2)
    ]
    (tmp_path / 'q.json').write_text(json.dumps(records, indent=indent))
    read = files.questions(str(tmp_path / 'q.json'))
    assert [(one.text, one.answers) for one in read] == [('Which 1?', ('1',)), ('Which 2?', ('2',))]


@pytest.mark.parametrize(('fields', 'problem'), list(map(third_14, FORMS['two meanings'])))
def test_what_may_mean_two_things_is_refused(tmp_path, fields, problem):
    with pytest.raises(UserError, match=rf'q.jsonl, line 1: .*{problem}'):
        files.questions(write(tmp_path / 'q.jsonl', {'question': 'Which town?'} | fields))


@pytest.mark.parametrize('fields', FORMS['no answer'])
@pytest.mark.fault('third-14', 'questions without an answer')
def test_questions_without_an_answer_are_left_out_and_counted(tmp_path, fields, capsys):
    unanswerable = {'question': 'Which town not?'} | fields
    path = write(
        tmp_path / 'q.jsonl',
        unanswerable,
        {'question': 'Which town?', 'answer': 'Lomi'},
        unanswerable,
    )
    assert [question.text for question in files.questions(path)] == ['Which town?']
    files.questions(path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f'warning: {path}: left out questions that have no answer: 2'
    # Their texts count where questions are held out.
    out = tmp_path / 'out.jsonl'
    held_out = write(tmp_path / 'h.jsonl', {'question': 'Which town?'} | fields)
    assert command.main(['questions', '--sets', path, '--not-in', held_out, '--out', str(out)]) == 2
    assert '1 held_out' in capsys.readouterr().err
    with pytest.raises(UserError, match='holds 1 questions without an answer and no other'):
        files.questions(write(tmp_path / 'none.jsonl', unanswerable))


@pytest.mark.fault('F7', 'questions in Parquet')
def test_questions_in_parquet(tmp_path):
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
    with pytest.raises(UserError, match=r'q.jsonl, line 1: .*not JSON'):
        files.questions(str(renamed))


@pytest.mark.fault('user-x2', 'floats of 32 bits in Parquet')
def test_floats_of_32_bits_keep_their_decimals(tmp_path):
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    path = tmp_path / 'q.parquet'
    numbers = pyarrow.array([2.3, 1912.0], pyarrow.float32())
    lists = pyarrow.array([[2.3], [1912.0]], pyarrow.list_(pyarrow.float32()))
    objects = pyarrow.array(
        [{'value': 2.3}, {'value': 1912.0}], pyarrow.struct({'value': 'float32'})
    )
    wide = pyarrow.struct({'value': 'float64', 'score': 'float32'})
    beside = pyarrow.array([{'value': 2.3, 'score': 1.1}, {'value': 1912.0, 'score': 0.1}], wide)
    for answers in (numbers, lists, objects, beside):
        parquet.write_table(pyarrow.table({'question': ['a', 'b'], 'answer': answers}), path)
        read = [question.answers for question in files.questions(str(path))]
        assert read == [('2.3',), ('1912', '1912.0')]


@pytest.mark.parametrize(
    'number', [3.141592653589793, 1699999999.123, 0.1, 2.30078125, 1e300, 1 / 3]
)
def test_other_numbers_keep_all_their_digits(tmp_path, number):
    (question,) = files.questions(write(tmp_path / 'q.jsonl', {'question': 'Q', 'answer': number}))
    assert question.answers[-1] == str(number)


@pytest.mark.parametrize(
    ('value', 'words'),
    [
        (datetime.date(1999, 1, 2), 'is the date 1999-01-02, not a text'),
        (decimal.Decimal('1.50'), 'is the Decimal 1.50, not a text'),
        (math.nan, 'is the number nan, not a text'),
        (None, 'has no value; .*dropna'),
    ],
)
@pytest.mark.fault('user-x17', 'a date, a decimal, NaN and null as answers in Parquet')
def test_values_of_tables_that_are_no_text_are_shown(tmp_path, value, words):
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    path = tmp_path / 'q.parquet'
    parquet.write_table(pyarrow.Table.from_pylist([{'question': 'Who?', 'answer': value}]), path)
    with pytest.raises(UserError, match=rf'q.parquet, row 1: every row .*"answer" {words}'):
        files.questions(str(path))


def test_questions_in_a_table(tmp_path):
    (tmp_path / 'q.tsv').write_bytes(
        b'question\tanswers\r\nWhich town?\t"[""Lomi"", ""Lomi city""]"\r\n'
    )
    (question,) = files.questions(str(tmp_path / 'q.tsv'))
    assert question.answers == ('Lomi', 'Lomi city')


@pytest.mark.fault('third-24', 'the answer é as two characters')
def test_composed_and_decomposed_characters_are_equal():
    composed, decomposed = 'Café Zoë', 'Cafe\u0301 Zoe\u0308'
    for one, other in ((composed, decomposed), (decomposed, composed)):
        assert scores.exact_match(one, [other]) and scores.sub_exact_match(
            f'in the {one}.', [other]
        )
        assert scores.f1(one, [other]) == 1
    # Marks that no letter is composed with stay, as do other forms of compatible characters.
    assert not scores.exact_match('Cafe', [composed]) and not scores.exact_match('ﬁ', ['fi'])
    assert scores.exact_match('\u0301', ['\u0301']) and not scores.exact_match('\u0301', ['?'])


@pytest.mark.fault('third-24', '--not-in and duplicates in another Unicode form')
def test_questions_in_another_unicode_form_are_the_same(tmp_path, capsys):
    texts = ('Where is the Café?', 'Where is the Cafe\u0301?', 'Who is Zoe\u0308?', 'Who is Ann?')
    path = write(tmp_path / 'q.jsonl', *({'question': text, 'answer': 'x'} for text in texts))
    held_out = write(tmp_path / 'h.jsonl', {'question': 'Who is Zoë?'})
    out = str(tmp_path / 'out.jsonl')
    assert command.main(['questions', '--sets', path, '--not-in', held_out, '--out', out]) == 0
    report = capsys.readouterr().out
    assert '1 duplicate (' in report and ', 1 held_out (' in report


# Held-out question, training question, and whether they are the same.
PAIRS = [
    ('What is C made of?', 'What is C++ made of?', False),
    ('What is C?', 'What is C#?', False),
    ('What is 3.5 + 1?', 'What is 35 + 1?', False),
    ('Is 3.5 more than 35?', 'Is 35 more than 3.5?', False),
    ('What is -5 + 3?', 'What is 5 + 3?', False),
    ('What is 5! + 1?', 'What is 5 + 1?', False),
    ("What does ';' mean?", "What does ':' mean?", False),
    ("What is f'(x)?", 'What is f(x)?', False),
    ('Who wrote “Hamlet”?', "who wrote 'HAMLET'", True),
    ('Who wrote Hamlet, in  1600?', 'Who wrote Hamlet in 1600 ?', True),
    ('Who was J. K. Rowling’s  son?', "Who was J K Rowling's son.", True),
]


# Spellings of one question in data sets, other than those of `PAIRS`.
SPELLINGS = {
    'zero width': 'Who founded the ci\u200bty of Zürich?',
    'soft hyphen': 'Who founded the ci\u00adty of Zürich?',
    'direction': '\u200eWho founded the city of Zürich?\u200e',
    'byte order mark': '\ufeffWho founded the city of Zürich?',
    'HTML': 'Who founded the city of Z&uuml;rich?',
    'HTML by number': 'Who founded the city of Z&#252;rich?',
    'HTML twice': 'Who&amp;nbsp;founded the city of Z&amp;uuml;rich?',
}


@pytest.mark.parametrize(
    'spelling',
    [pytest.param(s, marks=pytest.mark.fault('nov29-B9', f'--not-in: {s}')) for s in SPELLINGS],
)
def test_held_out_questions_are_recognised_in_other_spellings(spelling, tmp_path, capsys):
    held_out = write(tmp_path / 'h.jsonl', {'question': 'Who founded the city of Zürich?'})
    lines = [{'question': q, 'answer': 'x'} for q in ('Who founded Bern?', SPELLINGS[spelling])]
    path = write(tmp_path / 'q.jsonl', *lines)
    out = str(tmp_path / 'out.jsonl')
    assert command.main(['questions', '--sets', path, '--not-in', held_out, '--out', out]) == 0
    report = capsys.readouterr().out
    assert ' 1 held_out (' in report


@pytest.mark.parametrize(('held_out', 'question', 'is_same'), PAIRS)
@pytest.mark.fault('user-x1', 'questions that differ in their marks alone')
def test_marks_that_change_a_question_tell_questions_apart(
    held_out, question, is_same, tmp_path, capsys
):
    path = write(tmp_path / 'q.jsonl', *({'question': q, 'answer': 'x'} for q in ('b?', question)))
    held_out = write(tmp_path / 'h.jsonl', {'question': held_out})
    out = str(tmp_path / 'out.jsonl')
    assert command.main(['questions', '--sets', path, '--not-in', held_out, '--out', out]) == 0
    report = capsys.readouterr().out
    assert (f'left out: 1 held_out (the first: {path}, line 2, ' in report) is is_same


@pytest.mark.fault('user-x1', 'one question with two answers')
def test_one_question_with_other_answers_is_said(tmp_path, capsys):
    lines = [{'question': 'When was it?', 'answers': years} for years in (['1912', 'x'], ['1950'])]
    lines.append({'question': 'when was it', 'answers': ['X']})
    path = write(tmp_path / 'q.jsonl', *lines)
    assert command.main(['questions', '--sets', path, f'--out={tmp_path / "out.jsonl"}']) == 0
    report = capsys.readouterr().out
    assert f"1 duplicate (the first: {path}, line 3, 'when was it'), 1 duplicate_with_" in report
    assert f"_other_answers (the first: {path}, line 2, 'When was it?')" in report


@pytest.mark.parametrize(('fields', 'problem'), FORMS['no policy could give'])
@pytest.mark.fault(
    'kin-answers', 'an answer that names a choice (MMLU, RACE, ARC), or a worked solution'
)
def test_answers_that_no_policy_could_give_are_refused(fields, problem, tmp_path):
    path = write(tmp_path / 'set.jsonl', {'question': 'Who?', **fields})
    with pytest.raises(UserError) as refusal:
        files.questions(path)
    assert problem in str(refusal.value)


@pytest.mark.fault('user-x19', 'answers with references of HTML')
def test_references_of_html_are_said_once(tmp_path, capsys):
    texts = ('AT&amp;T', '&#39;Til', 'R&D; x', 'a')
    path = write(tmp_path / 'q.jsonl', *({'question': text, 'answer': text} for text in texts))
    assert [question.answers for question in files.questions(path)] == [(text,) for text in texts]
    (line,) = capsys.readouterr().err.splitlines()
    assert f'{path}: answers have references of HTML such as &amp;' in line


@pytest.mark.parametrize(
    'answer',
    [
        '<answer>a</answer>',
        '\\boxed{4}',
        'Ã©tÃ©',
        'l’Ã©',
        'â€œyesâ€\x9d',
        'ete\ufffd',
        'nan',
        'Jane Aus\u00adten',
        '\u200bJane',
    ],
)
@pytest.mark.fault('user-43', 'answers of a wrong encoding, or nan')
def test_answers_that_a_conversion_damaged_are_said(answer, tmp_path, capsys):
    path = write(tmp_path / 'q.jsonl', {'question': 'Q', 'answer': answer})
    files.questions(path)
    (line,) = capsys.readouterr().err.splitlines()
    assert f'{path}: answers have' in line


@pytest.mark.parametrize('answer', ['été', 'São Paulo', 'SÃO', 'Nan', 'Nan Goldin', '“yes”', 'Â'])
def test_answers_that_look_damaged_and_are_not(answer, tmp_path, capsys):
    files.questions(write(tmp_path / 'q.jsonl', {'question': 'Q', 'answer': answer}))
    assert not capsys.readouterr().err


@pytest.mark.fault('user-43', 'one line for each answer of a question')
def test_repeated_questions_are_counted(tmp_path, capsys):
    lines = [{'question': 'Who?', 'answer': name} for name in ('Ann', 'Anna', 'A.')]
    lines += [{'question': 'Where?', 'answer': 'here'}, {'question': 'where', 'answer': 'there'}]
    path = write(tmp_path / 'q.jsonl', *lines)
    assert len(files.questions(path)) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: 3 lines repeat an earlier question (the first: line 2, 'Who?')" in line


def test_numbers_of_a_table_are_texts(tmp_path):
    rows = ['question\tanswer\tanswer_aliases\thops', 'When?\t1912.0\t12.0\t2', 'Who?\t007\t\t3.0']
    rows += [f'How many?\t{"9" * 25}.0\t\t']
    (tmp_path / 'q.tsv').write_text('\n'.join(rows))
    when, who, many = files.questions(str(tmp_path / 'q.tsv'))
    assert (when.answers, when.hops) == (('1912', '1912.0', '12', '12.0'), 2)
    assert (who.answers, who.hops) == (('007',), 3)
    assert many.hops == 0 and many.answers == ('9' * 25, '9' * 25 + '.0')


def test_a_text_of_json_is_the_answer_as_it_is_written(tmp_path):
    """Exact match after SQuAD does not hold "4" equal to "4.0"."""
    lines = [{'question': 'Which?', 'answer': answer} for answer in ('4.0', ['4.0'], 4.0)]
    loaded = files.questions(write(tmp_path / 'q.jsonl', *lines))
    assert [question.answers for question in loaded] == [('4.0',), ('4.0',), ('4', '4.0')]
