"""The decoder: parameters and tokens in, hidden states out.

Letters: B rows, L tokens, S slots, Q prefill rows, C chunk, D model width, F feed-forward width, V vocabulary,
H query heads, K key/value heads, d head size. Linen modules are applied functionally over plain nested dicts, so
that policy, reference and every other set of weights of one shape pass through one compiled function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zeroplay_jax.policy import attention, kernels, rope, sharding

Params = dict[str, Any]


# What a rematerialised layer keeps for the backward pass: nothing, or the results of its projections.
REMAT_POLICIES = ('nothing_saveable', 'dots_with_no_batch_dims_saveable')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Static shape of a decoder. Families differ in these switches only (policy/families.py reads them)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: rope.Llama3 | rope.Yarn | None = None
    scale_sliding: bool = True  # whether sliding layers take part in rope_scaling (OLMo-3: no)
    windows: tuple[
        int, ...
    ] = ()  # per layer the places a query sees, itself included; 0: all. (): all in every layer
    norm_eps: float = 1e-6
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: str = 'head'  # before the rotation: none | head (every head apart) | projection (all heads as one vector)
    post_norm: bool = (
        False  # norms after attention and feed-forward instead of before them (OLMo-3)
    )
    dtype: str = 'float32'  # of activations; parameters keep their own
    attention: str = 'dense'  # of packed rows: dense | splash (policy/kernels.py; TPUs)
    scan: bool = False  # of training: layers as a loop that is compiled once; holds the weights a second time, in dtype
    remat: bool = False
    remat_policy: str = REMAT_POLICIES[0]
    logit_chunk: int = 1024  # tokens per device whose logits exist at one time in scoring
    mesh: Mesh | None = (
        None  # of training: keeps every device to its own rows; None leaves all placement to XLA
    )


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


class Block(nn.Module):
    """One layer. `attend(q, k, v, cache, window) → (out, cache)` decides what the queries see."""

    config: ModelConfig
    window: int = 0

    @nn.compact
    def __call__(self, x, angles, attend, cache):
        c = self.config
        lead = x.shape[:2]
        norm = lambda name, x: RMSNorm(c.norm_eps, name=name)(x)
        h = x if c.post_norm else norm('input_norm', x)
        q = Linear(c.heads * c.head_dim, c.qkv_bias, name='q')(h)
        k = Linear(c.kv_heads * c.head_dim, c.qkv_bias, name='k')(h)
        v = Linear(c.kv_heads * c.head_dim, c.qkv_bias, name='v')(h).reshape(
            *lead, c.kv_heads, c.head_dim
        )
        if c.qk_norm == 'projection':
            q, k = norm('q_norm', q), norm('k_norm', k)
        q, k = q.reshape(*lead, c.heads, c.head_dim), k.reshape(*lead, c.kv_heads, c.head_dim)
        if c.qk_norm == 'head':
            q, k = norm('q_norm', q), norm('k_norm', k)
        out, cache = attend(rope.rotate(q, angles), rope.rotate(k, angles), v, cache, self.window)
        out = Linear(c.hidden_size, name='o')(out)
        x = x + (norm('post_norm', out) if c.post_norm else out)
        h = x if c.post_norm else norm('post_norm', x)
        gated = nn.silu(Linear(c.intermediate_size, name='gate')(h)) * Linear(
            c.intermediate_size, name='up'
        )(h)
        out = Linear(c.hidden_size, name='down')(gated)
        return x + (norm('post_mlp_norm', out) if c.post_norm else out), cache


class Decoder(nn.Module):
    """Embedding, layers, last norm. The head is apart (`logits`, `score`): nothing here is ever [B, L, V]."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens, positions, attend, cache=None):
        c = self.config
        embedding = self.param(
            'embedding', nn.initializers.normal(0.1), (c.vocab_size, c.hidden_size)
        )
        if not c.tied:
            self.param('head', nn.initializers.lecun_normal(), (c.hidden_size, c.vocab_size))
        # Between layers rows stay where they are and parameters come to them. XLA by itself would rather add up
        # partial products of whole batches over the axis that shards both.
        own_rows = lambda x: (
            x if c.mesh is None or cache is not None else sharding.constrain_rows(x, c.mesh)
        )
        x = own_rows(embedding[tokens].astype(c.dtype))
        windows = c.windows or (0,) * c.layers
        angles = {
            sliding: rope.angles(
                positions,
                c.head_dim,
                c.rope_theta,
                c.rope_scaling if c.scale_sliding or not sliding else None,
            )
            for sliding in sorted({w > 0 for w in windows})
        }
        scanned = c.scan and cache is None and not self.is_initializing()
        block, new = Block, []
        if c.remat and cache is None:
            # `attend` is a function, not an array; static for the rematerialised layer.
            policy = getattr(jax.checkpoint_policies, c.remat_policy)
            block = nn.remat(Block, static_argnums=(3,), policy=policy, prevent_cse=not scanned)
        if scanned:
            one = lambda params, window, x: block(c, window, parent=None).apply(
                {'params': params}, x, angles[window > 0], attend, None
            )
            layers = [self.variables['params'][f'layer_{i}'] for i in range(c.layers)]
            x = _scan(published(c, layers), windows, lambda *layer: own_rows(one(*layer)[0]), x)
        for i, window in enumerate(windows if not scanned else ()):
            layer = block(c, window, name=f'layer_{i}')
            x, kept = layer(x, angles[window > 0], attend, None if cache is None else cache[i])
            x = own_rows(x)
            new.append(kept)
        return RMSNorm(c.norm_eps, name='final_norm')(x), tuple(new)


