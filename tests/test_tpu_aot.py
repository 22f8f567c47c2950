"""The TPU benchmark: what it counts, and one real compile for a TPU slice where libtpu is installed."""

import dataclasses
import json
import pathlib

import jax
import pytest
import slice_compiler

from benchmarks import roofline, tpu_aot, tpu_programs, tpu_shapes
from zeroplay_jax.policy import sharding

ROOT = pathlib.Path(__file__).parents[1]
BILLIONS = {
    'qwen2.5-3b': 3.09,
    'qwen2.5-7b': 7.62,
    'qwen3-8b': 8.19,
    'llama-3.1-8b': 8.03,
    'olmo-3-7b': 7.30,
}


@pytest.mark.parametrize('name', tpu_shapes.MODELS)
def test_models_have_the_sizes_that_they_are_known_by(name):
    shapes = tpu_programs.parameters(tpu_programs.sized(name))
    assert round(sum(x.size for x in jax.tree.leaves(shapes)) / 1e9, 2) == BILLIONS[name]


def test_least_operations_of_a_model_are_counted_by_hand():
    model = dataclasses.replace(
        tpu_programs.sized('qwen2.5-3b'),
        vocab_size=10,
        hidden_size=4,
        intermediate_size=6,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=2,
        windows=(2, 0),
    )
    layer = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6
    matrices, head = roofline.matrix_weights(model)
    assert (matrices, head) == (layer, 40)
    stored = jax.tree.leaves(tpu_programs.parameters(model))
    assert sum(x.size for x in stored if x.ndim > 1) == 2 * layer + 40
    # A row of 3: with a window of 2 its places see 1, 2, 2 places, else 1, 2, 3.
    products = 4 * 2 * 2 * (5 / 3 + 2)
    assert roofline.forward(model, 9, 3) == pytest.approx(9 * (2 * (2 * layer + 40) + products))


def test_collectives_are_read_from_a_program():
    text = """
    %a = bf16[16,8]{1,0} all-gather(%x), channel_id=1, dimensions={0}
    %b = bf16[16,8]{1,0} all-gather(%y), channel_id=1, dimensions={0}
    %c = (f32[4]{0}, f32[2,2]{1,0}) all-reduce(%x, %y), channel_id=2, to_apply=%add
    %d = (bf16[2]{0}, bf16[8]{0}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=3
    %e = bf16[8]{0} collective-permute-done(%d)
    """
    assert roofline.collectives(text) == {
        'all-gather': 256,
        'all-reduce': 32,
        'collective-permute': 16,
    }


def test_what_leaves_the_chip_leaves_in_order_and_no_more_than_needed():
    beside = {'a': 30, 'b': 0, 'c': 20, 'd': 5}
    for needed, off in ((40, ''), (60, 'a'), (80, 'ac'), (96, 'ac')):
        settled = tpu_programs.settle(needed, beside, ('a', 'b', 'c'), 100)
        kept = needed + 55 - sum(beside[name] for name in off)
        assert settled == dict(fits=kept <= 100, hbm_bytes=kept, offloaded=list(off))


def test_state_on_a_chip_is_its_share():
    mesh = sharding.make_mesh(2, 2, 2)
    learner = tpu_programs.learner('qwen2.5-3b', mesh, 4, layers=1)
    masters = tpu_programs.bytes_per_chip(learner.state['params'])
    whole = 4 * sum(x.size for x in jax.tree.leaves(learner.state['params']))
    vectors = 4 * sum(x.size for x in jax.tree.leaves(learner.state['params']) if x.ndim == 1)
    assert whole / 8 <= masters <= (whole - vectors) / 8 + vectors
    moments = tpu_programs.bytes_per_chip(learner.state['opt'])
    assert 2 * masters <= moments <= 2 * masters + 64


SMALL = """
import json, jax, numpy as np
from benchmarks import tpu_aot, tpu_programs as tp
from zeroplay_jax.policy import delta, sharding
from zeroplay_jax.rollout import scoring
tpu_aot.prepare()
name, topology = 'qwen2.5-3b', 'v5e:4x4'
mesh, host = tp.mesh_of(name, topology), tp.host_mesh(name, topology)
lowered = tp.learner(name, mesh, 8, layers=1).lower('solver')
lowered |= tp.lower_sampler(name, host, 16, layers=2)
# The passes of `log_probs` over a full slot.
programs = scoring.programs(tp.sized(name, 2, dtype='bfloat16'), tp.TOKENS + tp.CHUNK, host)
cache = jax.eval_shape(programs['empty'])
cache = tp.with_shardings(cache, delta.layout(cache, host, sharding.cache(host)))
tokens = np.zeros((sharding.data_shards(host), tp.TOKENS // tp.CHUNK, tp.CHUNK + 1), np.int32)
start = tokens[..., 0]
arguments = (tp.published(name, host, 2), cache, tokens, start, start, start, start[:, 0], None)
lowered['score'] = programs['score'].lower(*arguments)
out = {k: tp.compile_program(low) for k, low in lowered.items()}
kernels = out['accumulate'].text.count('tpu_custom_call')
try:
    tp.compile_program(tp.lower_sampler(name, host, 16384, layers=2)['decode'])
except tp.OutOfMemory as error:
    print(json.dumps([{k: [c.arguments, c.temporaries, c.flops] for k, c in out.items()}, kernels, str(error)]))
"""


@pytest.mark.skipif(tpu_aot.compiler_folder() is None, reason='libtpu is not installed')
def test_the_programs_of_a_small_model_compile_for_a_slice():
    found, kernels, error = slice_compiler.last_line(SMALL, timeout=600)
    assert set(found) == {'accumulate', 'apply', 'extend', 'decode', 'score'}
    assert all(flops > 0 and 0 < arguments < 2**34 for arguments, _, flops in found.values())
    assert kernels >= 3  # splash attention forward, again forward, and backward
    assert 'RESOURCE_EXHAUSTED' in error


def test_the_tables_of_the_pages_are_what_was_found():
    rows = json.loads(tpu_aot.RESULTS.read_text())['rows']
    assert len(tpu_aot.table(rows).split('\n')) == 2 + len(rows)
    found = {(r['model'], r['topology'], r['program']): r for r in rows}
    assert len(found) == 3 * len(tpu_shapes.MODELS) * len(tpu_shapes.TOPOLOGIES)
    assert all(0.9 < r['flops_ratio'] <= 1.35 for r in rows)
    assert all(row['fits'] for row in rows)
    assert tpu_aot.model_table(rows) == tpu_aot.RESULTS.with_suffix('.tsv').read_text()
