"""Attributes of a recipe that change while a run plays are named at a checkpoint, which does not hold them."""

import asyncio
import functools
import itertools
import random
from unittest import mock

import numpy as np
import pytest

from zeroplay_jax.configs import quickstart
from zeroplay_jax.recipes.datasets import EpochDataset
from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.selfplay.recipe import Recipe, RecipeAttributes
from zeroplay_jax.training.loop import Saver


class Score:
    def __init__(self):
        self.best = 0.0


class CounterRecipe(Recipe):
    def __init__(self):
        super().__init__(quickstart.get_config(), library=object())
        self.count = 0
        self.solved = {'easy': [0, 0]}
        self.rng = np.random.default_rng(0)
        self.random = random.Random(0)
        self.numbers = itertools.count()
        self.means = np.zeros(3)
        self.score = Score()
        self.limit = asyncio.Semaphore(2)
        self.dataset = EpochDataset(list('abc'), 0)

    @functools.cached_property
    def words(self):
        return {'a', 'b'}


@pytest.fixture
def recipe():
    return CounterRecipe()


def _saver(tmp_path, recipe):
    engine = mock.Mock(recipe=recipe, lost_attributes=set())
    return Saver(Hosts(), tmp_path, '', engine, mock.Mock(), {'seconds': 0.0, 'cursor': 0})


@pytest.mark.fault('M', 'a counter in a recipe')
def test_one_line_names_them_at_the_first_checkpoint_after_the_change(
    tmp_path, recipe, capsys, user_reads
):
    saver = _saver(tmp_path, recipe)
    saver.save(1)
    assert capsys.readouterr().err == ''
    recipe.count += 1
    recipe.later = 'new'
    saver.save(2)
    saver.save(3)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('warning: the recipe changed self.count, self.later while it ran')
    user_reads(line)


CHANGES = {
    'solved': lambda recipe: recipe.solved['easy'].append(1),
    'rng': lambda recipe: recipe.rng.random(),
    'random': lambda recipe: recipe.random.random(),
    'numbers': lambda recipe: next(recipe.numbers),
    'means': lambda recipe: np.add(recipe.means, 1, out=recipe.means),
    'score': lambda recipe: setattr(recipe.score, 'best', 0.5),
    'count': lambda recipe: delattr(recipe, 'count'),
}


@pytest.mark.parametrize('name', CHANGES)
@pytest.mark.fault('M', 'other state in a recipe: random generators, arrays, dictionaries, objects')
def test_state_of_any_kind_is_seen(recipe, name, user_reads):
    attributes = RecipeAttributes(recipe)
    CHANGES[name](recipe)
    assert attributes.changed() == [name]
    user_reads(attributes.warning())


def test_what_holds_no_state_of_a_run_is_not_named(recipe):
    attributes = RecipeAttributes(recipe)
    assert recipe.words

    async def wait():
        async with recipe.limit:
            async with asyncio.timeout(1):
                await asyncio.sleep(0)

    asyncio.run(wait())
    assert attributes.changed() == []
