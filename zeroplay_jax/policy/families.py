"""The ModelConfig of a checkpoint folder, from its config.json."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from zeroplay_jax.policy import config_fields, delta, rope
from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.policy.config_fields import (
    FAMILIES,
    LAYER_TYPES,
    OTHER_CHECKPOINT,
    CheckpointError,
    Family,
    Fields,
    family_fields,
)
from zeroplay_jax.policy.decoder import DELTA, ModelConfig
from zeroplay_jax.policy.experts import Experts
from zeroplay_jax.policy.stored_tensors import has_other_head

# Which axes of images use which channels. Of a text all axes have the same positions.
_IMAGE_FIELDS = {'mrope_section', 'mrope_interleaved'}
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
    heads, kv_heads = config_fields.head_counts(fields)
    layers = fields.positive_int('num_hidden_layers')
    hidden_size = fields.positive_int('hidden_size')
    head_dim = fields.positive_int('head_dim', family.head_dim or hidden_size // heads)
    # The rotary embedding rotates pairs of channels.
    if head_dim % 2:
        raise fields.error(f'head_dim={head_dim} must be even')
    rotary = _read_rope(fields, family)
    rotary_dim = int(head_dim * rotary.share)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise fields.error(
            f'partial_rotary_factor={rotary.share} of head_dim={head_dim} must be an even number of channels'
        )
    windows = _windows(fields, family, layers)
    experts = None
    if family.has_experts:
        is_normalized = fields.boolean('norm_topk_prob', False)
        experts = Experts(*config_fields.expert_numbers(fields), is_normalized)
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
        delta=_delta_shape(fields) if DELTA in windows else None,
        rotary_dim=0 if rotary_dim == head_dim else rotary_dim,
        output_gate=family.has_delta,
        norm_eps=fields.positive_float('rms_norm_eps', family.norm_eps),
        # Flags are stale where a head was trained or merged apart.
        tied=fields.boolean('tie_word_embeddings', False) and not has_other_head(folder),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norms=family.norms,
        norm_offset=family.norm_offset,
        activation=family.activation,
        scale_embedding=family.scale_embedding,
        experts=experts,
        query_scale=(head_dim / fields.positive_float('query_pre_attn_scalar', head_dim)) ** 0.5,
        **overrides,
    )


def _delta_shape(fields: Fields) -> delta.Shape:
    """Returns the heads of the gated delta nets."""
    key_heads = fields.positive_int('linear_num_key_heads')
    value_heads = fields.positive_int('linear_num_value_heads')
    if value_heads % key_heads:
        raise fields.error(
            f'linear_num_value_heads={value_heads} is not a multiple of linear_num_key_heads={key_heads}'
        )
    return delta.Shape(
        key_heads,
        value_heads,
        fields.positive_int('linear_key_head_dim'),
        fields.positive_int('linear_value_head_dim'),
        fields.positive_int('linear_conv_kernel_dim'),
    )


def longest_context(folder) -> tuple[int, int]:
    """Returns the positions of a model, in tokens: those of config.json, and those to which its scaling extends them.

    Raises:
      CheckpointError: as of `read_config`.
    """
    name, fields = family_fields(base_folder(folder))
    rotary = _read_rope(fields, FAMILIES[name])
    positions = fields.positive_int('max_position_embeddings')
    if rotary.scaling is None:
        return positions, positions
    # Folders state the length before or after the extension.
    original = getattr(rotary.scaling, _ORIGINAL, positions)
    return positions, max(positions, int(rotary.scaling.factor * original))


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


def _windows(fields: Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Returns the sliding window of every layer (0: full attention), or () if no layer has one."""
    types = config_fields.layer_types(fields, family, layers)
    if 'linear_attention' in types:
        return tuple(DELTA if layer_type == 'linear_attention' else 0 for layer_type in types)
    # () rather than zeros, so that equal models have equal configurations and share compiled functions.
    if 'sliding_attention' not in types:
        return ()
    # The fields contradict each other; a guess would change the computation silently.
    if not config_fields.has_sliding_layers(fields, family):
        raise fields.error(
            'layer_types names sliding_attention, but use_sliding_window is not true, or sliding_window is null'
        )
    window = fields.positive_int('sliding_window', config_fields.DEFAULT_WINDOW)
    return tuple(window if layer_type == 'sliding_attention' else 0 for layer_type in types)


