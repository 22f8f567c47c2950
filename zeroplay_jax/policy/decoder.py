"""The decoder as Flax modules: token ids in, hidden states out.

One decoder serves all model families, which differ in the switches of `ModelConfig`. It computes no attention itself:
the caller passes the function that does, for packed rows or for the key/value cache (policy/transformer.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy import adapters, delta, rope, sharding
from zeroplay_jax.policy.attention import AnyArray
from zeroplay_jax.policy.experts import MODULE, Experts, Mixture


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def look_up(
    table_shape: jax.ShapeDtypeStruct,
    dtype: str,
    table: Float[AnyArray, 'vocab features'],
    tokens: Int[AnyArray, 'batch length'],
) -> Float[Array, 'batch length features']:
    """Returns the rows of an embedding table at `tokens`, in `dtype`; its gradient adds up in the dtype of the table.

    Args:
      table_shape: shape and dtype of the table.
      dtype: of the result.
      table: embedding of every token id.
      tokens: token ids.
    """
    # The table is cast before the lookup: an update may widen a bfloat16 table (learner/role_update.py), and XLA
    # removes both casts only where they are neighbours. The gradient is not that of this order, which would add up the
    # occurrences of a token in bfloat16.
    return table.astype(dtype)[tokens]


def _look_up_forward(table_shape, dtype, table, tokens):
    return look_up(table_shape, dtype, table, tokens), tokens


def _look_up_backward(table_shape, dtype, tokens, gradient):
    def read_rows(table):
        return table[tokens].astype(dtype)

    (table_gradient,) = jax.linear_transpose(read_rows, table_shape)(gradient)
    return table_gradient, None


look_up.defvjp(_look_up_forward, _look_up_backward)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32.

    Attributes:
      eps: added to the mean square.
      offset: added to the scale.
    """

    eps: float
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, '*batch features']) -> Float[Array, '*batch features']:
        features = x.shape[-1]
        initial_scale = nn.initializers.constant(1 - self.offset)
        scale = self.param('scale', initial_scale, (features,))
        # In bfloat16 the mean of the squares would lose most of its digits.
        y = x.astype(jnp.float32)
        mean_square = jnp.mean(y * y, -1, keepdims=True)
        inverse_rms = jax.lax.rsqrt(mean_square + self.eps)
        y = y * inverse_rms
        factor = scale.astype(jnp.float32)
        if self.offset:
            factor = factor + self.offset
        y = y * factor
        return y.astype(x.dtype)


class Linear(nn.Module):
    """Product with a kernel [in, out] and its adapters, if it has any, in the dtype of the activations.

    The kernel may be quantised (policy/adapters.py).
    """

    features: int
    bias: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, '*batch in_features'],
        row_scale: Float[Array, 'rows adapters'] | None = None,
    ) -> Float[Array, '*batch out_features']:
        """Returns the product; `row_scale` is that of policy/adapters.py, None without adapters."""
        in_features = x.shape[-1]
        kernel_shape = (in_features, self.features)
        kernel = self.param('kernel', nn.initializers.lecun_normal(), kernel_shape)
        # Flattened to two dimensions: with two batch dimensions XLA's CPU backend takes three times as long for the
        # gradient of the kernel.
        flat = x.reshape(-1, in_features)
        if self.has_variable('params', adapters.KERNEL_SCALE):
            kernel_scale = self.get_variable('params', adapters.KERNEL_SCALE)
            y = adapters.multiply(flat, kernel, kernel_scale)
        else:
            y = flat @ kernel.astype(x.dtype)
        if row_scale is not None and self.has_variable('params', adapters.A):
            a = self.get_variable('params', adapters.A)
            b = self.get_variable('params', adapters.B)
            y = y + adapters.product(flat, row_scale, a, b)
        batch_shape = x.shape[:-1]
        y = y.reshape(*batch_shape, self.features)
        if self.bias:
            bias_shape = (self.features,)
            bias = self.param('bias', nn.initializers.zeros, bias_shape)
            y = y + bias.astype(x.dtype)
        return y


