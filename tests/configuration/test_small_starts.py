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
SMALL = [('quickstart', ''), *((name, 'mini') for name in SYSTEMS)]
SMALL += [('ablations', f'{row}:mini') for row in ablations.ROWS]


@functools.cache
def library(seeds, near_misses):
    """What tasks start from: training worlds, without an index, which takes seconds."""
    worlds = [World(seed, near_misses=near_misses) for seed in range(*seeds)]
    passages = [(passage.title, passage.text) for world in worlds for passage in world.passages]
    return scripted.library(linked_documents(passages), WorldMaterial(worlds))


@pytest.mark.parametrize(('page', 'variant'), SMALL)
def test_a_small_run_has_its_files_and_its_tasks(page, variant):
    config = fields.config(page, variant)
    # As the command does, with what it names on this machine.
    rules.check(config)
    assert config.retrieval.kind == 'world'
    config = fields.frozen(config)
    material = library(tuple(config.world.train), config.world.near_misses)
    recipe = recipe_class(config.recipe)(config, material)
    first, *_ = recipe.phases()
    tasks = recipe.first_tasks()
    assert {step.phase.name for step, _ in tasks} >= {first.name}
    assert all(task.payload for _, task in tasks)
