"""The table of the papers' hyperparameters, and that each config has the values that it says."""

import asyncio
import importlib
import inspect
import pathlib
import runpy
import types

import jax
import jax.numpy as jnp
import pytest
from trajectories import ASKS_SOLVER

from zeroplay_jax.configs import common
from zeroplay_jax.configuration import fields
from zeroplay_jax.evaluation import answering
from zeroplay_jax.learner import optimizer
from zeroplay_jax.objectives import rewards
from zeroplay_jax.selfplay.judge import Judge, NoReply
from zeroplay_jax.selfplay.recipe import BUILT_IN
from zeroplay_jax.types import Question, TaskDropped, UserError

DOCS = pathlib.Path(__file__).parents[2] / 'docs'
PAGE = runpy.run_path(str(DOCS / 'hyperparameter_page.py'))
ENTRIES = PAGE['load']()
TABLE = {system: ENTRIES['all'] | ENTRIES[system] for system in ENTRIES if system != 'all'}
# What a config says about the machine, evaluations, or files of the user, and not about the method.
MACHINE = """
    plan mesh. micro. retrieval. eval.file eval.questions eval.every policy.remat policy.logits prompts sampler.slots
    sampler.chunk sampler.burst inputs. checkpoint.
"""


def values(system):
    """Field → value of a paper's config."""
    page = importlib.import_module(f'zeroplay_jax.configs.{system}')
    return {name: plain(value) for name, value in fields.leaves(page.get_config()).items()}


def plain(value):
    return list(value) if isinstance(value, tuple) else value


def fields_of(name):
    """The config fields of an entry; [] of one in brackets, which `CONSTANTS` has."""
    if name.startswith('('):
        return []
    section, _, field = name.partition('.')
    return [f'proposer.{field}', f'solver.{field}'] if section == 'both' else [name]


def default(function, parameter):
    return inspect.signature(function).parameters[parameter].default


def optimiser():
    """'AdamW' if a gradient of zero leaves the decay alone: rate · decay, outside the moments."""
    role = common.get_config('drzero').solver
    role.update(learning_rate=0.5, weight_decay=0.25, warmup_steps=0)
    weights = {'matrix': jnp.ones((2, 2))}
    transform = optimizer.make(role)
    zero = jax.tree.map(jnp.zeros_like, weights)
    updates, _ = transform.update(zero, transform.init(weights), weights)
    return 'AdamW' if (updates['matrix'] == -0.125).all() else 'another one'


def evaluation_temperature():
    asked = []

    async def ask(role, identity, samples, temperature, **fields):
        asked.append(temperature)
        raise TaskDropped('enough')

    context = types.SimpleNamespace(ask=ask)
    question = Question('q', ('a',))
    with pytest.raises(UserError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, 'prompt_fields', lambda *_: {})
        asyncio.run(answering.answer(context, ASKS_SOLVER, (0, 0), question))
    return asked[0]


def rubric_temperature():
    asked = []

    async def write(context, identity, prompt, fields, temperature):
        asked.append(temperature)
        raise NoReply('enough')

    asyncio.run(Judge(write, (3, 5)).rubrics((0,), 'task', 'document'))
    return asked[0]


# Name in brackets → what the code does: such an entry is no field of the config.
CONSTANTS = {
    '(optimiser)': optimiser,
    '(temperature of evaluations)': evaluation_temperature,
    '(temperature of rubrics)': rubric_temperature,
    # The score of an answer is multiplied by the length factor alone (SCOPE eq. 6).
    '(weight of rubrics, solver)': lambda: rewards.length_factor(0, soft=1024, hard=2048),
    # The difficulty is added as it is (SCOPE eq. 4), and is largest at the target.
    '(weight of difficulty, challenger)': lambda: rewards.difficulty(4, 8, 'triangle', 0.5),
    '(length penalty floor)': lambda: default(rewards.length_factor, 'floor'),
    '(search reward max turns)': lambda: default(rewards.search_bonus, 'enough'),
}


def test_constants_of_the_code_are_those_of_the_table():
    names = set()
    for table in TABLE.values():
        for name in table:
            if name.startswith('('):
                names.add(name)
                assert CONSTANTS[name]() == table[name]['ours'], name
    assert names == set(CONSTANTS)


@pytest.mark.parametrize('system', BUILT_IN)
def test_a_config_has_the_values_of_the_table(system):
    config = values(system)
    wrong = {}
    for name, entry in TABLE[system].items():
        for field in fields_of(name):
            if config[field] != entry['ours']:
                wrong[field] = (config[field], entry['ours'])
    assert not wrong, 'field: (the config, the table)'


@pytest.mark.parametrize('system', BUILT_IN)
def test_what_an_entry_calls_itself_is_true(system):
    for name, entry in TABLE[system].items():
        kind, ours, paper = entry['kind'], entry['ours'], entry.get('paper')
        assert kind in PAGE['KINDS'] and ('source' in entry) == ('paper' in entry), name
        if kind == 'choice':
            # A range is written as a text.
            assert isinstance(paper, str) or ours in {*paper, *map('checkpoints/{}'.format, paper)}
            assert isinstance(paper, str) or entry['why'], name
        elif kind in ('paper', 'deviates', 'form'):
            assert paper is not None and (paper == ours) == (kind == 'paper'), name
            assert kind != 'deviates' or entry['why'], name
        else:
            assert paper is None, name


@pytest.mark.parametrize('system', BUILT_IN)
def test_every_field_that_a_config_sets_for_its_method_is_in_the_table(system):
    listed = {field for name in TABLE[system] for field in fields_of(name)}
    defaults = {
        name: plain(value) for name, value in fields.leaves(common.get_config(system)).items()
    }
    changed = {name for name, value in values(system).items() if value != defaults[name]}
    assert not {name for name in changed - listed if not name.startswith(tuple(MACHINE.split()))}
