"""The sampler and the update step on one GPU, at the shape of Qwen2.5-3B in bfloat16, with random weights.

    python -m benchmarks.gpu                     # needs a GPU of 80 GB
    python -m benchmarks.gpu --skip-update       # the sampler alone: 24 GB are enough
    python -m benchmarks.gpu --small             # the same code at small shapes, on anything; its figures mean nothing

Everything that a run keeps is on the device at once: float32 weights and AdamW moments, the bfloat16 weights that the
sampler reads, the slots, and in the update the gradients. The sampler is measured at several slot counts; the fewest
slots stay for the update. No checkpoint is read: the weights are made on the device.

Shares are of the peaks in PEAKS, dense and without sparsity; of a GPU that is not there, of what a matrix product and
a copy reach here. Counted is what the result needs: causal attention, no recomputation (MFU as in Chowdhery et al.
2022, arXiv:2204.02311, appendix B), every weight read once per decode step, and keys and values up to where a slot is.

The last line is one JSON object; rates are in tokens per second, memory in bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from benchmarks.tpu_shapes import model_config
from zeroplay_jax.configs import common
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.learner.packing import pack
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout.sampler import PutRow, Sampler
from zeroplay_jax.rollout.slot_programs import SamplerConfig
from zeroplay_jax.types import POLICY, Row, Trajectory, UserError, identity_key


class Peak(NamedTuple):
    """Operations per second of a dense bfloat16 product with float32 sums, and bytes per second of main memory."""

    flops: float
    bandwidth: float


# By the name that the driver gives; from the makers' data sheets, which often print twice the operations (sparsity).
PEAKS = {
    'NVIDIA B200': Peak(2250e12, 8.0e12),
    'NVIDIA H200': Peak(989e12, 4.8e12),
    'NVIDIA H100 80GB HBM3': Peak(989e12, 3.35e12),
    'NVIDIA H100 NVL': Peak(835e12, 3.9e12),
    'NVIDIA H100 PCIe': Peak(756e12, 2.0e12),
    'NVIDIA GH200 480GB': Peak(989e12, 4.0e12),
    'NVIDIA A100-SXM4-80GB': Peak(312e12, 2.039e12),
    'NVIDIA A100-SXM4-40GB': Peak(312e12, 1.555e12),
    'NVIDIA A100 80GB PCIe': Peak(312e12, 1.935e12),
    'NVIDIA L40S': Peak(362e12, 0.864e12),
    'NVIDIA L4': Peak(121e12, 0.3e12),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The work: rollouts of `prompt` + `generated` tokens, and updates of micro × rows × tokens tokens."""

    slots: tuple[int, ...] = (256, 128, 32)  # the last ones stay for the update
    prompt: int = 1024
    generated: int = 256
    context: int = 2048
    chunk: int = 256
    fill_rows: int = 16
    burst: int = 16
    rows: int = 4
    tokens: int = 1024
    micro: int = 4
    repeats: int = 3
    matmul: int = 8192  # of the measured peak
    copied: int = 1 << 30  # bytes

    def sampler(self, slots: int) -> SamplerConfig:
        """Sampler of that many slots; without an end token, so that every slot is always busy."""
        return SamplerConfig(
            slots,
            self.context,
            self.chunk,
            min(self.fill_rows, slots),
            self.burst,
            min(16, slots),
            self.prompt,
        )


SMALL = Sizes(
    slots=(4, 2),
    prompt=16,
    generated=8,
    context=32,
    chunk=8,
    fill_rows=2,
    burst=4,
    rows=2,
    tokens=16,
    micro=2,
    repeats=1,
    matmul=64,
    copied=1 << 16,
)


def make_model(small: bool) -> ModelConfig:
    """Qwen2.5-3B, or with `small` the same family at small sizes; activations in bfloat16, rematerialised layers."""
    model = model_config('qwen2.5-3b', dtype='bfloat16', remat=True, logit_chunk=512)
    sizes: dict[str, Any] = dict(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
    )
    return dataclasses.replace(model, **sizes) if small else model


# ------------------------------------------------------------------------------------------------------------
# What the work needs
# ------------------------------------------------------------------------------------------------------------


class Need(NamedTuple):
    """Operations and bytes of main memory that a result cannot do without."""

    flops: float
    bytes: float


def _matrices(m: ModelConfig) -> tuple[int, int, int]:
    """Weights in products: of one layer, of its keys and values alone, of the head."""
    key_value = m.hidden_size * 2 * m.kv_heads * m.head_dim
    layer = key_value + m.hidden_size * (2 * m.heads * m.head_dim + 3 * m.intermediate_size)
    return layer, key_value, m.hidden_size * m.vocab_size


