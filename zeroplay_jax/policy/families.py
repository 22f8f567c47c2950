"""Model families as data: what config.json says → ModelConfig, and each parameter's tensor name and shape."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any, NamedTuple

from zeroplay_jax.policy import rope
from zeroplay_jax.policy.transformer import ModelConfig
from zeroplay_jax.types import UserError


class Family(NamedTuple):
    """What tells a family apart: its name in config.json, switches of ModelConfig, and defaults of absent fields."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: str = 'none'
    post_norm: bool = False
    full_every: int = (
        0  # without `layer_types`: every n-th layer is full, the others slide; 0: all are full
    )
    scale_sliding: bool = True
    rope_theta: float = 10000.0
    head_dim: int = 0  # 0: hidden_size / num_attention_heads


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
SUPPORTED = 'supported: ' + ', '.join(row.architecture for row in FAMILIES.values())

# Fields that would change the arithmetic → the values under which they do not. Absent and null are fine.
_NEUTRAL: dict[str, tuple] = {
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
_ROPE_TYPES = ('default', 'llama3', 'yarn')

# Our parameter path → (tensor name, its dimensions in our order as sizes of `_sizes`).
_LAYER = {
    'input_norm/scale': ('input_layernorm.weight', ('hidden_size',)),
    'q/kernel': ('self_attn.q_proj.weight', ('hidden_size', 'num_attention_heads·head_dim')),
    'k/kernel': ('self_attn.k_proj.weight', ('hidden_size', 'num_key_value_heads·head_dim')),
    'v/kernel': ('self_attn.v_proj.weight', ('hidden_size', 'num_key_value_heads·head_dim')),
    'q/bias': ('self_attn.q_proj.bias', ('num_attention_heads·head_dim',)),
    'k/bias': ('self_attn.k_proj.bias', ('num_key_value_heads·head_dim',)),
    'v/bias': ('self_attn.v_proj.bias', ('num_key_value_heads·head_dim',)),
    'q_norm/scale': ('self_attn.q_norm.weight', ('head_dim',)),
    'k_norm/scale': ('self_attn.k_norm.weight', ('head_dim',)),
    'o/kernel': ('self_attn.o_proj.weight', ('num_attention_heads·head_dim', 'hidden_size')),
    'post_norm/scale': ('post_attention_layernorm.weight', ('hidden_size',)),
    'gate/kernel': ('mlp.gate_proj.weight', ('hidden_size', 'intermediate_size')),
    'up/kernel': ('mlp.up_proj.weight', ('hidden_size', 'intermediate_size')),
    'down/kernel': ('mlp.down_proj.weight', ('intermediate_size', 'hidden_size')),
    'post_mlp_norm/scale': ('post_feedforward_layernorm.weight', ('hidden_size',)),
}
_TOP = {
    'embedding': ('model.embed_tokens.weight', ('vocab_size', 'hidden_size')),
    'final_norm/scale': ('model.norm.weight', ('hidden_size',)),
    'head': ('lm_head.weight', ('hidden_size', 'vocab_size')),
}


class CheckpointError(UserError):
    """A checkpoint folder that cannot be used; the message names the file or field."""


class Tensor(NamedTuple):
    """A parameter as the folder keeps it; `dims` names the sizes of `shape`, both in our order of axes."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    transposed: bool  # torch's Linear keeps [out, in]; ours is [in, out]


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Our parameter path → its tensor, for every parameter of the model."""
    c = config
    sizes = {
        'vocab_size': c.vocab_size,
        'hidden_size': c.hidden_size,
        'intermediate_size': c.intermediate_size,
        'head_dim': c.head_dim,
        'num_attention_heads·head_dim': c.heads * c.head_dim,
        'num_key_value_heads·head_dim': c.kv_heads * c.head_dim,
    }
    layer, top = dict(_LAYER), dict(_TOP)
    if c.qk_norm == 'projection':
        for name in ('q', 'k'):
            layer[f'{name}_norm/scale'] = (
                _LAYER[f'{name}_norm/scale'][0],
                _LAYER[f'{name}/bias'][1],
            )
    absent = {
        *(('q_norm/scale', 'k_norm/scale') if c.qk_norm == 'none' else ()),
        *(() if c.qkv_bias else ('q/bias', 'k/bias', 'v/bias')),
        'input_norm/scale' if c.post_norm else 'post_mlp_norm/scale',
    }
    if c.tied:
        del top['head']
    rows = top | {
        f'layer_{i}/{ours}': (f'model.layers.{i}.{theirs}', dims)
        for i in range(c.layers)
        for ours, (theirs, dims) in layer.items()
        if ours not in absent
    }
    return {
        ours: Tensor(
            theirs, tuple(sizes[d] for d in dims), dims, ours.endswith('/kernel') or ours == 'head'
        )
        for ours, (theirs, dims) in rows.items()
    }


class _Fields:
    """config.json with its path, for errors that name both."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        try:
            raw = json.loads(path.read_text(encoding='utf-8'))
        except (OSError, ValueError) as error:
            raise CheckpointError(f'{path}: cannot be read as a model config ({error})') from None
        if not isinstance(raw, dict):
            raise CheckpointError(f'{path}: cannot be read as a model config (it holds no object)')
        self.raw: dict[str, Any] = raw

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f'{self.path}: {message}; {SUPPORTED}')

    def group(self, name: str, raw=None) -> dict[str, Any]:
        """A nested object; null and absent count as empty."""
        value = (self.raw if raw is None else raw).get(name) or {}
        if not isinstance(value, dict):
            raise self.fail(f'{name}={value!r} must be an object')
        return value

    def number(self, name: str, default=None, kind: type = int, raw=None, where: str = ''):
        """A positive number of a kind (int or float); null and absent count as the default, if there is one."""
        value: Any = (self.raw if raw is None else raw).get(name)
        value = default if value is None else value
        if value is None:
            raise self.fail(f'{where}{name} is missing')
        fits = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not fits or value <= 0:
            raise self.fail(f'{where}{name}={value!r} must be a positive {kind.__name__}')
        return kind(value)


def read_config(folder, **overrides) -> ModelConfig:
    """ModelConfig of a Hugging Face folder, in the older or newer spelling of config.json.

    Older: `rope_theta`, `rope_scaling`; newer: `rope_parameters`, for OLMo-3 apart for every type of layer. The dtype
    a folder names is that of its tensors and read there.

    Args:
      folder: holds config.json.
      **overrides: dtype, remat, remat_policy, attention, scan, logit_chunk of ModelConfig.

    Raises:
      CheckpointError: no such file, an unknown architecture, or a field this decoder cannot honour.
    """
    fields = _Fields(pathlib.Path(folder) / 'config.json')
    raw, number = fields.raw, fields.number
    named = raw.get('architectures') or ()
    name = next((name for name, row in FAMILIES.items() if row.architecture in named), None)
    if name is None:
        raise fields.fail(f'architectures={raw.get("architectures")} is not supported')
    family = FAMILIES[name]
    for field, neutral in _NEUTRAL.items():
        if raw.get(field) is not None and raw[field] not in neutral:
            raise fields.fail(
                f'{field}={raw[field]!r} is not supported (only {", ".join(map(repr, neutral)) or "null"})'
            )
    heads, layers = number('num_attention_heads'), number('num_hidden_layers')
    kv_heads = number('num_key_value_heads', heads)
    if heads % kv_heads:
        raise fields.fail(
            f'num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}'
        )
    head_dim = number('head_dim', family.head_dim or number('hidden_size') // heads)
    if head_dim % 2:
        raise fields.fail(f'head_dim={head_dim} must be even')
    theta, scaling, scale_sliding = _rope(fields, family)
    return ModelConfig(
        family=name,
        vocab_size=number('vocab_size'),
        hidden_size=number('hidden_size'),
        intermediate_size=number('intermediate_size'),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        scale_sliding=scale_sliding,
        windows=_windows(fields, family, layers),
        norm_eps=number('rms_norm_eps', kind=float),
        tied=bool(raw.get('tie_word_embeddings', False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        post_norm=family.post_norm,
        **overrides,
    )


def _windows(fields: _Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Sliding window of every layer (0: none), or () where no layer slides."""
    raw = fields.raw
    slides = bool(family.full_every or raw.get('use_sliding_window'))
    types = raw.get('layer_types')
    if types is None and family.full_every:
        types = [
            'sliding_attention' if (i + 1) % family.full_every else 'full_attention'
            for i in range(layers)
        ]
    elif types is None:
        first = raw.get('max_window_layers', 28) if slides else layers
        if not isinstance(first, int):
            raise fields.fail(f'max_window_layers={first!r} must be an int')
        types = ['sliding_attention' if i >= first else 'full_attention' for i in range(layers)]
    if len(types) != layers:
        raise fields.fail(f'layer_types has {len(types)} entries for num_hidden_layers={layers}')
    unknown = set(types) - {'full_attention', 'sliding_attention'}
    if unknown:
        raise fields.fail(
            f'layer_types: {min(unknown)!r} is not supported (only full_attention, sliding_attention)'
        )
    if 'sliding_attention' not in types:
        return ()
    if not slides:
        raise fields.fail('layer_types names sliding_attention, but use_sliding_window is not true')
    window = fields.number('sliding_window', 4096)
    return tuple(window if t == 'sliding_attention' else 0 for t in types)


def _rope(fields: _Fields, family: Family) -> tuple[float, rope.Llama3 | rope.Yarn | None, bool]:
    """(theta, scaling, whether sliding layers are scaled too)."""
    newer, older = fields.group('rope_parameters'), fields.group('rope_scaling')
    if 'full_attention' in newer or 'sliding_attention' in newer:
        full, sliding = (
            fields.group('full_attention', newer),
            fields.group('sliding_attention', newer),
        )
        where = 'rope_parameters.full_attention.'
    else:
        full = sliding = older or newer
        where = 'rope_scaling.' if older else 'rope_parameters.'
        if not family.scale_sliding:
            sliding = {'rope_theta': full['rope_theta']} if 'rope_theta' in full else {}
    base = fields.number('rope_theta', family.rope_theta, float)
    theta, other = (
        fields.number('rope_theta', base, float, part, where) for part in (full, sliding)
    )
    if theta != other:
        raise fields.fail(
            f'rope_parameters: rope_theta={theta} of full and {other} of sliding layers must be equal'
        )
    scaling = _scaling(fields, full, where)
    sliding_scaling = _scaling(fields, sliding, 'rope_parameters.sliding_attention.')
    if sliding_scaling not in (None, scaling):
        raise fields.fail(
            'rope_parameters: sliding layers must be unscaled or scaled as the full ones'
        )
    return theta, scaling, sliding_scaling is not None or scaling is None


def _scaling(fields: _Fields, part: dict[str, Any], where: str) -> rope.Llama3 | rope.Yarn | None:
    """The scaling that one dictionary of RoPE parameters asks for."""
    kind = part.get('rope_type') or part.get('type') or 'default'
    if kind not in _ROPE_TYPES:
        raise fields.fail(
            f'{where}rope_type={kind!r} is not supported (only {", ".join(_ROPE_TYPES)})'
        )
    common = {'rope_type', 'type', 'rope_theta', 'partial_rotary_factor'}
    known: Any = {'llama3': rope.Llama3, 'yarn': rope.Yarn}.get(kind)
    allowed = common | {field.name for field in dataclasses.fields(known)} if known else common
    strange = {key for key in part if key not in allowed and part[key] is not None}
    if strange:
        raise fields.fail(f'{where}{min(strange)} is not supported with rope type {kind!r}')
    if part.get('partial_rotary_factor') not in (None, 1):
        raise fields.fail(
            f'{where}partial_rotary_factor={part["partial_rotary_factor"]!r} is not supported (only 1)'
        )
    if kind == 'default':
        return None
    number = lambda name, default=None, kind=float: fields.number(name, default, kind, part, where)
    factor = number('factor')
    original = number(
        'original_max_position_embeddings', fields.raw.get('max_position_embeddings'), int
    )
    if kind == 'llama3':
        low, high = number('low_freq_factor'), number('high_freq_factor')
        if high <= low:
            raise fields.fail(f'{where}high_freq_factor={high} must exceed low_freq_factor={low}')
        return rope.Llama3(factor, low, high, original)
    return rope.Yarn(
        factor,
        original,
        number('attention_factor', 0.1 * math.log(max(factor, 1.0)) + 1),
        number('beta_fast', 32.0),
        number('beta_slow', 1.0),
        part.get('truncate') is not False,
    )
