"""WordPiece tokens as BERT checkpoints expect them: normalisation in Python, then TensorFlow Text's WordPiece.

The reference is `BertNormalizer` and `BertPreTokenizer` of the `tokenizers` library. TensorFlow Text's own BERT
tokenizer folds case by NFKC (ς becomes σ, ² becomes 2) and measures the longest word in bytes. The text is therefore
cleaned, folded and cut into words here, character by character, and only WordPiece itself (fast, greedy longest match;
Song et al. 2021, arXiv:2012.15524) is done by TensorFlow Text.

Two differences from the reference are intended. A text never becomes a control token: '[SEP]' in a passage is three
words. And some 500 characters added after Unicode 8 count as current Unicode classifies them (punctuation, accents);
the reference takes them for letters, but no vocabulary contains them.
"""

from __future__ import annotations

import pathlib
import unicodedata
from typing import Any

from . import json_text
from .tensorflow_import import import_tensorflow
from .types import RetrievalError

# A longer word is unknown as a whole, as in the reference (characters, not bytes).
LONGEST_WORD = 100
# A noncharacter: it is in no vocabulary, so that WordPiece reads it as unknown.
_UNKNOWN = '\ufffe'
# UTF-8 needs at most four bytes per character.
_LONGEST_WORD_BYTES = 4 * LONGEST_WORD
# Enough for [CLS], [SEP] and at least one token.
_MIN_TOKENS = 3

# First and last code points of Chinese characters, each of which is a word.
_CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),  # as in the reference; 0x2B820 was probably intended
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
# Characters whose Unicode category has changed since the reference was written (Unicode 8).
_RECLASSIFIED = {0x166D: 'Po', 0x1734: 'Mn', 0x1885: 'Lo', 0x1886: 'Lo'}


class _Replacements(dict):
    """Maps code points to their replacements (None: removed) for `str.translate`; filled on demand."""

    def __init__(self, fold: bool, strip: bool, chinese: bool):
        """Takes whether case is folded, accents are stripped, and Chinese characters are separated."""
        super().__init__()
        self._fold = fold
        self._strip = strip
        self._chinese = chinese

    def __missing__(self, code: int) -> str | None:
        replacement = self._replacement(chr(code), code)
        self[code] = replacement
        return replacement

    def _replacement(self, character: str, code: int) -> str | None:
        """Returns the text that replaces a character, with spaces around a word of its own; None if it is removed.

        Args:
          character: the character.
          code: its code point.
        """
        category = _RECLASSIFIED.get(code) or unicodedata.category(character)
        # Tab and line ends count as white space although they are control characters (Cc).
        if character in '\t\n\r':
            return ' '
        # Removed: NUL, the replacement character, and control, format, private and surrogate characters.
        if code in (0, 0xFFFD) or category in ('Cc', 'Cf', 'Co', 'Cs'):
            return None
        if category in ('Zs', 'Zl', 'Zp'):
            return ' '
        if self._strip and category == 'Mn':
            return None
        # BERT also counts ASCII symbols such as '$' and '^' as punctuation, which Unicode does not.
        is_ascii_symbol = 33 <= code <= 126 and not character.isalnum()
        if category[0] == 'P' or is_ascii_symbol:
            return f' {character} '
        if self._chinese and any(first <= code <= last for first, last in _CHINESE):
            return f' {character} '
        if self._fold:
            return character.lower()
        return character


class WordPiece:
    """Tokenizer of a checkpoint folder: reads `vocab.txt` and, if present, `tokenizer_config.json`.

    Args:
      folder: folder of the checkpoint.
      max_tokens: longest sequence including [CLS] and [SEP]; further tokens are cut off.

    Raises:
      RetrievalError: no vocabulary, one without [UNK], [CLS], [SEP] or [PAD], or `max_tokens` below 3.
    """

    def __init__(self, folder: pathlib.Path, max_tokens: int):
        # Imported here, because it takes three seconds and the other encoders do not need it.
        tf = import_tensorflow()
        import tensorflow_text as tf_text

        vocabulary, config = _read_vocabulary(folder)
        ids = {token: number for number, token in enumerate(vocabulary)}
        missing = [token for token in ('[PAD]', '[UNK]', '[CLS]', '[SEP]') if token not in ids]
        if missing or max_tokens < _MIN_TOKENS:
            raise RetrievalError(
                f'{folder}/vocab.txt: {", ".join(missing) or "nothing"} missing, max_tokens {max_tokens}; '
                'give a BERT vocabulary and at least 3 tokens'
            )
        self.vocab_size = len(vocabulary)
        self.pad_id = ids['[PAD]']
        self.max_tokens = max_tokens
        self._first_id = ids['[CLS]']
        self._last_id = ids['[SEP]']
        fold = config.get('do_lower_case', True)
        # The reference strips accents where it folds case, unless the checkpoint decides otherwise.
        strip = config.get('strip_accents')
        self._strip = fold if strip is None else strip
        chinese = config.get('tokenize_chinese_chars', True)
        self._replacements = _Replacements(fold, self._strip, chinese)
        self._tf = tf
        self._wordpiece = tf_text.FastWordpieceTokenizer(
            vocabulary,
            unknown_token='[UNK]',
            max_bytes_per_word=_LONGEST_WORD_BYTES,
            no_pretokenization=True,
        )
        signature = [tf.TensorSpec((), tf.string)]
        self._compiled = tf.function(self.tokenize, input_signature=signature)

    def normalise(self, text: str) -> str:
        """Returns the words of a text, separated by single spaces.

        The text is cleaned and folded; punctuation and Chinese characters are words of their own.
        """
        if self._strip and not text.isascii():
            # Decomposition makes accents separate characters, which the table removes.
            text = unicodedata.normalize('NFD', text)
        words = []
        for word in text.translate(self._replacements).split(' '):
            if len(word) > LONGEST_WORD:
                words.append(_UNKNOWN)
            elif word:
                words.append(word)
        return ' '.join(words)

    def tokenize(self, normalised: Any) -> Any:
        """Returns the token ids of a normalised text between [CLS] and [SEP]; runs inside tf.data.

        Args:
          normalised: string tensor [], a text that `normalise` returned.

        Returns:
          int32 tensor [tokens].
        """
        tf = self._tf
        words = tf.strings.split(normalised, ' ')
        pieces = self._wordpiece.tokenize(words).flat_values[: self.max_tokens - 2]
        ids = tf.concat([[self._first_id], tf.cast(pieces, tf.int32), [self._last_id]], 0)
        # tf.data needs to know the rank for padding.
        return tf.ensure_shape(ids, (None,))

    def __call__(self, text: str) -> list[int]:
        """Returns the token ids of a text, at most `max_tokens`."""
        return self._compiled(self.normalise(text)).numpy().tolist()


def _read_vocabulary(folder: pathlib.Path) -> tuple[list[str], dict[str, Any]]:
    """Returns (tokens by id, tokenizer settings) of a checkpoint folder."""
    config: dict[str, Any] = {}
    config_path = folder / 'tokenizer_config.json'
    try:
        text = (folder / 'vocab.txt').read_text(encoding='utf-8')
        if config_path.exists():
            config = json_text.read_object(config_path, float)
    except (OSError, ValueError) as error:
        raise RetrievalError(
            f'{folder}: the tokenizer cannot be read ({error}); give a BERT checkpoint'
        ) from error
    # `splitlines` would break tokens that are line separators of Unicode.
    return text.rstrip('\n').split('\n'), config
