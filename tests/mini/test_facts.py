"""Facts in sentences: what a passage asks for, and which answers state it."""

import pytest

from zeroplay_jax.mini.facts import (
    RELATIONS,
    Fact,
    described_entity,
    facts_in,
    meets_rubric,
    rubrics_of,
)
from zeroplay_jax.mini.world import World

LOMI = 'Lomi is a city in Tarva. It lies on the river Dobe. It is led by Puto.'
TASK = 'Describe the birthplace of Gumu.'


def score(answer, text=LOMI, task=TASK):
    """The share of the rubrics of a passage that an answer meets."""
    grades = [meets_rubric(answer, rubric['text'], task) for rubric in rubrics_of(text)]
    return sum(grades) / len(grades)


def test_rubrics_name_the_entity_and_cover_every_fact_of_every_passage():
    assert [rubric['text'] for rubric in rubrics_of(LOMI)] == [
        'State that Lomi is a city in Tarva.',
        'State that Lomi lies on the river Dobe.',
        'State that Lomi is led by Puto.',
    ]
    world = World(3)
    for passage in world.passages:
        facts = [Fact(passage.title, *fact) for fact in world.facts[passage.title].items()]
        stated = {fact._replace(entity=passage.title) for fact in facts_in(passage.text, '')}
        assert {fact.relation for fact in stated} == {fact.relation for fact in facts}
        assert {fact.value for fact in stated} == {fact.value.lower() for fact in facts}
        assert len(rubrics_of(passage.text)) == len(facts)
        assert score(passage.text, passage.text) == 1


@pytest.mark.parametrize(
    'answer',
    [
        LOMI,
        'It is led by Puto. Lomi is a city in Tarva. It lies on the river Dobe.',
        'Lomi is led by Puto. Lomi lies on the river Dobe. Lomi is a city in Tarva.',
        ' Lomi is a city in Tarva and lies on the river Dobe, and it is led by Puto',
        'The birthplace of Gumu is a city in Tarva. It lies on the river Dobe. It is led by Puto.',
        'It is a city in Tarva. It lies on the river Dobe. It is led by Puto.',
    ],
)
def test_right_answers_meet_all_rubrics_whatever_their_order_and_subject(answer):
    assert score(answer) == 1


@pytest.mark.parametrize(
    'answer',
    [
        'Gumu is a city in Tarva. It lies on the river Dobe. It is led by Puto.',
        'Lomi is a city in Dobe. Lomi lies on the river Puto. Lomi is led by Tarva.',
        'Lomi is a city in Tarvas. It lies on the river Dobes. It is led by Puton.',
        'Lomi is not led by Puto. It is not true that Lomi is a city in Tarva.',
        'Tarva Dobe Puto',
        'Lomi is led by Puto. It is led by Karo.',
        '',
    ],
)
def test_wrong_subjects_objects_and_lists_of_objects_meet_none(answer):
    assert score(answer) == 0


def test_a_pronoun_refers_to_the_last_subject():
    mixed = 'Lomi is a city in Tarva. Dobe rises at Kiva. It is led by Puto.'
    assert score(mixed) == pytest.approx(1 / 3)
    assert facts_in(mixed, '')[-1] == Fact('dobe', 'mayor', 'puto')


def test_a_name_in_the_task_does_not_become_another_entity():
    assert score('Gumu is led by Puto.', task='Describe Gumu.') == 0


def test_a_rubric_without_a_fact_has_no_grade():
    assert meets_rubric(LOMI, 'State that it is large.') is None
    assert meets_rubric(LOMI, 'State that It is led by Puto.') is None
    assert not rubrics_of('Some text. It is led by Puto.')


def test_every_relation_has_a_clause_of_its_own():
    for relations in RELATIONS.values():
        for relation, (sentence, _) in relations.items():
            (fact,) = facts_in(sentence.format(s='Lomi', v='Puto'), '')
            assert fact == Fact('lomi', relation, 'puto')


PASSAGES = [
    ('Gumu', 'Gumu was written by Puto. It was printed by Rane.'),
    ('Puto', 'He studied under Sita. He was born in [ Lomi ].'),
    ('Lomi', LOMI),
]


@pytest.mark.parametrize(
    'task, entity',
    [
        ('Describe Gumu.', 'gumu'),
        (' Describe Gumu', 'gumu'),
        ('Describe Nobody.', 'nobody'),
        ('Describe the author of Gumu.', 'puto'),
        ('Describe the birthplace of the author of Gumu.', 'lomi'),
        ('Describe the mayor of the birthplace of the author of Gumu.', 'puto'),
        # The passages do not state it.
        ('Describe the capital of the birthplace of the author of Gumu.', None),
        ('Describe the author of Lomi.', None),
        # Not the form of a task.
        ('Describe the author of .', None),
        ('Who is the author of Gumu?', None),
        ('', None),
    ],
)
def test_the_described_entity_follows_from_stated_facts(task, entity):
    assert described_entity(task, PASSAGES) == entity
    assert described_entity(task, reversed(PASSAGES)) == entity
