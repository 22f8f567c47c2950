"""Small real parts for tests: a tokenizer folder of a few letters and a random policy of its vocabulary."""

import json

import jax
import numpy as np
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from zeroplay_jax.policy import hf, transformer
from zeroplay_jax.rollout import tools

SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
TAGS = tuple(
    f'<{slash}{t}>' for t in ('search', 'answer', 'information', 'tool_call', 'tool_response') for slash in ('', '/')
)
LETTERS = 'abcdefgh'
MERGES = [('a', 'b'), ('c', 'ab'), ('d', 'e')]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    '</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}'
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)


def make_folder(path, *, letters=None, seed=0, **config):
    """A Qwen3 folder with a byte-level BPE tokenizer; `letters` None takes the whole byte alphabet."""
    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if letters is None else [*letters, 'Ċ', 'Ġ']
    words = [*alphabet, *(a + b for a, b in MERGES)]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in SPECIAL])
    backend.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in TAGS])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token='<|im_end|>', pad_token='<|endoftext|>', chat_template=TEMPLATE
    )
    wrapped.save_pretrained(str(path))
    fields = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4) | config
    raw = dict(
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
    (path / 'config.json').write_text(json.dumps(raw | fields))
    model = hf.read_config(path)
    params = transformer.init(model, jax.random.key(seed))
    # Random norms, biases and a spread of logits: nothing may pass because a scale happens to be one.
    scale = lambda x: x * np.random.default_rng(seed).uniform(0.5, 1.5, x.shape).astype('f')
    bias = lambda x: np.random.default_rng(seed).uniform(-0.5, 0.5, x.shape).astype('f')
    vary = {'scale': scale, 'bias': bias, 'embedding': lambda x: x * 4}
    params = jax.tree_util.tree_map_with_path(lambda path, x: vary.get(path[-1].key, lambda x: x)(x), params)
    from safetensors.numpy import save_file

    save_file(hf.to_tensors(model, params), path / 'model.safetensors', metadata={'format': 'pt'})
    return path


class EchoTools(tools.SearchR1):
    """Every `h` is a call, and whatever stands before it is the query."""

    call_stop = 'h'

    def parse(self, text):
        return (text[-8:],), None
