"""The host side of rollouts: thousands of episode coroutines over a fixed number of slots.

A round: deliver finished searches, admit requests, prefill, start a decode burst, read the burst, hand new calls
to the search thread. Searches run while the next bursts decode; keys and values stay in the slot meanwhile. Results
are a function of the request alone (see rollout/sampler.py), so the order in which rounds happen to serve requests
changes nothing but time.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import heapq
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import jax
import numpy as np

from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.rollout.sampler import Sampler
from zeroplay_jax.rollout.search import SearchEnv
from zeroplay_jax.rollout.tokens import StopMatcher
from zeroplay_jax.types import ENV, POLICY, PROMPT, Trajectory, Turn, identity_key


@dataclasses.dataclass(frozen=True)
class Request:
    """`samples` rollouts of one prompt (int32 [P]) by the weights of that name.

    `identity` names the request within the run; earlier identities are served first. Temperature 0 is greedy.
    """

    weights: str
    prompt: np.ndarray
    identity: tuple[int, ...]
    env: SearchEnv
    samples: int = 1
    temperature: float = 1.0


class PromptTooLong(ValueError):
    """A prompt that leaves no room for a single new token."""


class _Group:
    """A request in progress: its samples share the prompt's keys and values."""

    def __init__(self, request: Request, future: asyncio.Future):
        self.request, self.future = request, future
        self.waiting = collections.deque(range(request.samples))
        self.results: list[Trajectory | None] = [None] * request.samples


class _Episode:
    """One sample in a slot: the host's copy of what the device holds, and the turn in progress."""

    def __init__(self, group: _Group, sample: int, slot: int, token_bytes):
        self.group, self.sample, self.slot, self._bytes = group, sample, slot, token_bytes
        request = group.request
        self.env, self.identity = request.env, (*request.identity, sample)
        self.tokens: list[int] = [int(t) for t in request.prompt]
        self.source = [PROMPT] * len(self.tokens)
        self.logp = [0.0] * len(self.tokens)
        self.turns: list[Turn] = []
        self.earlier: list[Trajectory] = []
        self.chunks = 0  # prefill calls still needed
        self.begin_turn()

    def begin_turn(self):
        self.matcher = StopMatcher(self._bytes, self.env.stops)
        self.turn_start = len(self.tokens)

    def limit(self, context: int) -> int:
        return min(len(self.tokens) + self.env.limits.turn_tokens, context)


