"""Question files in the forms of others: answers in any of their shapes, files of any kind, composed characters."""

import json
import pathlib

import pytest
from input_files import write
from refused_calls import check_table

from zeroplay_jax.data import files
from zeroplay_jax.extras.inputs import __main__ as command
from zeroplay_jax.objectives import answers as scores
from zeroplay_jax.types import UserError

FOLDER = pathlib.Path(__file__).parent
REQUIREMENT = (
    'every line must be a JSON object with "question" and "answers" (a text or list of texts)'
)


def test_answers_are_read_or_refused_as_the_table_says(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(files, 'warn_once', warnings.append)

    def answers(fields):
        warnings.clear()
        try:
            (question,) = files.questions(write(tmp_path / 'q.jsonl', {'question': 'Q'} | fields))
        except UserError as error:
            return str(error).replace(REQUIREMENT, '…')
        return f'{list(question.answers)}{", with a warning" * len(warnings)}'

    check_table(FOLDER / 'question_forms.txt', {'answers': answers}, tmp_path)


def test_one_question_is_known_in_its_spellings():
    is_same = lambda one, other: files.question_key(one) == files.question_key(other)
    check_table(FOLDER / 'same_questions.txt', {'is_same': is_same})


def test_one_list_is_read_as_lines_are(tmp_path):
    """HotpotQA and 2WikiMultihopQA are published so."""
    records = [{'_id': str(n), 'question': f'Which {n}?', 'answer': str(n)} for n in (1, 2)]
    (tmp_path / 'q.json').write_text(json.dumps(records, indent=1))
    read = files.questions(str(tmp_path / 'q.json'))
    assert [(one.text, one.answers) for one in read] == [('Which 1?', ('1',)), ('Which 2?', ('2',))]


def test_questions_without_an_answer_are_left_out_and_held_out(tmp_path, capsys):
    unanswerable = {'question': 'Which town not?', 'answers': [], 'is_impossible': True}
    path = write(tmp_path / 'q.jsonl', unanswerable, {'question': 'Which?', 'answer': 'Lomi'})
    assert [question.text for question in files.questions(path)] == ['Which?']
    assert 'left out questions that have no answer: 1' in capsys.readouterr().err
    held_out = write(tmp_path / 'h.jsonl', unanswerable | {'question': 'which'})
    out = str(tmp_path / 'out.jsonl')
    assert command.main(['questions', '--sets', path, '--not-in', held_out, '--out', out]) == 2
    assert '1 held_out' in capsys.readouterr().err


def test_questions_in_parquet(tmp_path):
    pyarrow = pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    path = str(tmp_path / 'q.parquet')
    rows = [
        {'question': 'Which town?', 'answers': {'text': ['Lomi'], 'answer_start': [3]}, 'hops': 2},
        {'question': 'Which hill?', 'answers': {'text': [], 'answer_start': []}, 'hops': None},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (question,) = files.questions(path)
    assert (question.text, question.answers, question.hops) == ('Which town?', ('Lomi',), 2)


def test_numbers_of_a_table_are_texts(tmp_path):
    rows = ['question\tanswers\tanswer_aliases\thops', 'When?\t1912.0\t12.0\t2']
    rows += ['Who?\t007\t\t3.0', 'Which?\t"[""Lomi"", ""Lomi city""]"\t\t']
    (tmp_path / 'q.tsv').write_text('\r\n'.join(rows))
    read = [(one.answers, one.hops) for one in files.questions(str(tmp_path / 'q.tsv'))]
    years = ('1912', '1912.0', '12', '12.0')
    assert read == [(years, 2), (('007',), 3), (('Lomi', 'Lomi city'), 0)]


def test_composed_and_decomposed_characters_are_equal():
    composed, decomposed = 'Café Zoë', 'Cafe\u0301 Zoe\u0308'
    for one, other in ((composed, decomposed), (decomposed, composed)):
        assert scores.exact_match(one, [other]) and scores.f1(one, [other]) == 1
    assert not scores.exact_match('Cafe', [composed])


def test_repeated_questions_are_counted(tmp_path, capsys):
    lines = [{'question': 'When was it?', 'answers': years} for years in (['1912', 'x'], ['1950'])]
    path = write(tmp_path / 'q.jsonl', *lines, {'question': 'when was it', 'answers': ['X']})
    assert len(files.questions(path)) == 3
    said = f"{path}: 2 lines repeat an earlier question (the first: line 2, 'When was it?')"
    assert said in capsys.readouterr().err
    assert command.main(['questions', '--sets', path, f'--out={tmp_path / "out.jsonl"}']) == 0
    report = capsys.readouterr().out
    assert f"_other_answers (the first: {path}, line 2, 'When was it?')" in report
