"""A sampler that says what the test wants: the interface of rollout/sampler.py, with no model behind it."""

import numpy as np

from zeroplay_jax.rollout.sampler import DecodeChunk, SamplerConfig


class Speaker:
    """Answers every prompt with `says(prompt text)` and the end of turn, a burst at a time; None: it never ends."""

    def __init__(self, codec, says, slots=4, context=1024):
        self.codec, self.says = codec, says
        self.config = SamplerConfig(slots, context, 64, 4, 4, 4, 128, eos=codec.eos_ids)
        self.state, self.slots = None, [None] * slots
        self.shards, self.table, self.age = 1, None, np.zeros(slots, np.int32)

    def put(self, rows):
        for row in rows:
            assert row.start == 0, 'these speak one turn'
            self._open(row.slot, list(row.tokens), row.limit)

    def _open(self, slot, prompt, limit):
        text = self.says(self.codec.decode(np.asarray(prompt)))
        said = (
            [*self.codec.encode(text), self.codec.eos_ids[0]] if text is not None else [5] * limit
        )
        self.slots[slot] = dict(prompt=prompt, said=said, at=0, room=limit - len(prompt))

    def clone(self, source, rows, length):
        prompt = self.slots[source]['prompt'][:length]
        for row in rows:
            self._open(row.slot, prompt, row.limit)

    def extend(self, params, slots, adapter):
        """Nothing is computed."""

    def free_cache(self):
        """Nothing is held."""

    def rewind(self, slots, lengths):
        for slot in slots:
            self.slots[slot] = None

    def decode(self, params, rows, adapter):
        shape = (self.config.slots, self.config.burst)
        tokens, logp, count = (
            np.zeros(shape, np.int32),
            np.full(shape, -0.5, np.float32),
            np.zeros(shape[0], np.int32),
        )
        for slot, speech in enumerate(self.slots):
            if speech is not None:
                piece = speech['said'][: speech['room']][speech['at'] : speech['at'] + shape[1]]
                speech['at'] += len(piece)
                tokens[slot, : len(piece)], count[slot] = piece, len(piece)
        return DecodeChunk(tokens, logp, count)
