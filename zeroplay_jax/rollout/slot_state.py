"""The device data of the slots, how a token is drawn, and where a position lies in the pages.

Everything that grows with a rollout's length lies in pages: tokens, keys and values. Everything else has one entry per
slot. With `page=0` a page is as long as a slot and page s belongs to slot s. Then keys and values lie as
policy/attention.py wants them, and no program needs a page table. With shorter pages a table [slots, pages per slot]
names the pages of every slot, and keys and values lie as policy/paged_attention.py wants them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from zeroplay_jax.policy import experts, head, paged_attention, transformer
from zeroplay_jax.settings.rollouts import SamplerConfig


def draw(
    most: int,
    logits: Float[Array, 'draws vocab'],
    temperature: Float[Array, ' draws'],
    key: UInt32[Array, 'draws 2'],
    position: Int[Array, ' draws'],
    truncation: Float[Array, 'draws 2'] | None,
) -> tuple[Int[Array, ' draws'], Float[Array, ' draws'], Int[Array, 'draws ids'] | None]:
    """Draws as `sample` does, from the likeliest ids only; returns also these (`kept_ids`), None without truncation.

    Args:
      most: ids that are kept at most.
      logits, temperature, key, position: as of `sample`.
      truncation: (top_p, top_k) of every draw; 1 and 0 keep all ids. None: all draws do.
    """
    kept = None
    if truncation is not None:
        kept = kept_ids(most, logits, temperature, truncation)
    return *sample(head.within(logits, kept), temperature, key, position), kept


def kept_ids(
    most: int,
    logits: Float[Array, 'draws vocab'],
    temperature: Float[Array, ' draws'],
    truncation: Float[Array, 'draws 2'],
) -> Int[Array, 'draws ids']:
    """Returns the ids that tokens are drawn from, likeliest first, then -1; none of a draw that keeps all ids.

    As in Hugging Face and vLLM, logits are divided by the temperature first. Then the top_k likeliest ids are kept, and
    of these the fewest whose probabilities among them add up to top_p; of equally likely ids those with lower numbers.
    Arguments as of `draw`. At temperature 0 nothing is left out.
    """
    top_p, top_k = truncation.T[..., None]
    is_truncated = (temperature[:, None] > 0) & ((top_p < 1) | (top_k > 0))
    scaled_logits = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    likeliest, ids = jax.lax.top_k(scaled_logits, min(most, logits.shape[1]))
    is_kept = (jnp.arange(ids.shape[1]) < top_k) | (top_k == 0)
    of_top_k = jax.nn.logsumexp(jnp.where(is_kept, likeliest, -jnp.inf), -1, keepdims=True)
    of_all = jax.nn.logsumexp(scaled_logits, -1, keepdims=True)
    probs = jnp.exp(likeliest - jnp.where(top_k > 0, of_top_k, of_all))
    likelier = jnp.cumsum(probs, -1) - probs
    # With top_p = 1 rounding may not leave out the last ids.
    is_kept &= (likelier < top_p) | (top_p == 1)
    ids = jnp.where(is_kept & is_truncated, ids, -1)
    return jnp.pad(ids, ((0, 0), (0, most - ids.shape[1])), constant_values=-1)


def sample(
    logits: Float[Array, 'draws vocab'],
    temperature: Float[Array, ' draws'],
    key: UInt32[Array, 'draws 2'],
    position: Int[Array, ' draws'],
) -> tuple[Int[Array, ' draws'], Float[Array, ' draws']]:
    """Draws a token from every softmax(logits / temperature); returns the tokens and their log-probs under it.

    The noise is a function of the rollout's key and of the position (the index that the sampled token will have) alone.
    Temperature 0 takes the most likely token and reports its log-prob at temperature 1.
    """
    is_sampled = temperature > 0
    # Greedy draws divide by 1: a division by 0 would make their log-probs NaN.
    divisor = jnp.where(is_sampled, temperature, 1.0)
    scaled_logits = logits / divisor[:, None]
    vocabulary = scaled_logits.shape[1]

    def noise_of(position_key):
        return jax.random.gumbel(position_key, (vocabulary,), mode='low')

    def gumbel_noise(_):
        # Each rollout has a key of its own: its sample must not depend on the slot or on other rollouts.
        rollout_keys = jax.random.wrap_key_data(key, impl='threefry2x32')
        position_keys = jax.vmap(jax.random.fold_in)(rollout_keys, position)
        noise = jax.vmap(noise_of)(position_keys)
        return jnp.where(is_sampled[:, None], noise, 0.0)

    def no_noise(_):
        return jnp.zeros_like(scaled_logits)

    # Greedy batches skip the noise, which costs as much as the head on a CPU.
    noisy_logits = scaled_logits + jax.lax.cond(jnp.any(is_sampled), gumbel_noise, no_noise, None)
    # The first maximum, found by two plain reductions: several times faster on a CPU than argmax.
    # Other tokens become the last id, so that logits of NaN still yield a valid token.
    best = jnp.max(noisy_logits, -1, keepdims=True)
    token_ids = jnp.arange(vocabulary, dtype=jnp.int32)
    candidate_ids = jnp.where(noisy_logits == best, token_ids, vocabulary - 1)
    token = jnp.min(candidate_ids, -1)
    # The log-prob excludes the noise: it is the denominator of the loss's importance ratio.
    token_logit = jnp.take_along_axis(scaled_logits, token[:, None], 1)[:, 0]
    logp = token_logit - jax.nn.logsumexp(scaled_logits, -1)
    return token, logp


# Status of a slot. FILL: some tokens lack keys and values. DECODE: ready to sample. REST: waiting for
# a tool, ended or empty.
FILL, DECODE, REST = 0, 1, 2
# An id that no token has. It takes the place of the end tokens in a config without any, because an empty
# array would need a branch of its own in the decode loop.
NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """All data of rollouts in progress on the device.

    Attributes:
      cache: keys and values per layer, or states (policy/delta.py), then the record of policy/experts.py if the model
        has experts; entries at or beyond `cached` are undefined and never read.
      tokens: int32, tokens of the rollout exactly as the model sees them.
      length: int32, number of tokens.
      cached: int32, positions whose keys and values are valid, < length.
      limit: int32, length at which the turn stops.
      status: int32, FILL, DECODE or REST.
      temperature: float32; 0 samples greedily.
      key: random stream of the rollout (`SlotPool._noise_key`).
    """

    cache: tuple
    tokens: Int[Array, 'pages page']
    length: Int[Array, ' slots']
    cached: Int[Array, ' slots']
    limit: Int[Array, ' slots']
    status: Int[Array, ' slots']
    temperature: Float[Array, ' slots']
    key: UInt32[Array, 'slots 2']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeChunk:
    """Result of one decode call: the first `count` entries of a slot are sampled tokens.

    Attributes:
      tokens: int32, ids; 0 beyond `count`.
      logp: float32, log-probs under the distribution that was sampled from (temperature 0: at 1); 0 beyond
        `count`.
      count: int32, sampled tokens of the slot.
      cached: int32, positions whose keys and values are valid; None over pages as long as a slot.
      generation: `Placement.generation` when the call started, which the host adds; None on the device.
      kept: int32, sets that the tokens were drawn from (`kept_ids`), undefined beyond `count`; None: from all ids.
    """

    tokens: Int[Array, 'slots burst']
    logp: Float[Array, 'slots burst']
    count: Int[Array, ' slots']
    cached: Int[Array, ' slots'] | None = None
    generation: Int[Array, ' slots'] | None = None
    kept: Int[Array, 'slots burst ids'] | None = None


def empty_state(
    model: transformer.ModelConfig, config: SamplerConfig, head_dim: int = 0
) -> SlotState:
    """Returns the state of empty slots; `head_dim` is the size of a head in the cache, 0 for the model's."""
    slots = config.slots
    shape = (config.page_count, config.page_tokens)
    if config.is_paged:
        heads = (model.kv_heads, head_dim or model.head_dim)
        cache = paged_attention.empty_pages(model.layers, *shape, *heads, model.dtype)
    else:
        cache = transformer.empty_cache(model, *shape)
    cache += experts.empty_record(
        model.experts, model.layers, config.page_count, config.page_tokens
    )

    def zeros(*shape: int, dtype=jnp.int32) -> jax.Array:
        return jnp.zeros(shape, dtype)

    return SlotState(
        cache=cache,
        tokens=zeros(config.page_count, config.page_tokens),
        length=zeros(slots),
        cached=zeros(slots),
        limit=zeros(slots),
        status=jnp.full((slots,), REST, jnp.int32),
        temperature=zeros(slots, dtype=jnp.float32),
        key=zeros(slots, 2, dtype=jnp.uint32),
    )


