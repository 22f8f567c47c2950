"""A table at which everybody plays what the test says, and the trajectories to say it with."""

import numpy as np

from zeroplay_jax.runtime.hosts import Hosts
from zeroplay_jax.types import POLICY, Trajectory, Turn


def trajectory(*turns, finish='answer'):
    n = 4
    source = np.full(n, POLICY, np.int8)
    return Trajectory(
        np.arange(n, dtype=np.int32), source, -np.ones(n, np.float32), turns, finish, 'w', 0, (0,)
    )


def final(finish='answer', **tags):
    """One turn with these tags."""
    text = '<think> so</think>' + ''.join(f'<{tag}> {value}</{tag}>' for tag, value in tags.items())
    return trajectory(Turn(text), finish=finish)


def searching(*searches, **tags):
    """Searches as (query, passages found), then a turn with these tags."""
    looks = [
        Turn(f'<think> t</think><search> {q}</search>', (q,), (tuple(found),))
        for q, found in searches
    ]
    return trajectory(*looks, *final(**tags).turns)


class Codec:
    def encode_plain(self, text):
        return text.split()


class Player:
    def __init__(self, prompt_tokens=10_000):
        self.prompt_tokens, self.env = prompt_tokens, self
        self.codec = Codec()


class Table:
    """Plays what it is told to, per role in turn or by a function of the fields; remembers who was asked what."""

    def __init__(self, judge=None, **plays):
        self.plays = {k: v if callable(v) else list(v) for k, v in plays.items()}
        self.asked, self.judge, self.roles = [], judge, {'solver': Player(), 'checker': Player()}
        self.hosts = Hosts()

    def prompt(self, role, prompt='', **fields):
        return ' '.join(map(str, fields.values())).split()

    async def ask(self, role, identity, samples=1, temperature=None, prompt='', **fields):
        self.asked.append((role, tuple(identity), samples, fields))
        if callable(self.plays[role]):
            return [self.plays[role](fields) for _ in range(samples)]
        out, self.plays[role] = self.plays[role][:samples], self.plays[role][samples:]
        assert len(out) == samples, f'{role} was asked once too often'
        return out
