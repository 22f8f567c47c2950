"""Questions of two hops of a corpus: their documents are held out, and others can be trained on."""

import collections

import pytest
from input_files import write

from zeroplay_jax.configs import english
from zeroplay_jax.data import files
from zeroplay_jax.extras.inputs import __main__ as inputs
from zeroplay_jax.extras.inputs import chains, cloze_files
from zeroplay_jax.extras.inputs.chains import BRIDGE
from zeroplay_jax.extras.inputs.cloze import BLANK
from zeroplay_jax.retrieval.corpus import Record, contents, split

SYLLABLES = ('Ka', 'Lo', 'Mi', 'Ru', 'Te', 'Vo', 'Sa', 'Pe', 'Ni', 'Du')


def name(number):
    """A name of two words, another one for every number."""
    digits = [SYLLABLES[int(digit)].lower() for digit in f'{number:03d}']
    return f'{"".join(digits).capitalize()} {SYLLABLES[number % 10]}berg'


def linked(count):
    """Pairs of documents: a town whose bridge a person built, and this person."""
    records = []
    for number in range(count):
        town = (
            f'The stone bridge over the river number {number}x was designed by {name(number)}, an engineer. '
            f'It was opened to the public of the town in the year {1000 + number} by its mayor.'
        )
        person = (
            f'{name(number)} was educated in Univer{number}city from the start on. '
            f'The family of the engineer number {number}y came from a village in Valley{number}land.'
        )
        records.append(Record(f't{number}', contents(f'Town {number}', town)))
        records.append(Record(f'p{number}', contents(name(number), person)))
    return records


def build(records, count=80, seed=0):
    passages = list(enumerate(records, 1))
    return cloze_files.build(lambda: iter(passages), 'c', count, seed, 1000)


def hops(lines):
    return collections.Counter(line['hops'] for line in lines)


@pytest.fixture(scope='module')
def whole():
    """300 pairs of documents, and what is built of them."""
    records = linked(300)
    return records, build(records)


def ids(lines, field='document_id'):
    return {line.get(field) for line in lines}


def of_two_hops(lines):
    return [line for line in lines if line['hops'] == 2]


def test_a_quarter_of_the_questions_have_two_hops(whole):
    records, built = whole
    assert hops(built.questions) == {1: 60, 2: 20}
    assert '80 questions (20 of two hops) about ' in str(built)
    texts = {record.id: split(record.contents) for record in records}
    for question in built.questions[60:]:
        title, text = texts[question['document_id']]
        _, first_text = texts[question['first_document_id']]
        bridge, text_of_question = question['bridge'], question['question']
        (answer,) = question['answers']
        sentence, mark, clause = text_of_question.rpartition(BRIDGE)
        assert sentence.strip().replace(BRIDGE, bridge) in first_text
        assert (mark + clause).replace(BRIDGE, bridge).replace(BLANK, answer) in text
        assert bridge not in text_of_question and title == question['title']


def test_training_starts_from_no_document_of_a_question(whole):
    records, built = whole
    asked = ids(built.questions) | ids(built.questions, 'first_document_id')
    assert not asked & ids(built.documents)
    listed = {passage['document_id']: passage['title'] for passage in built.held_out_passages}
    titles = {record.id: _title(record) for record in records}
    assert listed == {document: titles[document] for document in asked - {None}}
    assert len(listed) == built.held_out
    starts = of_two_hops(built.documents)
    # Every start has a chain, is an ordinary document as well, and names the person whose document has this title.
    assert len(starts) > 200 and all(each['document_id'].startswith('t') for each in starts)
    assert ids(starts) <= ids(each for each in built.documents if each['hops'] == 1)
    assert all(each['link'] in titles.values() and each['link'] in each['text'] for each in starts)
    # The other end of the link is not held out either.
    assert not ids(starts, 'link') & ids(built.questions, 'title')


