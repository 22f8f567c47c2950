"""What the packaged policies were shown: every statement, question and answer is true."""

import functools
import hashlib
import itertools
import re

import numpy as np
import pytest
from example_texts import example_passages

from tools.checkpoints import (
    base_english,
    base_model,
    base_open,
    base_parts,
    batches,
    demos,
    english_demos,
    parts,
)
from tools.checkpoints.demo import FORMS, forms
from tools.checkpoints.english_texts import Texts
from tools.checkpoints.library import Library
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.types import ENV, POLICY

# Folder → its roles and the stages of its training.
TRAININGS = {
    'base': (demos.ROLES, base_model.STAGES),
    'open/base': (base_open.ROLES, base_open.STAGES),
    'parts/base': (parts.ROLES, base_parts.STAGES),
    'english/base': (english_demos.ROLES, base_english.STAGES),
}
ASKED = [(name, role) for name, (roles, _) in TRAININGS.items() for role in roles]
STATEMENT = re.compile(r'(the \w+ of (?:the \w+ of )*\w+) is (\w+)')
BLANK = '____'


@functools.cache
def library():
    return Library(range(3), 'train', deal=1)


@functools.cache
def texts():
    return Texts(base_english.cut(example_passages(), 50))


@functools.cache
def facts():
    merged = {}
    for world in library().worlds:
        merged |= world.facts
    return merged


def value(phrase):
    """What 'the teacher of the mayor of Fretes' is, by the facts of the worlds."""
    *relations, entity = phrase.split(' of ')
    for relation in reversed(relations):
        entity = facts()[entity][relation.removeprefix('the ')]
    return entity


def written(demo, sources=(POLICY,)):
    """The turns of an episode, as text."""
    return [part.content for part in demo.parts if part.source in sources]


def tagged(text, tag):
    return re.findall(rf'<{tag}> ?(.*?)</{tag}>', text, re.DOTALL)


def check_world(demo):
    """Asserts that what an episode in the miniature worlds states, answers and describes is true."""
    last = written(demo)[-1]
    text = ''.join(content for content in written(demo, {0, 1, 2} - {ENV}))
    for phrase, stated in STATEMENT.findall(text):
        assert value(phrase) == stated
    answers = tagged(last, 'answer')
    if demo.role == 'task_solver':
        described = re.fullmatch(r'Describe (.*)\.', demo.fields['task'])[1]
        assert answers == [library().document(value(described))['text']]
    questions = filter(None, [demo.fields.get('question'), *tagged(text, 'question')])
    for question in questions:
        phrase = re.fullmatch(r'What is (.*)\?', question)[1]
        assert demo.role == 'restate' or answers == [value(phrase)]
    for task in tagged(last, 'task'):
        described = re.fullmatch(r'Describe (.*)\.', task)[1]
        assert value(described) in facts()


def squeezed(text):
    """A text without what thoughts and questions change in the sentences that they copy."""
    return ''.join(text.split())


def check_english(demo):
    """Asserts that an episode over English texts copies what its passages have."""
    text = ''.join(written(demo, {0, 1, 2} - {ENV}))
    shown = [f'{each["title"]} {each["text"]}' for part in written(demo, {ENV}) for each in part]
    shown += [demo.fields[name] for name in ('document', 'documents') if name in demo.fields]
    passages = squeezed('\n'.join(shown))
    thoughts = tagged(text, 'think')
    for thought in thoughts:
        assert squeezed(re.sub(r' \[ (.*?) \]', r' \1', thought)) in passages
    bridge = re.search(r' \[ (.*?) \]', thoughts[0]) if thoughts else None
    answers = tagged(text, 'answer')
    if demo.role == 'task_solver':
        assert squeezed(answers[0]) in passages
    questions = [demo.fields.get('question'), *tagged(text, 'question')]
    questions += re.findall(r'Question: (.*?)<', text)
    for question, answer in zip(filter(None, questions), answers):
        whole = question.replace(BLANK, answer).replace('#1', bridge[1] if bridge else '')
        filled = squeezed(whole)
        ends = range(1, len(filled) + 1)
        assert any(filled[:end] in passages and filled[end:] in passages for end in ends)


@pytest.mark.parametrize(('name', 'role'), ASKED)
def test_every_demonstration_is_true(name, role):
    rng = np.random.default_rng(0)
    is_english = name == 'english/base'
    material, check = (texts(), check_english) if is_english else (library(), check_world)
    for _ in range(60):
        demo = TRAININGS[name][0][role].write(material, rng)
        assert not demo.role or written(demo)
        check(demo)


# Of the first 40 episodes of a stage, by the code that trained the folder (commit b4077a4a; `open` was trained later).
DIGESTS = {
    'base copying': '691166c60c5dffc7',
    'base reading': 'be8fe2c5ef4e5cde',
    'base clean': '85e96769baf6155b',
    'open/base open': '99c7d99cde602718',
    'parts/base copying': '9fef35a3deaf725e',
    'parts/base walking': '0801e31d279bb9ab',
    'parts/base roles': 'bd9addabaed3c362',
    'english/base copying': 'd95731e81677a53e',
    'english/base filling': 'b00721a03fd13ae9',
    'english/base clean': 'e53ca93d94e26cb3',
    'english/base two_hops': 'd7fbe0403af11e10',
}


def test_a_seed_gives_the_demonstrations_that_the_folders_were_trained_on(monkeypatch):
    codec = {name: Codec(base_model.MINI / name) for name in TRAININGS}
    digests = {}
    for name, (roles, stages) in TRAININGS.items():
        if name == 'parts/base':
            for role, form in forms('numbered').items():
                monkeypatch.setitem(FORMS, role, form)
        material = texts() if name == 'english/base' else library()
        for stage in stages:
            digest = hashlib.sha256()
            stream = batches.episodes(stage, roles, [material], codec[name], 0, 0)
            for episode in itertools.islice(stream, 40):
                digest.update(episode.tokens.astype(np.int32).tobytes())
                digest.update(episode.sources.astype(np.int8).tobytes())
            digests[f'{name} {stage.name}'] = digest.hexdigest()[:16]
        monkeypatch.undo()
    assert digests == DIGESTS
