"""Operations and memory traffic that a step of the sampler or learner needs, and the peak rates of GPUs.

The counts contain what the result needs and nothing else: causal attention, no rematerialisation (MFU as in Chowdhery
et al. 2022, arXiv:2204.02311, appendix B), every weight read once per decode step, and keys and values up to the
length of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from zeroplay_jax.policy.transformer import ModelConfig


class Peak(NamedTuple):
    """Peak rates of a device.

    Attributes:
      flops: operations per second of a dense bfloat16 product with float32 sums.
      bandwidth: bytes per second of main memory.
    """

    flops: float
    bandwidth: float


# Device name as the driver reports it → peak rates of the vendor's data sheet, without sparsity. Many data sheets print
# twice the operations, which is the rate for sparse matrices.
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


class Cost(NamedTuple):
    """Least cost of a result: operations, and bytes of main memory (0 where they are not counted)."""

    flops: float
    bytes: float


def decode_cost(model: ModelConfig, slots: int, length: float) -> Cost:
    """Returns the cost of one decode step.

    Args:
      model: the model.
      slots: sequences that get a token.
      length: mean tokens per slot.
    """
    layer_weights, _, head_weights = matrix_weights(model)
    weights = model.layers * layer_weights + head_weights
    # Queries times keys and scores times values: 2·d operations each per head and key.
    attention = model.layers * 4 * model.heads * model.head_dim * length
    cached_values = model.layers * 2 * model.kv_heads * model.head_dim * length
    itemsize = jnp.dtype(model.dtype).itemsize
    return Cost(slots * (2 * weights + attention), itemsize * (weights + slots * cached_values))


def prefill_cost(model: ModelConfig, tokens: int, prompt_length: int) -> Cost:
    """Returns the cost of the keys and values of `tokens` tokens in prompts of `prompt_length`."""
    layer_weights, key_value_weights, _ = matrix_weights(model)
    # Prefill writes the cache only: of the last layer it needs keys and values, but no attention and no output.
    full_layers = model.layers - 1
    weights = full_layers * layer_weights + key_value_weights
    # A causal query sees half of the prompt on average, hence 2·d instead of 4·d.
    attention = full_layers * 2 * model.heads * model.head_dim * prompt_length
    return Cost(tokens * (2.0 * weights + attention), 0.0)


def update_cost(model: ModelConfig, tokens: int, length: int) -> Cost:
    """Returns the cost of forward and backward passes over `tokens` tokens in sequences of `length`."""
    layer_weights, _, head_weights = matrix_weights(model)
    weights = model.layers * layer_weights + head_weights
    attention = model.layers * 2 * model.heads * model.head_dim * length
    forward = 2.0 * weights + attention
    # The backward pass has two products for every product of the forward pass.
    return Cost(3 * tokens * forward, 0.0)


def matrix_weights(model: ModelConfig) -> tuple[int, int, int]:
    """Returns the matrix weights of one layer, of its key and value projections alone, and of the head."""
    key_value_weights = model.hidden_size * 2 * model.kv_heads * model.head_dim
    query_output_weights = model.hidden_size * 2 * model.heads * model.head_dim
    mlp_weights = model.hidden_size * 3 * model.intermediate_size
    layer_weights = key_value_weights + query_output_weights + mlp_weights
    return layer_weights, key_value_weights, model.hidden_size * model.vocab_size
