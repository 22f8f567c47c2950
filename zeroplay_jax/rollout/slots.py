"""The slots of one set of weights: which rollout is in which slot, and what the host knows about it.

Everything here happens between two device calls. Results are a function of the request alone (see
rollout/slot_programs.py), so the order in which slots serve requests changes nothing but time.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.rollout.environment import Environment
from zeroplay_jax.rollout.sampler import CloneRow, PutRow, Sampler
from zeroplay_jax.rollout.slot_programs import DecodeChunk
from zeroplay_jax.rollout.tokens import StopMatcher
from zeroplay_jax.types import ENV, POLICY, PROMPT, ToolCall, Trajectory, Turn, identity_key


@dataclasses.dataclass(frozen=True)
class Request:
    """Rollouts of one prompt.

    Attributes:
      weights: name of the weights.
      prompt: int32 ids.
      identity: names the request within the run; smaller identities are served first.
      env: tools and limits.
      samples: number of rollouts.
      temperature: 0 is greedy decoding.
    """

    weights: str
    prompt: Int[np.ndarray, ' tokens']
    identity: tuple[int, ...]
    env: Environment
    samples: int = 1
    temperature: float = 1.0


class RequestGroup:
    """A request in progress: its samples share the keys and values of the prompt."""

    def __init__(self, request: Request, future: asyncio.Future):
        self.request = request
        self.future = future
        self.waiting = collections.deque(range(request.samples))
        self.results: list[Trajectory | None] = [None] * request.samples


class ActiveRollout:
    """One sample in a slot: the host's copy of the device state, and the turn in progress."""

    def __init__(self, group: RequestGroup, sample: int, slot: int):
        request = group.request
        self.group = group
        self.sample = sample
        self.slot = slot
        self.env = request.env
        self.identity = (*request.identity, sample)
        # The author and the log-prob of every token are recorded as it comes: nothing is derived from
        # text afterwards.
        self.tokens: list[int] = [int(token) for token in request.prompt]
        self.source = [PROMPT] * len(self.tokens)
        self.logp = [0.0] * len(self.tokens)
        self.turns: list[Turn] = []
        self.earlier: list[Trajectory] = []
        self.tool_state: dict[str, dict[str, Any]] = {}
        # The host's count of what the device still has to prefill; reading the device would wait for it.
        self.prefill_calls_left = 0
        self.begin_turn()

    def begin_turn(self) -> None:
        """Starts to match stop strings at the next token."""
        self.matcher = StopMatcher(self.env.codec.token_bytes, self.env.stops)
        self.turn_start = len(self.tokens)

    def turn_limit(self, context: int) -> int:
        """Length at which the turn in progress is cut."""
        return min(len(self.tokens) + self.env.limits.turn_tokens, context)

    def append(self, ids: Sequence[int], source: int, logp: Sequence[float]) -> None:
        """Adds tokens of one author."""
        self.tokens += ids
        self.source += [source] * len(ids)
        self.logp += logp

    def end_context(self, start: int, retained: list[int], ended: Trajectory) -> None:
        """Starts a new context: the first `start` tokens and `retained` of the last turn.

        Policy tokens of the old context become PROMPT, so no token is trained on twice.
        """
        self.earlier.append(ended)
        prefix_source = []
        for source in self.source[:start]:
            prefix_source.append(PROMPT if source == POLICY else source)
        self.tokens = self.tokens[:start] + retained
        self.source = prefix_source + [PROMPT] * len(retained)
        self.logp = [0.0] * len(self.tokens)


