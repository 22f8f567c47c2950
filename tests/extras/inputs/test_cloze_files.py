"""Held-out questions and training documents of a corpus: no document is in both, every question has one passage."""

import collections
import itertools

import pytest

from zeroplay_jax.data import files
from zeroplay_jax.extras.inputs import __main__ as inputs
from zeroplay_jax.extras.inputs import cloze_files
from zeroplay_jax.extras.inputs.cloze import BLANK
from zeroplay_jax.objectives.answers import normalize_answer
from zeroplay_jax.retrieval.corpus import Record, contents, read, split
from zeroplay_jax.settings.kinds import EXAMPLE_TEXTS
from zeroplay_jax.types import UserError


def build(records, count=240, seed=0, max_documents=1000):
    passages = list(enumerate(records, 1))
    return cloze_files.build(lambda: iter(passages), 'c', count, seed, max_documents)


def towns(count, sentences=3):
    """Documents of one passage with a number of sentences, all different."""
    records = []
    for town in range(count):
        text = ' '.join(
            f'The mayor of the town number {town}x met Person{town}y{number} of the river in the year {1000 + number}.'
            for number in range(sentences)
        )
        records.append(Record(f'p{town}', contents(f'Town {town}', text)))
    return records


def check(built, records):
    """What holds for every split."""
    texts = {record.id: split(record.contents) for record in records}
    lowered = [text.lower() for _, text in texts.values()]
    asked = {question['document_id'] for question in built.questions}
    trained = {document['document_id'] for document in built.documents}
    assert not asked & trained and len(trained) == len(built.documents)
    if built.unit == 'documents':
        name_of = {r.id: r.document or split(r.contents)[0] for r in records}
        assert not {name_of[i] for i in asked} & {name_of[i] for i in trained}
    assert len({question['question'] for question in built.questions}) == len(built.questions)
    for question in built.questions:
        title, text = texts[question['document_id']]
        (answer,) = question['answers']
        sentence = question['question'].replace(BLANK, answer)
        assert sentence in ' '.join(text.split()) and title == question['title']
        assert sum(sentence.lower() in other for other in lowered) == 1
        assert f' {normalize_answer(answer)} ' not in f' {normalize_answer(title)} '
    held_out = {line['document_id'] for line in built.held_out_passages}
    assert asked <= held_out and not held_out & trained
    for document in built.documents:
        assert (document['title'], document['text']) == texts[document['document_id']]
        assert document['hops'] == 1


def test_the_example_texts_give_enough_questions():
    records = [record for _, record in read(EXAMPLE_TEXTS, passage_words=80)]
    built = build(records)
    check(built, records)
    assert len(built.questions) >= 60 and len(built.documents) >= 30
    assert (built.total, built.unit) == (48, 'passages')
    # One question from every document and every passage before a second one from any.
    assert len({question['document'] for question in built.questions[:15]}) == 15
    assert (
        len({question['document_id'] for question in built.questions[: built.held_out]})
        == built.held_out
    )


def test_the_split_is_a_function_of_the_seed_and_the_passages():
    records = towns(100)
    built = build(records, 40)
    assert build(records, 40) == built
    # In another order of the documents the questions are the same.
    reordered = build(records[20:] + records[:20], 40)
    assert {q['question'] for q in reordered.questions} == {q['question'] for q in built.questions}
    assert build(records, 40, seed=1).questions != built.questions


def test_a_larger_count_holds_out_the_same_documents_and_others():
    records = towns(300)
    few, many = build(records, count=30), build(records, count=60)
    check(few, records)
    assert {q['title'] for q in few.questions} < {q['title'] for q in many.questions}
    assert few.held_out == 30 and len(few.questions) == 30


def test_questions_come_from_many_documents_of_a_large_corpus():
    records = []
    for document in range(100):
        for part, record in enumerate(towns(20)):
            text = record.contents.partition('\n')[2].replace('number', f'number {document}z')
            records.append(Record(f'{document}#{part}', contents(f'Book {document}', text)))
    built = build(records, count=40)
    check(built, records)
    assert built.held_out == 20 and len({q['title'] for q in built.questions}) == 20


def test_files_of_one_title_are_documents_of_their_own():
    texts = [split(record.contents)[1] for record in towns(100)]
    records = [Record(f'{i}', contents('Notes', text), f'{i}.md') for i, text in enumerate(texts)]
    built = build(records, count=40)
    check(built, records)
    assert (built.unit, built.total) == ('documents', 100)


