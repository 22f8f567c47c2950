"""The GPU benchmark runs at small sizes on any device, and its costs are those of the work."""

import contextlib
import dataclasses
import functools
import io
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu, roofline
from zeroplay_jax.policy import attention, transformer
from zeroplay_jax.types import UserError

MODEL = gpu.make_model(True)


@pytest.fixture(scope='module')
def printed():
    with contextlib.redirect_stdout(io.StringIO()) as output:
        gpu.main(['--small'])
    return output.getvalue().splitlines()


def test_the_small_run_measures_everything(printed):
    found = json.loads(printed[-1])
    assert found['small'] is True and found['model'] == 'small' and found['dtype'] == 'bfloat16'
    assert found['jax'] == jax.__version__ and found['peak']['origin'] == 'measured here'
    assert (
        [row['slots'] for row in found['decode']]
        == [row['slots'] for row in found['prefill']]
        == [4, 2]
    )
    for row in [*found['decode'], *found['prefill'], found['update']]:
        assert row['tokens_per_second'] > 0 and row['seconds'] > 0 and row['mfu'] > 0
    assert all(row['bandwidth_share'] > 0 for row in found['decode'])
    s = gpu.SMALL
    assert found['update']['tokens_per_second'] * found['update']['seconds'] == pytest.approx(
        s.rows * s.tokens * s.micro, rel=1e-2
    )
    assert 'jaxlib' in printed[0] and 'driver' in printed[0] and 'AdamW moments' in printed[1]


def test_the_sampler_alone_needs_no_learner(monkeypatch, capsys):
    monkeypatch.setattr(gpu, 'make_learner', None)
    gpu.main(['--small', '--skip-update', '--slots', '3'])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found['update'] is None and [row['slots'] for row in found['decode']] == [3]


def test_the_real_shape_is_that_of_qwen():
    model = gpu.make_model(False)
    assert (
        sum(x.size for x in jax.tree.leaves(gpu.parameter_shapes(model))) == 3_085_938_688
    )  # as the checkpoint's card says
    assert model.dtype == 'bfloat16' and model.remat


def test_counted_operations_are_those_of_the_compiled_program():
    # One layer, so that XLA's own count needs no loop; dense attention does twice the causal products.
    model = dataclasses.replace(MODEL, layers=1, remat=False, dtype='float32', logit_chunk=10**6)
    shapes = jax.eval_shape(functools.partial(transformer.init, model), jax.random.key(0))
    places = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    step = jax.jit(jax.grad(lambda p, *batch: transformer.score(model, p, *batch)[0].sum()))
    compiled = step.lower(shapes, places, places, places).compile().cost_analysis()
    need = roofline.update_cost(model, 64, 64).flops
    attention = 3 * 64 * model.layers * 2 * model.heads * model.head_dim * 64
    assert 0.9 < compiled['flops'] / (need + attention) < 1.25


def test_shares_are_of_the_peak():
    found = gpu.figures(gpu.Measurement(2.0, 10, roofline.Cost(8.0, 4.0)), roofline.Peak(8.0, 8.0))
    assert found == dict(tokens_per_second=5.0, seconds=2.0, mfu=0.5, bandwidth_share=0.25)


def test_costs_grow_with_slots_and_lengths():
    decode = functools.partial(roofline.decode_cost, MODEL)
    assert decode(4, 0).flops == 4 * decode(1, 0).flops and decode(4, 0).bytes == decode(1, 0).bytes
    weights = sum(
        x.size
        for path, x in jax.tree_util.tree_leaves_with_path(gpu.parameter_shapes(MODEL))
        if x.ndim == 2
    )
    assert decode(1, 0).flops == 2 * weights and decode(1, 0).bytes == 2 * weights
    c = gpu.SMALL.sampler(1)
    cache = attention.empty_cache(
        MODEL.layers, 1, c.positions, MODEL.kv_heads, MODEL.head_dim, MODEL.dtype
    )
    token = sum(x.nbytes for x in jax.tree.leaves(cache)) / c.positions
    assert decode(2, 10).bytes - decode(2, 0).bytes == 2 * 10 * token
    assert roofline.prefill_cost(MODEL, 8, 16).flops < roofline.update_cost(MODEL, 8, 16).flops / 3


def test_what_does_not_fit_is_said_before_and_while_it_runs(capsys):
    real = gpu.make_model(False)
    gpu.check_memory(real, gpu.Sizes(), True, 80 * 10**9)
    with pytest.raises(UserError, match=r'GB are needed, the device has 40 GB: use --skip-update'):
        gpu.check_memory(real, gpu.Sizes(), True, 40 * 10**9)
    gpu.check_memory(real, gpu.Sizes(), False, 22 * 10**9)

    def full():
        raise RuntimeError('RESOURCE_EXHAUSTED: Out of memory')

    assert gpu.call_if_it_fits('512 slots', full) is None
    assert '512 slots: does not fit' in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError):
        gpu.call_if_it_fits('update', lambda: 1 / 0)


def test_without_a_gpu_one_line_says_so():
    if jax.devices()[0].platform == 'gpu':
        pytest.skip('there is a GPU here')
    with pytest.raises(UserError, match='JAX finds no GPU, only cpu: install'):
        gpu.main([])
