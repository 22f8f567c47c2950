"""Model families as data, and the ModelConfig of a checkpoint folder from its config.json."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

from zeroplay_jax.policy import rope
from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.policy.decoder import ModelConfig
from zeroplay_jax.types import UserError


class Family(NamedTuple):
    """A model family: its name in config.json, switches of ModelConfig, and defaults of absent fields.

    Attributes:
      architecture: class name in the field `architectures`.
      qkv_bias, qk_norm, post_norm, scale_sliding: as in ModelConfig.
      full_every: without the field `layer_types`, every n-th layer has full attention and the others a sliding window;
        0: all layers have full attention.
      rope_theta: default base of the rotary frequencies.
      head_dim: default size of a head; 0: hidden_size / num_attention_heads.
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: str = 'none'
    post_norm: bool = False
    full_every: int = 0
    scale_sliding: bool = True
    rope_theta: float = 10000.0
    head_dim: int = 0


FAMILIES = {
    'qwen2': Family('Qwen2ForCausalLM', qkv_bias=True),
    'qwen3': Family('Qwen3ForCausalLM', qk_norm='head', head_dim=128),
    'llama': Family('LlamaForCausalLM'),
    'olmo3': Family(
        'Olmo3ForCausalLM',
        qk_norm='projection',
        post_norm=True,
        full_every=4,
        scale_sliding=False,
        rope_theta=500000.0,
    ),
}
SUPPORTED = 'supported: ' + ', '.join(family.architecture for family in FAMILIES.values())

# Fields that can change the computation in ways the decoder does not implement -> their values that do not.
# An absent field and null never do.
_SUPPORTED_VALUES: dict[str, tuple] = {
    'hidden_act': ('silu',),
    'attention_bias': (False,),
    'mlp_bias': (False,),
    'partial_rotary_factor': (1,),
    'num_experts': (0,),
    'num_local_experts': (0,),
    'n_routed_experts': (0,),
    'attn_logit_softcapping': (),
    'final_logit_softcapping': (),
    'clip_qkv': (),
    'quantization_config': (),
}
_LAYER_TYPES = ('full_attention', 'sliding_attention')
_ROPE_TYPES = ('default', 'llama3', 'yarn')
_COMMON_ROPE_FIELDS = {'rope_type', 'type', 'rope_theta', 'partial_rotary_factor'}


class CheckpointError(UserError):
    """A checkpoint folder that cannot be used; the message names the file or field."""


@dataclasses.dataclass(frozen=True)
class _Fields:
    """A JSON object of config.json.

    Attributes:
      path: path of config.json, for error messages.
      values: the object.
      prefix: its location in the file, such as 'rope_parameters.', for error messages.
    """

    path: Path
    values: dict[str, Any]
    prefix: str = ''

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f'{self.path}: {message}; {SUPPORTED}')

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def section(self, name: str) -> _Fields:
        """Returns a nested object; null and absent count as empty."""
        values = self.get(name) or {}
        if not isinstance(values, dict):
            raise self.error(f'{self.prefix}{name}={values!r} must be an object')
        return _Fields(self.path, values, f'{self.prefix}{name}.')

    def positive_int(self, name: str, default: int | None = None) -> int:
        return self._positive(name, default, int)

    def positive_float(self, name: str, default: float | None = None) -> float:
        return self._positive(name, default, float)

    def boolean(self, name: str, default: bool) -> bool:
        """Returns true or false; null and absent count as the default."""
        value = self.get(name)
        if value is None:
            return default
        # A text such as "no" would count as true.
        if not isinstance(value, bool):
            raise self.error(f'{self.prefix}{name}={value!r} must be true or false')
        return value

    def _positive(self, name: str, default, kind: type):
        """Returns a positive number; null and absent count as the default, if there is one."""
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f'{self.prefix}{name} is missing')
        # JSON may write a float without a fraction, hence int for both; bool is a subclass of int.
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        # Python reads NaN and Infinity in JSON; comparisons with NaN are false.
        if not is_number or not 0 < value <= sys.float_info.max:
            raise self.error(f'{self.prefix}{name}={value!r} must be a positive {kind.__name__}')
        return kind(value)


def _read_fields(path: Path) -> _Fields:
    """Returns the JSON object in config.json; CheckpointError if it cannot be read."""
    fix = 'name a Hugging Face checkpoint folder'
    try:
        values = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise CheckpointError(
            f'{path}: cannot be read as a model config ({reason}); {fix}'
        ) from None
    if not isinstance(values, dict):
        raise CheckpointError(
            f'{path}: cannot be read as a model config (not a JSON object); {fix}'
        )
    return _Fields(path, values)


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
    fields = _read_fields(base_folder(folder) / 'config.json')
    name = _family_name(fields)
    family = FAMILIES[name]
    _check_supported(fields)
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
    theta, scaling, scale_sliding = _rope(fields, family)
    return ModelConfig(
        family=name,
        vocab_size=fields.positive_int('vocab_size'),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int('intermediate_size'),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        scale_sliding=scale_sliding,
        windows=_windows(fields, family, layers),
        norm_eps=fields.positive_float('rms_norm_eps'),
        tied=fields.boolean('tie_word_embeddings', False),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        post_norm=family.post_norm,
        **overrides,
    )


def _family_name(fields: _Fields) -> str:
    """Returns the key in FAMILIES of the architecture that config.json names."""
    architectures = fields.get('architectures')
    if isinstance(architectures, list):
        for name, family in FAMILIES.items():
            if family.architecture in architectures:
                return name
    raise fields.error(f'architectures={architectures} is not supported')


