"""The ModelConfig of a checkpoint folder, from its config.json."""

from __future__ import annotations

from zeroplay_jax.policy import config_fields, rope_fields
from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.policy.config_fields import (
    FAMILIES,
    OTHER_CHECKPOINT,
    SUPPORTED,
    CheckpointError,
    Family,
    Fields,
    family_fields,
)
from zeroplay_jax.policy.decoder import ModelConfig
from zeroplay_jax.policy.stored_tensors import has_other_head

__all__ = ['FAMILIES', 'SUPPORTED', 'CheckpointError', 'read_config']

_DEFAULT_WINDOW = 4096
_LAYER_TYPES = ('full_attention', 'sliding_attention')
# Names of the activation function in config.json, by ours; several are the same function.
_ACTIVATIONS = {
    'silu': ('silu', 'swish'),
    'gelu_tanh': ('gelu_pytorch_tanh', 'gelu_new', 'gelu_fast'),
}


def read_config(folder, **overrides) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face folder.

    Two spellings of the rotary embedding are read. Older: `rope_theta` and `rope_scaling`. Newer: `rope_parameters`,
    for OLMo-3 one object per type of layer. The dtype in config.json is that of the tensors and is ignored here.

    Args:
      folder: contains config.json, or an adapter to a base that does.
      **overrides: fields of ModelConfig that config.json does not determine: dtype, remat, remat_policy, attention,
        scan, logit_chunk, logits.

    Raises:
      CheckpointError: the file is missing, the architecture is unknown, or the decoder does not implement a field.
    """
    folder = base_folder(folder)
    name, fields = family_fields(folder)
    family = FAMILIES[name]
    _check_activation(fields, family)
    heads = fields.positive_int('num_attention_heads')
    kv_heads = fields.positive_int('num_key_value_heads', heads)
    if heads % kv_heads:
        raise fields.error(
            f'num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}'
        )
    layers = fields.positive_int('num_hidden_layers')
    hidden_size = fields.positive_int('hidden_size')
    head_dim = fields.positive_int('head_dim', family.head_dim or hidden_size // heads)
    # The rotary embedding rotates pairs of channels.
    if head_dim % 2:
        raise fields.error(f'head_dim={head_dim} must be even')
    rotary = rope_fields.read_rope(fields, family)
    windows = _windows(fields, family, layers)
    # None rather than an equal value, so that equal models have equal configurations.
    sliding_theta = None
    if windows and rotary.sliding_theta != rotary.theta:
        sliding_theta = rotary.sliding_theta
    return ModelConfig(
        family=name,
        vocab_size=fields.positive_int('vocab_size'),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int('intermediate_size'),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=rotary.theta,
        rope_scaling=rotary.scaling,
        scale_sliding=rotary.scale_sliding,
        sliding_theta=sliding_theta,
        windows=windows,
        norm_eps=fields.positive_float('rms_norm_eps', family.norm_eps),
        # Flags are stale where a head was trained or merged apart.
        tied=fields.boolean('tie_word_embeddings', False) and not has_other_head(folder),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norms=family.norms,
        norm_offset=family.norm_offset,
        activation=family.activation,
        scale_embedding=family.scale_embedding,
        query_scale=_query_scale(fields, head_dim),
        **overrides,
    )


def longest_context(folder) -> tuple[int, int]:
    """Returns the positions of a model, in tokens: those of config.json, and those to which its scaling extends them.

    Raises:
      CheckpointError: as of `read_config`.
    """
    name, fields = family_fields(base_folder(folder))
    rotary = rope_fields.read_rope(fields, FAMILIES[name])
    return rope_fields.longest_context(fields, rotary)


def check_context(folder, tokens: int, name: str) -> str:
    """Returns a warning about sequences that are longer than those a model was trained with; '' if none is.

    Args:
      folder: of the model.
      tokens: of the longest sequence.
      name: of the setting that determines it, for the message.

    Raises:
      CheckpointError: the rotary embedding is not extended to such positions.
    """
    stated, extended = longest_context(folder)
    path = base_folder(folder) / 'config.json'
    if tokens > extended:
        raise CheckpointError(
            f'{path}: {name}={tokens} exceeds max_position_embeddings={extended}, the positions that the model knows; '
            f'give at most {extended}, or extend them with YaRN in rope_parameters'
        )
    if tokens > stated:
        return (
            f'{path}: {name}={tokens} exceeds max_position_embeddings={stated}; the rotary scaling extends the '
            f'positions to {extended}'
        )
    return ''


def _check_activation(fields: Fields, family: Family) -> None:
    """Raises CheckpointError for another activation function than that of the family."""
    names = _ACTIVATIONS[family.activation]
    for field in ('hidden_act', 'hidden_activation'):
        value = fields.get(field)
        if value is not None and value not in names:
            reason = config_fields.refusal(field, value, names)
            raise fields.error(fields.prefix + reason, OTHER_CHECKPOINT)


def _query_scale(fields: Fields, head_dim: int) -> float:
    """Returns the factor of the queries besides 1 / sqrt(head_dim)."""
    divisor = fields.positive_float('query_pre_attn_scalar', head_dim)
    return (head_dim / divisor) ** 0.5


def _windows(fields: Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Returns the sliding window of every layer (0: full attention), or () if no layer has one."""
    types = fields.get('layer_types')
    # Older folders do not list the types; rules of the family determine them.
    if types is None:
        types = _default_layer_types(fields, family, layers)
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise fields.error('layer_types must be a list of texts')
    if len(types) != layers:
        raise fields.error(f'layer_types has {len(types)} entries for num_hidden_layers={layers}')
    unknown_types = set(types) - set(_LAYER_TYPES)
    if unknown_types:
        raise fields.error(
            f'layer_types: {min(unknown_types)!r} is not supported (only {", ".join(_LAYER_TYPES)})',
            OTHER_CHECKPOINT,
        )
    # () rather than zeros, so that equal models have equal configurations and share compiled functions.
    if 'sliding_attention' not in types:
        return ()
    # The fields contradict each other; a guess would change the computation silently.
    if not _has_sliding_layers(fields, family):
        raise fields.error(
            'layer_types names sliding_attention, but use_sliding_window is not true, or sliding_window is null'
        )
    window = fields.positive_int('sliding_window', _DEFAULT_WINDOW)
    return tuple(window if layer_type == 'sliding_attention' else 0 for layer_type in types)


def _has_sliding_layers(fields: Fields, family: Family) -> bool:
    """Returns whether sliding windows are enabled: by a field for Qwen, always for families whose layers alternate."""
    # Null and absent differ in this field: null is no window.
    if fields.values.get('sliding_window', _DEFAULT_WINDOW) is None:
        return False
    return bool(family.full_every) or fields.boolean('use_sliding_window', False)


def _default_layer_types(fields: Fields, family: Family, layers: int) -> list[str]:
    """Returns the type of every layer where config.json has no `layer_types`, as transformers derives it."""
    types = ['full_attention'] * layers
    if family.full_every:
        full_every = fields.positive_int('sliding_window_pattern', family.full_every)
        for i in range(layers):
            if (i + 1) % full_every:
                types[i] = 'sliding_attention'
    elif _has_sliding_layers(fields, family):
        # Despite its name, this field is the number of layers at the bottom that have no window.
        first_sliding = fields.values.get('max_window_layers', 28)
        if not isinstance(first_sliding, int) or isinstance(first_sliding, bool):
            raise fields.error(f'max_window_layers={first_sliding!r} must be an int')
        for i in range(layers):
            if i >= first_sliding:
                types[i] = 'sliding_attention'
    return types