def decode_need(m: ModelConfig, slots: int, length: float) -> Need:
    """One decode step of `slots` that hold `length` tokens each on average."""
    layer, _, head = _matrices(m)
    weights = m.layers * layer + head
    attention = m.layers * 4 * m.heads * m.head_dim * length
    cached = m.layers * 2 * m.kv_heads * m.head_dim * length
    size = jnp.dtype(m.dtype).itemsize
    return Need(slots * (2 * weights + attention), size * (weights + slots * cached))


def prefill_need(m: ModelConfig, tokens: int, prompt: int) -> Need:
    """Keys and values of `tokens` tokens in prompts of `prompt`; of the last layer nothing else is needed."""
    layer, key_value, _ = _matrices(m)
    weights = (m.layers - 1) * layer + key_value
    attention = (m.layers - 1) * 2 * m.heads * m.head_dim * prompt
    return Need(tokens * (2.0 * weights + attention), 0.0)


def update_need(m: ModelConfig, tokens: int, length: int) -> Need:
    """Forward and backward of `tokens` tokens in sequences of `length`."""
    layer, _, head = _matrices(m)
    forward = 2.0 * (m.layers * layer + head) + m.layers * 2 * m.heads * m.head_dim * length
    return Need(3 * tokens * forward, 0.0)


# ------------------------------------------------------------------------------------------------------------
# The machine
# ------------------------------------------------------------------------------------------------------------


def driver() -> str:
    """Version of the NVIDIA driver, 'none' where there is none."""
    if not shutil.which('nvidia-smi'):
        return 'none'
    command = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
    out = subprocess.run(command, capture_output=True, text=True)
    return out.stdout.splitlines()[0].strip() if out.returncode == 0 and out.stdout else 'none'


def measured_peak(sizes: Sizes) -> Peak:
    """What a bfloat16 product and a copy reach on this device."""
    a = jnp.ones((sizes.matmul, sizes.matmul), jnp.bfloat16)
    product = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32))
    x = jnp.ones(sizes.copied // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return Peak(
        2.0 * sizes.matmul**3 / _median(lambda: product(a), 5),
        2.0 * x.nbytes / _median(lambda: copy(x), 5),
    )


def memory() -> dict[str, int]:
    """Bytes of the device: limit, in use, and most ever in use; empty where the backend does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    names = dict(limit='bytes_limit', in_use='bytes_in_use', peak='peak_bytes_in_use')
    return {ours: int(stats[theirs]) for ours, theirs in names.items() if theirs in stats}


def _median(call: Callable[[], Any], times: int) -> float:
    """Seconds of a call that returns device arrays, or waits by itself."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def check_memory(model: ModelConfig, sizes: Sizes, update: bool, limit: int) -> None:
    """Prints what will lie on the device.

    Raises:
      UserError: more than `limit` bytes (0: not known).
    """
    count = sum(x.size for x in jax.tree.leaves(_shapes(model)))
    slot = 2 * 2 * model.layers * model.kv_heads * model.head_dim * sizes.sampler(1).positions
    parts = {'bfloat16 weights': 2 * count, f'{min(sizes.slots)} slots': slot * min(sizes.slots)}
    if update:
        parts |= {'float32 weights': 4 * count, 'AdamW moments': 8 * count, 'gradients': 4 * count}
    total = sum(parts.values())
    said = ', '.join(f'{name} {size / 1e9:.3g}' for name, size in parts.items())
    print(
        f'{count / 1e9:.3g} billion weights; GB on the device: {said}; together {total / 1e9:.3g}',
        flush=True,
    )
    if limit and total > limit:
        mend = 'take --skip-update, or a larger GPU' if update else 'take a larger GPU'
        raise UserError(
            f'{total / 1e9:.3g} GB are needed and {limit / 1e9:.3g} GB are there: {mend}'
        )


# ------------------------------------------------------------------------------------------------------------
# The work
# ------------------------------------------------------------------------------------------------------------


def _shapes(model: ModelConfig):
    return jax.eval_shape(functools.partial(transformer.init, model), jax.random.key(0))


def make_weights(model: ModelConfig, dtype: str) -> Params:
    """Random weights, made on the device."""
    make = lambda key: jax.tree.map(lambda x: x.astype(dtype), transformer.init(model, key))
    return jax.block_until_ready(jax.jit(make)(jax.random.key(0)))


