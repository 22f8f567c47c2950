"""A sampler that says what the test wants: the interface of rollout/sampler.py, with no model behind it."""

import numpy as np

from zeroplay_jax.rollout.sampler import MOST_ENDS, DecodeChunk, SamplerConfig


class Speaker:
    """Answers what is put into a slot with `says(its text)` and the end of turn; None: it never ends."""

    def __init__(self, codec, says, config=None):
        self.codec, self.says = codec, says
        self.config = config or SamplerConfig(4, 1024, 64, 4, 4, 4, 128, eos=codec.eos_ids)
        slots = self.config.slots
        self.state, self.slots = None, [[] for _ in range(slots)]
        self.choices = self.truncation = None
        self.has_states = False
        self.shards, self.table, self.age = 1, None, np.zeros(slots, np.int32)
        self.ends = np.zeros((slots, MOST_ENDS), np.int32)

    def put(self, rows):
        for row in rows:
            text = self.says(self.codec.decode(np.asarray(row.tokens)))
            length = row.limit - row.start - len(row.tokens)
            reply = [5] * length
            if text is not None:
                reply = [*self.codec.encode(text), self.codec.eos_ids[0]]
            self.slots[row.slot] = reply[:length]

    def extend(self, params, slots, adapter):
        """Nothing is computed."""

    def free_cache(self):
        """Nothing is held."""

    def rewind(self, slots, lengths):
        for slot in slots:
            self.slots[slot] = []

    def decode(self, params, rows, adapter):
        shape = (self.config.slots, self.config.burst)
        tokens, count = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
        for slot, reply in enumerate(self.slots):
            piece, self.slots[slot] = reply[: shape[1]], reply[shape[1] :]
            tokens[slot, : len(piece)], count[slot] = piece, len(piece)
        return DecodeChunk(tokens, np.full(shape, -0.5, np.float32), count)
