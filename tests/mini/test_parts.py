"""The demonstrations of the start of the main job: which chains its roles were shown, and which its parts."""

import re

import numpy as np
import pytest

from tools.checkpoints import demo, library, parts
from tools.checkpoints.demos import ErrorRates
from zeroplay_jax.types import ENV, POLICY, PROMPT

pytestmark = pytest.mark.results

COUNT = 80
ROLES = sorted(set(parts.ROLES) & set(demo.FORMS))
PARTS = sorted(set(parts.ROLES) & set(demo.EXERCISES))


@pytest.fixture(scope='module')
def worlds():
    return library.Library(range(3), 'train', deal=1)


def episodes(worlds, name):
    rng = np.random.default_rng(0)
    return [parts.ROLES[name].write(worlds, rng, ErrorRates()) for _ in range(COUNT)]


def longest_chain(text):
    """Returns the most relations that a phrase of a text nests: 'the river of the birthplace of' has two."""
    chains = re.findall(r'(?:the \w+ of )+', text)
    return max((chain.count(' of ') for chain in chains), default=0)


def written(episode):
    return ' '.join(part.content for part in episode.parts if part.source != ENV)


def test_every_role_of_the_five_systems_is_demonstrated():
    assert ROLES == sorted(demo.FORMS)
    assert all(parts.ROLES[name].share > 0 for name in ROLES)
    shares = {name: role.share for name, role in parts.ROLES.items()}
    assert sum(shares[name] for name in PARTS) < 0.1 * sum(shares.values())


@pytest.mark.parametrize('name', ROLES)
def test_no_prompt_and_no_turn_of_a_role_has_a_chain_of_three(worlds, name):
    chains = []
    for episode in episodes(worlds, name):
        # Documents are sentences of the world; they hold no chain.
        prompt = ' '.join(str(value) for value in episode.fields.values())
        chains.append(longest_chain(f'{prompt} {written(episode)}'))
        assert int(episode.fields.get('hops', 1)) <= 2
        assert episode.fields.get('path', '').count('>') <= 2
        learnt_searches = written_by_policy(episode).count('<search>')
        assert learnt_searches <= 2
    assert max(chains) == (1 if name in ('challenger', 'task_solver') else 2)


def written_by_policy(episode):
    return ' '.join(part.content for part in episode.parts if part.source == POLICY)


@pytest.mark.parametrize('name', PARTS)
def test_parts_have_up_to_six_hops_and_never_a_question_with_its_solution(worlds, name):
    chains = []
    for episode in episodes(worlds, name):
        prompt = ' '.join(str(value) for value in episode.fields.values())
        everything = f'{prompt} {written(episode)}'
        chains.append(longest_chain(everything))
        if 'What is' in everything:
            assert '<search>' not in everything
            # `ask` is given the answer, and `restate` has none.
            given = ' '.join(part.content for part in episode.parts if part.source == PROMPT)
            answers = re.findall(r'<answer> (\w+)</answer>', everything)
            assert all(f'is {answer}</think>' in given for answer in answers)
        else:
            assert '<answer>' not in everything
    assert max(chains) == 6


def test_redundant_searches_count_as_context(worlds):
    for name in ('solver', 'solver_with_path', 'proposer'):
        sources = [
            part.source
            for episode in episodes(worlds, name)
            for part in episode.parts
            if part.source != ENV and '<search>' in part.content
        ]
        share = sources.count(PROMPT) / len(sources)
        expected = parts.REDUNDANT_SEARCHES / (1 + parts.REDUNDANT_SEARCHES)
        assert abs(share - expected) < 0.08


@pytest.mark.parametrize('name', ['proposer', 'walk'])
def test_thoughts_count_the_hops_that_are_left(worlds, name):
    for episode in episodes(worlds, name):
        learnt = [int(number) for number in re.findall(r'(\d) hops', written_by_policy(episode))]
        assert learnt == list(range(episode.fields['hops'], 0, -1))
