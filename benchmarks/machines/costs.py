"""What the calls of a host cost.

A step takes its products or the reading of all weights at the chip's peak rates, whichever takes longer; on TPUs times
the ratio of a compiled step of as many tokens (results/tpu_pages.json, one model, compiled from commit 21656cfd) to
that. Attention reads its places at the peak rate of the memory, or takes the instructions of a compiled kernel.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from benchmarks import command
from benchmarks.machines.models import CHIPS_OF_HOST
from benchmarks.machines.programs import sized
from zeroplay_jax.extras.plan.machines import CHIPS
from zeroplay_jax.extras.plan.memory import Memory
from zeroplay_jax.extras.plan.sizes import KNOWN, Sizes, known_name, sizes_of
from zeroplay_jax.policy import ragged_tpu, shape, transformer
from zeroplay_jax.policy.transformer import ModelConfig
from zeroplay_jax.settings.rollouts import SamplerConfig

# The model of the compiled steps, and per generation of chips their slots and the clock of the chip in Hz. The vendor
# does not publish the clock; it follows from the peak operations and the size of the matrix units.
MODEL = 'qwen2.5-7b'
COMPILED_SLOTS = {'v5e': 96, 'v5p': 256, 'v6e': 192}
CLOCKS = {'v5e': 1.5e9, 'v5p': 1.75e9, 'v6e': 1.75e9}
# Places of a page on machines without a compiled kernel; it is read at the memory's peak rate.
PLAIN_PAGE = 64
# Tokens of an update, and of its rows.
UPDATE_TOKENS, ROW_TOKENS = 256 * 4096, 4096
# Cost of an update in forward passes: a rematerialised layer runs forward twice, and a backward pass costs two.
UPDATE_PASSES = 4
# Share of an update's rows that first-fit packing fills.
PACKED = 0.925
# Seconds of the host in a round of the scheduler, and of one rollout in the exchange between hosts (1.4 s per 1,280,
# measured on 2026-11-22 on a loaded machine). Assumptions: neither was measured beside an accelerator.
ROUND_SECONDS = 8e-3
EXCHANGE_SECONDS = 1.4 / 1280
# Queries of a block of the kernel; those of a prefill share a read of the places.
DECODE_QUERIES, PREFILL_QUERIES = ragged_tpu.SINGLE_QUERIES, ragged_tpu.CHUNK_QUERIES


class Model(NamedTuple):
    """The sizes of a policy, and its decoder."""

    sizes: Sizes
    config: ModelConfig

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled steps are those of this model."""
        return self.sizes == KNOWN[MODEL]


def published_model(name: str) -> Model:
    """Returns a model of `sizes.KNOWN`."""
    return Model(KNOWN[name], sized(name))


def model_of(policy: str) -> Model:
    """Returns the model of a folder with a config.json, or of a path or name that ends with that of a known one."""
    if pathlib.Path(policy).is_dir():
        return Model(sizes_of(policy), shape.read_config(policy))
    return published_model(known_name(policy))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The ragged paged attention kernel of JAX, for all layers of a model on a host.

    Attributes:
      block: places that the kernel reads at a time.
      traffic: seconds in which a block is read at the memory's peak rate.
      instructions: 'decode' and 'prefill' → seconds of the instructions of a block, of a row around its blocks, and of
        a block of queries around its rows.
    """

    block: int
    traffic: float
    instructions: dict[str, tuple[float, ...]]

    def seconds(self, grid: int, rows: float, blocks: float, kind: str) -> float:
        """Returns the seconds of a call: the larger of instructions and traffic.

        Args:
          grid: blocks of queries of the program, those without rows included.
          rows: rows, once for each of their blocks of queries.
          blocks: blocks of places that are read.
          kind: 'decode' or 'prefill'.
        """
        per_block, per_row, per_query_block = self.instructions[kind]
        return blocks * max(per_block, self.traffic) + rows * per_row + grid * per_query_block


def stored() -> dict[str, Any]:
    """Returns generation → its compiled 'steps', by number of tokens, and its 'kernel', in bundles of instructions."""
    return json.loads((command.RESULTS / 'tpu_pages.json').read_text())


def _compiled_kernel(kind: str, place: float) -> Kernel:
    """Returns the stored kernel of MODEL on a host that reads a place in `place` seconds."""
    figures = stored()[kind]['kernel']
    # The kernel runs once per layer; a bundle takes a cycle.
    bundle = sized(MODEL).layers / CLOCKS[kind]
    instructions = {}
    for queries in ('decode', 'prefill'):
        counts = (figures[queries][loop] for loop in ('block', 'row', 'grid'))
        instructions[queries] = tuple(count * bundle for count in counts)
    block = figures['block']
    return Kernel(block, block * place, instructions)


@dataclasses.dataclass(frozen=True)
class MachineCosts:
    """Seconds of a model on one host.

    Attributes:
      hosts: number of hosts.
      read: reading all weights.
      token: products of a token with the weights of the layers.
      logits: products of a token with the head.
      attention: products of a token with one place, in all layers.
      place: reading keys and values of one place in all layers.
      kernel: attention over pages.
      slowdown: tokens of a step → its seconds over those at the peak rates; between two entries it is interpolated.
      update: an update of UPDATE_TOKENS on all hosts.
    """

    hosts: int
    read: float
    token: float
    logits: float
    attention: float
    place: float
    kernel: Kernel
    slowdown: dict[int, float]
    update: float

    def step(self, tokens: int, sampled: int) -> float:
        """Returns the seconds of a step without attention.

        Args:
          tokens: tokens that it computes.
          sampled: tokens whose logits it computes.
        """
        products = tokens * self.token + sampled * self.logits
        slowdown = np.interp(tokens, list(self.slowdown), list(self.slowdown.values()))
        return max(self.read, products) * float(slowdown)

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
      overlap: whether the host reads a decode call while the next one runs.
    """

    slots: int = 64
    context: int = 4096
    chunk: int = 256
    fill_rows: int = 16
    burst: int = 16
    turn_tokens: int = 256
    overlap: bool = False


