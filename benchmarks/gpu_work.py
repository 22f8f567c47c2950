"""The measured work of the GPU benchmark: prefill, decode steps and optimiser steps with random weights and tokens."""

from __future__ import annotations

import dataclasses
import functools
import time

import jax
import ml_collections
import numpy as np

from benchmarks import roofline
from benchmarks.peers.timing import median_seconds
from benchmarks.roofline import Cost
from benchmarks.tpu_shapes import model_config
from benchmarks.update_work import full_batches
from zeroplay_jax.configs import common
from zeroplay_jax.learner.learner import Learner
from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout.sampler import PutRow, Sampler, SamplerConfig
from zeroplay_jax.types import identity_key


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
