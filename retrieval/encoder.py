"""Text encoder of a BERT checkpoint: WordPiece tokens, batches by length, one JAX program per length.

Each query is encoded by itself, in a program whose shape depends on its own length only, so that no other query can
change its vector. Passages, of which there are millions, share batches that are split over all devices.

Letters: N passages, Q queries, D dimension.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int32, Int64

from . import encoder_folder
from .bert import bert_vectors, load_params, read_config
from .jax_options import all_devices
from .types import RetrievalError
from .wordpiece import WordPiece

# Sequences are padded to the next of these, with one compilation each. Above 16 tokens at most a third is padding.
LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

_MIN_TOKENS = 3
# Default of `batch_tokens`. On a CPU larger batches exceed the cache; accelerators need them to be busy.
_CPU_BATCH_TOKENS = 2_048
_ACCELERATOR_BATCH_TOKENS = 1 << 17
# Batches of passages that are queued on the devices; more would only take memory.
_BATCHES_AHEAD = 8
# Passages that are tokenised side by side.
_TOKENIZED_AT_ONCE = 1_024


class TextEncoder:
    """A BERT text encoder with the prefixes it was trained with.

    Args:
      folder: Hugging Face or sentence-transformers checkpoint (config.json, model.safetensors, tokenizer.json or
        vocab.txt), or 'minilm'.
      query_prefix: text before every query: 'query: ' for E5, '' for MiniLM. None: taken from 'prompts' in the folder;
        it is an error if the folder has none, so that a prefix cannot be forgotten.
      passage_prefix: text before every passage: 'passage: ' for E5, '' for MiniLM. None: as above.
      max_tokens: longest sequence; None: taken from the folder, as sentence-transformers does.
      dtype: of weights and activations; float32 or bfloat16.
      batch_tokens: tokens of one passage batch over all devices, padding included; None: chosen by the devices.

    Raises:
      UserError: no usable checkpoint, unknown prefixes, a setting outside its range, or as `jax_options.all_devices`.
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
        all_devices()
        about = encoder_folder.read(encoder_folder.located(folder))
        # An index records it, and a name is found in other environments too.
        self.folder = pathlib.Path(folder)
        self._config = read_config(about.transformer, about.pooling)
        self.query_prefix, self.passage_prefix = _prefixes(about, query_prefix, passage_prefix)
        self.max_tokens = self._checked_max_tokens(max_tokens, about.max_tokens, dtype)
        self.dimension = self._config.hidden_size
        self.settings: dict[str, Any] = {
            'kind': 'bert',
            'sha256': about.digest(),
            'dimension': self.dimension,
            'pooling': self._config.pooling,
            'query_prefix': self.query_prefix,
            'passage_prefix': self.passage_prefix,
            'max_tokens': self.max_tokens,
            'dtype': dtype,
        }
        self.tokenizer = WordPiece(about.transformer, self.max_tokens, about.lower_case)
        self._check_prefixes()
        params = load_params(about.transformer, self._config, dtype)
        # JAX clamps ids outside the table, so a wrong vocabulary would go unnoticed.
        if len(params['words']) < self.tokenizer.vocab_size:
            raise RetrievalError(
                f'{self.folder}: the tokenizer has {self.tokenizer.vocab_size} tokens, the weights '
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

    def _checked_max_tokens(self, given: int | None, of_folder: int | None, dtype: str) -> int:
        """Returns the longest sequence; raises RetrievalError if what is given is not supported, or the dtype."""
        positions = self._config.positions
        max_tokens = given
        if max_tokens is None:
            max_tokens = min(of_folder or positions, positions)
        valid_length = _MIN_TOKENS <= max_tokens <= positions
        if not valid_length or dtype not in ('float32', 'bfloat16'):
            raise RetrievalError(
                f'{self.folder}: max_tokens {max_tokens} must lie between 3 and {positions}, '
                f'dtype {dtype!r} must be float32 or bfloat16'
            )
        return max_tokens

    def _check_prefixes(self) -> None:
        """Raises RetrievalError for a prefix with a control token, which would be read as words."""
        for token in self.tokenizer.control_tokens:
            if token in self.query_prefix + self.passage_prefix:
                raise RetrievalError(
                    f'{self.folder}: the control token {token} in a prefix is not supported; take another encoder'
                )

    def encode_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, 'queries dimension']:
        """Returns unit vectors of queries, float32 [Q, D]; each depends on its own query only, bit for bit."""
        pending = []
        for query in queries:
            (ids,) = self.tokenizer([self.query_prefix + query])
            padded, length = self._padded([ids], 1)
            # JAX dispatches asynchronously: the next query is tokenised while this one is encoded.
            pending.append(bert_vectors(self._config, self._single_device_params, padded, length))
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
            vectors = bert_vectors(self._config, self._replicated_params, device_ids, device_length)
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
        devices = self._mesh.size
        waiting: dict[int, list[tuple[int, list[int]]]] = {length: [] for length in self._lengths}
        num_rows = {}
        for length in self._lengths:
            num_rows[length] = devices * max(1, self.batch_tokens // (length * devices))

        def batch(length: int):
            rows, ids = zip(*waiting[length], strict=True)
            waiting[length] = []
            return np.array(rows, np.int64), *self._padded(ids, num_rows[length])

        numbered = enumerate(texts)
        while block := list(itertools.islice(numbered, _TOKENIZED_AT_ONCE)):
            ids_of_block = self.tokenizer([self.passage_prefix + text for _, text in block])
            for (row, _), ids in zip(block, ids_of_block, strict=True):
                length = self._padded_length(ids)
                waiting[length].append((row, ids))
                if len(waiting[length]) == num_rows[length]:
                    yield batch(length)
        for length in self._lengths:
            if waiting[length]:
                yield batch(length)

    def _padded_length(self, ids: Sequence[int]) -> int:
        return next(length for length in self._lengths if len(ids) <= length)

    def _padded(
        self, ids_of_texts: Sequence[Sequence[int]], num_rows: int
    ) -> tuple[Int32[np.ndarray, 'batch tokens'], Int32[np.ndarray, ' batch']]:
        """Returns token ids of one padded length and the lengths without padding, filled up to a number of rows."""
        longest = max(ids_of_texts, key=len)
        shape = (num_rows, self._padded_length(longest))
        # Any id: what it becomes is masked.
        padded = np.zeros(shape, np.int32)
        # Length 1 instead of 0 keeps the mean over tokens of an empty row defined.
        lengths = np.ones(num_rows, np.int32)
        for row, ids in enumerate(ids_of_texts):
            padded[row, : len(ids)] = ids
            lengths[row] = len(ids)
        return padded, lengths


def _prefixes(
    about: encoder_folder.EncoderFolder, query_prefix: str | None, passage_prefix: str | None
) -> tuple[str, str]:
    """Returns (query prefix, passage prefix); a prefix that is None is taken from the folder.

    Raises:
      RetrievalError: a prefix is None and the folder has none either.
    """
    if query_prefix is None:
        query_prefix = about.query_prefix
    if passage_prefix is None:
        passage_prefix = about.passage_prefix
    # A wrong prefix lowers recall without any error, so none is guessed.
    if query_prefix is None or passage_prefix is None:
        raise RetrievalError(
            f"{about.path}: does not say its prefixes; give both --query-prefix and --passage-prefix ('query: ' and "
            "'passage: ' for E5, '' and '' for none)"
        )
    return query_prefix, passage_prefix
