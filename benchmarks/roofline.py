"""Operations that a program must do, and the time they take at least on a chip.

Letters: N weights that multiply, T tokens, L tokens of a row, H query heads, d head size.
"""

from __future__ import annotations

import math
import re

import jax

from benchmarks.tpu_shapes import Chip
from zeroplay_jax.policy.transformer import ModelConfig

# A remat layer runs forward twice and backward, at twice the forward's cost.
UPDATE_PASSES = 4
_BYTES = {
    'pred': 1,
    's8': 1,
    'u8': 1,
    'bf16': 2,
    'f16': 2,
    's32': 4,
    'u32': 4,
    'f32': 4,
    's64': 8,
    'u64': 8,
}
_COLLECTIVE = re.compile(
    r'= (.+?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\('
)
_ARRAY = re.compile(r'(\w+)\[([\d,]*)\]')


def weights(model: ModelConfig, shapes) -> tuple[int, int]:
    """(N of the layers, N of the head) from the parameter shapes: matrices that tokens are multiplied with."""
    head = model.vocab_size * model.hidden_size
    matrices = sum(x.size for x in jax.tree.leaves(shapes) if x.ndim > 1)
    return matrices - head * (1 if model.tied else 2), head


def seen(model: ModelConfig, length: int) -> float:
    """Places that the queries of a full row see in all layers together, on average: causal, and inside windows."""
    windows = model.windows or (0,) * model.layers
    mean = {w: sum(min(i + 1, w or length) for i in range(length)) / length for w in set(windows)}
    return sum(mean[w] for w in windows)


def forward(model: ModelConfig, shapes, tokens: int, length: int, head: bool) -> float:
    """Operations of a forward pass of `tokens` in rows of `length`: 2·N per token, and attention's two products."""
    layers, last = weights(model, shapes)
    attention = 4 * model.heads * model.head_dim * seen(model, length)
    return tokens * (2.0 * (layers + (last if head else 0)) + attention)


def collectives(text: str) -> dict[str, int]:
    """Bytes of the results of a program's collectives on one chip, by kind; of a loop's body once."""
    out: dict[str, int] = {}
    known = set()
    for line in text.splitlines():
        found = _COLLECTIVE.search(line)
        if not found:
            continue
        channel = re.search(r'channel_id=(\d+)', line)
        name = (found[2], channel[1] if channel else line)
        if name in known:  # one collective, written out once for every step that overlaps with it
            continue
        known.add(name)
        sizes = [
            _BYTES.get(kind, 4) * math.prod(map(int, filter(None, dims.split(','))))
            for kind, dims in _ARRAY.findall(found[1])
        ]
        out[found[2]] = out.get(found[2], 0) + (
            max(sizes) if found[3] and found[2] != 'all-reduce' else sum(sizes)
        )
    return out


def bound(chip: Chip, flops: float, accessed: float, moved: float) -> tuple[float, str]:
    """(least seconds, by what) of so many operations, bytes of HBM and bytes over the links of one chip."""
    times = {
        'compute': flops / chip.flops,
        'memory': accessed / chip.bandwidth,
        'links': moved / chip.links,
    }
    name = max(times, key=lambda k: times[k])
    return times[name], name
