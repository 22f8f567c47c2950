"""Text encoder of a BERT checkpoint: WordPiece in a tf.data pipeline, batches by length, one JAX program per length.

Each query is encoded by itself, in a program whose shape depends on its own length only, so that no other query can
change its vector. Passages, of which there are millions, share batches that are split over all devices.

Letters: N passages, Q queries, D dimension.
"""

from __future__ import annotations

import hashlib
import pathlib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int32, Int64

from . import bert, json_text
from .command import import_tensorflow
from .types import RetrievalError

# Sequences are padded to the next of these, with one compilation each. Above 16 tokens at most a third is padding.
LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

# Default of `max_tokens`: passages of 100 words have up to 180 tokens.
_MAX_TOKENS = 256
_MIN_TOKENS = 3
# Default of `batch_tokens`. On a CPU larger batches exceed the cache; accelerators need them to be busy.
_CPU_BATCH_TOKENS = 2_048
_ACCELERATOR_BATCH_TOKENS = 1 << 17
# Batches of passages that are queued on the devices; more would only take memory.
_BATCHES_AHEAD = 8

# Files that determine the vectors of a checkpoint.
_MODEL_FILES = (
    'config.json',
    'model.safetensors',
    'vocab.txt',
    'tokenizer_config.json',
    '1_Pooling/config.json',
)
# Names of the passage prefix in sentence-transformers checkpoints, in order of preference.
_PASSAGE_PROMPTS = ('passage', 'document', 'corpus')


