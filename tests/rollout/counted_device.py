"""A sampler without a model: it counts the tokens that every step would compute, and writes turns of given lengths."""

import numpy as np

from zeroplay_jax.rollout.slot_programs import DecodeChunk


class CountedDevice:
    """The interface of rollout/sampler.py; `turn_lengths(rollout)` says how long the rollout's turns are."""

    def __init__(self, config, turn_lengths):
        self.config, self.turn_lengths = config, turn_lengths
        self.shards, self.table, self.state = 1, None, None
        if config.is_paged:
            self.table = np.zeros((config.slots, config.pages_per_slot), np.int32)
        self.length, self.cached, self.limit = np.zeros((3, config.slots), int)
        self.active = np.zeros(config.slots, bool)
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

    def extend(self, params, slots):
        chunk = self.config.chunk
        self.cached[slots] = np.minimum(self.cached[slots] + chunk, self.length[slots] - 1)

    def decode(self, params):
        """Token 1 ends a turn, which the stop string finds; token 0 is text."""
        config = self.config
        tokens = np.zeros((config.slots, config.burst), np.int32)
        count = np.zeros(config.slots, int)
        for _ in range(config.burst):
            live = self.active & (self.length < self.limit)
            if not live.any():
                break
            pending = np.where(live, self.length - self.cached, 0)
            fed = self._fed(pending) if config.token_budget else pending
            self.computed += config.token_budget or config.slots
            self.used += fed.sum()
            self.cached += fed
            for slot in np.flatnonzero((fed > 0) & (fed == pending)):
                rollout = self.pool.rollouts[slot]
                turn = self.turn_lengths(rollout)[len(rollout.turns)]
                in_turn = self.length[slot] - rollout.turn_start + 1
                tokens[slot, count[slot]] = in_turn >= turn
                count[slot] += 1
                self.length[slot] += 1
                self._check_page(rollout, self.length[slot] - 1)
        logp = np.zeros(tokens.shape, np.float32)
        cached = self.cached.copy() if config.token_budget else None
        return DecodeChunk(tokens, logp, count, cached)

    def _fed(self, pending):
        """The tokens of a step with a budget: decoding rows first."""
        decoding = pending == 1
        fed = decoding & (np.cumsum(decoding) <= self.config.token_budget)
        prefill = np.where(decoding, 0, pending)
        earlier = np.cumsum(prefill) - prefill
        return fed + np.clip(self.config.token_budget - fed.sum() - earlier, 0, prefill)

    def _check_page(self, rollout, position):
        """A token is written to a page that its rollout has, and that the table names."""
        if self.table is not None:
            number = position // self.config.page
            assert self.table[rollout.slot, number] == rollout.pages.pages[number]
