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
    """Static shapes of the rollout programs."""

    # Static shapes: every other value compiles other programs.
    slots: PositiveInt = 96
    """Rollouts decoded concurrently, per set of weights and process."""
    context: PositiveInt = 512
    """Tokens that a slot can hold: prompt, all turns and observations."""
    chunk: PositiveInt = 32
    """Prefill: tokens of a chunk; not read with page."""
    fill_rows: PositiveInt = 16
    """Prefill: chunks per call; a row can have several. Not read with page."""
    burst: PositiveInt = 8
    """Decode steps per call; stop strings are searched between two calls."""
    put_rows: PositiveInt = 16
    """Host to device: rows per call and data shard."""
    put_tokens: PositiveInt = 96
    """Host to device: tokens per row and call."""
    page: NonNegativeInt = 0
    """Tokens of a page of the cache; 0 or the context: a page is as long as a slot (the fastest on CPUs). Shorter pages
    (16 to 128) hold more rollouts in the same memory, siblings share their prompt, and attention reads used pages
    only; they need token_budget."""
    pages: NonNegativeInt = 0
    """Pages of the cache, over all data shards of a process; 0: as many as the slots can fill. With fewer, rollouts are
    admitted by free pages, and one that waits for a tool may be evicted and prefilled again (`evictions`)."""
    token_budget: NonNegativeInt = 0
    """With page: tokens of a step, in which prompts are prefilled while other rollouts decode, over all data shards of
    a process."""
    decode_buckets: Sizes = ()
    """Ascending numbers of tokens for which a smaller decode step is compiled; needs page. Steps without prefill take
    the smallest that suffices, which saves time when few rollouts are left. Log-probs then depend in the last digits on
    how many rollouts decode together."""
    attention: Literal['xla', 'used', 'ragged'] = 'xla'
    """xla: one product over all slots. used: without page; on CPUs every row reads its used places only, one after
    another (log-probs differ in the last digits), elsewhere as xla. ragged: with page, a kernel (JAX's on TPUs, an own
    one on GPUs)."""


def written_tokens(rollout: Any) -> int:
    """Returns the most tokens that the policy writes in a rollout with these limits, a section `Rollout`."""
    turns_tokens = rollout.max_turns * rollout.turn_tokens
    return min(turns_tokens, rollout.response_tokens or turns_tokens)


class Rollout(Section):
    """Limits of a rollout."""

    prompt_tokens: PositiveInt = 96
    """Longest prompt; a task with a longer one is dropped."""
    turn_tokens: PositiveInt = 64
    """Longest assistant turn."""
    response_tokens: NonNegativeInt = 0
    """Most tokens behind the prompt, all turns and observations; 0: as many as the slot holds."""
    observation_tokens: PositiveInt = 128
    """Longest observation; longer ones are cut at the end."""
    max_turns: PositiveInt = 5
    """Assistant turns; the last one cannot call a tool."""
    drop_thinking: bool = False
    """Thoughts (…</think>) leave the context at the end of their turn, and every context becomes a
    training row, as SCOPE's code does (Qwen3's own template drops them only before the last question)."""
    truncated: Literal['keep', 'drop'] = 'keep'
    """Whether rollouts that ended at a limit are trained on; for a penalty see reward.overlong_buffer."""
    deterministic: bool = True
    """Wait for slow tools. False: a call that takes too long becomes an error observation."""
    tool_timeout: PositiveFloat = 30.0
    """Time limit of a tool call in seconds, only without `deterministic`."""
    overlap: Literal['auto', 'on', 'off'] = 'auto'
    """Whether the host reads a decode call while the next one runs. The end of a turn is then noticed one call later.
    auto: on accelerators, where the device would wait for the host, and not on CPUs. Rollouts are the same."""
    ahead: Literal[0, 1] = 0
    """Training steps whose rollouts may begin before the current one has ended: with 1 the next step's use the slots
    that the longest rollouts leave free, and are played by weights one step older (metric `staleness`). Needs
    old_logp='trainer' and tis_cap above 0 in every trained role."""
