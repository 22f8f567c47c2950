"""Measures the sampler and the update step on one GPU, at the shape of Qwen2.5-3B in bfloat16 with random weights.

    python -m benchmarks.gpu                     # needs a GPU of 80 GB
    python -m benchmarks.gpu --skip-update       # the sampler alone: 24 GB are enough
    python -m benchmarks.gpu --small             # small shapes on any device: a test of the code, no useful figures

The device holds at once what it holds in a run: float32 weights and AdamW moments, the bfloat16 weights of the sampler,
the slots, and in the update the gradients. The sampler is measured at several slot counts; the last and smallest one
stays in memory during the update. No checkpoint is read.

Shares are relative to the peak rates in roofline.PEAKS, dense and without sparsity. For other GPUs they are relative
to the rates of a matrix product and a copy, measured at the start. roofline.py defines which operations and bytes
count.

The last line is one JSON object; rates are in tokens per second, memory in bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from benchmarks import command, roofline
from benchmarks.peers.workload import median_seconds
from benchmarks.roofline import PEAKS, Cost, Peak
from benchmarks.tpu_shapes import model_config
from benchmarks.update_work import copy_rate, full_batches, product_rate
from zeroplay_jax.configs import common
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout.sampler import PutRow, Sampler, SamplerConfig
from zeroplay_jax.types import UserError, identity_key


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the work.

    Attributes:
      slots: slot counts of the sampler, in the order of measurement; the slots of the last one stay in memory during
        the update.
      prompt, generated: tokens of a rollout.
      context, chunk, fill_rows, burst: settings of the sampler, see SamplerConfig.
      rows, tokens, micro: an update has `micro` micro-batches of `rows` rows of `tokens` tokens.
      repeats: repetitions of a measurement.
      matmul: side of the square matrices that measure peak operations.
      copied: bytes of the array that measures peak bandwidth.
    """

    # The smallest is last, because its slots stay in memory during the update.
    slots: tuple[int, ...] = (256, 128, 32)
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
    matmul: int = 8192
    copied: int = 1 << 30

    def sampler(self, slots: int) -> SamplerConfig:
        """Returns the sampler's settings. There is no end token, so every slot decodes at every step."""
        return SamplerConfig(
            slots=slots,
            context=self.context,
            chunk=self.chunk,
            fill_rows=min(self.fill_rows, slots),
            burst=self.burst,
            put_rows=min(16, slots),
            put_tokens=self.prompt,
        )


