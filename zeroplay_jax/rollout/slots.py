"""The host's side of a pool of slots: admission, turns, tool results, and why a rollout ends.

It makes the device calls of a round and does the host's work between them. Results are a function of the request alone
(see rollout/sampler.py), so the order in which slots serve requests changes nothing but time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from zeroplay_jax.rollout.placement import Placement
from zeroplay_jax.rollout.pool_weights import PoolWeights
from zeroplay_jax.rollout.requests import ActiveRollout, EpisodeBatch, Request, RequestGroup
from zeroplay_jax.rollout.sampler import CloneRow, DecodeChunk, PutRow, Sampler
from zeroplay_jax.types import ENV, POLICY, ToolCall, Turn, identity_key

# ---- decode call -----------------------------------------------------------------------------------
#
# A decode call that the host has not read yet.


class DecodeCall:
    """A chunk on the device, and the turns that it decodes.

    The host may start a call before it has read the one before, in which some of these turns end. The device does not
    know that, because the host searches the stop strings: it decodes such a row further, and the slot may have another
    rollout when the call is read.

    Args:
      chunk: device arrays.
      rollouts: the rollout in every slot, at the start of the call.
    """

    def __init__(self, chunk: DecodeChunk, rollouts: Sequence[ActiveRollout | None]):
        self._chunk = chunk
        self._rollouts = list(rollouts)
        # Numbers of their turns.
        self._turns = [len(rollout.turns) if rollout else 0 for rollout in rollouts]

    def read(self, rollouts: Sequence[ActiveRollout | None]) -> DecodeChunk:
        """Waits for the device; returns the chunk as numpy arrays, with 0 tokens in the rows of turns that are over.

        Args:
          rollouts: the rollout in every slot now.
        """
        # All arrays are fetched in one transfer, because each transfer waits for the device.
        chunk = jax.device_get(self._chunk)
        is_current = self._is_current(rollouts)
        cached = chunk.cached
        if cached is not None:
            cached = np.where(is_current, cached, 0)
        return dataclasses.replace(chunk, count=np.where(is_current, chunk.count, 0), cached=cached)

    def _is_current(self, rollouts: Sequence[ActiveRollout | None]) -> Bool[np.ndarray, ' slots']:
        """Returns in which slots the turn is still in progress."""
        is_current = np.zeros(len(self._rollouts), bool)
        for slot, rollout in enumerate(self._rollouts):
            if rollout is not None and rollout is rollouts[slot] and rollout.is_running:
                is_current[slot] = len(rollout.turns) == self._turns[slot]
        return is_current


# ---- slots -----------------------------------------------------------------------------------------


class SlotPool:
    """The slots of some weights, and the requests waiting for a slot.

    Samples of one request are siblings.

    Attributes:
      weights: the weights; by default one set in one version.
    """

    def __init__(self, sampler: Sampler, seed: int, weights: PoolWeights | None = None):
        self.sampler = sampler
        self.seed = seed
        self.weights = weights or PoolWeights()
        self.placement = Placement(sampler.config, sampler.shards, sampler.table, sampler.age)
        # A heap of (identity, number, group).
        self.queue: list[tuple[tuple[int, ...], int, RequestGroup]] = []
        # Rollouts with an observation, whose next turn `admit` begins once it has pages.
        self.waiting_for_pages: list[ActiveRollout] = []
        # `read_chunk` calls it with a rollout's identity and its new policy ids, for live display.
        self.on_tokens: Callable[[tuple[int, ...], list[int]], None] | None = None

    @property
    def rollouts(self) -> list[ActiveRollout | None]:
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

    def enqueue(
        self,
        request: Request,
        number: int,
        future: asyncio.Future,
        batch: EpisodeBatch | None = None,
    ) -> None:
        """Adds a request of an episode of `batch`; `number` breaks ties between equal identities."""
        version = self.weights.newest(request.weights)
        if batch is not None:
            version = batch.versions.get(request.weights, version)
        group = RequestGroup(request, future, version, batch)
        heapq.heappush(self.queue, (request.identity, number, group))

    def groups(self) -> list[RequestGroup]:
        """Returns the groups of all rollouts and requests; one with several rollouts more than once."""
        return self.placement.groups() + [entry[2] for entry in self.queue]

    @property
    def has_only_requests(self) -> bool:
        """Whether requests wait although no rollout is in a slot."""
        return bool(self.queue) and not self.active

    # ---- admission and prefill -----------------------------------------------------------------

    def admit(self) -> None:
        """Begins turns and fills free slots: next turns first, then siblings of prefilled prompts, then requests.

        All tokens of observations and new prompts are put into their slots by one `put`, which makes as few device
        calls as its static shape allows; `prefill` computes their keys and values.
        """
        rows = self._begin_turns()
        self.clone_siblings()
        blocked_shards = self._blocked_shards()
        while self.queue:
            _, _, group = self.queue[0]
            shard = self.placement.shard_for(group, blocked_shards)
            if shard is None:
                break
            heapq.heappop(self.queue)
            group.shard = shard.number
            self.placement.open_groups.append(group)
            rows += self._first_row(group)
        for group in self.placement.open_groups:
            # The pages of its prompt were needed, so it is prefilled again.
            if group.held is None and group.shard not in blocked_shards:
                rows += self._first_row(group)
        self.placement.close_served_groups()
        if rows:
            self.sampler.put(rows)

    def _blocked_shards(self) -> set[int]:
        """Returns the shards with rollouts that wait for pages, which new rollouts would take from them."""
        return {rollout.group.shard for rollout in self.waiting_for_pages}

    def _first_row(self, group: RequestGroup) -> list[PutRow]:
        """Starts the next sample of a group; returns the row with its prompt, to be put, or [] without a slot."""
        rollout = self.placement.start(group)
        return [] if rollout is None else [self._put_row(rollout, start=0)]

    def _put_row(self, rollout: ActiveRollout, start: int) -> PutRow:
        """Returns the row with the tokens from position `start`, and counts its prefill calls."""
        # `put` invalidates the keys and values of the token before `start`. The last token is left out: decoding feeds
        # it.
        first_uncached = max(start - 1, 0)
        prefill_tokens = len(rollout.tokens) - 1 - first_uncached
        rollout.chunks_left = math.ceil(prefill_tokens / self.sampler.config.chunk)
        return PutRow(
            slot=rollout.slot,
            tokens=np.asarray(rollout.tokens[start:], np.int32),
            start=start,
            limit=rollout.turn_limit(self.context),
            temperature=rollout.group.request.temperature,
            key=self._noise_key(rollout),
        )

    def _noise_key(self, rollout: ActiveRollout) -> np.ndarray:
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
        rows: list[CloneRow] = []
        for group in self.placement.open_groups:
            if not group.is_prefilled or group.shard in blocked_shards:
                continue
            source = self.placement.end_page(group)
            while group.waiting:
                sibling = self.placement.fork(group)
                if sibling is None:
                    break
                rows.append(self._clone_row(sibling, source))
        if rows:
            self.sampler.clone(rows)
        # Their prompts are released after the device call that copies them was made.
        self.placement.close_served_groups()

    def _clone_row(self, sibling: ActiveRollout, source: int) -> CloneRow:
        return CloneRow(
            slot=sibling.slot,
            source=source,
            page=sibling.pages.pages[-1],
            length=len(sibling.group.request.prompt),
            limit=sibling.turn_limit(self.context),
            temperature=sibling.group.request.temperature,
            key=self._noise_key(sibling),
        )

    def prefill(self) -> None:
        """Computes the keys and values of all tokens that were put into slots."""
        # Over pages, prompts and observations pass through the decode calls instead.
        if self.sampler.config.is_paged:
            return
        rows_per_shard = math.ceil(self.sampler.config.fill_rows / self.sampler.shards)
        # All rows are prefilled before any row decodes: a decode chunk takes as long for one row as for
        # all of them, so rows that still wait for their prefill would miss it.
        while True:
            batch = self.placement.take_chunks(rows_per_shard, self.weights.share_calls)
            if not batch:
                break
            self.weights.extend(self.sampler, batch)
        for group in self.placement.open_groups:
            group.is_prefilled = group.held is not None

    def decode(self, unread: bool = False) -> list[DecodeCall]:
        """Starts the decode chunks of a round, without waiting for the device.

        Args:
          unread: whether the chunk before has not been read yet.
        """
        # The host does not know yet how many tokens the chunk before has sampled.
        self.placement.grow_for_bursts(2 if unread else 1)
        chunks = self.weights.decode(self.sampler, self.placement)
        return [DecodeCall(chunk, self.rollouts) for chunk in chunks]

    # ---- turns -----------------------------------------------------------------------------------

    def add_observations(
        self, replies: Sequence[tuple[ActiveRollout, Int[np.ndarray, ' tokens']]]
    ) -> None:
        """Appends an observation to each rollout; `admit` begins its next turn, as soon as there are pages for it.

        A rollout whose slot cannot hold the observation and one further token ends with 'context'.

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
            if length >= rollout.group.capacity(self.context):
                self.finish(rollout, self._limit_reached(rollout, length))
                continue
            if start < len(rollout.tokens):
                ended = rollout.trajectory('continued', ())
                rollout.end_context(start, retained, ended)
            rollout.append(ids.tolist(), ENV, [0.0] * len(ids))
            rollout.begin_turn()
            rollout.put_start = start
            self.waiting_for_pages.append(rollout)

    def _begin_turns(self) -> list[PutRow]:
        """Begins the next turns that get pages, oldest rollouts first; returns their rows, to be put."""
        rows: list[PutRow] = []
        waiting: list[ActiveRollout] = []
        blocked_shards = set()
        for rollout in sorted(self.waiting_for_pages, key=_identity):
            shard = rollout.group.shard
            # No rollout overtakes an older one of its shard.
            if shard not in blocked_shards and self.placement.begin_turn(rollout):
                rows.append(self._put_row(rollout, rollout.put_start))
            else:
                blocked_shards.add(shard)
                waiting.append(rollout)
        self.waiting_for_pages = waiting
        return rows

    def read_chunk(
        self,
        tokens: Int[np.ndarray, 'slots burst'],
        logp: Float[np.ndarray, 'slots burst'],
        count: Int[np.ndarray, ' slots'],
        cached: Int[np.ndarray, ' slots'] | None = None,
    ) -> list[tuple[ActiveRollout, ToolCall]]:
        """Appends the tokens of a decode chunk to its rollouts and ends turns; returns the tool calls to run.

        Rollouts that are complete free their slots. Refused calls get their observation at once, and the next `admit`
        puts it together with the results of tools.

        Args:
          tokens: ids; the first `count` of a row are sampled.
          logp: their log-probs.
          count: sampled tokens per row.
          cached: positions with valid keys and values per row; None over pages as long as a slot.
        """
        if cached is not None:
            self._record_prefill(cached)
        calls: list[tuple[ActiveRollout, ToolCall]] = []
        refused: list[tuple[ActiveRollout, np.ndarray]] = []
        rewound_slots: list[int] = []
        rewound_lengths: list[int] = []
        for slot, rollout in enumerate(self.rollouts):
            sampled = int(count[slot])
            if rollout is None or not sampled:
                continue
            match = rollout.matcher.push(tokens[slot, :sampled])
            if match is None:
                self._append_sampled(rollout, tokens[slot, :sampled], logp[slot, :sampled])
                self._end_turn_without_stop(rollout)
                continue
            # Tokens after the stop string are discarded; the device rewinds below.
            turn_tokens, text = match
            earlier_tokens = len(rollout.tokens) - rollout.turn_start
            new_tokens = turn_tokens - earlier_tokens
            self._append_sampled(rollout, tokens[slot, :new_tokens], logp[slot, :new_tokens])
            rewound_slots.append(slot)
            rewound_lengths.append(len(rollout.tokens))
            self.placement.end_turn(rollout)
            call = self._end_turn_at_stop(rollout, text)
            if call is None:
                continue
            if call.error is None:
                calls.append((rollout, call))
            else:
                refused.append((rollout, rollout.env.observation(call)))
        # Rows are rewound before `admit` puts the observations: a put begins where the rewound row ends.
        if rewound_slots:
            self.sampler.rewind(rewound_slots, rewound_lengths)
        if refused:
            self.add_observations(refused)
        return calls

    def _record_prefill(self, cached: Int[np.ndarray, ' slots']) -> None:
        """Marks the prompts that decode calls have prefilled, so that siblings can be cloned from them."""
        for group in self.placement.open_groups:
            prefill_tokens = len(group.request.prompt) - 1
            if group.held is not None and cached[group.holder_slot] >= prefill_tokens:
                group.is_prefilled = True

    def _append_sampled(
        self,
        rollout: ActiveRollout,
        tokens: Int[np.ndarray, ' tokens'],
        logp: Float[np.ndarray, ' tokens'],
    ) -> None:
        """Adds sampled tokens to the rollout, and passes them to `on_tokens`."""
        ids = tokens.tolist()
        rollout.append(ids, POLICY, logp.tolist())
        if self.on_tokens:
            self.on_tokens(rollout.identity, ids)

    def _end_turn_at_stop(self, rollout: ActiveRollout, text: str) -> ToolCall | None:
        """Records a turn that a stop string ended; returns its call, or None after finishing the rollout.

        Args:
          text: the turn, cut after the stop string.
        """
        end = rollout.env.end_turn(text)
        is_last = len(rollout.turns) + 1 >= rollout.env.limits.max_turns
        call = end.call
        if end.malformed:
            call = ToolCall('', None, error='malformed')
        # A valid call in the last turn is neither run nor recorded: the policy could not read its result,
        # and metrics and rewards would count a search that never happened.
        if is_last and call is not None and call.error is None:
            call = None
        rollout.turns.append(Turn(text, call))
        if end.done:
            self.finish(rollout, 'malformed' if end.malformed else 'answer')
            return None
        if is_last:
            self.finish(rollout, 'turns')
            return None
        return call

    def _end_turn_without_stop(self, rollout: ActiveRollout) -> None:
        """Ends the rollout if its turn reached an end token or a limit of tokens; otherwise the turn continues."""
        env = rollout.env
        at_end_token = rollout.tokens[-1] in env.codec.eos_ids
        if not at_end_token and len(rollout.tokens) < rollout.turn_limit(self.context):
            return
        # The end token was sampled by the policy, so it stays among the tokens; the turn's text omits it.
        text = rollout.matcher.text
        if at_end_token:
            text = text.removesuffix(env.codec.decode(rollout.tokens[-1:]))
        rollout.turns.append(Turn(text, closed=at_end_token))
        reason = 'eos' if at_end_token else self._limit_reached(rollout, len(rollout.tokens))
        self.finish(rollout, reason)

    def _limit_reached(self, rollout: ActiveRollout, length: int) -> str:
        """Returns the `Trajectory.finish` of a rollout that cannot go on at this length."""
        if length >= self.context:
            return 'context'
        if length >= rollout.group.capacity(self.context):
            return 'response_tokens'
        return 'turn_tokens'

    def finish(self, rollout: ActiveRollout, reason: str) -> None:
        """Stores the trajectory and frees the slot; the last sample of a request resolves its future.

        Args:
          reason: `Trajectory.finish`.
        """
        group = rollout.group
        trajectory = rollout.trajectory(reason, tuple(rollout.turns))
        trajectory = dataclasses.replace(trajectory, earlier=tuple(rollout.earlier))
        group.results[rollout.sample] = trajectory
        self.placement.close(rollout)
        is_complete = all(result is not None for result in group.results)
        # The future is done already if its episode was cancelled.
        if is_complete and not group.future.done():
            group.future.set_result(group.results)

    def abandon(self, batch: EpisodeBatch | None = None) -> None:
        """Drops all rollouts and requests of a batch of episodes, or with None all; called when the batch ends."""

        def is_dropped(group: RequestGroup) -> bool:
            return batch is None or group.batch is batch

        for group in filter(is_dropped, self.groups()):
            # An episode that waits for it ends.
            group.future.cancel()
        rollouts = self.placement.abandon(is_dropped)
        self.waiting_for_pages = [x for x in self.waiting_for_pages if not is_dropped(x.group)]
        self.queue = [entry for entry in self.queue if not is_dropped(entry[2])]
        heapq.heapify(self.queue)
        # Rows that are left after an error would decode in the next run.
        if rollouts:
            self.sampler.rewind([rollout.slot for rollout in rollouts], [1] * len(rollouts))


def _identity(rollout: ActiveRollout) -> tuple[int, ...]:
    return rollout.identity
