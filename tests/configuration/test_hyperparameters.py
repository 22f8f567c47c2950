"""The table of the papers' hyperparameters, and that each config has the values that it says."""

import json
import pathlib
import runpy

import pytest

from zeroplay_jax.configs import common
from zeroplay_jax.configuration import fields
from zeroplay_jax.selfplay.recipe import BUILT_IN

DOCS = pathlib.Path(__file__).parents[2] / 'docs'
PAGE = runpy.run_path(str(DOCS / 'hyperparameter_page.py'))
ENTRIES = PAGE['load']()
TABLE = {system: ENTRIES['all'] | ENTRIES[system] for system in ENTRIES if system != 'all'}
# What a config says about the machine, evaluations, or files of the user, and not about the method.
MACHINE = """
    plan mesh. micro. retrieval. eval.file eval.questions eval.every policy.remat policy.logits prompts sampler.slots
    sampler.chunk sampler.burst inputs. checkpoint.
"""


def values(config):
    """Field → value of a config, as the table writes it."""
    return json.loads(json.dumps(dict(fields.leaves(config))))


def of_paper(system):
    return values(fields.config(system))


def fields_of(name):
    """The config fields of an entry; [] of one in brackets, which is no field."""
    if name.startswith('('):
        return []
    section, _, field = name.partition('.')
    return [f'proposer.{field}', f'solver.{field}'] if section == 'both' else [name]


@pytest.mark.parametrize('system', BUILT_IN)
def test_a_config_has_the_values_of_the_table(system):
    config = of_paper(system)
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
    defaults = values(common.get_config(system))
    changed = {name for name, value in of_paper(system).items() if value != defaults[name]}
    assert not {name for name in changed - listed if not name.startswith(tuple(MACHINE.split()))}