def test_a_question_that_one_search_answers_has_not_two_hops():
    records = linked(300)
    for number in range(0, 300, 2):
        title, text = split(records[2 * number + 1].contents)
        # A word that no other passage has leads to the passage without the name.
        telling = text.replace('from the start', f'by bishop Xo{number}xylo')
        records[2 * number + 1] = Record(f'p{number}', contents(title, telling))
    found = found_in(records)
    chains.add_searches(lambda: iter(enumerate(records, 1)), found, 0)
    assert all(each.is_found_by_bridge for each in found)
    needing = {each.second.id for each in found if each.needs_bridge}
    without_telling_word = {f'p{number}' for number in range(1, 300, 2)}
    # Not exactly, because names and numbers with the same syllables and digits are similar.
    assert len(without_telling_word & needing) > 140 and len(needing - without_telling_word) < 50
    asked = of_two_hops(build(records).questions)
    assert len(asked) == 20 and ids(asked) <= needing


def test_a_name_that_a_search_does_not_find_is_no_link():
    records = linked(300)
    # Three other documents of the same title hide the clause.
    for number in range(0, 300, 2):
        for copy in range(3):
            records.append(Record(f'c{number}.{copy}', contents(name(number), name(number))))
    links = ids(of_two_hops(build(records).documents), 'link')
    assert links and links <= {name(number) for number in range(1, 300, 2)}


def found_in(records):
    return list(chains.find(lambda: iter(enumerate(records, 1)), 0, 1000, _title))


def _title(record):
    return split(record.contents)[0]


def test_a_well_known_name_is_no_bridge(whole):
    records, _ = whole
    mentions = ''.join(f'In {1000 + n} the people met {name(5)} once again. ' for n in range(3))
    meetings = [
        Record(f'm{number}', contents(f'Meeting {number}', f'{mentions}{number}z.'))
        for number in range(chains.MAX_MENTIONS)
    ]
    found = found_in(records + meetings)
    assert found and not any(each.chain.first.answer == name(5) for each in found)


def test_fewer_than_twenty_questions_of_two_hops_are_none(whole):
    # A quarter of 76 questions would be 19 of two hops: half of the score would hang on them.
    few = build(whole[0], count=76)
    assert set(hops(few.questions + few.documents)) == {1} and len(few.questions) == 76
    assert 'all of one hop: at most 19 of 76 questions would have two' in str(few)
    assert '80 questions or more' in str(few)


def test_a_small_corpus_holds_out_no_more_than_40_percent_with_two_hops():
    built = build(linked(200), count=240)
    assert hops(built.questions)[2] == 20
    assert built.total == 400 and 150 < built.held_out <= 160


def test_the_command_and_the_config_take_the_ratio_of_the_file(whole, tmp_path, capsys):
    lines = [{'id': record.id, 'contents': record.contents} for record in whole[0]]
    source = write(tmp_path / 'c.jsonl', *lines)
    documents, out = tmp_path / 'documents.jsonl', tmp_path / 'questions.jsonl'
    words = ['cloze', '--corpus', source, f'--out={out}', f'--documents={documents}']
    assert inputs.main(words) == 0
    report = capsys.readouterr().out
    assert '240 questions (30 of two hops)' in report
    assert "'--config.schedule.hop_ratio=(0.875,0.125)'" in report
    passages = tmp_path / 'questions_passages.jsonl'
    assert f'--config.retrieval.held_out={passages}' in report
    assert len(files.held_out_passages(str(passages)).ids) > 200
    assert hops(files.documents(str(documents)))[2] >= cloze_files.MIN_TWO_HOP_STARTS
    assert {question.hops for question in files.questions(str(out))} == {1, 2}
    assert tuple(english.get_config(str(tmp_path)).schedule.hop_ratio) == (0.875, 0.125)
    write(documents, *(line for line in documents.read_text().splitlines() if '"hops": 1' in line))
    assert tuple(english.get_config(str(tmp_path)).schedule.hop_ratio) == (1.0,)