class TextEncoder:
    """A BERT text encoder with the prefixes it was trained with.

    Args:
      folder: Hugging Face or sentence-transformers checkpoint (config.json, model.safetensors, vocab.txt).
      query_prefix: text before every query: 'query: ' for E5, '' for MiniLM. None: taken from 'prompts' in the folder;
        it is an error if the folder has none, so that a prefix cannot be forgotten.
      passage_prefix: text before every passage: 'passage: ' for E5, '' for MiniLM. None: as above.
      max_tokens: longest sequence; None: taken from the folder, at most 256.
      dtype: of weights and activations; float32 or bfloat16.
      batch_tokens: tokens of one passage batch over all devices, padding included; None: chosen by the devices.

    Raises:
      RetrievalError: no usable checkpoint, unknown prefixes, or a setting outside its range.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        max_tokens: int | None = None,
        dtype: str = 'float32',
        batch_tokens: int | None = None,
    ):
        self.folder = pathlib.Path(folder)
        self._config = bert.read_config(self.folder)
        self.query_prefix, self.passage_prefix = _prefixes(
            self.folder, query_prefix, passage_prefix
        )
        self.max_tokens = self._checked_max_tokens(max_tokens, dtype)
        self.dimension = self._config.hidden_size
        self.settings: dict[str, Any] = {
            'kind': 'bert',
            'sha256': _checkpoint_digest(self.folder),
            'dimension': self.dimension,
            'pooling': self._config.pooling,
            'query_prefix': self.query_prefix,
            'passage_prefix': self.passage_prefix,
            'max_tokens': self.max_tokens,
            'dtype': dtype,
        }
        self.tokenizer = WordPiece(self.folder, self.max_tokens)
        params = bert.load(self.folder, self._config, dtype)
        # JAX clamps ids outside the table, so a wrong vocabulary would go unnoticed.
        if len(params['words']) < self.tokenizer.vocab_size:
            raise RetrievalError(
                f'{self.folder}: vocab.txt has {self.tokenizer.vocab_size} tokens, the weights '
                f'{len(params["words"])}; they are of different checkpoints'
            )
        # Only local devices are used, because every host encodes its own shards.
        self._mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ('data',))
        self._batch_sharding = jax.NamedSharding(self._mesh, jax.P('data'))
        # Passages use all devices. Queries use one, because a batch of one query cannot be split.
        self._replicated_params = jax.device_put(params, jax.NamedSharding(self._mesh, jax.P()))
        self._single_device_params = jax.device_put(params, jax.local_devices()[0])
        is_cpu = jax.default_backend() == 'cpu'
        default_tokens = _CPU_BATCH_TOKENS if is_cpu else _ACCELERATOR_BATCH_TOKENS
        self.batch_tokens = batch_tokens or default_tokens
        self._lengths = [*(n for n in LENGTHS if n < self.max_tokens), self.max_tokens]

    def _checked_max_tokens(self, max_tokens: int | None, dtype: str) -> int:
        """Returns `max_tokens`, or for None the default; raises RetrievalError if it or the dtype is not supported."""
        positions = self._config.positions
        # The default is capped at 256: passages of 100 words are shorter, so more lengths would only cost compilations.
        if max_tokens is None:
            settings = _read_optional_json(self.folder / 'sentence_bert_config.json')
            max_tokens = min(_MAX_TOKENS, settings.get('max_seq_length') or positions)
        valid_length = _MIN_TOKENS <= max_tokens <= positions
        if not valid_length or dtype not in ('float32', 'bfloat16'):
            raise RetrievalError(
                f'{self.folder}: max_tokens {max_tokens} must lie between 3 and {positions}, '
                f'dtype {dtype!r} must be float32 or bfloat16'
            )
        return max_tokens

    def encode_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, 'queries dimension']:
        """Returns unit vectors of queries, float32 [Q, D]; each depends on its own query only, bit for bit."""
        pending = []
        for query in queries:
            token_ids = self.tokenizer(self.query_prefix + query)
            padded_length = next(n for n in self._lengths if len(token_ids) <= n)
            padded_ids = np.full((1, padded_length), self.tokenizer.pad_id, np.int32)
            padded_ids[0, : len(token_ids)] = token_ids
            length = np.array([len(token_ids)], np.int32)
            # JAX dispatches asynchronously: the next query is tokenised while this one is encoded.
            pending.append(
                bert.encode(self._config, self._single_device_params, padded_ids, length)
            )
        if not pending:
            return np.zeros((0, self.dimension), np.float32)
        return np.concatenate([np.asarray(vector) for vector in pending])

    def encode(self, texts: Iterable[str]) -> Float32[np.ndarray, 'passages dimension']:
        """Returns unit vectors of passages in wire form, float32 [N, D], in the order of `texts`.

        Passages share batches, so the last bits of a vector depend on the other texts of the call.
        """
        encoded: list[tuple[np.ndarray, jax.Array]] = []
        for rows, ids, length in self._batches(texts):
            device_ids = jax.device_put(ids, self._batch_sharding)
            device_length = jax.device_put(length, self._batch_sharding)
            vectors = bert.encode(self._config, self._replicated_params, device_ids, device_length)
            encoded.append((rows, vectors))
            # Waits for an earlier batch, so that the device queue stays short.
            if len(encoded) > _BATCHES_AHEAD:
                encoded[-_BATCHES_AHEAD][1].block_until_ready()
        # The number of texts is known at the end only: they can come from a generator.
        total = sum(len(rows) for rows, _ in encoded)
        result = np.zeros((total, self.dimension), np.float32)
        for rows, vectors in encoded:
            # Batches are filled up with empty rows at the end.
            result[rows] = np.asarray(vectors)[: len(rows)]
        return result

    def _batches(
        self, texts: Iterable[str]
    ) -> Iterator[
        tuple[
            Int64[np.ndarray, ' rows'],
            Int32[np.ndarray, 'batch tokens'],
            Int32[np.ndarray, ' batch'],
        ]
    ]:
        """Yields batches of texts of similar length, in no particular order.

        All batches of a padded length have the same number of rows, so that each length is compiled once. The last one
        of a length is filled up with empty rows.

        Yields:
          numbers of the texts, int64 [n]; token ids, int32 [B, L] with B ≥ n; tokens of each row without padding,
          int32 [B], 1 for an empty row.
        """
        tf = import_tensorflow()

        devices = self._mesh.size
        batch_sizes = []
        for padded_length in self._lengths:
            rows_per_device = max(1, self.batch_tokens // (padded_length * devices))
            batch_sizes.append(rows_per_device * devices)

        def normalised_texts():
            for row, text in enumerate(texts):
                yield row, self.tokenizer.normalise(self.passage_prefix + text)

        signature = (tf.TensorSpec((), tf.int64), tf.TensorSpec((), tf.string))
        dataset = tf.data.Dataset.from_generator(normalised_texts, output_signature=signature)
        # TensorFlow tokenises in parallel, without Python's global lock.
        dataset = dataset.map(
            lambda row, text: (row, self.tokenizer.tokenize(text)),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        dataset = dataset.map(lambda row, ids: (row, ids, tf.size(ids)))
        # The boundaries are exclusive, hence n + 1; no text is longer than the last length, whose bucket stays empty.
        dataset = dataset.bucket_by_sequence_length(
            lambda row, ids, size: size,
            bucket_boundaries=[n + 1 for n in self._lengths],
            bucket_batch_sizes=[*batch_sizes, 1],
            padding_values=(np.int64(0), np.int32(self.tokenizer.pad_id), np.int32(0)),
            pad_to_bucket_boundary=True,
        )
        for rows, ids, length in dataset.prefetch(4).as_numpy_iterator():
            missing = batch_sizes[self._lengths.index(ids.shape[1])] - len(rows)
            padded_ids = np.pad(ids, ((0, missing), (0, 0)), constant_values=self.tokenizer.pad_id)
            # Length 1 instead of 0 keeps the mean over tokens defined.
            filled_lengths = np.pad(length, (0, missing), constant_values=1)
            yield rows, padded_ids, filled_lengths


def _prefixes(
    folder: pathlib.Path, query_prefix: str | None, passage_prefix: str | None
) -> tuple[str, str]:
    """Returns (query prefix, passage prefix); a prefix that is None is taken from the folder.

    Raises:
      RetrievalError: a prefix is None and the folder has none either.
    """
    prompts = _read_optional_json(folder / 'config_sentence_transformers.json').get('prompts') or {}
    if query_prefix is None:
        # An empty prompt in the folder counts as none: many checkpoints have empty entries by default.
        query_prefix = prompts.get('query') or None
    if passage_prefix is None:
        stored_prefixes = [prompts[key] for key in _PASSAGE_PROMPTS if prompts.get(key)]
        passage_prefix = next(iter(stored_prefixes), None)
    # A wrong prefix lowers recall without any error, so none is guessed.
    if query_prefix is None or passage_prefix is None:
        raise RetrievalError(
            f"{folder}: does not say its prefixes; name them ('query: ' and 'passage: ' for E5, '' and '' for none)"
        )
    return query_prefix, passage_prefix


def _checkpoint_digest(folder: pathlib.Path) -> str:
    """Returns the SHA-256 over the files that determine the vectors."""
    total = hashlib.sha256()
    for name in _MODEL_FILES:
        path = folder / name
        if not path.exists():
            continue
        with path.open('rb') as file:
            digest = hashlib.file_digest(file, 'sha256').hexdigest()
        total.update(f'{name}\0{digest}\n'.encode())
    return total.hexdigest()


def _read_optional_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of a JSON file; {} if there is no such file; RetrievalError if it is not JSON."""
    if not path.exists():
        return {}
    return json_text.load_object(path, 'correct or remove the file', float)


