"""The decoder: parameters and tokens in, hidden states out.

Letters: B rows, L tokens, S slots, Q prefill rows, C chunk, D model width, F feed-forward width, V vocabulary,
H query heads, K key/value heads, d head size. Linen modules are applied functionally over plain nested dicts, so
that policy, reference and every other set of weights of one shape pass through one compiled function.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zeroplay_jax.policy import attention

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Static shape of a decoder. Families differ in these switches only (policy/hf.py reads them from a folder)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = True  # RMS norm of every query and key head before the rotation (Qwen3)
    dtype: str = 'float32'  # of activations; parameters keep their own
    remat: bool = False
    logit_chunk: int = 1024


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, any leading shape."""

    eps: float

    @nn.compact
    def __call__(self, x):
        scale = self.param('scale', nn.initializers.ones, (x.shape[-1],))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * scale.astype(jnp.float32)).astype(x.dtype)


class Linear(nn.Module):
    """Product with a kernel [in, out], in the activations' dtype."""

    features: int
    bias: bool = False

    @nn.compact
    def __call__(self, x):
        kernel = self.param('kernel', nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        # Rows flat: with two batch dimensions XLA's CPU backend takes three times as long for the kernel's gradient.
        y = x.reshape(-1, x.shape[-1]) @ kernel.astype(x.dtype)
        y = y.reshape(*x.shape[:-1], self.features)
        if self.bias:
            y = y + self.param('bias', nn.initializers.zeros, (self.features,)).astype(x.dtype)
        return y


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding, half-split convention. x [B, L, heads, d]; angles: (cos, sin), each [B, L, 1, d/2]."""
    cos, sin = angles
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def rope_angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of positions int32 [B, L], each float32 [B, L, 1, d/2]."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


class Block(nn.Module):
    """One layer. `attend(q, k, v, cache) → (out, cache)` decides what the queries see."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, angles, attend, cache):
        c = self.config
        lead = x.shape[:2]
        h = RMSNorm(c.norm_eps, name='input_norm')(x)
        q = Linear(c.heads * c.head_dim, c.qkv_bias, name='q')(h).reshape(*lead, c.heads, c.head_dim)
        k = Linear(c.kv_heads * c.head_dim, c.qkv_bias, name='k')(h).reshape(*lead, c.kv_heads, c.head_dim)
        v = Linear(c.kv_heads * c.head_dim, c.qkv_bias, name='v')(h).reshape(*lead, c.kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = RMSNorm(c.norm_eps, name='q_norm')(q), RMSNorm(c.norm_eps, name='k_norm')(k)
        out, cache = attend(rotate(q, angles), rotate(k, angles), v, cache)
        x = x + Linear(c.hidden_size, name='o')(out)
        h = RMSNorm(c.norm_eps, name='post_norm')(x)
        gated = nn.silu(Linear(c.intermediate_size, name='gate')(h)) * Linear(c.intermediate_size, name='up')(h)
        return x + Linear(c.hidden_size, name='down')(gated), cache


class Decoder(nn.Module):
    """Embedding, layers, last norm. The head is apart (`logits`, `score`): nothing here is ever [B, L, V]."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens, positions, attend, cache=None):
        c = self.config
        embedding = self.param('embedding', nn.initializers.normal(0.1), (c.vocab_size, c.hidden_size))
        if not c.tied:
            self.param('head', nn.initializers.lecun_normal(), (c.hidden_size, c.vocab_size))
        x = embedding[tokens].astype(c.dtype)
        angles = rope_angles(c, positions)
        # `attend` is a function, not an array; static for the rematerialised layer.
        block = nn.remat(Block, static_argnums=(3,)) if c.remat and cache is None else Block
        new = []
        for i in range(c.layers):
            x, layer = block(c, name=f'layer_{i}')(x, angles, attend, None if cache is None else cache[i])
            new.append(layer)
        return RMSNorm(c.norm_eps, name='final_norm')(x), tuple(new)


def init(config: ModelConfig, key: jax.Array) -> Params:
    """Random parameters, float32. Embedding deviation 0.1: at small width the usual 0.02 learns far slower."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    attend = _packed_attend(jnp.ones((1, 2), jnp.int32))
    return Decoder(config).init(key, tokens, tokens, attend)['params']


def _packed_attend(segment):
    mask = attention.packed_mask(segment)
    return lambda q, k, v, cache: (attention.attend_packed(q, k, v, mask), cache)


def hidden(config: ModelConfig, params: Params, tokens, positions, segment) -> jax.Array:
    """Hidden states of packed rows: int32 [B, L] ×3 → [B, L, D] in `config.dtype`."""
    return Decoder(config).apply({'params': params}, tokens, positions, _packed_attend(segment))[0]


def hidden_step(config: ModelConfig, params: Params, tokens, base, step, cache, buffer):
    """Token number `step` of a burst, for every slot: tokens, base int32 [S] → hidden [S, D], new buffer.

    `cache` holds the keys and values before place base, `buffer` those of the burst (policy/attention.py).
    """

    def attend(q, k, v, layer):
        return attention.attend_step(q, k, v, *layer, base, step)

    layers = tuple(zip(cache, buffer))
    x, buffer = Decoder(config).apply({'params': params}, tokens[:, None], (base + step)[:, None], attend, layers)
    return x[:, 0], buffer


def fill_cache(config: ModelConfig, params: Params, tokens, slots, start, cache):
    """Prefill of a chunk: tokens int32 [Q, C] at places start[q]+0…C−1 of slots[q] → new cache (no hidden states)."""

    def attend(q, k, v, layer):
        return attention.attend_chunk(q, k, v, layer, slots, start)

    positions = start[:, None] + jnp.arange(tokens.shape[1])[None]
    return Decoder(config).apply({'params': params}, tokens, positions, attend, cache)[1]


def logits(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Head: hidden [N, D] → float32 [N, V]."""
    if config.tied:
        return jnp.einsum('nd,vd->nv', x, params['embedding'].astype(x.dtype)).astype(jnp.float32)
    return (x @ params['head'].astype(x.dtype)).astype(jnp.float32)


def score(config: ModelConfig, params: Params, tokens, positions, segment, temperature: float = 1.0):
    """Log-prob of every token given those before it, and the entropy of the distribution it was drawn from.

    Args:
      tokens, positions, segment: int32 [B, L], packed rows.
      temperature: logits are divided by it, as the sampler does.

    Returns:
      (logp, entropy), float32 [B, L]; entropy in nats and without gradient. The first place of a segment holds
      no prediction: what stands there is finite, under another segment's context, and the caller's to mask.
    """
    x = hidden(config, params, tokens, positions, segment)
    batch, length, width = x.shape
    flat, target = x[:, :-1].reshape(-1, width), tokens[:, 1:].reshape(-1)
    count = flat.shape[0]
    chunk = min(config.logit_chunk, count)
    pieces = -(-count // chunk)
    flat = jnp.pad(flat, ((0, pieces * chunk - count), (0, 0))).reshape(pieces, chunk, width)
    target = jnp.pad(target, (0, pieces * chunk - count)).reshape(pieces, chunk)

    @jax.checkpoint
    def piece(rows, ids):
        z = logits(config, params, rows) / temperature
        normaliser = jax.nn.logsumexp(z, -1)
        picked = jnp.take_along_axis(z, ids[:, None], 1)[:, 0] - normaliser
        # Entropy is watched, not trained on: cut off here, its backward pass is not even built.
        z, normaliser = jax.lax.stop_gradient((z, normaliser))
        return picked, normaliser - jnp.sum(jnp.exp(z - normaliser[:, None]) * z, -1)

    logp, entropy = jax.lax.map(lambda args: piece(*args), (flat, target))
    shape = (batch, length - 1)
    front = ((0, 0), (1, 0))
    unpack = lambda y: jnp.pad(y.reshape(-1)[:count].reshape(shape), front)
    return unpack(logp), unpack(entropy)