# Shapes for tests: every program is compiled and run, in seconds on a CPU.
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


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Time of one piece of work.

    Attributes:
      seconds: its duration.
      tokens: tokens processed in that time.
      cost: operations and bytes that the work needs.
      slots: slots of the sampler; None for an update.
    """

    seconds: float
    tokens: int
    cost: Cost
    slots: int | None = None


def make_model(small: bool) -> ModelConfig:
    """Returns Qwen2.5-3B, or a model of the same family at small sizes: bfloat16, rematerialised layers."""
    model = model_config('qwen2.5-3b', dtype='bfloat16', remat=True, logit_chunk=512)
    if not small:
        return model
    return dataclasses.replace(
        model,
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
    )


def parameter_shapes(model: ModelConfig):
    """Returns the tree of parameters as jax.ShapeDtypeStruct."""
    # Nothing is allocated, because the memory that is needed is printed and checked first.
    return jax.eval_shape(functools.partial(transformer.init, model), jax.random.key(0))


def make_weights(model: ModelConfig, dtype: str) -> Params:
    """Returns random weights. They are made on the device, so no checkpoint has to be copied to it."""

    def make(key):
        params = transformer.init(model, key)
        return jax.tree.map(lambda x: x.astype(dtype), params)

    return jax.block_until_ready(jax.jit(make)(jax.random.key(0)))


def make_learner(model: ModelConfig, sizes: Sizes) -> Learner:
    """Returns the learner of one role with random weights; nothing else refers to these, so updates can free them."""
    role = ml_collections.ConfigDict(common.get_config().solver.to_dict())
    # Master weights are float32 in every run, whatever the sampler computes in.
    params = make_weights(model, 'float32')
    mesh = sharding.make_mesh()
    return Learner(model, mesh, {'solver': role}, params, (sizes.rows, sizes.tokens))


def make_batches(model: ModelConfig, sizes: Sizes) -> list:
    """Returns full micro-batches: every token of a row except the first is trained on."""
    rows = sizes.rows * sizes.micro
    return full_batches(model.vocab_size, rows, sizes.tokens, sizes.rows)


def measure_sampler(
    model: ModelConfig, params: Params, sizes: Sizes, slots: int
) -> tuple[Sampler, Measurement, Measurement]:
    """Measures the prefill and the decode steps of a sampler, each after an untimed call that compiles.

    Returns:
      sampler: with its slots in memory.
      prefill: measurement of the prefill of all slots.
      decode: measurement of one decode step of all slots, the mean over `sizes.generated` steps.
    """
    sampler = Sampler(model, sizes.sampler(slots), sharding.make_mesh())
    _prefill(sampler, params, sizes)
    # The fastest repetition counts: transfers from the host vary, the device's own time does not.
    prefill_seconds = min(_prefill(sampler, params, sizes) for _ in range(sizes.repeats))
    # The first decode compiles. The prompts are then written again, so that the timed steps begin after the prompt.
    jax.block_until_ready(sampler.decode(params))
    _prefill(sampler, params, sizes)
    # A call of `decode` runs a burst of steps.
    num_bursts = sizes.generated // sizes.burst
    start = time.perf_counter()
    # The bursts are dispatched without waiting in between, as the scheduler does while no tool call is pending.
    bursts = [sampler.decode(params) for _ in range(num_bursts)]
    jax.block_until_ready(bursts)
    step_seconds = (time.perf_counter() - start) / (num_bursts * sizes.burst)
    _check_decoded(bursts, sizes)

    # The last token of a prompt stays uncached: the first decode step feeds it.
    prefilled = slots * (sizes.prompt - 1)
    # A step reads the cache up to its position, which grows during the measurement.
    mean_length = sizes.prompt + sizes.generated / 2
    prefill_cost = roofline.prefill_cost(model, prefilled, sizes.prompt)
    decode_cost = roofline.decode_cost(model, slots, mean_length)
    prefill = Measurement(prefill_seconds, prefilled, prefill_cost, slots)
    decode = Measurement(step_seconds, slots, decode_cost, slots)
    return sampler, prefill, decode


def _prefill(sampler: Sampler, params: Params, sizes: Sizes) -> float:
    """Fills every slot with a prompt; returns the seconds, transfer of the tokens included."""
    config = sampler.config
    rng = np.random.default_rng(0)
    shape = (config.slots, sizes.prompt)
    prompts = rng.integers(1, sampler.model.vocab_size, shape).astype(np.int32)
    rows = []
    for slot, prompt in enumerate(prompts):
        row = PutRow(
            slot=slot,
            tokens=prompt,
            start=0,
            limit=config.context,
            temperature=1.0,
            key=identity_key(0, (slot,)),
        )
        rows.append(row)
    start = time.perf_counter()
    sampler.put(rows)
    num_chunks = -(-(sizes.prompt - 1) // config.chunk)
    for first_slot in range(0, config.slots, config.fill_rows):
        end_slot = min(first_slot + config.fill_rows, config.slots)
        for _ in range(num_chunks):
            sampler.extend(params, list(range(first_slot, end_slot)))
    jax.block_until_ready(sampler.state)
    return time.perf_counter() - start


def _check_decoded(bursts: list, sizes: Sizes) -> None:
    """Raises RuntimeError unless every slot decoded at every step of the bursts with finite log-probs."""
    for burst in bursts:
        all_decoded = (np.asarray(burst.count) == sizes.burst).all()
        if not all_decoded or not np.isfinite(burst.logp).all():
            raise RuntimeError(
                'a slot stopped or a log-prob is not finite: the rates would be wrong'
            )


def measure_update(learner: Learner, batches: list, sizes: Sizes) -> Measurement:
    """Returns the time of one optimiser step."""

    def step():
        stats = learner.update('solver', batches)
        # A skipped update does less work, and reading its flag waits for the device.
        if stats['skipped_updates'][0]:
            raise RuntimeError('a gradient is not finite: the rates would be wrong')

    tokens = sizes.rows * sizes.tokens * sizes.micro
    cost = roofline.update_cost(learner.model, tokens, sizes.tokens)
    return Measurement(median_seconds(step, sizes.repeats), tokens, cost)


# ---- the report ------------------------------------------------------------------------------------------------------


def driver() -> str:
    """Returns the version of the NVIDIA driver, or 'none'."""
    if not shutil.which('nvidia-smi'):
        return 'none'
    command = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode or not result.stdout:
        return 'none'
    return result.stdout.splitlines()[0].strip()


def memory() -> dict[str, int]:
    """Returns bytes of the device: 'limit', 'in_use' and 'peak'. Empty where the backend does not report them."""
    # None on backends without this report, such as the CPU.
    stats = jax.devices()[0].memory_stats() or {}
    names = dict(limit='bytes_limit', in_use='bytes_in_use', peak='peak_bytes_in_use')
    return {ours: int(stats[theirs]) for ours, theirs in names.items() if theirs in stats}


def check_memory(model: ModelConfig, sizes: Sizes, update: bool, limit: int) -> None:
    """Prints the memory that the benchmark needs on the device, and raises an error if the device has less.

    Args:
      model: the model.
      sizes: the work.
      update: whether the update is measured.
      limit: bytes of the device; 0: unknown.

    Raises:
      UserError: the need exceeds the limit.
    """
    weights = sum(leaf.size for leaf in jax.tree.leaves(parameter_shapes(model)))
    # The smallest count is decisive: larger ones that do not fit are skipped with a line.
    slots = min(sizes.slots)
    # Keys and values, two bytes each.
    position_bytes = 2 * 2 * model.layers * model.kv_heads * model.head_dim
    slot_bytes = position_bytes * sizes.sampler(1).positions
    parts = {'bfloat16 weights': 2 * weights, f'{slots} slots': slot_bytes * slots}
    if update:
        parts['float32 weights'] = 4 * weights
        parts['AdamW moments'] = 8 * weights
        parts['gradients'] = 4 * weights
    total = sum(parts.values())
    part_list = ', '.join(f'{name} {size / 1e9:.3g}' for name, size in parts.items())
    print(f'{weights / 1e9:.3g} billion weights; GB on the device: {part_list};', end=' ')
    print(f'together {total / 1e9:.3g}', flush=True)
    if limit and total > limit:
        fix = 'use --skip-update or a larger GPU' if update else 'use a larger GPU'
        need = f'{total / 1e9:.3g} GB are needed, the device has {limit / 1e9:.3g} GB'
        raise UserError(f'{need}: {fix}')


def figures(measurement: Measurement, peak: Peak) -> dict[str, float]:
    """Returns the rates of a measurement, and its shares of the device's peak rates.

    Keys: 'slots' (not for an update), 'tokens_per_second', 'seconds', 'mfu' (share of the peak operations) and, if its
    bytes were counted, 'bandwidth_share'.
    """
    seconds = measurement.seconds
    row: dict[str, float] = {}
    if measurement.slots is not None:
        row['slots'] = measurement.slots
    row['tokens_per_second'] = measurement.tokens / seconds
    row['seconds'] = seconds
    row['mfu'] = measurement.cost.flops / seconds / peak.flops
    # Updates are bound by operations; counting their bytes would need the compiler's plan.
    if measurement.cost.bytes:
        row['bandwidth_share'] = measurement.cost.bytes / seconds / peak.bandwidth
    return row


def call_if_it_fits(name: str, call: Callable[[], Any]) -> Any:
    """Returns the result of `call`, or prints a line and returns None if the device's memory is too small."""
    try:
        return call()
    except Exception as error:
        # Recognised by its text, because the class of this error differs between versions of JAX.
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        print(f'{name}: does not fit into the memory of this device', flush=True)
        return None


