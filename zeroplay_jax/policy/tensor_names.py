"""Names, shapes and axis order of the tensors in a Hugging Face checkpoint, for every parameter of the decoder."""

from __future__ import annotations

from typing import NamedTuple

from zeroplay_jax.policy.decoder import ModelConfig


class Tensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
      name: name in the safetensors file.
      shape: shape of our parameter.
      dims: names of the sizes in `shape`, in terms of config.json.
      transposed: whether the file holds the transpose: PyTorch stores kernels as [out, in], ours are [in, out].
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    transposed: bool


_QUERY_SIZE = 'num_attention_heads·head_dim'
_KV_SIZE = 'num_key_value_heads·head_dim'

# Parameter path -> (tensor name, names of its sizes in our axis order).
_MODEL_TENSORS = {
    'embedding': ('model.embed_tokens.weight', ('vocab_size', 'hidden_size')),
    'final_norm/scale': ('model.norm.weight', ('hidden_size',)),
    'head': ('lm_head.weight', ('hidden_size', 'vocab_size')),
}
# The same for one layer: parameter paths below layer_<i>, tensor names below model.layers.<i>.
_LAYER_TENSORS = {
    'input_norm/scale': ('input_layernorm.weight', ('hidden_size',)),
    'q/kernel': ('self_attn.q_proj.weight', ('hidden_size', _QUERY_SIZE)),
    'k/kernel': ('self_attn.k_proj.weight', ('hidden_size', _KV_SIZE)),
    'v/kernel': ('self_attn.v_proj.weight', ('hidden_size', _KV_SIZE)),
    'q/bias': ('self_attn.q_proj.bias', (_QUERY_SIZE,)),
    'k/bias': ('self_attn.k_proj.bias', (_KV_SIZE,)),
    'v/bias': ('self_attn.v_proj.bias', (_KV_SIZE,)),
    'q_norm/scale': ('self_attn.q_norm.weight', ('head_dim',)),
    'k_norm/scale': ('self_attn.k_norm.weight', ('head_dim',)),
    'o/kernel': ('self_attn.o_proj.weight', (_QUERY_SIZE, 'hidden_size')),
    'post_norm/scale': ('post_attention_layernorm.weight', ('hidden_size',)),
    'pre_mlp_norm/scale': ('pre_feedforward_layernorm.weight', ('hidden_size',)),
    'gate/kernel': ('mlp.gate_proj.weight', ('hidden_size', 'intermediate_size')),
    'up/kernel': ('mlp.up_proj.weight', ('hidden_size', 'intermediate_size')),
    'down/kernel': ('mlp.down_proj.weight', ('intermediate_size', 'hidden_size')),
    'post_mlp_norm/scale': ('post_feedforward_layernorm.weight', ('hidden_size',)),
}
# Placement of the norms -> those that a layer does not have.
_ABSENT_NORMS = {
    'before': ('pre_mlp_norm', 'post_mlp_norm'),
    'after': ('input_norm', 'pre_mlp_norm'),
    'both': (),
}
# In models with other parts beside the decoder: prefixes of its tensors, and of those of the other parts. Old and new
# versions of transformers order the names differently.
_DECODER_PREFIXES = {
    'language_model.model.': 'model.',
    'model.language_model.': 'model.',
    'language_model.lm_head.': 'lm_head.',
}
_OTHER_PARTS = ('vision_tower.', 'multi_modal_projector.')


def decoder_name(name: str) -> str | None:
    """Returns the name that a tensor of a model with other parts has in the decoder alone; None for other parts."""
    for prefix, replacement in _DECODER_PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    if name.removeprefix('model.').startswith(_OTHER_PARTS):
        return None
    return name


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Returns {parameter path: its tensor} for every parameter of the model."""
    sizes = _sizes(config)
    model_tensors = dict(_MODEL_TENSORS)
    if config.tied:
        del model_tensors['head']
    result = {}
    for path, (name, dims) in model_tensors.items():
        result[path] = _tensor(path, name, dims, sizes)
    layer_tensors = _layer_tensors(config)
    for i in range(config.layers):
        for path, (name, dims) in layer_tensors.items():
            layer_path = f'layer_{i}/{path}'
            layer_name = f'model.layers.{i}.{name}'
            result[layer_path] = _tensor(layer_path, layer_name, dims, sizes)
    return result


def _sizes(config: ModelConfig) -> dict[str, int]:
    """Returns the values of the sizes that the tables above name."""
    return {
        'vocab_size': config.vocab_size,
        'hidden_size': config.hidden_size,
        'intermediate_size': config.intermediate_size,
        'head_dim': config.head_dim,
        _QUERY_SIZE: config.heads * config.head_dim,
        _KV_SIZE: config.kv_heads * config.head_dim,
    }


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Returns the rows of _LAYER_TENSORS for the parameters that the model has."""
    layer_tensors = dict(_LAYER_TENSORS)
    if not config.qkv_bias:
        for projection in ('q', 'k', 'v'):
            del layer_tensors[f'{projection}/bias']
    if config.qk_norm == 'none':
        del layer_tensors['q_norm/scale']
        del layer_tensors['k_norm/scale']
    if config.qk_norm == 'projection':
        # The norm covers all heads, as the bias does, so its scale has the size of the bias.
        for projection in ('q', 'k'):
            name, _ = _LAYER_TENSORS[f'{projection}_norm/scale']
            _, dims = _LAYER_TENSORS[f'{projection}/bias']
            layer_tensors[f'{projection}_norm/scale'] = (name, dims)
    for name in _ABSENT_NORMS[config.norms]:
        del layer_tensors[f'{name}/scale']
    return layer_tensors


def _tensor(path: str, name: str, dims: tuple[str, ...], sizes: dict[str, int]) -> Tensor:
    """Returns the tensor of the parameter at `path`."""
    shape = tuple(sizes[dim] for dim in dims)
    # The embedding is a table [vocabulary, hidden] in both formats, not a kernel.
    transposed = path.endswith('/kernel') or path == 'head'
    return Tensor(name, shape, dims, transposed)