def empty_chunk(config: SamplerConfig) -> DecodeChunk:
    """Returns a chunk without sampled tokens."""
    shape = (config.slots, config.burst)
    return DecodeChunk(
        tokens=jnp.zeros(shape, jnp.int32),
        logp=jnp.zeros(shape, jnp.float32),
        count=jnp.zeros((config.slots,), jnp.int32),
        kept=jnp.zeros((*shape, config.kept), jnp.int32) if config.kept else None,
    )


def end_tokens(
    config: SamplerConfig, ends: Int[Array, 'slots ends'] | None
) -> Int[Array, 'slots all_ends']:
    """Returns the tokens that end a turn of every slot: those of the config, and `ends`."""
    of_config = jnp.asarray(config.eos or (NO_TOKEN,), jnp.int32)
    of_config = jnp.broadcast_to(of_config, (config.slots, of_config.shape[0]))
    return of_config if ends is None else jnp.concatenate([of_config, ends], 1)


def locate(
    config: SamplerConfig,
    table: Int[Array, 'slots pages_per_slot'] | None,
    slots: Int[Array, '*shape'],
    position: Int[Array, '*shape'],
) -> tuple[Int[Array, '*shape'], Int[Array, '*shape']]:
    """Returns the page and the index within it of positions of slots.

    A slot beyond the last one, or a position beyond the slot, gets a page or an index out of range, which
    mode='drop' ignores.

    Args:
      config: shape of the slots.
      table: pages of every slot; None where page s belongs to slot s.
      slots: slot numbers.
      position: positions, not negative.
    """
    if table is None:
        return slots, position
    # Reading the table out of range gives the number after the last page.
    page = table.at[slots, position // config.page].get(mode='fill', fill_value=config.page_count)
    return page, position % config.page
