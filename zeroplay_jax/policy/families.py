"""Families of models, and what the config.json of a checkpoint folder says, as `transformers` reads it.

Imports no JAX, because texts are encoded where none is loaded; `transformers` only where a folder is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.retrieval.command import warn_once
from zeroplay_jax.types import UserError, first_line


class Family(NamedTuple):
    """A family of models.

    Attributes:
      architecture: class name in the field `architectures`.
      model_type: of a decoder alone.
      wrapper: class name of models that have such a decoder among other parts, in the section `text_config`; '': none.
      switches: fields of ModelConfig that follow from the family.
      only: as `_ONLY`, for this family.
      whole_type: model type of models of `wrapper`; '': that of the decoder without '_text'.
      same: key in FAMILIES of the family whose decoder this is, as which it is read and written; '': its own.
    """

    architecture: str
    model_type: str
    wrapper: str = ''
    switches: Mapping[str, Any] = {}
    only: Mapping[str, Any] = {}
    whole_type: str = ''
    same: str = ''


_GEMMA3_SWITCHES = {
    'norms': 'both',
    'norm_offset': 1.0,
    'activation': 'gelu_tanh',
    'scale_embedding': True,
}
_QWEN35_SWITCHES = {'norm_offset': 1.0, 'output_gate': True}
# With other values the layers of a mixture would differ.
_MIXTURES = {'decoder_sparse_step': 1, 'mlp_only_layers': [], 'use_sliding_window': False}
FAMILIES = {
    'qwen2': Family('Qwen2ForCausalLM', 'qwen2', '', {'qkv_bias': True, 'qk_norm': 'none'}),
    'qwen3': Family('Qwen3ForCausalLM', 'qwen3'),
    'qwen3_moe': Family('Qwen3MoeForCausalLM', 'qwen3_moe', only=_MIXTURES),
    # `transformers` has no class for its decoder alone, which has no windows.
    'qwen3_vl': Family(
        '',
        'qwen3_vl_text',
        'Qwen3VLForConditionalGeneration',
        only={'use_sliding_window': False},
        same='qwen3',
    ),
    'llama': Family('LlamaForCausalLM', 'llama', '', {'qk_norm': 'none'}),
    'mistral': Family(
        'MistralForCausalLM',
        'mistral',
        'Mistral3ForConditionalGeneration',
        {'qk_norm': 'none'},
        whole_type='mistral3',
    ),
    'olmo3': Family(
        'Olmo3ForCausalLM',
        'olmo3',
        '',
        {'qk_norm': 'projection', 'norms': 'after'},
        # For layers with a sliding window this one at the top level counts in some versions of `transformers` only.
        {'rope_theta': 500000},
    ),
    'gemma3': Family(
        'Gemma3ForCausalLM',
        'gemma3_text',
        'Gemma3ForConditionalGeneration',
        _GEMMA3_SWITCHES,
    ),
    'qwen35': Family(
        'Qwen3_5ForCausalLM',
        'qwen3_5_text',
        'Qwen3_5ForConditionalGeneration',
        _QWEN35_SWITCHES,
    ),
    'qwen35_moe': Family(
        'Qwen3_5MoeForCausalLM',
        'qwen3_5_moe_text',
        'Qwen3_5MoeForConditionalGeneration',
        _QWEN35_SWITCHES,
        _MIXTURES,
    ),
}

# Fields with which a model would compute something that the decoder does not -> their value with which it does, beside
# null. They are refused even where the class of the family ignores them: a checkpoint that states one was made for
# another computation.
_UNSET_FIELDS = """
attention_bias mlp_bias n_routed_experts rope_interleave rope_interleaved use_bidirectional_attention
"""
_NULL_FIELDS = """
attention_multiplier attn_logit_softcapping clip_qkv final_logit_softcapping quantization_config
"""
_ONLY: dict[str, Any] = {
    **dict.fromkeys(_UNSET_FIELDS.split(), False),
    **dict.fromkeys(_NULL_FIELDS.split()),
    'attn_output_gate': True,
    'embedding_multiplier': 1,
    'logits_scaling': 1,
    'mamba_ssm_dtype': 'float32',
    'no_rope_layers': [],
    'output_gate_type': 'swish',
    'per_layer_config': {},
    'residual_multiplier': 1,
}
# What other families would need, by a part of the names of their classes.
_MISSING = {
    'Gemma4': 'embeddings of every layer, layers that share keys and values, heads of two sizes',
    'GptOss': 'sinks of attention, experts with biases, weights as MXFP4',
}
# Fields that published folders have beside those of their class, without a warning: older spellings that the class
# reads, and what changes neither logits nor gradients.
_BESIDE = frozenset(
    """