def measure(model: ModelConfig, sizes: Sizes, update: bool, peak: Peak) -> dict[str, Any]:
    """Measures sampler and update, and prints a line for each measurement.

    Args:
      model: the model.
      sizes: the work.
      update: whether the update is measured as well.
      peak: peak rates, of which the shares are taken.

    Returns:
      {'prefill', 'decode': a dict of `figures` per slot count; 'update': a dict of `figures` with its sizes, or None}.
    """
    learner = None
    if update:
        learner = make_learner(model, sizes)
        # The sampler gets a copy, as in a run, so both kinds of weights are on the device.
        params = learner.published()
    else:
        params = make_weights(model, model.dtype)
    rows: dict[str, Any] = dict(decode=[], prefill=[], update=None)
    sampler = None
    for slots in sizes.slots:
        # Deleted, so that the slots of the previous count are freed before the next ones are allocated.
        sampler = None
        measure_slots = functools.partial(measure_sampler, model, params, sizes, slots)
        result = call_if_it_fits(f'{slots} slots', measure_slots)
        if result is None:
            continue
        sampler, prefill, decode = result
        for name, measurement in (('prefill', prefill), ('decode', decode)):
            row = figures(measurement, peak)
            rows[name].append(row)
            show(f'{name}, {slots} slots', row)
    if learner:
        batches = make_batches(model, sizes)
        measure_step = functools.partial(measure_update, learner, batches, sizes)
        step = call_if_it_fits('update', measure_step)
        if step:
            row = figures(step, peak)
            rows['update'] = row | dict(rows=sizes.rows, tokens=sizes.tokens, micro=sizes.micro)
            show(f'update of {step.tokens} tokens', row)
    # Deleted only here, because the slots stay in memory during the update, as in a run.
    del sampler
    return rows


