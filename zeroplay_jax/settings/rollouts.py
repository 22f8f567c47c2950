"""Config fields of rollouts and their programs; `schema.Run` has them as sections."""

from __future__ import annotations

from typing import Any, Literal

from zeroplay_jax.settings.kinds import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Sizes,
)


class Sampler(Section):
    """Shapes of the rollout programs."""

    # Static shapes: every other value compiles other programs.
    slots: PositiveInt = 96
    """Concurrent rollouts per process and set of weights."""
    context: PositiveInt = 512
    """Tokens of a slot: prompt, turns and observations."""
    chunk: PositiveInt = 32
    """Prefill: tokens of a chunk; not read with page."""
    fill_rows: PositiveInt = 16
    """Prefill: chunks per call; not read with page."""
    burst: PositiveInt = 8
    """Decode steps per call."""
    page: NonNegativeInt = 0
    """Tokens of a page of the cache; 0: as long as a slot (fastest on CPUs). Pages of 16 to 128 hold more rollouts and
    share prompts ([slots and pages](concepts.md#slots-and-pages))."""
    pages: NonNegativeInt = 0
    """Pages of a process; 0: as many as the slots can fill. With fewer, waiting rollouts may be evicted."""
    token_budget: NonNegativeInt = 0
    """Required with page: tokens of a step, prefill and decode together, per process."""
    decode_buckets: Sizes = ()
    """With page: token counts of smaller steps without prefill. Log-probs then depend in the last digits on how many
    rollouts decode together."""
    attention: Literal['xla', 'used', 'ragged'] = 'xla'
    """xla: all slots at once. used: on CPUs, without page, used positions only. ragged: with page, a kernel for TPUs
    and GPUs."""


def written_tokens(rollout: Any) -> int:
    """Returns the most tokens that the policy writes in a rollout with these limits, a section `Rollout`."""
    turns_tokens = rollout.max_turns * rollout.turn_tokens
    return min(turns_tokens, rollout.response_tokens or turns_tokens)


class Rollout(Section):
    """Limits of a rollout."""

    prompt_tokens: PositiveInt = 96
    """Longest prompt; longer ones drop their task."""
    turn_tokens: PositiveInt = 64
    """Longest assistant turn."""
    response_tokens: NonNegativeInt = 0
    """Most tokens after the prompt, with observations; 0: until the slot is full."""
    observation_tokens: PositiveInt = 128
    """Longest observation; the end is cut off."""
    max_turns: PositiveInt = 5
    """Assistant turns; the last cannot call a tool."""
    drop_thinking: bool = False
    """Remove thoughts (…</think>) when their turn ends; every context becomes a training row."""
    truncated: Literal['keep', 'drop'] = 'keep'
    """Train on rollouts that ended at a limit, or drop them."""
    deterministic: bool = True
    """Wait for slow tools. False: slow calls become error observations."""
    tool_timeout: PositiveFloat = 30.0
    """Seconds from a tool call to its result if not `deterministic`, waiting for a thread included."""
    overlap: Literal['auto', 'on', 'off'] = 'auto'
    """Decode while the host reads the call before; auto: on accelerators. Rollouts are the same."""
    ahead: Literal[0, 1] = 0
    """1: rollouts of the next step use free slots, with weights one step older ([what it
    needs](concepts.md#steps-that-begin-early))."""
