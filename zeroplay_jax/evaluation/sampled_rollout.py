"""A rollout with the results of its tool calls as the policy read them, and its text."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from zeroplay_jax.rollout.environment import Environment
from zeroplay_jax.rollout.tokens import text_spans
from zeroplay_jax.types import Trajectory

# More tokens than any result has.
_UNLIMITED = 1 << 30


class Observation(NamedTuple):
    """The result of one tool call in the context of the policy.

    Attributes:
      text: what the policy read, with the tags around it; '' if nothing of it fitted into the context.
      tokens_left_out: tokens at the end of the result that it did not read.
    """

    text: str
    tokens_left_out: int


@dataclasses.dataclass(frozen=True)
class SampledRollout(Trajectory):
    """A rollout that `zeroplay_jax.sample_rollouts` returns.

    Attributes:
      observations: one for each tool call, in order.
    """

    observations: tuple[Observation, ...] = ()


def with_observations(trajectory: Trajectory, env: Environment) -> SampledRollout:
    """Returns a rollout with the observations of its calls.

    Args:
      env: the environment of the rollout.
    """
    spans = [span for span in text_spans(env.codec, trajectory) if span['source'] == 'env']
    calls = [turn.call for turn in trajectory.turns if turn.call is not None]
    observations = []
    for number, call in enumerate(calls):
        whole = env.syntax.wrap(env.codec, env.escaped(call.text), _UNLIMITED)
        text = ''
        num_read = 0
        # The result of the last call has no span if it did not fit into the slot.
        if number < len(spans):
            text = spans[number]['text'].strip()
            num_read = len(spans[number]['tokens'])
        observations.append(Observation(text, max(len(whole) - num_read, 0)))
    fields = {
        field.name: getattr(trajectory, field.name) for field in dataclasses.fields(Trajectory)
    }
    return SampledRollout(**fields, observations=tuple(observations))


def rollout_text(trajectory: Trajectory) -> str:
    """Returns the turns of the policy, and its tool calls with what it read of their results.

    Of a rollout without observations, such as one of a run, the results are whole: how much was read is not known.
    """
    observations: list[Observation] = []
    if isinstance(trajectory, SampledRollout):
        observations = list(trajectory.observations)
    lines = []
    for turn in trajectory.turns:
        lines.append(turn.text.strip())
        if turn.call is None:
            continue
        result = turn.call.text.strip()
        if observations:
            result = _observation_text(observations.pop(0))
        outcome = turn.call.error or 'ok'
        lines.append(f'  [{turn.call.tool or "call"}: {outcome}] {result}')
    tokens = f'{trajectory.policy_tokens} of {len(trajectory.tokens)} tokens written by the policy'
    lines.append(f'({trajectory.finish}; {tokens})')
    return '\n'.join(lines)


def _observation_text(observation: Observation) -> str:
    """Returns what was read of a result, and how much of it was left out."""
    if not observation.tokens_left_out:
        return observation.text
    left_out = f'[… {observation.tokens_left_out} tokens left out]'
    return f'{observation.text} {left_out}'.strip()
