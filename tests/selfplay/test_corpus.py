"""The quickstart's corpus: large enough for a real index, and nothing of the evaluation within training's reach."""

import re

import numpy as np
import pytest

from configs import quickstart
from zeroplay_jax.mini.world import World
from zeroplay_jax.selfplay import corpus as corpora


@pytest.fixture(scope='module')
def config():
    return quickstart.get_config()


@pytest.fixture(scope='module')
def corpus(config):
    return corpora.build(config)


def held_out_names(config):
    first, count = config.world.evaluation
    worlds = [World(first + i, 'evaluation', config.world.near_misses) for i in range(count)]
    return {w for world in worlds for p in world.passages for w in re.findall(r'\w+', p.title)}


def test_both_indexes_are_real_ones(corpus):
    for index in (corpus.index, corpus.held_out):
        assert len(index) >= 5_000 and index.parameters['kind'] == 'scann'


def test_training_finds_nothing_of_the_evaluation(config, corpus):
    """Neither by a training title, nor by a held-out one, nor in any document that a proposer may start from."""
    names = held_out_names(config)
    queries = [d.title for d in corpus.documents[::7]] + sorted(names)[::3]
    for found in corpus.search(queries):
        assert len(found) == 3
        assert not names & {w for d in found for w in re.findall(r'\w+', d['title'] + ' ' + d['text'])}
    assert not names & {w for d in corpus.documents for w in re.findall(r'\w+', d.title + ' ' + d.text)}


def test_evaluation_questions_can_be_answered_by_search(config, corpus):
    names = held_out_names(config)
    for question in corpus.questions[::10]:
        (start,) = names & set(re.findall(r'\w+', question['question']))
        assert corpus.search_held_out([start])[0][0]['title'] == start
    assert [q['hops'] for q in corpus.questions] == sorted(np.repeat(config.eval.hops, config.eval.questions))
