"""The tokenizer of the tiny checkpoint: byte-level BPE in the format of Qwen's, some 1,000 tokens.

It learns its merges from the words of the world's sentences and from the syllables of its names, so that every
name is two tokens wherever a space stands before it, and any other text still has a spelling in bytes.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from zeroplay_jax.mini import world

PAD, START, END = '<|endoftext|>', '<|im_start|>', '<|im_end|>'
TAGS = tuple(
    tag
    for name in ('think', 'search', 'information', 'question', 'answer', 'task')
    for tag in (f'<{name}>', f'</{name}>')
)
SIZE = 1024

# The split of Qwen2's tokenizer: words with the space before them, single digits, runs of punctuation, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
TEMPLATE = (
    '{% for message in messages %}'
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    '{% endfor %}'
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def corpus(extra: Sequence[str]) -> list[str]:
    """Text to learn the merges from: syllables with the commonest weight, then plain sentences; names left out."""
    # Consonant + vowel first, so that no name is ever cut across its head and its tail.
    syllables = [f' {head}' for head in world.HEADS] + [
        c + v for c in world.CONSONANTS for v in 'aeiou'
    ]
    syllables = syllables * 32 + list(world.TAILS)
    sentences = []
    for kind, relations in world.RELATIONS.items():
        for relation, (sentence, value_kind) in relations.items():
            for pronoun in ('He', 'She') if kind == 'person' else ('It',):
                sentences.append(' ' + sentence.format(s=pronoun, v='').replace(' .', '.\n'))
            sentences.append(f'What is the {relation} of the {relation} of is the?')
            sentences += [f' {value}.' for value in world.CLOSED.get(value_kind, ())]
    layout = ['user\n', 'assistant\n', 'system\n', 'Doc 1(Title:)', '\n\n', '.\n', '?\n', ').']
    return syllables * 64 + [*sentences, *layout, *extra] * 2


def train(extra: Sequence[str] = ()) -> Tokenizer:
    """Learns the tokenizer. `extra`: prompt texts whose words should be whole tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), 'isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - 3 - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    plain = [re.sub(r'\{.*?\}|<.*?>', ' ', text) for text in extra]
    tokenizer.train_from_iterator(corpus(plain), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in (PAD, START, END)]
    )
    # Not flagged special, as in the real checkpoints: decoding keeps them, and text from outside could spell them.
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return tokenizer


def write(folder: str | pathlib.Path, tokenizer: Tokenizer) -> None:
    """Writes tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    folder = pathlib.Path(folder)
    tokenizer.save(str(folder / 'tokenizer.json'))
    ids = {t: tokenizer.token_to_id(t) for t in (PAD, END)}
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'model_max_length': 4096,
        'pad_token': PAD,
        'eos_token': END,
        'bos_token': None,
        'unk_token': None,
        'clean_up_tokenization_spaces': False,
        'chat_template': TEMPLATE,
    }
    generation = {
        'eos_token_id': [ids[END], ids[PAD]],
        'pad_token_id': ids[PAD],
        'do_sample': True,
        'temperature': 1.0,
    }
    (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=2) + '\n')
    (folder / 'generation_config.json').write_text(json.dumps(generation, indent=2) + '\n')
    (folder / 'chat_template.jinja').write_text(TEMPLATE)