def _check_supported(fields: _Fields) -> None:
    """Raises CheckpointError for a field whose value the decoder does not implement."""
    for name, supported in _SUPPORTED_VALUES.items():
        value = fields.get(name)
        if value is None or value in supported:
            continue
        choices = ', '.join(map(repr, supported)) or 'null'
        raise fields.error(f'{name}={value!r} is not supported (only {choices})')


def _windows(fields: _Fields, family: Family, layers: int) -> tuple[int, ...]:
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
            f'layer_types: {min(unknown_types)!r} is not supported (only {", ".join(_LAYER_TYPES)})'
        )
    # () rather than zeros, so that equal models have equal configurations and share compiled functions.
    if 'sliding_attention' not in types:
        return ()
    # The two fields contradict each other; a guess would change the computation silently.
    if not _has_sliding_layers(fields, family):
        raise fields.error(
            'layer_types names sliding_attention, but use_sliding_window is not true'
        )
    window = fields.positive_int('sliding_window', 4096)
    return tuple(window if layer_type == 'sliding_attention' else 0 for layer_type in types)


def _has_sliding_layers(fields: _Fields, family: Family) -> bool:
    """Returns whether sliding windows are enabled: always for OLMo-3, by a field for Qwen."""
    return bool(family.full_every) or fields.boolean('use_sliding_window', False)


def _default_layer_types(fields: _Fields, family: Family, layers: int) -> list[str]:
    """Returns the type of every layer where config.json has no `layer_types`, as transformers derives it."""
    types = ['full_attention'] * layers
    if family.full_every:
        for i in range(layers):
            if (i + 1) % family.full_every:
                types[i] = 'sliding_attention'
    elif _has_sliding_layers(fields, family):
        # Despite its name, this field is the number of layers at the bottom that have no window.
        first_sliding = fields.values.get('max_window_layers', 28)
        if not isinstance(first_sliding, int):
            raise fields.error(f'max_window_layers={first_sliding!r} must be an int')
        for i in range(layers):
            if i >= first_sliding:
                types[i] = 'sliding_attention'
    return types


def _rope(fields: _Fields, family: Family) -> tuple[float, rope.Llama3 | rope.Yarn | None, bool]:
    """Returns (theta, scaling, whether the scaling applies to layers with a sliding window)."""
    newer = fields.section('rope_parameters')
    older = fields.section('rope_scaling')
    if 'full_attention' in newer.values or 'sliding_attention' in newer.values:
        full = newer.section('full_attention')
        sliding = newer.section('sliding_attention')
    else:
        full = older if older.values else newer
        sliding = full
        if not family.scale_sliding:
            # A single object describes the layers with full attention; sliding layers share only its theta.
            sliding = _Fields(full.path, {'rope_theta': full.get('rope_theta')}, full.prefix)
    default_theta = fields.positive_float('rope_theta', family.rope_theta)
    theta = full.positive_float('rope_theta', default_theta)
    sliding_theta = sliding.positive_float('rope_theta', default_theta)
    # ModelConfig has one theta and one scaling; sliding layers may lack the scaling.
    if theta != sliding_theta:
        raise fields.error(
            f'rope_parameters: rope_theta={theta} of full and {sliding_theta} of sliding layers must be equal'
        )
    max_positions = fields.get('max_position_embeddings')
    scaling = _scaling(full, max_positions)
    sliding_scaling = _scaling(sliding, max_positions)
    if sliding_scaling not in (None, scaling):
        raise fields.error(
            'rope_parameters: sliding layers must be unscaled or scaled as the full ones'
        )
    scale_sliding = sliding_scaling is not None or scaling is None
    return theta, scaling, scale_sliding


def _scaling(section: _Fields, max_positions: int | None) -> rope.Llama3 | rope.Yarn | None:
    """Returns the scaling that one object of rotary parameters describes.

    Args:
      section: the object.
      max_positions: default of `original_max_position_embeddings`.
    """
    kind = section.get('rope_type') or section.get('type') or 'default'
    if kind not in _ROPE_TYPES:
        raise section.error(
            f'{section.prefix}rope_type={kind!r} is not supported (only {", ".join(_ROPE_TYPES)})'
        )
    _check_rope_fields(section, kind)
    if kind == 'default':
        return None
    # Older folders name the original length only in max_position_embeddings.
    factor = section.positive_float('factor')
    original = section.positive_int('original_max_position_embeddings', max_positions)
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


def _check_rope_fields(section: _Fields, kind: str) -> None:
    """Raises CheckpointError for a field that the rope type does not have, or a partial rotation.

    Such a field would be ignored silently. Null counts as absent.
    """
    # The fields of `rope.Llama3` and `rope.Yarn` have the names of config.json.
    supported = set(_COMMON_ROPE_FIELDS)
    if kind == 'llama3':
        supported |= {field.name for field in dataclasses.fields(rope.Llama3)}
    if kind == 'yarn':
        supported |= {field.name for field in dataclasses.fields(rope.Yarn)}
    for name in sorted(section.values):
        if name not in supported and section.get(name) is not None:
            raise section.error(f'{section.prefix}{name} is not supported with rope type {kind!r}')
    rotary_share = section.get('partial_rotary_factor')
    if rotary_share not in (None, 1):
        raise section.error(
            f'{section.prefix}partial_rotary_factor={rotary_share!r} is not supported (only 1)'
        )
