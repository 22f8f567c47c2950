"""The ModelConfig of a checkpoint folder, from the config that `transformers` reads there."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from zeroplay_jax.policy import delta, families, rope
from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.policy.decoder import DELTA, ModelConfig
from zeroplay_jax.policy.experts import Experts
from zeroplay_jax.policy.families import CheckpointError, unusable
from zeroplay_jax.policy.stored_tensors import has_other_head

# Names of the activation function in config.json, by ours; several are the same function.
_ACTIVATIONS = {
    'silu': ('silu', 'swish'),
    'gelu_tanh': ('gelu_pytorch_tanh', 'gelu_new', 'gelu_fast'),
}
_SCALINGS = {'linear': rope.Linear, 'llama3': rope.Llama3, 'yarn': rope.Yarn}
_ROPE_TYPES = ('default', *_SCALINGS)


def read_config(folder, **overrides) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face folder.

    The dtype in config.json is that of the tensors and is ignored here.

    Args:
      folder: contains config.json, or an adapter to a base that does.
      **overrides: fields of ModelConfig that config.json does not determine: dtype, remat, attention,
        scan, logit_chunk, logits.

    Raises:
      CheckpointError: as of `families.read`, or the decoder does not implement a field.
    """
    folder = base_folder(folder)
    path = folder / 'config.json'
    name, config = families.read(folder)
    family = families.FAMILIES[name]
    switches = family.switches
    activation = getattr(config, 'hidden_activation', None) or config.hidden_act
    if activation not in _ACTIVATIONS[switches.get('activation', 'silu')]:
        raise unusable(path, f'activation {activation!r} is not supported in {name}')
    windows = _windows(path, name, config)
    full, sliding, rotated_share = _rotary_parameters(path, name, config)
    scaling, sliding_scaling = _scaling(path, full), _scaling(path, sliding)
    # ModelConfig has one scaling; sliding layers may lack it.
    if sliding_scaling not in (None, scaling):
        reason = 'rope_parameters: sliding layers must be unscaled or scaled as the full ones'
        raise unusable(path, reason)
    head_dim = families.head_dim(config)
    rotary_dim = int(head_dim * rotated_share)
    if not 0 < rotary_dim <= head_dim:
        raise unusable(path, f'rotates {rotary_dim} channels of head_dim={head_dim}')
    has_other_base = bool(windows) and sliding['rope_theta'] != full['rope_theta']
    return ModelConfig(
        family=family.same or name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=families.intermediate_size(config),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rope_theta=float(full['rope_theta']),
        rope_scaling=scaling,
        scale_sliding=sliding_scaling == scaling,
        # None rather than an equal value, so that equal models have equal configurations.
        sliding_theta=float(sliding['rope_theta']) if has_other_base else None,
        windows=windows,
        delta=_delta_shape(path, config) if DELTA in windows else None,
        rotary_dim=0 if rotary_dim == head_dim else rotary_dim,
        norm_eps=config.rms_norm_eps,
        # Flags are stale where a head was trained or merged apart.
        tied=config.tie_word_embeddings and not has_other_head(folder),
        experts=_experts(path, name, config),
        query_scale=(head_dim / getattr(config, 'query_pre_attn_scalar', head_dim)) ** 0.5,
        **switches,
        **overrides,
    )


def _windows(path: Path, name: str, config: Any) -> tuple[int, ...]:
    """Returns the sliding window of every layer (0: full attention), or () if no layer has one."""
    types = getattr(config, 'layer_types', [])
    if name == 'mistral' and config.sliding_window is not None:
        types = ['sliding_attention'] * config.num_hidden_layers
    has_delta = families.has_delta(config)
    other = 'linear_attention' if has_delta else 'sliding_attention'
    unknown = set(types) - {'full_attention', other}
    if unknown:
        reason = f'layer_types: {min(unknown)!r} is not supported (only full_attention, {other})'
        raise unusable(path, reason)
    # () rather than zeros, so that equal models have equal configurations and share compiled functions.
    if other not in types:
        return ()
    window = DELTA if has_delta else config.sliding_window
    # A guess would change the computation silently.
    if window is None:
        reason = 'layer_types names sliding_attention, but sliding_window is null or not used'
        raise unusable(path, reason)
    return tuple(window if layer_type == other else 0 for layer_type in types)


