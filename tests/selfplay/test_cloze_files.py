"""Held-out questions and training documents of a corpus: no document is in both, every question has one passage."""

import itertools
import pathlib

import pytest
from refused_calls import check_table

from zeroplay_jax import inputs
from zeroplay_jax.data import cloze_files, files
from zeroplay_jax.data.cloze import BLANK
from zeroplay_jax.objectives.rewards import normalize_answer
from zeroplay_jax.retrieval import cleaning
from zeroplay_jax.retrieval.corpus import Record, contents, read, split
from zeroplay_jax.settings.kinds import EXAMPLE_TEXTS

SHARED = pathlib.Path(__file__).parents[3] / 'shared' / 'data' / 'corpus.jsonl'


def build(records, count=240, seed=0, max_documents=1000):
    passages = list(enumerate(records, 1))
    return cloze_files.build(lambda: iter(passages), 'c', count, seed, max_documents)


def examples():
    return [record for _, record in read(EXAMPLE_TEXTS, passage_words=80)]


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
        assert normalize_answer(answer) and answer.lower() not in question['question'].lower()
        assert f' {normalize_answer(answer)} ' not in f' {normalize_answer(title)} '
    held_out = {line['document_id'] for line in built.held_out_passages}
    assert asked <= held_out and not held_out & trained
    for document in built.documents:
        assert (document['title'], document['text']) == texts[document['document_id']]
        assert document['hops'] == 1


def books(count):
    """Books of twenty passages each."""
    records = []
    for book in range(count):
        for part, record in enumerate(towns(20)):
            text = split(record.contents)[1].replace('number', f'number {book}z')
            records.append(Record(f'{book}#{part}', contents(f'Book {book}', text)))
    return records


def books_of(records, *titles):
    """The same passages under these titles in turn."""
    titled = []
    for number, record in enumerate(records):
        title, text = titles[number % len(titles)], split(record.contents)[1]
        titled.append(Record(record.id, contents(title, text)))
    return titled


def with_repetition(records):
    sentence = 'The people of every town met the famous Lomi near the old bridge in 1999.'
    return [Record(record.id, f'{record.contents} {sentence}') for record in records]


def with_other_languages(records):
    sentences = (
        'Die alte Stadt Lomi wurde im Jahr 1203 von den Mönchen am Ufer gegründet.',
        'Город стоит на берегу реки и был основан монахами в 1203 году.',
    )
    foreign = []
    for number, sentence in itertools.product(range(20), sentences):
        name = f'foreign{len(foreign)}'
        foreign.append(Record(name, contents(name, f'{sentence} ' * 4 + str(number))))
    return records + foreign


def shown(records, count=240):
    built = build(records, count)
    check(built, records)
    lines = built.questions + built.documents
    assert not any('famous' in question['question'] for question in built.questions)
    assert not any(line['document_id'].startswith('foreign') for line in lines)
    titles = {question['title'] for question in built.questions}
    text = f'{built.held_out} of {built.total} {built.unit} held out, {len(built.questions)}'
    text += f' questions of {len(titles)} titles, {len(built.documents)} documents to train on'
    return f'{text}; {built.warning}'.removesuffix('; ')


def test_what_is_held_out_of_corpora():
    check_table(pathlib.Path(__file__).parent / 'cloze_files.txt', globals())


def test_one_question_comes_from_every_passage_before_a_second_one():
    first_ids = [question['document_id'] for question in build(examples()).questions[:18]]
    assert len(set(first_ids)) == 18


def test_real_passages_give_the_questions_that_were_asked_for():
    if not SHARED.is_file():
        pytest.skip('the shared corpus is not here')
    records = [record for _, record in itertools.islice(read(SHARED, passage_words=80), 0, None, 7)]
    built = build(records, max_documents=500)
    check(built, records)
    assert len(built.questions) == 240 and len(built.documents) == 500
    kinds = [question['kind'] for question in built.questions]
    assert kinds.count('word') < 0.1 * len(kinds)


def test_the_split_is_a_function_of_the_seed_and_the_passages():
    records = examples()
    built = build(records)
    assert build(records) == built
    # In another order of the documents the questions are the same.
    reordered = build(records[20:] + records[:20])
    assert {q['question'] for q in reordered.questions} == {q['question'] for q in built.questions}
    assert build(records, seed=1).questions != built.questions


def test_a_larger_count_holds_out_the_same_documents_and_others():
    few, many = (
        {question['title'] for question in build(towns(300), count).questions} for count in (30, 60)
    )
    assert few < many


NOTES = (
    '---\ntitle: Note\ntags: [town]\n---\n# Meeting notes\n{text}',
    '# Meeting notes\n{text}',
    '---\ndate: 2024-05-01\n---\n{text}',
    '2024\n{text}',
)


@pytest.mark.parametrize('form', NOTES)
def test_files_of_one_title_are_documents_of_their_own(tmp_path, form):
    (tmp_path / 'notes').mkdir()
    for number, record in enumerate(towns(40, sentences=6)):
        text = split(record.contents)[1]
        (tmp_path / 'notes' / f'{number}.md').write_text(form.format(text=text))
    out = tmp_path / 'corpus.jsonl'
    cleaning.write_clean(tmp_path / 'notes', out, 50)
    records = [record for _, record in read(out)]
    assert not any(split(record.contents)[0] in ('---', '2024') for record in records)
    built = build(records, count=60)
    check(built, records)
    assert (built.unit, built.total, built.warning) == ('documents', 40, '')
    asked = {question['document_id'].partition('#')[0] for question in built.questions}
    trained = {document['document_id'].partition('#')[0] for document in built.documents}
    assert asked and trained and not asked & trained


# ---- the command -----------------------------------------------------------------------------------------


def run(*arguments):
    return inputs.main(['cloze', *map(str, arguments)])


def test_the_command_writes_both_files_and_says_how_to_use_them(tmp_path, capsys):
    out, documents = tmp_path / 'held out.jsonl', tmp_path / 'deeper' / 'documents.jsonl'
    arguments = [f'--corpus={EXAMPLE_TEXTS}', f'--out={out}', f'--documents={documents}']
    assert run(*arguments, '--passage-words=80') == 0
    report = capsys.readouterr().out
    assert report.count('\n') == 1 and '78 questions of 6 held-out documents (of 15)' in report
    assert f"'--config.eval.file={out}'" in report and '--config.schedule.hop_ratio=(1,)' in report
    questions = files.questions(str(out))
    assert len(questions) == 78 and questions[0].origin['source'] == str(EXAMPLE_TEXTS)
    assert {record['hops'] for record in files.documents(str(documents))} == {1}
    before = out.read_bytes(), documents.read_bytes()
    assert run(*arguments, '--passage-words=80') == 0
    assert before == (out.read_bytes(), documents.read_bytes())
