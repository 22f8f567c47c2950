"""Adapters, rows and a sampler's loop that several tests of policies share."""

import jax
import numpy as np

from zeroplay_jax.policy import adapters
from zeroplay_jax.rollout.sampler import FILL
from zeroplay_jax.settings.schema import LINEARS


def equal(ours, theirs):
    """Checks that two trees have the same numbers."""
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def copy_of(folder, copy):
    """The files of a folder in another one, which is returned."""
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def adapter_of(base, linears=LINEARS, seed=0, name='role'):
    """An adapter of rank 3 whose product is not zero."""
    adapter = adapters.init(base, linears, 3, seed, name)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype('f'), adapter)


def packed(model, rows=4, length=20):
    """tokens, positions, segment int32 [rows, length]: one segment a row."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab_size, (rows, length)).astype(np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    return tokens, positions, np.ones_like(tokens)


def fill_and_decode(sampler, params, goal):
    """Runs the programs until slot s holds goal[s] tokens; returns what was sampled, in order, with log-probs."""
    tokens, logp = ([[] for _ in goal] for _ in range(2))
    while True:
        status, length = np.asarray(sampler.state.status), np.asarray(sampler.state.length)
        fill = np.flatnonzero(status == FILL).tolist()
        if fill:
            sampler.extend(params, fill)
        elif (length < goal).any():
            burst = sampler.decode(params)
            for s, n in enumerate(np.asarray(burst.count)):
                tokens[s] += np.asarray(burst.tokens)[s, :n].tolist()
                logp[s] += np.asarray(burst.logp)[s, :n].tolist()
        else:
            return tokens, logp