def _rotary_parameters(path: Path, name: str, config: Any) -> tuple[dict, dict, float]:
    """Returns the rotary parameters of full layers, those of layers with a window, and the rotated share of a head."""
    parameters = config.rope_parameters
    if name in ('olmo3', 'gemma3'):
        full, sliding = parameters.pop('full_attention'), parameters.pop('sliding_attention')
        if parameters:
            field = f'rope_parameters.{min(parameters)}'
            reason = f'{field} has no effect; write it into full_attention or sliding_attention'
            raise unusable(path, reason)
        return full, sliding, 1
    share = parameters.pop('partial_rotary_factor', 1) if families.has_delta(config) else 1
    if families.FAMILIES[name].wrapper:
        parameters = families.without_images(parameters)
    return parameters, parameters, share


def _scaling(path: Path, parameters: dict) -> rope.Scaling | None:
    """Returns the extension to longer contexts that rotary parameters describe.

    Raises:
      CheckpointError: of another kind, or with a field that the kind does not have: it would be ignored silently.
    """
    kind = str(parameters.get('rope_type', 'default'))
    if kind not in _ROPE_TYPES:
        reason = f'rope_type={kind!r} is not supported (only {", ".join(_ROPE_TYPES)})'
        raise unusable(path, reason)
    scaling = _SCALINGS.get(kind)
    names = {field.name for field in dataclasses.fields(scaling)} if scaling else set()
    values = {}
    for name, value in parameters.items():
        # `finetuned` tells how a checkpoint was made.
        is_without_effect = name in ('rope_type', 'type', 'finetuned')
        if value is None or is_without_effect or (name, value) == ('partial_rotary_factor', 1):
            continue
        if name not in names | {'rope_theta'}:
            reason = f'rope_parameters.{name} is not supported with rope type {kind!r}'
            raise unusable(path, reason)
        is_number = isinstance(value, (int, float)) and 0 < value < math.inf
        if not is_number and name != 'truncate':
            raise unusable(path, f'rope_parameters.{name}={value!r} must be a positive number')
        values[name] = value
    if values.get('rope_theta', 0) <= 1:
        raise unusable(path, f'rope_theta={parameters.get("rope_theta")} must exceed 1')
    if scaling is None:
        return None
    if kind == 'yarn':
        # YaRN §3.4: sqrt(1/t) = 0.1 ln(s) + 1 for a context s times as long.
        values.setdefault('attention_factor', 0.1 * math.log(max(values.get('factor', 1), 1)) + 1)
    return scaling(**{name: values[name] for name in names & values.keys()})


def _delta_shape(path: Path, config: Any) -> delta.Shape:
    """Returns the heads of the gated delta nets."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise unusable(
            path,
            f'linear_num_value_heads={values} is not a multiple of linear_num_key_heads={keys}',
        )
    return delta.Shape(
        keys,
        values,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )


def _experts(path: Path, name: str, config: Any) -> Experts | None:
    """Returns the mixture of every layer; None: it has none."""
    if not families.has_experts(config):
        for field in ('num_experts', 'num_local_experts'):
            if getattr(config, field, 0):
                raise unusable(path, f'{field}={getattr(config, field)} is not supported in {name}')
        return None
    count, per_token = config.num_experts, config.num_experts_per_tok
    if per_token > count:
        reason = f'num_experts_per_tok={per_token} must be at most num_experts={count}'
        raise unusable(path, reason)
    return Experts(
        count,
        per_token,
        config.moe_intermediate_size,
        # Some classes always make them so.
        getattr(config, 'norm_topk_prob', True),
        families.has_shared_expert(config),
    )


def longest_context(folder) -> tuple[int, int]:
    """Returns the positions of a model, in tokens: those of config.json, and those to which its scaling extends them.

    Raises:
      CheckpointError: as of `read_config`.
    """
    path = base_folder(folder) / 'config.json'
    name, config = families.read(folder)
    full, *_ = _rotary_parameters(path, name, config)
    scaling = _scaling(path, full)
    positions = config.max_position_embeddings
    if scaling is None:
        return positions, positions
    # Folders state the length before or after the extension.
    original = getattr(scaling, 'original_max_position_embeddings', positions)
    return positions, max(positions, int(scaling.factor * original))


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
