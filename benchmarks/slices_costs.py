"""What the calls of an engine cost on a machine: the compiler's estimates where there are some, otherwise peak rates.

The figures come from the committed results of `benchmarks.tpu_aot`. GPUs have peak rates only. A Pallas kernel has no
estimate in a compiled program: it counts as the larger of its memory traffic and its inner loop's instructions.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

import numpy as np

from benchmarks import (
    roofline,
    tpu_aot,
    tpu_estimates,
    tpu_pages,
    tpu_programs,
    tpu_shapes,
)
from benchmarks.tpu_pages import Kernel
from benchmarks.tpu_shapes import generation
from zeroplay_jax.configuration.machines import CHIPS, GIB, GPUS
from zeroplay_jax.configuration.memory import Memory
from zeroplay_jax.settings.rollouts import SamplerConfig
from zeroplay_jax.types import UserError

MACHINES = (*tpu_shapes.TOPOLOGIES, *GPUS)
# Places per slot of the compiled programs.
POSITIONS = tpu_programs.TOKENS + tpu_programs.CHUNK
# Rows of a full batch for which the least time of an update is stated.
UPDATE_TOKENS = tpu_programs.ROWS * tpu_programs.TOKENS
# Share of an update's rows that first-fit packing fills.
PACKED = 0.925
# Seconds of the host in a round of the scheduler, and of one rollout in the exchange between hosts (1.4 s per
# 1,280, an upper bound: benchmarks.exchange). Assumptions: neither was measured beside an accelerator.
ROUND_SECONDS = 8e-3
EXCHANGE_SECONDS = 1.4 / 1280


# Places of a page on machines without a compiled kernel; it is read at the memory's peak rate.
PLAIN_PAGE = 64
# Queries that share a read of the places in a prefill.
KERNEL_QUERIES = tpu_pages.QUERIES['prefill']
# Most seconds per step of writing new keys and values into pages, by the compiler's estimate of bursts of 16 steps.
PAGE_WRITE_SECONDS = 0.4e-3 / 16


@dataclasses.dataclass(frozen=True)
class MachineCosts:
    """Seconds of every part of a call on one host, for the slots and positions of the compile table.

    Attributes:
      machine, model: their names.
      hosts: number of hosts.
      slots: slots of a host that fit.
      step: a decode step without attention and head.
      head: logits and sampling of `slots` rows.
      place: attention over one place of the slots' cache.
      burst: writing the keys and values of a decode call.
      token: a prefilled token without attention.
      attention: attention of a token of `extend`, which covers all positions.
      kernel: attention over pages.
      pages: tokens of a compiled step over pages → its seconds without the kernel; empty without one.
      update: an update of 256 rows of 4,096 tokens.
      sources: part → where its seconds come from.
    """

    machine: str
    model: str
    hosts: int
    slots: int
    step: float
    head: float
    place: float
    burst: float
    token: float
    attention: float
    kernel: Kernel
    pages: dict[int, float]
    update: float
    sources: dict[str, str]

    def on_hosts(self, hosts: int) -> MachineCosts:
        """Returns the costs on another number of the same hosts. The update is split over them."""
        sources = dict(self.sources)
        if hosts != self.hosts:
            sources['update'] += f', scaled from {self.hosts} hosts'
        return dataclasses.replace(
            self, hosts=hosts, update=self.update * self.hosts / hosts, sources=sources
        )

    def places(self) -> int:
        """Places of the cache of a host."""
        return self.slots * POSITIONS

    def update_seconds(self, trained: int, scored: int = 0) -> float:
        """Returns the seconds of an update.

        Args:
          trained: tokens of the rows.
          scored: tokens that a reference or teacher reads, one of the four passes of an update.
        """
        return (trained + scored / 4) / UPDATE_TOKENS / PACKED * self.update

    def exchange_seconds(self, rollouts: int) -> float:
        """Returns the seconds in which every host reads all rollouts of a step; one host has none."""
        return rollouts * EXCHANGE_SECONDS if self.hosts > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Settings(SamplerConfig):
    """Settings of a host: its sampler, and the rollouts that it plays.

    Attributes:
      turn_tokens: most written tokens of a turn.
      tool_threads: tool calls in progress at the same time.
      overlap: whether the host reads a decode call while the next one runs.
    """

    slots: int = 64
    context: int = 4096
    chunk: int = 256
    fill_rows: int = 16
    burst: int = 16
    turn_tokens: int = 256
    tool_threads: int = 1
    overlap: bool = False


class CallCosts:
    """Seconds of the calls of a host with given settings on a machine.

    Attributes:
      host: seconds of the host between two calls.
    """

    def __init__(self, machine: MachineCosts, settings: Settings, host: float):
        self.machine = machine
        self.settings = settings
        self.host = host

    def extend(self) -> float:
        """Seconds of a prefill call. It computes all its rows, and attention covers all positions of a slot."""
        machine = self.machine
        tokens = self.settings.fill_rows * self.settings.chunk
        attention = machine.attention * self.settings.positions / POSITIONS
        # A call with few rows still reads all weights.
        return max(tokens * machine.token, machine.step) + tokens * attention

    def decode(self, steps: int) -> tuple[float, float]:
        """Seconds of the steps of a decode call over all positions of all slots, and of the write into the cache."""
        machine = self.machine
        slots = self.settings.slots
        head = machine.head * slots / machine.slots
        attention = machine.place * slots * self.settings.positions
        write = machine.burst * slots / machine.slots * self.settings.burst / tpu_programs.BURST
        return steps * (machine.step + head + attention), write

    def mixed(self, tokens: int, last: np.ndarray, fed: np.ndarray) -> float:
        """Seconds of a step over pages: products, attention over used places in blocks, logits.

        Args:
          tokens: tokens that the program computes, padding included.
          last: places of every row with tokens in this step.
          fed: tokens of each of these rows.
        """
        machine = self.machine
        rows = min(self.settings.slots, tokens)
        # Writing into pages is part of a compiled step.
        seconds = machine.pages.get(tokens, 0.0)
        if not seconds:
            seconds = max(tokens * machine.token, machine.step)
            seconds += machine.head * rows / machine.slots + PAGE_WRITE_SECONDS
        blocks = -(-last // machine.kernel.block)
        is_single = fed == 1
        # A call for rows of one token, and a call for chunks whose blocks of queries read all places before their last
        # one. The tokens before the chunks are a row of one place.
        singles = int(is_single.sum())
        read = int(blocks[is_single].sum())
        grid = -(-rows // tpu_pages.QUERIES['decode'])
        seconds += machine.kernel.seconds(grid, singles, read, 'decode')
        # The step of the budget has the calls for chunks also when there are none.
        if tokens == self.settings.token_budget:
            queries = -(-fed[~is_single] // KERNEL_QUERIES)
            before = -(-singles // KERNEL_QUERIES)
            read = int((blocks[~is_single] * queries).sum()) + before
            grid = -(-tokens // KERNEL_QUERIES)
            chunk_rows = int(queries.sum()) + before
            seconds += machine.kernel.seconds(grid, chunk_rows, read, 'prefill')
        return seconds

    def attention(self, start: int, read: int, end: int) -> float:
        """Least seconds of attention of the places from `start` to `read`, which are prefilled, and on to `end`."""
        kernel = self.machine.kernel
        blocks = -(-np.arange(start + 1, end + 1) // kernel.block)
        # Blocks of queries share what they read.
        chunks = (read - start) / KERNEL_QUERIES
        shared = float(blocks[: read - start].sum()) / KERNEL_QUERIES
        alone = float(blocks[read - start :].sum())
        seconds = kernel.seconds(0, chunks, shared, 'prefill')
        return seconds + kernel.seconds(0, end - read, alone, 'decode')


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(tpu_aot.RESULTS.read_text())


def machine_costs(machine: str, model: str, peak: bool = False) -> MachineCosts:
    """Returns the costs of a model on a machine.

    Args:
      machine: a slice of the compile table, 'h100' or 'h200' (one GPU).
      model: a model of the compile table.
      peak: whether estimates are ignored.

    Raises:
      UserError: the names are not in the table.
    """
    if machine not in MACHINES:
        raise UserError(f'no machine {machine!r}; there are {", ".join(MACHINES)}')
    if model not in tpu_shapes.MODELS:
        raise UserError(f'no model {model!r}; there are {", ".join(tpu_shapes.MODELS)}')
    if machine in GPUS:
        return _gpu(machine, model)
    return _slice(machine, model, peak, _table())


def _shape(model: str) -> tuple[float, float, float]:
    """Returns the weights of all layers and of the head, and the bytes of one place in all layers.

    Of experts those that a token passes through count, see `_idle_experts`.
    """
    config = tpu_programs.sized(model)
    layer, head = roofline.matrix_weights(config)
    return float(config.layers * layer), float(head), float(tpu_pages.place_bytes(config))


def _idle_experts(model: str) -> float:
    """Returns the weights that a step reads and that a token does not pass through: steps have many tokens."""
    config = tpu_programs.sized(model)
    if config.experts is None:
        return 0.0
    idle = config.experts.count - config.experts.per_token
    return float(config.layers * idle * 3 * config.hidden_size * config.experts.size)


def _peak_costs(model: str, flops: float, bandwidth: float) -> dict[str, float]:
    """Returns the costs that weights and places have at the peak rates of a host."""
    layers, head, place = _shape(model)
    return dict(
        step=(layers + _idle_experts(model)) * (2 / bandwidth),
        head=head * (2 / bandwidth),
        place=place / bandwidth,
        burst=0.0,
        token=2 * layers / flops,
    )


def _plain_kernel(place_seconds: float) -> Kernel:
    """Returns a kernel that reads pages at the memory's peak rate."""
    none = (0.0, 0.0, 0.0)
    instructions = dict(decode=none, prefill=none)
    return Kernel(PLAIN_PAGE, PLAIN_PAGE, PLAIN_PAGE * place_seconds, instructions)


