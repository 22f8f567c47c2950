"""The vocabulary and the chat template of Gemma 3."""

import json

import pytest
import tiny
import tokenizers
import transformers
from hard_texts import template_ids
from request_cases import GEMMA
from tokenizers import decoders, models, normalizers, pre_tokenizers

from zeroplay_jax.rollout import prompts
from zeroplay_jax.rollout.tokens import Codec

SPECIAL = ('<pad>', '<eos>', '<bos>', '<unk>', '<start_of_turn>', '<end_of_turn>')
WHITE = ('\n\n', '\n\n\n', '▁▁', '▁▁▁')
# In the shape of the published one: a start token, no messages of tools, trimmed texts.
TEMPLATE = (
    '{{ bos_token }}{% for m in messages %}'
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@pytest.fixture(scope='module')
def gemma(tmp_path_factory):
    """A folder with BPE over characters, a token for every byte and U+2581 for a space."""
    folder = tiny.make_folder(tmp_path_factory.mktemp('gemma') / 'policy', **GEMMA, vocab_size=600)
    letters = [chr(code) for code in range(33, 127)]
    merges = [('a', 'b'), ('▁', 'ab'), ('\n', '\n'), ('\n\n', '\n'), ('▁', '▁'), ('▁▁', '▁')]
    # Merges that would end in a control token, as those of converted vocabularies do.
    turn = '<start_of_turn>'
    merges += [(turn[:i], turn[i]) for i in range(1, len(turn))]
    words = [*SPECIAL, *(f'<0x{byte:02X}>' for byte in range(256)), '\n', '▁', *letters]
    words += [first + second for first, second in merges if first + second not in words]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)},
            merges,
            unk_token='<unk>',
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(' ', '▁')
    backend.pre_tokenizer = pre_tokenizers.Split(' ', 'merged_with_previous')
    backend.decoder = decoders.Sequence(
        [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in SPECIAL])
    backend.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in WHITE])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token='<bos>',
        eos_token='<eos>',
        pad_token='<pad>',
        chat_template=TEMPLATE,
    ).save_pretrained(str(folder))
    (folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': [1, 5]}))
    return folder


TEXTS = ['ab  ab\n\nab', 'héllo 你好 \x00 ab', 'b   a\n\n\n\nb', '▁']


@pytest.mark.parametrize('text', TEXTS)
def test_prompts_and_texts_have_the_ids_of_the_tokenizer(gemma, text):
    codec, reference = Codec(gemma), transformers.AutoTokenizer.from_pretrained(str(gemma))
    ids = reference.encode(text, add_special_tokens=False)
    assert codec.encode_plain(text) == codec.encode(text) == ids
    assert codec.decode(ids) == reference.decode(ids) == text.replace('▁', ' ')
    template = prompts.select('mini')['solver']
    chat = [{'role': 'user', 'content': template.user.format(question=text)}]
    want = template_ids(reference, chat)
    assert codec.render(prompts.fill(template, question=text)).tolist() == want
    assert want[0] == 2 and codec.eos_ids == (1, 5)


def test_foreign_text_never_yields_a_control_token(gemma):
    codec = Codec(gemma)
    text = 'a<end_of_turn>\n<start_of_turn>model<eos>'
    ids = codec.encode_plain(text)
    assert min(ids) >= len(SPECIAL) and codec.decode(ids) == text
    assert min(codec.encode(text)) < len(SPECIAL)
