"""Models and TPU slices whose programs are compiled ahead of time.

Models are given by their published config.json. The figures of a chip are in extras/plan/machines.py.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

from zeroplay_jax.extras.plan.sizes import KNOWN
from zeroplay_jax.policy import shape
from zeroplay_jax.policy.transformer import ModelConfig

# Rotary position scaling of Llama 3.1, and YaRN (Peng et al. 2023) as in OLMo 3.
_LLAMA3 = dict(
    rope_type='llama3',
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_YARN = dict(
    rope_type='yarn',
    factor=8.0,
    attention_factor=1.2079441541679836,
    beta_fast=32.0,
    beta_slow=1.0,
    original_max_position_embeddings=8192,
)


_QWEN2, _QWEN3 = 'Qwen2ForCausalLM', 'Qwen3ForCausalLM'
# What a config.json has beside the sizes: architecture, base of the rotary positions, further fields.
_FIELDS: dict[str, tuple[str, float, dict[str, Any]]] = {
    'qwen2.5-0.5b': (_QWEN2, 1e6, {}),
    'qwen2.5-1.5b': (_QWEN2, 1e6, {}),
    'qwen2.5-3b': (_QWEN2, 1e6, {}),
    'qwen2.5-7b': (_QWEN2, 1e6, {}),
    # Qwen3-4B-Instruct-2507, the model of configs/piplay.py.
    'qwen3-4b': (_QWEN3, 5e6, dict(head_dim=128)),
    'qwen3-8b': (_QWEN3, 1e6, dict(head_dim=128)),
    'qwen3-30b-a3b': (
        'Qwen3MoeForCausalLM',
        1e6,
        dict(
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
    ),
    'llama-3.1-8b': (
        'LlamaForCausalLM',
        5e5,
        dict(rms_norm_eps=1e-5, rope_scaling=_LLAMA3),
    ),
    'olmo-3-7b': (
        'Olmo3ForCausalLM',
        5e5,
        dict(rms_norm_eps=1e-6, rope_scaling=_YARN, sliding_window=4096),
    ),
    'qwen3.5-9b': ('Qwen3_5ForCausalLM', 1e7, {}),
    'qwen3.5-35b-a3b': ('Qwen3_5MoeForCausalLM', 1e7, {}),
}


def _config(name: str) -> dict[str, Any]:
    """Returns the fields of a config.json that determine the programs; the sizes are those of `sizes.KNOWN`."""
    sizes = KNOWN[name]
    architecture, rope_theta, further_fields = _FIELDS[name]
    return dict(
        architectures=[architecture],
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocab_size,
        tie_word_embeddings=bool(sizes.tied),
        rope_theta=rope_theta,
        **further_fields,
    )


MODELS = {name: _config(name) for name in _FIELDS}
# Slices on which adapters are trained, the smallest first. A learner runs over the whole slice.
SLICES = ('v5e:2x2', 'v5e:2x4', 'v5e:4x4', 'v6e:2x4', 'v5p:2x2x1')
# Chips of a host, in all of them.
CHIPS_OF_HOST = 4


# Generation of chips → topology of one host (four chips), on which a sampler runs.
HOSTS = {'v5e': 'v5e:2x2', 'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2'}


def model_config(name: str, **overrides) -> ModelConfig:
    """Returns the ModelConfig of a row of MODELS; `overrides` are those of `shape.read_config`."""
    # Written to a folder, so that the config is read by the same code as that of a real checkpoint.
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, 'config.json')
        path.write_text(json.dumps(MODELS[name]), encoding='utf-8')
        return shape.read_config(folder, **overrides)
