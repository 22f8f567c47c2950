"""The config.json of a checkpoint folder: model families as data, known fields, and checked values.

Imports no JAX, because texts are encoded where none is loaded.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zeroplay_jax.policy.adapter_config import base_folder
from zeroplay_jax.retrieval import json_text
from zeroplay_jax.settings.kinds import warn_once
from zeroplay_jax.types import UserError


def _words(text: str) -> frozenset[str]:
    """Returns the names in a text."""
    return frozenset(text.split())


# ---- family table ----------------------------------------------------------------------------------
#
# Model families as data: which switches of the decoder each has, and what its config.json may leave out.


class Family(NamedTuple):
    """A model family: its name in config.json, switches of ModelConfig, and defaults of absent fields.

    Attributes:
      architecture: class name in the field `architectures`.
      wrapper: class name of models that have such a decoder among other parts; its fields are then in the section
        `text_config`. '': none.
      model_type: field `model_type` of a decoder alone; `transformers` chooses the class by it.
      wrapper_type: the same of models with other parts.
      fields: fields of config.json that are read beside those of all families (policy/config_fields.py).
      max_positions: default of `max_position_embeddings`.
      qkv_bias, qk_norm, norms, norm_offset, activation, scale_embedding, scale_sliding: as in ModelConfig.
      full_every: without the field `layer_types`, every n-th layer has full attention and the others a sliding window;
        0: all layers have full attention.
      has_delta: whether layers of the type 'linear_attention' are gated delta nets; each attention has an output gate.
      rope_theta: default base of the rotary frequencies.
      sliding_theta: the same for layers with a sliding window; 0: that of the other layers.
      norm_eps: default of `rms_norm_eps`, as in transformers.
      head_dim: default size of a head; 0: hidden_size / num_attention_heads.
      has_experts: whether every layer is a mixture of experts.
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
    norm_eps: float = 1e-6
    head_dim: int = 0
    has_experts: bool = False
    has_delta: bool = False
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
    'query_pre_attn_scalar': 256,
    'tie_word_embeddings': True,
}

