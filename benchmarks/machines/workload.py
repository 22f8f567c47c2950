"""Workloads of the simulator: lengths of rollouts, latencies of tools, and the steps of the papers' configs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.machines.engines import Episode, Group

# Shares of rollouts with 1, 2, … turns, as measured in the quickstart.
TURNS = (0.0, 0.46, 0.25, 0.163, 0.127)
# Written tokens of a turn are lognormal with this standard deviation of the logarithm.
SPREAD = 0.6


@dataclasses.dataclass(frozen=True)
class Workload:
    """Distribution of the rollouts of one step.

    Attributes:
      groups: prompts.
      samples: rollouts per prompt.
      prompt: mean tokens of a prompt, which vary by ± 20 %.
      written: mean tokens that a turn writes.
      observed: least and most tokens of an observation.
      turns: shares of rollouts with 1, 2, … turns.
      turn_tokens: most tokens of a turn.
      latency: least and most seconds of a tool call; lognormal between them.
    """

    groups: int = 256
    samples: int = 5
    prompt: int = 250
    written: int = 90
    observed: tuple[int, int] = (400, 600)
    turns: tuple[float, ...] = TURNS
    turn_tokens: int = 256
    latency: tuple[float, float] = (0.05, 0.3)

    def draw(self, seed: int) -> list[Group]:
        """Returns the groups of a step with random lengths."""
        rng = np.random.default_rng(seed)
        shares = np.array(self.turns) / sum(self.turns)
        # The mean of a lognormal variable exceeds its median.
        median = math.log(self.written) - SPREAD**2 / 2
        low = int(self.prompt * 0.8)
        high = int(self.prompt * 1.2)
        groups = []
        for _ in range(self.groups):
            prompt = int(rng.integers(low, max(high, low + 1)))
            episodes = []
            for _ in range(self.samples):
                count = 1 + int(rng.choice(len(shares), p=shares))
                written = rng.lognormal(median, SPREAD, count).astype(int) + 4
                written = np.minimum(written, self.turn_tokens)
                observed = rng.integers(self.observed[0], self.observed[1] + 1, count)
                observed[-1] = 0
                episodes.append(Episode(tuple(zip(written.tolist(), observed.tolist()))))
            groups.append(Group(prompt, tuple(episodes)))
        return groups

    def latencies(self, seed: tuple[int, ...]) -> Callable[[], float]:
        """Returns a function that draws the seconds of one tool call."""
        rng = np.random.default_rng(seed)
        low, high = self.latency
        if low == high:
            return functools.partial(float, low)
        mean = math.log(low * high) / 2
        # The bounds are two standard deviations away from the median.
        deviation = math.log(high / low) / 4

        def draw() -> float:
            return float(np.clip(rng.lognormal(mean, deviation), low, high))

        return draw


def tokens(groups: list[Group]) -> tuple[int, int, int]:
    """Returns the tokens of prompts (one per rollout), of turns and of observations."""
    prompts = written = read = 0
    for group in groups:
        prompts += group.prompt * len(group.episodes)
        written += sum(episode.written for episode in group.episodes)
        read += sum(episode.read for episode in group.episodes)
    return prompts, written, read


@dataclasses.dataclass(frozen=True)
class Part:
    """Rollouts of a run that are alike; parts are played one after the other.

    Attributes:
      groups, samples: their numbers in one play.
      prompt, written: mean tokens of prompt and turn; None for those of the config.
      turns: number of turns; None for the config's distribution.
      trained: whether the step's update reads them.
      scored: tokens per rollout that a reference, a teacher or `log_probs` reads beside the update, in tokens of the
        rollout.
      extra_scored: further tokens that it reads per rollout.
      repeat: how often the rollouts are played; one play stands for all.
    """

    groups: int
    samples: int
    prompt: int | None = None
    written: int | None = None
    turns: int | None = None
    trained: bool = False
    scored: float = 0.0
    extra_scored: int = 0
    repeat: float = 1


def _self_play(config: Any) -> tuple[Part, ...]:
    """Proposals with attempts, the generation of questions, and answers."""
    proposer, pool, solver = config.proposer, config.pool, config.solver
    iterations = config.schedule.iterations
    trained = proposer.train_iterations if proposer.train_iterations >= 0 else iterations
    proposer_steps = proposer.steps * min(trained, iterations)
    solver_steps = solver.steps * iterations
    proposals = proposer.batch * proposer.samples
    documents, generations = solver.batch, solver_steps
    if pool.batches:
        documents, generations = pool.batch, pool.batches * iterations
    # A teacher reads 2,048 tokens in place of a prompt of 512.
    has_teacher = bool(solver.get('distill_top_k'))
    answers = Part(solver.batch, solver.samples, repeat=solver_steps, trained=True)
    if has_teacher:
        answers = dataclasses.replace(answers, scored=1.0, extra_scored=1536)
    parts = [
        Part(proposer.batch, proposer.samples, repeat=proposer_steps, trained=True),
        Part(proposals, config.reward.solves, repeat=proposer_steps),
        Part(documents, pool.samples, repeat=generations),
        answers,
    ]
    if pool.measure:
        parts.append(Part(documents, pool.measure, repeat=generations))
    return tuple(parts)


def _ssp(config: Any) -> tuple[Part, ...]:
    """Proposals, each with a check, and answers."""
    proposer, solver = config.proposer, config.solver
    steps = solver.steps * config.schedule.iterations
    checks = proposer.batch * proposer.samples
    prompt = min(config.rollout.prompt_tokens, 5632)
    return (
        Part(proposer.batch, proposer.samples, repeat=steps, trained=True),
        Part(checks, 1, repeat=steps, prompt=prompt, written=256, turns=1),
        Part(solver.batch, solver.samples, repeat=steps, trained=True, scored=1.0),
    )


def _dspo(config: Any) -> tuple[Part, ...]:
    """Answers; the filter keeps half of the questions, so that twice as many are sampled."""
    batch, samples = config.solver.batch, config.solver.samples
    steps = config.solver.steps * config.schedule.iterations
    parts = [Part(batch, samples, repeat=steps, trained=True, scored=1.0)]
    if config.solver.filter_groups:
        parts.append(Part(batch, samples, repeat=steps))
    return tuple(parts)


# Recipe → what a run with a config of it samples and trains.
RUNS: dict[str, Callable[[Any], tuple[Part, ...]]] = {
    'drzero': _self_play,
    'piplay': _self_play,
    'ssp': _ssp,
    'dspo': _dspo,
}


def from_config(
    config: Any, latency: tuple[float, float]
) -> tuple[Workload, tuple[Part, ...] | None]:
    """Returns the workload of one solver step of a config, and all rollouts of its run; None where they are not known.

    A prompt has 512 tokens, or fewer if `rollout.prompt_tokens` is below that; a turn writes half of
    `rollout.turn_tokens`; observations are full.
    """
    rollout = config.rollout
    limits = min(len(TURNS), rollout.max_turns)
    workload = Workload(
        groups=config.solver.batch,
        samples=config.solver.samples,
        prompt=min(rollout.prompt_tokens, 512),
        written=rollout.turn_tokens // 2,
        observed=(rollout.observation_tokens, rollout.observation_tokens),
        turns=TURNS[:limits] if limits > 1 else (1.0,),
        turn_tokens=rollout.turn_tokens,
        latency=latency,
    )
    parts = RUNS[config.recipe](config) if config.recipe in RUNS else None
    return workload, parts


def part_workload(workload: Workload, part: Part) -> Workload:
    """Returns the workload of a part."""
    fields: dict[str, Any] = dict(groups=part.groups, samples=part.samples)
    if part.prompt is not None:
        fields['prompt'] = part.prompt
    if part.written is not None:
        fields['written'] = part.written
        fields['turn_tokens'] = max(2 * part.written, workload.turn_tokens)
    if part.turns is not None:
        fields['turns'] = (0.0,) * (part.turns - 1) + (1.0,)
    return dataclasses.replace(workload, **fields)