# ---- rotary embedding ------------------------------------------------------------------------------


_SCALINGS = {'linear': rope.Linear, 'llama3': rope.Llama3, 'yarn': rope.Yarn}
_TYPES = ('default', *_SCALINGS)
_ORIGINAL = 'original_max_position_embeddings'
# `finetuned` tells how a checkpoint was made.
_COMMON_FIELDS = {'rope_type', 'type', 'rope_theta', 'partial_rotary_factor', 'finetuned'}


@dataclasses.dataclass(frozen=True)
class _Rope:
    """Rotary embedding of a model; the fields are those of ModelConfig.

    Attributes:
      theta: base of the frequencies.
      sliding_theta: the same for layers with a sliding window.
      scaling: extension to longer contexts, if any.
      scale_sliding: whether the scaling applies to layers with a sliding window.
      share: part of the channels of a head that is rotated.
    """

    theta: float
    sliding_theta: float
    scaling: rope.Scaling | None
    scale_sliding: bool
    share: float


def _read_rope(fields: Fields, family: Family) -> _Rope:
    """Returns the rotary embedding that config.json describes, in either spelling.

    Where several places state a parameter, the one that `transformers` goes by counts.

    Raises:
      CheckpointError: the decoder does not implement it.
    """
    share = 1.0
    if family.full_every:
        full, sliding = _sections_by_layer_type(fields, family)
        default_sliding_theta = family.sliding_theta or family.rope_theta
    else:
        older = fields.section('rope_scaling')
        full = older if older.values else fields.section('rope_parameters')
        # A length at the top level counts before that of the object.
        original = fields.get(_ORIGINAL)
        if original is not None and _kind(full) in ('llama3', 'yarn'):
            full = dataclasses.replace(full, values=full.values | {_ORIGINAL: original})
        if family.has_delta:
            share = full.positive_float(
                'partial_rotary_factor', fields.get('partial_rotary_factor')
            )
            read = {'partial_rotary_factor', *_IMAGE_FIELDS}
            values = {name: value for name, value in full.values.items() if name not in read}
            full = dataclasses.replace(full, values=values)
        sliding = full
        default_sliding_theta = fields.positive_float('rope_theta', family.rope_theta)
    theta = _theta(full, fields.positive_float('rope_theta', family.rope_theta))
    sliding_theta = _theta(
        sliding, fields.positive_float('rope_local_base_freq', default_sliding_theta)
    )
    max_positions = fields.positive_int('max_position_embeddings')
    scaling = _scaling(full, max_positions)
    sliding_scaling = _scaling(sliding, max_positions)
    # ModelConfig has one scaling; sliding layers may lack it.
    if sliding_scaling not in (None, scaling):
        raise fields.error(
            'rope_parameters: sliding layers must be unscaled or scaled as the full ones'
        )
    scale_sliding = sliding_scaling is not None or scaling is None
    return _Rope(theta, sliding_theta, scaling, scale_sliding, share)


