"""Sampler programs on eight data shards: an eighth of the work each, and nothing is exchanged between them."""

import dataclasses
import functools
import re

import jax
import pytest
import tiny

from zeroplay_jax.policy import attention, hf, sharding, transformer
from zeroplay_jax.rollout.sampler import Sampler, SamplerConfig

CONFIG = SamplerConfig(
    slots=32, context=96, chunk=8, fill_rows=16, burst=4, put_rows=4, put_tokens=16
)
CONFIGS = {
    'slots': CONFIG,
    'paged': dataclasses.replace(CONFIG, page=16, token_budget=64),
}
COLLECTIVE = re.compile(
    r' (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\('
)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return hf.read_config(
        tiny.make_folder(tmp_path_factory.mktemp('shards') / 'policy', num_hidden_layers=1)
    )


def compiled(model, config, mesh, name):
    """One program, compiled for weights that lie as the sampler places them."""
    sampler = Sampler(model, config, mesh)
    shapes = jax.eval_shape(functools.partial(transformer.init, model), jax.random.key(0))
    layout = sharding.sampler_shardings(shapes, mesh)

    def with_sharding(x, place):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    params = jax.tree.map(with_sharding, shapes, layout)
    empty = sampler.programs['empty'].lower().compile()
    state = jax.eval_shape(sampler.programs['empty'])
    state = jax.tree.map(with_sharding, state, empty.output_shardings)
    arguments = [params, state]
    if name == 'extend':
        slots, _ = sampler._arrange([], sampler.shard_config.fill_rows)
        arguments.append(slots)
    else:
        arguments.append(sampler._page_table())
    return sampler.programs[name].lower(*arguments).compile()


def operations(program):
    return program.cost_analysis()['flops']


@pytest.mark.parametrize(
    ('kind', 'name'), [('slots', 'extend'), ('slots', 'decode'), ('paged', 'decode')]
)
def test_a_shard_does_its_share_and_exchanges_nothing(model, kind, name, monkeypatch):
    # cost_analysis counts the body of a loop once, so the loop over rows of a prefill has to go.
    monkeypatch.setattr(attention, '_PREFILL_ROWS', CONFIG.fill_rows)
    one = compiled(model, CONFIGS[kind], sharding.make_mesh(), name)
    eight = compiled(model, CONFIGS[kind], sharding.make_mesh(1, 8, 1), name)
    # Of one device. What a shard does beyond its eighth is 5 % of that eighth at most.
    assert 0 < operations(eight) / operations(one) <= 1.05 / 8
    assert not COLLECTIVE.findall(eight.as_text())