def make_learner(model: ModelConfig, sizes: Sizes) -> Learner:
    """The learner of one role, from random weights that nobody else keeps."""
    role = ml_collections.ConfigDict(common.get_config().solver.to_dict())
    params = make_weights(model, 'float32')
    return Learner(
        model, sharding.make_mesh(), {'solver': role}, params, (sizes.rows, sizes.tokens)
    )


def make_batches(model: ModelConfig, sizes: Sizes) -> list:
    """Full micro-batches: every token but the first of a row is learnt from."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(sizes.rows * sizes.micro):
        tokens = rng.integers(1, model.vocab_size, sizes.tokens).astype(np.int32)
        source = np.full(sizes.tokens, POLICY, np.int8)
        source[0] = 0
        logp = np.where(source == POLICY, -np.log(model.vocab_size), 0.0).astype(np.float32)
        trajectory = Trajectory(tokens, source, logp, (), 'eos', 'policy', 0, (i,))
        rows.append(Row('policy', trajectory, 0.0, 0, advantage=float(rng.normal())))
    return pack(rows, micro_rows=sizes.rows, tokens=sizes.tokens, mode='token')


def _prefill(sampler: Sampler, params: Params, sizes: Sizes) -> float:
    """Fills every slot with a prompt; returns the seconds of doing so, tokens on their way to the device included."""
    c = sampler.config
    prompts = (
        np.random.default_rng(0)
        .integers(1, sampler.model.vocab_size, (c.slots, sizes.prompt))
        .astype(np.int32)
    )
    rows = [PutRow(i, p, 0, c.context, 1.0, identity_key(0, (i,))) for i, p in enumerate(prompts)]
    start = time.perf_counter()
    sampler.put(rows)
    for at in range(0, c.slots, c.fill_rows):
        for _ in range(-(-(sizes.prompt - 1) // c.chunk)):
            sampler.extend(params, list(range(at, min(at + c.fill_rows, c.slots))))
    jax.block_until_ready(sampler.state)
    return time.perf_counter() - start


def measure_sampler(
    model: ModelConfig, params: Params, sizes: Sizes, slots: int
) -> tuple[Sampler, dict, dict]:
    """(sampler, a prefill of all slots, a decode step) at a slot count, after a round that compiles."""
    sampler = Sampler(model, sizes.sampler(slots), sharding.make_mesh())
    _prefill(sampler, params, sizes)
    prefill = min(_prefill(sampler, params, sizes) for _ in range(sizes.repeats))
    jax.block_until_ready(sampler.decode(params))  # compiles
    _prefill(sampler, params, sizes)
    bursts = sizes.generated // sizes.burst
    start = time.perf_counter()
    out = [sampler.decode(params) for _ in range(bursts)]
    jax.block_until_ready(out)
    step = (time.perf_counter() - start) / (bursts * sizes.burst)
    if not all(
        (np.asarray(burst.count) == sizes.burst).all() and np.isfinite(burst.logp).all()
        for burst in out
    ):
        raise RuntimeError(
            'a slot stopped, or a log-prob is not finite: the figures would not be of this work'
        )
    made, length = slots * (sizes.prompt - 1), sizes.prompt + sizes.generated / 2
    return (
        sampler,
        dict(
            slots=slots, seconds=prefill, tokens=made, need=prefill_need(model, made, sizes.prompt)
        ),
        dict(slots=slots, seconds=step, tokens=slots, need=decode_need(model, slots, length)),
    )


def measure_update(learner: Learner, batches: list, sizes: Sizes) -> dict:
    """Seconds of one optimiser step."""

    def step():
        if learner.update('solver', batches)['skipped_updates'][0]:
            raise RuntimeError('a gradient is not finite: the figures would not be of this work')

    tokens = sizes.rows * sizes.tokens * sizes.micro
    need = update_need(learner.model, tokens, sizes.tokens)
    return dict(seconds=_median(step, sizes.repeats), tokens=tokens, need=need)


def figures(measured: dict, peak: Peak) -> dict[str, float]:
    """Rates and shares of one measurement."""
    seconds, need = measured['seconds'], measured['need']
    out = {'slots': measured['slots']} if 'slots' in measured else {}
    out |= dict(
        tokens_per_second=measured['tokens'] / seconds,
        seconds=seconds,
        mfu=need.flops / seconds / peak.flops,
    )
    return out | (dict(bandwidth_share=need.bytes / seconds / peak.bandwidth) if need.bytes else {})


def attempt(what: str, call: Callable[[], Any]) -> Any:
    """What the call returns; None where the device's memory is too small for it, which is said."""
    try:
        return call()
    except Exception as error:  # the class has moved between versions of JAX, the words have not
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        print(f'{what}: does not fit into the memory of this device', flush=True)
        return None


