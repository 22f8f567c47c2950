"""Text to token ids as BERT checkpoints expect them: a normaliser of ours, then TensorFlow Text's WordPiece.

The reference is `BertNormalizer` and `BertPreTokenizer` of the `tokenizers` library. TensorFlow Text's own BERT
tokenizer folds case by NFKC (ς becomes σ, ² becomes 2) and counts the longest word in bytes; so the text is cleaned,
folded and cut into words here, character by character, and only WordPiece itself (fast, greedy longest match; Song
et al. 2021, arXiv:2012.15524) is left to it.

Unlike there, a text can never become a control token: '[SEP]' in a passage is three words. Some 500 signs younger than
Unicode 8 count here as Unicode has them now (punctuation, accents), and there as letters; no vocabulary has any.
"""

from __future__ import annotations

import json
import pathlib
import unicodedata

from .types import RetrievalError

# A longer word is unknown as a whole, as in the reference (characters, not bytes).
LONGEST_WORD = 100
# A noncharacter: in no vocabulary, so that WordPiece reads it as unknown.
_UNKNOWN = '\ufffe'

_CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),  # as the reference has it; 0x2B820 was probably meant
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
# Signs that Unicode has put into another category since the reference was written (Unicode 8).
_RECLASSIFIED = {0x166D: 'Po', 0x1734: 'Mn', 0x1885: 'Lo', 0x1886: 'Lo'}


class _Table(dict):
    """Code point → what becomes of it (None: nothing); filled as characters turn up."""

    def __init__(self, fold: bool, strip: bool, chinese: bool):
        super().__init__()
        self._fold, self._strip, self._chinese = fold, strip, chinese

    def __missing__(self, code: int) -> str | None:
        self[code] = result = self._map(chr(code), code)
        return result

    def _map(self, c: str, code: int) -> str | None:
        category = _RECLASSIFIED.get(code) or unicodedata.category(c)
        if c in '\t\n\r':
            return ' '
        if code in (0, 0xFFFD) or category in ('Cc', 'Cf', 'Co', 'Cs'):
            return None
        if category in ('Zs', 'Zl', 'Zp'):
            return ' '
        if self._strip and category == 'Mn':
            return None
        if category[0] == 'P' or (33 <= code <= 126 and not c.isalnum()):
            return f' {c} '
        if self._chinese and any(first <= code <= last for first, last in _CHINESE):
            return f' {c} '
        return c.lower() if self._fold else c


class WordPiece:
    """Tokenizer of a checkpoint folder: reads `vocab.txt` and, where there is one, `tokenizer_config.json`.

    Args:
      folder: of the checkpoint.   max_tokens: longest sequence with [CLS] and [SEP]; what is beyond is cut off.

    Raises:
      RetrievalError: no vocabulary, or one without [UNK], [CLS], [SEP] and [PAD].
    """

    def __init__(self, folder: pathlib.Path, max_tokens: int):
        import tensorflow as tf  # here and not above: three seconds that other encoders have no use for
        import tensorflow_text as tf_text

        try:
            vocabulary = (folder / 'vocab.txt').read_text(encoding='utf-8').rstrip('\n').split('\n')
            path = folder / 'tokenizer_config.json'
            config = json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise RetrievalError(
                f'{folder}: the tokenizer cannot be read ({error}); give a BERT checkpoint'
            ) from error
        ids = {token: i for i, token in enumerate(vocabulary)}
        missing = [token for token in ('[PAD]', '[UNK]', '[CLS]', '[SEP]') if token not in ids]
        if missing or not 3 <= max_tokens:
            raise RetrievalError(
                f'{folder}/vocab.txt: {", ".join(missing) or "nothing"} missing, max_tokens {max_tokens}; '
                'give a BERT vocabulary and at least 3 tokens'
            )
        self.vocab_size, self.pad_id, self.max_tokens = len(vocabulary), ids['[PAD]'], max_tokens
        self._ends = ids['[CLS]'], ids['[SEP]']
        fold, strip = config.get('do_lower_case', True), config.get('strip_accents')
        self._strip = fold if strip is None else strip
        self._table = _Table(fold, self._strip, config.get('tokenize_chinese_chars', True))
        self._tf = tf
        self._pieces = tf_text.FastWordpieceTokenizer(
            vocabulary,
            unknown_token='[UNK]',
            max_bytes_per_word=4 * LONGEST_WORD,
            no_pretokenization=True,
        )
        self._compiled = tf.function(self.tokenize, input_signature=[tf.TensorSpec((), tf.string)])

    def normalise(self, text: str) -> str:
        """Words of a text between single spaces: cleaned, folded, punctuation and Chinese characters apart."""
        if self._strip and not text.isascii():
            text = unicodedata.normalize('NFD', text)
        words = text.translate(self._table).split(' ')
        return ' '.join(w if len(w) <= LONGEST_WORD else _UNKNOWN for w in words if w)

    def tokenize(self, normalised):
        """Ids of a normalised text (string tensor []) with [CLS] and [SEP]: int32 tensor [tokens]; runs in tf.data."""
        tf = self._tf
        words = tf.strings.split(normalised, ' ')
        pieces = self._pieces.tokenize(words).flat_values[: self.max_tokens - 2]
        ids = tf.concat([[self._ends[0]], tf.cast(pieces, tf.int32), [self._ends[1]]], 0)
        return tf.ensure_shape(ids, (None,))

    def __call__(self, text: str) -> list[int]:
        """Ids of a text, at most `max_tokens`."""
        return self._compiled(self.normalise(text)).numpy().tolist()
