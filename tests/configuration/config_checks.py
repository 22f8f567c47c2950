"""What tests of configs share: the line of a refused config, and the command in a process of its own."""

import ast
import json
import pathlib

from ml_collections import ConfigDict
from python_process import run_python
from refused_calls import refused

from zeroplay_jax.configuration import fields, rules
from zeroplay_jax.policy.adapter_config import CONFIG_FILE, AdapterConfig
from zeroplay_jax.settings.kinds import BUILT_IN_CHECKPOINT

ROOT = pathlib.Path(__file__).parents[2]
FILES = ('config.json', 'tokenizer.json', 'model.safetensors')


def message(config):
    return refused(rules.check, config)


def write_adapter(folder, **changes):
    """The config of an adapter over the built-in checkpoint, with these fields changed; its folder as a text."""
    linears = ('down', 'gate', 'k', 'o', 'q', 'up', 'v')
    stored = AdapterConfig(rank=4, alpha=32.0, linears=linears, base=BUILT_IN_CHECKPOINT)
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(stored.fields() | changes))
    return str(folder)


def run(*arguments):
    return run_python('-X', 'importtime', '-m', 'zeroplay_jax.main', *arguments)


# A search server, and a folder that is not there.
SERVED = 'retrieval.kind=http retrieval.url=http://127.0.0.1:8000 retrieval.path=indexes/nowhere'
# A run on one device, rollouts of older weights that are corrected, a role with a value network, and a recipe with
# rewards per turn.
ONE_DEVICE = ' cpu_devices=1 mesh.replica=1'
AHEAD = """
    rollout.ahead=1 proposer.tis_cap=2.0 proposer.old_logp=trainer solver.tis_cap=2.0 solver.old_logp=trainer
"""
VALUE = """
    solver.baseline=value solver.scale=batch solver.loss=token_pg solver.aggregation=token solver.samples=1
    solver.filter_groups=False value_network.learning_rate=1e-3
"""
TURN = 'recipe=examples.turn_credit.recipe solver.advantage=turn solver.scale=none solver.loss=token_pg'


def value_of(text):
    """A number, tuple or bool as Python writes it; any other text is itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return float(text) if text in ('inf', 'nan') else text


# Of the quickstart, around which the rows of the table change a little.
SIZES = {
    'rollout.max_turns': 5,
    'sampler.context': 512,
    'micro.rows': 8,
    'micro.tokens': 512,
    'schedule.hop_ratio': (4, 3, 2, 1),
}


def check(page, changes='', **options):
    """The verdict of the rules about a page, such as drzero:mini, whose fields are changed; -NAME removes a field."""
    config = fields.config(*page.split(':'))
    # As a file may write a field, without the types of the others.
    config = ConfigDict(config.to_dict(), type_safe=False)
    if page == 'quickstart':
        config.update_from_flattened_dict(SIZES)
    for change in changes.split():
        name, _, text = change.partition('=')
        if name.startswith('-'):
            section, _, field = name.removeprefix('-').partition('.')
            del config[section][field]
        else:
            section = name.partition('.')[0]
            if '.' in name and section not in config:
                config[section] = ConfigDict()
            config.update_from_flattened_dict({name: value_of(text)})
    rules.check(config, **options)
    return 'sound'


def given(words):
    """The fields that differ from the defaults with these flags."""
    config, defaults = fields.default_config(), fields.leaves(fields.default_config())
    fields.put(config, fields.flags_by_field(words.split()))
    return {name: value for name, value in fields.leaves(config).items() if value != defaults[name]}
