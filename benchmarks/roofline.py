"""Roofline model: the operations that a result needs, and the least time on a chip.

The counts contain what the result needs and nothing else: causal attention, no rematerialisation (MFU as in Chowdhery
et al. 2022, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

import math
import re

from benchmarks.tpu_shapes import Chip
from zeroplay_jax.policy import transformer
from zeroplay_jax.policy.transformer import ModelConfig

# Cost of an update in forward passes: a rematerialised layer runs forward twice, and a backward pass costs two.
UPDATE_PASSES = 4
# An HLO instruction: its result types, its kind, and '-start' if it is asynchronous.
_COLLECTIVE = re.compile(
    r'= (.+?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\('
)
# One array type, such as 'bf16[16,4096]': the bits of an element, and the dimensions. 'pred' has a byte per element.
_ARRAY = re.compile(r'[a-z]+(\d*)\[([\d,]*)\]')
_CHANNEL = re.compile(r'channel_id=(\d+)')


def matrix_weights(model: ModelConfig) -> tuple[int, int]:
    """Returns the matrix weights of one layer and of the head.

    Of the experts of a mixture those that a token passes through count.
    """
    attention_weights = model.hidden_size * 2 * (model.heads + model.kv_heads) * model.head_dim
    width = model.intermediate_size
    if model.experts:
        width = model.experts.per_token * model.experts.size
    mlp_weights = model.hidden_size * 3 * width
    return attention_weights + mlp_weights, model.hidden_size * model.vocab_size


def forward(model: ModelConfig, tokens: int, length: int, head: bool = True) -> float:
    """Returns the operations of a forward pass over the tokens of whole rows.

    Args:
      model: the model.
      tokens: number of tokens.
      length: tokens per row.
      head: whether the logits are computed.
    """
    return transformer.forward_operations(model, length, length * head) * tokens / length


# ---- compiled programs ----


def array_bytes(types: str) -> list[int]:
    """Returns the bytes of every array in the result types of an HLO instruction."""
    sizes = []
    for bits, dimensions in _ARRAY.findall(types):
        # A scalar has no dimensions.
        shape = [int(size) for size in dimensions.split(',') if size]
        sizes.append(int(bits or 8) // 8 * math.prod(shape))
    return sizes


def collectives(text: str) -> dict[str, int]:
    """Returns kind of collective → bytes of the results of these collectives on one chip.

    Args:
      text: the compiled program in HLO, for one chip. A collective in the body of a loop counts once.
    """
    bytes_by_kind: dict[str, int] = {}
    counted = set()
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if not match:
            continue
        result_types, kind, is_start = match.groups()
        channel = _CHANNEL.search(line)
        # A collective that is split into several overlapping steps is written once per step, with the same channel.
        name = (kind, channel[1] if channel else line)
        if name in counted:
            continue
        counted.add(name)
        sizes = array_bytes(result_types)
        # The tuple of an asynchronous start holds operand and result; that of an all-reduce holds results only.
        size = sum(sizes)
        if is_start and kind != 'all-reduce':
            size = max(sizes)
        bytes_by_kind[kind] = bytes_by_kind.get(kind, 0) + size
    return bytes_by_kind


def bound(chip: Chip, flops: float, accessed: float, moved: float) -> tuple[float, str]:
    """Returns the least time in seconds and the resource that limits it ('compute', 'memory' or 'links').

    Args:
      chip: peak figures of the chip.
      flops: operations.
      accessed: bytes of HBM that are read or written.
      moved: bytes that go over the chip's links to other chips.
    """
    times = {
        'compute': flops / chip.flops,
        'memory': accessed / chip.bandwidth,
        'links': moved / chip.links,
    }
    slowest = max(times, key=times.__getitem__)
    return times[slowest], slowest