def test_few_documents_are_split_by_passage_and_each_has_questions():
    texts = [split(record.contents)[1] for record in towns(300)]
    # One of them has most of the passages.
    names = [f'Book {min(number, 40)}' for number in range(300)]
    records = [Record(f'{i}', contents(names[i], text)) for i, text in enumerate(texts)]
    built = build(records, count=60)
    check(built, records)
    assert built.unit == 'passages' and '60 questions about 41 documents' in str(built)
    per_document = collections.Counter(question['document'] for question in built.questions)
    assert set(per_document) == set(names) and per_document['Book 40'] == 20


def test_common_words_are_asked_about_last():
    plain = 'Because of that they would therefore always remain together with another.'
    term = 'Because of that they would not find a checksum here at all.'
    records = towns(200, sentences=1)
    for number in range(100):
        text = f'{plain[:-1]} at {number}{number}. ' if number % 2 else f'{term[:-1]} at {number}.'
        records.append(Record(f'x{number}', contents(f'X {number}', text)))
    built = build(records, count=60)
    assert {question['kind'] for question in built.questions} <= {'name', 'number', 'term'}


def test_what_is_no_question_or_left_out_is_counted():
    records = [*towns(100), Record('a', contents('A', 'So it is. And more.')), Record('b', 'No')]
    built = build(records, count=40, max_documents=30)
    left_out = built.sentences_left_out.to_json()
    assert left_out['too short'] == {'count': 3, 'examples': ['So it is.', 'And more.', 'No']}
    assert built.left_out == len(records) - len(built.documents) - len(built.held_out_passages)


@pytest.mark.parametrize('is_blank_alone_different', [False, True])
def test_sentences_that_occur_twice_are_not_asked_about(is_blank_alone_different):
    text = 'The people of the old town near the bridge met the famous Lomi{} in the year.'
    records = towns(80, sentences=4)
    for number in range(40):
        ending = chr(97 + number) if is_blank_alone_different else ''
        records.append(Record(f'b{number}', contents(f'B{number}', text.format(ending))))
    built = build(records, count=40)
    check(built, records)
    questions = [question['question'] for question in built.questions]
    assert len(questions) == 40 and not any('famous' in question for question in questions)


def test_other_languages_are_neither_asked_about_nor_trained_on():
    sentences = (
        'Die alte Stadt Lomi wurde im Jahr 1203 von den Mönchen am Ufer gegründet.',
        'Город стоит на берегу реки и был основан монахами в 1203 году.',
    )
    records = towns(40)
    for number, sentence in itertools.product(range(20), sentences):
        text = f'{sentence} ' * 4 + str(number)
        records.append(Record(f'g{len(records)}', contents(f'G{len(records)}', text)))
    built = build(records, count=30)
    assert all(line['document_id'][0] == 'p' for line in built.questions + built.documents)


def test_too_few_sentences_or_documents_are_refused():
    with pytest.raises(UserError, match='questions can be made of 4 of its 12 passages'):
        build(towns(12, sentences=1))
    with pytest.raises(UserError, match='0 questions can be made'):
        build([])
    with pytest.raises(UserError, match='3 passages remain to train on'):
        build(towns(3), count=0)


def test_the_command_writes_both_files_and_says_how_to_use_them(tmp_path, capsys):
    out, documents = tmp_path / 'held out.jsonl', tmp_path / 'deeper' / 'documents.jsonl'
    arguments = [f'--corpus={EXAMPLE_TEXTS}', f'--out={out}', f'--documents={documents}']
    assert inputs.main(['cloze', *arguments, '--passage-words=80']) == 0
    report = capsys.readouterr().out
    assert report.count('\n') == 1 and ' questions about 15 documents, of ' in report
    assert f"'--config.eval.file={out}'" in report and '--config.schedule.hop_ratio=(1,)' in report
    questions = files.questions(str(out))
    assert len(questions) >= 60 and questions[0].origin['source'] == str(EXAMPLE_TEXTS)
    before = out.read_bytes(), documents.read_bytes()
    assert inputs.main(['cloze', *arguments, '--passage-words=80']) == 0
    assert before == (out.read_bytes(), documents.read_bytes())