def _compiled_pages(
    table: dict[str, Any], machine: str, model: str, slots: int
) -> dict[int, float]:
    """Returns the compiled steps over pages, tokens → seconds."""
    size = tpu_pages.sizes(machine, slots)
    seconds = {}
    for tokens in (*size.decode_buckets, size.token_budget):
        step = table.get('pages', {}).get(tpu_pages.key(model, machine, size, tokens))
        if step:
            seconds[tokens] = step['seconds']
    return seconds


def _slice(machine: str, model: str, peak: bool, table: dict[str, Any]) -> MachineCosts:
    """Returns the costs on a TPU slice."""
    rows = tpu_pages.table_rows(table, model, machine)
    chip = tpu_shapes.TOPOLOGIES[machine].chip
    mesh = rows['decode']['mesh']
    hosts = mesh['replica']
    chips = mesh['fsdp'] * mesh['model']
    slots = rows['decode']['slots']
    call_tokens = tpu_programs.FILL_ROWS * tpu_programs.CHUNK
    call = rows['extend']['roofline_seconds']
    peak_costs = _peak_costs(model, chips * chip.flops, chips * chip.bandwidth)
    peak_costs['attention'] = max(call / call_tokens - peak_costs['token'], 0.0)
    costs = peak_costs
    sampler_source = 'peak rate'
    estimate = table.get('estimates', {}).get(tpu_estimates.key(model, machine, slots))
    if estimate and not peak:
        decode, extend = estimate['decode'], estimate['extend']
        sampler_source = 'compiler, at least the peak rate'
        estimated = dict(
            step=decode['rest'] - decode['head'],
            head=decode['head'],
            place=decode['places'] / (slots * POSITIONS),
            burst=decode['burst'],
            token=extend['rest'] / call_tokens,
            attention=extend['places'] / call_tokens,
        )
        # Some estimates are below the memory's least time, which no schedule can beat.
        costs = {name: max(seconds, peak_costs[name]) for name, seconds in estimated.items()}
    pages = {} if peak else _compiled_pages(table, machine, model, slots)
    # No step takes less than reading the weights, or than its operations at the peak rate.
    read = peak_costs['step'] + peak_costs['head']
    for tokens, step_seconds in pages.items():
        pages[tokens] = max(step_seconds, read, tokens * peak_costs['token'])
    kernel = tpu_pages.compiled_kernel(table, model, machine)
    sources = dict(
        sampler=sampler_source,
        update='peak rate',
        kernel='larger of instructions and memory traffic' if kernel else 'memory traffic',
        host='assumption',
    )
    if pages:
        sources['pages'] = f'compiler, steps of {", ".join(str(size) for size in pages)} tokens'
    return MachineCosts(
        machine=machine,
        model=model,
        hosts=hosts,
        slots=slots,
        kernel=kernel or _plain_kernel(peak_costs['place']),
        pages=pages,
        update=rows['update']['roofline_seconds'],
        sources=sources,
        **costs,
    )


