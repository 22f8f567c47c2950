"""Tokenizer of a BERT checkpoint: words as the `tokenizers` library finds them, their pieces by TensorFlow Text."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from .command import import_tensorflow
from .encoder_folder import read_optional
from .types import RetrievalError, first_line

# Classes of `transformers` that make normaliser and pre-tokenizer from tokenizer_config.json, whatever tokenizer.json
# has; and those that read tokenizer.json as it is.
_BERT_CLASSES = ('BertTokenizer', 'BertTokenizerFast')
_GENERIC_CLASSES = ('TokenizersBackend', 'PreTrainedTokenizerFast')
# A noncharacter: no text that is read here has it.
_UNUSED = '\uffff'


class WordPiece:
    """Tokenizer of a checkpoint folder: reads `tokenizer.json` or `vocab.txt`, and `tokenizer_config.json`.

    Added tokens, normaliser and words are those of the `tokenizers` library: TensorFlow Text's own BERT tokenizer folds
    case by NFKC (ς becomes σ, ² becomes 2). WordPiece itself (fast, greedy longest match; Song et al. 2021,
    arXiv:2012.15524) is done by TensorFlow Text. A text never becomes a control token, which the library would find in
    it: '[SEP]' in a passage is three words.

    Args:
      folder: folder of the checkpoint.
      max_tokens: longest sequence including [CLS] and [SEP]; further tokens are cut off.
      lower_case: whether texts are lower-cased first.

    Raises:
      RetrievalError: no tokenizer that can be read, or one that is not WordPiece between two control tokens.
    """

    def __init__(self, folder: pathlib.Path, max_tokens: int, lower_case: bool = False):
        # Imported here, because it takes three seconds and the other encoders do not need it.
        self._tf = import_tensorflow()
        import tensorflow_text as tf_text

        tokenizer = _read_tokenizer(folder)
        added = tokenizer.get_added_tokens_decoder()
        self.control_tokens = [token.content for token in added.values() if token.special]
        self._unknown = tokenizer.model.unk_token
        ids = tokenizer.get_vocab()
        # A noncharacter stands for a control token, also where the pre-tokenizer keeps its text whole.
        vocabulary = [f'{_UNUSED}{token_id}' for token_id in range(1 + max(ids.values()))]
        for text, token_id in ids.items():
            if text not in self.control_tokens or text == self._unknown:
                vocabulary[token_id] = text
        self.vocab_size = len(vocabulary)
        self._first_id, self._last_id = tokenizer.encode('').ids
        self._max_pieces = max_tokens - 2
        steps = [tokenizer.normalizer] if tokenizer.normalizer else []
        if lower_case:
            steps.insert(0, normalizers.Lowercase())
        self._normalizer = normalizers.Sequence(steps)
        self._pre_tokenizer = tokenizer.pre_tokenizer or pre_tokenizers.Sequence([])
        # Text of an added token behind the normaliser → the token.
        self._added = {}
        for token in added.values():
            if not token.special:
                self._added[self._normalizer.normalize_str(token.content)] = token.content
        longest_first = sorted(self._added, key=len, reverse=True)
        # Without any token a pattern that is found nowhere. Parentheses: `split` keeps the tokens.
        self._token = re.compile(f'({"|".join(map(re.escape, longest_first)) or "(?!)"})')
        self._longest_word = tokenizer.model.max_input_chars_per_word
        self._wordpiece = tf_text.FastWordpieceTokenizer(
            vocabulary,
            unknown_token=self._unknown,
            suffix_indicator=tokenizer.model.continuing_subword_prefix,
            # The limit of the library is one of characters; UTF-8 takes at most four bytes for each.
            max_bytes_per_word=4 * self._longest_word,
            no_pretokenization=True,
        )

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text between [CLS] and [SEP], at most `max_tokens`."""
        tf = self._tf
        words = []
        num_words = []
        for text in texts:
            words_of_text = self._words(text)
            words += words_of_text
            num_words.append(len(words_of_text))
        rows = tf.RaggedTensor.from_row_lengths(tf.constant(words, tf.string), num_words)
        pieces = self._wordpiece.tokenize(rows).merge_dims(-2, -1)[:, : self._max_pieces]
        return [[self._first_id, *ids, self._last_id] for ids in pieces.to_list()]

    def _words(self, text: str) -> list[str]:
        """Returns the words of a text; an added token is a word, which the vocabulary has as a whole."""
        # Half of a surrogate pair, which a policy can write, has no encoding and is left out.
        encodable = text.encode('utf-8', 'ignore').decode()
        words = []
        parts = self._token.split(self._normalizer.normalize_str(encodable))
        for number, part in enumerate(parts):
            # Every second part is a token.
            if number % 2:
                words.append(self._added[part])
                continue
            for word, _ in self._pre_tokenizer.pre_tokenize_str(part):
                # A longer word is unknown as a whole, as in the library.
                words.append(word if len(word) <= self._longest_word else self._unknown)
        return words


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
    # TensorFlow Text reads tokens as texts of C.
    if any('\0' in text for text in tokenizer.get_vocab()):
        return 'it has a token with the character U+0000'
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
    for token in words:
        if token.single_word or token.lstrip or token.rstrip or not token.normalized:
            return f'the added token {token.content!r} has single_word, lstrip, rstrip or not normalized'
    return ''
