"""Folders as others publish them: read as `transformers` and PEFT read them, refused in one line, or said."""

import dataclasses
import json

import numpy as np
import pytest
import tiny
import transformers
from safetensors.numpy import load_file
from small_policies import change_tensors

from zeroplay_jax.policy import families, hf
from zeroplay_jax.policy.families import FAMILIES

# Fields of config classes that change neither logits nor gradients.
WITHOUT_EFFECT = set(
    """
architectures attention_dropout bos_token_id chunk_size_feed_forward dtype eos_token_id id2label initializer_range
is_encoder_decoder label2id output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type
return_dict router_aux_loss_coef transformers_version use_cache
""".split()
)
# Fields that shape.py, or the class itself, reads.
READ = set(
    """
head_dim hidden_act hidden_activation hidden_size intermediate_size layer_types linear_conv_kernel_dim
linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim max_position_embeddings
max_window_layers moe_intermediate_size norm_topk_prob num_attention_heads num_experts num_experts_per_tok
num_hidden_layers num_key_value_heads query_pre_attn_scalar rms_norm_eps rope_parameters sliding_window
shared_expert_intermediate_size tie_word_embeddings use_sliding_window vocab_size
""".split()
)


@pytest.mark.parametrize('name', FAMILIES)
def test_every_field_of_a_config_class_is_read_without_effect_or_limited(name):
    """Fails where a version of transformers adds a field: read it, or say here or in families.py what it means."""
    family = FAMILIES[name]
    config_class = transformers.CONFIG_MAPPING[family.model_type]
    limited = families._ONLY.keys() | family.only.keys()
    for field in dataclasses.fields(config_class):
        assert field.name in WITHOUT_EFFECT | READ | limited, field.name


# Heads


def test_the_head_of_a_decoder_in_another_model_is_kept(tmp_path):
    _, whole = tiny.make_wrapped_model()
    whole.save_pretrained(str(tmp_path))
    head = np.random.default_rng(0).normal(size=(80, 48)).astype('f')
    change_tensors(
        tmp_path / 'model.safetensors', lambda tensors: tensors.update({'lm_head.weight': head})
    )
    config = hf.read_config(tmp_path)
    assert not config.tied
    params = hf.load(tmp_path, config)
    hf.save(tmp_path / 'out', config, params, like=tmp_path)
    written = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert written['tie_word_embeddings'] is False
    stored = load_file(tmp_path / 'out' / 'model.safetensors')
    np.testing.assert_array_equal(stored['lm_head.weight'], head)