auto_map head_dim max_window_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings num_experts
num_local_experts original_max_position_embeddings pretraining_tp sliding_window_pattern tokenizer_class unsloth_fixed
unsloth_version use_bfloat16
""".split()
)
_UNSET: tuple = (None, False, 0, '', [], {})
# Which axes of images use which channels of the rotation. Of a text all axes have the same positions.
_IMAGE_FIELDS = ('mrope_section', 'mrope_interleaved')
_SHOWN_CHARACTERS = 60
# Several times those of the largest models: refused before lists of that length are made.
_MOST_LAYERS = 2048
# Endings of fields that must be positive.
_SIZES = ('_size', '_dim', '_heads', 'hidden_layers', '_per_tok', '_scalar', 'sliding_window')


class CheckpointError(UserError):
    """A checkpoint folder that cannot be used; the message names the file or field."""


def unusable(path: Path, reason: object) -> CheckpointError:
    """Returns the error about a config.json."""
    return CheckpointError(f'{path}: {reason}; correct it, or take another checkpoint')


def read(folder) -> tuple[str, Any]:
    """Returns the key in FAMILIES of a folder's model, and the config of its decoder, without its dtype.

    That is a `PreTrainedConfig`. A warning names the fields that the class of the family does not have.

    Args:
      folder: contains config.json, or an adapter to a base that does.

    Raises:
      CheckpointError: the file is missing, `transformers` does not take it, the family is unknown, or a field asks for
        a computation that the decoder does not implement.
    """
    # Takes a second.
    from transformers import AutoConfig

    path = base_folder(folder) / 'config.json'
    name, values = _stored(path)
    family = FAMILIES[name]
    fields = _decoder_fields(path, family, values)
    only = {**_ONLY, **family.only}
    for field, supported in only.items():
        for value in (values.get(field), fields.get(field)):
            if value not in (None, supported):
                raise unusable(path, f'{field}={value!r} is not supported (only {supported!r})')
    for field in ('dtype', 'torch_dtype'):
        fields.pop(field, None)
    layers = fields.get('num_hidden_layers')
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise unusable(path, f'num_hidden_layers={layers} is more than any model has')
    try:
        config = AutoConfig.for_model(FAMILIES[family.same or name].model_type, **fields)
        # As the model of `transformers` does: a length at the top level counts before that of the rotary parameters.
        config.standardize_rope_params()
    # What a class makes of values that it does not expect has no common type.
    except Exception as error:
        raise unusable(path, first_line(error.__cause__ or error).rstrip('.')) from None
    _drop_unknown(path, config, fields, _BESIDE | only.keys())
    for field, value in vars(config).items():
        # True and false are numbers in Python.
        if field.endswith(_SIZES) and type(value) is int and value < 1:
            raise unusable(path, f'{field}={value} must be positive')
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise unusable(
            path,
            f'num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}',
        )
    return name, config


def _drop_unknown(path: Path, config: Any, fields: dict[str, Any], beside: frozenset[str]) -> None:
    """Deletes from a config the fields that its class does not have, in place, and names them in one warning.

    Args:
      path: of config.json.
      config: a `PreTrainedConfig`.
      fields: what it was made of.
      beside: fields that stay.
    """
    known = {field.name for field in dataclasses.fields(config)}
    # What the class read otherwise, such as settings of generation, is no attribute.
    unknown = fields.keys() & vars(config).keys() - known - beside
    shown = []
    for field in sorted(unknown):
        delattr(config, field)
        if not field.startswith('_') and fields[field] not in _UNSET:
            shown.append(f'{field}={fields[field]!r}'[:_SHOWN_CHARACTERS])
    if shown:
        warn_once(
            f'{path}: ignored, because models of this architecture have no such field: {", ".join(shown)}'
        )


def head_dim(config: Any) -> int:
    """Returns the size of a head; not every class has the field."""
    return getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads


def intermediate_size(config: Any) -> int:
    """Returns the width of the feed-forward network that computes every token; beside a mixture, of the shared one."""
    return getattr(config, 'shared_expert_intermediate_size', 0) or config.intermediate_size


def has_delta(config: Any) -> bool:
    """Returns whether layers may be gated delta nets."""
    return hasattr(config, 'linear_num_value_heads')


def has_experts(config: Any) -> bool:
    """Returns whether layers have mixtures of experts."""
    return hasattr(config, 'moe_intermediate_size')


def has_shared_expert(config: Any) -> bool:
    """Returns whether every token is also computed by an expert that no router chooses."""
    return hasattr(config, 'shared_expert_intermediate_size')


def without_images(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rotary parameters without those of positions in images."""
    return {key: value for key, value in parameters.items() if key not in _IMAGE_FIELDS}


