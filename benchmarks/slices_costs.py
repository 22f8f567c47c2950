"""What the calls of an engine cost on a machine: the compiler's estimates where there are some, otherwise peak rates.

The figures come from the committed results of `benchmarks.tpu_aot`. GPUs have peak rates only. A Pallas kernel has no
estimate in a compiled program: it counts as the larger of its memory traffic and its inner loop's instructions.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks import gpu_costs, tpu_estimates, tpu_programs, tpu_shapes
from benchmarks.slices_engines import Settings
from zeroplay_jax.types import UserError

RESULTS = pathlib.Path(__file__).parent / 'results' / 'tpu_aot.json'
GPUS = {'h100': ('NVIDIA H100 80GB HBM3', 79), 'h200': ('NVIDIA H200', 140)}
MACHINES = (*tpu_shapes.TOPOLOGIES, *GPUS)
GIB = 2**30
# Places per slot of the compiled programs.
POSITIONS = tpu_programs.TOKENS + tpu_programs.CHUNK
# Rows of a full batch for which the least time of an update is stated.
UPDATE_TOKENS = tpu_programs.ROWS * tpu_programs.TOKENS
# Share of an update's rows that first-fit packing fills.
PACKED = 0.925
# Seconds of the host between two calls: a round of the scheduler, and a paged step that is prepared while the previous
# one runs. Assumptions, like the seconds of one rollout in the exchange between hosts (1.4 s of JSON per 1,280).
ROUND_SECONDS = 8e-3
STEP_SECONDS = 0.5e-3
EXCHANGE_SECONDS = 1.4 / 1280


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The ragged paged attention kernel of JAX, compiled for one generation.

    Attributes:
      block: places that it reads at a time.
      decode: instructions of its inner loop ÷ time of its memory traffic, with one query.
      prefill: the same with 32 queries.
    """

    block: int
    decode: float
    prefill: float


# Instruction bundles of the inner loop against the time of its reads. One query: v5e pages of 64, v5p pages of 128 in
# blocks of 1,024, v6e pages of 64. The figure for 32 queries was read on v5e; the others are scaled by the first.
KERNELS = {
    'v5e': Kernel(512, 0.69, 3.2),
    'v5p': Kernel(1024, 1.54, 3.2 * 1.54 / 0.69),
    'v6e': Kernel(512, 0.85, 3.2 * 0.85 / 0.69),
}
# No kernel was compiled for GPUs: reads at the memory's peak rate, one page at a time.
GPU_KERNEL = Kernel(64, 1.0, 1.0)
KERNEL_QUERIES = 32
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
      kernel_place: memory traffic of one place that the paged kernel reads.
      kernel: its figures.
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
    kernel_place: float
    kernel: Kernel
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
        """Returns the seconds in which every host encodes or reads all rollouts of a step; one host has none."""
        return rollouts * EXCHANGE_SECONDS if self.hosts > 1 else 0.0


