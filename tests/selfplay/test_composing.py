"""The example that composes questions: what it asks whom, what the pool gets, and which parts end it."""

import dataclasses
import pathlib
import types

import scripted
from refused_calls import check_table
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
    """Hops that were asked for, and the question or why there is none."""
    corpus = types.SimpleNamespace(search=search)
    library = dataclasses.replace(scripted.library(), training=corpus)
    game = recipe.Recipe(config.get_config(), library)
    context = scripted.ScriptedContext(proposer=proposer, restater=restater, solver=solver)
    task = Task((7, 0), SeedDocument(title, TEXTS[title], hops))
    step = Step(Phase('generate', 1), 0, 7)
    (outcome,) = scripted.run_episodes(game, context, step, [task])
    names = [(role, identity) for role, identity, *_ in context.asked]
    assert len(set(names)) == len(names)
    asked = [fields['hops'] for role, _, _, fields in context.asked if role == 'proposer']
    made = [(one.text, one.answers, one.hops) for one in outcome.questions]
    return f'{asked}: {made or outcome.drop}'


def replaced(question):
    """A question with another name for Lomi, or why there is none."""
    rollout = scripted.final(question=question, answer='Puto')
    proposal = proposing.read_proposal(rollout, SeedDocument('Lomi', TEXTS['Lomi'], 1))
    proposal = recipe._replaced(proposal, 'Lomi', r'the birthplace \1 of Tira')
    return proposal.rejected or proposal.question


def restates(text):
    return lambda fields: make_trajectory(Turn(text))


def test_what_is_composed_and_what_does_not_join():
    check_table(pathlib.Path(__file__).parent / 'composing.txt', globals())