def vocabulary_size(folder) -> int:
    """Returns the number of token ids of the model in a folder; errors as of `read`."""
    return read(folder)[1].vocab_size


def is_wrapped(folder) -> bool:
    """Returns whether a folder's model has other parts beside the decoder, such as an encoder of images."""
    name, values = _stored(base_folder(folder) / 'config.json')
    return FAMILIES[name].wrapper in values['architectures']


def decoder_config(path: Path) -> dict[str, Any]:
    """Returns the content of a config.json that describes the decoder alone."""
    name, values = _stored(path)
    if 'text_config' not in values:
        return values
    family = FAMILIES[name]
    text = dict(values['text_config'])
    # Written in one of the two sections, depending on the version that wrote the folder.
    for field in ('dtype', 'torch_dtype', 'bos_token_id', 'eos_token_id', 'pad_token_id'):
        if field not in text and field in values:
            text[field] = values[field]
    if family.same:
        family = FAMILIES[family.same]
        # Some libraries would take positions of images by them. Version 4 of transformers reads `rope_scaling` and
        # `rope_theta`, version 5 also `rope_parameters`: the export has the fields of the folder.
        for field in ('rope_parameters', 'rope_scaling'):
            if text.get(field):
                text[field] = without_images(text[field])
    return text | {'architectures': [family.architecture], 'model_type': family.model_type}


def _stored(path: Path) -> tuple[str, dict[str, Any]]:
    """Returns the key in FAMILIES of the architecture that a config.json names, and the content of the file."""
    try:
        values = json_text.read_object(path, float)
    except (OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise CheckpointError(
            f'{path}: cannot be read as a model config ({reason}); name a Hugging Face checkpoint folder'
        ) from None
    architectures = values.get('architectures')
    supported = []
    for name, family in FAMILIES.items():
        classes = list(filter(None, [family.architecture, family.wrapper]))
        if isinstance(architectures, list) and any(each in architectures for each in classes):
            return name, values
        supported += classes
    needs = [
        f' (it needs {needs})' for name, needs in _MISSING.items() if name in str(architectures)
    ]
    raise CheckpointError(
        f'{path}: architectures={architectures} is not supported{"".join(needs)}; supported: {", ".join(supported)}'
    )


def _decoder_fields(path: Path, family: Family, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config.json that describe the decoder, without its type.

    Raises:
      CheckpointError: `model_type` is that of another class than `architectures` names; `transformers` goes by the
        type, and one of the two is wrong.
    """
    fields, whole_type = dict(values), family.model_type
    if family.wrapper in values['architectures']:
        section = values.get('text_config')
        whole_type = family.whole_type or family.model_type.removesuffix('_text')
        if not isinstance(section, dict):
            raise unusable(path, f'text_config={section!r} must be an object')
        rope = section.get('rope_parameters') or section
        if family.same and not rope.get('rope_theta'):
            # The default of its class is not that of the class of the decoder.
            raise unusable(path, 'text_config has no rope_theta; write that of the model into it')
        # The flag of the whole model decides, not that of the section.
        flag = 'tie_word_embeddings'
        fields = {field: value for field, value in section.items() if field != flag}
        if values.get(flag) is not None:
            fields[flag] = values[flag]
    stated = values.get('model_type'), fields.pop('model_type', None)
    for found, expected in zip(stated, (whole_type, family.model_type)):
        if found not in (None, expected):
            reason = (
                f'model_type={found!r} is not {expected!r}, the type of {values["architectures"]}'
            )
            raise unusable(path, reason)
    return fields
