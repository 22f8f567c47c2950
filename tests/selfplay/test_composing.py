"""The example that composes questions: what it asks whom, what the pool gets, and which parts end it."""

import dataclasses
import types

import pytest
import scripted
from trajectories import make_trajectory

from examples.composing import config, recipe
from zeroplay_jax.recipes import proposing
from zeroplay_jax.recipes.datasets import SeedDocument
from zeroplay_jax.selfplay.schedule import Phase, Step
from zeroplay_jax.types import Task, Turn

TEXTS = {
    'Gumu': 'Gumu was written by Tira.',
    'Tira': 'Tira was born in Lomi.',
    'Lomi': 'Lomi is led by Puto.',
    'Puto': 'Puto worked as a poet.',
}
PASSAGES = {title: {'title': title, 'text': text} for title, text in TEXTS.items()}
FACTS = {
    'Gumu': ('author', 'Tira'),
    'Tira': ('birthplace', 'Lomi'),
    'Lomi': ('mayor', 'Puto'),
    'Puto': ('job', 'poet'),
}


def propose(fields):
    """A right proposal of the hops that are asked for."""
    title = fields['document'].split(')')[0].removeprefix('(Title: ')
    phrase = title
    for _ in range(fields['hops']):
        relation, title = FACTS[title]
        phrase = f'the {relation} of {phrase}'
    return scripted.final(question=f'What is {phrase}?', answer=title)


def solve(fields):
    """The right answer."""
    *relations, title = (
        fields['question'].removeprefix('What is the ').removesuffix('?').split(' of ')
    )
    for _ in relations:
        title = FACTS[title][1]
    return scripted.final(answer=title)


def restate(fields):
    phrase = fields['question'].removeprefix('What is ').removesuffix('?')
    return make_trajectory(Turn(f'<think> {phrase}</think>'))


def search(queries):
    """No document has exactly the title of another one's query."""
    return [
        [PASSAGES['Gumu'], *([PASSAGES[query]] if query in PASSAGES else [])] for query in queries
    ]


def generate(hops, title='Gumu', proposer=propose, restater=restate, solver=solve):
    corpus = types.SimpleNamespace(search=search)
    game = recipe.Recipe(
        config.get_config(), dataclasses.replace(scripted.library(), training=corpus)
    )
    context = scripted.ScriptedContext(proposer=proposer, restater=restater, solver=solver)
    task = Task((7, 0), SeedDocument(title, TEXTS[title], hops))
    step = Step(Phase('generate', 1), 0, 7)
    (outcome,) = scripted.run_episodes(game, context, step, [task])
    return outcome, context.asked


@pytest.mark.parametrize(
    'hops, asked, question, answer',
    [
        (2, [2], 'What is the birthplace of the author of Gumu?', 'Lomi'),
        (3, [1, 2], 'What is the mayor of the birthplace of the author of Gumu?', 'Puto'),
        (
            4,
            [2, 2],
            'What is the job of the mayor of the birthplace of the author of Gumu?',
            'poet',
        ),
    ],
)
def test_a_long_question_is_made_of_parts_of_one_or_two_hops(hops, asked, question, answer):
    outcome, requests = generate(hops)
    (made,) = outcome.questions
    assert (made.text, made.answers, made.hops) == (question, (answer,), hops)
    proposer = [fields['hops'] for role, _, _, fields in requests if role == 'proposer']
    # Four attempts per document, which take turns; or one request of four samples.
    assert proposer in (asked, [hops for hops in asked for _ in range(4)])
    names = [(role, identity) for role, identity, _, _ in requests]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    'asked, question, rejected',
    [
        ('What is the mayor of Lomi?', r'What is the mayor of the birthplace \1 of Tira?', None),
        ('What is the mayor of Lomian?', 'What is the mayor of Lomian?', 'not_composed'),
        ('Is Lomi in Lomian?', 'Is Lomi in Lomian?', 'leaks_answer'),
    ],
)
def test_a_name_is_replaced_whole(asked, question, rejected):
    rollout = scripted.final(question=asked, answer='Puto')
    proposal = proposing.read_proposal(rollout, SeedDocument('Lomi', TEXTS['Lomi'], 1))
    replaced = recipe._replaced(proposal, 'Lomi', r'the birthplace \1 of Tira')
    assert (replaced.question, replaced.rejected) == (question, rejected)


@pytest.mark.parametrize(
    'changes, reason',
    [
        ({'title': 'Puto'}, 'no_document'),
        ({'restater': lambda fields: make_trajectory(Turn('the author'))}, 'not_composed'),
        (
            {'restater': lambda fields: make_trajectory(Turn('<phrase>Tira</phrase>'))},
            'not_composed',
        ),
        (
            {'restater': lambda fields: make_trajectory(Turn('<phrase>dear Tira</phrase>'))},
            'leaks_answer',
        ),
        ({'proposer': lambda fields: scripted.final(answer='Tira')}, 'no_question'),
        ({'solver': lambda fields: scripted.final(answer='Lomi')}, 'unconfirmed'),
    ],
)
def test_parts_that_do_not_join_are_dropped_with_a_reason(changes, reason):
    outcome, _ = generate(3, **changes)
    assert (outcome.questions, outcome.drop) == ([], reason)
