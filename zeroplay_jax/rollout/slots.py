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

from zeroplay_jax.policy.transformer import Params
from zeroplay_jax.rollout.environment import Environment
from zeroplay_jax.rollout.sampler import CloneRow, PutRow, Sampler
from zeroplay_jax.rollout.slot_programs import DecodeChunk
from zeroplay_jax.rollout.tokens import StopMatcher
from zeroplay_jax.types import ENV, POLICY, PROMPT, ToolCall, Trajectory, Turn, identity_key


@dataclasses.dataclass(frozen=True)
class Request:
    """`samples` rollouts of one prompt (int32 [P]) by the weights of that name.

    `identity` names the request within the run; smaller identities are served first. Temperature 0
    is greedy decoding.
    """

    weights: str
    prompt: np.ndarray
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
        self.tokens: list[int] = [int(token) for token in request.prompt]
        self.source = [PROMPT] * len(self.tokens)
        self.logp = [0.0] * len(self.tokens)
        self.turns: list[Turn] = []
        self.earlier: list[Trajectory] = []
        self.tool_state: dict[str, dict[str, Any]] = {}
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
        prefix_source = [PROMPT if source == POLICY else source for source in self.source[:start]]
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

    # ---- admission and prefill -----------------------------------------------------------------

    def admit(self) -> None:
        """Fills free slots: first siblings of prefilled prompts, then the oldest requests."""
        free_slots = self.clone_siblings()
        rows: list[PutRow] = []
        while free_slots and self.queue:
            group = self.queue[0][2]
            reserved = sum(len(open_group.waiting) for open_group in self.open_groups)
            fits = len(free_slots) - reserved >= group.request.samples
            if not fits and (self.open_groups or self.active):
                # Its siblings would come after the prompt's keys and values were overwritten.
                break
            heapq.heappop(self.queue)
            rows.append(self._first_row(group, free_slots.pop(0)))
            if group.waiting:
                self.open_groups.append(group)
        for group in self.open_groups:
            # The prompt was overwritten before the last sibling came: prefill it once more.
            prompt_is_lost = all(holder is not group for holder in self.prompt_of_slot)
            if free_slots and prompt_is_lost:
                rows.append(self._first_row(group, free_slots.pop(0)))
        self._close_served_groups()
        if rows:
            self.sampler.put(rows)

    def _first_row(self, group: RequestGroup, slot: int) -> PutRow:
        """Starts the next sample of a group in a slot; its prompt has to be prefilled."""
        rollout = self._enter(group, slot)
        rollout.prefill_calls_left = _ceil_div(len(rollout.tokens) - 1, self.sampler.config.chunk)
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
        # again, so its number becomes part of the key.
        if rollout.earlier:
            identity = (*identity, len(rollout.earlier))
        return identity_key(self.seed, identity)

    def clone_siblings(self) -> list[int]:
        """Copies prefilled prompts into free slots for waiting samples; returns the slots left."""
        max_rows = self.sampler.config.put_rows
        free_slots = [slot for slot, rollout in enumerate(self.rollouts) if rollout is None]
        for group in self.open_groups:
            source = self._prefilled_slot(group)
            while source is not None and free_slots and group.waiting:
                rows: list[CloneRow] = []
                while free_slots and group.waiting and len(rows) < max_rows:
                    rollout = self._enter(group, free_slots.pop(0))
                    limit = rollout.turn_limit(self.context)
                    key = self._noise_key(rollout)
                    rows.append(CloneRow(rollout.slot, limit, group.request.temperature, key))
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
        while True:
            pending = [
                rollout
                for rollout in self.rollouts
                if rollout is not None and rollout.prefill_calls_left > 0
            ]
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

    def add_observations(self, replies: Sequence[tuple[ActiveRollout, np.ndarray]]) -> None:
        """Appends observations; a rollout without room for one and a further token ends."""
        rows: list[PutRow] = []
        for rollout, ids in replies:
            start = rollout.turn_start
            turn_ids = rollout.tokens[start:]
            retained = rollout.env.retained_tokens(turn_ids)
            if retained == turn_ids:
                # Nothing of the turn is dropped: only the observation is new.
                start = len(rollout.tokens)
                retained = []
            if start + len(retained) + len(ids) >= self.context:
                self.finish(rollout, 'context')
                continue
            if start < len(rollout.tokens):
                ended = self._trajectory(rollout, 'continued', ())
                rollout.end_context(start, retained, ended)
            rollout.append(ids.tolist(), ENV, [0.0] * len(ids))
            new_tokens = len(retained) + len(ids)
            rollout.prefill_calls_left = _ceil_div(new_tokens, self.sampler.config.chunk)
            rollout.begin_turn()
            rows.append(self._put_row(rollout, rollout.tokens[start:], start))
        if rows:
            self.sampler.put(rows)

    def read_chunk(
        self, tokens: np.ndarray, logp: np.ndarray, count: np.ndarray
    ) -> list[tuple[ActiveRollout, ToolCall]]:
        """Reads a decode chunk; returns the tool calls to run.

        Args:
          tokens: int32 [S, K], logp: float32 [S, K], count: int32 [S]; host arrays, the first
            `count` entries of a row are real.
        """
        calls: list[tuple[ActiveRollout, ToolCall]] = []
        refused: list[tuple[ActiveRollout, np.ndarray]] = []
        rewound: list[tuple[int, int]] = []
        for slot, rollout in enumerate(self.rollouts):
            sampled = int(count[slot])
            if rollout is None or not sampled:
                continue
            hit = rollout.matcher.push(tokens[slot, :sampled])
            kept = sampled
            if hit:
                # Tokens after the stop string are discarded; the device rewinds below.
                kept = hit[0] - (len(rollout.tokens) - rollout.turn_start)
            rollout.append(tokens[slot, :kept].tolist(), POLICY, logp[slot, :kept].tolist())
            if self.on_tokens:
                self.on_tokens(rollout.identity, rollout.tokens[len(rollout.tokens) - kept :])
            if hit:
                rewound.append((slot, len(rollout.tokens)))
                call = self._end_turn_at_stop(rollout, hit[1])
                if call is not None and call.error is None:
                    calls.append((rollout, call))
                elif call is not None:
                    refused.append((rollout, rollout.env.observation(call)))
            else:
                self._end_turn_without_stop(rollout)
        if rewound:
            self.sampler.rewind([slot for slot, _ in rewound], [length for _, length in rewound])
        if refused:
            self.add_observations(refused)
        return calls

    def _end_turn_at_stop(self, rollout: ActiveRollout, text: str) -> ToolCall | None:
        """Records a turn that a stop string ended; returns its call if the rollout continues."""
        end = rollout.env.end_turn(text)
        is_last = len(rollout.turns) + 1 >= rollout.env.limits.max_turns
        call = end.call
        if end.malformed:
            call = ToolCall('', None, error='malformed')
        if is_last and call is not None and call.error is None:
            call = None  # a valid call that is not run any more
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
        busy = [slot for slot, rollout in enumerate(self.rollouts) if rollout is not None]
        if busy:
            self.sampler.rewind(busy, [1] * len(busy))
        self.rollouts = [None] * len(self.rollouts)
        self.prompt_of_slot = [None] * len(self.prompt_of_slot)
        self.queue = []
        self.open_groups = []


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
