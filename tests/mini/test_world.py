import json
import re

import pytest

from zeroplay_jax.configs import scope
from zeroplay_jax.mini import names as names_lib
from zeroplay_jax.mini import world as world_lib
from zeroplay_jax.settings.kinds import EXAMPLE_TASKS

World = world_lib.World


def names(world):
    values = {v for facts in world.facts.values() for v in facts.values()}
    closed = {v for kind in world_lib.CLOSED.values() for v in kind}
    return set(world.titles) | (values - closed)


def test_the_example_tasks_are_those_of_the_worlds_of_a_small_run():
    worlds = [World(seed) for seed in range(*scope.get_config('mini').world.train)]
    drawn = world_lib.evaluation_tasks(worlds, 12, (2, 3))
    expected = [(task['question'], [one['text'] for one in task['rubrics']]) for task in drawn]
    lines = map(json.loads, EXAMPLE_TASKS.read_text(encoding='utf-8').splitlines())
    assert [(line['task'], line['rubrics']) for line in lines] == expected


def test_names_are_unique_over_worlds_and_splits():
    worlds = [World(i) for i in range(60)] + [World(i, 'evaluation') for i in range(24)]
    seen = [name for world in worlds for name in names(world)]
    assert len(seen) == len(set(seen))
    ids = [p.id for world in worlds for p in world.passages]
    assert len(ids) == len(set(ids)) > 5000
    assert not names_lib.BLOCKED & set(seen)


def test_evaluation_questions():
    worlds = [World(i, 'evaluation') for i in range(6)]
    asked = lambda seed: world_lib.evaluation_questions(worlds, 60, hops=(1, 2, 3, 4), seed=seed)
    questions = asked(1)
    assert [q['hops'] for q in questions] == sorted((1, 2, 3, 4) * 60)
    assert len({q['question'] for q in questions}) == 240
    for q in questions:
        assert worlds[q['world']].resolve(q['question']) == (q['answers'][0], q['hops'])
    assert questions == asked(1) != asked(2)
    with pytest.raises(ValueError, match='distinct 1-hop'):
        world_lib.evaluation_questions(worlds[:1], 2000, hops=(1,))


def test_evaluation_tasks_ask_for_the_passage_at_the_end_of_a_chain():
    worlds = [World(i, 'evaluation') for i in range(6)]
    tasks = world_lib.evaluation_tasks(worlds, 50)
    assert [t['hops'] for t in tasks] == sorted((1, 2, 3, 4) * 50)
    assert len({t['question'] for t in tasks}) == 200
    for task in tasks:
        world = worlds[task['world']]
        subject = re.fullmatch(r'Describe (.*)\.', task['question'])[1]
        assert subject.count('the ') == task['hops'] - 1
        title = subject if task['hops'] == 1 else world.resolve(f'What is {subject}?')[0]
        # Each rubric names a fact of its own.
        values, rubrics = world.facts[title].values(), task['rubrics']
        assert title in world.titles and len(rubrics) == len(values)
        assert all(any(value in rubric['text'] for rubric in rubrics) for value in values)