class CallCosts:
    """Seconds of the calls of a host with given settings.

    Attributes:
      host: seconds of the host between two calls.
    """

    host = ROUND_SECONDS

    def __init__(self, machine: MachineCosts, settings: Settings):
        self.machine = machine
        self.settings = settings

    def extend(self) -> float:
        """Seconds of a prefill call. It computes all its rows, and attention covers all positions of a slot."""
        tokens = self.settings.fill_rows * self.settings.chunk
        attention = tokens * self.settings.positions * self.machine.attention
        return self.machine.step(tokens, 0) + attention

    def decode(self, steps: int) -> float:
        """Seconds of the steps of a decode call over all positions of all slots."""
        slots = self.settings.slots
        attention = self.machine.place * slots * self.settings.positions
        return steps * (self.machine.step(slots, slots) + attention)

    def mixed(self, tokens: int, last: np.ndarray, fed: np.ndarray) -> float:
        """Seconds of a step over pages: products, attention over used places in blocks, logits.

        Args:
          tokens: tokens that the program computes, padding included.
          last: places of every row with tokens in this step.
          fed: tokens of each of these rows.
        """
        kernel = self.machine.kernel
        rows = min(self.settings.slots, tokens)
        seconds = self.machine.step(tokens, rows)
        blocks = -(-last // kernel.block)
        is_single = fed == 1
        # A call for rows of one token, and a call for chunks whose blocks of queries read all places before their last
        # one. The tokens before the chunks are a row of one place.
        singles = int(is_single.sum())
        read = int(blocks[is_single].sum())
        seconds += kernel.seconds(-(-rows // DECODE_QUERIES), singles, read, 'decode')
        # The step of the budget has the calls for chunks also when there are none.
        if tokens == self.settings.token_budget:
            queries = -(-fed[~is_single] // PREFILL_QUERIES)
            before = -(-singles // PREFILL_QUERIES)
            read = int((blocks[~is_single] * queries).sum()) + before
            grid = -(-tokens // PREFILL_QUERIES)
            seconds += kernel.seconds(grid, int(queries.sum()) + before, read, 'prefill')
        return seconds


def machine_costs(kind: str, model: Model, chips: int, hosts: int) -> MachineCosts:
    """Returns the costs of a model on hosts.

    Args:
      kind: of the chips, a key of `machines.CHIPS`.
      model: `published_model` or `model_of`.
      chips: of a host, over which the weights are split.
      hosts: number of hosts.
    """
    costs = _peak_costs(kind, model, chips, hosts)
    if kind not in COMPILED_SLOTS:
        return costs
    if model.is_compiled and chips == CHIPS_OF_HOST:
        costs = dataclasses.replace(costs, kernel=_compiled_kernel(kind, costs.place))
    return dataclasses.replace(costs, slowdown=_slowdown(kind))


def _slowdown(kind: str) -> dict[int, float]:
    """Returns `MachineCosts.slowdown` of the compiled steps.

    It is taken for other models and numbers of chips, too: how much slower than the peak rates a step is depends most
    on how many tokens share the reading of a weight.
    """
    costs = _peak_costs(kind, published_model(MODEL), CHIPS_OF_HOST, 1)
    slowdown = {}
    for name, step in stored()[kind]['steps'].items():
        tokens = int(name)
        least = costs.step(tokens, min(tokens, COMPILED_SLOTS[kind]))
        slowdown[tokens] = max(step['seconds'] / least, 1.0)
    return slowdown


def _peak_costs(kind: str, model: Model, chips: int, hosts: int) -> MachineCosts:
    """Returns the costs at the peak rates of the chips; arguments are those of `machine_costs`."""
    chip = CHIPS[kind]
    flops, bandwidth = chips * chip.flops, chips * chip.bandwidth
    sizes, config = model
    head = sizes.hidden_size * sizes.vocab_size
    item = 2 if chip.has_bfloat16 else 4
    # Keys and values of all layers.
    place = config.layers * 2 * config.kv_heads * config.head_dim * item / bandwidth
    no_instructions = (0.0, 0.0, 0.0)
    row = transformer.forward_operations(config, ROW_TOKENS, ROW_TOKENS)
    passes = UPDATE_PASSES * row * UPDATE_TOKENS / ROW_TOKENS
    return MachineCosts(
        hosts=hosts,
        # Steps have so many tokens that all experts are read.
        read=item * (sizes.layer_weights + head) / bandwidth,
        token=transformer.forward_operations(config, 1, 0) / flops,
        logits=2 * head / flops,
        # Two products of 2·d operations per head.
        attention=config.layers * 4 * config.heads * config.head_dim / flops,
        place=place,
        kernel=Kernel(
            PLAIN_PAGE, PLAIN_PAGE * place, dict(decode=no_instructions, prefill=no_instructions)
        ),
        slowdown={1: 1.0},
        update=passes / flops / hosts,
    )


def of_plan(planned: Memory, model: Model) -> MachineCosts:
    """Returns the costs on the machine of a plan: on its hosts for the compiled model, else on its data shards."""
    target = planned.machine
    is_compiled = target.kind in COMPILED_SLOTS and model.is_compiled
    if is_compiled and target.devices >= CHIPS_OF_HOST:
        hosts = target.devices // CHIPS_OF_HOST
        return machine_costs(target.kind, model, CHIPS_OF_HOST, hosts)
    return machine_costs(target.kind, model, planned.split, planned.shards)
