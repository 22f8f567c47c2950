"""The tokenizer of the tiny checkpoint: byte-level BPE in the format of Qwen's tokenizer, with about 1,000 tokens.

It learns its merges from the sentences of the miniature world and from the syllables of its names. A name after a
space is always the same two tokens; any other text is encoded down to bytes where necessary. `train_on` trains a
tokenizer of the same form on other texts.
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

from zeroplay_jax.mini import facts, names

PAD = '<|endoftext|>'
START = '<|im_start|>'
END = '<|im_end|>'
SPECIAL_TOKENS = (PAD, START, END)
_TAG_NAMES = ('think', 'search', 'information', 'question', 'answer', 'task')
TAGS = tuple(tag for name in _TAG_NAMES for tag in (f'<{name}>', f'</{name}>'))
SIZE = 1024

# Qwen2's pre-tokenizer: words with the space before them, single digits, runs of punctuation, white space.
_PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
# ChatML, as in Qwen's chat models, without a system prompt.
TEMPLATE = (
    '{% for message in messages %}'
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    '{% endfor %}'
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def corpus(extra_texts: Sequence[str]) -> list[str]:
    """Returns the texts that the merges are learnt from.

    Args:
      extra_texts: further texts, such as prompts, whose words become single tokens.
    """
    # BPE merges the most frequent pair first. Heads and consonant-vowel pairs are repeated until they are the most
    # frequent, so that no token crosses the boundary between a name's head and its tail. Names themselves are left out
    # for the same reason.
    syllables = [f' {head}' for head in names.HEADS]
    syllables += [consonant + vowel for consonant in names.CONSONANTS for vowel in names.VOWELS]
    syllables = syllables * 32 + list(names.TAILS)
    layout = ['user\n', 'assistant\n', 'system\n', 'Doc 1(Title:)', '\n\n', '.\n', '?\n', ').']
    return syllables * 64 + [*_sentences(), *layout, *extra_texts] * 2


def _sentences() -> list[str]:
    """Returns the world's sentences and questions without names, and the values that are common nouns."""
    sentences = []
    for kind, relations in facts.RELATIONS.items():
        pronouns = ('He', 'She') if kind == 'person' else ('It',)
        for relation, (sentence, value_kind) in relations.items():
            for pronoun in pronouns:
                without_value = sentence.format(s=pronoun, v='')
                # The line break keeps the full stop and the following line a token of their own.
                sentences.append(' ' + without_value.replace(' .', '.\n'))
            sentences.append(f'What is the {relation} of the {relation} of is the?')
            sentences += [f' {value}.' for value in facts.CLOSED.get(value_kind, ())]
    return sentences


def train(extra_texts: Sequence[str] = ()) -> Tokenizer:
    """Trains the tokenizer of the miniature world; the result is deterministic.

    Args:
      extra_texts: prompt templates whose words become single tokens; their fields and tags are ignored.
    """
    # Fields are filled with foreign text, and tags become tokens of their own.
    plain_texts = [re.sub(r'\{.*?\}|<.*?>', ' ', text) for text in extra_texts]
    return train_on(corpus(plain_texts), SIZE)


def train_on(texts: Sequence[str], size: int) -> Tokenizer:
    """Trains a tokenizer of `size` tokens on texts; the result is deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split_words = pre_tokenizers.Split(Regex(_PRE_TOKENIZER_PATTERN), 'isolated')
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL_TOKENS) - len(TAGS),
        # All 256 bytes, or text outside the corpus could not be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        # A pair that occurs once is not worth a token.
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(_added_tokens(SPECIAL_TOKENS, special=True))
    # As in the released checkpoints, tags are not special tokens: decoding keeps them. Text of documents could forge
    # them, so the code that prevents this is used with these checkpoints too.
    tokenizer.add_tokens(_added_tokens(TAGS, special=False))
    return tokenizer


def _added_tokens(tokens: Sequence[str], special: bool) -> list[AddedToken]:
    return [AddedToken(token, special=special, normalized=False) for token in tokens]


def _write_json(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + '\n')


def write_config(folder: pathlib.Path, tokenizer: Tokenizer, fields: dict) -> None:
    """Writes config.json: the fields of a model, and the ids of the tokens with which turns and rows end."""
    ids = {'eos_token_id': tokenizer.token_to_id(END), 'pad_token_id': tokenizer.token_to_id(PAD)}
    _write_json(folder / 'config.json', fields | ids)


def write(folder: str | pathlib.Path, tokenizer: Tokenizer) -> None:
    """Writes tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    folder = pathlib.Path(folder)
    tokenizer.save(str(folder / 'tokenizer.json'))
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
    end_id = tokenizer.token_to_id(END)
    pad_id = tokenizer.token_to_id(PAD)
    generation = {
        # As in Qwen's chat models, either token ends the generation.
        'eos_token_id': [end_id, pad_id],
        'pad_token_id': pad_id,
        'do_sample': True,
        'temperature': 1.0,
    }
    _write_json(folder / 'tokenizer_config.json', config)
    _write_json(folder / 'generation_config.json', generation)
    (folder / 'chat_template.jinja').write_text(TEMPLATE)