def show(name: str, row: dict[str, float]) -> None:
    """Prints a line with the figures of a measurement and the memory in use."""
    parts = [f'{row["tokens_per_second"]:.0f} tokens/s', f'MFU {row["mfu"]:.1%}']
    if 'bandwidth_share' in row:
        parts.append(f'{row["bandwidth_share"]:.0%} of bandwidth')
    used = memory()
    if 'peak' in used:
        parts.append(f'{used["in_use"] / 1e9:.1f} GB in use')
        parts.append(f'{used["peak"] / 1e9:.1f} at most')
    print(f'{name}: {", ".join(parts)}', flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints versions, memory, a line per measurement, and one JSON line.

    Raises:
      UserError: there is no GPU, it is too small, or a flag is invalid.
    """
    parser = command.parser('gpu', __doc__)
    parser.add_argument('--small', action='store_true', help='small shapes, on any device')
    parser.add_argument('--skip-update', action='store_true', help='measure the sampler alone')
    slots_help = 'slot counts; the slots of the last one stay in memory during the update'
    parser.add_argument('--slots', type=int, nargs='+', help=slots_help)
    args = parser.parse_args(argv)
    # 95 % of the memory instead of XLA's default of 75 %. The variable has an older and a newer name, and XLA refuses
    # both at once.
    if 'XLA_PYTHON_CLIENT_MEM_FRACTION' not in os.environ:
        os.environ.setdefault('XLA_CLIENT_MEM_FRACTION', '0.95')
    # This call starts the backend, which reads the variable above.
    device = jax.devices()[0]
    if device.platform != 'gpu' and not args.small:
        raise UserError(
            f'JAX finds no GPU, only {device.platform}: install jax[cuda13], or use --small'
        )
    sizes = SMALL if args.small else Sizes()
    if args.slots:
        if min(args.slots) < 1:
            raise UserError(f'--slots {min(args.slots)}: must be at least 1')
        sizes = dataclasses.replace(sizes, slots=tuple(args.slots))
    model = make_model(args.small)
    update = not args.skip_update

    report: dict[str, Any] = dict(device=device.device_kind, small=args.small)
    versions = {name: importlib.metadata.version(name) for name in ('jax', 'jaxlib')}
    versions['driver'] = driver()
    report |= versions
    version_list = ', '.join(f'{name} {version}' for name, version in versions.items())
    print(f'{device.device_kind}: {version_list}', flush=True)
    check_memory(model, sizes, update, memory().get('limit', 0))

    # The data sheet is preferred: a measured peak is lower, so shares relative to it would look better.
    peak = PEAKS.get(device.device_kind)
    origin = 'data sheet'
    if peak is None:
        peak = Peak(product_rate(sizes.matmul, 'bfloat16'), copy_rate(sizes.copied))
        origin = 'measured here'
    rates = f'{peak.flops / 1e12:.3g} TFLOP/s, {peak.bandwidth / 1e12:.3g} TB/s'
    print(f'peaks ({origin}): {rates}', flush=True)

    report['model'] = 'small' if args.small else 'qwen2.5-3b'
    report['dtype'] = model.dtype
    report['peak'] = peak._asdict() | dict(origin=origin)
    report |= measure(model, sizes, update, peak)
    report['memory'] = memory()
    print(json.dumps(_rounded(report)))


def _rounded(value: Any) -> Any:
    """Returns a JSON value with all floats rounded to four significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        # More digits would be noise, and two results would never look equal.
        return float(f'{value:.4g}')
    return value


if __name__ == '__main__':
    with command.one_line_errors('benchmarks.gpu'):
        main()
