"""Programs for TPU slices: what is counted, and one real compile for a slice where libtpu is installed."""

import itertools

import jax
import pytest
import slice_compiler

from benchmarks import aot, aot_cases, tpu_programs, tpu_shapes
from zeroplay_jax.policy import sharding

BILLIONS = {
    'qwen2.5-3b': 3.09,
    'qwen2.5-7b': 7.62,
    'qwen3-8b': 8.19,
    'llama-3.1-8b': 8.03,
    'olmo-3-7b': 7.30,
}


@pytest.mark.parametrize('name', tpu_shapes.WHOLE_MODELS)
def test_models_have_the_sizes_that_they_are_known_by(name):
    shapes = tpu_programs.parameters(tpu_programs.sized(name))
    assert round(sum(x.size for x in jax.tree.leaves(shapes)) / 1e9, 2) == BILLIONS[name]


def test_what_leaves_the_chip_leaves_in_order_and_no_more_than_needed():
    beside = {'a': 30, 'b': 0, 'c': 20, 'd': 5}
    for needed, off in ((40, ''), (60, 'a'), (80, 'ac'), (96, 'ac')):
        settled = aot_cases.settle(needed, beside, ('a', 'b', 'c'), 100)
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
from benchmarks import tpu_programs as tp
from zeroplay_jax.policy import delta, sharding
from zeroplay_jax.rollout import scoring
tp.prepare_tpu()
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
    print(json.dumps([{k: [c.arguments, c.temporaries] for k, c in out.items()}, kernels, str(error)]))
"""


@pytest.mark.skipif(tpu_programs.tpu_compiler() is None, reason='libtpu is not installed')
def test_the_programs_of_a_small_model_compile_for_a_slice():
    found, kernels, error = slice_compiler.last_line(SMALL, timeout=600)
    assert set(found) == {'accumulate', 'apply', 'extend', 'decode', 'score'}
    assert all(0 < arguments < 2**34 for arguments, _ in found.values())
    assert kernels >= 3  # splash attention forward, again forward, and backward
    assert 'RESOURCE_EXHAUSTED' in error


def test_the_table_of_whole_weights_is_complete():
    rows = [row for row in aot_cases.stored_rows() if not row['rank']]
    assert len(aot.table(rows).split('\n')) == 2 + len(rows)
    compiled = {(row['model'], row['machine'], row['program']) for row in rows}
    assert len(compiled) == len(rows)
    fits = {}
    for row in rows:
        fits.setdefault((row['model'], row['machine']), {})[row['program']] = row['fits']
    assert fits.keys() == {*itertools.product(tpu_shapes.WHOLE_MODELS, tpu_shapes.TOPOLOGIES)}
    for case, programs in fits.items():
        # A sampler's programs end with the first that does not fit.
        is_large = case in (('olmo-3-7b', 'v5e:4x4'), ('olmo-3-7b', 'v5e:8x8'))
        whole = dict(extend=True, decode=True, update=True)
        assert programs == (dict(extend=False, update=True) if is_large else whole), case
