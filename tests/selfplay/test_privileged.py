"""What a teacher reads: every kind of the ablation, and what is left out where the prompt would be too long."""

import pytest
import scripted

from zeroplay_jax.configs import piplay
from zeroplay_jax.recipes import proposing
from zeroplay_jax.recipes.datasets import SeedDocument
from zeroplay_jax.types import Question, Turn, identity_rng

LOMI = dict(id=1, title='Lomi', text='Lomi is a city in Tarva. ' * 10)
ITEM = SeedDocument('Gumu', 'Gumu was born in Lomi.', hops=3)
ASKED = dict(question='What is the country of the birthplace of Gumu?', answer='Tarva')


@pytest.fixture
def path():
    rollout = scripted.searching(('Lomi', (LOMI,)), ('Tarva', (LOMI,)), **ASKED)
    return proposing.path_of(rollout, ITEM, **ASKED)


def text(kind, path, style='paper', step=0):
    return proposing.path_text(kind, path, style, identity_rng(0, step))


def test_a_path_is_data_that_survives_json(path):
    assert [s['query'] for s in path['steps']] == ['Lomi', 'Tarva'] and path['steps'][0][
        'think'
    ] == 't'
    assert path['title'] == 'Gumu' and path['hops'] == 3


def test_passages_belong_to_the_query_that_brought_them():
    documents = ((LOMI,), (dict(id=2, title='Gumu', text='x'),))
    both = Turn('<think> t</think>', scripted.search_call(['Lomi', 'Gumu'], documents))
    rollout = scripted.trajectory(both, *scripted.final(**ASKED).turns)
    steps = proposing.path_of(rollout, ITEM, **ASKED)['steps']
    assert [(s['query'], [f[:13] for f in s['found']]) for s in steps] == [
        ('Lomi', ['(Title: Lomi)']),
        ('Gumu', ['(Title: Gumu)']),
    ]


def test_every_kind_shows_what_its_name_says(path):
    assert text('answer', path) == 'Tarva' and text('answer_hop', path) == 'Tarva (3)'
    whole = text('qcp', path)
    assert all(
        part in whole
        for part in ('Gumu was born', 'Search: Lomi', 'Search: Tarva', 'Answer: Tarva')
    )
    assert text('qcp', path, 'mini') == 'Gumu > Lomi > Tarva'


def test_half_a_path_lacks_half_of_its_lines_whatever_they_say(path):
    """Document, question and answer are left out as often as steps (π-Play, section 5.1)."""
    lines = text('qcp', path).split('\n')
    halves = [text('qcp_partial', path, step=i).split('\n') for i in range(40)]
    assert all(len(half) == len(lines) // 2 for half in halves)
    kept = [sum(line in half for half in halves) for line in dict.fromkeys(lines)]
    assert all(0 < count < 40 for count in kept)
    for half in halves:
        remaining = iter(lines)
        assert all(line in remaining for line in half), 'in the order of the path'
    names = {text('qcp_partial', path, 'mini', step=i) for i in range(40)}
    assert names == {'Gumu', 'Lomi', 'Tarva'}


def teacher_prompt(path, question=ASKED['question'], **changes):
    asked = Question(question, path=path)
    context = scripted.ScriptedContext()
    return proposing.teacher_prompt(context, config(**changes), (0, 0), asked, 'solver')


def config(**changes):
    config = piplay.get_config()
    config.privileged.update(changes)
    return config


def test_passages_are_left_out_first_and_that_is_counted(path):
    whole, cut = teacher_prompt(path, prompt_tokens=10_000)
    assert cut == 0
    short, cut = teacher_prompt(path, prompt_tokens=len(whole) - 20)
    assert cut == 1 and len(short) <= len(whole) - 20
    none, cut = teacher_prompt(path, prompt_tokens=5)
    assert none is None and cut == 1
    assert path['steps'][0]['found'][0].endswith('Tarva. ')  # the record itself is not touched


def test_without_privileges_the_teacher_reads_the_question_alone(path):
    ids, cut = teacher_prompt(path, 'a b c', kind='none')
    assert len(ids) == 3 and cut == 0
