"""Packed training batches of random demonstrations."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from tools.checkpoints.demo import Episode, Role, render
from tools.checkpoints.library import Library
from tools.checkpoints.stages import Stage
from zeroplay_jax.mini import world
from zeroplay_jax.mini.names import pick
from zeroplay_jax.rollout.tokens import Codec
from zeroplay_jax.types import POLICY

Batch = dict[str, Int[np.ndarray, 'rows tokens']]
# Episodes that do not fit into a batch before it counts as full.
_MAX_MISSES = 3
# The arrays that the transformer and the loss read.
BATCH_FIELDS = ('tokens', 'positions', 'segment', 'policy')


def libraries(seed: int, split: str, count: int, worlds: int) -> Iterator[Library]:
    """Yields libraries to draw episodes from, each with randomly chosen worlds and its own deal of facts.

    Args:
      seed: seed of the choice.
      split: 'train' or 'evaluation'.
      count: number of libraries.
      worlds: worlds per library, at most as many as the split has.
    """
    # A world may occur in several libraries: only its names repeat, because its facts depend on the deal as well.
    available = world.worlds_available(split)
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        world_seeds = rng.choice(available, size=min(worlds, available), replace=False)
        # Deal 0 holds the facts of self-play and evaluation, which the checkpoints must not have seen.
        yield Library(world_seeds.tolist(), split, deal=1 + i)


def episodes(
    stage: Stage,
    roles: Mapping[str, Role],
    materials: Sequence[Any],
    codec: Codec,
    seed: int,
    step: int,
) -> Iterator[Episode]:
    """Yields one step's random episodes, without end.

    Args:
      stage: gives the shares of the roles, and the greatest lengths of an episode and a search result.
      roles: the roles by name; their own shares apply where `stage.shares` is empty.
      materials: data from which roles write episodes, such as `Library` or `english_texts.Texts`; one is drawn
        per episode.
      codec: tokenises the episodes.
      seed: seed of the training run.
      step: step within the stage.
    """
    # A stream per step, so that a batch does not depend on how many episodes earlier batches skipped.
    # Not hash(): Python salts it, so it differs between processes.
    stage_key = zlib.crc32(stage.name.encode())
    rng = np.random.default_rng([seed, stage_key, step])
    role_shares = stage.shares or {name: role.share for name, role in roles.items()}
    names = list(role_shares)
    shares = np.array(list(role_shares.values()))
    probabilities = shares / shares.sum()
    while True:
        role = roles[names[rng.choice(len(names), p=probabilities)]]
        demo = role.write(pick(rng, materials), rng)
        episode = render(codec, demo, stage.observation_tokens)
        # Longer episodes are skipped, not cut: a cut one would end without an answer.
        if len(episode.tokens) <= stage.tokens:
            yield episode


def pack(stage: Stage, stream: Iterator[Episode]) -> Batch:
    """Packs whole episodes into a batch, each into the first row with enough space.

    Args:
      stage: gives rows and tokens per row.
      stream: endless episodes, none longer than a row. One that fits into no row is dropped; after three of these the
        batch counts as full.

    Returns:
      int32 arrays [rows, tokens]: 'tokens', 'positions' within the episode, 'segment' (number of the episode in the
      row from 1, or 0 for padding) and 'policy' (1 for the policy's tokens).
    """
    batch = {field: np.zeros((stage.rows, stage.tokens), np.int32) for field in BATCH_FIELDS}
    used_tokens = [0] * stage.rows
    # Three misses rather than one, because a shorter episode may still fit.
    misses = 0
    while misses < _MAX_MISSES:
        episode = next(stream)
        length = len(episode.tokens)
        # Most episodes are much shorter than a row, so first fit leaves little padding.
        fitting = [row for row, used in enumerate(used_tokens) if used + length <= stage.tokens]
        if not fitting:
            misses += 1
            continue
        row = fitting[0]
        columns = slice(used_tokens[row], used_tokens[row] + length)
        batch['tokens'][row, columns] = episode.tokens
        batch['positions'][row, columns] = np.arange(length)
        batch['segment'][row, columns] = batch['segment'][row].max() + 1
        batch['policy'][row, columns] = episode.sources == POLICY
        used_tokens[row] += length
    return batch