Params = dict[str, Any]
# attend(q, k, v, cache, window) -> (attention, new cache); `cache` holds the entries of one layer. The window DELTA
# stands for a gated delta net, with the arguments of `delta.Mix` before it.
Attend = Callable[..., tuple[Array, Any]]

# Entry of `ModelConfig.windows` for a layer that is no attention but a gated delta net (policy/delta.py).
DELTA = -1
# Name of the norm before the feed-forward, by placement of the norms.
_MLP_NORMS = {'before': 'post_norm', 'after': '', 'both': 'pre_mlp_norm'}
# Flax computes the tanh approximation of GELU by default.
_ACTIVATIONS = {'silu': nn.silu, 'gelu_tanh': nn.gelu}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Static configuration of a decoder; policy/shape.py reads it from a checkpoint folder.

    Attributes:
      rope_theta: base of the rotary frequencies.
      rope_scaling: extension of the rotary embedding to longer contexts.
      scale_sliding: whether `rope_scaling` applies to the layers with a sliding window (OLMo-3 and Gemma 3: no).
      sliding_theta: base of the rotary frequencies of the layers with a sliding window; None: `rope_theta`.
      windows: sliding window of every layer, the query included; 0: full attention; DELTA: none. (): full attention
        everywhere.
      delta: heads of the gated delta nets, if there are any (Qwen3.5).
      rotary_dim: channels of a head that are rotated, the first ones; 0: all.
      output_gate: whether the result of every head is multiplied with a gate, which the layer of the queries computes
        beside them (Qwen3.5).
      tied: whether the output head is the transposed embedding.
      qk_norm: norm of queries and keys before the rotation: 'none', 'head' (each head separately) or 'projection' (all
        heads as one vector).
      query_scale: factor of the queries besides 1 / sqrt(head_dim).
      norms: norms 'before' attention and feed-forward, 'after' them (OLMo-3) or 'both' (Gemma 3).
      norm_offset: added to the scale of every norm: with 1, a scale of 0 leaves the normalised input (Gemma 3).
      activation: of the feed-forward, 'silu' or 'gelu_tanh' (its tanh approximation).
      scale_embedding: whether embeddings are multiplied with sqrt(hidden_size) (Gemma 3).
      experts: mixture of experts of every layer in place of a feed-forward network (Qwen3-MoE); None: no mixture.
      dtype: dtype of the activations; parameters keep their own.
      attention: attention of packed rows: 'dense', 'blocked' (policy/blocked_attention.py) or 'splash'
        (the same file; TPUs).
      scan: whether training runs the layers as a loop, which is compiled once. The loop holds a second copy of the
        weights, in `dtype`.
      remat: whether the backward pass recomputes the layers.
      logit_chunk: tokens per device whose logits exist at the same time during scoring.
      logits: of which tokens an update computes logits: 'all', or 'trained', those that the policy wrote.
      mesh: mesh of training, over which the activations stay split by rows. None leaves the placement to XLA.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: rope.Scaling | None = None
    scale_sliding: bool = True
    sliding_theta: float | None = None
    windows: tuple[int, ...] = ()
    delta: delta.Shape | None = None
    rotary_dim: int = 0
    output_gate: bool = False
    norm_eps: float = 1e-6
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: str = 'head'
    query_scale: float = 1.0
    norms: str = 'before'
    norm_offset: float = 0.0
    activation: str = 'silu'
    scale_embedding: bool = False
    experts: Experts | None = None
    dtype: str = 'float32'
    attention: str = 'dense'
    scan: bool = False
    remat: bool = False
    logit_chunk: int = 1024
    logits: str = 'all'
    mesh: Mesh | None = None


def cast_matrices(params, dtype):
    """Returns a tree of weights with the matrices in `dtype`; vectors and quantised kernels are unchanged.

    Every use of a matrix casts it to the dtype of the activations; norms and biases are computed from their own dtype.
    """

    def cast(leaf):
        is_matrix = leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_matrix else leaf

    return jax.tree.map(cast, params)