# ---- wordpiece -------------------------------------------------------------------------------------
#
# WordPiece tokens as BERT checkpoints expect them: normalisation in Python, then TensorFlow Text's WordPiece.
#
# The reference is `BertNormalizer` and `BertPreTokenizer` of the `tokenizers` library. TensorFlow Text's own BERT
# tokenizer folds case by NFKC (ς becomes σ, ² becomes 2) and measures the longest word in bytes. The text is therefore
# cleaned, folded and cut into words here, character by character, and only WordPiece itself (fast, greedy longest
# match; Song et al. 2021, arXiv:2012.15524) is done by TensorFlow Text.
#
# Two differences from the reference are intended. A text never becomes a control token: '[SEP]' in a passage is three
# words. And some 500 characters added after Unicode 8 count as current Unicode classifies them (punctuation, accents);
# the reference takes them for letters, but no vocabulary contains them.


# A longer word is unknown as a whole, as in the reference (characters, not bytes).
LONGEST_WORD = 100
# A noncharacter: it is in no vocabulary, so that WordPiece reads it as unknown.
_UNKNOWN = '\ufffe'
# UTF-8 needs at most four bytes per character.
_LONGEST_WORD_BYTES = 4 * LONGEST_WORD
# Enough for [CLS], [SEP] and at least one token.

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
