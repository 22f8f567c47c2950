"""`extend` and `decode` over pages shorter than a slot: steps of tokens of any rows.

Every step computes a fixed number of tokens, each with its row and position, and writes their keys and values to the
pages at once. `extend` is one step with a chunk per row. `decode` is a loop of steps: with one token per slot, or with
`token_budget` tokens, which go to decoding rows first and then to rows that still have tokens to prefill. In the second
case `extend` is not used: a prompt passes through the same steps as the tokens that other rows sample meanwhile, and
since all tokens pass through one program, it does not matter for a single bit where a prompt was cut.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from zeroplay_jax.policy import transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout import sampling
from zeroplay_jax.rollout.slot_state import (
    DECODE,
    FILL,
    NO_TOKEN,
    REST,
    DecodeChunk,
    SamplerConfig,
    SlotState,
    empty_chunk,
    locate,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Step:
    """The tokens that one step feeds.

    Attributes:
      row: slot of every token; `slots` for idle ones.
      position: position of every token; -1 for idle ones.
      last: index of the last token of every slot in this step; any index for slots without tokens.
      fed: number of tokens of every slot.
      samples: slots whose last known token is fed, so that a new one can be sampled.
    """

    row: Int[Array, ' tokens']
    position: Int[Array, ' tokens']
    last: Int[Array, ' slots']
    fed: Int[Array, ' slots']
    samples: Bool[Array, ' slots']


def _has_tokens(config: SamplerConfig, state: SlotState) -> Bool[Array, ' slots']:
    """Returns which slots have tokens for a decode step."""
    if config.token_budget:
        is_active = state.status != REST
    else:
        is_active = state.status == DECODE
    return is_active & (state.length < state.limit)


def _token_per_slot(config: SamplerConfig, state: SlotState) -> _Step:
    """Returns the step that feeds the last token of every decoding slot."""
    slots = jnp.arange(config.slots, dtype=jnp.int32)
    live = _has_tokens(config, state)
    return _Step(
        row=slots,
        position=jnp.where(live, state.length - 1, -1),
        last=slots,
        fed=live.astype(jnp.int32),
        samples=live,
    )


def _tokens_of_budget(config: SamplerConfig, state: SlotState) -> _Step:
    """Returns the step that feeds up to `token_budget` tokens: decoding rows first, then rows to prefill."""
    budget = config.token_budget
    live = _has_tokens(config, state)
    pending = jnp.where(live, state.length - state.cached, 0)
    is_decoding = pending == 1
    # With more decoding rows than the budget the last ones wait for another step. Nothing but time depends on it.
    decoded = is_decoding & (jnp.cumsum(is_decoding) <= budget)
    prefill_pending = jnp.where(is_decoding, 0, pending)
    prefill_budget = budget - jnp.sum(decoded)
    earlier_pending = jnp.cumsum(prefill_pending) - prefill_pending
    prefilled = jnp.clip(prefill_budget - earlier_pending, 0, prefill_pending)
    fed = jnp.where(is_decoding, decoded, prefilled).astype(jnp.int32)
    # Tokens are laid out slot by slot: those of slot s end before index end[s].
    end = jnp.cumsum(fed)
    index = jnp.arange(budget, dtype=jnp.int32)
    row = jnp.searchsorted(end, index, side='right', method='compare_all')
    is_used = row < config.slots
    first_index = (end - fed).at[row].get(mode='clip')
    first_position = state.cached.at[row].get(mode='clip')
    position = jnp.where(is_used, first_position + index - first_index, -1)
    return _Step(
        row=row.astype(jnp.int32),
        position=position,
        last=jnp.maximum(end - 1, 0),
        fed=fed,
        samples=(fed > 0) & (fed == pending),
    )


def _feed(
    model: ModelConfig,
    config: SamplerConfig,
    params: Params,
    state: SlotState,
    table: Int[Array, 'slots pages_per_slot'],
    row: Int[Array, ' tokens'],
    position: Int[Array, ' tokens'],
    block: int = 1,
):
    """Returns (hidden states, cache) after the tokens at these positions; -1 marks an idle token."""
    is_used = position >= 0
    page, index = locate(config, table, row, jnp.maximum(position, 0))
    # A page out of range drops the keys and values of idle tokens.
    page = jnp.where(is_used, page, config.page_count)
    tokens = state.tokens.at[page, index].get(mode='fill', fill_value=0)
    return transformer.hidden_tokens(
        model, params, tokens, row, position, page, index, table, state.cache, block
    )


def extend(
    model: ModelConfig,
    config: SamplerConfig,
    params: Params,
    state: SlotState,
    slots: Int[Array, ' rows'],
    table: Int[Array, 'slots pages_per_slot'],
) -> SlotState:
    """Prefills one chunk of every row in `slots` (ascending; a number beyond the last slot marks an idle row)."""
    start = state.cached.at[slots].get(mode='clip')
    # The last token stays uncached: decode feeds it to predict the next one.
    goal = state.length.at[slots].get(mode='clip') - 1
    position = start[:, None] + jnp.arange(config.chunk)[None]
    is_used = (position < goal[:, None]) & (slots < config.slots)[:, None]
    position = jnp.where(is_used, position, -1).reshape(-1)
    row = jnp.repeat(slots, config.chunk)
    # The hidden states are unused, and XLA removes what only they need.
    _, cache = _feed(model, config, params, state, table, row, position, config.chunk)
    cached = jnp.minimum(start + config.chunk, goal)
    status = jnp.where(cached >= goal, DECODE, FILL)
    return dataclasses.replace(
        state,
        cache=cache,
        cached=state.cached.at[slots].set(cached, mode='drop'),
        status=state.status.at[slots].set(status, mode='drop'),
    )


def decode(
    model: ModelConfig,
    config: SamplerConfig,
    params: Params,
    state: SlotState,
    table: Int[Array, 'slots pages_per_slot'],
) -> tuple[SlotState, DecodeChunk]:
    """Runs up to `burst` steps; ends early when no row has tokens. `table` must have the pages of new tokens."""
    slots = jnp.arange(config.slots, dtype=jnp.int32)
    eos = jnp.asarray(config.eos or (NO_TOKEN,), jnp.int32)
    make_step = _tokens_of_budget if config.token_budget else _token_per_slot

    def has_work(carry):
        number, state, _ = carry
        return (number < config.burst) & jnp.any(_has_tokens(config, state))

    def run_step(carry):
        number, state, chunk = carry
        step = make_step(config, state)
        hidden, cache = _feed(model, config, params, state, table, step.row, step.position)
        next_token_logits = transformer.logits(model, params, hidden[step.last])
        token, logp = sampling.sample(next_token_logits, state.temperature, state.key, state.length)
        # Rows that do not sample get an index out of range, which mode='drop' ignores.
        chunk_index = jnp.where(step.samples, chunk.count, config.burst)
        chunk = DecodeChunk(
            tokens=chunk.tokens.at[slots, chunk_index].set(token, mode='drop'),
            logp=chunk.logp.at[slots, chunk_index].set(logp, mode='drop'),
            count=chunk.count + step.samples,
        )
        page, index = locate(config, table, slots, state.length)
        page = jnp.where(step.samples, page, config.page_count)
        is_end_token = jnp.any(token[:, None] == eos[None], -1)
        at_end_token = step.samples & is_end_token
        state = dataclasses.replace(
            state,
            cache=cache,
            tokens=state.tokens.at[page, index].set(token, mode='drop'),
            cached=state.cached + step.fed,
            length=state.length + step.samples,
            status=jnp.where(at_end_token, REST, state.status),
        )
        return number + 1, state, chunk

    carry = (jnp.int32(0), state, empty_chunk(config))
    _, state, chunk = jax.lax.while_loop(has_work, run_step, carry)
    if config.token_budget:
        # The host cannot count the prefill of a slot, because it depends on when other slots end their turns.
        chunk = dataclasses.replace(chunk, cached=state.cached)
    return state, chunk
