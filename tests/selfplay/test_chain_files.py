"""Questions of two hops of a corpus: their documents are held out, and others can be trained on."""

import collections
import json

from zeroplay_jax import inputs
from zeroplay_jax.configs import english
from zeroplay_jax.data import chains, cloze_files, files
from zeroplay_jax.data.chains import BRIDGE
from zeroplay_jax.data.cloze import BLANK
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


def test_a_quarter_of_the_questions_have_two_hops():
    records = linked(300)
    built = build(records)
    assert hops(built.questions) == {1: 60, 2: 20}
    assert '80 questions (20 of two hops) of' in str(built)
    texts = {record.id: split(record.contents) for record in records}
    for question in built.questions[60:]:
        title, text = texts[question['document_id']]
        _, first_text = texts[question['first_document_id']]
        bridge, text_of_question = question['bridge'], question['question']
        (answer,) = question['answers']
        sentence = text_of_question[: text_of_question.rindex(BRIDGE)].strip()
        clause = text_of_question[text_of_question.rindex(BRIDGE) :].replace(BRIDGE, bridge)
        assert sentence.replace(BRIDGE, bridge) in first_text and bridge not in text_of_question
        assert clause.replace(BLANK, answer) in text and title == question['title']


def test_training_starts_from_no_document_of_a_question():
    records = linked(300)
    built = build(records)
    asked = {question['document_id'] for question in built.questions}
    asked |= {question.get('first_document_id') for question in built.questions}
    trained = {document['document_id'] for document in built.documents}
    assert not asked & trained
    listed = {passage['document_id']: passage['title'] for passage in built.held_out_passages}
    titles = {record.id: split(record.contents)[0] for record in records}
    assert listed == {document: titles[document] for document in asked - {None}}
    # Each document has one passage.
    assert len(listed) == len(built.held_out_passages) == built.held_out
    # Two documents per question of two hops, and some of them have questions of one hop too.
    assert 80 <= built.held_out <= 60 + 40
    of_two_hops = [document for document in built.documents if document['hops'] == 2]
    # Every start has a chain, and is an ordinary document as well.
    assert len(of_two_hops) > 200
    one_hop_ids = {each['document_id'] for each in built.documents if each['hops'] == 1}
    assert {each['document_id'] for each in of_two_hops} <= one_hop_ids
    assert all(each['document_id'].startswith('t') for each in of_two_hops)
    # The line names the person, whose document has this title.
    assert all(
        each['link'] in titles.values() and each['link'] in each['text'] for each in of_two_hops
    )
    # The other end of the link is not held out either.
    assert not {each['link'] for each in of_two_hops} & {line['title'] for line in built.questions}


def test_a_question_that_one_search_answers_has_not_two_hops():
    records = linked(300)
    for number in range(0, 300, 2):
        title, text = split(records[2 * number + 1].contents)
        # A word that no other passage has leads to the passage without the name.
        telling = text.replace('from the start', f'by bishop Xo{number}xylo')
        records[2 * number + 1] = Record(f'p{number}', contents(title, telling))
    passages = list(enumerate(records, 1))
    found = chains.find(lambda: iter(passages), 0, 1000, _title)
    chains.add_searches(lambda: iter(passages), found, 0)
    assert all(each.is_found_by_bridge for each in found)
    needing = {each.second.id for each in found if each.needs_bridge}
    without_telling_word = {f'p{number}' for number in range(1, 300, 2)}
    # Not exactly, because names and numbers with the same syllables and digits are similar.
    assert len(without_telling_word & needing) > 140 and len(needing - without_telling_word) < 50
    asked = {line['document_id'] for line in build(records).questions if line['hops'] == 2}
    assert len(asked) == 20 and asked <= needing


def test_a_name_that_a_search_does_not_find_is_no_link():
    records = linked(300)
    # Three other documents of the same title hide the clause.
    for number in range(0, 300, 2):
        for copy in range(3):
            records.append(Record(f'c{number}.{copy}', contents(name(number), name(number))))
    lines = build(records).documents
    links = {line['link'] for line in lines if line['hops'] == 2}
    assert links and links <= {name(number) for number in range(1, 300, 2)}


def test_the_link_is_in_the_sentence_that_is_asked_about():
    records = linked(300)
    for number in range(0, 300, 2):
        title, text = split(records[2 * number].contents)
        # Too short to be asked about.
        records[2 * number] = Record(f't{number}', contents(title, f'By {name(number)}. {text}'))
    lines = build(records).documents
    starts = {line['document_id'] for line in lines if line['hops'] == 2}
    assert starts and starts <= {f't{number}' for number in range(1, 300, 2)}