def play(model: ModelConfig, sizes: Sizes, update: bool, peak: Peak) -> dict[str, Any]:
    """All measurements, with a line for each."""
    learner = make_learner(model, sizes) if update else None
    params = learner.published() if learner else make_weights(model, model.dtype)
    decode, prefill, sampler = [], [], None
    for slots in sizes.slots:
        sampler = None  # the slots of the last round go first
        found = attempt(
            f'{slots} slots', functools.partial(measure_sampler, model, params, sizes, slots)
        )
        if found:
            sampler, *both = found
            for name, rows, measured in zip(('prefill', 'decode'), (prefill, decode), both):
                rows.append(figures(measured, peak))
                show(f'{name}, {slots} slots', rows[-1])
    out: dict[str, Any] = dict(decode=decode, prefill=prefill, update=None)
    if learner:
        batches = make_batches(model, sizes)
        found = attempt('update', lambda: measure_update(learner, batches, sizes))
        if found:
            out['update'] = figures(found, peak) | dict(
                rows=sizes.rows, tokens=sizes.tokens, micro=sizes.micro
            )
            show(f'update of {found["tokens"]} tokens', out['update'])
    del sampler  # until here: the update has to live beside it
    return out


def show(name: str, row: dict) -> None:
    """A line of figures, with the memory in use."""
    share = f', {row["bandwidth_share"]:.0%} of bandwidth' if 'bandwidth_share' in row else ''
    now = memory()
    used = (
        f', {now["in_use"] / 1e9:.1f} GB in use, {now["peak"] / 1e9:.1f} at most'
        if 'peak' in now
        else ''
    )
    print(
        f'{name}: {row["tokens_per_second"]:.0f} tokens/s, MFU {row["mfu"]:.1%}{share}{used}',
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints versions, memory and a line per measurement, then one JSON line."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.gpu',
        description=(__doc__ or '').split('\n')[0],
        epilog='example:\n  python -m benchmarks.gpu --small',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--small', action='store_true', help='small shapes on any device: whether it runs'
    )
    parser.add_argument(
        '--skip-update', action='store_true', help='the sampler alone, without a learner in memory'
    )
    parser.add_argument(
        '--slots', type=int, nargs='+', help='slot counts; the last one stays for the update'
    )
    args = parser.parse_args(argv)
    if (
        'XLA_PYTHON_CLIENT_MEM_FRACTION' not in os.environ
    ):  # an older name; both at once are refused
        os.environ.setdefault('XLA_CLIENT_MEM_FRACTION', '0.95')
    device = jax.devices()[0]
    if device.platform != 'gpu' and not args.small:
        raise UserError(
            f'JAX sees no GPU here, only {device.platform}: install jax[cuda13], or try --small'
        )
    sizes = SMALL if args.small else Sizes()
    if args.slots:
        if min(args.slots) < 1:
            raise UserError(f'--slots {min(args.slots)}: must be at least 1')
        sizes = dataclasses.replace(sizes, slots=tuple(args.slots))
    model = make_model(args.small)
    versions = {name: importlib.metadata.version(name) for name in ('jax', 'jaxlib')} | dict(
        driver=driver()
    )
    print(
        f'{device.device_kind}: ' + ', '.join(f'{k} {v}' for k, v in versions.items()), flush=True
    )
    check_memory(model, sizes, not args.skip_update, memory().get('limit', 0))
    known = PEAKS.get(device.device_kind)
    peak = known or measured_peak(sizes)
    origin = 'data sheet' if known else 'measured here'
    print(
        f'peaks ({origin}): {peak.flops / 1e12:.3g} TFLOP/s, {peak.bandwidth / 1e12:.3g} TB/s',
        flush=True,
    )
    out = dict(device=device.device_kind, small=args.small, **versions)
    out |= dict(
        model='small' if args.small else 'qwen2.5-3b',
        dtype=model.dtype,
        peak=peak._asdict() | dict(origin=origin),
    )
    out |= play(model, sizes, not args.skip_update, peak) | dict(memory=memory())
    print(json.dumps(_rounded(out)))


def _rounded(x):
    if isinstance(x, dict):
        return {key: _rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_rounded(value) for value in x]
    return float(f'{x:.4g}') if isinstance(x, float) else x


if __name__ == '__main__':
    try:
        main()
    except UserError as error:
        print(f'benchmarks.gpu: {error}', file=sys.stderr)
        sys.exit(2)