class Block(nn.Module):
    """One layer: attention and a gated feed-forward network (Shazeer 2020, arXiv:2002.05202)."""

    config: ModelConfig
    window: int = 0

    def _norm(self, name: str, x: Array) -> Array:
        return RMSNorm(self.config.norm_eps, self.config.norm_offset, name=name)(x)

    def _attention(self, attention_input, angles, attend: Attend, cache, row_scale):
        """Returns the attention of normalised hidden states and the new cache."""
        config = self.config
        batch_shape = attention_input.shape[:2]
        query_shape = (*batch_shape, config.heads, config.head_dim)
        query_features = config.heads * config.head_dim
        kv_shape = (*batch_shape, config.kv_heads, config.head_dim)
        kv_features = config.kv_heads * config.head_dim
        norm = self._norm
        if config.output_gate:
            query_features *= 2
        # Only queries, keys and values can have biases (Qwen2).
        q = Linear(query_features, config.qkv_bias, name='q')(attention_input, row_scale)
        k = Linear(kv_features, config.qkv_bias, name='k')(attention_input, row_scale)
        v = Linear(kv_features, config.qkv_bias, name='v')(attention_input, row_scale)
        v = v.reshape(kv_shape)
        # Both norms have the same name. One is applied before the heads are separated and covers all heads (OLMo-3),
        # the other after it and covers each head (Qwen3).
        if config.qk_norm == 'projection':
            q = norm('q_norm', q)
            k = norm('k_norm', k)
        if config.output_gate:
            # The gate of a head follows its query.
            q, output_gate = jnp.split(q.reshape(*query_shape[:-1], -1), 2, -1)
        q = q.reshape(query_shape)
        k = k.reshape(kv_shape)
        if config.qk_norm == 'head':
            q = norm('q_norm', q)
            k = norm('k_norm', k)
        q = rope.rotate(q, angles)
        k = rope.rotate(k, angles)
        if config.query_scale != 1:
            # In float32: a factor that is rounded to bfloat16 would change all scores by the same error.
            q = (q.astype(jnp.float32) * config.query_scale).astype(q.dtype)
        out, cache = attend(q, k, v, cache, self.window)
        if config.output_gate:
            out = out * nn.sigmoid(output_gate.reshape(out.shape))
        return Linear(config.hidden_size, name='o')(out, row_scale), cache

    def _delta_net(self, x, angles, attend: Attend, cache, row_scale):
        """Returns what a gated delta net makes of normalised hidden states, and the new cache."""
        del angles  # it has no positions
        config = self.config
        shape = config.delta
        assert shape is not None
        mixed = Linear(shape.channels, name='in_proj_qkv')(x, row_scale)
        z = Linear(shape.values, name='in_proj_z')(x, row_scale)
        rate = Linear(shape.value_heads, name='rate')(x, row_scale)
        decay = Linear(shape.value_heads, name='decay')(x, row_scale)
        filters = self.param(
            'filters', nn.initializers.normal(0.5), (shape.channels, 1, shape.taps)
        )
        decay_bias = self.param('decay_bias', nn.initializers.ones, (shape.value_heads,))
        decay_log = self.param('decay_log', _log_uniform, (shape.value_heads,))
        # In float32 from here on: decays of many tokens are multiplied.
        decay = nn.softplus(decay.astype(jnp.float32) + decay_bias)
        log_decay = -jnp.exp(decay_log.astype(jnp.float32)) * decay
        rate = nn.sigmoid(rate.astype(jnp.float32))
        out, cache = attend(mixed, filters[:, 0], log_decay, rate, cache, DELTA)
        out = RMSNorm(config.norm_eps, name='delta_norm')(out)
        out = out * nn.silu(z.astype(jnp.float32)).reshape(out.shape)
        out = out.astype(x.dtype).reshape(z.shape)
        return Linear(config.hidden_size, name='out')(out, row_scale), cache

    def _feed_forward(self, prefix: str, x, row_scale):
        """Returns the gated feed-forward network of normalised hidden states; `prefix`: of the names of its parts."""
        config = self.config
        gate = Linear(config.intermediate_size, name=f'{prefix}gate')(x, row_scale)
        up = Linear(config.intermediate_size, name=f'{prefix}up')(x, row_scale)
        hidden = _ACTIVATIONS[config.activation](gate) * up
        return Linear(config.hidden_size, name=f'{prefix}down')(hidden, row_scale)

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'batch length hidden_size'],
        angles: rope.Angles,
        attend: Attend,
        cache: Any,
        row_scale: Float[Array, 'rows adapters'] | None = None,
    ) -> tuple[Float[Array, 'batch length hidden_size'], Any]:
        """Returns the output of the layer and its new cache.

        Args:
          x: hidden states.
          angles: cos and sin of the rotary embedding.
          attend: attention function.
          cache: cache entries of this layer, or None.
          row_scale: of the adapters, see policy/adapters.py; None without adapters.
        """
        config = self.config
        attention_input = x if config.norms == 'after' else self._norm('input_norm', x)
        mixer = self._delta_net if self.window == DELTA else self._attention
        out, cache = mixer(attention_input, angles, attend, cache, row_scale)
        # The name 'post_norm' means two things, as `post_attention_layernorm` does in the checkpoints: the norm of
        # the attention's output where there are norms after, else the norm of the feed-forward's input.
        norms_after = config.norms != 'before'
        if norms_after:
            out = self._norm('post_norm', out)
        x = x + out
        mlp_norm = _MLP_NORMS[config.norms]
        mlp_input = self._norm(mlp_norm, x) if mlp_norm else x
        if config.experts:
            activation = _ACTIVATIONS[config.activation]
            is_cached = cache is not None
            mixture = Mixture(config.experts, activation, config.mesh, is_cached, name=MODULE)
            out = mixture(mlp_input)
            if config.experts.shared:
                share = nn.sigmoid(Linear(1, name='shared_router')(mlp_input))
                out = out + share * self._feed_forward('shared_', mlp_input, row_scale)
        else:
            out = self._feed_forward('', mlp_input, row_scale)
        if norms_after:
            out = self._norm('post_mlp_norm', out)
        return x + out, cache