def test_the_order_of_the_corpus_does_not_matter():
    records = linked(200)
    reordered = build(records[150:] + records[:150])
    questions = {question['question'] for question in build(records).questions}
    assert {question['question'] for question in reordered.questions} == questions


def test_a_sentence_that_occurs_twice_is_not_asked_about():
    records = linked(300)
    sentence = f'The stone bridge over the river number 5x was designed by {name(5)}, an engineer.'
    found = [each for each in chains.find(lambda: iter(enumerate(records)), 0, 1000, _title)]
    assert any(each.chain.first.sentence == sentence for each in found)
    chosen = chains.choose(found, 1000, 1000, {sentence.lower()})
    assert not any(each.chain.first.sentence == sentence for each in chosen)
    sentences = [sentence for each in chosen for sentence in each.sentences]
    assert len(sentences) == len(set(sentences)) > 500


def _title(record):
    return split(record.contents)[0]


def test_a_well_known_name_is_no_bridge():
    records = linked(300)
    mentions = ' '.join(
        f'In {1000 + number} the people met {name(5)} once again.' for number in range(3)
    )
    for number in range(chains.MAX_MENTIONS):
        records.append(
            Record(f'm{number}', contents(f'Meeting {number}', f'{mentions} {number}z.'))
        )
    found = chains.find(lambda: iter(enumerate(records)), 0, 1000, _title)
    assert found and not any(each.chain.first.answer == name(5) for each in found)


def test_with_few_chains_all_questions_have_one_hop():
    records = linked(300)
    alone = [record for record in records if record.id[0] == 'p' or int(record.id[1:]) < 20]
    built = build(alone)
    assert set(hops(built.questions + built.documents)) == {1} and len(built.questions) == 80
    assert 'all of one hop: 16 of two hops can be made, 20 are needed' in str(built)
    assert cloze_files.hop_ratio(built.documents) == (1.0,)


def test_fewer_than_twenty_questions_of_two_hops_are_none():
    records = linked(300)
    # A quarter of 76 questions would be 19 of two hops: half of the score would hang on them.
    few, enough = build(records, count=76), build(records, count=80)
    assert set(hops(few.questions + few.documents)) == {1} and len(few.questions) == 76
    assert 'all of one hop: at most 19 of 76 questions would have two' in str(few)
    assert '80 questions or more' in str(few)
    assert hops(enough.questions)[2] == 20 and 'with a link to another document' in str(enough)


def test_a_small_corpus_holds_out_no_more_than_40_percent_with_two_hops():
    built = build(linked(200), count=240)
    assert hops(built.questions)[2] == 20
    assert built.total == 400 and 150 < built.held_out <= 160


def test_the_command_and_the_config_take_the_ratio_of_the_file(tmp_path, capsys):
    source = tmp_path / 'c.jsonl'
    lines = [json.dumps({'id': record.id, 'contents': record.contents}) for record in linked(300)]
    source.write_text('\n'.join(lines) + '\n')
    documents = tmp_path / 'documents.jsonl'
    out = tmp_path / 'questions.jsonl'
    assert (
        inputs.main(['cloze', f'--corpus={source}', f'--out={out}', f'--documents={documents}'])
        == 0
    )
    report = capsys.readouterr().out
    assert '240 questions (30 of two hops)' in report
    assert "'--config.schedule.hop_ratio=(0.875,0.125)'" in report
    assert hops(files.documents(str(documents)))[2] >= cloze_files.MIN_TWO_HOP_STARTS
    held_out = files.held_out_passages(str(tmp_path / 'questions_passages.jsonl'))
    assert f'--config.retrieval.held_out={tmp_path / "questions_passages.jsonl"}' in report
    assert len(held_out.ids) == len(held_out.titles) > 200
    config = english.get_config(str(tmp_path))
    assert tuple(config.schedule.hop_ratio) == (0.875, 0.125)
    one_hop = [line for line in documents.read_text().splitlines() if '"hops": 1' in line]
    documents.write_text('\n'.join(one_hop) + '\n')
    assert tuple(english.get_config(str(tmp_path)).schedule.hop_ratio) == (1.0,)
    assert {question.hops for question in files.questions(str(out))} == {1, 2}
