"""The slots of one set of weights: which rollout is in which slot, and what the host knows about it.

Everything here happens between two device calls. Results are a function of the request alone (see
rollout/slot_programs.py), so the order in which slots serve requests changes nothing but time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.rollout.requests import ActiveRollout, Request, RequestGroup
from zeroplay_jax.rollout.sampler import CloneRow, PutRow, Sampler
from zeroplay_jax.rollout.slot_programs import DecodeChunk
from zeroplay_jax.types import ENV, POLICY, ToolCall, Trajectory, Turn, identity_key


class SlotPool:
    """The slots of one set of weights, and the requests waiting for a slot.

    The samples of one request are called siblings.
    """

    def __init__(self, sampler: Sampler, seed: int):
        self.sampler = sampler
        self.seed = seed
        self.params: Params = {}
        self.version = 0
        slots = sampler.config.slots
        self.rollouts: list[ActiveRollout | None] = [None] * slots
        # The group whose prompt is in the first positions of a slot; it remains after the rollout has ended.
        self.prompt_of_slot: list[RequestGroup | None] = [None] * slots
        # A heap of (identity, number, group).
        self.queue: list[tuple[tuple[int, ...], int, RequestGroup]] = []
        # Admitted groups that have samples still waiting for a slot.
        self.open_groups: list[RequestGroup] = []
        # `read_chunk` calls it with a rollout's identity and its new policy ids, for live display.
        self.on_tokens: Callable[[tuple[int, ...], list[int]], None] | None = None

    @property
    def active(self) -> int:
        """Number of rollouts in slots."""
        return sum(rollout is not None for rollout in self.rollouts)

    @property
    def context(self) -> int:
        """Tokens that a slot can hold."""
        return self.sampler.config.context

    def enqueue(self, request: Request, number: int, future: asyncio.Future) -> None:
        """Adds a request; `number` breaks ties between equal identities."""
        heapq.heappush(self.queue, (request.identity, number, RequestGroup(request, future)))

    def forget_prompts(self) -> None:
        """Marks all cached prompts as invalid: no sample is cloned from them any more."""
        self.prompt_of_slot = [None] * len(self.prompt_of_slot)

    # ---- admission and prefill -----------------------------------------------------------------

    def admit(self) -> None:
        """Fills free slots: first with siblings of prefilled prompts, then with requests, lowest identity first.

        The tokens of new prompts are put into their slots; `prefill` computes their keys and values.
        """
        free_slots = self.clone_siblings()
        rows: list[PutRow] = []
        while free_slots and self.queue:
            _, _, group = self.queue[0]
            reserved = sum(len(open_group.waiting) for open_group in self.open_groups)
            fits = len(free_slots) - reserved >= group.request.samples
            is_idle = not self.open_groups and not self.active
            # A request is admitted only if all its samples get a slot; later ones would find the prompt's
            # keys and values overwritten. An idle pool admits any request, because one with more samples
            # than slots would never be served otherwise.
            if not fits and not is_idle:
                break
            heapq.heappop(self.queue)
            rows.append(self._first_row(group, free_slots.pop(0)))
            if group.waiting:
                self.open_groups.append(group)
        for group in self.open_groups:
            # The prompt was overwritten before the last sibling got a slot, so it is prefilled again.
            # RequestGroup has no __eq__: `in` compares by object identity.
            prompt_is_lost = group not in self.prompt_of_slot
            if free_slots and prompt_is_lost:
                rows.append(self._first_row(group, free_slots.pop(0)))
        self._close_served_groups()
        if rows:
            self.sampler.put(rows)

    def _first_row(self, group: RequestGroup, slot: int) -> PutRow:
        """Starts the next sample of a group in a slot; returns the row with its prompt, to be put and prefilled."""
        rollout = self._enter(group, slot)
        # The last token is left out: decoding feeds it.
        prefill_tokens = len(rollout.tokens) - 1
        rollout.prefill_calls_left = _ceil_div(prefill_tokens, self.sampler.config.chunk)
        return self._put_row(rollout, rollout.tokens, start=0)

    def _enter(self, group: RequestGroup, slot: int) -> ActiveRollout:
        """Assigns the slot to the next waiting sample of the group; returns its rollout."""
        rollout = ActiveRollout(group, group.waiting.popleft(), slot)
        self.rollouts[slot] = rollout
        self.prompt_of_slot[slot] = group
        return rollout

    def _put_row(self, rollout: ActiveRollout, tokens: Sequence[int], start: int) -> PutRow:
        return PutRow(
            slot=rollout.slot,
            tokens=np.asarray(tokens, np.int32),
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

    def clone_siblings(self) -> list[int]:
        """Copies prefilled prompts into free slots for waiting siblings; returns the slots that remain free."""
        max_rows = self.sampler.config.put_rows
        free_slots = []
        for slot, rollout in enumerate(self.rollouts):
            if rollout is None:
                free_slots.append(slot)
        for group in self.open_groups:
            source = self._prefilled_slot(group)
            while source is not None and free_slots and group.waiting:
                rows: list[CloneRow] = []
                while free_slots and group.waiting and len(rows) < max_rows:
                    sibling = self._enter(group, free_slots.pop(0))
                    row = CloneRow(
                        slot=sibling.slot,
                        limit=sibling.turn_limit(self.context),
                        temperature=group.request.temperature,
                        key=self._noise_key(sibling),
                    )
                    rows.append(row)
                self.sampler.clone(source, rows, len(group.request.prompt))
        self._close_served_groups()
        return free_slots

    def _prefilled_slot(self, group: RequestGroup) -> int | None:
        """Returns a slot that holds the group's prompt with valid keys and values; None if there is none."""
        for slot, holder in enumerate(self.prompt_of_slot):
            if holder is group and self._is_prefilled(slot):
                return slot
        return None

    def _is_prefilled(self, slot: int) -> bool:
        rollout = self.rollouts[slot]
        # A rollout with a completed turn has decoded, so its prompt is cached; what remains to be
        # prefilled belongs to an observation.
        return rollout is None or rollout.prefill_calls_left == 0 or bool(rollout.turns)

    def _close_served_groups(self) -> None:
        self.open_groups = [group for group in self.open_groups if group.waiting]

    def prefill(self) -> None:
        """Computes the keys and values of all tokens that were put into slots."""
        rows = self.sampler.config.fill_rows
        # All rows are prefilled before any row decodes: a decode chunk takes as long for one row as for
        # all of them, so rows that still wait for their prefill would miss it.
        while True:
            pending: list[ActiveRollout] = []
            for rollout in self.rollouts:
                if rollout is not None and rollout.prefill_calls_left > 0:
                    pending.append(rollout)
            if not pending:
                return
            batch = pending[:rows]
            self.sampler.extend(self.params, [rollout.slot for rollout in batch])
            for rollout in batch:
                rollout.prefill_calls_left -= 1

    def decode(self) -> DecodeChunk:
        """Starts a decode chunk; returns device arrays without waiting for them."""
        return self.sampler.decode(self.params)

    # ---- turns -----------------------------------------------------------------------------------

    def add_observations(
        self, replies: Sequence[tuple[ActiveRollout, Int[np.ndarray, ' tokens']]]
    ) -> None:
        """Appends an observation to each rollout and begins its next turn.

        A rollout whose slot cannot hold the observation and one further token ends with 'context'.

        Args:
          replies: rollouts whose last turn has ended, with the ids of the observation.
        """
        rows: list[PutRow] = []
        for rollout, ids in replies:
            start = rollout.turn_start
            turn_ids = rollout.tokens[start:]
            retained = rollout.env.retained_tokens(turn_ids)
            if retained == turn_ids:
                # Nothing of the turn is dropped: only the observation is new.
                start = len(rollout.tokens)
                retained = []
            # An observation that does not fit ends the rollout, as in verl; it is not cut any further.
            if start + len(retained) + len(ids) >= self.context:
                self.finish(rollout, 'context')
                continue
            if start < len(rollout.tokens):
                ended = self._trajectory(rollout, 'continued', ())
                rollout.end_context(start, retained, ended)
            rollout.append(ids.tolist(), ENV, [0.0] * len(ids))
            # `put` invalidates the keys and values of the token before `start`. That token and all new ones
            # but the last are prefilled: as many as there are new tokens.
            new_tokens = len(retained) + len(ids)
            rollout.prefill_calls_left = _ceil_div(new_tokens, self.sampler.config.chunk)
            rollout.begin_turn()
            rows.append(self._put_row(rollout, rollout.tokens[start:], start))
        if rows:
            self.sampler.put(rows)

    def read_chunk(
        self,
        tokens: Int[np.ndarray, 'slots burst'],
        logp: Float[np.ndarray, 'slots burst'],
        count: Int[np.ndarray, ' slots'],
    ) -> list[tuple[ActiveRollout, ToolCall]]:
        """Appends the tokens of a decode chunk to its rollouts and ends turns; returns the tool calls to run.

        Rollouts that are complete free their slots. Refused calls get their observation at once.

        Args:
          tokens: ids; the first `count` of a row are sampled.
          logp: their log-probs.
          count: sampled tokens per row.
        """
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
            call = self._end_turn_at_stop(rollout, text)
            if call is None:
                continue
            if call.error is None:
                calls.append((rollout, call))
            else:
                refused.append((rollout, rollout.env.observation(call)))
        # Rows are rewound before the observations are put: a put begins where the rewound row ends.
        if rewound_slots:
            self.sampler.rewind(rewound_slots, rewound_lengths)
        if refused:
            self.add_observations(refused)
        return calls

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
        limit = min(rollout.turn_start + env.limits.turn_tokens, self.context)
        if not at_end_token and len(rollout.tokens) < limit:
            return
        # The end token was sampled by the policy, so it stays among the tokens; the turn's text omits it.
        text = rollout.matcher.text
        if at_end_token:
            text = text.removesuffix(env.codec.decode(rollout.tokens[-1:]))
        rollout.turns.append(Turn(text, closed=at_end_token))
        if at_end_token:
            reason = 'eos'
        elif len(rollout.tokens) >= self.context:
            reason = 'context'
        else:
            reason = 'turn_tokens'
        self.finish(rollout, reason)

    def finish(self, rollout: ActiveRollout, reason: str) -> None:
        """Stores the trajectory and frees the slot; the last sample of a request resolves its future.

        Args:
          reason: `Trajectory.finish`.
        """
        group = rollout.group
        trajectory = self._trajectory(rollout, reason, tuple(rollout.turns))
        trajectory = dataclasses.replace(trajectory, earlier=tuple(rollout.earlier))
        group.results[rollout.sample] = trajectory
        self.rollouts[rollout.slot] = None
        is_complete = all(result is not None for result in group.results)
        # The future is done already if its episode was cancelled.
        if is_complete and not group.future.done():
            group.future.set_result(group.results)

    def _trajectory(
        self, rollout: ActiveRollout, reason: str, turns: tuple[Turn, ...]
    ) -> Trajectory:
        return Trajectory(
            tokens=np.asarray(rollout.tokens, np.int32),
            source=np.asarray(rollout.source, np.int8),
            logp=np.asarray(rollout.logp, np.float32),
            turns=turns,
            finish=reason,
            weights=rollout.group.request.weights,
            version=self.version,
            identity=rollout.identity,
        )

    def abandon(self) -> None:
        """Drops all rollouts and requests, and forgets cached prompts; called at the end of every run."""
        # After an error or an interrupt rollouts may be left; their rows would decode in the next run.
        busy = [slot for slot, rollout in enumerate(self.rollouts) if rollout is not None]
        if busy:
            self.sampler.rewind(busy, [1] * len(busy))
        self.rollouts = [None] * len(self.rollouts)
        self.forget_prompts()
        self.queue = []
        self.open_groups = []


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
