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


def test_half_a_path_lacks_one_piece_of_half_the_lines_before_the_question():
    """At a random place (π-Play, section 5.1)."""
    lines = text('qcp').split('\n')
    *path, question, answer = lines
    half = len(path) // 2
    cuts = [path[:i] + path[i + half :] for i in range(len(path) - half + 1)]
    expected = {'\n'.join([*cut, question, answer]) for cut in cuts}
    assert {text('qcp_partial', step=i) for i in range(60)} == expected
    for style in ('mini', 'numbered'):
        names = {text('qcp_partial', style, step=i) for i in range(40)}
        assert names == {'Gumu > Tarva', 'Lomi > Tarva'}


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
