"""The policy as functions of (config, parameters, arrays): initialisation, hidden states, decoding, scoring.

Parameters are plain nested dicts, so that policy, reference and teacher, whose shapes are equal, share every compiled
function. Axis names as in policy/attention.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zeroplay_jax.policy import (
    adapters,
    attention,
    blocked_attention,
    kernels,
    paged_attention,
    used_attention,
)
from zeroplay_jax.policy.attention import AnyArray, LayerBuffer, LayerCache
from zeroplay_jax.policy.decoder import Attend, Decoder, ModelConfig, Params, cast_matrices
from zeroplay_jax.policy.paged_attention import LayerPages
from zeroplay_jax.policy.token_scores import TokenScores

# Token ids, positions or segment numbers of packed rows.
PackedInts: TypeAlias = Int[AnyArray, 'batch length']
# Log-probabilities and other figures of every token of packed rows.
PerToken: TypeAlias = Float[Array, 'batch length']

# Attention of packed rows whose memory is linear in the length, by the name in `ModelConfig.attention`.
_LINEAR_ATTENTION = {
    'blocked': blocked_attention.attend_packed,
    'splash': kernels.attend_packed,
}

# (student logits, teacher logits) -> (divergence, statistics by name), for a chunk of tokens.
ChunkLogits: TypeAlias = Float[Array, 'tokens vocab']
ChunkValues: TypeAlias = Float[Array, ' tokens']
Divergence: TypeAlias = Callable[
    [ChunkLogits, ChunkLogits], tuple[ChunkValues, dict[str, ChunkValues]]
]


def init(config: ModelConfig, key: jax.Array) -> Params:
    """Returns random float32 parameters.

    Args:
      config: of the model.
      key: PRNG key.
    """
    # The attention of the dummy tokens does not influence the parameters; the dense one has no minimal length.
    tokens = jnp.zeros((1, 2), jnp.int32)
    dense_config = dataclasses.replace(config, attention='dense')
    segment = jnp.ones((1, 2), jnp.int32)
    attend = _packed_attend(dense_config, segment)
    variables = Decoder(config).init(key, tokens, tokens, attend)
    return variables['params']


def published(config: ModelConfig, params: Params) -> Params:
    """Returns weights for a sampler: matrices in the dtype of the activations, vectors unchanged."""
    return cast_matrices(params, config.dtype)


def _packed_attend(config: ModelConfig, segment) -> Attend:
    """Returns the attention function of packed rows. It passes the (absent) cache through."""
    if config.attention in _LINEAR_ATTENTION:
        attend_packed = _LINEAR_ATTENTION[config.attention]

        def attend_linear(q, k, v, cache, window):
            out = attend_packed(q, k, v, segment, window, config.mesh)
            return out, cache

        return attend_linear
    # One mask per window, shared by the layers that have it.
    masks = {}
    for window in {0, *config.windows}:
        masks[window] = attention.packed_mask(segment, window)

    def attend_dense(q, k, v, cache, window):
        return attention.attend_packed(q, k, v, masks[window]), cache

    return attend_dense


def hidden(
    config: ModelConfig,
    params: Params,
    tokens: PackedInts,
    positions: PackedInts,
    segment: PackedInts,
) -> Float[Array, 'batch length hidden_size']:
    """Returns the final hidden states of packed rows, in `config.dtype`.

    Args:
      config: of the model.
      params: weights.
      tokens: token ids.
      positions: position of every token within its segment.
      segment: segment number of every token, 0 for padding.
    """
    attend = _packed_attend(config, segment)
    hidden_states, _ = Decoder(config).apply({'params': params}, tokens, positions, attend)
    return hidden_states


def hidden_step(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, ' slots'],
    base: Int[Array, ' slots'],
    step: Int[Array, ''],
    cache: tuple[LayerCache, ...],
    buffer: tuple[LayerBuffer, ...],
    rows: used_attention.DecodingRows | None = None,
    adapter: Int[Array, ' slots'] | None = None,
) -> tuple[Float[Array, 'slots hidden_size'], tuple[LayerBuffer, ...]]:
    """Returns the hidden states of one decode step of a burst, for every slot.

    Args:
      config: of the model.
      params: weights.
      tokens: token of every slot at position base + step.
      base: position at which the burst starts in every slot.
      step: number of the step within the burst, from 0.
      cache: keys and values of the positions before `base`.
      buffer: keys and values of the burst so far.
      rows: the decoding slots, which then read their used places only (policy/used_attention.py); None: all slots read
        all places.
      adapter: adapter of every slot (policy/adapters.py); None: the only one, if the weights have adapters.

    Returns:
      Final hidden states and the buffer with this step in it.
    """

    def attend(q, k, v, layer, window):
        layer_cache, layer_buffer = layer
        if rows is not None:
            return used_attention.attend_step(
                q, k, v, layer_cache, layer_buffer, base, step, rows, window
            )
        return attention.attend_step(q, k, v, layer_cache, layer_buffer, base, step, window)

    variables = {'params': params}
    layers = tuple(zip(cache, buffer))
    # The decoder takes [batch, length]: one token per slot.
    tokens = tokens[:, None]
    positions = (base + step)[:, None]
    hidden_states, buffer = Decoder(config).apply(
        variables, tokens, positions, attend, layers, adapter
    )
    return hidden_states[:, 0], buffer


def fill_cache(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, 'rows chunk'],
    slots: Int[Array, ' rows'],
    start: Int[Array, ' rows'],
    cache: tuple[LayerCache, ...],
    reads_used: bool = False,
    adapter: Int[Array, ' rows'] | None = None,
) -> tuple[LayerCache, ...]:
    """Prefills a chunk of prompt tokens and returns the new cache.

    Args:
      config: of the model.
      params: weights.
      tokens: token ids of the chunk.
      slots: slot of every row; a number beyond the last slot marks an idle row.
      start: position of the first token of every row.
      cache: keys and values of all slots.
      reads_used: whether rows read their used places only (policy/used_attention.py).
      adapter: adapter of every row, as of `hidden_step`.
    """
    attend_chunk = used_attention.attend_chunk if reads_used else attention.attend_chunk

    def attend(q, k, v, layer, window):
        return attend_chunk(q, k, v, layer, slots, start, window)

    chunk = tokens.shape[1]
    positions = start[:, None] + jnp.arange(chunk)[None]
    variables = {'params': params}
    # The hidden states are unused, and XLA removes what only they need: the first decode step feeds the last prompt
    # token and samples from its hidden state.
    _, cache = Decoder(config).apply(variables, tokens, positions, attend, cache, adapter)
    return cache


def hidden_tokens(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
    page: Int[Array, ' tokens'],
    index: Int[Array, ' tokens'],
    cache: tuple[LayerPages, ...],
    attend_tokens: paged_attention.AttendTokens,
    adapter: Int[Array, ' tokens'] | None = None,
) -> tuple[Float[Array, 'tokens hidden_size'], tuple[LayerPages, ...]]:
    """Returns the hidden states of tokens of any rows, and the paged cache with their keys and values.

    Args:
      config: of the model.
      params: weights.
      tokens: token ids.
      position: position of every token within its row; -1 marks an idle token.
      page: page of every token; a number beyond the last page drops its keys and values.
      index: index of every token within its page.
      cache: keys and values of all pages.
      attend_tokens: attention of these tokens, see `paged_attention.make_attend`.
      adapter: adapter of every token, as of `hidden_step`.
    """

    def attend(q, k, v, layer, window):
        # The keys are written first, so that the tokens of a row attend to each other through the cache.
        layer = paged_attention.write_tokens(layer, k[:, 0], v[:, 0], page, index)
        return attend_tokens(q[:, 0], layer, window)[:, None], layer

    variables = {'params': params}
    # The decoder takes [batch, length]: one token per row of the batch. Idle tokens need a valid angle.
    positions = jnp.maximum(position, 0)[:, None]
    hidden_states, cache = Decoder(config).apply(
        variables, tokens[:, None], positions, attend, cache, adapter
    )
    return hidden_states[:, 0], cache


def logits(
    config: ModelConfig, params: Params, hidden_states: Float[Array, 'tokens hidden_size']
) -> Float[Array, 'tokens vocab']:
    """Returns the float32 logits of the output head; `_head(config, params)` suffices as `params`."""
    # `product` accumulates in float32 also for bfloat16 inputs: rounded logits would change the log-probabilities.
    if config.tied:
        embedding = params['embedding'].astype(hidden_states.dtype)
        return attention.product('nd,vd->nv', hidden_states, embedding)
    head = params['head'].astype(hidden_states.dtype)
    return attention.product('nd,dv->nv', hidden_states, head)


def score(
    config: ModelConfig,
    params: Params,
    tokens: PackedInts,
    positions: PackedInts,
    segment: PackedInts,
    temperature: float = 1.0,
    train_entropy: bool = False,
    wanted: Bool[AnyArray, 'batch length'] | None = None,
) -> tuple[PerToken, PerToken]:
    """Returns the log-probability of every token and the entropy of the distribution that predicts it.

    Args: those of `token_scores`.

    Returns:
      (log-probabilities, entropy in nats), float32 [batch, length]; index t belongs to token t, predicted from token
      t − 1. The first token of a segment has no prediction: its values are 0 at the start of a row and otherwise
      computed from the previous segment; the caller must mask them.
    """
    scores = token_scores(
        config, params, tokens, positions, segment, temperature, train_entropy, wanted
    )
    logp, entropy, _ = scores.arrays()
    return logp, entropy


def token_scores(
    config: ModelConfig,
    params: Params,
    tokens: PackedInts,
    positions: PackedInts,
    segment: PackedInts,
    temperature: float = 1.0,
    train_entropy: bool = False,
    wanted: Bool[AnyArray, 'batch length'] | None = None,
) -> TokenScores:
    """Returns the scores (log-probability, entropy, {}) of every token, to be computed as arrays or within a loss.

    Args:
      config: of the model.
      params: weights.
      tokens: token ids of packed rows.
      positions: position of every token within its segment.
      segment: segment number of every token, 0 for padding.
      temperature: divides the logits, as in the sampler.
      train_entropy: whether the entropy has a gradient.
      wanted: True at tokens whose values are needed. The others are 0, and no logits are computed for them. None: all.
    """
    hidden_states = hidden(config, params, tokens, positions, segment)

    def score_chunk(head, chunk_hidden, shared, per_token):
        (chunk_tokens,) = per_token
        chunk_logits = logits(config, head, chunk_hidden) / temperature
        return *_logp_and_entropy(chunk_logits, chunk_tokens, train_entropy), {}

    return _token_scores(config, score_chunk, params, hidden_states, (), (tokens[:, 1:],), wanted)


def token_scores_with_teacher(
    config: ModelConfig,
    params: Params,
    teacher_params: Params,
    tokens: PackedInts,
    positions: PackedInts,
    segment: PackedInts,
    teacher_hidden: Float[Array, 'batch length hidden_size'],
    divergence_function: Divergence,
    temperature: float = 1.0,
    train_entropy: bool = False,
    wanted: Bool[AnyArray, 'batch length'] | None = None,
) -> TokenScores:
    """Scores tokens as `token_scores` does, and compares the student's distributions with a teacher's.

    The logits of both exist for one chunk of tokens at a time.

    Args:
      config: of both models.
      params: weights of the student.
      teacher_params: weights of the teacher, of which the output head is used here.
      tokens: token ids of packed rows of the student.
      positions: position of every token within its segment.
      segment: segment number of every token, 0 for padding.
      teacher_hidden: result of the teacher's `hidden`, gathered so that each entry predicts the same token as the
        student's entry at that index; the prompts before it may differ.
      divergence_function: function that compares two [tokens, vocab] arrays of logits.
      temperature: divides the logits of both.
      train_entropy: whether the entropy has a gradient.
      wanted: as in `token_scores`.

    Returns:
      The scores (log-probability, entropy, {'divergence': divergence} with its statistics), of which log-probability
      and divergence have gradients; these reach `params` only.
    """
    hidden_states = hidden(config, params, tokens, positions, segment)
    # No gradient may reach the teacher, even if it shares arrays with the student.
    teacher_params, teacher_hidden = jax.lax.stop_gradient((teacher_params, teacher_hidden))

    def score_chunk(head, chunk_hidden, teacher_head, per_token):
        chunk_tokens, chunk_teacher_hidden = per_token
        chunk_logits = logits(config, head, chunk_hidden) / temperature
        teacher_logits = logits(config, teacher_head, chunk_teacher_hidden) / temperature
        logp, entropy = _logp_and_entropy(chunk_logits, chunk_tokens, train_entropy)
        divergence, statistics = divergence_function(chunk_logits, teacher_logits)
        # Statistics are for logging: a backward pass through them would be computed and multiplied by zero.
        return logp, entropy, {'divergence': divergence, **jax.lax.stop_gradient(statistics)}

    # Cast before it is gathered on every device; `map_tokens` does the same with the student's.
    teacher_head = cast_matrices(_head(config, teacher_params), hidden_states.dtype)
    per_token = (tokens[:, 1:], teacher_hidden[:, :-1])
    return _token_scores(
        config, score_chunk, params, hidden_states, teacher_head, per_token, wanted
    )


def _token_scores(
    config: ModelConfig, function: Callable, params, hidden_states, shared, per_token, wanted
) -> TokenScores:
    """Returns `TokenScores` of these arguments; the head has no gradient if it belongs to a frozen base."""
    head = _head(config, params)
    is_frozen = adapters.has_frozen_base(params)
    if is_frozen:
        head = cast_matrices(jax.lax.stop_gradient(head), hidden_states.dtype)
    return TokenScores(
        function,
        config.logit_chunk,
        config.mesh,
        head,
        is_frozen,
        hidden_states,
        shared,
        per_token,
        wanted,
    )


def _head(config: ModelConfig, params: Params) -> Params:
    """Returns the parameters that `logits` reads."""
    # Only these become inputs of the loop over chunks: everything that enters it is gathered on every device.
    name = 'embedding' if config.tied else 'head'
    return {name: params[name]}


def _logp_and_entropy(chunk_logits, chunk_tokens, train_entropy: bool):
    """Returns log-probabilities of the tokens [tokens] and entropy [tokens] for logits [tokens, vocab]."""
    log_normaliser = jax.nn.logsumexp(chunk_logits, -1)
    # log p = logit - log Z, without an array of all log-probabilities.
    token_logits = jnp.take_along_axis(chunk_logits, chunk_tokens[:, None], 1)
    logp = token_logits[:, 0] - log_normaliser
    if not train_entropy:
        # The entropy is only a metric: with a gradient, its backward pass would be computed and multiplied by zero.
        chunk_logits, log_normaliser = jax.lax.stop_gradient((chunk_logits, log_normaliser))
    # H = -Σ p log p = log Z - Σ p · logit.
    probs = jnp.exp(chunk_logits - log_normaliser[:, None])
    entropy = log_normaliser - jnp.sum(probs * chunk_logits, -1)
    return logp, entropy
