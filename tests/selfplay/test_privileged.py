"""What a teacher reads: every kind of the ablation, and what is left out where the prompt would be too long."""

import pathlib

import scripted
from refused_calls import check_table

from zeroplay_jax.configs import piplay
from zeroplay_jax.recipes import proposing
from zeroplay_jax.recipes.datasets import SeedDocument
from zeroplay_jax.types import Question, Turn, identity_rng

LOMI = dict(id=1, title='Lomi', text='Lomi is a city in Tarva. ' * 10)

ITEM = SeedDocument('Gumu', 'Gumu was born in Lomi.', hops=3)

ASKED = dict(question='What is the country of the birthplace of Gumu?', answer='Tarva')


PATH = proposing.path_of(
    scripted.searching(('Lomi', (LOMI,)), ('Tarva', (LOMI,)), **ASKED), ITEM, **ASKED
)


def text(kind, style='paper', step=0):
    return proposing.path_text(kind, PATH, style, identity_rng(0, step))


def found_by_query():
    documents = ((LOMI,), (dict(id=2, title='Gumu', text='x'),))
    both = Turn('<think> t</think>', scripted.search_call(['Lomi', 'Gumu'], documents))
    rollout = scripted.trajectory(both, *scripted.final(**ASKED).turns)
    steps = proposing.path_of(rollout, ITEM, **ASKED)['steps']
    return [(step['query'], [passage[:13] for passage in step['found']]) for step in steps]


def test_what_every_kind_shows():
    check_table(pathlib.Path(__file__).parent / 'privileged.txt', globals())


def test_half_a_path_lacks_half_of_its_lines_whatever_they_say():
    """Document, question and answer are left out as often as steps (π-Play, section 5.1)."""
    lines = text('qcp').split('\n')
    halves = [text('qcp_partial', step=i).split('\n') for i in range(40)]
    assert all(len(half) == len(lines) // 2 for half in halves)
    kept = [sum(line in half for half in halves) for line in dict.fromkeys(lines)]
    assert all(0 < count < 40 for count in kept)
    for half in halves:
        remaining = iter(lines)
        assert all(line in remaining for line in half), 'in the order of the path'
    names = {text('qcp_partial', 'mini', step=i) for i in range(40)}
    assert names == {'Gumu', 'Lomi', 'Tarva'}


def teacher_prompt(question=ASKED['question'], **changes):
    config = piplay.get_config()
    config.privileged.update(changes)
    asked = Question(question, path=PATH)
    context = scripted.ScriptedContext()
    return proposing.teacher_prompt(context, config, (0, 0), asked, 'solver')


def test_passages_are_left_out_first_and_that_is_counted():
    whole, cut = teacher_prompt(prompt_tokens=10_000)
    assert cut == 0
    short, cut = teacher_prompt(prompt_tokens=len(whole) - 20)
    assert cut == 1 and len(short) <= len(whole) - 20
    assert teacher_prompt(prompt_tokens=5) == (None, 1)
    assert PATH['steps'][0]['found'][0].endswith('Tarva. ')  # the record itself is not touched


def test_without_privileges_the_teacher_reads_the_question_alone():
    ids, cut = teacher_prompt('a b c', kind='none')
    assert len(ids) == 3 and cut == 0
