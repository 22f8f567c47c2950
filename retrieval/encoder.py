"""Text encoder of a BERT checkpoint: WordPiece in a tf.data pipeline, batches by length, one JAX program per length.

A query is encoded by itself, in a program whose shape its own length decides, so that no other query can change its
vector; passages, of which there are millions, share batches that are split over all devices.

Letters: N passages, Q queries, D dimension.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from . import bert
from .corpus import contents
from .types import RetrievalError
from .wordpiece import WordPiece

# Sequences are padded to the next of these: one compilation each, and at most a third of the work is padding.
LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class TextEncoder:
    """A BERT text encoder and the prefixes it was trained with.

    Args:
      folder: Hugging Face or sentence-transformers checkpoint (config.json, model.safetensors, vocab.txt).
      query_prefix, passage_prefix: what is put before every text: 'query: ' and 'passage: ' for E5, '' for MiniLM.
        None: as the folder says under 'prompts'; one that says nothing is an error, so they cannot be forgotten.
      max_tokens: longest sequence; None: as the folder says, at most 256 (passages of 100 to 180 words).
      dtype: of weights and activations; float32 or bfloat16.
      batch_tokens: tokens of one passage batch over all devices, padding included.

    Raises:
      RetrievalError: a folder that is no such checkpoint; prefixes that nobody named; a setting outside its range.
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
        folder = pathlib.Path(folder)
        self.folder = folder
        self._config = bert.read_config(folder)
        said = _optional(folder / 'config_sentence_transformers.json').get('prompts') or {}
        passage = next(
            (said[key] for key in ('passage', 'document', 'corpus') if said.get(key)), None
        )
        query_prefix = said.get('query') or None if query_prefix is None else query_prefix
        passage_prefix = passage if passage_prefix is None else passage_prefix
        if query_prefix is None or passage_prefix is None:
            raise RetrievalError(
                f"{folder}: does not say its prefixes; name them ('query: ' and 'passage: ' for E5, '' and '' for none)"
            )
        self.query_prefix, self.passage_prefix = query_prefix, passage_prefix
        stated = (
            _optional(folder / 'sentence_bert_config.json').get('max_seq_length')
            or self._config.positions
        )
        self.max_tokens = min(256, stated) if max_tokens is None else max_tokens
        if not 3 <= self.max_tokens <= self._config.positions or dtype not in (
            'float32',
            'bfloat16',
        ):
            raise RetrievalError(
                f'{folder}: max_tokens {self.max_tokens} must lie between 3 and {self._config.positions}, '
                f'dtype {dtype!r} must be float32 or bfloat16'
            )
        self.dimension = self._config.hidden_size
        self.settings: dict[str, Any] = dict(
            kind='bert',
            sha256=_digest(folder),
            dimension=self.dimension,
            pooling=self._config.pooling,
            query_prefix=self.query_prefix,
            passage_prefix=self.passage_prefix,
            max_tokens=self.max_tokens,
            dtype=dtype,
        )
        self.tokenizer = WordPiece(folder, self.max_tokens)
        params = bert.load(folder, self._config, dtype)
        if len(params['words']) < self.tokenizer.vocab_size:
            raise RetrievalError(
                f'{folder}: vocab.txt has {self.tokenizer.vocab_size} tokens, the weights {len(params["words"])}; '
                'they are of different checkpoints'
            )
        self._mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ('data',))
        self._rows = jax.NamedSharding(self._mesh, jax.P('data'))
        self._replicated = jax.device_put(params, jax.NamedSharding(self._mesh, jax.P()))
        self._single = jax.device_put(params, jax.local_devices()[0])
        # On CPUs larger batches leave the cache; accelerators want them.
        self.batch_tokens = batch_tokens or (2048 if jax.default_backend() == 'cpu' else 1 << 17)
        self._lengths = [*(n for n in LENGTHS if n < self.max_tokens), self.max_tokens]

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32 [Q, D]; each a function of its own query alone, to the bit."""
        pending = []
        for query in queries:
            ids = self.tokenizer(self.query_prefix + query)
            padded = np.full((1, self._bucket(len(ids))), self.tokenizer.pad_id, np.int32)
            padded[0, : len(ids)] = ids
            pending.append(
                bert.encode(self._config, self._single, padded, np.array([len(ids)], np.int32))
            )
        return np.concatenate(
            [np.asarray(v) for v in pending] or [np.zeros((0, self.dimension), np.float32)]
        )

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """Unit vectors of passages in wire form, float32 [N, D]."""
        if len(titles) != len(texts):
            raise RetrievalError(
                f'encode_passages: {len(titles)} titles but {len(texts)} texts; give one of each'
            )
        return self.encode(contents(title, text) for title, text in zip(titles, texts))

    def encode(self, texts: Iterable[str]) -> np.ndarray:
        """Unit vectors of texts as passages, float32 [N, D], in their order; bytes depend on all the texts."""
        found: list[tuple[np.ndarray, jax.Array]] = []
        for rows, ids, length in self._batches(texts):
            ids, length = (jax.device_put(x, self._rows) for x in (ids, length))
            found.append((rows, bert.encode(self._config, self._replicated, ids, length)))
            if len(found) > 8:  # far enough ahead of the device
                found[-8][1].block_until_ready()
        vectors = np.zeros((sum(len(rows) for rows, _ in found), self.dimension), np.float32)
        for rows, batch in found:
            vectors[rows] = np.asarray(batch)[: len(rows)]
        return vectors

    def _batches(self, texts: Iterable[str]):
        """Batches of one length each: (rows int64 [b], ids int32 [B, L], length int32 [B]), filled up to B ≥ b rows."""
        import tensorflow as tf

        devices = self._mesh.size
        sizes = [max(1, self.batch_tokens // (n * devices)) * devices for n in self._lengths]

        def normalised():
            for row, text in enumerate(texts):
                yield row, self.tokenizer.normalise(self.passage_prefix + text)

        data = tf.data.Dataset.from_generator(
            normalised, output_signature=(tf.TensorSpec((), tf.int64), tf.TensorSpec((), tf.string))
        )
        data = data.map(
            lambda row, text: (row, self.tokenizer.tokenize(text)),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        data = data.map(lambda row, ids: (row, ids, tf.size(ids)))
        data = data.bucket_by_sequence_length(
            lambda row, ids, size: size,
            bucket_boundaries=[n + 1 for n in self._lengths],
            bucket_batch_sizes=[*sizes, 1],
            padding_values=(np.int64(0), np.int32(self.tokenizer.pad_id), np.int32(0)),
            pad_to_bucket_boundary=True,
        )
        for rows, ids, length in data.prefetch(4).as_numpy_iterator():
            missing = sizes[self._lengths.index(ids.shape[1])] - len(rows)
            ids = np.pad(ids, ((0, missing), (0, 0)), constant_values=self.tokenizer.pad_id)
            yield rows, ids, np.pad(length, (0, missing), constant_values=1)

    def _bucket(self, tokens: int) -> int:
        return next(n for n in self._lengths if tokens <= n)


def _digest(folder: pathlib.Path) -> str:
    """SHA-256 over what decides a vector: weights, vocabulary and the settings of model and tokenizer."""
    total = hashlib.sha256()
    for name in (
        'config.json',
        'model.safetensors',
        'vocab.txt',
        'tokenizer_config.json',
        '1_Pooling/config.json',
    ):
        path = folder / name
        if path.exists():
            with path.open('rb') as file:
                total.update(
                    f'{name}\0{hashlib.file_digest(file, "sha256").hexdigest()}\n'.encode()
                )
    return total.hexdigest()


def _optional(path: pathlib.Path) -> dict[str, Any]:
    """A JSON file that may be absent."""
    try:
        return json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}
    except ValueError as error:
        raise RetrievalError(f'{path}: not JSON ({error}); mend or remove the file') from error
