"""Model families as data: which switches of the decoder each has, and what its config.json may leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Family(NamedTuple):
    """A model family: its name in config.json, switches of ModelConfig, and defaults of absent fields.

    Attributes:
      architecture: class name in the field `architectures`.
      wrapper: class name of models that have such a decoder among other parts; its fields are then in the section
        `text_config`. '': none.
      model_type: field `model_type` of a decoder alone; `transformers` chooses the class by it.
      wrapper_type: the same of models with other parts.
      fields: fields of config.json that are read beside those of all families (policy/known_fields.py).
      max_positions: default of `max_position_embeddings`.
      qkv_bias, qk_norm, norms, norm_offset, activation, scale_embedding, scale_sliding: as in ModelConfig.
      full_every: without the field `layer_types`, every n-th layer has full attention and the others a sliding window;
        0: all layers have full attention.
      rope_theta: default base of the rotary frequencies.
      sliding_theta: the same for layers with a sliding window; 0: that of the other layers.
      head_dim: default size of a head; 0: hidden_size / num_attention_heads.
      defaults: values of fields that config.json leaves out.
    """

    architecture: str
    model_type: str
    max_positions: int
    fields: frozenset[str]
    wrapper: str = ''
    wrapper_type: str = ''
    qkv_bias: bool = False
    qk_norm: str = 'none'
    norms: str = 'before'
    norm_offset: float = 0.0
    activation: str = 'silu'
    scale_embedding: bool = False
    full_every: int = 0
    scale_sliding: bool = True
    rope_theta: float = 10000.0
    sliding_theta: float = 0.0
    head_dim: int = 0
    defaults: Mapping[str, Any] = {}


# Published folders of Gemma 3 leave out the fields that have these values.
_GEMMA3_DEFAULTS = {
    'vocab_size': 262208,
    'hidden_size': 2304,
    'intermediate_size': 9216,
    'num_hidden_layers': 26,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'head_dim': 256,
    'rms_norm_eps': 1e-6,
    'query_pre_attn_scalar': 256,
    'tie_word_embeddings': True,
}

# Fields that some families share: windows that a field enables, and the length before an extension of the positions
# where it may be stated apart from the other rotary parameters.
_QWEN_FIELDS = frozenset(
    [
        'hidden_act',
        'layer_types',
        'max_window_layers',
        'original_max_position_embeddings',
        'sliding_window',
        'use_sliding_window',
    ]
)
FAMILIES = {
    'qwen2': Family('Qwen2ForCausalLM', 'qwen2', 32768, _QWEN_FIELDS, qkv_bias=True),
    'qwen3': Family('Qwen3ForCausalLM', 'qwen3', 32768, _QWEN_FIELDS, qk_norm='head', head_dim=128),
    'llama': Family(
        'LlamaForCausalLM',
        'llama',
        2048,
        frozenset(['hidden_act', 'original_max_position_embeddings']),
    ),
    'olmo3': Family(
        'Olmo3ForCausalLM',
        'olmo3',
        2048,
        frozenset(['hidden_act', 'layer_types', 'sliding_window']),
        qk_norm='projection',
        norms='after',
        full_every=4,
        scale_sliding=False,
        rope_theta=500000.0,
    ),
    'gemma3': Family(
        'Gemma3ForCausalLM',
        'gemma3_text',
        131072,
        frozenset(
            [
                'hidden_activation',
                'layer_types',
                'query_pre_attn_scalar',
                'rope_local_base_freq',
                'sliding_window',
                'sliding_window_pattern',
            ]
        ),
        wrapper='Gemma3ForConditionalGeneration',
        wrapper_type='gemma3',
        qk_norm='head',
        norms='both',
        norm_offset=1.0,
        activation='gelu_tanh',
        scale_embedding=True,
        full_every=6,
        scale_sliding=False,
        rope_theta=1000000.0,
        sliding_theta=10000.0,
        defaults=_GEMMA3_DEFAULTS,
    ),
}


def _supported() -> str:
    """Returns the sentence of error messages that lists the architectures."""
    names = [family.architecture for family in FAMILIES.values()]
    names += [family.wrapper for family in FAMILIES.values() if family.wrapper]
    return 'supported: ' + ', '.join(names)


SUPPORTED = _supported()
# Beginning of the names of architectures that are refused with a reason of their own.
REFUSED = {
    'Qwen3_5': 'its gated delta-net layers (linear attention) keep a state that the key/value cache does not hold',
    'Qwen3Next': 'its gated delta-net layers (linear attention) keep a state that the key/value cache does not hold',
    'Gemma2': 'it caps its logits, which the decoder does not compute',
}
