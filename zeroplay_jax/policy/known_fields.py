"""Which fields of a config.json a family reads, which change nothing, and which are refused.

The config classes of `transformers` accept any field. One that its class has changes the computation, or is known not
to; one that it lacks is ignored there and here, after a warning, because whoever wrote it may have meant something.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Fields of all families that are read.
_READ = frozenset(
    [
        'head_dim',
        'hidden_size',
        'intermediate_size',
        'max_position_embeddings',
        'num_attention_heads',
        'num_hidden_layers',
        'num_key_value_heads',
        'partial_rotary_factor',
        'rms_norm_eps',
        'rope_parameters',
        'rope_scaling',
        'rope_theta',
        'tie_word_embeddings',
        'vocab_size',
    ]
)
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
_WITHOUT_EFFECT = frozenset(
    [
        'architectures',
        'attention_dropout',
        'attn_implementation',
        'auto_map',
        'bad_words_ids',
        'begin_suppress_tokens',
        'bos_token_id',
        'cache_implementation',
        'chunk_size_feed_forward',
        'decoder_start_token_id',
        'diversity_penalty',
        'do_sample',
        'dtype',
        'early_stopping',
        'encoder_no_repeat_ngram_size',
        'eos_token_id',
        'exponential_decay_length_penalty',
        'finetuning_task',
        'forced_bos_token_id',
        'forced_eos_token_id',
        'id2label',
        'initializer_range',
        'is_decoder',
        'label2id',
        'length_penalty',
        'max_length',
        'min_length',
        'model_type',
        'name_or_path',
        'no_repeat_ngram_size',
        'num_beam_groups',
        'num_beams',
        'num_labels',
        'num_return_sequences',
        'output_attentions',
        'output_hidden_states',
        'output_scores',
        'pad_token_id',
        'prefix',
        'pretraining_tp',
        'problem_type',
        'remove_invalid_values',
        'repetition_penalty',
        'return_dict',
        'return_dict_in_generate',
        'sep_token_id',
        'suppress_tokens',
        'task_specific_params',
        'temperature',
        'tokenizer_class',
        'top_k',
        'top_p',
        'torch_dtype',
        'torchscript',
        'transformers_version',
        'typical_p',
        'unsloth_fixed',
        'unsloth_version',
        'use_bfloat16',
        'use_cache',
    ]
)
# Fields beside the decoder's section in a model with an encoder of images.
WRAPPER_FIELDS = frozenset(
    [
        'boi_token_index',
        'eoi_token_index',
        'image_token_index',
        'mm_tokens_per_image',
        'text_config',
        'tie_word_embeddings',
        'vision_config',
    ]
)
_UNSET: tuple = (None, False, 0, '', [], {})
_SHOWN_CHARACTERS = 60


def unsupported(values: Mapping[str, Any]) -> str:
    """Returns why the value of a field is not supported, such as "mlp_bias=True … (only False)"; '' if all are."""
    for name, supported in _SUPPORTED_VALUES.items():
        value = values.get(name)
        if value is None or value in supported:
            continue
        return refusal(name, value, supported)
    return ''


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
        _warn(path, ', '.join(shown))


# Cached: a command reads the file several times.
@functools.cache
def _warn(path: Path, fields: str) -> None:
    print(
        f'warning: {path}: ignored, because models of this architecture have no such field: {fields}',
        file=sys.stderr,
    )
