"""Log-probs of given texts: teacher-forced passes over the weights of the slots.

Every data shard has one slot for them, in a cache of its own that exists while texts wait. A context is prefilled once;
then each of its texts is fed behind it, over the one before. A pass feeds one chunk of tokens. All passes have the same
shape and follow one another in a loop of the program, so that the bits of a text depend on it and its context alone.
Several texts in one pass would save little: on a CPU the time of a pass grows with its tokens (0.9 ms for 32, 4.0 ms
for 128 of the miniature model), and an accelerator computes a chunk of 256 about as long as it reads the weights.

Keys and values of rollouts are neither read nor changed: one that has ended has given up its slot and pages.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from zeroplay_jax.policy import delta, experts, head, sharding, transformer
from zeroplay_jax.rollout.sampler import Sampler
from zeroplay_jax.rollout.weights import WeightStore


@dataclasses.dataclass(eq=False)
class ScoreRequest:
    """Texts behind a context.

    Attributes:
      weights, version: as of `Request`; the version is a number.
      context: int32 ids, at least one.
      texts: int32 ids of every text, which fits into a slot with the context.
      identity: smaller ones are served first.
      owner: as of `Request`.
      logp: what is computed so far, of one text after the other.
      future: its result, float32 [T] for every text.
    """

    weights: str
    version: int
    context: Int[np.ndarray, ' tokens']
    texts: Sequence[Int[np.ndarray, ' tokens']]
    identity: tuple[int, ...]
    owner: object
    logp: list[float] = dataclasses.field(default_factory=list)
    future: asyncio.Future = dataclasses.field(default_factory=asyncio.Future)

    def passes(self, chunk: int, rereads: bool = False) -> Iterator[tuple]:
        """Yields (request, position, ids, number of wanted log-probs) of every pass.

        With `rereads` the context is fed before every text, as a model needs whose state cannot be rewound.

        The first id has the position. All but the last one are fed, and each predicts the next one. Of the context no
        log-probs are wanted; its last token begins every text, so that it is fed with it.
        """
        end = len(self.context) - 1
        sequences = [(0, self.context)]
        for number, text in enumerate(self.texts):
            if number and rereads:
                sequences.append((0, self.context))
            sequences.append((end, np.append(self.context[end:], text)))
        for first, ids in sequences:
            # Without tokens there is a pass, too, so that every request has some.
            for offset in range(0, max(len(ids) - 1, 1), chunk):
                part = ids[offset : offset + chunk + 1]
                yield self, first + offset, part, 0 if ids is self.context else len(part) - 1

    def add(self, logp: Float[np.ndarray, ' tokens']) -> None:
        """Adds the log-probs of a pass; resolves the future when all are there."""
        self.logp += logp.tolist()
        lengths = [len(text) for text in self.texts]
        # The future is done already if its episode was cancelled.
        if len(self.logp) == sum(lengths) and not self.future.done():
            ends = np.cumsum(lengths, dtype=int)
            self.future.set_result(np.split(np.asarray(self.logp, np.float32), ends)[:-1])


@dataclasses.dataclass(frozen=True)
class Scores:
    """A device call in progress.

    Attributes:
      logp: log-probs of the predicted tokens of its passes.
      passes: (request, index in `logp`, number of wanted log-probs) of those that are used.
    """

    logp: Float[Array, 'shards passes chunk']
    passes: list[tuple]


def _score(
    model: transformer.ModelConfig,
    reads_used: bool,
    params: transformer.Params,
    cache: transformer.Cache,
    tokens: Int[Array, '1 passes chunk+1'],
    start: Int[Array, '1 passes'],
    wanted: Int[Array, '1 passes'],
    fed: Int[Array, '1 passes'],
    count: Int[Array, ' 1'],
    adapter: Int[Array, ' 1'] | None,
) -> tuple[transformer.Cache, Float[Array, '1 passes chunk']]:
    """Returns the cache after the first `count` passes, and the log-probs, at temperature 1, of tokens[…, 1:].

    Only those of passes with `wanted` log-probs are computed; `fed` are the tokens of a pass. What is in the cache
    behind the tokens of a pass and of those before it in its sequence is never read.
    """
    slot = jnp.zeros(1, jnp.int32)

    def compute(number, carry):
        cache, logp = carry
        ids, first = tokens[:, number], start[:, number]
        states, cache = transformer.hidden_chunk(
            model, params, ids[:, :-1], slot, first, cache, reads_used, adapter, fed[:, number]
        )

        def predicted():
            logits = head.logits(model, params, states[0])
            return head.logp_and_entropy(logits, ids[0, 1:], False)[0]

        new_logp = jax.lax.cond(wanted[0, number] > 0, predicted, lambda: logp[0, number])
        return cache, logp.at[0, number].set(new_logp)

    logp = jnp.zeros(tokens[..., 1:].shape, jnp.float32)
    return jax.lax.fori_loop(0, count[0], compute, (cache, logp))


@functools.lru_cache
def programs(model: transformer.ModelConfig, positions: int, mesh: Mesh) -> dict:
    """Returns the jitted programs: 'empty' makes the cache, with so many positions; 'score' is `_score`."""
    model = experts.on_mesh(model, mesh)
    shards = sharding.data_shards(mesh)
    empty = functools.partial(transformer.empty_cache, model, shards, positions)
    # Accelerators would compute one length after another.
    reads_used = mesh.devices.flat[0].platform == 'cpu'
    score = sharding.per_data_shard(
        functools.partial(_score, model, reads_used), mesh, has_params=True
    )
    layout = delta.layout(jax.eval_shape(empty), mesh, sharding.cache(mesh))
    layouts = (layout, sharding.replicated(mesh))
    return dict(
        empty=jax.jit(empty, out_shardings=layout),
        score=jax.jit(score, donate_argnums=1, out_shardings=layouts),
    )


class Scorer:
    """Texts that wait for their log-probs, of the weights of a sampler."""

    def __init__(self, sampler: Sampler):
        self._sampler = sampler
        # In the order of their identities.
        self._queue: list[ScoreRequest] = []
        # What every data shard computes next, of one version of some weights. Those of a request stay together.
        self._passes = [collections.deque[tuple]() for _ in range(sampler.shards)]
        self._version = ('', 0)
        self._cache: transformer.Cache | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a text waits."""
        return bool(self._queue) or any(self._passes)

    def enqueue(self, request: ScoreRequest) -> asyncio.Future:
        """Adds texts; the future's result is a list of their log-probs, float32 [T]."""
        bisect.insort(self._queue, request, key=lambda each: each.identity)
        return request.future

    def start(self, weights: WeightStore) -> list[Scores]:
        """Starts a call for the first texts that wait, if there are any; does not wait for the device."""
        if not self.is_waiting:
            return []
        config, mesh = self._sampler.config, self._sampler.mesh
        # No more tokens than a slot holds, so that rollouts do not wait for many texts.
        most = -(-config.context // config.chunk)
        self._fill(most)
        shards = len(self._passes)
        tokens = np.zeros((shards, most, config.chunk + 1), np.int32)
        start = np.zeros((shards, most), np.int32)
        wanted, fed = np.zeros_like(start), np.zeros_like(start)
        count = np.zeros(shards, np.int32)
        computed = []
        for shard, passes in enumerate(self._passes):
            count[shard] = min(len(passes), most)
            for number in range(count[shard]):
                index = shard, number
                request, start[index], ids, wanted[index] = passes.popleft()
                tokens[index][: len(ids)] = ids
                fed[index] = len(ids) - 1
                computed.append((request, index, wanted[index]))
        params, place = weights.of(*self._version)
        adapter = None if place is None else np.full(shards, place, np.int32)
        # A pass that begins near the end of a slot runs past it.
        compiled = programs(self._sampler.model, config.context + config.chunk, mesh)
        cache = compiled['empty']() if self._cache is None else self._cache
        cache, logp = compiled['score'](params, cache, tokens, start, wanted, fed, count, adapter)
        # The next passes may be of a text whose context is in it.
        self._cache = cache if any(self._passes) else None
        return [Scores(logp, computed)]

    def _fill(self, most: int) -> None:
        """Gives requests to data shards until each has `most` passes; a call has one version of the weights."""
        while self._queue:
            request = self._queue[0]
            version = (request.weights, request.version)
            passes = min(self._passes, key=len)
            if len(passes) >= most or (any(self._passes) and version != self._version):
                break
            self._version = version
            sampler = self._sampler
            passes += self._queue.pop(0).passes(sampler.config.chunk, sampler.has_states)

    def abandon(self, owner: object = None) -> None:
        """Drops the texts of these episodes, or with None all."""

        def is_kept(request: ScoreRequest) -> bool:
            if owner is not None and request.owner is not owner:
                return True
            request.future.cancel()
            return False

        self._queue = list(filter(is_kept, self._queue))
        for shard, passes in enumerate(self._passes):
            self._passes[shard] = collections.deque(each for each in passes if is_kept(each[0]))
        if not any(self._passes):
            self._cache = None


def read(scores: Scores, logp: Float[np.ndarray, 'shards passes chunk']) -> None:
    """Gives the log-probs of a call to the requests that they are of."""
    for request, index, count in scores.passes:
        request.add(logp[index][:count])
