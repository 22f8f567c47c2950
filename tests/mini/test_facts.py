"""Facts in sentences: what a passage asks for, and which answers state it."""

import pathlib

from refused_calls import check_table

from zeroplay_jax.mini.facts import (
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


PASSAGES = [
    ('Gumu', 'Gumu was written by Puto. It was printed by Rane.'),
    ('Puto', 'He studied under Sita. He was born in [ Lomi ].'),
    ('Lomi', LOMI),
]


def described(task):
    entity = described_entity(task, PASSAGES)
    assert described_entity(task, reversed(PASSAGES)) == entity
    return entity


def test_what_answers_state_and_tasks_ask_for():
    check_table(pathlib.Path(__file__).parent / 'facts.txt', globals())


def test_rubrics_cover_every_fact_of_every_passage():
    world = World(3)
    for passage in world.passages:
        facts = world.facts[passage.title]
        stated = {fact.relation: fact.value for fact in facts_in(passage.text, '')}
        assert stated == {relation: value.lower() for relation, value in facts.items()}
        assert len(rubrics_of(passage.text)) == len(facts)
        assert score(passage.text, passage.text) == 1
