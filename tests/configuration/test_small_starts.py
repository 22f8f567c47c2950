"""Every config and every row of a paper's table starts as a small run: what it names is there, and it has tasks."""

import functools

import pytest
import scripted

from zeroplay_jax.configs import ablations
from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.mini.world import World
from zeroplay_jax.selfplay.library import WorldMaterial
from zeroplay_jax.selfplay.library_builder import linked_documents
from zeroplay_jax.selfplay.recipe import recipe_class

SYSTEMS = ('drzero', 'piplay', 'ssp', 'dspo', 'scope', 'cross')
SMALL = ['quickstart', *SYSTEMS, *ablations.ROWS]


def small_config(name):
    if '/' in name:
        return ablations.get_config(f'{name}:mini')
    return fields.config(name, *(['mini'] if name in SYSTEMS else []))


@functools.cache
def library(name):
    """What tasks of a system start from: the worlds of its small run, without an index, which takes seconds."""
    settings = small_config(name).world
    worlds = [World(seed, near_misses=settings.near_misses) for seed in range(*settings.train)]
    passages = [(passage.title, passage.text) for world in worlds for passage in world.passages]
    return scripted.library(linked_documents(passages), WorldMaterial(worlds))


@pytest.mark.parametrize('name', SMALL)
def test_a_small_run_has_its_files_and_its_tasks(name):
    config = small_config(name)
    system = name.split('/')[0]
    # As the command does, with what it names on this machine.
    rules.check(config)
    world = small_config(system).world
    assert config.world == world and config.retrieval.kind == 'world'
    config = fields.frozen(config)
    recipe = recipe_class(config.recipe)(config, library(system))
    first, *_ = recipe.phases()
    tasks = recipe.first_tasks()
    assert {step.phase.name for step, _ in tasks} >= {first.name}
    assert all(task.payload for _, task in tasks)
