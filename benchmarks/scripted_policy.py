"""A policy of true shapes without training: random weights of Qwen2.5-0.5B in which a short script is written by hand.

A random policy of this size never writes a call, a question or an answer, so that nothing of a run but its limits would
happen. Here one neuron of the first layer per piece of `SCRIPT` recognises the piece and adds the embeddings of what
may follow, many times as large as all else in the residual stream. Everything is computed as in a real model, by
matrices of its shapes; only what is written is foreseen: a search or the end with equal probability, one of 16 queries,
one of eight questions, one of two answers. Each piece is one token and stands at one place of the script, so that the
last token says what follows.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from zeroplay_jax.types import UserError

# config.json of Qwen2.5-0.5B-Instruct.
ARCHITECTURE: dict[str, Any] = dict(
    architectures=['Qwen2ForCausalLM'],
    model_type='qwen2',
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    hidden_act='silu',
    tie_word_embeddings=True,
    use_sliding_window=False,
    torch_dtype='bfloat16',
    eos_token_id=151645,
)
_NATIONS = ('American', 'British', 'German', 'French')
_THINGS = (' film', ' river', ' king', ' album')
_BEGINNINGS = ('What', 'Which')
_SUBJECTS = (' city', ' war', ' year', ' band')
_ANSWERS = ('Paris', 'London')
# Pieces in the order in which they are written; alternatives stand together. A turn begins after a line end.
_TURN: tuple[tuple[str, ...], ...] = (('\n',), ('<tool_call>', '<'))
_SEARCH = (
    *zip(('<tool_call>', '{"', 'name', '":"', 'search', '","', 'arguments', '":{"', 'query')),
    *(('_list',), ('":["',), _NATIONS, _THINGS, ('"]}',), ('}',), ('</tool_call>',)),
    ('<|im_end|>',),
)
_END = (
    *zip(('<', 'question', '>\n\n')),
    *(_BEGINNINGS, _SUBJECTS),
    *zip(('?</', 'quest', 'ion', '><', 'answer', '>\n')),
    _ANSWERS,
    *zip(('</', 'ans', 'wer', '>', '<|im_end|>')),
)
# Piece → pieces that may follow.
SCRIPT: dict[str, tuple[str, ...]] = {
    piece: following
    for part in (_TURN, _SEARCH, _END)
    for pieces, following in zip(part, part[1:])
    for piece in pieces
}
# Standard deviation of random weights, as of models of this family before training.
_DEVIATION = 0.02
# Length of what a neuron of the script adds, relative to its activation of about the hidden size.
_STRENGTH = 0.2
# Of the last norm: at 1 the 151,936 other tokens together would be as probable as those of the script.
_SHARPNESS = 2.0


def make(folder: pathlib.Path, tokenizer: pathlib.Path, seed: int = 0) -> None:
    """Writes a Hugging Face folder with bfloat16 weights.

    Args:
      folder: to create.
      tokenizer: folder with the published tokenizer.json and tokenizer_config.json.
      seed: of the weights.

    Raises:
      UserError: `tokenizer` has no such files, or another vocabulary.
    """
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        if not (tokenizer / name).is_file():
            raise UserError(f'--tokenizer={tokenizer}: has no {name}; give the folder of the model')
    tensors = _random_tensors(np.random.default_rng(seed))
    _write_script(tensors, Tokenizer.from_file(str(tokenizer / 'tokenizer.json')))
    folder.mkdir(parents=True)
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        shutil.copy(tokenizer / name, folder)
    (folder / 'config.json').write_text(json.dumps(ARCHITECTURE, indent=1))
    save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})


def _random_tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns all tensors by name."""
    sizes = ARCHITECTURE
    hidden, inner, layers = (
        sizes[name] for name in ('hidden_size', 'intermediate_size', 'num_hidden_layers')
    )
    keys = hidden // sizes['num_attention_heads'] * sizes['num_key_value_heads']
    tensors: dict[str, np.ndarray] = {}

    def normal(name: str, *shape: int, deviation: float = _DEVIATION) -> None:
        numbers = deviation * rng.standard_normal(shape, np.float32)
        tensors[f'model.{name}'] = numbers.astype(ml_dtypes.bfloat16)

    def scale(name: str, value: float = 1.0) -> None:
        tensors[f'model.{name}'] = np.full(hidden, value, ml_dtypes.bfloat16)

    normal('embed_tokens.weight', sizes['vocab_size'], hidden)
    # As in GPT-2: the sum of all layers does not grow with their number.
    small = _DEVIATION / (2 * layers) ** 0.5
    for number in range(layers):
        layer = f'layers.{number}'
        scale(f'{layer}.input_layernorm.weight')
        scale(f'{layer}.post_attention_layernorm.weight')
        for name, size in (('q', hidden), ('k', keys), ('v', keys)):
            normal(f'{layer}.self_attn.{name}_proj.weight', size, hidden)
            normal(f'{layer}.self_attn.{name}_proj.bias', size)
        normal(f'{layer}.self_attn.o_proj.weight', hidden, hidden, deviation=small)
        normal(f'{layer}.mlp.gate_proj.weight', inner, hidden)
        normal(f'{layer}.mlp.up_proj.weight', inner, hidden)
        normal(f'{layer}.mlp.down_proj.weight', hidden, inner, deviation=small)
    scale('norm.weight', _SHARPNESS)
    return tensors


def _write_script(tensors: dict[str, np.ndarray], tokenizer: Tokenizer) -> None:
    """Writes SCRIPT into the first neurons of the first layer, in place."""
    embedding = tensors['model.embed_tokens.weight']
    length = _DEVIATION * embedding.shape[1] ** 0.5
    directions: dict[str, np.ndarray] = {}
    for piece in dict.fromkeys((*SCRIPT, *sum(SCRIPT.values(), ()))):
        tokens = tokenizer.encode(piece, add_special_tokens=False).ids
        if len(tokens) != 1 or tokens[0] >= len(embedding):
            raise UserError(f'--tokenizer: {piece!r} is no token of it; give that of Qwen2.5')
        row = embedding[tokens[0]].astype(np.float32)
        directions[piece] = row / np.linalg.norm(row)
        # Alternatives are equally probable only if their embeddings are equally long.
        embedding[tokens[0]] = directions[piece] * length
    mlp = 'model.layers.0.mlp'
    for neuron, (piece, following) in enumerate(SCRIPT.items()):
        # Both are large for this piece alone: the activation grows with the square of the agreement.
        tensors[f'{mlp}.gate_proj.weight'][neuron] = directions[piece]
        tensors[f'{mlp}.up_proj.weight'][neuron] = directions[piece]
        total = np.sum([directions[next_piece] for next_piece in following], 0)
        tensors[f'{mlp}.down_proj.weight'][:, neuron] = total * (_STRENGTH / np.linalg.norm(total))
