"""Models and TPU slices for `benchmarks.tpu_aot`.

Models are given by their published config.json. The figures of a chip are the vendor's published peaks
(cloud.google.com/tpu/docs, pages of v5e, v5p and v6e); those that a plan needs too are in configuration/machines.py.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any, NamedTuple

from zeroplay_jax.configuration.machines import CHIPS
from zeroplay_jax.policy import families
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


# The sizes of a config.json, in the order of `_config`.
_SIZES = (
    'hidden_size',
    'intermediate_size',
    'num_hidden_layers',
    'num_attention_heads',
    'num_key_value_heads',
    'vocab_size',
    'rope_theta',
    'rms_norm_eps',
)


# The sizes are positional, so that a row of MODELS reads like the table of a model card.
def _config(architecture: str, *sizes: float, tied: bool = False, **further_fields):
    """Returns the fields of a config.json; `sizes` are those of _SIZES."""
    fields = dict(zip(_SIZES, sizes, strict=True))
    return dict(architectures=[architecture], tie_word_embeddings=tied, **fields, **further_fields)


# The fields of each published config.json that determine the programs.
MODELS: dict[str, dict[str, Any]] = {
    'qwen2.5-3b': _config('Qwen2ForCausalLM', 2048, 11008, 36, 16, 2, 151936, 1e6, 1e-6, tied=True),
    'qwen2.5-7b': _config('Qwen2ForCausalLM', 3584, 18944, 28, 28, 4, 152064, 1e6, 1e-6),
    'qwen3-8b': _config(
        'Qwen3ForCausalLM', 4096, 12288, 36, 32, 8, 151936, 1e6, 1e-6, head_dim=128
    ),
    'llama-3.1-8b': _config(
        'LlamaForCausalLM', 4096, 14336, 32, 32, 8, 128256, 5e5, 1e-5, rope_scaling=_LLAMA3
    ),
    'olmo-3-7b': _config(
        'Olmo3ForCausalLM',
        4096,
        11008,
        32,
        32,
        32,
        100278,
        5e5,
        1e-6,
        rope_scaling=_YARN,
        sliding_window=4096,
    ),
}
# Models of `benchmarks.tpu_aot --adapters` and of plans beside these.
FURTHER_MODELS: dict[str, dict[str, Any]] = {
    'qwen2.5-0.5b': _config('Qwen2ForCausalLM', 896, 4864, 24, 14, 2, 151936, 1e6, 1e-6, tied=True),
    'qwen2.5-1.5b': _config(
        'Qwen2ForCausalLM', 1536, 8960, 28, 12, 2, 151936, 1e6, 1e-6, tied=True
    ),
    # Qwen3-4B-Instruct-2507, the model of configs/piplay.py.
    'qwen3-4b': _config(
        'Qwen3ForCausalLM', 2560, 9728, 36, 32, 8, 151936, 5e6, 1e-6, tied=True, head_dim=128
    ),
    'qwen3-30b-a3b': _config(
        'Qwen3MoeForCausalLM',
        2048,
        6144,
        48,
        32,
        4,
        151936,
        1e6,
        1e-6,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    'qwen3.5-9b': _config('Qwen3_5ForCausalLM', 4096, 12288, 32, 16, 4, 248320, 1e7, 1e-6),
}


class Chip(NamedTuple):
    """Peak figures of one chip.

    Attributes:
      flops: bfloat16 operations per second.
      bandwidth: bytes per second of HBM.
      memory: bytes of HBM that a program may use.
      links: bytes per second over its interconnect links.
      clock: cycles per second. The vendor does not publish them; they follow from the peak operations and the size of
        the matrix units (128 × 128, of v6e 256 × 256).
    """

    flops: float
    bandwidth: float
    memory: float
    links: float
    clock: float

    def seconds(self, cycles: float, moved: float = 0.0) -> float:
        """Returns the seconds of cycles and of bytes that go over the links."""
        return cycles / self.clock + moved / self.links


class Slice(NamedTuple):
    """A TPU slice of one generation.

    Attributes:
      chip: figures of its chips.
      host: topology of one host (four chips), on which a sampler runs.
    """

    chip: Chip
    host: str


# Generation → its slices. A sampler runs within one host, a learner over the whole slice.
_SLICES = {
    'v5e': Slice(Chip(*CHIPS['v5e'][:3], 200e9, 1.5e9), 'v5e:2x2'),
    'v5p': Slice(Chip(*CHIPS['v5p'][:3], 600e9, 1.75e9), 'v5p:2x2x1'),
    'v6e': Slice(Chip(*CHIPS['v6e'][:3], 448e9, 1.75e9), 'v6e:2x2'),
}


def generation(topology: str) -> str:
    """Returns 'v5e' of 'v5e:4x4'."""
    return topology.partition(':')[0]


def _slices(*topologies: str) -> dict[str, Slice]:
    return {topology: _SLICES[generation(topology)] for topology in topologies}


TOPOLOGIES = _slices('v5e:4x4', 'v5e:8x8', 'v5p:2x2x4', 'v6e:4x4')
# Slices of `benchmarks.tpu_aot --adapters`, the smallest first.
ADAPTER_TOPOLOGIES = _slices('v5e:2x2', 'v5e:2x4', 'v5e:4x4', 'v6e:2x4', 'v5p:2x2x1')


def model_config(name: str, **overrides) -> ModelConfig:
    """Returns the ModelConfig of a row of MODELS.

    Args:
      name: key of MODELS or FURTHER_MODELS.
      **overrides: as in `families.read_config`.
    """
    # Written to a folder, so that the config is read by the same code as that of a real checkpoint.
    fields = (MODELS | FURTHER_MODELS)[name]
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, 'config.json').write_text(json.dumps(fields), encoding='utf-8')
        return families.read_config(folder, **overrides)
