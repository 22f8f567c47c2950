"""The policy as functions of (config, parameters, arrays): initialisation, hidden states, decoding, scoring.

Parameters are plain nested dicts, so that policy, reference and teacher, whose shapes are equal, share every compiled
function. Axis names as in policy/attention.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zeroplay_jax.policy import attention, delta, experts, head, paged_attention
from zeroplay_jax.policy.attention import AnyArray
from zeroplay_jax.policy.decoder import DELTA, Attend, Decoder, ModelConfig, Params, cast_matrices
from zeroplay_jax.policy.head import logits as logits

# Token ids, positions or segment numbers of packed rows.
PackedInts: TypeAlias = Int[AnyArray, 'batch length']
# Log-probabilities and other figures of every token of packed rows.
PerToken: TypeAlias = Float[Array, 'batch length']
# Experts of every token, as policy/experts.py records them.
PackedRecord: TypeAlias = Int[AnyArray, 'batch length choices']
# Keys and values of every layer, or its states (policy/delta.py), and after them the record of policy/experts.py if the
# model has experts.
Cache: TypeAlias = tuple[Any, ...]


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
    mix = None if config.delta is None else delta.packed(config.delta, segment)
    if config.attention != 'dense':
        # Imported here: most runs need neither.
        from zeroplay_jax.policy import blocked_attention

        # Their memory is linear in the length.
        attend_packed = {
            'blocked': blocked_attention.attend_packed,
            'splash': blocked_attention.attend_splash,
        }[config.attention]

        def attend_linear(q, k, v, cache, window):
            out = attend_packed(q, k, v, segment, window, config.mesh)
            return out, cache

        return _or_mix(attend_linear, mix)
    # One mask per window, shared by the layers that have it.
    windows = {0, *config.windows} - {DELTA}
    masks = {window: attention.packed_mask(segment, window) for window in windows}

    def attend_dense(q, k, v, cache, window):
        return attention.attend_packed(q, k, v, masks[window]), cache

    return _or_mix(attend_dense, mix)


def _or_mix(attend: Attend, mix: delta.Mix | None) -> Attend:
    """Returns the function of layers with attention and of gated delta nets; `mix` is that of the latter, if any."""
    if mix is None:
        return attend

    def of_layer(*arguments):
        *inputs, window = arguments
        return mix(*inputs) if window == DELTA else attend(*inputs, window)

    return of_layer


def hidden(
    config: ModelConfig,
    params: Params,
    tokens: PackedInts,
    positions: PackedInts,
    segment: PackedInts,
    record: PackedRecord | None = None,
) -> Float[Array, 'batch length hidden_size']:
    """Returns the final hidden states of packed rows, in `config.dtype`.

    Args:
      config: of the model.
      params: weights.
      tokens: token ids.
      positions: position of every token within its segment.
      segment: segment number of every token, 0 for padding.
      record: experts that compute the tokens; None: those that the routers choose.
    """
    attend = _packed_attend(config, segment)
    variables = {'params': params} | experts.replay(config.experts, record)
    hidden_states, _ = Decoder(config).apply(variables, tokens, positions, attend)
    return hidden_states


def empty_cache(config: ModelConfig, slots: int, length: int) -> Cache:
    """Returns a zero cache of slots that hold `length` tokens."""
    shape = (slots, length, config.kv_heads, config.head_dim, config.dtype)
    cache: list[Any] = list(attention.empty_cache(config.layers, *shape))
    for layer, window in enumerate(config.windows):
        if window == DELTA and config.delta is not None:
            cache[layer] = delta.empty_state(config.delta, slots, config.dtype)
    return tuple(cache)


def empty_buffer(config: ModelConfig, slots: int, burst: int, cache: Cache) -> Cache:
    """Returns zero keys and values for the tokens of one decode burst, and the states of the cache."""
    shape = (slots, burst, config.kv_heads, config.head_dim, config.dtype)
    buffer: list[Any] = list(attention.empty_buffer(config.layers, *shape))
    for number, layer in enumerate(cache):
        if isinstance(layer, delta.State):
            buffer[number] = layer.running
    return tuple(buffer)


def write_buffer(
    cache: Cache, buffer: Cache, slots: Int[Array, ' slots'], base: Int[Array, ' slots']
) -> Cache:
    """Returns the cache after a burst; arguments as of `attention.write_window` and `hidden_step`."""
    written: list[Any] = []
    for layer, new in zip(cache, buffer):
        if isinstance(layer, delta.State) and isinstance(new, delta.Running):
            written.append(delta.State(new, layer.turn))
        else:
            written.append(attention.write_window(layer, new, slots, base))
    return tuple(written)


def hidden_step(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, ' slots'],
    base: Int[Array, ' slots'],
    step: Int[Array, ''],
    cache: Cache,
    buffer: Cache,
    rows: attention.DecodingRows | None = None,
    adapter: Int[Array, ' slots'] | None = None,
    live: Bool[Array, ' slots'] | None = None,
) -> tuple[Float[Array, 'slots hidden_size'], Cache]:
    """Returns the hidden states of one decode step of a burst, for every slot.

    Args:
      config: of the model.
      params: weights.
      tokens: token of every slot at position base + step.
      base: position at which the burst starts in every slot.
      step: number of the step within the burst, from 0.
      cache: keys and values of the positions before `base`.
      buffer: keys and values of the burst so far, and states of gated delta nets.
      rows: the decoding slots, which then read their used places only; None: all slots read all places.
      adapter: adapter of every slot (policy/adapters.py); None: the only one, if the weights have adapters.
      live: slots whose states change; None: all.

    Returns:
      Final hidden states and the buffer with this step in it.
    """

    def attend(q, k, v, layer, window):
        layer_cache, layer_buffer = layer
        if rows is not None:
            return attention.attend_used_step(
                q, k, v, layer_cache, layer_buffer, base, step, rows, window
            )
        return attention.attend_step(q, k, v, layer_cache, layer_buffer, base, step, window)

    mix = None if config.delta is None else delta.step(config.delta, base + step, live)
    layers = tuple(
        entries[1] if isinstance(entries[1], delta.Running) else entries
        for entries in zip(cache, buffer)
    )[: config.layers]
    # The decoder takes [batch, length]: one token per slot.
    tokens = tokens[:, None]
    positions = (base + step)[:, None]
    hidden_states, new_layers, chosen = _apply_cached(
        config, params, tokens, positions, _or_mix(attend, mix), layers, adapter
    )
    records = [record.at[:, step].set(chosen[:, 0]) for record in buffer[config.layers :]]
    return hidden_states[:, 0], (*new_layers, *records)


def hidden_chunk(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, 'rows chunk'],
    slots: Int[Array, ' rows'],
    start: Int[Array, ' rows'],
    cache: Cache,
    reads_used: bool = False,
    adapter: Int[Array, ' rows'] | None = None,
    count: Int[Array, ' rows'] | None = None,
) -> tuple[Float[Array, 'rows chunk hidden_size'], Cache]:
    """Returns the hidden states of a chunk of known tokens per row, and the cache with their keys and values.

    Args:
      config: of the model.
      params: weights.
      tokens: token ids of the chunks.
      slots: slot of every row; a number beyond the last slot marks an idle row.
      start: position of the first token of every row.
      cache: keys and values of all slots.
      reads_used: whether rows read their used places only.
      adapter: adapter of every row, as of `hidden_step`.
      count: tokens of every row, which alone change states of gated delta nets; None: all.
    """

    def attend(q, k, v, layer, window):
        return attention.attend_chunk(q, k, v, layer, slots, start, window, reads_used)

    chunk = tokens.shape[1]
    mix = None
    if config.delta is not None:
        count = jnp.full_like(start, chunk) if count is None else count
        mix = delta.chunk_of_rows(config.delta, slots, start, count)
    positions = start[:, None] + jnp.arange(chunk)[None]
    layers = cache[: config.layers]
    hidden_states, new_layers, chosen = _apply_cached(
        config, params, tokens, positions, _or_mix(attend, mix), layers, adapter
    )
    place = slots[:, None], positions
    records = [x.at[place].set(chosen, mode='drop') for x in cache[config.layers :]]
    return hidden_states, (*new_layers, *records)


def hidden_tokens(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
    page: Int[Array, ' tokens'],
    index: Int[Array, ' tokens'],
    cache: Cache,
    attend_tokens: paged_attention.AttendTokens,
    adapter: Int[Array, ' tokens'] | None = None,
) -> tuple[Float[Array, 'tokens hidden_size'], Cache]:
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

    # The decoder takes [batch, length]: one token per row of the batch. Idle tokens need a valid angle.
    positions = jnp.maximum(position, 0)[:, None]
    layers = cache[: config.layers]
    hidden_states, new_layers, chosen = _apply_cached(
        config, params, tokens[:, None], positions, attend, layers, adapter
    )
    records = [x.at[page, index].set(chosen[:, 0], mode='drop') for x in cache[config.layers :]]
    return hidden_states[:, 0], (*new_layers, *records)


def _apply_cached(config, params, tokens, positions, attend, layers, adapter):
    """Returns (hidden states, new cache of the layers, record [batch, length, choices] or None for a dense model)."""
    decoder, variables = Decoder(config), {'params': params}
    arguments = (tokens, positions, attend, layers, adapter)
    if config.experts is None:
        return *decoder.apply(variables, *arguments), None
    (hidden_states, new_layers), chosen = experts.recorded(decoder, variables, *arguments)
    return hidden_states, new_layers, chosen


def score(
    config: ModelConfig,
    params: Params,
    tokens: PackedInts,
    positions: PackedInts,
    segment: PackedInts,
    temperature: float = 1.0,
    wanted: Bool[AnyArray, 'batch length'] | None = None,
    record: PackedRecord | None = None,
    kept: Int[AnyArray, 'batch length ids'] | None = None,
) -> tuple[PerToken, PerToken]:
    """Returns the log-probability of every token and the entropy of the distribution that predicts it.

    Args:
      config: of the model.
      params: weights.
      tokens: token ids of packed rows.
      positions: position of every token within its segment.
      segment: segment number of every token, 0 for padding.
      temperature: divides the logits, as in the sampler.
      wanted: True at tokens whose values are needed. The others are 0, and no logits are computed for them. None: all.
      record: as of `hidden`.
      kept: sets that the tokens are drawn from, as of `head.within`.

    Returns:
      (log-probabilities, entropy in nats), float32 [batch, length]; index t belongs to token t, predicted from token
      t − 1. The first token of a segment has no prediction: its values are 0 at the start of a row and otherwise
      computed from the previous segment; the caller must mask them.
    """
    states = hidden(config, params, tokens, positions, segment, record)

    def score_chunk(matrices, chunk_states, _, predicted):
        chunk_tokens, chunk_kept = predicted
        chunk_logits = logits(config, matrices, chunk_states) / temperature
        chunk_logits = head.within(chunk_logits, chunk_kept)
        return head.logp_and_entropy(chunk_logits, chunk_tokens, train_entropy=True)

    scores = head.map_tokens(
        score_chunk,
        head.head_of(config, params, states.dtype),
        states[:, :-1],
        (),
        jax.tree.map(lambda x: x[:, 1:], (tokens, kept)),
        None if wanted is None else wanted[:, 1:],
    )
    return head.at_predicted(scores)


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
    projections = model.hidden_size * ((2 + model.output_gate) * query_size + 2 * key_size)
    width, router = model.intermediate_size, 0
    if model.experts:
        shared = model.experts.shared
        width = model.experts.per_token * model.experts.size + shared * model.intermediate_size
        router = model.experts.count + shared
    feed_forward = model.hidden_size * (3 * width + router)
    delta_layers = model.windows.count(DELTA)
    matrices = (model.layers * feed_forward + (model.layers - delta_layers) * projections) * tokens
    if model.delta is not None:
        shape = model.delta
        per_token = model.hidden_size * (shape.channels + 2 * shape.values + 2 * shape.value_heads)
        # The memory is read for the key and the query, and written.
        per_token += 3 * shape.values * shape.key_dim
        matrices += delta_layers * per_token * tokens
    head = model.hidden_size * model.vocab_size * logits
    # Scores and weighted values: two products of a query size per pair of tokens.
    attention = 0.0
    for layer in range(model.layers):
        window = model.windows[layer] if model.windows else 0
        if window != DELTA:
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