def _gpu(machine: str, model: str) -> MachineCosts:
    """Returns the costs on one GPU at its peak rates."""
    # In rollouts: the weights and slots of two roles; everything else is off the chip.
    layers, head, place = _shape(model)
    views = 2 * 2 * (layers + head * (1 if tpu_programs.sized(model).tied else 2))
    left = CHIPS[machine].memory - 1.25 * GIB - views
    slots = 2 ** int(math.log2(max(left / (2 * POSITIONS * place), 1)))
    return at_peak(machine, model, min(slots, 256))


def at_peak(machine: str, model: str, slots: int, chips: int = 1, hosts: int = 1) -> MachineCosts:
    """Returns the costs on data shards at the peak rates of their chips.

    Args:
      machine: kind of chip.
      model: of `tpu_shapes.MODELS` or FURTHER_MODELS.
      slots: of a data shard.
      chips: of a data shard.
      hosts: data shards.
    """
    chip = CHIPS[machine]
    flops, bandwidth = chips * chip.flops, chips * chip.bandwidth
    _, _, place = _shape(model)
    config = tpu_programs.sized(model)
    # Attention of a token over all positions: two products of 2·d operations per head and place.
    attention = config.layers * 4 * config.heads * config.head_dim * POSITIONS
    passes = roofline.UPDATE_PASSES * roofline.forward(config, UPDATE_TOKENS, tpu_programs.TOKENS)
    return MachineCosts(
        machine=machine,
        model=model,
        hosts=hosts,
        slots=slots,
        attention=attention / flops,
        kernel=_plain_kernel(place / bandwidth),
        pages={},
        update=passes / flops / hosts,
        sources=dict(
            sampler='peak rate',
            update='peak rate; its state does not fit on one GPU'
            if chips * hosts == 1
            else 'peak rate',
            kernel='memory traffic',
            host='assumption',
        ),
        **_peak_costs(model, flops, bandwidth),
    )


def of_plan(planned: Memory, model: str) -> MachineCosts:
    """Returns the costs on the machine of a plan: of the compile table, or at peak rates.

    A host of the compile table has four chips; at peak rates it is a data shard.
    """
    target = planned.machine
    slices = {generation(topology): topology for topology in reversed(tpu_shapes.TOPOLOGIES)}
    if target.kind in slices and model in tpu_shapes.MODELS and target.devices >= 4:
        return machine_costs(slices[target.kind], model).on_hosts(target.devices // 4)
    costs = at_peak(target.kind, model, planned.sampler.slots, planned.split, planned.shards)
    # The plan fits, whatever whole weights in slots would take.
    return dataclasses.replace(costs, sources=costs.sources | {'update': 'peak rate'})
