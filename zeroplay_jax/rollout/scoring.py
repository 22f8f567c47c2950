"""Log-probs of given texts: teacher-forced passes over the weights of the slots, a row per data shard and call.

A row is a context and a text behind it, and is computed alone, so that its bits depend on nothing else. Rows are padded
to a few static lengths, each a program of its own. The context is computed again for every text: keys and values in
the slots are neither read nor changed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy import sharding, transformer
from zeroplay_jax.policy.transformer import ModelConfig, Params
from zeroplay_jax.rollout.sampler import Sampler
from zeroplay_jax.rollout.weights import WeightStore

# Lengths of rows: the slot, and it divided by these.
_DIVISORS = (4, 2, 1)


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """A text behind a context.

    Attributes:
      weights, version: as of `Request`; the version is a number.
      tokens: int32, ids of both.
      start: index of the text's first token, at least 1.
      identity: smaller ones are served first.
      run: as of `Request`.
    """

    weights: str
    version: int
    tokens: Int[np.ndarray, ' tokens']
    start: int
    identity: tuple[int, ...]
    run: object = None


@dataclasses.dataclass(frozen=True)
class Scores:
    """A device call in progress.

    Attributes:
      logp: log-probs of the tokens of its rows.
      requests: request of every row that is used, and the future of its result.
    """

    logp: Float[Array, 'rows length']
    requests: list[tuple[ScoreRequest, asyncio.Future]]


def _score(
    model: ModelConfig,
    params: Params,
    tokens: Int[Array, 'rows length'],
    start: Int[Array, ' rows'],
    stop: Int[Array, ' rows'],
    adapter: Int[Array, ' rows'] | None,
) -> Float[Array, 'rows length']:
    """Returns the log-probs, at temperature 1, of tokens[r, start[r]:stop[r]]; 0 elsewhere."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    is_used = positions < stop[:, None]
    wanted = is_used & (positions >= start[:, None])
    segment = is_used.astype(jnp.int32)
    logp, _ = transformer.score(
        model, params, tokens, positions, segment, wanted=wanted, adapter=adapter
    )
    return jnp.where(wanted, logp, 0.0)


@functools.lru_cache
def program(model: ModelConfig, mesh: Mesh) -> jax.stages.Wrapped:
    """Returns the jitted program of `_score`, with rows over the data shards; it compiles once per length of rows."""
    # What only training needs is left out: each shard has its rows for itself.
    attention = 'dense' if model.attention == 'dense' else 'blocked'
    model = dataclasses.replace(model, attention=attention, scan=False, remat=False, mesh=None)
    local = functools.partial(_score, model)
    return jax.jit(
        sharding.per_data_shard(local, mesh, has_params=True),
        out_shardings=sharding.replicated(mesh),
    )


class Scorer:
    """Texts that wait for their log-probs, of the weights of a sampler."""

    def __init__(self, sampler: Sampler):
        self._sampler = sampler
        # A heap of (identity, number, request, future); the number breaks ties.
        self._queue: list[tuple[tuple[int, ...], int, ScoreRequest, asyncio.Future]] = []
        self._numbers = itertools.count()

    @property
    def is_waiting(self) -> bool:
        """Whether a text waits."""
        return bool(self._queue)

    def enqueue(self, request: ScoreRequest) -> asyncio.Future:
        """Adds a text, which fits into a slot with its context; the future's result is float32 [T], its log-probs."""
        future = asyncio.get_running_loop().create_future()
        entry = (request.identity, next(self._numbers), request, future)
        heapq.heappush(self._queue, entry)
        return future

    def start(self, weights: WeightStore) -> list[Scores]:
        """Starts a call for the first texts that wait, if there are any; does not wait for the device."""
        if not self._queue:
            return []
        first = self._queue[0][2]
        length = self._length(first)
        requests: list[tuple[ScoreRequest, asyncio.Future]] = []
        # Others are taken where a shard would be idle, and only such that this call can compute.
        while self._queue and len(requests) < self._sampler.shards:
            _, _, request, future = self._queue[0]
            same_weights = (request.weights, request.version) == (first.weights, first.version)
            if not same_weights or self._length(request) != length:
                break
            heapq.heappop(self._queue)
            requests.append((request, future))
        rows = self._sampler.shards
        tokens = np.zeros((rows, length), np.int32)
        start = np.zeros(rows, np.int32)
        stop = np.zeros(rows, np.int32)
        for row, (request, _) in enumerate(requests):
            stop[row] = len(request.tokens)
            tokens[row, : stop[row]] = request.tokens
            start[row] = request.start
        params, number = weights.of(first.weights, first.version)
        adapter = None if number is None else np.full(rows, number, np.int32)
        compiled = program(self._sampler.model, self._sampler.mesh)
        return [Scores(compiled(params, tokens, start, stop, adapter), requests)]

    def _length(self, request: ScoreRequest) -> int:
        """Returns the length of the row of a request: the smallest one that it fits."""
        context = self._sampler.config.context
        lengths = [-(-context // divisor) for divisor in _DIVISORS]
        return next(length for length in lengths if len(request.tokens) <= length)

    def abandon(self, run: object = None) -> None:
        """Drops the texts of these episodes, or with None all."""
        kept = []
        for entry in self._queue:
            _, _, request, future = entry
            if run is None or request.run is run:
                future.cancel()
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._queue = kept


def read(scores: Scores, logp: Float[np.ndarray, 'rows length']) -> None:
    """Resolves the futures of a call with the log-probs that it computed."""
    for row, (request, future) in enumerate(scores.requests):
        # The future is done already if its episode was cancelled.
        if not future.done():
            future.set_result(logp[row, request.start : len(request.tokens)].copy())