def _log_uniform(key, shape):
    """Returns the logarithms of numbers up to 16, as of fresh models in `transformers`."""
    return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0))


class Decoder(nn.Module):
    """Embedding, layers and final norm.

    The output head is applied separately (`transformer.logits`, `transformer.score`), so that the logits of a whole
    batch never exist at once.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[AnyArray, 'batch length'],
        positions: Int[AnyArray, 'batch length'],
        attend: Attend,
        cache: tuple | None = None,
        adapter: Int[Array, ' rows'] | None = None,
    ) -> tuple[Float[Array, 'batch length hidden_size'], tuple]:
        """Returns hidden states and the new cache entries of every layer.

        Args:
          tokens: token ids.
          positions: position of every token within its sequence.
          attend: attention function of all layers.
          cache: cache entries of every layer; None in training.
          adapter: adapter of every row or of every token (policy/adapters.py); None: the only one, if there is any.
        """
        config = self.config
        embedding_shape = (config.vocab_size, config.hidden_size)
        # At small widths a model learns far more slowly from the usual deviation of 0.02.
        embedding_init = nn.initializers.normal(0.1)
        embedding = self.param('embedding', embedding_init, embedding_shape)
        if not config.tied and self.is_initializing():
            # Made here, and used by `transformer.logits` alone: a value network has the layers without it.
            head_shape = (config.hidden_size, config.vocab_size)
            self.param('head', nn.initializers.lecun_normal(), head_shape)

        def keep_rows(x):
            # In training activations stay split by rows between layers, and parameters are gathered. Without the
            # constraint XLA may instead sum partial products of the whole batch over the axis that splits both.
            if config.mesh is None or cache is not None:
                return x
            return sharding.constrain_rows(x, config.mesh)

        x = keep_rows(_embed(config, embedding, tokens))
        windows = config.windows or (0,) * config.layers
        angles = _rotary_angles(config, positions, windows)
        # The layers are not scanned with a cache, whose entries the loop would copy, nor in `init`, which must create
        # the parameters under the names of the layers.
        scanned = config.scan and cache is None and not self.is_initializing()
        block = Block
        if config.remat and cache is None:
            # `attend` (argument 3) is a function, not an array, hence static. XLA does not merge computations across
            # the iterations of a loop, so a scanned layer needs no protection from common subexpression elimination.
            block = nn.remat(
                Block,
                static_argnums=(3,),
                policy=jax.checkpoint_policies.nothing_saveable,
                prevent_cse=not scanned,
            )
        row_scale = None
        if self.has_variable('params', adapters.SCALE):
            scale = self.get_variable('params', adapters.SCALE)
            row_scale = adapters.row_scale(scale, adapter, tokens.shape[0])
        new_cache = []
        if scanned:
            layer_variables = [_of_layer(self.variables, i) for i in range(config.layers)]

            def apply_layer(variables, window, x):
                # parent=None makes the module functional: it is applied to the variables of many layers.
                layer = block(config, window, parent=None)
                x, _ = layer.apply(variables, x, angles[window > 0], attend, None, row_scale)
                return keep_rows(x)

            # Cast before they are stacked: the copy that the loop needs is then as small as the activations' dtype.
            layer_variables = cast_matrices(layer_variables, config.dtype)
            x = _scan_layers(layer_variables, windows, apply_layer, x)
        else:
            for i, window in enumerate(windows):
                layer = block(config, window, name=f'layer_{i}')
                # In training there is no cache, but the layer and `attend` still pass it through.
                layer_cache = None if cache is None else cache[i]
                layer_angles = angles[window > 0]
                x, layer_cache = layer(x, layer_angles, attend, layer_cache, row_scale)
                x = keep_rows(x)
                new_cache.append(layer_cache)
        x = RMSNorm(config.norm_eps, config.norm_offset, name='final_norm')(x)
        return x, tuple(new_cache)


def _of_layer(variables: Any, number: int) -> dict[str, Any]:
    """Returns the variables of a layer, of every kind: weights, and experts to replay."""
    return {kind: tree[f'layer_{number}'] for kind, tree in variables.items()}


def _embed(config: ModelConfig, embedding: AnyArray, tokens: AnyArray) -> Array:
    """Returns the hidden states [batch, length, hidden_size] of tokens before the first layer."""
    table_shape = jax.ShapeDtypeStruct(embedding.shape, embedding.dtype)
    x = look_up(table_shape, config.dtype, embedding, tokens)
    if config.scale_embedding:
        # The factor is rounded, too: the published weights were trained so.
        x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
    return x


def _rotary_angles(config: ModelConfig, positions, windows: tuple[int, ...]) -> dict[bool, tuple]:
    """Returns {whether layers have a sliding window: (cos, sin)}, for the kinds of layers that the model has."""
    angles = {}
    for sliding in sorted({window > 0 for window in windows}):
        scaling = config.rope_scaling
        theta = config.rope_theta
        if sliding and not config.scale_sliding:
            scaling = None
        if sliding and config.sliding_theta is not None:
            theta = config.sliding_theta
        rotary_dim = config.rotary_dim or config.head_dim
        angles[sliding] = rope.cos_sin(positions, rotary_dim, theta, scaling)
    return angles


def _scan_layers(layer_variables: list, windows: tuple[int, ...], apply_layer: Callable, x):
    """Returns the hidden states after all layers, as a loop over the shortest repeating pattern of windows.

    The window of a layer is static, so one iteration runs a whole period: one layer where all windows are equal, four
    where every fourth layer has full attention.

    Args:
      layer_variables: variables of every layer.
      windows: sliding window of every layer.
      apply_layer: function (variables, window, hidden states) → hidden states.
      x: hidden states before the first layer.
    """
    period = _period(windows)
    # One stack per layer of the period: [iterations, ...] for every variable.
    stacks = []
    for offset in range(period):
        same_window = layer_variables[offset::period]
        stacks.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *same_window))

    def iteration(x, period_variables):
        for variables, window in zip(period_variables, windows):
            x = apply_layer(variables, window, x)
        return x, None

    x, _ = jax.lax.scan(iteration, x, tuple(stacks))
    return x


def _period(windows: tuple[int, ...]) -> int:
    """Returns the length of the shortest pattern whose repetition gives the windows of all layers."""
    count = len(windows)
    for period in range(1, count):
        if windows == windows[:period] * (count // period):
            return period
    return count
