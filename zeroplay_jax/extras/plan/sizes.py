"""The sizes of a model, which determine its memory: of a config.json, or of a published model by its name.

Imports no JAX, so that memory is known before libraries are loaded.
"""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

from zeroplay_jax.policy import families
from zeroplay_jax.types import UserError


class Sizes(NamedTuple):
    """Sizes of a decoder, with the names of ModelConfig; `tied` as config.json says. Biases and norms are left out.

    A mixture has so many experts per layer, of which `per_token` of the size `expert_size` compute a token, and
    one of the size `shared_size` every token.
    Of gated delta nets (policy/delta.py): `delta_layers` of them with `delta_weights` each, whose two states of a slot
    take `state` float32 numbers together.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: int
    experts: int = 0
    per_token: int = 0
    expert_size: int = 0
    delta_layers: int = 0
    delta_weights: int = 0
    state: int = 0
    output_gate: int = 0
    shared_size: int = 0

    @property
    def layer_weights(self) -> int:
        """Matrix weights of all layers."""
        queries = (2 + self.output_gate) * self.heads
        projections = self.hidden_size * (queries + 2 * self.kv_heads) * self.head_dim
        feed_forward = 3 * self.intermediate_size
        if self.experts:
            feed_forward = self.experts * (3 * self.expert_size + 1) + 3 * self.shared_size
        attention_layers = self.layers - self.delta_layers
        mixers = attention_layers * projections + self.delta_layers * self.delta_weights
        return mixers + self.layers * self.hidden_size * feed_forward

    @property
    def weights(self) -> int:
        """Matrix weights of the model."""
        return self.layer_weights + (2 - self.tied) * self.hidden_size * self.vocab_size


# Published models by the beginning of their names: the numbers of `Sizes`, where 1 is tied.
_TABLE = """
qwen2.5-0.5b  896  4864 24 14  2  64 151936 1
qwen2.5-1.5b 1536  8960 28 12  2 128 151936 1
qwen2.5-3b   2048 11008 36 16  2 128 151936 1
qwen2.5-7b   3584 18944 28 28  4 128 152064 0
qwen3-4b     2560  9728 36 32  8 128 151936 1
qwen3-8b     4096 12288 36 32  8 128 151936 0
qwen3-30b-a3b 2048 6144 48 32 4 128 151936 0 128 8 768
llama-3.1-8b 4096 14336 32 32  8 128 128256 0
olmo-3-7b    4096 11008 32 32 32 128 100278 0
qwen3.5-9b   4096 12288 32 16  4 256 248320 0 0 0 0 24 67371008 25165824 1
qwen3.5-35b-a3b 2048 512 40 16 2 256 248320 0 256 8 512 30 33685504 31457280 1 512
"""
KNOWN = {
    name: Sizes(*map(int, numbers)) for name, *numbers in map(str.split, _TABLE.split('\n')[1:-1])
}


def sizes_of(path: str) -> Sizes:
    """Returns the sizes of a folder with a config.json, or of a known model that a path or a name of the Hub ends with.

    Raises:
      CheckpointError: a config.json that cannot be used.
      UserError: neither there nor known.
    """
    if not pathlib.Path(path).is_dir():
        name = known_name(path)
        if not name:
            raise UserError(
                f'{path}: neither a folder with a config.json nor a model whose sizes are known '
                f'({", ".join(KNOWN)}); put its config.json into a folder and give --policy=FOLDER'
            )
        return KNOWN[name]
    _, config = families.read(path)
    sizes = Sizes(
        config.hidden_size,
        families.intermediate_size(config),
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        families.head_dim(config),
        config.vocab_size,
        config.tie_word_embeddings,
    )
    if families.has_experts(config):
        sizes = sizes._replace(
            experts=config.num_experts,
            per_token=config.num_experts_per_tok,
            expert_size=config.moe_intermediate_size,
            shared_size=families.has_shared_expert(config) * sizes.intermediate_size,
        )
    if not families.has_delta(config):
        return sizes
    heads = config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    delta_layers = config.layer_types.count('linear_attention')
    return sizes._replace(
        delta_layers=delta_layers,
        delta_weights=sizes.hidden_size * (2 * keys + 3 * values + 2 * heads),
        state=2 * delta_layers * values * config.linear_key_head_dim,
        output_gate=1,
    )


def known_name(path: str) -> str:
    """Returns the key in KNOWN of the model that the last part of a path names, '' for none."""
    given = path.rstrip('/').rpartition('/')[2].lower() + '-'
    # Not the weights of the model that they are made of.
    if re.search(r'-(gptq|awq|gguf|fp8|bnb|mlx|nf4|w\d+a\d+|int\d|\d-?bit)', given):
        return ''
    return next((name for name in KNOWN if given.startswith(f'{name}-')), '')