# Fields that some families share: windows that a field enables, and the length before an extension of the positions
# where it may be stated apart from the other rotary parameters.
_QWEN_FIELDS = _words("""
hidden_act layer_types max_window_layers original_max_position_embeddings sliding_window use_sliding_window
""")
_GEMMA3_FIELDS = _words("""
hidden_activation layer_types query_pre_attn_scalar rope_local_base_freq sliding_window sliding_window_pattern
""")
_QWEN_MOE_FIELDS = _words("""
decoder_sparse_step hidden_act max_window_layers mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
num_experts_per_tok num_local_experts original_max_position_embeddings output_router_logits router_aux_loss_coef
sliding_window use_sliding_window
""")
_QWEN3_5_FIELDS = _words("""
attn_output_gate full_attention_interval hidden_act layer_types linear_conv_kernel_dim linear_key_head_dim
linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_ssm_dtype output_gate_type
partial_rotary_factor
""")
# Fields of gated delta nets and of the attention between them -> the values that the decoder implements.
_DELTA_VALUES = {
    'attn_output_gate': (True,),
    'mamba_ssm_dtype': ('float32',),
    'output_gate_type': ('swish',),
}
_QWEN3_5_DEFAULTS = {
    'full_attention_interval': 4,
    'linear_conv_kernel_dim': 4,
    'linear_key_head_dim': 128,
    'linear_value_head_dim': 128,
    'linear_num_key_heads': 16,
    'linear_num_value_heads': 32,
    'partial_rotary_factor': 0.25,
    'tie_word_embeddings': False,
}
FAMILIES = {
    'qwen2': Family('Qwen2ForCausalLM', 'qwen2', 32768, _QWEN_FIELDS, qkv_bias=True),
    'qwen3': Family('Qwen3ForCausalLM', 'qwen3', 32768, _QWEN_FIELDS, qk_norm='head', head_dim=128),
    'qwen3_moe': Family(
        'Qwen3MoeForCausalLM',
        'qwen3_moe',
        32768,
        _QWEN_MOE_FIELDS,
        qk_norm='head',
        has_experts=True,
    ),
    'llama': Family(
        'LlamaForCausalLM',
        'llama',
        2048,
        _words('hidden_act original_max_position_embeddings'),
    ),
    'olmo3': Family(
        'Olmo3ForCausalLM',
        'olmo3',
        2048,
        _words('hidden_act layer_types sliding_window'),
        qk_norm='projection',
        norms='after',
        full_every=4,
        scale_sliding=False,
        rope_theta=500000.0,
        norm_eps=1e-5,
    ),
    'gemma3': Family(
        'Gemma3ForCausalLM',
        'gemma3_text',
        131072,
        _GEMMA3_FIELDS,
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
    'qwen35': Family(
        'Qwen3_5ForCausalLM',
        'qwen3_5_text',
        32768,
        _QWEN3_5_FIELDS,
        wrapper='Qwen3_5ForConditionalGeneration',
        wrapper_type='qwen3_5',
        qk_norm='head',
        norm_offset=1.0,
        head_dim=256,
        has_delta=True,
        defaults=_QWEN3_5_DEFAULTS,
    ),
}


_ARCHITECTURES = [family.architecture for family in FAMILIES.values()]
_ARCHITECTURES += [family.wrapper for family in FAMILIES.values() if family.wrapper]
# The sentence of error messages that lists them.
SUPPORTED = f'supported: {", ".join(_ARCHITECTURES)}'
# Beginning of the names of architectures that are refused with a reason of their own.
REFUSED = {
    'Qwen3_5Moe': 'its gated delta nets alternate with mixtures of experts; the dense models are supported',
    'Qwen3Next': 'it mixes experts, and orders the projections of its gated delta nets in another way than Qwen3.5',
    'Gemma2': 'it caps its logits, which the decoder does not compute',
}


# ---- known fields ----------------------------------------------------------------------------------
#
# Which fields of a config.json a family reads, which change nothing, and which are refused.
#
# The config classes of `transformers` accept any field. One that its class has changes the computation, or is known not
# to; one that it lacks is ignored there and here, after a warning, because whoever wrote it may have meant something.


# Fields of all families that are read.
_READ = _words("""
head_dim hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
num_key_value_heads partial_rotary_factor rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings
vocab_size
""")
# Fields with which a model would compute something that the decoder does not implement -> their values with which it
# does not, beside null. They are refused even where the family's class ignores them: a checkpoint that states one was
# made for another computation.
_SUPPORTED_VALUES: dict[str, tuple] = {
    'add_cross_attention': (False,),
    'attention_bias': (False,),
    'attention_multiplier': (),
    'attn_logit_softcapping': (),
    'clip_qkv': (),
    'embedding_multiplier': (1,),
    'final_logit_softcapping': (),
    'is_encoder_decoder': (False,),
    'logits_scaling': (1,),
    'mlp_bias': (False,),
    'n_routed_experts': (0,),
    'no_rope_layers': ([],),
    'num_experts': (0,),
    'num_local_experts': (0,),
    'partial_rotary_factor': (1,),
    'per_layer_config': ({}, []),
    'pruned_heads': ({},),
    'quantization_config': (),
    'residual_multiplier': (1,),
    'rope_interleave': (False,),
    'rope_interleaved': (False,),
    'use_bidirectional_attention': (False,),
}
# Fields that change neither logits nor gradients: descriptions, defaults of generation (which older versions wrote
# here), settings of other tasks, and regularisation of a training other than ours.
_WITHOUT_EFFECT = _words("""
architectures attention_dropout attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
cache_implementation chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping
encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
forced_eos_token_id id2label initializer_range is_decoder label2id length_penalty max_length min_length model_type
mtp_num_hidden_layers mtp_use_dedicated_embeddings
name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type remove_invalid_values
repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p unsloth_fixed unsloth_version
use_bfloat16 use_cache
""")
# Fields beside the decoder's section in a model with an encoder of images.
WRAPPER_FIELDS = _words("""
boi_token_index eoi_token_index image_token_id image_token_index mm_tokens_per_image text_config tie_word_embeddings
video_token_id vision_config vision_end_token_id vision_start_token_id
""")
_UNSET: tuple = (None, False, 0, '', [], {})
_SHOWN_CHARACTERS = 60


def refusal(name: str, value: Any, supported: tuple) -> str:
    """Returns the message about a value that is not supported."""
    choices = ', '.join(map(repr, supported)) or 'null'
    return f'{name}={value!r} is not supported (only {choices})'


def is_known(name: str) -> bool:
    """Returns whether a field is without effect, or refused where it would have one."""
    return name in _WITHOUT_EFFECT or name in _SUPPORTED_VALUES


def is_read(name: str, family_fields: frozenset[str]) -> bool:
    """Returns whether a field determines what a decoder computes.

    Args:
      name: of the field.
      family_fields: those of the family beside the ones that all families have.
    """
    return name in _READ or name in family_fields


def warn_of_unknown(path: Path, values: Mapping[str, Any], known: frozenset[str]) -> None:
    """Prints one warning with the fields of an object that neither the family nor the tables here know.

    Args:
      path: of config.json.
      values: the object.
      known: fields that are read.
    """
    shown = []
    for name, value in sorted(values.items()):
        is_private = name.startswith('_')
        if is_private or is_known(name) or is_read(name, known) or value in _UNSET:
            continue
        shown.append(f'{name}={value!r}'[:_SHOWN_CHARACTERS])
    if shown:
        fields = ', '.join(shown)
        warn_once(
            f'{path}: ignored, because models of this architecture have no such field: {fields}'
        )


# ---- config fields ---------------------------------------------------------------------------------


# Sizes several times those of the largest models.
_LARGEST_SIZE = 1 << 20
_LARGEST = {
    'num_hidden_layers': 2048,
    'vocab_size': 1 << 23,
    'max_position_embeddings': 1 << 40,
    'original_max_position_embeddings': 1 << 40,
    'sliding_window': 1 << 40,
}


# What to do about a value that is damaged, and about one that the decoder does not implement.
OTHER_CONFIG = 'correct it, or take the config.json that belongs to the weights'
OTHER_CHECKPOINT = 'the decoder does not compute it; take a checkpoint without it'


class CheckpointError(UserError):
    """A checkpoint folder that cannot be used; the message names the file or field."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """A JSON object of config.json.

    Attributes:
      path: path of config.json, for error messages.
      values: the object.
      prefix: its location in the file, such as 'rope_parameters.', for error messages.
    """

    path: Path
    values: dict[str, Any]
    prefix: str = ''

    def error(self, message: str, fix: str = OTHER_CONFIG) -> CheckpointError:
        return CheckpointError(f'{self.path}: {message}; {fix}')

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def check_value(self, name: str, supported: tuple) -> None:
        """Raises CheckpointError unless a field has one of the values that the decoder implements, or none."""
        value = self.get(name)
        if value is not None and value not in supported:
            raise self.error(self.prefix + refusal(name, value, supported), OTHER_CHECKPOINT)

    def section(self, name: str) -> Fields:
        """Returns a nested object; null and absent count as empty."""
        values = self.get(name) or {}
        if not isinstance(values, dict):
            raise self.error(f'{self.prefix}{name}={values!r} must be an object')
        return Fields(self.path, values, f'{self.prefix}{name}.')

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = self._positive(name, default, int)
        most = _LARGEST.get(name, _LARGEST_SIZE)
        # Refused here, before anything of that size is made.
        if value > most:
            raise self.error(
                f'{self.prefix}{name}={value} is larger than in any model (at most {most})'
            )
        return value

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


def read_fields(path: Path) -> Fields:
    """Returns the JSON object in config.json; CheckpointError if it cannot be read."""
    fix = 'name a Hugging Face checkpoint folder'
    try:
        values = json_text.read_object(path, float)
    except (OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise CheckpointError(
            f'{path}: cannot be read as a model config ({reason}); {fix}'
        ) from None
    return Fields(path, values)


def vocabulary_size(folder) -> int:
    """Returns the number of token ids of the model in a folder; CheckpointError if config.json does not say it."""
    _, fields = family_fields(base_folder(folder))
    return fields.positive_int('vocab_size')


def is_wrapped(folder) -> bool:
    """Returns whether a folder's model has other parts beside the decoder, such as an encoder of images."""
    fields = read_fields(base_folder(folder) / 'config.json')
    family = FAMILIES[_family_name(fields)]
    return bool(family.wrapper) and family.wrapper in fields.get('architectures')


def decoder_config(path: Path) -> dict[str, Any]:
    """Returns the content of a config.json that describes the decoder alone."""
    values = json_text.read_object(path, float)
    if 'text_config' not in values:
        return values
    family = FAMILIES[_family_name(read_fields(path))]
    text = dict(values['text_config'])
    # Written in one of the two sections, depending on the version that wrote the folder.
    for name in ('dtype', 'torch_dtype', 'bos_token_id', 'eos_token_id', 'pad_token_id'):
        if name not in text and name in values:
            text[name] = values[name]
    return text | {'architectures': [family.architecture], 'model_type': family.model_type}


def family_fields(folder: Path) -> tuple[str, Fields]:
    """Returns the key in FAMILIES of a folder's model, and the fields of its decoder with the family's defaults.

    Only fields that the family's class has are returned. A warning names the ones that have no meaning.

    Raises:
      CheckpointError: the family is unknown, or a field asks for a computation that the decoder does not implement.
    """
    fields = read_fields(folder / 'config.json')
    name = _family_name(fields)
    family = FAMILIES[name]
    known = family.fields
    if family.wrapper and family.wrapper in fields.get('architectures'):
        _check_type(fields, family.wrapper, family.wrapper_type)
        _check_supported(fields, known)
        warn_of_unknown(fields.path, fields.values, WRAPPER_FIELDS)
        # The flag of the whole model decides, not that of the section.
        flag = fields.boolean('tie_word_embeddings', family.defaults['tie_word_embeddings'])
        section = fields.section('text_config')
        fields = dataclasses.replace(section, values=section.values | {'tie_word_embeddings': flag})
    _check_type(fields, family.architecture, family.model_type)
    _check_supported(fields, known)
    for field, supported in _DELTA_VALUES.items() if family.has_delta else ():
        fields.check_value(field, supported)
    warn_of_unknown(fields.path, fields.values, known)
    read = {field: value for field, value in fields.values.items() if is_read(field, known)}
    defaults = {'max_position_embeddings': family.max_positions, **family.defaults}
    for field, default in defaults.items():
        if read.get(field) is None:
            read[field] = default
    return name, dataclasses.replace(fields, values=read)


def head_counts(fields: Fields) -> tuple[int, int]:
    """Returns the heads of queries, and those of keys and values; CheckpointError if they do not form groups."""
    heads = fields.positive_int('num_attention_heads')
    kv_heads = fields.positive_int('num_key_value_heads', heads)
    if heads % kv_heads:
        raise fields.error(
            f'num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}'
        )
    return heads, kv_heads


# Fields of a mixture of experts with which layers would differ → their values with which all are alike.
_ALIKE = {'decoder_sparse_step': (1,), 'mlp_only_layers': ([],), 'use_sliding_window': (False,)}
_MOST_EXPERTS = 1 << 15


def expert_numbers(fields: Fields) -> tuple[int, int, int]:
    """Returns experts per layer, experts per token and width of an expert of a mixture.

    Raises:
      CheckpointError: its layers differ, or the numbers contradict each other.
    """
    for name, supported in _ALIKE.items():
        fields.check_value(name, supported)
    # Newer versions of `transformers` write the second name.
    name = 'num_experts' if fields.get('num_experts') is not None else 'num_local_experts'
    count = fields.positive_int(name, 128)
    per_token = fields.positive_int('num_experts_per_tok', 8)
    if not per_token <= count <= _MOST_EXPERTS:
        raise fields.error(
            f'num_experts_per_tok={per_token} must be at most {name}={count}, and that at most {_MOST_EXPERTS}'
        )
    return count, per_token, fields.positive_int('moe_intermediate_size', 768)


def _check_type(fields: Fields, architecture: str, model_type: str) -> None:
    """Raises CheckpointError if `model_type` names another class than `architectures` does.

    One of the two fields is wrong, and `transformers` goes by the type.
    """
    stated = fields.get('model_type')
    if stated not in (None, model_type):
        raise fields.error(
            f'{fields.prefix}model_type={stated!r} is not the type of {architecture}, which is {model_type!r}',
            fix='correct the wrong one',
        )


def _check_supported(fields: Fields, known: frozenset[str]) -> None:
    """Raises CheckpointError for a field, not one that the family reads, whose value the decoder does not implement."""
    for name, supported in _SUPPORTED_VALUES.items():
        if name not in known:
            fields.check_value(name, supported)


def _family_name(fields: Fields) -> str:
    """Returns the key in FAMILIES of the architecture that config.json names."""
    architectures = fields.get('architectures')
    reason = ''
    if isinstance(architectures, list):
        for name, family in FAMILIES.items():
            if family.architecture in architectures or family.wrapper in architectures:
                return name
        for beginning, why in REFUSED.items():
            if any(str(name).startswith(beginning) for name in architectures):
                reason = f': {why}'
    raise fields.error(f'architectures={architectures} is not supported{reason}', fix=SUPPORTED)


# ---- types of layers -------------------------------------------------------------------------------


DEFAULT_WINDOW = 4096
LAYER_TYPES = ('full_attention', 'sliding_attention')
_DELTA_LAYER_TYPES = ('full_attention', 'linear_attention')


def layer_types(fields: Fields, family: Family, layers: int) -> list[str]:
    """Returns the type of every layer; CheckpointError for a list that does not fit the family."""
    types = fields.get('layer_types')
    # Older folders do not list the types; rules of the family determine them.
    if types is None:
        types = _default_layer_types(fields, family, layers)
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise fields.error('layer_types must be a list of texts')
    if len(types) != layers:
        raise fields.error(f'layer_types has {len(types)} entries for num_hidden_layers={layers}')
    known_types = _DELTA_LAYER_TYPES if family.has_delta else LAYER_TYPES
    unknown_types = set(types) - set(known_types)
    if unknown_types:
        raise fields.error(
            f'layer_types: {min(unknown_types)!r} is not supported (only {", ".join(known_types)})',
            OTHER_CHECKPOINT,
        )
    return types


def has_sliding_layers(fields: Fields, family: Family) -> bool:
    """Returns whether sliding windows are enabled: by a field for Qwen, always for families whose layers alternate."""
    # Null and absent differ in this field: null is no window.
    if fields.values.get('sliding_window', DEFAULT_WINDOW) is None:
        return False
    return bool(family.full_every) or fields.boolean('use_sliding_window', False)


def _default_layer_types(fields: Fields, family: Family, layers: int) -> list[str]:
    """Returns the type of every layer where config.json has no `layer_types`, as transformers derives it."""
    types = ['full_attention'] * layers
    if family.has_delta:
        full_every = fields.positive_int('full_attention_interval')
        for i in range(layers):
            if (i + 1) % full_every:
                types[i] = 'linear_attention'
    elif family.full_every:
        full_every = fields.positive_int('sliding_window_pattern', family.full_every)
        for i in range(layers):
            if (i + 1) % full_every:
                types[i] = 'sliding_attention'
    elif has_sliding_layers(fields, family):
        # Despite its name, this field is the number of layers at the bottom that have no window.
        first_sliding = fields.values.get('max_window_layers', 28)
        if not isinstance(first_sliding, int) or isinstance(first_sliding, bool):
            raise fields.error(f'max_window_layers={first_sliding!r} must be an int')
        for i in range(layers):
            if i >= first_sliding:
                types[i] = 'sliding_attention'
    return types
