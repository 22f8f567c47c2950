"""Tokenizer of a BERT checkpoint, by the `tokenizers` library."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from .encoder_folder import read_optional
from .types import RetrievalError, first_line

# Classes of `transformers` that make normaliser and pre-tokenizer from tokenizer_config.json, whatever tokenizer.json
# has; and those that read tokenizer.json as it is.
_BERT_CLASSES = ('BertTokenizer', 'BertTokenizerFast')
_GENERIC_CLASSES = ('TokenizersBackend', 'PreTrainedTokenizerFast')


class WordPiece:
    """Tokenizer of a checkpoint folder: reads `tokenizer.json` or `vocab.txt`, and `tokenizer_config.json`.

    A text never becomes a control token: '[SEP]' in a passage is three words.

    Args:
      folder: folder of the checkpoint.
      max_tokens: longest sequence including [CLS] and [SEP]; further tokens are cut off.
      lower_case: whether texts are lower-cased first.

    Attributes:
      vocab_size: number of tokens.
      control_tokens: their texts.

    Raises:
      RetrievalError: no tokenizer that can be read, or one that is not WordPiece between two control tokens.
    """

    def __init__(self, folder: pathlib.Path, max_tokens: int, lower_case: bool = False):
        tokenizer = self._tokenizer = _read_tokenizer(folder)
        added = tokenizer.get_added_tokens_decoder().values()
        self.control_tokens = [token.content for token in added if token.special]
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        if lower_case:
            steps = [tokenizer.normalizer] if tokenizer.normalizer else []
            tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
        tokenizer.enable_truncation(max_tokens)
        tokenizer.encode_special_tokens = True

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text between [CLS] and [SEP], at most `max_tokens`."""
        # Half of a surrogate pair, which a policy can write, has no encoding and is left out.
        encodable = [text.encode('utf-8', 'ignore').decode() for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch(encodable)]


def _read_tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a checkpoint folder as `transformers` reads it."""
    path = folder / 'tokenizer.json'
    # Where both name a token, `transformers` takes the second one.
    settings = read_optional(folder / 'special_tokens_map.json')
    settings |= read_optional(folder / 'tokenizer_config.json')
    classes: tuple[str, ...] = _BERT_CLASSES + _GENERIC_CLASSES
    try:
        if path.exists():
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        else:
            path, classes = folder / 'vocab.txt', _BERT_CLASSES
            reader = tokenizers.BertWordPieceTokenizer(str(path))
            tokenizer = tokenizers.Tokenizer.from_str(reader.to_str())
    # The library raises Exception itself.
    except Exception as error:
        raise RetrievalError(
            f'{path}: cannot be read ({first_line(error)}); give a BERT checkpoint with tokenizer.json or vocab.txt'
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    kind = settings.get('tokenizer_class') or _BERT_CLASSES[0]
    if kind in _BERT_CLASSES:
        tokenizer.normalizer = normalizers.BertNormalizer(
            lowercase=settings.get('do_lower_case', True),
            # Accents are stripped where case is folded, unless the checkpoint decides otherwise.
            strip_accents=settings.get('strip_accents'),
            handle_chinese_chars=settings.get('tokenize_chinese_chars', True),
        )
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    problem = _problem(tokenizer, settings)
    # Those of tokenizer.json are in it.
    later_tokens = {} if path.suffix == '.json' else read_optional(folder / 'added_tokens.json')
    if later_tokens.keys() - tokenizer.get_vocab().keys():
        problem = 'added_tokens.json has other tokens'
    if kind not in classes:
        problem = f'tokenizer_class={kind!r} in tokenizer_config.json'
    if problem:
        raise RetrievalError(f'{path}: {problem}, which is not supported; take another encoder')
    return tokenizer


def _problem(tokenizer: tokenizers.Tokenizer, settings: dict[str, Any]) -> str:
    """Returns why the ids of a tokenizer would be others here; '' if they are the same."""
    added = tokenizer.get_added_tokens_decoder().values()
    words = [token for token in added if not token.special]
    listed = settings.get('added_tokens_decoder', {}).values()
    listed_words = {token['content'] for token in listed if not token.get('special')}
    if not isinstance(tokenizer.model, models.WordPiece):
        return f'it is {type(tokenizer.model).__name__} and not WordPiece'
    ends = tokenizer.encode('').ids
    if len(ends) != 2:
        return 'it puts others than two control tokens around a text'
    for name, token_id in zip(('cls_token', 'sep_token'), ends, strict=True):
        stated: Any = settings.get(name) or tokenizer.id_to_token(token_id)
        text = stated['content'] if isinstance(stated, dict) else stated
        if tokenizer.token_to_id(text) != token_id:
            return f'{name} in tokenizer_config.json is {text!r}'
    if settings.get('truncation_side', 'right') != 'right':
        return 'truncation_side in tokenizer_config.json is not right'
    # Where there is such a list, `transformers` takes no other one.
    if listed and listed_words != {token.content for token in words}:
        return 'added_tokens_decoder in tokenizer_config.json lists other tokens'
    return ''
