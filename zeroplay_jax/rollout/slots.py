"""The host's side of a pool of slots: admission, turns, tool results, and why a rollout ends.

It makes the device calls of a round and does the host's work between them. Results are a function of the request alone
(see rollout/sampler.py), so the order in which slots serve requests changes nothing but time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Float, Int

from zeroplay_jax.rollout.placement import Placement
from zeroplay_jax.rollout.requests import Prefix, Request, Rollout
from zeroplay_jax.rollout.sampler import MOST_ENDS, Sampler, SlotClone, SlotPut
from zeroplay_jax.rollout.scoring import Scorer
from zeroplay_jax.rollout.slot_state import NO_TOKEN, DecodeChunk
from zeroplay_jax.rollout.tokens import end_ids
from zeroplay_jax.rollout.weights import WeightStore
from zeroplay_jax.types import ENV, POLICY, ToolCall, Trajectory, identity_key


class SlotPool:
    """The slots of a sampler, and the requests waiting for a slot.

    Rollouts of one prefix are siblings.
    """

    def __init__(self, sampler: Sampler, seed: int):
        self.sampler = sampler
        self.seed = seed
        self.scorer = Scorer(sampler)
        self.placement = Placement(sampler.config, sampler.shards, sampler.table, sampler.age)
        self.placement.before_eviction = self._keep_experts
        # Records that the device has been asked for: (where they go, slots of a device call, index of the slot).
        self._unread: list[tuple[np.ndarray, jax.Array, int]] = []
        # A heap of (identity, number, prefix). The number breaks ties, so that it never compares two prefixes.
        self.queue: list[tuple[tuple[int, ...], int, Prefix]] = []
        self._numbers = itertools.count()
        # Rollouts with an observation, whose next turn `admit` begins once it has pages.
        self.waiting_for_pages: list[Rollout] = []
        # `read` calls it with a rollout's identity and its new policy ids, for live display.
        self.on_tokens: Callable[[tuple[int, ...], list[int]], None] | None = None

    @property
    def rollouts(self) -> list[Rollout | None]:
        """The rollout in every slot."""
        return self.placement.rollouts

    @property
    def active(self) -> int:
        """Number of rollouts in slots."""
        return sum(1 for _ in self.placement.active())

    @property
    def can_decode(self) -> bool:
        """Whether some rollout is within a turn."""
        # Derived from the host's records, because reading the device's state would wait for the device.
        return any(rollout.is_running for rollout in self.placement.active())

    @property
    def context(self) -> int:
        """Tokens that a slot can hold."""
        return self.sampler.config.context

    def enqueue(self, request: Request) -> list[asyncio.Future[Trajectory]]:
        """Adds a request; returns the futures of its trajectories in sample order."""
        loop = asyncio.get_running_loop()
        prefix = Prefix(request)
        for sample in range(request.samples):
            prefix.waiting.append(Rollout(prefix, sample, loop.create_future()))
        heapq.heappush(self.queue, (request.identity, next(self._numbers), prefix))
        return [rollout.future for rollout in prefix.waiting]

    def _waiting_prefixes(self) -> list[Prefix]:
        """Returns the prefixes of the requests with rollouts that have no slot yet."""
        return [*self.placement.open_prefixes, *(prefix for _, _, prefix in self.queue)]

    def unfinished(self) -> list[Rollout]:
        """Returns all rollouts in slots or waiting for one."""
        rollouts = list(self.placement.active())
        for prefix in self._waiting_prefixes():
            rollouts += prefix.waiting
        return rollouts

    @property
    def has_only_requests(self) -> bool:
        """Whether requests or texts wait although no rollout is in a slot."""
        return (bool(self.queue) or self.scorer.is_waiting) and not self.active

    def admit(self) -> None:
        """Begins turns and fills free slots: next turns first, then siblings of prefilled prompts, then requests.

        All tokens of observations and new prompts are put into their slots by one `put`, which makes as few device
        calls as its static shape allows; `prefill` computes their keys and values.
        """
        puts = self._begin_turns()
        self.clone_siblings()
        blocked_shards = self._blocked_shards()
        while self.queue:
            _, _, prefix = self.queue[0]
            shard = self.placement.shard_for(prefix, blocked_shards)
            if shard is None:
                break
            heapq.heappop(self.queue)
            prefix.shard = shard.number
            self.placement.open_prefixes.append(prefix)
            puts += self._first_put(prefix)
        for prefix in self.placement.open_prefixes:
            # Its pages were needed, so it is prefilled again.
            if prefix.pages is None and prefix.shard not in blocked_shards:
                puts += self._first_put(prefix)
        self.placement.close_served()
        if puts:
            self.sampler.put(puts)

    def _blocked_shards(self) -> set[int]:
        """Returns the shards with rollouts that wait for pages, which new rollouts would take from them."""
        return {rollout.prefix.shard for rollout in self.waiting_for_pages}

    def _first_put(self, prefix: Prefix) -> list[SlotPut]:
        """Starts the next rollout of a prefix; returns its tokens, to be put, or [] without a slot."""
        rollout = self.placement.start(prefix)
        return [] if rollout is None else [self._put_of(rollout, start=0)]

    def _put_of(self, rollout: Rollout, start: int) -> SlotPut:
        """Returns the tokens from position `start` on, to be put, and counts its prefill calls."""
        # `put` invalidates the keys and values of the token before `start`. The last token is left out: decoding feeds
        # it.
        first_uncached = max(start - 1, 0)
        prefill_tokens = len(rollout.tokens) - 1 - first_uncached
        rollout.chunks_left = math.ceil(prefill_tokens / self.sampler.config.chunk)
        self._set_slot(rollout)
        return SlotPut(
            slot=rollout.slot,
            tokens=np.asarray(rollout.tokens[start:], np.int32),
            start=start,
            limit=rollout.turn_limit(self.context),
            temperature=rollout.request.temperature,
            key=self._noise_key(rollout),
        )

    def _set_slot(self, rollout: Rollout) -> None:
        """Tells the sampler the tokens with which a turn of a rollout ends, and which ids it draws from."""
        env = rollout.env
        ids = end_ids(env.codec, env.stops)[:MOST_ENDS]
        ends = self.sampler.ends[rollout.slot]
        ends[:] = NO_TOKEN
        ends[: len(ids)] = ids
        if self.sampler.truncation is not None:
            self.sampler.truncation[rollout.slot] = rollout.request.truncation

    def _noise_key(self, rollout: Rollout) -> np.ndarray:
        """Returns the key of the sampling noise in the rollout's current context."""
        identity = rollout.identity
        # Noise is a function of key and position. After a cut (`end_context`) the new context samples at
        # the same positions again, so the number of cuts becomes part of the key. -1 separates it, because
        # the identity of another request may end in the same numbers.
        if rollout.earlier:
            identity = (*identity, -1, len(rollout.earlier))
        return identity_key(self.seed, identity)

    def clone_siblings(self) -> None:
        """Starts waiting siblings of prefilled prompts in free slots."""
        blocked_shards = self._blocked_shards()
        clones: list[SlotClone] = []
        for prefix in self.placement.open_prefixes:
            if not prefix.is_cached or prefix.shard in blocked_shards:
                continue
            source = self.placement.end_page(prefix)
            while prefix.waiting:
                sibling = self.placement.fork(prefix)
                if sibling is None:
                    break
                clones.append(self._clone_of(sibling, source))
        if clones:
            self.sampler.clone(clones)
        # Their prefixes are released after the device call that copies them was made.
        self.placement.close_served()

    def _clone_of(self, sibling: Rollout, source: int) -> SlotClone:
        self._set_slot(sibling)
        return SlotClone(
            slot=sibling.slot,
            source=source,
            page=sibling.pages.pages[-1],
            length=len(sibling.prefix.tokens),
            limit=sibling.turn_limit(self.context),
            temperature=sibling.request.temperature,
            key=self._noise_key(sibling),
        )

    def prefill(self, weights: WeightStore) -> None:
        """Computes the keys and values of all tokens that were put into slots."""
        # Over pages, prompts and observations pass through the decode calls instead.
        if self.sampler.config.is_paged:
            return
        entries_per_shard = math.ceil(self.sampler.config.fill_rows / self.sampler.shards)
        # All slots are prefilled before any slot decodes: a decode chunk takes as long for one slot as for
        # all of them, so slots that still wait for their prefill would miss it.
        for params, included, adapter in weights.calls(self.rollouts):
            while slots := self.placement.take_chunks(entries_per_shard, included):
                self.sampler.extend(params, slots, adapter)
        for prefix in self.placement.open_prefixes:
            prefix.is_cached = prefix.pages is not None

    def decode(self, weights: WeightStore, has_unread: bool = False) -> list[DecodeChunk]:
        """Starts the decode chunks of a round; returns device arrays without waiting for them.

        Args:
          weights: the weights.
          has_unread: whether the chunk before has not been read yet.
        """
        # The host does not know yet how many tokens the chunk before has sampled.
        self.placement.grow_for_bursts(2 if has_unread else 1)
        chunks = []
        for params, included, adapter in weights.calls(self.rollouts):
            chunk = self.sampler.decode(params, included, adapter)
            chunks.append(dataclasses.replace(chunk, generation=self.placement.generation.copy()))
        return chunks

    def add_observations(
        self, replies: Sequence[tuple[Rollout, Int[np.ndarray, ' tokens']]]
    ) -> None:
        """Appends an observation to each rollout; `admit` begins its next turn, as soon as there are pages for it.

        A rollout that has no room for the observation and one further token ends with 'context', or with
        'response_tokens' where that limit is lower.

        Args:
          replies: rollouts whose last turn has ended, with the ids of the observation.
        """
        for rollout, ids in replies:
            start = rollout.turn_start
            turn_ids = rollout.tokens[start:]
            retained = rollout.env.retained_tokens(turn_ids)
            if retained == turn_ids:
                # Nothing of the turn is dropped: only the observation is new.
                start = len(rollout.tokens)
                retained = []
            # An observation that does not fit ends the rollout, as in verl; it is not cut any further.
            length = start + len(retained) + len(ids)
            if length >= rollout.request.capacity(self.context):
                self.finish(rollout, self._limit_reached(rollout, length))
                continue
            if start < len(rollout.tokens):
                ended = rollout.trajectory('continued', self._experts_of(rollout))
                rollout.end_context(start, retained, ended)
            rollout.append(ids.tolist(), ENV, [0.0] * len(ids))
            if self.sampler.has_states:
                # The state is that with which the turn began, whose tokens are prefilled again.
                start = rollout.turn_start
            rollout.expect_turn()
            rollout.put_start = start
            self.waiting_for_pages.append(rollout)

    def _begin_turns(self) -> list[SlotPut]:
        """Begins the next turns that get pages, oldest rollouts first; returns their tokens, to be put."""
        puts: list[SlotPut] = []
        waiting: list[Rollout] = []
        blocked_shards = set()
        for rollout in sorted(self.waiting_for_pages, key=lambda rollout: rollout.identity):
            shard = rollout.prefix.shard
            # No rollout overtakes an older one of its shard.
            if shard not in blocked_shards and self.placement.begin_turn(rollout):
                if self.sampler.has_states:
                    self.placement.drop_prefix_in(rollout)
                puts.append(self._put_of(rollout, rollout.put_start))
            else:
                blocked_shards.add(shard)
                waiting.append(rollout)
        self.waiting_for_pages = waiting
        return puts

    def read(self, chunk: DecodeChunk) -> list[tuple[Rollout, ToolCall]]:
        """Appends the tokens of a decode chunk to its rollouts and ends turns; returns the tool calls to run.

        Rollouts that are complete free their slots. Refused calls get their observation at once, and the next `admit`
        puts it together with the results of tools.

        Args:
          chunk: of `decode`, as NumPy arrays.
        """
        self._read_experts()
        # The host may start a chunk before it has read the one before, in which some turns end. The device does not
        # know all of them, because the host searches stop strings of several tokens: it decodes such a slot further,
        # and the slot may have another rollout by now.
        is_current = chunk.generation == self.placement.generation
        count = np.where(is_current, chunk.count, 0)
        self.placement.stats['generated_tokens'] += int(count.sum())
        if chunk.cached is not None:
            self.record_prefill(np.where(is_current, chunk.cached, 0))
        calls: list[tuple[Rollout, ToolCall]] = []
        refused: list[tuple[Rollout, np.ndarray]] = []
        rewound_slots = []
        rewound_lengths = []
        for slot, rollout in enumerate(self.rollouts):
            sampled = int(count[slot])
            if rollout is None or not sampled:
                continue
            tokens = chunk.tokens[slot, :sampled]
            logp = chunk.logp[slot, :sampled]
            match = rollout.matcher.push(tokens)
            if match is None:
                self._append_sampled(rollout, tokens, logp, chunk)
                self._end_turn_without_stop(rollout)
                continue
            # Tokens after the stop string are discarded; the device rewinds below.
            turn_tokens, text = match
            earlier_tokens = len(rollout.tokens) - rollout.turn_start
            new_tokens = turn_tokens - earlier_tokens
            self._append_sampled(rollout, tokens[:new_tokens], logp[:new_tokens], chunk)
            rewound_slots.append(slot)
            rewound_lengths.append(len(rollout.tokens))
            self.placement.release_turn(rollout)
            call = self._end_turn_at_stop(rollout, text)
            if call is None:
                continue
            if call.error is None:
                calls.append((rollout, call))
            else:
                refused.append((rollout, rollout.observation(call)))
        # Slots are rewound before `admit` puts the observations: a put begins where the rewound slot ends.
        if rewound_slots:
            self.sampler.rewind(rewound_slots, rewound_lengths)
        if refused:
            self.add_observations(refused)
        return calls

    def record_prefill(self, cached: Int[np.ndarray, ' slots']) -> None:
        """Marks the prefixes that decode calls have prefilled, so that siblings can be cloned from them."""
        for prefix in self.placement.open_prefixes:
            prefill_tokens = len(prefix.tokens) - 1
            if prefix.pages is not None and cached[prefix.holder_slot] >= prefill_tokens:
                prefix.is_cached = True

    def _append_sampled(
        self,
        rollout: Rollout,
        tokens: Int[np.ndarray, ' tokens'],
        logp: Float[np.ndarray, ' tokens'],
        chunk: DecodeChunk,
    ) -> None:
        """Adds sampled tokens, the first of a chunk, to the rollout, and passes them to `on_tokens`."""
        if chunk.kept is not None:
            kept = chunk.kept[rollout.slot, : len(tokens)]
            number, place = np.nonzero(kept >= 0)
            record = np.stack([len(rollout.tokens) + number, kept[number, place]], 1)
            rollout.kept.append(record.astype(np.int32))
        ids = tokens.tolist()
        rollout.append(ids, POLICY, logp.tolist())
        if self.on_tokens:
            self.on_tokens(rollout.identity, ids)

    def _end_turn_at_stop(self, rollout: Rollout, text: str) -> ToolCall | None:
        """Records a turn that a stop string ended; returns its call, or None after finishing the rollout.

        Args:
          text: the turn, cut after the stop string.
        """
        call, reason = rollout.env.read_turn(text).outcome(rollout.is_last_turn)
        rollout.record_turn(text, call)
        if not reason:
            return call
        self.finish(rollout, reason)
        return None

    def _end_turn_without_stop(self, rollout: Rollout) -> None:
        """Ends the rollout if its turn reached an end token or a limit of tokens; otherwise the turn continues."""
        env = rollout.env
        at_end_token = rollout.tokens[-1] in env.codec.eos_ids
        if not at_end_token and len(rollout.tokens) < rollout.turn_limit(self.context):
            return
        # The end token was sampled by the policy, so it stays among the tokens; the turn's text omits it.
        text = rollout.matcher.text
        if at_end_token:
            text = text.removesuffix(env.codec.decode(rollout.tokens[-1:]))
        rollout.record_turn(text, closed=at_end_token)
        reason = 'eos' if at_end_token else self._limit_reached(rollout, len(rollout.tokens))
        self.finish(rollout, reason)

    def _limit_reached(self, rollout: Rollout, length: int) -> str:
        """Returns the `Trajectory.finish` of a rollout that cannot go on at this length."""
        if length >= self.context:
            return 'context'
        if length >= rollout.request.capacity(self.context):
            return 'response_tokens'
        return 'turn_tokens'

    def _experts_of(self, rollout: Rollout) -> np.ndarray | None:
        """Returns the record of a rollout's tokens (policy/experts.py), which `_read_experts` fills; None: dense.

        The device is not waited for: with `overlap` it decodes the next chunk.
        """
        if self.sampler.choices is None or rollout.is_evicted:
            return rollout.experts
        result = np.tile(self.sampler.choices, (len(rollout.tokens), 1))
        self._unread.append((result, *self.sampler.record(rollout.slot)))
        return result

    def _keep_experts(self, rollout: Rollout) -> None:
        """Asks for the record of a rollout whose pages will hold that of another one."""
        rollout.experts = self._experts_of(rollout)

    def _read_experts(self) -> None:
        """Waits for the records that were asked for."""
        for result, records, index in self._unread:
            # The last token was sampled and never computed.
            result[:-1] = np.asarray(records)[index, : len(result) - 1]
        self._unread.clear()

    def finish(self, rollout: Rollout, reason: str) -> None:
        """Resolves the future of a rollout with its trajectory and frees the slot.

        Args:
          reason: `Trajectory.finish`.
        """
        before = rollout.request.before
        trajectory = dataclasses.replace(
            rollout.trajectory(reason, self._experts_of(rollout)),
            turns=tuple(rollout.turns),
            earlier=tuple(rollout.earlier),
            starts=tuple(rollout.starts),
            tool_states=tuple(rollout.tool_states),
            after_failure=before is not None and before.after_failure,
        )
        self.placement.close(rollout)
        # The future is done already if its episode was cancelled.
        if not rollout.future.done():
            rollout.future.set_result(trajectory)

    def abandon(self, owner: object = None) -> None:
        """Drops all rollouts and requests of an owner, or with None all; called when they have ended."""

        def is_dropped(request: Request) -> bool:
            return owner is None or request.owner is owner

        if owner is None:
            # After an error of the device they could not be read, and nobody will.
            self._unread.clear()
        self._read_experts()
        self.scorer.abandon(owner)
        dropped = [rollout for rollout in self.unfinished() if is_dropped(rollout.request)]
        for rollout in dropped:
            # An episode that waits for it ends.
            rollout.future.cancel()
        for prefix in self._waiting_prefixes():
            if is_dropped(prefix.request):
                prefix.waiting.clear()
        self.queue = [entry for entry in self.queue if entry[2].waiting]
        heapq.heapify(self.queue)
        self.waiting_for_pages = [x for x in self.waiting_for_pages if not is_dropped(x.request)]
        in_slots = [x for x in self.placement.active() if is_dropped(x.request)]
        for rollout in in_slots:
            self.placement.close(rollout)
        self.placement.close_served()
        # Slots that are left after an error would decode with the next ones.
        if in_slots:
            self.sampler.rewind([rollout.slot for rollout in in_slots], [1] * len(in_slots))
