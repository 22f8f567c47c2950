"""`decode` over pages shorter than a slot: steps of tokens of any slots, which prefill and decode.

Every step computes `token_budget` tokens, each with its slot and position, and writes their keys and values to the
pages at once. Decoding slots come first and leave a quarter of the tokens to slots that still have a prompt to prefill.
A prompt passes through the same steps as the tokens that other slots sample meanwhile. Since all tokens pass through
one program, it does not matter for a single bit where a prompt was cut.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from zeroplay_jax.policy import paged_attention, ragged_attention, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout import slot_state
from zeroplay_jax.rollout.slot_state import (
    REST,
    DecodeChunk,
    SlotState,
    empty_chunk,
    locate,
)
from zeroplay_jax.settings.rollouts import SamplerConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Fed:
    """How many tokens of every slot a step feeds.

    Attributes:
      single: slots that feed their last token only.
      chunk: tokens of the slots that prefill, 0 for all others.
      samples: slots whose last known token is fed, so that a new one can be sampled.
    """

    single: Bool[Array, ' slots']
    chunk: Int[Array, ' slots']
    samples: Bool[Array, ' slots']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Tokens:
    """The tokens of a step: those of slots with one token first, then chunks, then idle ones.

    Attributes:
      slot: slot of every token; the number of slots for idle ones.
      position: position of every token; -1 for idle ones.
      last: index of the last token of every slot in this step; any index for slots without tokens.
    """

    slot: Int[Array, ' tokens']
    position: Int[Array, ' tokens']
    last: Int[Array, ' slots']


def _has_tokens(state: SlotState, included: Bool[Array, ' slots'] | None) -> Bool[Array, ' slots']:
    """Returns which slots have tokens for a step; only those `included`, if it is given."""
    is_active = state.status != REST
    has_tokens = is_active & (state.length < state.limit)
    return has_tokens if included is None else has_tokens & included


def tokens_of_budget(
    config: SamplerConfig,
    state: SlotState,
    age: Int[Array, ' slots'] | None,
    included: Bool[Array, ' slots'] | None = None,
) -> _Fed:
    """Returns the step that feeds up to `token_budget` tokens: decoding slots first, then slots to prefill.

    Nothing but time depends on which slots have to wait for another step.

    Args:
      config: shape of the slots.
      state: the slots.
      age: ascending numbers in the order in which turns began; None: the order of the slots.
      included: slots that may be fed; None: all.
    """
    budget = config.token_budget
    live = _has_tokens(state, included)
    pending = jnp.where(live, state.length - state.cached, 0)
    is_decoding = pending == 1
    prefill_pending = jnp.where(is_decoding, 0, pending)
    # The turns that began first come first, in either kind. In the order of the slots newcomers, which take the slots
    # that are free, could pass the others for ever; behind all older rollouts their prompts, for which their siblings
    # wait, would be prefilled last, and the step would end with them.
    oldest_first = jnp.arange(config.slots) if age is None else jnp.argsort(age)

    def running_sum(tokens):
        """Returns for every slot the sum over the slots that are as old or older."""
        return jnp.zeros_like(tokens).at[oldest_first].set(jnp.cumsum(tokens[oldest_first]))

    # Decoding slots leave a quarter of the budget to slots that wait for their prefill.
    reserved = jnp.minimum(jnp.sum(prefill_pending), budget // 4)
    decoded = is_decoding & (running_sum(is_decoding.astype(jnp.int32)) <= budget - reserved)
    prefill_budget = budget - jnp.sum(decoded)
    earlier_pending = running_sum(prefill_pending) - prefill_pending
    prefilled = jnp.clip(prefill_budget - earlier_pending, 0, prefill_pending)
    samples = decoded | ((prefilled > 0) & (prefilled == pending))
    return _Fed(single=decoded, chunk=prefilled.astype(jnp.int32), samples=samples)


def _lay_out(
    single: Bool[Array, ' slots'],
    chunk: Int[Array, ' slots'],
    first_position: Int[Array, ' slots'],
    tokens: int,
) -> _Tokens:
    """Returns the tokens of a step of `tokens` tokens.

    Args:
      single: slots with one token.
      chunk: tokens of the other slots.
      first_position: position of the first token of every slot.
      tokens: at least as many as the slots have together.
    """
    index = jnp.arange(tokens, dtype=jnp.int32)
    # The tokens of a slot end before this index.
    single_end = jnp.cumsum(single, dtype=jnp.int32)
    singles = single_end[-1]
    chunk_end = singles + jnp.cumsum(chunk, dtype=jnp.int32)
    single_slot = jnp.searchsorted(single_end, index, side='right', method='compare_all')
    chunk_slot = jnp.searchsorted(chunk_end, index, side='right', method='compare_all')
    slot = jnp.where(index < singles, single_slot, chunk_slot).astype(jnp.int32)
    # A slot beyond the last one reads any entry; its position is replaced.
    chunk_first = (chunk_end - chunk).at[slot].get(mode='clip')
    offset = jnp.where(index < singles, 0, index - chunk_first)
    position = first_position.at[slot].get(mode='clip') + offset
    end = jnp.where(single, single_end, chunk_end)
    return _Tokens(
        slot=slot,
        position=jnp.where(slot < single.shape[0], position, -1),
        last=jnp.maximum(end - 1, 0),
    )


def _feed(
    model: ModelConfig,
    config: SamplerConfig,
    params: Params,
    state: SlotState,
    table: Int[Array, 'slots pages_per_slot'],
    slot: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
    attend: paged_attention.AttendTokens,
    adapter: Int[Array, ' slots'] | None,
):
    """Returns (hidden states, cache) after the tokens at these positions; -1 marks an idle token."""
    is_used = position >= 0
    page, index = locate(config, table, slot, jnp.maximum(position, 0))
    # A page out of range drops the keys and values of idle tokens.
    page = jnp.where(is_used, page, config.page_count)
    tokens = state.tokens.at[page, index].get(mode='fill', fill_value=0)
    if adapter is not None:
        adapter = adapter.at[slot].get(mode='clip')
    return transformer.hidden_tokens(
        model, params, tokens, position, page, index, state.cache, attend, adapter
    )


def next_tokens(
    model: ModelConfig,
    config: SamplerConfig,
    mesh: Mesh,
    params: Params,
    table: Int[Array, 'slots pages_per_slot'],
    adapter: Int[Array, ' slots'] | None,
    tokens: int,
    has_chunks: bool,
    truncation: Float[Array, 'slots 2'] | None,
    state: SlotState,
    fed: _Fed,
):
    """Returns ((token, log-prob, kept), cache) of a step of `tokens` tokens; garbage where a slot does not sample.

    Args:
      has_chunks: whether the step may prefill.
      truncation: as of `slot_state.draw`, which returns `kept`.
    """
    # The first token of a slot that decodes is its last one, too.
    first_position = jnp.where(fed.single, state.length - 1, state.cached)
    step = _lay_out(fed.single, fed.chunk, first_position, tokens)
    if config.attention == 'ragged':
        shape = paged_attention.StepShape(
            most_singles=min(config.slots, tokens), has_chunks=has_chunks
        )
        attend = ragged_attention.make_attend(mesh, table, step.slot, step.position, shape)
    else:
        attend = paged_attention.make_attend(table, step.slot, step.position)
    hidden, cache = _feed(
        model, config, params, state, table, step.slot, step.position, attend, adapter
    )
    # Logits of fewer tokens than slots: of all tokens, otherwise of the last one of every slot.
    slot = jnp.minimum(step.slot, config.slots - 1)
    if tokens >= config.slots:
        hidden = hidden[step.last]
        slot = jnp.arange(config.slots)
    next_token_logits = transformer.logits(model, params, hidden)
    if truncation is not None:
        truncation = truncation[slot]
    drawn = slot_state.draw(
        config.kept,
        next_token_logits,
        state.temperature[slot],
        state.key[slot],
        state.length[slot],
        truncation,
    )
    if tokens < config.slots:
        drawn = jax.tree.map(operator.itemgetter(step.last), drawn)
    return drawn, cache


def decode(
    model: ModelConfig,
    config: SamplerConfig,
    mesh: Mesh,
    params: Params,
    state: SlotState,
    table: Int[Array, 'slots pages_per_slot'],
    age: Int[Array, ' slots'] | None = None,
    included: Bool[Array, ' slots'] | None = None,
    adapter: Int[Array, ' slots'] | None = None,
    ends: Int[Array, 'slots ends'] | None = None,
    truncation: Float[Array, 'slots 2'] | None = None,
) -> tuple[SlotState, DecodeChunk]:
    """Runs up to `burst` steps; ends early when no slot has tokens.

    Args:
      model, config, mesh: static shapes.
      params: weights.
      state: the slots.
      table: pages of every slot, those of the new tokens included.
      age: as of `tokens_of_budget`.
      included: slots that this call serves; None: all. The others are left as they are.
      adapter: adapter of every slot (policy/adapters.py); None: the only one, if the weights have adapters.
      ends: further tokens that end a turn of every slot, as of `Sampler`; None: those of the config only.
      truncation: as of `slot_state.draw`.
    """
    compute = functools.partial(next_tokens, model, config, mesh, params, table, adapter)
    # Steps of fewer tokens that cannot prefill, and the whole step.
    buckets = [
        functools.partial(compute, tokens, False, truncation) for tokens in config.decode_buckets
    ]
    whole_step = functools.partial(compute, config.token_budget, True, truncation)
    return run_steps(config, (*buckets, whole_step), state, table, age, included, ends)


def run_steps(
    config: SamplerConfig,
    branches: Sequence[Callable],
    state: SlotState,
    table: Int[Array, 'slots pages_per_slot'],
    age: Int[Array, ' slots'] | None = None,
    included: Bool[Array, ' slots'] | None = None,
    ends: Int[Array, 'slots ends'] | None = None,
) -> tuple[SlotState, DecodeChunk]:
    """Runs the steps of `decode`.

    Args:
      config: static shape.
      branches: `next_tokens` of every size of a step, as functions of state and `_Fed`: those of
        `config.decode_buckets`, then the whole step.
      state, table, age, included, ends: as of `decode`.
    """
    slots = jnp.arange(config.slots, dtype=jnp.int32)
    ends = slot_state.end_tokens(config, ends)
    sizes = jnp.asarray(config.decode_buckets, jnp.int32)

    def has_work(carry):
        number, state, _ = carry
        return (number < config.burst) & jnp.any(_has_tokens(state, included))

    def run_step(carry):
        number, state, chunk = carry
        fed = tokens_of_budget(config, state, age, included)
        # The first bucket that is large enough; with chunks the whole step.
        is_too_small = (sizes < jnp.sum(fed.single)) | jnp.any(fed.chunk > 0)
        branch = jnp.sum(is_too_small, dtype=jnp.int32)
        (token, logp, kept), cache = jax.lax.switch(branch, branches, state, fed)
        # Slots that do not sample get an index out of range, which mode='drop' ignores.
        chunk_index = jnp.where(fed.samples, chunk.count, config.burst)
        chunk = DecodeChunk(
            tokens=chunk.tokens.at[slots, chunk_index].set(token, mode='drop'),
            logp=chunk.logp.at[slots, chunk_index].set(logp, mode='drop'),
            count=chunk.count + fed.samples,
            kept=None if kept is None else chunk.kept.at[slots, chunk_index].set(kept, mode='drop'),
        )
        page, index = locate(config, table, slots, state.length)
        page = jnp.where(fed.samples, page, config.page_count)
        is_end_token = jnp.any(token[:, None] == ends, -1)
        at_end_token = fed.samples & is_end_token
        state = dataclasses.replace(
            state,
            cache=cache,
            tokens=state.tokens.at[page, index].set(token, mode='drop'),
            cached=state.cached + fed.single + fed.chunk,
            length=state.length + fed.samples,
            status=jnp.where(at_end_token, REST, state.status),
        )
        return number + 1, state, chunk

    carry = (jnp.int32(0), state, empty_chunk(config))
    _, state, chunk = jax.lax.while_loop(has_work, run_step, carry)
    # The host cannot count the prefill of a slot, because it depends on when other slots end their turns.
    return state, dataclasses.replace(chunk, cached=state.cached)
