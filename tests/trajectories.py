"""Rollouts of a few tokens, all sampled from the policy."""

import numpy as np

from zeroplay_jax.selfplay.recipe import Recipe
from zeroplay_jax.types import POLICY, Trajectory

# Answers by asking the role 'solver' once.
ASKS_SOLVER = Recipe.__new__(Recipe)


def make_trajectory(*turns, finish='answer', identity=(0,), length=4):
    tokens = np.arange(length, dtype=np.int32)
    source = np.full(length, POLICY, np.int8)
    logp = -np.ones(length, np.float32)
    return Trajectory(tokens, source, logp, turns, finish, 'w', 0, identity)
