"""A sampler without a model: it counts the tokens that every step would compute, and writes turns of given lengths."""

import functools
import types

import jax
import numpy as np

from zeroplay_jax.rollout import token_steps
from zeroplay_jax.rollout.environment import TurnEnd
from zeroplay_jax.rollout.sampler import MOST_ENDS
from zeroplay_jax.rollout.slot_state import DECODE, REST, DecodeChunk
from zeroplay_jax.types import ToolCall


@functools.partial(jax.jit, static_argnums=0)
def fed_tokens(config, length, cached, limit, status, age):
    state = types.SimpleNamespace(length=length, cached=cached, limit=limit, status=status)
    fed = token_steps.tokens_of_budget(config, state, age)
    return fed.single + fed.chunk


class _Codec:
    token_bytes = [b'x', b'!']
    eos_ids = ()


class CountedRole:
    """A role on such a device, whose turns end with a call."""

    stops = ('!',)
    tools = {}
    codec = _Codec()
    limits = types.SimpleNamespace(max_turns=6, turn_tokens=256, response_tokens=0)

    def call(self):
        return ToolCall('search', {})

    def retained_tokens(self, ids):
        return ids

    def read_turn(self, text):
        assert text.endswith('!')
        return TurnEnd(self.call())


class CountedDevice:
    """The interface of rollout/sampler.py; `turn_lengths(rollout)` says how long the rollout's turns are."""

    def __init__(self, config, turn_lengths, shards=1):
        self.config, self.turn_lengths = config, turn_lengths
        self.shards, self.table, self.state = shards, None, None
        self.choices = self.truncation = None
        self.has_states = False
        self.age = np.zeros(config.slots, np.int32)
        self.ends = np.zeros((config.slots, MOST_ENDS), np.int32)
        if config.is_paged:
            self.table = np.zeros((config.slots, config.pages_per_slot), np.int32)
        self.length, self.cached, self.limit = np.zeros((3, config.slots), int)
        self.active = np.zeros(config.slots, bool)
        # Decode calls since the rollout of a slot began its turn or sampled last.
        self.waits, self.longest_wait = np.zeros(config.slots, int), 0
        self.computed = self.used = 0  # tokens of decode steps, idle ones included and not

    def put(self, rows):
        for row in rows:
            self.cached[row.slot] = max(row.start - 1, 0)
            self._begin(row, row.start + len(row.tokens))

    def clone(self, rows):
        for row in rows:
            self.cached[row.slot] = row.length - 1
            self._begin(row, row.length)

    def _begin(self, row, length):
        self.length[row.slot], self.limit[row.slot] = length, row.limit
        self.active[row.slot] = True

    def rewind(self, slots, lengths):
        for slot, length in zip(slots, lengths):
            self.length[slot] = length
            self.cached[slot] = min(self.cached[slot], length - 1)
            self.active[slot] = False

    def extend(self, params, slots, adapter):
        chunk = self.config.chunk
        self.cached[slots] = np.minimum(self.cached[slots] + chunk, self.length[slots] - 1)

    def decode(self, params, rows, adapter):
        """Token 1 ends a turn, which the stop string finds; token 0 is text."""
        config = self.config
        tokens = np.zeros((config.slots, config.burst), np.int32)
        count = np.zeros(config.slots, int)
        self.waits = np.where(self.active, self.waits + 1, 0)
        for _ in range(config.burst):
            live = self.active & (self.length < self.limit)
            if not live.any():
                break
            pending = np.where(live, self.length - self.cached, 0)
            fed = self._fed() if config.is_paged else pending
            self.computed += config.token_budget or config.slots
            self.used += fed.sum()
            self.cached += fed
            for slot in np.flatnonzero((fed > 0) & (fed == pending)):
                rollout = self.pool.rollouts[slot]
                turn = self.turn_lengths(rollout)[len(rollout.turns)]
                in_turn = self.length[slot] - rollout.turn_start + 1
                tokens[slot, count[slot]] = in_turn >= turn
                count[slot] += 1
                self.waits[slot] = 0
                self.length[slot] += 1
                self._check_page(rollout, self.length[slot] - 1)
        self.longest_wait = max(self.longest_wait, self.waits.max())
        logp = np.zeros(tokens.shape, np.float32)
        cached = self.cached.copy() if config.is_paged else None
        return DecodeChunk(tokens, logp, count, cached)

    def _fed(self):
        """The tokens of a step with a budget, by the rule of the device."""
        fields = (self.length, self.cached, self.limit, np.where(self.active, DECODE, REST))
        return np.asarray(fed_tokens(self.config, *fields, self.age))

    def _check_page(self, rollout, position):
        """A token is written to a page that its rollout has, and that the table names."""
        if self.table is not None:
            number = position // self.config.page
            assert self.table[rollout.slot, number] == rollout.pages.pages[number]
