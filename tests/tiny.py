"""Small real parts for tests: a tokenizer folder of a few letters and a random policy of its vocabulary."""

import copy
import functools
import json
import pathlib

import jax
import numpy as np
import tokenizers
import transformers
from flax.traverse_util import flatten_dict
from tokenizers import decoders, models, pre_tokenizers

from zeroplay_jax.policy import hf, stored_tensors, transformer
from zeroplay_jax.rollout.call_syntax import TagSyntax

SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
TAGS = tuple(
    f'<{slash}{t}>'
    for t in ('search', 'answer', 'information', 'tool_call', 'tool_response')
    for slash in ('', '/')
)
LETTERS = 'abcdefgh'
MERGES = [('a', 'b'), ('c', 'ab'), ('d', 'e')]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    '</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}'
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)

# Fields of a folder with a gated delta net before a layer of attention.
DELTA = dict(
    architectures=['Qwen3_5ForCausalLM'],
    model_type='qwen3_5_text',
    full_attention_interval=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    partial_rotary_factor=0.5,
)


def make_folder(path, *, letters=None, seed=0, **config):
    """A Qwen3 folder with a byte-level BPE tokenizer; `letters` None takes the whole byte alphabet."""
    path.mkdir(parents=True, exist_ok=True)
    alphabet = (
        sorted(pre_tokenizers.ByteLevel.alphabet()) if letters is None else [*letters, 'Ċ', 'Ġ']
    )
    words = [*alphabet, *(a + b for a, b in MERGES)]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in SPECIAL])
    backend.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in TAGS])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token='<|im_end|>',
        pad_token='<|endoftext|>',
        chat_template=TEMPLATE,
    )
    wrapped.save_pretrained(str(path))
    fields = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        architectures=['Qwen3ForCausalLM'],
        model_type='qwen3',
        vocab_size=backend.get_vocab_size(),
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        hidden_act='silu',
    )
    (path / 'config.json').write_text(json.dumps(fields | config))
    model = hf.read_config(path)
    params = transformer.init(model, jax.random.key(seed))
    # Random norms, biases and a spread of logits: nothing may pass because a scale happens to be one.
    scale = lambda x: x * np.random.default_rng(seed).uniform(0.5, 1.5, x.shape).astype('f')
    bias = lambda x: np.random.default_rng(seed).uniform(-0.5, 0.5, x.shape).astype('f')
    vary = {'scale': scale, 'bias': bias, 'embedding': lambda x: x * 4}
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: vary.get(path[-1].key, lambda x: x)(x), params
    )
    from safetensors.numpy import save_file

    save_file(to_tensors(model, params), path / 'model.safetensors', metadata={'format': 'pt'})
    return path


def to_tensors(model, params):
    """The parameters in host memory, by their Hugging Face names."""
    return hf._gather_tensors(flatten_dict(params, sep='/'), stored_tensors.tensors(model))


# Families as transformers writes them: (its config class, its fields). Windows and original lengths are short enough
# for a test to run past them. Gemma 3 has wider heads than hidden_size / heads, and another scale of the scores.
FAMILIES = json.loads(pathlib.Path(__file__).with_name('families.json').read_text())


def make_torch_model(family, seed=0, **fields):
    """A random model of a family in PyTorch, eager attention: every parameter random, logits of order 1 to 10."""
    import torch

    name, own = FAMILIES[family]
    shape = dict(
        vocab_size=80,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    config = getattr(transformers, name)(**copy.deepcopy(shape | own | fields))
    config._attn_implementation = 'eager'
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    uniform = lambda x, low, high: torch.rand(x.shape, generator=generator) * (high - low) + low
    with torch.no_grad():
        for path, x in model.named_parameters():
            if path.endswith('A_log'):
                x.copy_(uniform(x, -3.0, -1.0))  # a memory of many tokens
            elif x.ndim == 1:
                x.copy_(uniform(x, -0.5, 0.5) if path.endswith('bias') else uniform(x, 0.5, 1.5))
            else:
                x.copy_(
                    torch.randn(x.shape, generator=generator)
                    * (1.5 if x.shape[0] != 80 else 2.5)
                    / x.shape[1] ** 0.5
                )
    return model


# Family of a decoder → the model with images: (its name in transformers, further fields, those of the encoder).
_QWEN_IMAGES = dict(depth=1, num_heads=1, out_hidden_size=48)
_GEMMA_IMAGES = dict(image_size=8, patch_size=4, num_hidden_layers=1, num_attention_heads=1)
WRAPPED = {
    'gemma3': ('Gemma3', dict(mm_tokens_per_image=1), _GEMMA_IMAGES),
    'qwen3': ('Qwen3VL', {}, dict(_QWEN_IMAGES, deepstack_visual_indexes=[0])),
    'mistral': ('Mistral3', dict(tie_word_embeddings=False), _GEMMA_IMAGES),
    'qwen35': ('Qwen3_5', {}, _QWEN_IMAGES),
    'qwen35_moe': ('Qwen3_5Moe', {}, _QWEN_IMAGES),
}


def make_wrapped_model(family='gemma3'):
    """A model with images in PyTorch: (the decoder alone, the same one beside an encoder of images)."""
    text = make_torch_model(family)
    name, fields, images = WRAPPED[family]
    section = text.config.to_dict()
    if name == 'Qwen3VL':
        section.pop('model_type')
        section['rope_parameters'] |= dict(mrope_section=[3, 3, 2], mrope_interleaved=True)
    config = getattr(transformers, f'{name}Config')(
        text_config=section,
        vision_config=dict(images, hidden_size=8, intermediate_size=8),
        **fields,
    )
    whole = getattr(transformers, f'{name}ForConditionalGeneration')(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    return text, whole


def random_params(config, seed=0):
    """Random parameters, scales and biases too: nothing may pass because one of them happens to be 1 or 0."""
    rng = np.random.default_rng(seed)
    make = {
        'scale': lambda shape: rng.uniform(0.5, 1.5, shape),
        'bias': lambda shape: rng.uniform(-0.5, 0.5, shape),
        'embedding': lambda shape: rng.normal(0, 0.1, shape),
    }
    normal = lambda shape: rng.normal(0, shape[0] ** -0.5, shape)
    shapes = jax.eval_shape(functools.partial(transformer.init, config), jax.random.key(seed))
    change = lambda path, x: make.get(path[-1].key, normal)(x.shape).astype(np.float32)
    return jax.tree_util.tree_map_with_path(change, shapes)


def gap(ours, theirs):
    """Largest difference of two trees' arrays, by norm and relative to the norm of theirs."""
    relative = lambda x, y: np.linalg.norm(np.asarray(x) - y) / (np.linalg.norm(y) + 1e-12)
    return max(jax.tree.leaves(jax.tree.map(relative, ours, theirs)))


class EchoSyntax(TagSyntax):
    """Every `h` ends a call of search; the text before it is the query."""

    stop = 'h'

    def stop_strings(self, tools):
        return (self.stop,) if tools else ()

    def read_call(self, text, tools):
        return 'search', {'query_list': [text[-8:]]}, None