class Lane:
    """The slots of one set of weights."""

    def __init__(self, sampler: Sampler, seed: int):
        self.sampler, self.seed = sampler, seed
        self.params: Params = {}
        self.version = 0
        slots = sampler.config.slots
        self.episodes: list[_Episode | None] = [None] * slots
        self.holder: list[_Group | None] = [None] * slots  # whose prompt a slot's first places hold
        self.queue: list[tuple[tuple[int, ...], int, _Group]] = []
        self.open: list[_Group] = []  # admitted, samples still waiting for a slot
        self.watch: Callable[[tuple[int, ...], list[int]], None] | None = (
            None  # told identity and ids after a burst
        )

    @property
    def active(self) -> int:
        return sum(e is not None for e in self.episodes)

    def _key(self, episode):
        # Noise is a function of key and position: a context that was cut short comes to the same positions again.
        return identity_key(
            self.seed, (*episode.identity, *([len(episode.earlier)] if episode.earlier else ()))
        )

    def admit(self) -> None:
        """Fills free slots: first the siblings of prompts that are prefilled, then the oldest requests."""
        free = self.clone_siblings()
        rows = []
        while free and self.queue:
            group = self.queue[0][2]
            reserved = sum(len(g.waiting) for g in self.open)
            if len(free) - reserved < group.request.samples and (self.open or self.active):
                break  # its siblings would find the prompt gone
            heapq.heappop(self.queue)
            rows.append(self._lead(group, free.pop(0)))
            if group.waiting:
                self.open.append(group)
        for group in self.open:  # a prompt that was overwritten before its last sibling came
            if free and not any(h is group for h in self.holder):
                rows.append(self._lead(group, free.pop(0)))
        self.open = [g for g in self.open if g.waiting]
        if rows:
            self.sampler.put(rows)

    def _lead(self, group, slot):
        """Row for `put` that opens a request in `slot`."""
        episode = self._enter(group, slot)
        episode.chunks = -(-(len(episode.tokens) - 1) // self.sampler.config.chunk)
        return self._row(episode, episode.tokens, 0)

    def _row(self, episode, tokens, start):
        limit = episode.limit(self.sampler.config.context)
        temperature = episode.group.request.temperature
        return (
            episode.slot,
            np.asarray(tokens, np.int32),
            start,
            limit,
            temperature,
            self._key(episode),
        )

    def _enter(self, group, slot):
        episode = _Episode(
            group, group.waiting.popleft(), slot, group.request.env.codec.token_bytes
        )
        self.episodes[slot], self.holder[slot] = episode, group
        return episode

    def clone_siblings(self) -> list[int]:
        """Copies prefilled prompts into free slots for the samples that wait; returns the slots still free."""
        width, context = self.sampler.config.put_rows, self.sampler.config.context
        free = [s for s, e in enumerate(self.episodes) if e is None]
        for group in self.open:
            source = next(
                (s for s, h in enumerate(self.holder) if h is group and self._prefilled(s)), None
            )
            while source is not None and free and group.waiting:
                rows = []
                while free and group.waiting and len(rows) < width:
                    e = self._enter(group, free.pop(0))
                    rows.append((e.slot, e.limit(context), group.request.temperature, self._key(e)))
                self.sampler.clone(source, rows, len(group.request.prompt))
        self.open = [g for g in self.open if g.waiting]
        return free

    def _prefilled(self, slot):
        episode = self.episodes[slot]
        return episode is None or episode.chunks == 0 or bool(episode.turns)

    def fill(self) -> None:
        """Prefills everything that was put."""
        rows = self.sampler.config.fill_rows
        while todo := [e for e in self.episodes if e is not None and e.chunks > 0][:rows]:
            self.sampler.extend(self.params, [e.slot for e in todo])
            for episode in todo:
                episode.chunks -= 1

    def reply(self, replies: Sequence[tuple[_Episode, np.ndarray]]) -> None:
        """Appends observations; an episode without room for one and a token more ends there."""
        context, chunk = self.sampler.config.context, self.sampler.config.chunk
        rows = []
        for episode, ids in replies:
            start = episode.turn_start
            turn = episode.tokens[start:]
            kept = episode.env.remembered(turn)
            if kept == turn:
                start, kept = len(episode.tokens), []
            if start + len(kept) + len(ids) >= context:
                self.finish(episode, 'context')
                continue
            if start < len(episode.tokens):
                self._cut(episode, start, kept)
            episode.tokens += ids.tolist()
            episode.source += [ENV] * len(ids)
            episode.logp += [0.0] * len(ids)
            episode.chunks = -(-(len(kept) + len(ids)) // chunk)
            episode.begin_turn()
            rows.append((episode, episode.tokens[start:], start))
        if rows:
            self.sampler.put([self._row(episode, ids, start) for episode, ids, start in rows])

    def _cut(self, episode, start, kept):
        """Ends a context: the next begins with its first `start` tokens and those `kept` of its last turn."""
        episode.earlier.append(self._trajectory(episode, 'continued', ()))
        episode.tokens = episode.tokens[:start] + kept
        episode.source = [PROMPT if s == POLICY else s for s in episode.source[:start]] + [
            PROMPT
        ] * len(kept)
        episode.logp = [0.0] * len(episode.tokens)

    def finish(self, episode: _Episode, reason: str) -> None:
        """Frees the slot; the last sample of a request resolves its future."""
        group = episode.group
        whole = self._trajectory(episode, reason, tuple(episode.turns))
        group.results[episode.sample] = dataclasses.replace(whole, earlier=tuple(episode.earlier))
        self.episodes[episode.slot] = None
        if all(r is not None for r in group.results) and not group.future.done():
            group.future.set_result(group.results)

    def _trajectory(self, episode, reason, turns):
        return Trajectory(
            np.asarray(episode.tokens, np.int32),
            np.asarray(episode.source, np.int8),
            np.asarray(episode.logp, np.float32),
            turns,
            reason,
            episode.group.request.weights,
            self.version,
            episode.identity,
        )

    def scan(self, tokens, logp, count) -> list[tuple[_Episode, tuple[str, ...]]]:
        """Reads a burst (host arrays [S, K], [S, K], [S]); returns the calls to be searched."""
        calls, errors, parked = [], [], []
        for slot, episode in enumerate(self.episodes):
            n = int(count[slot])
            if episode is None or not n:
                continue
            hit = episode.matcher.push(tokens[slot, :n])
            # Tokens after the stop string were sampled in vain: the host forgets them, the device rewinds.
            keep = hit[0] - (len(episode.tokens) - episode.turn_start) if hit else n
            episode.tokens += tokens[slot, :keep].tolist()
            episode.logp += logp[slot, :keep].tolist()
            episode.source += [POLICY] * keep
            if self.watch:
                self.watch(episode.identity, episode.tokens[len(episode.tokens) - keep :])
            ended = self._end_of_turn(episode, hit)
            if ended is None:
                continue
            if hit:
                parked.append((slot, len(episode.tokens)))
            kind, value = ended
            if kind == 'search':
                calls.append((episode, value))
            elif kind == 'error':
                errors.append((episode, episode.env.error(value)))
            else:
                self.finish(episode, value)
        if parked:
            self.sampler.rewind([s for s, _ in parked], [n for _, n in parked])
        if errors:
            self.reply(errors)
        return calls

    def _end_of_turn(self, episode, hit):
        """None while the turn goes on, else ('search', queries), ('error', code) or ('finish', reason)."""
        env, context = episode.env, self.sampler.config.context
        if hit:
            ending = env.end_turn(hit[1])
            last = len(episode.turns) + 1 >= env.limits.max_turns
            episode.turns.append(Turn(hit[1], ending.queries if not last else (), (), ending.error))
            if ending.done:
                return 'finish', 'malformed' if ending.error else 'answer'
            if last:
                return 'finish', 'turns'
            return ('error', ending.error) if ending.error else ('search', ending.queries)
        ended = episode.tokens[-1] in env.codec.eos_ids
        room = len(episode.tokens) < min(episode.turn_start + env.limits.turn_tokens, context)
        if not ended and room:
            return None
        text = episode.matcher.text
        if ended:
            text = text.removesuffix(env.codec.decode(episode.tokens[-1:]))
        episode.turns.append(Turn(text, closed=ended))
        full = len(episode.tokens) >= context
        return 'finish', 'eos' if ended else 'context' if full else 'turn_tokens'


class Scheduler:
    """Runs episode coroutines that await `rollout`.

    Args:
      lanes: by name of the weights.
      deterministic: wait for every search. Otherwise a search that takes longer than `tool_timeout` seconds
        becomes an error observation, the one thing here that depends on the clock.
    """

    def __init__(
        self, lanes: dict[str, Lane], *, deterministic: bool = True, tool_timeout: float = 30.0
    ):
        self.lanes, self.deterministic, self.tool_timeout = lanes, deterministic, tool_timeout
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='search')
        self._searches: dict[asyncio.Future, tuple[float, list]] = {}
        self._count = 0
        self._news: asyncio.Event | None = None
        self.stats: Any = collections.Counter()
        self.search_seconds: list[float] = []
        self.profile = (
            False  # wait after every device call, so that `stats` tells prefill from decode
        )

    def publish(self, weights: str, params: Params, version: int) -> None:
        """Gives a lane new weights. Its slots must be empty: no trajectory mixes two versions."""
        lane = self.lanes[weights]
        if lane.active:
            raise RuntimeError(f'weights {weights!r} published while {lane.active} rollouts run')
        lane.params, lane.version = params, version
        lane.holder = [None] * len(lane.holder)

    async def rollout(self, request: Request) -> list[Trajectory]:
        """The request's trajectories, in sample order.

        Raises:
          PromptTooLong: the prompt does not leave room for one token.
        """
        lane = self.lanes[request.weights]
        if not 0 < len(request.prompt) < lane.sampler.config.context:
            raise PromptTooLong(
                f'prompt of {len(request.prompt)} tokens; a slot holds {lane.sampler.config.context} (sampler.context)'
            )
        future = asyncio.get_running_loop().create_future()
        self._count += 1
        self.stats['rollouts'] += request.samples
        heapq.heappush(lane.queue, (request.identity, self._count, _Group(request, future)))
        if self._news is not None:
            self._news.set()
        return await future

    def run(
        self, episodes: Sequence[Coroutine], done: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Runs coroutines to their end and returns their results in order; `done` is called at every end."""
        found: list[
            Any
        ] = []  # `_run` returns nothing: asyncio calls signal.getsignal, which formats a task's result
        asyncio.run(self._run(episodes, done, found))
        return found

    async def _run(self, episodes, done, found):
        self._news = asyncio.Event()
        tasks = [asyncio.ensure_future(e) for e in episodes]
        for task in tasks:
            task.add_done_callback(lambda _: done())
        try:
            while not all(t.done() for t in tasks):
                for _ in range(4):  # let episodes take results and ask for more
                    await asyncio.sleep(0)
                for task in filter(asyncio.Task.done, tasks):
                    task.result()  # raises what the episode raised
                if not self._round():
                    await self._idle(tasks)
            found += [t.result() for t in tasks]
        finally:
            for task in tasks:
                task.cancel()
            self._abandon()

    def _abandon(self):
        self._searches.clear()
        for lane in self.lanes.values():
            busy = [s for s, e in enumerate(lane.episodes) if e is not None]
            if busy:
                lane.sampler.rewind(busy, [1] * len(busy))
            lane.episodes = [None] * len(lane.episodes)
            lane.holder = [None] * len(lane.holder)
            lane.queue, lane.open = [], []

    async def _idle(self, tasks):
        """Nothing decodes: wait for a search, for new requests, or for an episode."""
        self._news.clear()
        room = any(lane.queue and not lane.active for lane in self.lanes.values())
        if room or all(t.done() for t in tasks):
            return
        news = asyncio.ensure_future(self._news.wait())
        timeout = None if self.deterministic or not self._searches else 0.05
        waits = [news, *self._searches, *(t for t in tasks if not t.done())]
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()

    def _round(self) -> bool:
        """One round over all lanes; False when no slot is decoding."""
        start = time.perf_counter()
        self.stats['rounds'] += 1
        self._deliver()
        bursts = []
        for lane in self.lanes.values():
            lane.admit()
            self._timed('prefill', lane, lane.fill)
            lane.clone_siblings()
            waiting = {id(e) for _, calls in self._searches.values() for _, e, _ in calls}
            if any(e is not None and id(e) not in waiting for e in lane.episodes):
                bursts.append(
                    (
                        lane,
                        self._timed(
                            'decode', lane, lambda lane=lane: lane.sampler.decode(lane.params)
                        ),
                    )
                )
        fetched = time.perf_counter()
        bursts = [(lane, jax.device_get((b.tokens, b.logp, b.count))) for lane, b in bursts]
        self.stats['fetch_seconds'] += time.perf_counter() - fetched
        for lane, (tokens, logp, count) in bursts:
            self.stats['generated_tokens'] += int(count.sum())
            self.stats['bursts'] += 1
            self._search(lane, lane.scan(tokens, logp, count))
        self.stats['seconds'] += time.perf_counter() - start
        return bool(bursts)

    def _timed(self, name, lane, call):
        if not self.profile:
            return call()
        start = time.perf_counter()
        result = call()
        jax.block_until_ready(lane.sampler.state)
        self.stats[f'{name}_seconds'] += time.perf_counter() - start
        return result

    def _search(self, lane, calls):
        """Hands the queries of a burst to the search thread, one call per search function."""
        by_search = collections.defaultdict(list)
        for episode, queries in calls:
            by_search[episode.env.search].append((lane, episode, queries))
        loop = asyncio.get_running_loop()
        for search, group in by_search.items():
            queries = [q for _, _, qs in group for q in qs]
            future = loop.run_in_executor(self._pool, self._call_search, search, queries)
            self._searches[future] = (time.monotonic(), group)

    def _call_search(self, search, queries):
        """Documents per query, None for a query that failed. One that fails must not fail its neighbours, so after
        an error every query is asked alone."""
        start = time.perf_counter()
        try:
            found = list(search(queries))
            if len(found) != len(queries):
                raise ValueError(f'{len(queries)} queries brought {len(found)} results')
            return found
        except (
            Exception
        ) as error:  # whatever a search raises is the rollout's to see, not the run's to die of
            if len(queries) > 1:
                return [self._call_search(search, [q])[0] for q in queries]
            logging.warning('search for %r failed: %r', queries[0][:80], error)
            return [None]
        finally:
            self.search_seconds.append(time.perf_counter() - start)

    def _deliver(self):
        """Writes the results of finished (or overdue) searches into their slots."""
        replies = collections.defaultdict(list)
        for future, (since, calls) in list(self._searches.items()):
            overdue = not self.deterministic and time.monotonic() - since > self.tool_timeout
            if not future.done() and not overdue:
                continue
            del self._searches[future]
            results = iter(future.result()) if future.done() else None
            for lane, episode, queries in calls:
                turn = episode.turns[-1]
                found = None if results is None else [next(results) for _ in queries]
                if found is None or None in found:
                    error = 'timeout' if found is None else 'failed'
                    episode.turns[-1] = dataclasses.replace(turn, error=error)
                    replies[id(lane)].append((lane, episode, episode.env.error(error)))
                    continue
                shown = tuple(tuple(documents) for documents in found)
                episode.turns[-1] = dataclasses.replace(turn, documents=shown)
                replies[id(lane)].append((lane, episode, episode.env.observation(shown)))
        for group in replies.values():
            group[0][0].reply([(episode, ids) for _, episode, ids in group])