def _sections_by_layer_type(fields: Fields, family: Family) -> tuple[Fields, Fields]:
    """Returns the rotary parameters of the layers with full attention, and of those with a sliding window.

    `rope_parameters` has one object for each type; the older `rope_scaling` is added to that of full attention.

    Raises:
      CheckpointError: the parameters mean different things to different versions of `transformers`.
    """
    newer = fields.section('rope_parameters')
    for name in newer.values:
        if name not in LAYER_TYPES:
            raise fields.error(
                f'rope_parameters.{name} has no effect in {family.architecture}',
                fix='write it into rope_parameters.full_attention or rope_parameters.sliding_attention',
            )
    full = newer.section('full_attention')
    sliding = newer.section('sliding_attention')
    older = fields.section('rope_scaling')
    if 'type' in older.values and 'rope_type' not in older.values:
        raise fields.error(
            f'rope_scaling.type is not read by every version of transformers in {family.architecture}',
            fix='name it rope_type',
        )
    if older.values:
        full = dataclasses.replace(older, values=full.values | older.values)
    # Without a base for sliding layers, the one at the top level counts for them in some versions only.
    stated_theta = fields.positive_float('rope_theta', family.rope_theta)
    is_ambiguous = not family.sliding_theta and sliding.get('rope_theta') is None
    if is_ambiguous and stated_theta != family.rope_theta:
        raise fields.error(
            f'rope_theta={stated_theta:g} is not read alike by all versions of transformers',
            fix='write rope_parameters.full_attention.rope_theta and rope_parameters.sliding_attention.rope_theta',
        )
    return full, sliding


def _theta(section: Fields, default: float) -> float:
    """Returns the base of the frequencies; CheckpointError if it is not above 1."""
    theta = section.positive_float('rope_theta', default)
    if theta <= 1:
        raise section.error(f'{section.prefix}rope_theta={theta} must exceed 1')
    return theta


def _kind(section: Fields) -> Any:
    """Returns the rope type that an object states in either spelling."""
    return section.get('rope_type') or section.get('type') or 'default'


def _scaling(section: Fields, max_positions: int) -> rope.Scaling | None:
    """Returns the scaling that one object of rotary parameters describes.

    Args:
      section: the object.
      max_positions: default of `original_max_position_embeddings`.
    """
    kind = _kind(section)
    if kind not in _TYPES:
        raise section.error(
            f'{section.prefix}rope_type={kind!r} is not supported (only {", ".join(_TYPES)})',
            OTHER_CHECKPOINT,
        )
    _check_rope_fields(section, kind)
    if kind == 'default':
        return None
    factor = section.positive_float('factor')
    if kind == 'linear':
        return rope.Linear(factor)
    # Older folders name the original length only in max_position_embeddings.
    original = section.positive_int(_ORIGINAL, max_positions)
    if kind == 'llama3':
        low = section.positive_float('low_freq_factor')
        high = section.positive_float('high_freq_factor')
        if high <= low:
            raise section.error(
                f'{section.prefix}high_freq_factor={high} must exceed low_freq_factor={low}'
            )
        return rope.Llama3(factor, low, high, original)
    # YaRN §3.4: sqrt(1/t) = 0.1 ln(s) + 1 for a context s times as long.
    recommended = 0.1 * math.log(max(factor, 1.0)) + 1
    return rope.Yarn(
        factor,
        original,
        attention_factor=section.positive_float('attention_factor', recommended),
        beta_fast=section.positive_float('beta_fast', 32.0),
        beta_slow=section.positive_float('beta_slow', 1.0),
        truncate=section.boolean('truncate', True),
    )


def _check_rope_fields(section: Fields, kind: str) -> None:
    """Raises CheckpointError for a field that the rope type does not have, or a partial rotation.

    Such a field would be ignored silently. Null counts as absent.
    """
    supported = set(_COMMON_FIELDS)
    if kind in _SCALINGS:
        # The fields of these classes have the names of config.json.
        supported |= {field.name for field in dataclasses.fields(_SCALINGS[kind])}
    for name in sorted(section.values):
        if name not in supported and section.get(name) is not None:
            raise section.error(
                f'{section.prefix}{name} is not supported with rope type {kind!r}', OTHER_CHECKPOINT
            )
    rotary_share = section.get('partial_rotary_factor')
    if rotary_share not in (None, 1):
        raise section.error(
            f'{section.prefix}partial_rotary_factor={rotary_share!r} is not supported (only 1)',
            OTHER_CHECKPOINT,
        )
