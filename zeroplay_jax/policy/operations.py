"""Floating-point operations of the decoder, by the shapes of its matrices."""

from __future__ import annotations

from zeroplay_jax.policy.decoder import ModelConfig


def forward_operations(model: ModelConfig, tokens: int, logits: int) -> float:
    """Returns the operations of a forward pass over one sequence: twice the multiplications.

    Norms, rotations and softmax are not counted, as usual for the utilisation of a model's operations (MFU; Chowdhery
    et al. 2022, appendix B). Other than there, attention is causal: a token reads those before it only.

    Args:
      model: shape of the decoder.
      tokens: length of the sequence.
      logits: tokens of which the output head is computed.
    """
    query_size = model.heads * model.head_dim
    key_size = model.kv_heads * model.head_dim
    projections = model.hidden_size * (2 * query_size + 2 * key_size)
    feed_forward = 3 * model.hidden_size * model.intermediate_size
    matrices = model.layers * (projections + feed_forward) * tokens
    head = model.hidden_size * model.vocab_size * logits
    # Scores and weighted values: two products of a query size per pair of tokens.
    attention = 0.0
    for layer in range(model.layers):
        window = model.windows[layer] if model.windows else 0
        attention += 2 * query_size * _pairs(tokens, window)
    return 2.0 * (matrices + head + attention)


def update_operations(
    model: ModelConfig, tokens: int, logits: int, is_frozen: bool = False
) -> float:
    """Returns the operations of a forward and a backward pass; arguments as `forward_operations`.

    The backward pass has two products for each of the forward pass: for the gradients of inputs and of weights.

    Args:
      is_frozen: whether the weights are a frozen base with adapters. Gradients of its weights are not computed; the
        adapters' own operations are small and not counted.
    """
    passes = 2.0 if is_frozen else 3.0
    return passes * forward_operations(model, tokens, logits)


def _pairs(tokens: int, window: int) -> float:
    """Returns the pairs of a query and a key it may read; `window`: of the queries, 0 for all earlier tokens."""
    if not window or window >= tokens:
        return tokens * (tokens + 1) / 2
    return window * (window + 1) / 2 + (tokens - window) * window