class CallCosts:
    """Seconds of the calls of an engine with given settings on a machine."""

    def __init__(self, machine: MachineCosts, settings: Settings, host_seconds: float):
        self.machine = machine
        self.settings = settings
        self.host_seconds = host_seconds
        self.positions = settings.context + max(settings.chunk, settings.burst)

    def extend(self, rows: int) -> float:
        """A call computes all its rows, and attention covers all positions of a slot."""
        machine = self.machine
        tokens = rows * self.settings.chunk
        attention = machine.attention * self.positions / POSITIONS
        # A call with few rows still reads all weights.
        return max(tokens * machine.token, machine.step) + tokens * attention

    def decode(self, steps: int) -> tuple[float, float]:
        """Every step reads all positions of all slots."""
        machine = self.machine
        slots = self.settings.slots
        head = machine.head * slots / machine.slots
        attention = machine.place * slots * self.positions
        write = machine.burst * slots / machine.slots * self.settings.burst / tpu_programs.BURST
        return steps * (machine.step + head + attention), write

    def mixed(
        self, tokens: int, rows: int, places: Sequence[int], prefill: Sequence[tuple[int, int]]
    ) -> float:
        """Products over the program's tokens, attention over used places in blocks, logits of decoding rows."""
        machine = self.machine
        kernel = machine.kernel
        block = kernel.block
        seconds = max(tokens * machine.token, machine.step)
        seconds += machine.head * rows / machine.slots
        decode_places = sum(-(-length // block) for length in places) * block
        # A block of queries reads all places before its last one.
        prefill_places = sum(
            -(-count // KERNEL_QUERIES) * -(-last // block) * block for count, last in prefill
        )
        traffic = decode_places * max(kernel.decode, 1.0) + prefill_places * max(
            kernel.prefill, 1.0
        )
        return seconds + traffic * machine.kernel_place + PAGE_WRITE_SECONDS

    def host(self, rows: int) -> float:
        """The same for any number of rollouts."""
        del rows
        return self.host_seconds


@functools.cache
def _table(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def machine_costs(
    machine: str, model: str, peak: bool = False, path: pathlib.Path = RESULTS
) -> MachineCosts:
    """Returns the costs of a model on a machine.

    Args:
      machine: a slice of the compile table, 'h100' or 'h200' (one GPU).
      model: a model of the compile table.
      peak: whether estimates are ignored.
      path: results of `benchmarks.tpu_aot`.

    Raises:
      UserError: the names are not in the table.
    """
    if machine not in MACHINES:
        raise UserError(f'no machine {machine!r}; there are {", ".join(MACHINES)}')
    if model not in tpu_shapes.MODELS:
        raise UserError(f'no model {model!r}; there are {", ".join(tpu_shapes.MODELS)}')
    if machine in GPUS:
        return _gpu(machine, model)
    return _slice(machine, model, peak, _table(path))


def _shape(model: str) -> tuple[float, float, float]:
    """Returns the weights of all layers and of the head, and the bytes of one place in all layers."""
    config = tpu_programs.sized(model)
    layer, _, head = gpu_costs._matrix_weights(config)
    place = config.layers * 2 * config.kv_heads * config.head_dim * 2
    return float(config.layers * layer), float(head), float(place)


def _slice(machine: str, model: str, peak: bool, table: dict[str, Any]) -> MachineCosts:
    """Returns the costs on a TPU slice."""
    rows = {}
    for row in table['rows']:
        if (row['model'], row['topology']) == (model, machine):
            rows[row['program']] = row
    chip = tpu_shapes.TOPOLOGIES[machine].chip
    mesh = rows['decode']['mesh']
    hosts = mesh['replica']
    chips = mesh['fsdp'] * mesh['model']
    slots = rows['decode']['slots']
    layers, head, place = _shape(model)
    kernel_place = place / chips / chip.bandwidth
    call_tokens = tpu_programs.FILL_ROWS * tpu_programs.CHUNK
    call = rows['extend']['roofline_seconds']
    token = 2 * layers / chips / chip.flops
    copies = 2 / chips / chip.bandwidth
    costs = dict(
        step=layers * copies,
        head=head * copies,
        place=kernel_place,
        burst=0.0,
        token=token,
        attention=max(call / call_tokens - token, 0.0),
    )
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
        costs = {name: max(seconds, costs[name]) for name, seconds in estimated.items()}
    update = rows['update'].get('estimated_seconds')
    sources = dict(
        sampler=sampler_source,
        update='compiler' if update and not peak else 'peak rate',
        kernel='larger of instructions and memory traffic',
        host='assumption',
    )
    return MachineCosts(
        machine=machine,
        model=model,
        hosts=hosts,
        slots=slots,
        kernel_place=kernel_place,
        kernel=KERNELS[machine.partition(':')[0]],
        update=update if update and not peak else rows['update']['roofline_seconds'],
        sources=sources,
        **costs,
    )


def _gpu(machine: str, model: str) -> MachineCosts:
    """Returns the costs on one GPU at its peak rates."""
    name, memory = GPUS[machine]
    device = gpu_costs.PEAKS[name]
    layers, head, place = _shape(model)
    config = tpu_programs.sized(model)
    # In rollouts: the weights and slots of two roles; everything else is off the chip.
    views = 2 * 2 * (layers + head * (1 if config.tied else 2))
    left = (memory - 1.25) * GIB - views
    slots = 2 ** int(math.log2(max(left / (2 * POSITIONS * place), 1)))
    slots = min(slots, 256)
    # Attention of a token over all positions: two products of 2·d operations per head and place.
    attention = config.layers * 4 * config.heads * config.head_dim * POSITIONS
    passes = gpu_costs.update_cost(config, UPDATE_TOKENS, tpu_programs.TOKENS).flops * 4 / 3
    return MachineCosts(
        machine=machine,
        model=model,
        hosts=1,
        slots=slots,
        step=2 * layers / device.bandwidth,
        head=2 * head / device.bandwidth,
        place=place / device.bandwidth,
        burst=0.0,
        token=2 * layers / device.flops,
        attention=attention / device.flops,
        kernel_place=place / device.bandwidth,
        kernel=GPU_KERNEL,
        update=passes / device.flops,
        sources=dict(
            sampler='peak rate',
            update='peak rate; its state does not fit on one GPU',
            kernel='memory traffic',
            host='assumption',
        ),
    )