def _scan(layers, windows, apply, x):
    """`apply(params, window, x) → x` over all layers in a loop of as few different layers as the windows have."""
    count = len(layers)
    period = next(p for p in range(1, count + 1) if windows == windows[:p] * (count // p))
    stacks = tuple(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers[j::period]) for j in range(period)
    )

    def body(x, group):
        for params, window in zip(group, windows):
            x = apply(params, window, x)
        return x, None

    return jax.lax.scan(body, x, stacks)[0]


def init(config: ModelConfig, key: jax.Array) -> Params:
    """Random parameters, float32. Embedding deviation 0.1: at small width the usual 0.02 learns far slower."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    attend = _packed_attend(
        dataclasses.replace(config, attention='dense'), jnp.ones((1, 2), jnp.int32)
    )
    return Decoder(config).init(key, tokens, tokens, attend)['params']


def published(config: ModelConfig, params: Params) -> Params:
    """Weights for a sampler: matrices in the dtype of the activations, which they are cast to at every use anyway;
    vectors (norms are computed in float32) as they are."""
    return jax.tree.map(lambda x: x.astype(config.dtype) if x.ndim > 1 else x, params)


def _packed_attend(config, segment):
    if config.attention == 'splash':
        return lambda q, k, v, cache, window: (
            kernels.attend_packed(q, k, v, segment, window, config.mesh),
            cache,
        )
    masks = {window: attention.packed_mask(segment, window) for window in {0, *config.windows}}
    return lambda q, k, v, cache, window: (attention.attend_packed(q, k, v, masks[window]), cache)


def hidden(config: ModelConfig, params: Params, tokens, positions, segment) -> jax.Array:
    """Hidden states of packed rows: int32 [B, L] ×3 → [B, L, D] in `config.dtype`."""
    return Decoder(config).apply(
        {'params': params}, tokens, positions, _packed_attend(config, segment)
    )[0]


def hidden_step(config: ModelConfig, params: Params, tokens, base, step, cache, buffer):
    """Token number `step` of a burst, for every slot: tokens, base int32 [S] → hidden [S, D], new buffer.

    `cache` holds the keys and values before place base, `buffer` those of the burst (policy/attention.py).
    """

    def attend(q, k, v, layer, window):
        return attention.attend_step(q, k, v, *layer, base, step, window)

    layers = tuple(zip(cache, buffer))
    x, buffer = Decoder(config).apply(
        {'params': params}, tokens[:, None], (base + step)[:, None], attend, layers
    )
    return x[:, 0], buffer


def fill_cache(config: ModelConfig, params: Params, tokens, slots, start, cache):
    """Prefill of a chunk: tokens int32 [Q, C] at places start[q]+0…C−1 of slots[q] → new cache (no hidden states)."""

    def attend(q, k, v, layer, window):
        return attention.attend_chunk(q, k, v, layer, slots, start, window)

    positions = start[:, None] + jnp.arange(tokens.shape[1])[None]
    return Decoder(config).apply({'params': params}, tokens, positions, attend, cache)[1]


def logits(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Head: hidden [N, D] → float32 [N, V]."""
    if config.tied:
        return attention.product('nd,vd->nv', x, params['embedding'].astype(x.dtype))
    return attention.product('nd,dv->nv', x, params['head'].astype(x.dtype))


def score(
    config: ModelConfig,
    params: Params,
    tokens,
    positions,
    segment,
    temperature: float = 1.0,
    train_entropy: bool = False,
):
    """Log-prob of every token given those before it, and the entropy of the distribution it was drawn from.

    Args:
      tokens, positions, segment: int32 [B, L], packed rows.
      temperature: logits are divided by it, as the sampler does.

    Returns:
      (logp, entropy), float32 [B, L]; entropy in nats, and without gradient unless `train_entropy`. The first place
      of a segment holds no prediction: what stands there is finite, under another segment's context, and the
      caller's to mask.
    """
    x = hidden(config, params, tokens, positions, segment)

    def piece(head, rows, ids):
        return _scores(logits(config, head, rows) / temperature, ids, train_entropy)

    return _by_chunks(config, piece, _head(config, params), x[:, :-1], tokens[:, 1:])


def distil(
    config: ModelConfig,
    params: Params,
    teacher_params: Params,
    tokens,
    positions,
    segment,
    teacher_hidden: jax.Array,
    divergence: Callable[[jax.Array, jax.Array], tuple[jax.Array, dict[str, jax.Array]]],
    temperature: float = 1.0,
    train_entropy: bool = False,
):
    """`score`, and the divergence of the student's distribution from a teacher's at every token.

    The logits of both exist together for a chunk of tokens only, and what `divergence` keeps of them is computed anew
    in the backward pass.

    Args:
      tokens, positions, segment: int32 [B, L], packed rows of the student.
      teacher_params: the teacher's; its head is applied here.
      teacher_hidden: [B, L, D], the teacher's `hidden`, gathered so that what stands at a place predicts the same
        token as the student's there, the next one: the teacher may have read another prompt before it.
      divergence: (student logits, teacher logits), float32 [N, V] each, to (value [N], statistics {name: [N]}).
      temperature: the logits of both are divided by it.

    Returns:
      (logp, entropy, value, statistics), float32 [B, L] each, as in `score`: what stands at a token was predicted one
      place before it. Gradients of logp and value reach `params` alone.
    """
    x = hidden(config, params, tokens, positions, segment)
    teacher_params, teacher_hidden = jax.lax.stop_gradient((teacher_params, teacher_hidden))

    def piece(heads, rows, ids, teacher_rows):
        z, teacher_z = (
            logits(config, head, y) / temperature for head, y in zip(heads, (rows, teacher_rows))
        )
        return *_scores(z, ids, train_entropy), *divergence(z, teacher_z)

    heads = _head(config, params), _head(config, teacher_params)
    return _by_chunks(config, piece, heads, x[:, :-1], tokens[:, 1:], teacher_hidden[:, :-1])


def _head(config, params):
    """What `logits` needs of the parameters."""
    name = 'embedding' if config.tied else 'head'
    return {name: params[name]}


def _scores(z, ids, train_entropy):
    """(log-prob of ids [N], entropy [N]) of logits [N, V]."""
    normaliser = jax.nn.logsumexp(z, -1)
    picked = jnp.take_along_axis(z, ids[:, None], 1)[:, 0] - normaliser
    if not train_entropy:  # only watched: cut off here, its backward pass is not even built
        z, normaliser = jax.lax.stop_gradient((z, normaliser))
    return picked, normaliser - jnp.sum(jnp.exp(z - normaliser[:, None]) * z, -1)


def _by_chunks(config, piece, head, *inputs):
    """Maps `piece(head, …)` over chunks of places: inputs [B, L−1, …] in, a tree of [N] out, which returns as [B, L].

    The result of the first place stands at the second, and so on. On a mesh every device takes its own rows through
    its own loop: the head is gathered once before it, and its gradient summed over devices once after it.
    """

    def local(head, *inputs):
        batch, length = inputs[0].shape[:2]
        count = batch * length
        chunk = min(config.logit_chunk, count)
        pieces = -(-count // chunk)

        def cut(x):
            x = x.reshape(count, *x.shape[2:])
            x = jnp.pad(x, ((0, pieces * chunk - count),) + ((0, 0),) * (x.ndim - 1))
            return x.reshape(pieces, chunk, *x.shape[1:])

        def join(y):
            return jnp.pad(y.reshape(-1)[:count].reshape(batch, length), ((0, 0), (1, 0)))

        run = jax.checkpoint(lambda args: piece(head, *args))
        return jax.tree.map(join, jax.lax.map(run, tuple(map(cut, inputs))))

    if config.mesh is None:
        return local(head, *inputs)
    return sharding.per_row_shard(local, config.mesh)(head, *inputs)