class SlotPool:
    """The slots of one set of weights, and the requests waiting for one."""

    def __init__(self, sampler: Sampler, seed: int):
        self.sampler = sampler
        self.seed = seed
        self.params: Params = {}
        self.version = 0
        slots = sampler.config.slots
        self.rollouts: list[ActiveRollout | None] = [None] * slots
        # The group whose prompt is in the first positions of a slot, also after its rollout ended.
        self.prompt_of_slot: list[RequestGroup | None] = [None] * slots
        # A heap of (identity, number, group).
        self.queue: list[tuple[tuple[int, ...], int, RequestGroup]] = []
        # Admitted groups that have samples still waiting for a slot.
        self.open_groups: list[RequestGroup] = []
        # Called with identity and new policy ids after a decode chunk, for live display.
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
        """Declares all cached prompts invalid."""
        self.prompt_of_slot = [None] * len(self.prompt_of_slot)

    # ---- admission and prefill -----------------------------------------------------------------

    def admit(self) -> None:
        """Fills free slots: first siblings of prefilled prompts, then the oldest requests."""
        free_slots = self.clone_siblings()
        rows: list[PutRow] = []
        while free_slots and self.queue:
            _, _, group = self.queue[0]
            reserved = sum(len(open_group.waiting) for open_group in self.open_groups)
            fits = len(free_slots) - reserved >= group.request.samples
            is_idle = not self.open_groups and not self.active
            # Samples that come later would find the prompt's keys and values overwritten. Only an idle
            # pool admits a request with more samples than slots, or it would never be served.
            if not fits and not is_idle:
                break
            heapq.heappop(self.queue)
            rows.append(self._first_row(group, free_slots.pop(0)))
            if group.waiting:
                self.open_groups.append(group)
        for group in self.open_groups:
            # The prompt was overwritten before the last sibling came: prefill it once more.
            # RequestGroup has no __eq__: `in` compares by identity.
            prompt_is_lost = group not in self.prompt_of_slot
            if free_slots and prompt_is_lost:
                rows.append(self._first_row(group, free_slots.pop(0)))
        self._close_served_groups()
        if rows:
            self.sampler.put(rows)

    def _first_row(self, group: RequestGroup, slot: int) -> PutRow:
        """Starts the next sample of a group in a slot; its prompt has to be prefilled."""
        rollout = self._enter(group, slot)
        # Without the last token, which decoding feeds.
        prefill_tokens = len(rollout.tokens) - 1
        rollout.prefill_calls_left = _ceil_div(prefill_tokens, self.sampler.config.chunk)
        return self._put_row(rollout, rollout.tokens, start=0)

    def _enter(self, group: RequestGroup, slot: int) -> ActiveRollout:
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
        identity = rollout.identity
        # Noise is a function of key and position. A context that was cut reaches the same positions
        # again, so its number becomes part of the key; -1 separates it, because the identity of
        # another request may end in the same numbers.
        if rollout.earlier:
            identity = (*identity, -1, len(rollout.earlier))
        return identity_key(self.seed, identity)

    def clone_siblings(self) -> list[int]:
        """Copies prefilled prompts into free slots for waiting samples; returns the slots left."""
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
        for slot, holder in enumerate(self.prompt_of_slot):
            if holder is group and self._is_prefilled(slot):
                return slot
        return None

    def _is_prefilled(self, slot: int) -> bool:
        rollout = self.rollouts[slot]
        # After the first turn the prompt is cached, whatever of an observation is not.
        return rollout is None or rollout.prefill_calls_left == 0 or bool(rollout.turns)

    def _close_served_groups(self) -> None:
        self.open_groups = [group for group in self.open_groups if group.waiting]

    def prefill(self) -> None:
        """Computes keys and values of all tokens that were put."""
        rows = self.sampler.config.fill_rows
        # To the end, before anything decodes: a decode chunk takes equally long for one row and for all
        # of them, so rows that wait for their prefill would waste it.
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
        """Appends observations; a rollout whose slot cannot hold one and a further token ends."""
        rows: list[PutRow] = []
        for rollout, ids in replies:
            start = rollout.turn_start
            turn_ids = rollout.tokens[start:]
            retained = rollout.env.retained_tokens(turn_ids)
            if retained == turn_ids:
                # Nothing of the turn is dropped: only the observation is new.
                start = len(rollout.tokens)
                retained = []
            # As in verl, an observation that does not fit ends the rollout; it is not cut any further.
            if start + len(retained) + len(ids) >= self.context:
                self.finish(rollout, 'context')
                continue
            if start < len(rollout.tokens):
                ended = self._trajectory(rollout, 'continued', ())
                rollout.end_context(start, retained, ended)
            rollout.append(ids.tolist(), ENV, [0.0] * len(ids))
            # No -1 here: the token before `start` was sampled last and has no keys and values yet.
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
        """Reads a decode chunk; returns the tool calls to run.

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
        # Before the observations: a put begins where the rewound row ends.
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
        ids = tokens.tolist()
        rollout.append(ids, POLICY, logp.tolist())
        if self.on_tokens:
            self.on_tokens(rollout.identity, ids)

    def _end_turn_at_stop(self, rollout: ActiveRollout, text: str) -> ToolCall | None:
        """Records a turn that a stop string ended; returns its call if the rollout continues."""
        end = rollout.env.end_turn(text)
        is_last = len(rollout.turns) + 1 >= rollout.env.limits.max_turns
        call = end.call
        if end.malformed:
            call = ToolCall('', None, error='malformed')
        # A valid call of the last turn is not run: nobody would read its result. It is not recorded
        # either, or metrics and rewards would count a search that never happened.
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
        """Ends the rollout if its turn ran into an end token or out of tokens."""
        env = rollout.env
        at_end_token = rollout.tokens[-1] in env.codec.eos_ids
        limit = min(rollout.turn_start + env.limits.turn_tokens, self.context)
        if not at_end_token and len(rollout.tokens) < limit:
            return
        # The end token belongs to the tokens, as part of what the policy sampled, but not to the text.
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
        """Frees the slot; the last sample of a request resolves its future."""
        group = rollout.group
        trajectory = self._trajectory(rollout, reason, tuple(rollout.turns))
        trajectory = dataclasses.replace(trajectory, earlier=tuple(rollout.earlier))
        group.results[rollout.sample] = trajectory
        self.rollouts[rollout.slot] = None
        is_complete = all(result is not None for result in group.results)
        # The future is cancelled when its episode was.
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
        """Drops all rollouts and requests, after an error or an interrupt."""
        # Their rows would otherwise decode along with the next run's.
        busy = [slot for slot, rollout in enumerate(self.rollouts) if rollout is not None]
        if busy:
            self.sampler.rewind(busy, [1] * len(busy))
        self.rollouts = [None] * len(self.rollouts)
        self.forget_prompts()
        self.queue = []
        self.open_groups = []


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
