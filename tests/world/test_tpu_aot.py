"""The programs of a run compile for a TPU slice, where libtpu is installed."""

import json

import pytest
from python_process import run_python

from benchmarks.machines import programs

# Whole weights split over a slice; a sampler with slots, and one with pages and JAX's ragged kernel; `log_probs`.
SMALL = """
import dataclasses, json, jax, numpy as np
from benchmarks.machines import programs as ours
from zeroplay_jax.settings.schema import TrainedRole
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import delta, sharding, transformer
from zeroplay_jax.rollout import sampler, scoring
ours.prepare_tpu()
name, machine = 'qwen2.5-3b', ours.machine_of('v5e:4x4')
mesh = sharding.make_mesh(4, 2, 2, devices=machine.devices)
host = sharding.make_mesh(1, 2, 2, devices=machine.host_devices)
fields = dict(dtype='bfloat16', remat=True, attention='splash', scan=True, mesh=mesh)
one, two = ours.sized(name, 1, **fields), ours.sized(name, 2, dtype='bfloat16')
solver = {'solver': TrainedRole()}
lowered = Learner(one, mesh, solver, ours.parameters(one), (8, 4096)).lower('solver')
weights = jax.eval_shape(lambda p: transformer.published(two, p), ours.parameters(two))
weights = ours.with_shardings(weights, sharding.sampler_shardings(weights, host))
sizes = dict(context=4096, chunk=256, fill_rows=16, burst=16, put_rows=16, put_tokens=256, eos=(0, 1))
def slots(count, **pages):
    return ours.slot_state(two, sampler.SamplerConfig(slots=count, **sizes, **pages), host)
programs, state = slots(16)
lowered['extend'] = programs['extend'].lower(weights, state, np.zeros(16, np.int32))
lowered['decode'] = programs['decode'].lower(weights, state)
pages = dict(page=64, pages=256, token_budget=64, decode_buckets=(8,), attention='ragged')
programs, state = slots(16, **pages)
table = jax.ShapeDtypeStruct((16, 4352 // 64), np.int32, sharding=sharding.rows(host))
lowered['pages'] = programs['decode'].lower(weights, state, table)
scores = scoring.programs(two, 4096 + 256, host)
cache = jax.eval_shape(scores['empty'])
cache = ours.with_shardings(cache, delta.layout(cache, host, sharding.cache(host)))
tokens = np.zeros((sharding.data_shards(host), 4096 // 256, 257), np.int32)
start = tokens[..., 0]
arguments = (weights, cache, tokens, start, start, start, start[:, 0], None)
lowered['score'] = scores['score'].lower(*arguments)
out = {k: ours.compile_program(low) for k, low in lowered.items()}
kernels = [out[k].text.count('tpu_custom_call') for k in ('accumulate', 'pages')]
programs, state = slots(16384)
try:
    ours.compile_program(programs['decode'].lower(weights, state))
except ours.OutOfMemory as error:
    print(json.dumps([{k: [c.arguments, c.temporaries] for k, c in out.items()}, kernels, str(error)]))
"""


@pytest.mark.skipif(programs.tpu_compiler() is None, reason='libtpu is not installed')
def test_the_programs_of_a_small_model_compile_for_a_slice():
    # In a process of its own, because libtpu allows one user at a time.
    done = run_python('-c', SMALL, XLA_FLAGS='')
    assert done.returncode == 0, done.stderr[-2000:]
    found, (splash, ragged), error = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {'accumulate', 'apply', 'extend', 'decode', 'pages', 'score'}
    assert all(0 < arguments < 2**34 for arguments, _ in found.values())
    # Splash attention forward, again forward, and backward; pages in steps with and without chunks.
    assert splash >= 3 and ragged >= 2
    assert 'RESOURCE_EXHAUSTED' in error
